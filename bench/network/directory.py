"""Rows about finding blocks: a long prefix located in Redis, and leased from the node with it."""

from __future__ import annotations

import contextlib
import time
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from tiffin.kvstore.client.client import Client
from tiffin.kvstore.client.pool.remote.peer import Peer
from tiffin.kvstore.credentials import Credentials
from tiffin.kvstore.directory import open_directory
from tiffin.kvstore.errors import NodeUnavailable
from tiffin.kvstore.extras import need
from tiffin.kvstore.node.core import messages

from ..store.rows import MILLISECONDS, Row, Side, Target, interleave, single, times
from ..store.setting import prefix_of, room_for, schema_of
from .setting import redis_server, remote_node

if TYPE_CHECKING:
    from collections.abc import Callable

    import redis

    from tiffin.kvstore.directory.base import Directory
    from tiffin.kvstore.format.keys import Prefix

    from .setting import Setting

_TIMEOUT_S = 10.0
_PUBLISHED_S = 30.0
_WARM_CALLS = 50
_COUNTED_CALLS = 200


class _Locator:
    """Locates and leases all blocks of a prefix; `release` ends the leases."""

    def __init__(self, directory: Directory, peer: Peer, number: int, prefix: Prefix) -> None:
        self._directory = directory
        self._peer = peer
        self._number = number
        self._prefix = prefix
        self._lease = 0

    def located(self) -> bool:
        """Whether the directory lists the node for each block."""
        return self._directory.locate(self._prefix.keys) == [(self._number,)] * len(self._prefix)

    def __call__(self) -> None:
        """Locate the blocks, and lease them from the node."""
        assert self.located()
        request = messages.Lease(0, self._prefix.key_bytes, _TIMEOUT_S)
        reply = self._peer.call(request, _TIMEOUT_S)
        assert len(reply.offsets) == len(self._prefix), reply
        self._lease = reply.lease

    def release(self) -> None:
        """End the last leases."""
        self._peer.post(messages.Release(0, self._lease))


def locate(setting: Setting) -> list[Row]:
    """Find a prefix in Redis and lease it; and the number of requests to Redis. Raises Missing,
    MissingExtra."""
    need("the directory", "redis")
    import redis

    schema = schema_of(setting.sizes.small_block_bytes)
    prefix = prefix_of(schema, setting.sizes.prefix_blocks)
    setting.tell(f"{len(prefix)} blocks")
    dram_bytes = room_for(schema, len(prefix))
    with (
        redis_server() as url,
        remote_node(dram_bytes, ["--directory", url]) as node,
        contextlib.closing(open_directory(f"{url}?timeout={_TIMEOUT_S:g}")) as found,
        contextlib.closing(Peer(node.address, Credentials(), "bench")) as peer,
        redis.Redis.from_url(url) as server,
    ):
        _await(lambda: bool(found.nodes()), "register in the directory")
        _put(url, prefix)
        locator = _Locator(found, peer, min(found.nodes()), prefix)
        _await(locator.located, "publish its blocks")
        return _rows(setting, server, locator, len(prefix))


def _rows(setting: Setting, server: redis.Redis, locator: _Locator, blocks: int) -> list[Row]:
    plain = partial(server.execute_command, "MGET", *(f"bench:{i:032}" for i in range(blocks)))
    sides = [Side(plain), Side(locator, locator.release)]
    for side in sides:
        for _ in range(_WARM_CALLS):
            side.action()
            side.reset()
    sizes = setting.sizes
    limit, found = interleave(sides, rounds=sizes.rounds, batch=sizes.calls)
    asked = _reads_of(server, locator)
    return [
        Row(
            name="locate-and-lease",
            what=f"locate {blocks} blocks in Redis and lease them from the node that has them",
            unit="ms",
            value=times(found, MILLISECONDS),
            limit_what=f"redis-py's MGET of {blocks} absent names",
            limit=times(limit, MILLISECONDS),
            targets=(Target("p50", "<=", 1.5),),
        ),
        Row(
            name="directory-round-trips",
            what=f"packets that Redis reads for one locate of {blocks} blocks, heartbeats included",
            unit="trips",
            value=single(asked),
            limit_what="one",
            limit=single(1.0),
            targets=(Target("p50", "<=", 2),),
        ),
    ]


def _put(url: str, prefix: Prefix) -> None:
    payload = np.zeros(prefix.schema.block_bytes, np.uint8)
    with Client.open(f"{url}?home=none", name="bench writer") as writer:
        assert writer.put(prefix, [payload] * len(prefix), timeout_s=60.0).complete


def _await(holds: Callable[[], bool], what: str) -> None:
    """Wait: the node registers a moment after it listens, and publishes a moment after a put."""
    deadline = time.monotonic() + _PUBLISHED_S
    while not holds():
        if time.monotonic() > deadline:
            raise NodeUnavailable(f"the node did not {what} in {_PUBLISHED_S:.0f} s")
        time.sleep(0.05)


def _reads_of(server: redis.Redis, locator: _Locator) -> float:
    """How often Redis reads from its sockets per locate. A small packet is one read; a request of
    more than Redis' buffer of 16 KiB may be more."""
    before = _reads(server)
    for _ in range(_COUNTED_CALLS):
        locator.located()
    return (_reads(server) - before - 1) / _COUNTED_CALLS


def _reads(server: redis.Redis) -> int:
    return int(server.info("stats")["total_reads_processed"])
