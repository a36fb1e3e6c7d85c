"""Blocks put and got, ours beside a peer's store: the same sizes, the same number in a call.

Both sides have the memory in the same place: in the process that asks, in another process of this
host that shares it, or in another process behind TCP on loopback. The bytes are random, and come
back the same: each side checks that once, before anything is timed.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from tiffin.kvstore.client.client import Client

from ..limits import touched
from ..network.setting import apart, remote_node
from ..store.rows import MILLISECONDS, timed
from ..store.setting import MIB, daemon, prefix_of, schema_of, size_text
from .turns import PeerRow, in_turns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tiffin.kvstore.client.verbs.arguments import Verify
    from tiffin.kvstore.format.keys import Prefix

    from ..limits import Bytes
    from ..vllm.engine_process import GroupProcess
    from .setting import Setting

PLACES = {
    "process": "memory of the own process",
    "shared": "memory that another process shares",
    "tcp": "memory of another process, over TCP",
}
_SMALL_BYTES = MIB
_HASHED = "ours hashes what it puts"
_VERIFIED = "ours checks every byte by its checksum; the peer has none"


class Ours:
    """A client of a node, and blocks. `pid` of the node; None in this process."""

    def __init__(self, client: Client, prefix: Prefix, pid: int | None) -> None:
        block_bytes = prefix.schema.block_bytes
        self.client, self.prefix, self.pid = client, prefix, pid
        self.payloads = [touched(block_bytes) for _ in range(len(prefix))]
        self.targets = [touched(block_bytes) for _ in range(len(prefix))]
        self._verify()

    def put(self, calls: int) -> list[float]:
        """Put all blocks, none of which is there."""
        seconds = []
        for _ in range(calls):
            self.client.remove(self.prefix)
            seconds += timed(self._put, 1)
        return seconds

    def get(self, calls: int, verify: Verify) -> list[float]:
        """Get all blocks into this process's memory."""
        return timed(partial(self._get, verify), calls)

    def _put(self) -> None:
        assert self.client.put(self.prefix, self.payloads, timeout_s=60.0).complete

    def _get(self, verify: Verify) -> None:
        found = self.client.get(self.prefix, into=self.targets, verify=verify, timeout_s=60.0)
        assert found.complete, found

    def _verify(self) -> None:
        self._put()
        for target in self.targets:
            target[:] = 0
        self._get("always")
        pairs: Iterator[tuple[Bytes, Bytes]] = zip(self.targets, self.payloads, strict=True)
        assert all(np.array_equal(one, other) for one, other in pairs)


@contextlib.contextmanager
def ours(place: str, block_bytes: int, count: int) -> Iterator[Ours]:
    """Our side with the memory at `place`, all of it touched."""
    schema = schema_of(block_bytes)
    prefix = prefix_of(schema, count)
    # A put writes at most a quarter of the pool at a time; in a pool this large, all its blocks.
    dram_bytes = max(64 * MIB, 5 * count * schema.extent_bytes)
    with contextlib.ExitStack() as stack:
        pid = None
        if place == "process":
            url = f"embedded:?dram={dram_bytes}"
        elif place == "shared":
            node = stack.enter_context(daemon(dram_bytes))
            url, pid = node.url, node.pid
        else:
            remote = stack.enter_context(remote_node(dram_bytes))
            url, pid = remote.url, remote.pid
        # As engines open it, which live long.
        client = stack.enter_context(Client.open(url, name="bench", populate=True))
        yield Ours(client, prefix, pid)


def compared(
    setting: Setting,
    peer: str,
    place: str,
    theirs: Callable[[int, int], contextlib.AbstractContextManager[Theirs]],
) -> list[PeerRow]:
    """Rows of all sizes; `theirs(block_bytes, count)` is the peer's side."""
    rows: list[PeerRow] = []
    for block_bytes, count in setting.sizes.blocks:
        setting.tell(f"{count} blocks of {size_text(block_bytes)}, {PLACES[place]}")
        with theirs(block_bytes, count) as other, ours(place, block_bytes, count) as mine:
            rows += _rows(setting, peer, place, mine, other)
    return rows


class Theirs:
    """A peer's process with the verbs `put` and `get`. Its servers, `pids`, are stopped together
    with it while ours are measured, as some poll without sleeping."""

    def __init__(self, process: GroupProcess, servers: tuple[GroupProcess, ...] = ()) -> None:
        self.process, self.servers = process, servers

    @property
    def pids(self) -> list[int]:
        """Of the servers."""
        return [one.popen.pid for one in self.servers]

    def ask(self, verb: str, calls: int) -> list[float]:
        """Run for a turn; the first call after a stop does not count."""
        self.resume()
        self.process.tell(verb, calls=1)
        seconds: list[float] = self.process.tell(verb, calls=calls)
        for one in (self.process, *self.servers):
            one.stop()
        return seconds

    def resume(self) -> None:
        """End a stop."""
        for one in (*self.servers, self.process):
            one.resume()


def _rows(setting: Setting, peer: str, place: str, mine: Ours, other: Theirs) -> Iterator[PeerRow]:
    sizes, prefix = setting.sizes, mine.prefix
    size, count = prefix.schema.block_bytes, len(prefix)
    calls = sizes.calls_of(size * count)
    batch = f"{count} blocks of {size_text(size)} in one call, {PLACES[place]}"
    verbs: list[tuple[str, str, Callable[[int], list[float]], str]] = [
        ("put", "put", mine.put, _HASHED),
        ("get", "get", partial(mine.get, verify="off"), ""),
        ("get", "get-verified", partial(mine.get, verify="always"), _VERIFIED),
    ]
    with _placed(mine, other):
        for verb, name, act, note in verbs:

            def warm(act: Callable[[int], list[float]] = act) -> list[float]:
                act(1)  # the peer's first call after a stop does not count either
                return act(calls)

            turns = in_turns(warm, partial(other.ask, verb, calls), sizes.rounds)
            yield turns.row(
                peer,
                f"{place}-{name}-{size_text(size)}",
                f"{name.replace('-', ', ')}: {batch}",
                f"its {verb} of the same",
                "ms",
                MILLISECONDS,
                note,
            )


@contextlib.contextmanager
def _placed(mine: Ours, other: Theirs) -> Iterator[None]:
    """Small batches with clients on one core and servers on the others, where both sides have
    servers: the kernel now and then puts two processes that answer each other on one core. Large
    ones as the scheduler places them: then it is bandwidth that counts."""
    small = len(mine.prefix) * mine.prefix.schema.block_bytes <= _SMALL_BYTES
    if mine.pid is None or not small:
        yield
        return
    with apart([other.process.popen.pid], [*other.pids, mine.pid]):
        yield
