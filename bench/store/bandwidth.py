"""Rows about memory bandwidth: blocks copied out of the pool and into it, against memcpy.

The node is a process of its own. All memory is touched before the measurement: the node prefaults
its pool, and the first, unmeasured calls fill the client's page tables for it.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING

from tiffin.kvstore.client.client import Client
from tiffin.messenger.shm.host_copy import PIECE_BYTES

from ..limits import copy_all, copy_in_pieces, touched
from .rows import Row, Side, Target, interleave, rates
from .setting import daemon, prefix_of, room_for, schema_of, size_text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tiffin.kvstore.format.keys import Prefix

    from ..limits import Bytes
    from .setting import Setting

_MEMCPY = "memcpy of the same bytes between private buffers, one thread"


@contextlib.contextmanager
def _pool(setting: Setting) -> Iterator[tuple[Client, Prefix, list[Bytes], list[Bytes]]]:
    """A client of a daemon with room, a prefix, and its payloads and targets, all touched."""
    sizes = setting.sizes
    schema = schema_of(sizes.large_block_bytes)
    setting.tell(f"{sizes.copied_blocks} blocks of {size_text(sizes.large_block_bytes)}")
    # A put writes at most a quarter of the pool at a time; in a pool this large, all its blocks.
    with (
        daemon(4 * room_for(schema, sizes.copied_blocks)) as node,
        Client.open(node.url, name="bench") as client,
    ):
        payloads = [touched(schema.block_bytes) for _ in range(sizes.copied_blocks)]
        targets = [touched(schema.block_bytes) for _ in range(sizes.copied_blocks)]
        yield client, prefix_of(schema, sizes.copied_blocks), payloads, targets


def get_into(setting: Setting) -> list[Row]:
    """`get(into=buffers)`, unverified and verified, and for comparison the same copy by
    `np.copyto`."""
    with _pool(setting) as (client, prefix, payloads, targets):
        assert client.put(prefix, payloads, timeout_s=60.0).complete
        with client.get(prefix, verify="off") as held:
            views = [block.bytes for block in held]
            sides = [
                Side(partial(copy_all, targets, payloads)),
                Side(partial(_get, client, prefix, targets, "off")),
                Side(partial(_get, client, prefix, targets, "always")),
                Side(partial(copy_all, targets, views)),
                Side(partial(copy_in_pieces, targets, views, PIECE_BYTES)),
            ]
            found = interleave(sides, rounds=setting.sizes.rounds)
            del views
    return _get_rows(setting, found)


def _get(client: Client, prefix: Prefix, targets: list[Bytes], verify: str) -> None:
    blocks = client.get(prefix, into=targets, verify=verify)  # type: ignore[arg-type]
    assert blocks.complete, blocks


def _get_rows(setting: Setting, found: list[list[float]]) -> list[Row]:
    count, size = setting.sizes.copied_blocks, size_text(setting.sizes.large_block_bytes)
    nbytes = count * setting.sizes.large_block_bytes
    memcpy, *found_rates = (rates(seconds, nbytes) for seconds in found)
    what = f"get(into=) of {count} blocks of {size}"
    aside = "the same copy from the pool by np.copyto, under one lease"
    named: list[tuple[str, str, tuple[Target, ...]]] = [
        ("get-into", f"{what}, verify=off", (Target("ratio", ">=", 0.9),)),
        ("get-verified", f"{what}, verify=always", (Target("ratio", ">=", 0.8),)),
        ("copy-by-hand", aside, ()),
        ("copy-in-pieces", f"{aside}, {size_text(PIECE_BYTES)} a call", ()),
    ]
    return [
        Row(name, text, "GB/s", spread, _MEMCPY, memcpy, targets)
        for (name, text, targets), spread in zip(named, found_rates, strict=True)
    ]


def put(setting: Setting) -> list[Row]:
    """`put`, checksums and headers included; the blocks are removed between the rounds."""
    with _pool(setting) as (client, prefix, payloads, targets):
        sides = [
            Side(partial(copy_all, targets, payloads)),
            Side(partial(_put, client, prefix, payloads), partial(client.remove, prefix)),
        ]
        memcpy, found = interleave(sides, rounds=setting.sizes.rounds)
    count, size = setting.sizes.copied_blocks, size_text(setting.sizes.large_block_bytes)
    nbytes = count * setting.sizes.large_block_bytes
    return [
        Row(
            name="put",
            what=f"put of {count} blocks of {size}, checksums included",
            unit="GB/s",
            value=rates(found, nbytes),
            limit_what=_MEMCPY,
            limit=rates(memcpy, nbytes),
            targets=(Target("ratio", ">=", 0.75),),
        )
    ]


def _put(client: Client, prefix: Prefix, payloads: list[Bytes]) -> None:
    result = client.put(prefix, payloads, timeout_s=60.0)
    assert len(result.stored) == len(prefix), result
