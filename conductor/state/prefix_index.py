"""The prefix index: one walk over a prompt's keys gives each holder's count of leading blocks.

    key of a block -> strand -> group -> the holders of all blocks of that group, a bit each

A holder is a tier of an instance or a node ("prefill-3/hbm", "node-a/dram") and has a small number,
its bit. Blocks with the same holders share one group; neighbouring blocks of a prompt mostly have
the same holders.

Keys are chained (kvstore/format/keys.py): a key that is found implies that its whole prefix is the
same.

Looking up 256 keys takes 15 us, and 50 us if they are cold (not looked up lately). So keys that
were added or looked up in a row form a strand, and a prompt is compared with a strand as a whole,
in a tenth of that. Prompts that diverge within a strand are walked key by key once, which leaves
strands that end where the prompts diverge: the index becomes the prefix tree of the lookups.

Groups also make rare operations cheap. Clearing a holder, or replacing its blocks by an inventory,
changes a bit in every group instead of a value of every block, so an engine that restarts with a
hundred thousand blocks does not stall the decisions. Blocks that are left without holders that way
stay in the table as dead blocks until there are many of them.

The index is a hint: an entry may be out of date (`age_s`), and a full index evicts the oldest
blocks that were not looked up lately. A wrong entry costs time, never correctness. Pure: no I/O, no
clock. Not thread-safe.

Memory: 130 bytes per block, with a million blocks, by `bench/conductor/index.py`: 64 are the key,
24 its part of a strand of sixteen, the rest is the table. The table grows by doubling, which takes
0.1 s at a million blocks. Groups come on top, about 100 bytes and a bit per holder each; there are
as many as there are different sets of holders, some hundreds to thousands.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby, islice, repeat
from operator import attrgetter
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from ..errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    Numbers = NDArray[np.int64]

Tier = Literal["hbm", "dram", "nvme"]
TIERS: tuple[Tier, ...] = ("hbm", "dram", "nvme")

# HBM of 16,384 instances, DRAM and NVMe of 4,096 nodes, and headroom. A mask of all has 4 KiB.
HOLDERS_MAX = 32_768

# Half a gigabyte of memory; 2 billion tokens in blocks of 512.
BLOCKS_MAX = 4_000_000

# A full index evicts this fraction (1/64) of its blocks at a time, the oldest: the scan for the
# oldest costs as much for a single one.
_EVICTED_SHARE = 64
# Lookups are recorded once the index is this full, for up to this fraction (1/16) of its blocks.
_NEARLY_FULL = 0.75
_TOUCHED_SHARE = 16
# Fewer dead blocks than this are not worth a pass over the table.
_DEAD_MIN = 4096
# In a full index this fraction (1/8) is worth it: half a microsecond for each block of freed room.
_DEAD_SHARE = 8

# The bits of a byte, the lowest first: [1, 8, 1].
_BITS = np.left_shift(1, np.arange(8)).astype(np.uint8)[None, :, None]
# Leading ones of a byte, the highest bit first.
_LEADING_ONES = np.array([8 - (~n & 0xFF).bit_length() for n in range(256)], np.int64)


# Runs of fewer blocks form no strand: they are walked at each lookup, which takes 2 us.
_LONG = 16

# Up to this many runs, handling one after the other is faster than all at once.
_FEW_RUNS = 4


class HolderRun(NamedTuple):
    """Blocks [start, stop) of a prompt have the same `holders`, a bit mask of holder numbers."""

    start: int
    stop: int
    holders: int


@dataclass(slots=True)
class PrefixMatch:
    """The result of a lookup: runs from block 0 on without a gap, up to the first block that has no
    holder."""

    runs: tuple[HolderRun, ...] = ()
    _held: NDArray[np.uint8] | None = field(default=None, repr=False, compare=False)

    @property
    def blocks(self) -> int:
        """Leading blocks that each have at least one holder, not necessarily the same one."""
        return self.runs[-1].stop if self.runs else 0

    def lengths(self, width: int) -> Numbers:
        """Leading consecutive blocks that each single holder has, int64 [width]."""
        lengths = np.zeros(width, np.int64)
        if self.runs:
            held = self._packed()
            count = min(width, len(held) - 1)
            lengths[:count] = self._leading(held[:count])
        return lengths

    def leading(self, columns: Numbers) -> Numbers:
        """Leading consecutive blocks that at least one of the holders of each row has.

        `columns` [k, rows] are numbers of holders, -1 for none. Returns int64 [rows].
        """
        if not self.runs:
            return np.zeros(columns.shape[1], np.int64)
        held = self._packed()
        # The last row has no holder: -1 selects it, and so does a number newer than this match.
        places = np.minimum(columns, len(held) - 1)
        # One dimension less, and `take`, are three times as fast: nearly all matches have few runs.
        table = held[:, 0] if held.shape[1] == 1 else held
        together = table.take(places[0], axis=0, mode="wrap")
        for more in places[1:]:
            together |= table.take(more, axis=0, mode="wrap")
        return self._leading(together)

    def _packed(self) -> NDArray[np.uint8]:
        """Per holder one bit for each run, beginning with the highest bit of the first byte, then
        at least one zero bit: uint8 [holders + 1, runs // 8 + 1]."""
        if self._held is None:
            runs = self.runs
            nbytes = (max(run.holders.bit_length() for run in runs) + 7) // 8
            masks = b"".join([run.holders.to_bytes(nbytes, "little") for run in runs])
            rows = np.frombuffer(masks, np.uint8).reshape(len(runs), nbytes)
            held = np.zeros((8 * nbytes + 1, len(runs) // 8 + 1), np.uint8)
            if len(runs) <= _FEW_RUNS:
                for at, row in enumerate(rows):
                    held[:-1, 0] |= np.unpackbits(row, bitorder="little") << np.uint8(7 - at)
            else:
                across = np.ascontiguousarray(rows.T)  # `packbits` along memory is 10 times faster
                bits = np.packbits(across[:, None, :] & _BITS, axis=2)
                held[:-1, : bits.shape[2]] = bits.reshape(8 * nbytes, -1)
            self._held = held
        return self._held

    def _leading(self, held: NDArray[np.uint8]) -> Numbers:
        """For each row of bits, the stop of its last leading run (its last leading 1 bit)."""
        stops = np.array([0, *[run.stop for run in self.runs]], np.int64)
        if held.ndim == 1 or held.shape[1] == 1:
            runs = _LEADING_ONES.take(held.reshape(-1))
        else:
            first = np.argmax(held != 0xFF, axis=1)
            runs = 8 * first + _LEADING_ONES[held[np.arange(len(held)), first]]
        found: Numbers = stops.take(runs)
        return found


class _Group:
    """All blocks with exactly these holders; blocks that are in no strand are in `loose`. Compared
    by identity."""

    __slots__ = ("blocks", "holders", "loose")

    def __init__(self, holders: int) -> None:
        self.holders = holders
        self.blocks = 0
        self.loose = _Strand(self)


class _Strand:
    """`count` blocks of one group whose `keys`, joined, were added or looked up in a row. `count`
    is -1 once some of them have left the strand; the others are still of this group. Compared by
    identity."""

    __slots__ = ("count", "group", "keys")

    def __init__(self, group: _Group) -> None:
        self.group = group
        self.part()

    def part(self) -> None:
        """Mark the strand as broken: some of its blocks have left it. Its keys, which no lookup
        compares with any more, are freed: otherwise each block of a prompt could be the last one
        in a strand of its own, and keep keys as long as the prompt."""
        self.count, self.keys = -1, b""


@dataclass(slots=True)
class _Holder:
    """A tier of an instance or node. `blocks` counts its blocks. `staged` is the hidden number that
    collects an unfinished inventory; -1 for none."""

    name: str
    tier: str
    blocks: int = 0
    heard_at: float = float("-inf")
    staged: int = -1


class PrefixIndex:
    """Blocks and their holders. Invariants, for every group g but `_nobody`:

    - g.blocks counts the keys of `_blocks` that lead to g, and is not 0;
    - a strand with a count (not -1) has exactly its keys leading to it;
    - `_by_holders[m].holders == m`; groups that became equal may have one of them there;
    - `_dead` counts the keys that lead to groups without holders;
    - `_holders[n].blocks` counts the keys whose group has bit n.
    """

    def __init__(self, max_blocks: int = BLOCKS_MAX) -> None:
        if max_blocks < 1:
            raise InvalidRequest(f"an index of {max_blocks} blocks: allow at least one")
        self.max_blocks = max_blocks
        self.evicted_blocks = 0
        self.layout = 0  # counts numbers allocated and freed, for caches keyed by number
        self._blocks: dict[bytes, _Strand] = {}
        self._groups: set[_Group] = set()
        self._by_holders: dict[int, _Group] = {}
        self._nobody = _Group(0)
        self._dead = 0
        self._holders: list[_Holder | None] = []
        self._numbers: dict[tuple[str, str], int] = {}
        self._free: list[int] = []
        self._hidden = 0  # bit mask of staged numbers
        self._touched: set[bytes] = set()
        self._touched_before: set[bytes] = set()

    def __len__(self) -> int:
        """The number of blocks that have a holder."""
        return len(self._blocks) - self._dead

    def __repr__(self) -> str:
        return f"<PrefixIndex {len(self)} blocks, {len(self._numbers)} holders>"

    # -- holders ---------------------------------------------------------------------------------

    @property
    def width(self) -> int:
        """All numbers are below this."""
        return len(self._holders)

    def holder(self, name: str, tier: str) -> int:
        """The number of a tier of an instance or node, allocated if it is new. Raises
        InvalidRequest for an unknown tier, and when there are too many holders."""
        number = self._numbers.get((name, tier))
        if number is None:
            if tier not in TIERS:
                raise InvalidRequest(f"no tier {tier!r}; there are {', '.join(TIERS)}")
            number = self._new_number(_Holder(name, tier))
            self._numbers[name, tier] = number
        return number

    def find(self, name: str, tier: str) -> int | None:
        """The number of a holder, or None."""
        return self._numbers.get((name, tier))

    def label(self, number: int) -> str:
        """ "name/tier" of a holder. Raises InvalidRequest for a number without a holder."""
        holder = self._holder(number)
        return f"{holder.name}/{holder.tier}"

    def numbers(self) -> list[int]:
        """The numbers of all holders, including those without blocks."""
        return list(self._numbers.values())

    def blocks_of(self, number: int) -> int:
        """How many blocks a holder has. Raises InvalidRequest for a number without a holder."""
        return self._holder(number).blocks

    def heard(self, number: int, now: float) -> None:
        """Record that the entries of this holder were up to date at `now`. Raises InvalidRequest
        for a number without a holder."""
        holder = self._holder(number)
        holder.heard_at = max(holder.heard_at, now)

    def age_s(self, number: int, now: float) -> float:
        """Seconds since the holder's last report; infinite if it never reported."""
        return max(0.0, now - self._holder(number).heard_at)

    def drop(self, name: str, tiers: Iterable[str] = TIERS) -> None:
        """Remove these tiers of an instance or node as holders; their numbers are reused."""
        for tier in tiers:
            number = self._numbers.pop((name, tier), None)
            if number is not None:
                self.abandon_inventory(number)
                self._give_back(number)

    # -- blocks ----------------------------------------------------------------------------------

    def add(self, number: int, keys: Iterable[bytes], now: float, *, guess: bool = False) -> None:
        """Add blocks to a holder; idempotent. Keys are 16 bytes each. A guess is no report of the
        holder: it does not reset the holder's age. Raises InvalidRequest for a number without a
        holder."""
        holder = self._holder(number)
        if not guess:
            holder.heard_at = max(holder.heard_at, now)
        self._add(number, holder, keys)

    def remove(
        self, number: int, keys: Iterable[bytes], now: float, *, guess: bool = False
    ) -> None:
        """Remove blocks from a holder; unknown ones are ignored. `guess` and errors as in `add`."""
        holder = self._holder(number)
        if not guess:
            holder.heard_at = max(holder.heard_at, now)
        blocks, nobody, bit = self._blocks, self._nobody, 1 << number
        before = after = nobody
        moved = 0
        for key in keys:
            strand = blocks.get(key, nobody.loose)
            if strand.group is not before:
                if not strand.group.holders & bit:
                    continue
                self._moved(before, after, moved)
                holder.blocks -= moved
                before, moved = strand.group, 0
                after = self._group(before.holders ^ bit)
            elif before is nobody:
                continue
            if strand.count >= 0:
                strand.part()
            if after is nobody:
                del blocks[key]
            else:
                blocks[key] = after.loose
            moved += 1
        self._moved(before, after, moved)
        holder.blocks -= moved

    def clear(self, number: int, now: float) -> None:
        """Remove all blocks of a holder. The cost is that of a pass over the groups, not over the
        blocks. Raises InvalidRequest for a number without a holder."""
        holder = self._holder(number)
        holder.heard_at = max(holder.heard_at, now)
        self._clear(number)

    def missing(self, number: int, keys: Iterable[bytes]) -> list[bytes]:
        """Those of `keys` that the index does not have for this holder."""
        get, none, bit = self._blocks.get, self._nobody.loose, 1 << number
        return [key for key in keys if not get(key, none).group.holders & bit]

    def match(self, keys: Sequence[bytes]) -> PrefixMatch:
        """Look up the holders of a prompt's leading blocks. The cost grows with the number of
        blocks up to the first one without a holder."""
        blocks, none, hidden = self._blocks, self._nobody.loose, self._hidden
        runs: list[HolderRun] = []
        before = start = at = 0
        while at < len(keys):
            strand = blocks.get(keys[at], none)
            holders = strand.group.holders & ~hidden if hidden else strand.group.holders
            if holders != before:
                if before:
                    runs.append(HolderRun(start, at, before))
                start, before = at, holders
            if not holders:
                break
            stop = at + strand.count
            known = at < stop <= len(keys) and b"".join(keys[at:stop]) == strand.keys
            at = stop if known else self._walk(keys, at)
        if before:
            runs.append(HolderRun(start, at, before))
        if len(blocks) >= _NEARLY_FULL * self.max_blocks:
            self._touch(keys[:at])
        return PrefixMatch(tuple(runs))

    def _walk(self, keys: Sequence[bytes], start: int) -> int:
        """The end of the run of blocks of one group that begins at `start`; the loops run in C. A
        run of `_LONG` blocks or more becomes a strand."""
        found = map(self._blocks.get, islice(keys, start, None), repeat(self._nobody.loose))
        group, same = next(groupby(found, _group_of))
        old = list(same)
        stop = start + len(old)
        if len(old) >= _LONG:
            for strand in set(old):
                strand.part()
            self._bind(group, keys[start:stop])
        return stop

    def holders_of(self, key: bytes) -> list[int]:
        """The numbers of all holders of a block."""
        return _bits(self._blocks.get(key, self._nobody.loose).group.holders & ~self._hidden)

    # -- inventories: complete lists of a holder's blocks, which replace its entries --------------

    def begin_inventory(self, number: int) -> None:
        """Begin an inventory: the blocks added by `inventory` replace all entries of this holder at
        `end_inventory`; until then lookups see the old entries. An earlier unfinished inventory is
        discarded. Raises InvalidRequest for a number without a holder."""
        self.abandon_inventory(number)
        holder = self._holder(number)
        holder.staged = self._new_number(_Holder(holder.name, holder.tier))
        self._hidden |= 1 << holder.staged

    def inventory(self, number: int, keys: Iterable[bytes]) -> None:
        """Add blocks to the inventory. Raises InvalidRequest if no inventory was begun."""
        staged = self._staged(number)
        self._add(staged, self._holder(staged), keys)

    def end_inventory(self, number: int, now: float) -> None:
        """Replace the holder's entries by the inventory. The cost is that of a pass over the
        groups, not over the blocks. Raises InvalidRequest if no inventory was begun."""
        staged = self._staged(number)
        holder = self._holder(number)
        self._clear(number)
        self._change(1 << staged, 1 << number)
        holder.blocks, self._holder(staged).blocks = self._holder(staged).blocks, 0
        holder.heard_at = max(holder.heard_at, now)
        self.abandon_inventory(number)

    def abandon_inventory(self, number: int) -> None:
        """Discard an unfinished inventory; no effect if there is none."""
        holder = self._holder(number)
        if holder.staged >= 0:
            self._give_back(holder.staged)
            self._hidden &= ~(1 << holder.staged)
            holder.staged = -1

    # -- inside ----------------------------------------------------------------------------------

    def _new_number(self, holder: _Holder) -> int:
        self.layout += 1
        if self._free:
            number = self._free.pop()
            self._holders[number] = holder
            return number
        if len(self._holders) >= HOLDERS_MAX:
            raise InvalidRequest(f"{HOLDERS_MAX} holders of blocks are known, which is the limit")
        self._holders.append(holder)
        return len(self._holders) - 1

    def _give_back(self, number: int) -> None:
        self.layout += 1
        self._clear(number)
        self._holders[number] = None
        self._free.append(number)

    def _holder(self, number: int) -> _Holder:
        holder = self._holders[number] if 0 <= number < len(self._holders) else None
        if holder is None:
            raise InvalidRequest(f"no holder has number {number}; `holder` gives numbers")
        return holder

    def _staged(self, number: int) -> int:
        staged = self._holder(number).staged
        if staged < 0:
            raise InvalidRequest(f"no inventory of {self.label(number)} was begun")
        return staged

    def _add(self, number: int, holder: _Holder, keys: Iterable[bytes]) -> None:
        blocks, none, bit = self._blocks, self._nobody.loose, 1 << number
        before = after = _UNSEEN
        row: list[bytes] = []
        for key in keys:
            strand = blocks.get(key, none)
            group = strand.group
            if group is not before:
                self._added(holder, before, after, row)
                before, row = group, []
                after = group if group.holders & bit else self._group(group.holders | bit)
            if after is not group:
                if strand.count >= 0:
                    strand.part()
                blocks[key] = after.loose
                row.append(key)
        self._added(holder, before, after, row)
        if len(blocks) > self.max_blocks:
            self._make_room()

    def _added(self, holder: _Holder, before: _Group, after: _Group, row: list[bytes]) -> None:
        """Account for keys, added in a row, that moved from the group `before` to `after`."""
        self._moved(before, after, len(row))
        holder.blocks += len(row)
        if len(row) >= _LONG:
            self._bind(after, row)

    def _bind(self, group: _Group, row: Sequence[bytes]) -> None:
        """Make these keys of a group a strand. The caller has broken their earlier strands."""
        strand = _Strand(group)
        strand.keys, strand.count = b"".join(row), len(row)
        self._blocks.update(zip(row, repeat(strand), strict=False))

    def _group(self, holders: int) -> _Group:
        """The group of these holders, created if there is none."""
        if not holders:
            return self._nobody
        group = self._by_holders.get(holders)
        if group is None:
            group = self._by_holders[holders] = _Group(holders)
            self._groups.add(group)
        return group

    def _moved(self, before: _Group, after: _Group, count: int) -> None:
        """Account for `count` keys that moved from the group `before` to `after`. `_nobody` has no
        count."""
        if not count:
            return
        if after is not self._nobody:
            after.blocks += count
        if before is not self._nobody:
            before.blocks -= count
            if not before.holders:
                self._dead -= count
            if not before.blocks:
                self._forget(before)

    def _forget(self, group: _Group) -> None:
        self._groups.discard(group)
        if self._by_holders.get(group.holders) is group:
            del self._by_holders[group.holders]

    def _clear(self, number: int) -> None:
        holder = self._holder(number)
        if holder.blocks:
            holder.blocks = 0
            self._change(1 << number, 0)
            if self._dead > max(_DEAD_MIN, len(self)):
                self._bury()

    def _change(self, old: int, new: int) -> None:
        """Replace the bit `old` by the bit `new` (0: none) in every group that has it."""
        changed = [group for group in self._groups if group.holders & old]
        for group in changed:
            if self._by_holders.get(group.holders) is group:
                del self._by_holders[group.holders]
            group.holders = group.holders & ~old | new
        for group in changed:
            if group.holders:
                self._by_holders.setdefault(group.holders, group)
            else:
                self._dead += group.blocks

    def _bury(self) -> None:
        """Remove the dead blocks. This takes some 50 ns per block of the table, so it runs only
        when many of them are dead."""
        self._blocks = {key: one for key, one in self._blocks.items() if one.group.holders}
        self._groups = {group for group in self._groups if group.holders}
        self._dead = 0

    # -- when it is full ---------------------------------------------------------------------------

    def _touch(self, keys: Sequence[bytes]) -> None:
        self._touched.update(keys)
        if len(self._touched) > self.max_blocks // _TOUCHED_SHARE:
            self._touched_before, self._touched = self._touched, set()

    def _make_room(self) -> None:
        """Evict the oldest blocks, except those looked up lately: prompts begin with the oldest
        blocks, and those of a system prompt are worth keeping. Dead blocks leave in their turn, or
        all at once if there are many."""
        if self._dead > self.max_blocks // _DEAD_SHARE:
            self._bury()
        spare = True
        while len(self._blocks) > self.max_blocks:
            self._evict(spare)
            spare = False

    def _evict(self, spare: bool) -> None:
        blocks = self._blocks
        count = max(len(blocks) - self.max_blocks, self.max_blocks // _EVICTED_SHARE)
        left: dict[_Group, int] = {}
        for key in list(islice(blocks, count)):
            strand = blocks.pop(key)
            group = strand.group
            asked_for = key in self._touched or key in self._touched_before
            if spare and asked_for and group.holders:
                blocks[key] = strand  # at the end: the youngest
            else:
                if strand.count >= 0:
                    strand.part()
                left[group] = left.get(group, 0) + 1
        for group, gone in left.items():
            for number in _bits(group.holders):
                self._holder(number).blocks -= gone
            self._moved(group, self._nobody, gone)
            self.evicted_blocks += gone if group.holders else 0


# No key leads to it.
_UNSEEN = _Group(0)
_group_of = attrgetter("group")


def _bits(mask: int) -> list[int]:
    """The numbers of the bits that are set."""
    data = mask.to_bytes((mask.bit_length() + 7) // 8, "little")
    bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")
    numbers: list[int] = np.flatnonzero(bits).tolist()
    return numbers
