"""Rows about copies between an engine's pages and pinned memory, against one copy of as many bytes.

A demotion has two steps: a kernel gathers a block in HBM, and the copy engine copies it to pinned
memory while the next one is gathered; a promotion is the reverse. For comparison there is the
kernel alone, which reads and writes pinned memory itself.

Not run: there was no GPU.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from tiffin.kernels.layout.transfer_plan import PageMap
from tiffin.kernels.paged.gather_scatter import gather, scatter
from tiffin.messenger.gpu.copier import Copies, DeviceCopier

from ..kernels.case import Case, Model
from ..store.rows import Row, Side, Spread, Target, rates
from ..store.setting import size_text
from .load import Beside, Matrices

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .setting import Setting

    Action = Callable[[], None]

_IDLE, _BUSY = 0.9, 0.8
# Programs of a kernel that moves bytes over PCIe: see tiffin.kernels.ranges.copy_ranges.
_LINK_PROGRAMS = 64


class _Pages:
    """A cache of small pages, its blocks in HBM, and pinned memory for them."""

    def __init__(self, setting: Setting, copier: DeviceCopier) -> None:
        sizes = setting.sizes
        model = Model("", sizes.layers, 2, sizes.kv_heads, sizes.kv_heads, sizes.head_dim)
        self.case = case = Case(
            setting.machine,
            model,
            blocks=sizes.paged_blocks,
            block_tokens=sizes.block_tokens,
            page_tokens=sizes.page_tokens,
        )
        self._copier = copier
        self._cuda = setting.machine.torch.cuda
        self.host: Any = setting.machine.pinned(case.nbytes).view(case.blocks.shape)
        self._maps = [
            PageMap.of_sequence(
                case.page_ids,
                tokens=sizes.block_tokens,
                block_tokens=sizes.block_tokens,
                page_tokens=sizes.page_tokens,
                first_token=number * sizes.block_tokens,
            )
            for number in range(case.count)
        ]
        self._check(setting)

    def down(self) -> None:
        """Demote: gather block by block, each copied while the next is gathered."""
        case, stream = self.case, self._cuda.current_stream()
        transfer = None
        for number, pages in enumerate(self._maps):
            gather(case.cache, pages, case.blocks[number : number + 1], case.layout)
            pair = (self.host[number], case.blocks[number])
            transfer = self._copier.submit([[pair]], after=stream.record_event())
        assert transfer is not None
        transfer.stream_wait(stream)  # copies of one direction end in order

    def up(self) -> None:
        """Promote: copy block by block, each scattered while the next is copied."""
        case, stream = self.case, self._cuda.current_stream()
        groups = [[(case.blocks[number], self.host[number])] for number in range(case.count)]
        transfer = self._copier.submit(groups, after=stream.record_event())
        for number, pages in enumerate(self._maps):
            transfer.stream_wait(stream, group=number)
            scatter(case.cache, pages, case.blocks[number : number + 1], case.layout)

    def down_by_kernel(self) -> None:
        """Gather directly into pinned memory."""
        case = self.case
        gather(case.cache, case.pages, list(self.host), case.layout, programs=_LINK_PROGRAMS)

    def up_by_kernel(self) -> None:
        """Scatter directly from pinned memory."""
        case = self.case
        scatter(case.cache, case.pages, list(self.host), case.layout, programs=_LINK_PROGRAMS)

    def copy_down(self) -> None:
        """The limit of `down`: one copy of blocks that are already gathered."""
        self.host.copy_(self.case.blocks, non_blocking=True)

    def copy_up(self) -> None:
        """The limit of `up`: one copy of all blocks."""
        self.case.blocks.copy_(self.host, non_blocking=True)

    def _check(self, setting: Setting) -> None:
        """Raises ValueError unless both ways down give the same bytes, and up restores them."""
        torch, case = setting.machine.torch, self.case
        before = case.storage.clone()
        self.down()
        setting.machine.synchronise()
        found = self.host.clone()
        self.host.zero_()
        self.down_by_kernel()
        setting.machine.synchronise()
        if not torch.equal(found, self.host):
            raise ValueError("the two ways down give different blocks")
        for up in (self.up, self.up_by_kernel):
            case.storage.zero_()
            up()
            setting.machine.synchronise()
            if not torch.equal(before, case.storage):
                raise ValueError("what went up is not what came down")


def paged(setting: Setting) -> list[Row]:
    """Pages of 16 tokens to pinned memory and back; alone, and while matrices use all SMs."""
    where, rounds = setting.machine, setting.sizes.rounds
    where.need_gpu()
    with DeviceCopier(str(where.device)) as copier:
        pages = _Pages(setting, copier)
        nbytes = pages.case.nbytes
        pairs: Sequence[tuple[str, Action, Action, Action]] = (
            ("down", pages.down, pages.down_by_kernel, pages.copy_down),
            ("up", pages.up, pages.up_by_kernel, pages.copy_up),
        )
        rows = []
        for name, staged, by_kernel, copy in pairs:
            setting.tell(name)
            alone = where.turns([Side(copy), Side(staged), Side(by_kernel)], rounds=rounds)
            matrices = Matrices(where, setting.sizes.busy_edge)
            loads = [
                Beside(partial(matrices.start, float(np.median(seconds)))) for seconds in alone[1:]
            ]
            actions = zip(loads, (staged, by_kernel), strict=True)
            busy = where.turns([load.side(action) for load, action in actions], rounds=rounds)
            limit, *values = (rates(seconds, nbytes) for seconds in (*alone, *busy))
            rows += _paged_rows(pages.case, name, limit, values, loads)
    return rows


def _paged_rows(
    case: Case, name: str, limit: Spread, values: Sequence[Spread], loads: Sequence[Beside]
) -> list[Row]:
    """Staged and by kernel, alone; then both while matrices use all SMs."""
    kinds = (
        ("", (Target("ratio", ">=", _IDLE),), ""),
        ("-kernel", (), ""),
        ("-busy", loads[0].judged(Target("ratio", ">=", _BUSY)), loads[0].note),
        ("-kernel-busy", (), loads[1].note),
    )
    what = f"{case.count} blocks {name}, pages of {case.page_tokens} tokens"
    beside = "one asynchronous copy of the blocks, pinned memory, GPU idle"
    return [
        Row(
            f"paged-{name}{kind}", f"{what}, {_how(kind)}", "GB/s", value, beside, limit, aims, note
        )
        for (kind, aims, note), value in zip(kinds, values, strict=True)
    ]


def _how(kind: str) -> str:
    how = "the kernel on pinned memory" if "kernel" in kind else "kernel in HBM and copy engine"
    return f"{how}, while matrices hold the SMs" if "busy" in kind else how


def pieces(setting: Setting) -> list[Row]:
    """Small pieces from all over HBM to one piece of pinned memory, and back, by the copier."""
    where, sizes = setting.machine, setting.sizes
    where.need_gpu()
    near, host = where.bytes_of(sizes.pieces_bytes), where.pinned(sizes.pieces_bytes)
    rows = []
    with DeviceCopier(str(where.device)) as copier:
        for piece_bytes in sizes.piece_bytes:
            setting.tell(size_text(piece_bytes))
            there, back = scattered(where, near, host, piece_bytes)
            for name, copies, limit in (
                ("down", there, partial(host.copy_, near, non_blocking=True)),
                ("up", back, partial(near.copy_, host, non_blocking=True)),
            ):
                sides = [Side(partial(submit, copier, where, copies)), Side(limit)]
                measured = where.turns(sides, rounds=sizes.rounds)
                value, copied = (rates(seconds, sizes.pieces_bytes) for seconds in measured)
                rows.append(
                    Row(
                        f"pieces-{name}-{size_text(piece_bytes)}",
                        f"{size_text(sizes.pieces_bytes)} {name} in pieces of "
                        f"{size_text(piece_bytes)} from all over HBM",
                        "GB/s",
                        value,
                        "one asynchronous copy of as many bytes, pinned memory",
                        copied,
                        (Target("ratio", ">=", _IDLE),),
                    )
                )
    return rows


def scattered(where: Any, near: Any, host: Any, piece_bytes: int) -> tuple[Copies, Copies]:
    """Every piece of `near`, in an order drawn once, to and from all of `host` in order."""
    count = near.numel() // piece_bytes
    lengths = np.full(count, piece_bytes, np.int64)
    in_order = np.arange(count, dtype=np.int64) * piece_bytes
    drawn = np.random.default_rng(0).permutation(count).astype(np.int64) * piece_bytes
    return (
        Copies(host, near, in_order, drawn, lengths),
        Copies(near, host, drawn, in_order, lengths),
    )


def submit(copier: DeviceCopier, where: Any, copies: Copies) -> None:
    """Submit one group of copies, in order with the current stream's work before and after."""
    stream = where.torch.cuda.current_stream()
    copier.submit([[copies]], after=stream.record_event()).stream_wait(stream)
