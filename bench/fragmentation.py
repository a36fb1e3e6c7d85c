"""Does a tier stay usable when blocks of several sizes come and go for long?

One run fills an arena to a share of its capacity and then keeps it there: before each allocation it
evicts random blocks until the new one fits under that share by bytes. Random victims are the hard
case; eviction in order of age leaves neighbouring holes. An allocation that fails although enough
bytes are free is a *failure*; the run then evicts further blocks until the allocation succeeds, and
their bytes are the *price*, as a share of all bytes allocated:

    evict="random"   more random victims, like a policy that only considers age
    evict="window"   `cheapest_window` as a node asks it: over the eighth of the blocks that is next
                     to leave, at random here, or over the quarter, the half or all of them

Failures depend on the number of blocks in an arena far more than on their bytes: few blocks leave
few holes. With `drifting=True` the share of each size changes twenty times during the run, at times
almost to a single size: old sizes have to make room for new ones.

`python -m tiffin.bench.fragmentation` prints the table of `docs/decisions/allocator.md`; the
placements that were not chosen are kept here so that the comparison can be repeated.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import time
from bisect import bisect_left
from typing import TYPE_CHECKING, Any, Protocol

from tiffin.kvstore.memory.arena import Arena, cheapest_window
from tiffin.kvstore.node.core.windows import SHARE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

KIB, MIB = 1 << 10, 1 << 20
PAGE = 4 * KIB

# Each with its header pages. `models`: 512 tokens in bf16 of DeepSeek (MLA), Llama 3 8B and 70B.
SIZES: dict[str, tuple[int, ...]] = {
    "related": (1 * MIB + PAGE, 5 * MIB // 2 + PAGE, 8 * MIB + PAGE),
    "unrelated": (1 * MIB + 13 * PAGE, 3 * MIB - 7 * PAGE, 9 * MIB - 11 * PAGE),
    "models": (34 * MIB + PAGE, 64 * MIB + PAGE, 160 * MIB + PAGE),
}
BLOCKS = 4000  # a large DRAM tier of the largest sizes: 4,000 x 86 MiB = 344 GiB


class Space(Protocol):
    """The allocator's interface that a run uses."""

    @property
    def free_bytes(self) -> int: ...
    @property
    def largest_free_bytes(self) -> int: ...
    def allocate(self, length: int) -> int | None: ...
    def free(self, offset: int, length: int) -> None: ...


class FirstFit(Arena):
    """The lowest address that fits."""

    def _place(self, length: int) -> int | None:
        if length > self.largest_free_bytes:
            return None
        return next(start for start in self._starts if self._lengths[start] >= length)


class ExactOrFirst(FirstFit):
    """A hole of exactly this length, else the lowest address that fits."""

    def _place(self, length: int) -> int | None:
        best = Arena._place(self, length)
        exact = best is not None and self._lengths[best] == length
        return best if exact else super()._place(length)


class ExactOrLongest(Arena):
    """A hole of exactly this length, else the start of the longest run: leaves no slivers."""

    def _place(self, length: int) -> int | None:
        best = super()._place(length)
        if best is None or self._lengths[best] == length:
            return best
        return self._by_length[-1][1]


class TwoEnded(Arena):
    """Best fit, with blocks of at least `LARGE_BYTES` placed from the high end."""

    LARGE_BYTES = 8 * MIB

    def _place(self, length: int) -> int | None:
        best = super()._place(length)
        if best is None or length < self.LARGE_BYTES:
            return best
        run_bytes = self._lengths[best]
        last = self._by_length[bisect_left(self._by_length, (run_bytes + 1, 0)) - 1]
        return last[1] + run_bytes - length


class Slabs:
    """Slabs of 64 MiB (or four blocks) that hold one size each, returned when they are empty."""

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._slabs: Arena | None = None
        self._slab_bytes = 64 * MIB
        self._slots: dict[int, set[int]] = {}
        self._used: dict[int, int] = {}
        self.free_bytes = capacity_bytes

    @property
    def largest_free_bytes(self) -> int:
        return self._slabs.largest_free_bytes if self._slabs else self._capacity_bytes

    def prepare(self, sizes: Sequence[int]) -> None:
        self._slab_bytes = max(self._slab_bytes, 4 * max(sizes))
        self._slabs = Arena(self._capacity_bytes // self._slab_bytes * self._slab_bytes)

    def allocate(self, length: int) -> int | None:
        slots = self._slots.setdefault(length, set())
        if not slots:
            assert self._slabs is not None
            slab = self._slabs.allocate(self._slab_bytes)
            if slab is None:
                return None
            slots.update(slab + i * length for i in range(self._slab_bytes // length))
            self._used[slab] = 0
        offset = slots.pop()
        self._used[offset // self._slab_bytes * self._slab_bytes] += 1
        self.free_bytes -= length
        return offset

    def free(self, offset: int, length: int) -> None:
        slab = offset // self._slab_bytes * self._slab_bytes
        self._used[slab] -= 1
        self._slots[length].add(offset)
        self.free_bytes += length
        if not self._used[slab]:
            assert self._slabs is not None
            slots = range(self._slab_bytes // length)
            self._slots[length] -= {slab + i * length for i in slots}
            self._slabs.free(slab, self._slab_bytes)


PLACEMENTS: dict[str, type[Arena] | type[Slabs]] = {
    "best-fit": Arena,
    "two-ended": TwoEnded,
    "exact-or-first": ExactOrFirst,
    "exact-or-longest": ExactOrLongest,
    "first-fit": FirstFit,
    "slabs": Slabs,
}


class _Run:
    """One workload on one allocator, and its counters."""

    def __init__(self, space: Space, limit_bytes: int, seed: int) -> None:
        self.space = space
        self.limit_bytes = limit_bytes
        self.random = random.Random(seed)
        self.live: list[tuple[int, int]] = []
        self.used_bytes = self.operations = self.allocations = self.failures = 0
        self.allocated_bytes = self.price_bytes = 0
        self.space_s = 0.0

    def put(self, length: int, window: bool) -> None:
        while self.used_bytes + length > self.limit_bytes:
            self._leave(self.random.randrange(len(self.live)))
        offset = self._allocate(length)
        self.allocations += 1
        if offset is None:
            self.failures += 1
            offset = self._force(length, window)
        self.live.append((offset, length))
        self.used_bytes += length
        self.allocated_bytes += length

    def _force(self, length: int, window: bool) -> int:
        used_before = self.used_bytes
        if window:
            self._clear_window(length)
        while (offset := self._allocate(length)) is None:
            self._leave(self.random.randrange(len(self.live)))
        self.price_bytes += used_before - self.used_bytes
        return offset

    def _clear_window(self, length: int) -> None:
        assert isinstance(self.space, Arena)
        order = self.random.sample(range(len(self.live)), len(self.live))
        extents = [(*self.live[index], self.live[index][1]) for index in order]
        chosen: list[int] = []
        looks = max(1, len(order) // SHARE)
        while not chosen and looks < 2 * len(order):
            chosen = cheapest_window(self.space.free_runs, extents[:looks], length)
            looks *= 2
        for index in sorted((order[i] for i in chosen), reverse=True):
            self._leave(index)

    def _allocate(self, length: int) -> int | None:
        start_s = time.perf_counter()
        offset = self.space.allocate(length)
        self.space_s += time.perf_counter() - start_s
        self.operations += 1
        return offset

    def _leave(self, index: int) -> None:
        self.live[index], self.live[-1] = self.live[-1], self.live[index]
        offset, length = self.live.pop()
        start_s = time.perf_counter()
        self.space.free(offset, length)
        self.space_s += time.perf_counter() - start_s
        self.used_bytes -= length
        self.operations += 1


def _weights(
    drifting: bool, sizes: Sequence[int], operations: int, run: _Run
) -> Iterator[list[float]]:
    """The share of each size, one list for each put."""
    weights = [1.0] * len(sizes)
    phase = 0
    while run.operations < operations:
        if drifting and run.operations * 20 // operations > phase:
            phase = run.operations * 20 // operations
            weights = [run.random.random() ** 3 + 0.01 for _ in sizes]
        yield weights


def run(
    operations: int = 1_000_000,
    fill: float = 0.95,
    seed: int = 0,
    sizes: Sequence[int] = SIZES["related"],
    *,
    placement: str = "best-fit",
    drifting: bool = False,
    evict: str = "random",
    blocks: int = BLOCKS,
) -> dict[str, Any]:
    """One run of `operations` allocations and frees; the arena has room for `blocks` of mean size.

    `largest_free_share` is the longest free run over all free bytes, sampled every 64 allocations
    after the first quarter; `us_per_operation` is time inside the allocator only.
    """
    capacity_bytes = sum(sizes) * blocks // len(sizes) // PAGE * PAGE
    space = PLACEMENTS[placement](capacity_bytes)
    if isinstance(space, Slabs):
        space.prepare(sizes)
    work = _Run(space, int(fill * capacity_bytes), seed)
    shares: list[float] = []
    fills: list[float] = []
    for weights in _weights(drifting, sizes, operations, work):
        work.put(work.random.choices(sizes, weights)[0], evict == "window")
        if work.operations > operations // 4 and work.allocations % 64 == 0:
            shares.append(space.largest_free_bytes / max(space.free_bytes, 1))
            fills.append(work.used_bytes / capacity_bytes)
    if isinstance(space, Arena):
        space.check()
    return {
        "placement": placement,
        "blocks": blocks,
        "drifting": drifting,
        "evict": evict,
        "operations": work.operations,
        "largest_free_share": {
            "min": min(shares),
            "median": statistics.median(shares),
            "final": shares[-1],
        },
        "failed_share": work.failures / work.allocations,
        "price_share": work.price_bytes / work.allocated_bytes,
        "fill_mean": statistics.fmean(fills),
        "us_per_operation": work.space_s / work.operations * 1e6,
    }


def _row(name: str, result: dict[str, Any]) -> str:
    share = result["largest_free_share"]
    return (
        f"| {name}{', drifting' if result['drifting'] else ''} | {result['blocks']} "
        f"| {result['placement']} | {result['evict']} "
        f"| {result['failed_share']:.2%} | {result['price_share']:.2%} | {result['fill_mean']:.1%} "
        f"| {share['min']:.2f} / {share['median']:.2f} / {share['final']:.2f} "
        f"| {result['us_per_operation']:.1f} |"
    )


def _plans() -> Iterator[tuple[int, dict[str, Any]]]:
    """Rows per set of sizes: (divisor of the operations, what to run)."""
    for placement in PLACEMENTS:
        yield 1, {"placement": placement}
    # Every failure with a window searches an eighth of the blocks: fewer operations are enough
    for evict in ("random", "window"):
        yield 4, {"blocks": 1000, "evict": evict}
    for evict in ("random", "window"):
        yield 4, {"drifting": True, "evict": evict}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--operations", type=int, default=1_000_000)
    parser.add_argument("--fill", type=float, default=0.95)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="one JSON object per line instead")
    options = parser.parse_args()
    if not options.json:
        print(f"Python {platform.python_version()}, {platform.machine()}, seed {options.seed}\n")
        print("| sizes | blocks | placement | evict | failed | price | fill ", end="")
        print("| longest run / free: min, median, final | µs per operation |\n" + "|---" * 9 + "|")
    for name, sizes in SIZES.items():
        for divisor, plan in _plans():
            count = options.operations // divisor
            result = run(count, options.fill, options.seed, sizes, **plan)
            line = json.dumps({"sizes": sizes, **result}) if options.json else _row(name, result)
            print(line, flush=True)


if __name__ == "__main__":
    main()
