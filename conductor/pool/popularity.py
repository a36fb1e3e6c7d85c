"""Popularity of prefixes, in all and per node: decaying counts in bounded memory. Pure.

A prompt's keys are chained, so a block is wanted at least as often as any block after it: its
popularity is the number of prompts that begin with it, where a prompt of one half-life ago counts
half. More than half of all blocks are wanted once (Mooncake's traces), and it is unknown which when
they arrive, so a counter for each would need too much memory:

- A *sketch* counts all blocks. It is a count-min sketch with conservative update: each key has one
  cell in each of four rows, and its count is the lowest of them. The count may be too high, when
  the key shares all four cells, and never too low. Space-saving, the other candidate, keeps exact
  keys but gives the count of an evicted key to the key that replaces it; a stream of which half is
  new would replace its counters all the time, and a tail could look more popular than its own head.
  In the sketch the chain helps instead: the counts of a key's ancestors are an upper bound, so a
  tail is never above its head, and one cell without a collision anywhere in the chain corrects all
  that follow.
- A *table* has the keys that were seen twice, with their parents: hot prefixes are listed from it.
  The parent of every key in the table is in the table too. When it is full, the least popular
  quarter is evicted, and from then on only keys enter that are more popular than the least popular
  one that was kept (admission by count: TinyLFU, Einziger et al., ACM ToS 2017). Otherwise prompts
  that return more rarely than the table is renewed would evict each other all the time.

Decay costs nothing: instead of shrinking all counts, later prompts count for more ("forward decay",
Cormode et al., ICDE 2009), 2^(t / half-life), and every 256 half-lives all counts are divided once.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec
import numpy as np
import xxhash
from msgspec import Meta

from ..records import KEY_BYTES
from ..state.sliced_work import finished

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ..state.sliced_work import Work

    Floats = NDArray[np.float64]
    Words = NDArray[np.uint64]
    Places = NDArray[np.int64]

ROWS = 4
# 8 MiB of float64 in four rows. 100 prompts/s of 17 blocks and a half-life of 300 s are 740,000
# counts at a time: 2.8 per cell if all keys were new, fewer by conservative update and the chain.
COLUMNS_LOG2 = 18
# Counted blocks of one prompt: two million tokens in blocks of 512. Prompts share no blocks beyond.
CHAIN_MAX = 4096
# Keys in the table: 8 million tokens of shared prefixes; some 4 MB.
TRACKED_MAX = 16_384
# Groups whose prompts are counted; a further one evicts the one that was seen first.
GROUPS_MAX = 1024
# A key enters the table from this count on: seen twice, the first time at most a half-life ago.
TRACKED_FROM = 1.5
_KEPT_SHARE = 0.75
# Keys of the table that are counted in one piece: half a millisecond.
_PIECE_KEYS = 2048
_EXPONENT_MAX = 256.0

_MIX = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9], np.uint64)


class PopularitySettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How fast popularity decays."""

    half_life_s: Annotated[float, Meta(ge=1, le=86_400)] = 300.0
    """A prompt of so long ago counts half. Long enough that ten prompts per hour are seen as one
    stream, short enough that yesterday's system prompt makes room for today's."""


class Group(NamedTuple):
    """The engines of a `model` that can use the same blocks: those whose keys are of one `space`,
    or all ("")."""

    model: str = ""
    space: str = ""


EVERYBODY = Group()


class HotPrefix(NamedTuple):
    """`keys` from block 0 on. `popularity` is how many remembered prompts begin with all of them,
    `share` how large a part of all prompts to its `group` that is, `rate_s` prompts per second,
    `block_bytes` the size of one block (0 if unknown)."""

    keys: tuple[bytes, ...]
    popularity: float
    share: float
    rate_s: float
    block_bytes: int
    group: Group = EVERYBODY


class Sketch:
    """Counts of keys that decay by half each `half_life_s`; never below the true counts."""

    def __init__(
        self, half_life_s: float, dice: random.Random, columns_log2: int = COLUMNS_LOG2
    ) -> None:
        self._half_life_s = half_life_s
        self._shift = np.uint64(64 - columns_log2)
        self._rows = np.arange(ROWS, dtype=np.int64)[:, None] << columns_log2
        self._steps = np.arange(ROWS, dtype=np.uint64)[:, None]
        # Keys come from callers: without a secret salt, a caller could craft keys that collide.
        self._salt = np.uint64(dice.getrandbits(64))
        self._cells: Floats = np.zeros(ROWS << columns_log2)
        self._origin = 0.0

    def places(self, words: Words, salts: Words | None = None) -> Places:
        """The cells [rows, keys] of keys given as two words each; `salts` select other cells."""
        first = words[:, 0] ^ self._salt
        first = (first if salts is None else first ^ salts) * _MIX[0]
        first ^= first >> np.uint64(32)
        second = (words[:, 1] + first) * _MIX[1] | np.uint64(1)
        mixed = ((first + self._steps * second) * _MIX[2]) >> self._shift
        cells: Places = mixed.astype(np.int64) + self._rows
        return cells

    def add(self, places: Places, now: float, weight: float = 1.0) -> Floats:
        """Count a chain of keys `weight` times more; returns the new count of each, heads first."""
        unit = self._unit(now)
        counts = np.minimum.accumulate(self._cells[places].min(axis=0)) + weight * unit
        # Two keys of the chain may share a cell: the larger count is for both. Flat and repeated,
        # because `ufunc.at` reads beyond values that it would have to broadcast (numpy 2.4).
        np.maximum.at(self._cells, places.ravel(), np.tile(counts, ROWS))
        found: Floats = counts / unit
        return found

    def estimate(self, places: Places, now: float) -> Floats:
        """The count of each key by its own cells, not bounded by the chain."""
        found: Floats = self._cells[places].min(axis=0) / self._unit(now)
        return found

    def fade_by(self, half_life_s: float, now: float) -> None:
        """Change the half-life from `now` on; the current counts are kept."""
        self._rebase(now)
        self._half_life_s = half_life_s

    def _unit(self, now: float) -> float:
        """The weight of one prompt that arrives now, in the cells' unit."""
        if now - self._origin > _EXPONENT_MAX * self._half_life_s:
            self._rebase(now)
        return float(2.0 ** ((now - self._origin) / self._half_life_s))

    def _rebase(self, now: float) -> None:
        self._cells *= 2.0 ** ((self._origin - now) / self._half_life_s)
        self._origin = now


class Popularity:
    """Popularity of the prefixes of prompts, in all and per node. Not thread-safe."""

    def __init__(
        self,
        dice: random.Random,
        settings: PopularitySettings | None = None,
        *,
        tracked_max: int = TRACKED_MAX,
        columns_log2: int = COLUMNS_LOG2,
    ) -> None:
        self.settings = settings or PopularitySettings()
        half_life_s = self.settings.half_life_s
        self._seen = Sketch(half_life_s, dice, columns_log2)
        self._wanted = Sketch(half_life_s, dice, columns_log2)
        self._prompts: dict[Group, tuple[float, float]] = {}  # of each group: how many, when
        self._grain = (1.0, 0.0)  # the largest weight of one prompt, and when it was counted
        self._tracked_max = tracked_max
        self._floor = (0.0, 0.0)  # the least popularity that was kept in the table, and when
        # The table: row of each key, and columns. A parent is in a lower row than its children.
        self._row: dict[bytes, int] = {}
        self._parent = np.full(tracked_max, -1, np.int64)
        self._block_bytes = np.zeros(tracked_max, np.int64)
        self._group = np.full(tracked_max, None, object)

    def __len__(self) -> int:
        """How many keys are in the table."""
        return len(self._row)

    def configure(self, settings: PopularitySettings, now: float) -> None:
        """Apply changed settings from `now` on; the current counts are kept."""
        self._prompts = {group: (self.prompts(now, group), now) for group in self._prompts}
        self._grain = (self.grain(now), now)
        self._floor = (self._faded(self._floor, now), now)
        self.settings = settings
        for sketch in (self._seen, self._wanted):
            sketch.fade_by(settings.half_life_s, now)

    def seen(
        self,
        keys: Sequence[bytes],
        now: float,
        *,
        group: Group = EVERYBODY,
        block_bytes: int = 0,
        weight: float = 1.0,
    ) -> int:
        """Count a prompt with these keys, from block 0 on; it stands for `weight` prompts. Returns
        how many leading blocks it shares with other prompts: pass those to `wanted`.

        Some numpy operations, 40 us for 256 keys, and a step in Python for each block that is seen
        for the second time.
        """
        if weight > self.grain(now):
            self._grain = (weight, now)
        self._prompts[group] = self.prompts(now, group) + weight, now
        if len(self._prompts) > GROUPS_MAX:
            self._prompts.pop(next(iter(self._prompts)))
        if not keys:
            return 0
        keys = keys[:CHAIN_MAX]
        counts = self._seen.add(self._seen.places(_words(keys)), now, weight)
        shared = int(np.count_nonzero(counts >= weight + TRACKED_FROM - 1.0))
        floor = self._faded(self._floor, now)
        self._track(keys, int(np.count_nonzero(counts[:shared] > floor)), group, block_bytes, now)
        return shared

    def making_room(self, keys: int, now: float) -> Work[None]:
        """Make room for a prompt of so many keys in the table, as `seen` does by itself, but in
        pieces: 3 ms. Nobody may call `seen` between them."""
        if len(self._row) + min(keys, CHAIN_MAX) > self._tracked_max:
            yield from self._pruning(now)

    def wanted(self, keys: Sequence[bytes], node: str, now: float, *, weight: float = 1.0) -> None:
        """Count demand on `node`: a prompt that begins with these keys was assigned to an instance
        there, whether the node had the blocks or had to fetch them."""
        if keys:
            words = _words(keys[:CHAIN_MAX])
            self._wanted.add(self._wanted.places(words, salts_of([node])), now, weight)

    def prompts(self, now: float, group: Group = EVERYBODY) -> float:
        """The decayed number of prompts to a group: a prompt of a half-life ago counts half."""
        return self._faded(self._prompts.get(group, (0.0, now)), now)

    def grain(self, now: float) -> float:
        """The most that one counted prompt adds to a current popularity; 1 as long as each prompt
        stands for itself. Multiply a threshold in prompts by the grain before comparing, so that it
        means as many counted prompts. Otherwise one of a thousand prompts that stood for ten each
        would make its prefix hot."""
        return max(1.0, self._faded(self._grain, now))

    def _faded(self, counted: tuple[float, float], now: float) -> float:
        """What is left now of a count at a time."""
        count, at = counted
        return float(count * 2.0 ** (-max(0.0, now - at) / self.settings.half_life_s))

    def of_each(self, keys: Sequence[bytes], now: float) -> Floats:
        """Popularity of blocks that need not follow each other."""
        if not keys:
            return np.empty(0)
        return self._seen.estimate(self._seen.places(_words(keys)), now)

    def demand_on(self, key: bytes, salts: Words, now: float) -> Floats:
        """Demand for one block on each of many nodes, given by their `salts_of`."""
        words = np.broadcast_to(_words([key]), (len(salts), KEY_BYTES // 8))
        return self._wanted.estimate(self._wanted.places(words, salts), now)

    def demand_each(self, keys: Sequence[bytes], nodes: Sequence[str], now: float) -> Floats:
        """Demand for `keys[i]` on `nodes[i]`, whether the node has the block or not."""
        if not keys:
            return np.empty(0)
        places = self._wanted.places(_words(keys), salts_of(nodes))
        return self._wanted.estimate(places, now)

    def finding_hot(self, n: int, now: float) -> Work[list[HotPrefix]]:
        """The most popular prefixes, the most popular first; at most `n`. Works in pieces, on a
        snapshot of the table at the first piece.

        A prefix extends as far as its popularity stays within one power of two: where half of the
        prompts continue differently, the common part ends, and is a prefix of its own.
        """
        if n <= 0 or not self._row:
            return []
        keys = list(self._row)
        parent = self._parent[: len(keys)].copy()
        block_bytes, groups = self._block_bytes[: len(keys)].copy(), self._group[: len(keys)].copy()
        counts = yield from self._counting(keys, parent, now)
        yield
        level = np.frexp(counts)[1]
        goes_on = np.zeros(len(keys), np.bool_)
        goes_on[parent[(parent >= 0) & (level == level[parent])]] = True
        tips = np.flatnonzero(~goes_on & (counts > 0))
        best = tips[np.argsort(-counts[tips], kind="stable")][:n]
        rate = math.log(2) / self.settings.half_life_s
        chains = _Chains(keys, parent.tolist())
        found: list[HotPrefix] = []
        for row in best.tolist():
            count, group = float(counts[row]), groups[row]
            share = count / max(self.prompts(now, group), count)
            of_one = int(block_bytes[row])
            found.append(HotPrefix(chains.to(row), count, share, count * rate, of_one, group))
            yield
        return found

    # -- the table ---------------------------------------------------------------------------------

    def _track(
        self, keys: Sequence[bytes], count: int, group: Group, block_bytes: int, now: float
    ) -> None:
        """Put the first `count` of these keys into the table, as far as there is room."""
        begin = self._tracked(keys, count)
        if len(self._row) + count - begin > self._tracked_max:
            finished(self._pruning(now))
            begin = self._tracked(keys, count)
            count = min(count, begin + self._tracked_max - len(self._row))
        parent = self._row[keys[begin - 1]] if begin else -1
        for key in keys[begin:count]:
            row = self._row[key] = len(self._row)
            self._parent[row], self._block_bytes[row] = parent, block_bytes
            self._group[row] = group
            parent = row

    def _tracked(self, keys: Sequence[bytes], count: int) -> int:
        """How many of the first `count` keys are in the table: a key's ancestors are in it too."""
        while count and keys[count - 1] not in self._row:
            count -= 1
        return count

    def _counting(self, keys: list[bytes], parent: Places, now: float) -> Work[Floats]:
        """Popularity of all keys in the table, in their order; no child is above its parent."""
        counts = np.empty(len(keys))
        for at in range(0, len(keys), _PIECE_KEYS):
            words = _words(keys[at : at + _PIECE_KEYS])
            counts[at : at + len(words)] = self._seen.estimate(self._seen.places(words), now)
            yield
        # The minimum over all ancestors, by pointer jumping: twice as far in each round.
        above = parent.copy()
        while (known := above >= 0).any():
            counts[known] = np.minimum(counts[known], counts[above[known]])
            above[known] = above[above[known]]
            yield
        return counts

    def _pruning(self, now: float) -> Work[None]:
        """Evict all but the most popular keys. Of equals the lower row is kept, and parents are in
        lower rows: so the parent of a kept key is kept."""
        keys = list(self._row)
        counts = yield from self._counting(keys, self._parent[: len(keys)], now)
        order = np.argsort(-counts, kind="stable")
        yield
        kept = np.sort(order[: int(self._tracked_max * _KEPT_SHARE)])
        if len(kept) < len(keys):
            self._floor = float(counts[kept].min()), now
        row: dict[bytes, int] = {}
        for begin in range(0, len(kept), _PIECE_KEYS):
            some = kept[begin : begin + _PIECE_KEYS].tolist()
            row.update((keys[old], new) for new, old in enumerate(some, begin))
            yield
        renumbered = np.full(len(keys) + 1, -1, np.int64)
        renumbered[kept] = np.arange(len(kept))
        self._parent[: len(kept)] = renumbered[self._parent[kept]]
        for column in (self._block_bytes, self._group):
            column[: len(kept)] = column[kept]
        self._row = row

    def check(self) -> None:
        """Raise AssertionError unless parents are in the table, below their children."""
        parent = self._parent[: len(self._row)]
        assert list(self._row.values()) == list(range(len(self._row)))
        assert bool((parent < np.arange(len(parent))).all())


class _Chains:
    """Prefixes of one snapshot of the table: a head that several prefixes share is walked once."""

    def __init__(self, keys: list[bytes], parent: list[int]) -> None:
        self._keys, self._parent = keys, parent
        # For each row walked: a chain that contains its key, and the length up to that key.
        self._walked: dict[int, tuple[tuple[bytes, ...], int]] = {}

    def to(self, row: int) -> tuple[bytes, ...]:
        """All keys from block 0 to this row's."""
        rows: list[int] = []
        while row >= 0 and row not in self._walked:
            rows.append(row)
            row = self._parent[row]
        head, blocks = self._walked.get(row, ((), 0))
        chain = head[:blocks] + tuple([self._keys[at] for at in reversed(rows)])
        for above, at in enumerate(rows):
            self._walked[at] = chain, len(chain) - above
        return chain


def _words(keys: Sequence[bytes]) -> Words:
    words: Any = np.frombuffer(b"".join(keys), np.uint64)
    found: Words = words.reshape(-1, KEY_BYTES // 8)
    return found


def salts_of(nodes: Sequence[str]) -> Words:
    """One hashed word per node, which separates the nodes' counts in the sketch; hashed, so that it
    does not equal a word of a key."""
    return np.array([xxhash.xxh3_64_intdigest(node.encode()) for node in nodes], np.uint64)
