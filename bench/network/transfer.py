"""Rows about transfers over the network: whole blocks, small blocks, and slices of many blocks."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from tiffin.kvstore.client.client import Client

from ..limits import touched
from ..store.rows import MICROSECONDS, Row, Side, Target, interleave, rates, times
from ..store.setting import prefix_of, room_for, schema_of, size_text
from .plain import PlainSockets
from .setting import Metered, apart, remote_node

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tiffin.kvstore.client.verbs.arguments import Verify
    from tiffin.kvstore.format.keys import Prefix
    from tiffin.kvstore.format.schema import HeadRange

    from ..limits import Bytes
    from .setting import RemoteNode, Setting

PLAIN = "recv_into of the same bytes that another process sends with sendall"
GIGA = 1e9
_WARM_CALLS = 200


@dataclass(frozen=True, slots=True)
class Pair:
    """A node with the blocks of `prefix`, a client of it, and a plain sender of as many bytes."""

    node: RemoteNode
    client: Client
    plain: PlainSockets
    prefix: Prefix
    targets: list[Bytes]


@contextlib.contextmanager
def pair(block_bytes: int, count: int) -> Iterator[Pair]:
    """Both sides with `count` blocks, all memory touched."""
    schema = schema_of(block_bytes)
    prefix = prefix_of(schema, count)
    # A put may reserve a quarter of the pool at a time; this pool is large enough for one turn.
    with (
        remote_node(max(4 * schema.extent_bytes, room_for(schema, count))) as node,
        PlainSockets(count * block_bytes) as plain,
        Client.open(node.url, name="bench") as client,
    ):
        targets = [touched(block_bytes) for _ in range(count)]
        assert client.put(prefix, targets, timeout_s=60.0).complete
        yield Pair(node, client, plain, prefix, targets)


def get(
    client: Client,
    prefix: Prefix,
    targets: Sequence[Bytes],
    verify: Verify,
    heads: HeadRange | None = None,
) -> None:
    """Get all blocks of `prefix`; fails if one is missing, as the run would then be useless."""
    blocks = client.get(prefix, into=targets, heads=heads, verify=verify, timeout_s=60.0)
    assert blocks.complete, blocks


# -- whole blocks ----------------------------------------------------------------------------------


def remote_get(setting: Setting) -> list[Row]:
    """`get(into=)` of whole blocks from a node of another process, and its CPU time on both
    sides."""
    return [row for size in setting.sizes.block_bytes for row in _remote_get(setting, size)]


def _remote_get(setting: Setting, block_bytes: int) -> list[Row]:
    count = max(1, setting.sizes.transfer_bytes // block_bytes)
    setting.tell(f"{count} blocks of {size_text(block_bytes)}")
    with pair(block_bytes, count) as both:
        mine = os.getpid()
        read = partial(get, both.client, both.prefix, both.targets)
        actions = [
            Metered(partial(both.plain.fetch, both.targets), (mine, both.plain.pid)),
            Metered(partial(read, "off"), (mine, both.node.pid)),
            Metered(partial(read, "always"), (mine, both.node.pid)),
        ]
        rounds = setting.sizes.rounds
        seconds = interleave([Side(action) for action in actions], rounds=rounds)
        # The warm-up runs are not measured, and neither is their CPU time.
        cpu = [action.seconds[-rounds:] for action in actions]
    nbytes = count * block_bytes
    return [
        row
        for index, verify in enumerate(("off", "always"), start=1)
        for row in _get_rows(block_bytes, count, verify, nbytes, index, seconds, cpu)
    ]


def _get_rows(
    block_bytes: int,
    count: int,
    verify: str,
    nbytes: int,
    index: int,
    seconds: list[list[float]],
    cpu: list[list[float]],
) -> list[Row]:
    size = size_text(block_bytes)
    suffix = f"{size}-verified" if verify == "always" else size
    what = f"get(into=) of {count} blocks of {size} over TCP, verify={verify}"
    least = 0.75 if verify == "always" else 0.9
    return [
        Row(
            name=f"remote-get-{suffix}",
            what=what,
            unit="GB/s",
            value=rates(seconds[index], nbytes),
            limit_what=PLAIN,
            limit=rates(seconds[0], nbytes),
            targets=(Target("ratio", ">=", least),),
        ),
        Row(
            name=f"remote-cpu-{suffix}",
            what=f"CPU time of client and node, {what}",
            unit="s/GB",
            value=times(cpu[index], GIGA / nbytes),
            limit_what="CPU time of both plain processes",
            limit=times(cpu[0], GIGA / nbytes),
            targets=() if verify == "always" else (Target("ratio", "<=", 1.2),),
        ),
    ]


# -- one small block -------------------------------------------------------------------------------


def remote_small(setting: Setting) -> list[Row]:
    """One small block, repeatedly: the cost of a round trip with few bytes."""
    sizes = setting.sizes
    nbytes = sizes.small_block_bytes
    setting.tell(f"one block of {size_text(nbytes)}")
    policies: tuple[Verify, ...] = ("off", "always")
    with pair(nbytes, 1) as both, apart([], [both.node.pid, both.plain.pid]):
        read = partial(get, both.client, both.prefix, both.targets)
        sides = [Side(partial(both.plain.fetch, both.targets))]
        sides += [Side(partial(read, verify)) for verify in policies]
        for side in sides:
            for _ in range(_WARM_CALLS):
                side.action()
        limit, *found = interleave(sides, rounds=sizes.rounds, batch=sizes.calls)
    return [
        Row(
            name=f"remote-{size_text(nbytes)}{'-verified' if verify == 'always' else ''}",
            what=f"get(into=) of one block of {size_text(nbytes)} over TCP, verify={verify}",
            unit="us",
            value=times(seconds, MICROSECONDS),
            limit_what=f"16 bytes to another process, {size_text(nbytes)} back",
            limit=times(limit, MICROSECONDS),
            note="the target is mooncake-64KiB's",
        )
        for verify, seconds in zip(policies, found, strict=True)
    ]


# -- slices ----------------------------------------------------------------------------------------


def scattered(setting: Setting) -> list[Row]:
    """One head of eight of many blocks, as a tensor-parallel worker reads them, against as many
    bytes in whole blocks."""
    sizes = setting.sizes
    block_bytes, count = sizes.scattered_block_bytes, sizes.scattered_blocks
    schema = schema_of(block_bytes)
    part = schema.ranges(heads=(0, 1))
    slice_bytes = sum(piece.length for piece in part)
    whole = max(1, count * slice_bytes // block_bytes)
    setting.tell(f"{count} times {len(part)} ranges of {size_text(part[0].length)}")
    with pair(block_bytes, count) as both:
        targets = [touched(slice_bytes) for _ in range(count)]
        contiguous = partial(get, both.client, both.prefix[:whole], both.targets[:whole], "off")
        one_head = partial(get, both.client, both.prefix, targets, "off", (0, 1))
        sides = [Side(contiguous), Side(one_head)]
        limit, found = interleave(sides, rounds=3 * sizes.rounds)
    return [
        Row(
            name=f"scattered-{size_text(part[0].length)}",
            what=f"get(heads=(0, 1), into=) of {count} blocks over TCP: "
            f"{count * len(part)} ranges of {size_text(part[0].length)}",
            unit="GB/s",
            value=rates(found, count * slice_bytes),
            limit_what=f"get(into=) of {whole} whole blocks of {size_text(block_bytes)}",
            limit=rates(limit, whole * block_bytes),
            targets=(Target("ratio", ">=", 0.6),),
        )
    ]
