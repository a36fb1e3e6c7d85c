"""The extent allocator of a tier: tracks free bytes, without I/O.

A tier is one flat range of bytes (shared memory, slab files, a GPU tensor) with blocks of a few
sizes, one per schema, each a header page or more and a payload. The arena allocates and frees
extents. It has no notion of blocks, and keeps no record of used extents: the caller already stores
offset and length in its replica, and 500,000 dictionary entries of some 100 bytes would be 50 MB of
redundant data. So used space is whatever is not free, and the caller passes the length together
with the offset when it frees an extent.

The arena keeps the free runs, coalesced, in three views that `check` compares:

    _starts      [0, 40960, ...]              by address: neighbours, overlap, order
    _lengths     {0: 4096, 40960: 8192, ...}  start -> length
    _by_length   [(4096, 0), (8192, 40960)]   by length, then address: what fits best

Allocation is best fit, and the lowest address among equals. A pool's blocks have few sizes, so the
hole that one block leaves is exactly what the next block of its size needs, and best fit finds that
hole before it splits a longer run. Measured at 95 % fill over a million operations in an arena of
4,000 blocks of three sizes, fewer than 1 of 10,000 allocations fail; with first fit 1 of 5 to 7
do. Fixed slabs per size waste space that is bound to the wrong size. See
`docs/decisions/allocator.md` for the table, and how to repeat it.

No placement helps an arena of a few hundred blocks, whose few holes seldom have the right size, nor
a change of the mix: a tier full of 1 MiB blocks has no run for the first 8 MiB block, with any
allocator. Eviction has to solve that fragmentation, by address among what is old:
`cheapest_window` chooses the evictions that make one long run at the lowest cost.

Sorted lists and `bisect` rather than a tree: insertion moves pointers in one `memmove`. An
operation takes 3 microseconds at the hundreds of runs that best fit keeps, and some 30 at 80,000,
which is a 500,000-block tier after a fifth of its blocks were freed in random order.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from ..errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

# The unit of O_DIRECT and of a memory page, and the size of a block's first header page.
GRANULE_BYTES = 4096


class Extent(NamedTuple):
    """Bytes `[offset, offset + length)` of an arena. A tuple: 56 bytes, and it sorts by address."""

    offset: int
    length: int

    @property
    def end(self) -> int:
        """The first byte after the extent."""
        return self.offset + self.length


class ExtentConflict(RuntimeError):
    """An extent is not in the state that the caller expects.

    It is a bug in the caller: a double free, or an extent the arena never allocated. From `claim`
    during a restart, it means overlapping extents, such as those of two headers that claim the same
    bytes after damage on the medium; the tier's scan has removed these before.
    """


class Arena:
    """The free space of one tier.

    Conservation: `free_bytes + used_bytes == capacity_bytes`, and all three are multiples of
    `granule_bytes`. Not thread-safe: one owner calls it.
    """

    def __init__(self, capacity_bytes: int, granule_bytes: int = GRANULE_BYTES) -> None:
        """Make an arena whose bytes are all free.

        `capacity_bytes` must be a positive multiple of `granule_bytes`, else `InvalidInput`.
        """
        if granule_bytes < 1:
            raise InvalidInput(f"granule_bytes must be at least 1, not {granule_bytes}")
        if capacity_bytes < granule_bytes or capacity_bytes % granule_bytes:
            raise InvalidInput(
                f"capacity_bytes must be a positive multiple of {granule_bytes}, "
                f"not {capacity_bytes}"
            )
        self._capacity_bytes = capacity_bytes
        self._granule_bytes = granule_bytes
        self._free_bytes = 0
        self._starts: list[int] = []
        self._lengths: dict[int, int] = {}
        self._by_length: list[tuple[int, int]] = []
        self._insert(0, capacity_bytes)

    @property
    def capacity_bytes(self) -> int:
        """All bytes, free or not. Constant."""
        return self._capacity_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes in no extent; a smaller allocation may still fail (fragmentation), see `fits`."""
        return self._free_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes allocated and not freed, rounding included."""
        return self._capacity_bytes - self._free_bytes

    @property
    def largest_free_bytes(self) -> int:
        """The longest allocation that would succeed now; 0 when full. O(1)."""
        return self._by_length[-1][0] if self._by_length else 0

    @property
    def free_runs(self) -> Iterator[Extent]:
        """Every free run in address order, no two adjacent. Do not change the arena meanwhile."""
        return (Extent(start, self._lengths[start]) for start in self._starts)

    def round_up(self, length: int) -> int:
        """The bytes that an extent of `length` bytes occupies. `InvalidInput` below 1."""
        if length < 1:
            raise InvalidInput(f"an extent has at least 1 byte, not {length}")
        return -(-length // self._granule_bytes) * self._granule_bytes

    def fits(self, length: int) -> bool:
        """Whether `allocate(length)` would succeed now. O(1)."""
        return self.round_up(length) <= self.largest_free_bytes

    def allocate(self, length: int) -> int | None:
        """Allocate `round_up(length)` bytes; returns their offset, or None when no free run is long
        enough.

        None does not mean full: compare `free_bytes`, then evict, or ask `cheapest_window`.
        """
        length = self.round_up(length)
        offset = self._place(length)
        if offset is not None:
            self._carve(offset, length)
        return offset

    def free(self, offset: int, length: int) -> None:
        """Free an extent; `length` as passed to `allocate`, rounded or not.

        Raises `ExtentConflict`, and changes nothing, if any byte of it is free already or outside
        the arena. The arena cannot detect a length that is too long and reaches into another *used*
        extent; the owner detects it when it compares the sum of its extents with `used_bytes`.
        """
        extent = self._extent(offset, length)
        index = bisect_left(self._starts, offset)
        after = self._run(index)
        before = self._run(index - 1)
        if (after and after.offset < extent.end) or (before and before.end > offset):
            raise ExtentConflict(f"freed twice: {extent} overlaps free space in {self}")
        start, end = extent.offset, extent.end
        if after and after.offset == end:
            end = after.end
            self._remove(index)
        if before and before.end == start:
            start = before.offset
            self._remove(index - 1)
        self._insert(start, end - start)

    def claim(self, offset: int, length: int) -> None:
        """Allocate exactly this extent, as when a restart finds a block there.

        Raises `ExtentConflict`, and changes nothing, if any byte of it is used or outside the
        arena.
        """
        extent = self._extent(offset, length)
        run = self._run(bisect_right(self._starts, offset) - 1)
        if run is None or run.end < extent.end:
            raise ExtentConflict(f"not free: {extent} in {self}")
        self._carve(offset, extent.length)

    def check(self) -> None:
        """Assert every invariant. O(free runs); for tests and after a restart."""
        runs = list(self.free_runs)
        assert self._starts == sorted(self._lengths), "the address views differ"
        assert self._by_length == sorted((run.length, run.offset) for run in runs), "by length"
        assert self._free_bytes == sum(run.length for run in runs), "the sum of free bytes"
        for run in runs:
            assert run.length > 0, f"an empty run: {run}"
            assert run.offset % self._granule_bytes == run.length % self._granule_bytes == 0, run
            assert 0 <= run.offset < run.end <= self._capacity_bytes, f"outside: {run}"
        for left, right in pairwise(runs):
            assert left.end < right.offset, f"overlapping, or not coalesced: {left}, {right}"

    def __repr__(self) -> str:
        return (
            f"<Arena {self.used_bytes} of {self._capacity_bytes} bytes used, "
            f"{len(self._starts)} free runs, longest {self.largest_free_bytes}>"
        )

    def _place(self, length: int) -> int | None:
        """The offset for an extent of this rounded length. The allocation policy: best fit."""
        index = bisect_left(self._by_length, (length, 0))
        return self._by_length[index][1] if index < len(self._by_length) else None

    def _extent(self, offset: int, length: int) -> Extent:
        """The rounded extent. Raises ExtentConflict if the arena cannot have allocated it."""
        extent = Extent(offset, self.round_up(length))
        if offset < 0 or offset % self._granule_bytes or extent.end > self._capacity_bytes:
            raise ExtentConflict(f"no extent of this arena: {extent} in {self}")
        return extent

    def _run(self, index: int) -> Extent | None:
        """The free run at index `index` in address order, None beyond either end."""
        if not 0 <= index < len(self._starts):
            return None
        start = self._starts[index]
        return Extent(start, self._lengths[start])

    def _carve(self, offset: int, length: int) -> None:
        """Take bytes out of the free run that contains them all; up to two runs remain of it."""
        run = self._remove(bisect_right(self._starts, offset) - 1)
        if run.offset < offset:
            self._insert(run.offset, offset - run.offset)
        if offset + length < run.end:
            self._insert(offset + length, run.end - offset - length)

    def _insert(self, start: int, length: int) -> None:
        insort(self._starts, start)
        insort(self._by_length, (length, start))
        self._lengths[start] = length
        self._free_bytes += length

    def _remove(self, index: int) -> Extent:
        start = self._starts.pop(index)
        length = self._lengths.pop(start)
        del self._by_length[bisect_left(self._by_length, (length, start))]
        self._free_bytes -= length
        return Extent(start, length)


def cheapest_window(
    free_runs: Iterable[tuple[int, int]],
    evictable: Sequence[tuple[int, int, int]],
    need_bytes: int,
) -> list[int]:
    """Which of `evictable` to evict so that one run of `need_bytes` appears, at the lowest cost.

    `free_runs` are (offset, length), `evictable` are (offset, length, cost): what is lost with the
    extent, its length or more. Lengths are as the arena rounds them (`Arena.round_up`); the order
    is any, and no two overlap. An extent in neither list is an obstacle: leased, pinned, being
    written, or not passed as a candidate. Among equal costs the lowest address wins.

    Returns indices into `evictable` in address order. Empty when no choice makes such a run, or
    when a free run is long enough already; `Arena.fits` distinguishes the two cases.

    Takes one sort of all extents, then two pointers, about 0.5 microseconds per extent.
    """
    if need_bytes < 1:
        raise InvalidInput(f"need_bytes must be at least 1, not {need_bytes}")
    pieces = [(offset, length, 0, -1) for offset, length in free_runs]
    pieces += [(*extent, index) for index, extent in enumerate(evictable)]
    pieces.sort()
    best_cost: int | None = None
    best = (0, 0)
    first = run_bytes = run_cost = 0
    previous_end = -1
    for last, (offset, length, cost, _) in enumerate(pieces):
        if offset != previous_end:  # an obstacle, or a gap: the window starts anew
            first, run_bytes, run_cost = last, 0, 0
        previous_end = offset + length
        run_bytes += length
        run_cost += cost
        while run_bytes - pieces[first][1] >= need_bytes:
            run_bytes -= pieces[first][1]
            run_cost -= pieces[first][2]
            first += 1
        if run_bytes >= need_bytes and (best_cost is None or run_cost < best_cost):
            best_cost, best = run_cost, (first, last + 1)
    return [index for *_, index in pieces[slice(*best)] if index >= 0]
