"""Fetching what the longest prefix has more than a candidate's own: Algorithm 1's second branch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ..records import Fetch
from .local import start_s
from .places import places_of

if TYPE_CHECKING:
    from .base import Blocks, Floats, Question
    from .local import Compute, Own
    from .places import Places


@dataclass(slots=True)
class Longest:
    """The place that has the longest leading part of the prompt: `blocks`, in `parts` of (tier,
    start, stop), where tier 0 is its faster one."""

    question: Question
    places: Places
    place: int
    blocks: int
    parts: list[tuple[int, int, int]] = field(init=False)

    def __post_init__(self) -> None:
        self.parts = _parts(self.question, self.places, self.place, self.blocks)

    @property
    def fast(self) -> bool:
        """Whether all of it is in the faster tier."""
        return len(self.parts) == 1 and self.parts[0][0] == 0

    def transfer_s(self, start_blocks: Blocks) -> Floats:
        """Seconds to bring what is beyond `start_blocks` [candidates] to each candidate."""
        rows = self.question.rows
        each = [
            self._seconds(tier, rows, np.maximum(stop - np.maximum(start_blocks, start), 0))
            for tier, start, stop in self.parts
        ]
        return sum(each[1:], each[0])

    def fetches(self, at: int, start_block: int) -> tuple[Fetch, ...]:
        """The same for one candidate, as orders. None if the place is its own node, of which the
        engine reads by itself."""
        rows = self.question.rows[at : at + 1]
        spec = self.question.cluster.specs[int(rows[0])]
        assert spec is not None
        if self.places.is_local(self.place, spec.node):
            return ()
        found = []
        for tier, first, stop in self.parts:
            start = max(first, start_block)
            if start < stop:
                seconds = float(self._seconds(tier, rows, np.array([stop - start]))[0])
                nbytes = (stop - start) * spec.block_bytes
                found.append(
                    Fetch(start, stop, self.places.label(self.place, tier), nbytes, seconds)
                )
        return tuple(found)

    def _seconds(self, tier: int, rows: Blocks, blocks: Blocks) -> Floats:
        question, cluster = self.question, self.question.cluster
        return question.transfers.seconds_from(
            self.places.nodes.item(self.place),
            self.places.tiers.item(tier, self.place),
            cluster.node.take(rows),
            blocks * cluster.block_bytes.take(rows),
            question.now,
        )


def _parts(
    question: Question, places: Places, place: int, blocks: int
) -> list[tuple[int, int, int]]:
    """In which tier a place has the prompt's leading blocks: the faster one, where it has them in
    both. Blocks that came back from a disk lie between such that did not."""
    column = int(places.columns[0, place])
    parts: list[tuple[int, int, int]] = []
    for start, stop, holders in question.match.runs:
        if start >= blocks:
            break
        tier = 0 if column >= 0 and holders >> column & 1 else 1
        if parts and parts[-1][0] == tier:
            parts[-1] = (tier, parts[-1][1], stop)
        else:
            parts.append((tier, start, stop))
    return parts


def longest(question: Question) -> Longest | None:
    """Who has the longest leading part; None if nobody has any. Of several, who would send it
    first, by tier and by what it is sending already; of equal ones, the dice decide, or one of a
    hundred holders of a hot prefix would have to send it to all others."""
    places = places_of(question)
    if not len(places) or not question.match.blocks:
        return None
    blocks, few = question.match.blocks, _having_all(question, places)
    if few:
        return _asked(question, places, few)
    fast, whole = places.lengths(question.match)
    blocks = int(whole.max())
    if not blocks:
        return None
    able = np.flatnonzero(whole == blocks)
    slow = (fast.take(able) < blocks).astype(np.int64)
    at = 0 if len(able) == 1 else _first_to_send(question, places, able, slow, blocks)
    return Longest(question, places, int(able[at]), blocks)


# Sets of holders up to this size are gone through bit by bit, larger ones as arrays.
_FEW = 16


def _having_all(question: Question, places: Places) -> list[int]:
    """The places of the few holders that have all that anybody has; empty if none has, or many.
    Mostly there are some: whoever computed a prompt last has all of it."""
    if question.best_blocks < question.match.blocks:
        return []
    holders = -1
    for run in question.match.runs:
        holders &= run.holders
    return places.having(holders) if holders.bit_count() <= _FEW else []


def _asked(question: Question, places: Places, few: list[int]) -> Longest:
    blocks = question.match.blocks
    found = [Longest(question, places, place, blocks) for place in few]
    slow = [int(not one.fast) for one in found]
    if len({int(places.nodes[place]) for place in few}) == 1 and places.nodes[few[0]] >= 0:
        # One sender and one way: the tier decides.
        tiers = [int(places.tiers[tier, place]) for tier, place in zip(slow, few, strict=True)]
        return found[tiers.index(min(tiers))]
    at = _first_to_send(question, places, np.array(few), np.array(slow), blocks)
    return found[at]


def _first_to_send(
    question: Question, places: Places, able: Blocks, slow: Blocks, blocks: int
) -> int:
    """The index in `able` of who would send so many blocks first; `slow` [able]: 1 for those that
    have some of them in their slower tier only."""
    nbytes = int(question.cluster.block_bytes[question.rows[0]]) * blocks
    seconds = question.transfers.seconds(
        places.nodes[able], places.tiers[slow, able], -1, nbytes, question.now
    )
    # Estimates that differ by less than a part in a million are equal.
    first = np.flatnonzero(seconds <= seconds.min() * (1 + 1e-6))
    return int(first[question.dice.randrange(len(first))])


@dataclass(slots=True)
class Extended:
    """What each candidate does at best with its own blocks and those of the longest prefix, all
    [candidates]: it uses `blocks`, of which those beyond its own come in `transfer_s`, and computes
    the rest in `compute_s`. `whole_s` is the transfer also where it does not pay."""

    blocks: Blocks
    transfer_s: Floats
    compute_s: Floats
    ttft_s: Floats
    source: Longest | None
    whole_s: Floats

    def fetches(self, at: int, own_blocks: int) -> tuple[Fetch, ...]:
        """What one candidate fetches."""
        if self.source is None or self.blocks[at] <= own_blocks:
            return ()
        return self.source.fetches(at, own_blocks)


def extend(
    question: Question,
    mine: Own,
    compute: Compute,
    *,
    threshold: float = 1.0,
    overlap: bool = False,
    to_win: bool = False,
) -> Extended:
    """Per candidate the better of its own prefix and the longest one, which must be longer by a
    factor of `threshold` for that. With `to_win`, only if somebody could become the best by it:
    else all are what they are alone."""
    ttft_s = start_s(question.queue_s, mine.load_s, overlap=overlap) + mine.compute_s
    none = np.zeros(len(ttft_s))
    # Nobody has more than the least that anybody uses: most prompts of a hot prefix end here.
    alone = Extended(mine.blocks, none, mine.compute_s, ttft_s, None, none)
    if question.pool_blocks <= mine.blocks[mine.blocks.argmin()]:
        return alone
    compute_s = compute.seconds(question.pool_blocks)
    if to_win:
        # Even if all that anybody has were there at once.
        at_best = question.queue_s + compute_s
        if at_best[at_best.argmin()] >= ttft_s[ttft_s.argmin()]:
            return alone
    source = longest(question)
    if source is None:
        return alone
    if source.blocks != question.pool_blocks:
        compute_s = compute.seconds(source.blocks)
    transfer_s = source.transfer_s(mine.blocks)
    bring_s = mine.load_s + transfer_s
    fetched_s = start_s(question.queue_s, bring_s, overlap=overlap) + compute_s
    pays = (source.blocks > mine.blocks) & (fetched_s < ttft_s)
    if threshold > 1.0:  # by multiplication, so that an own prefix of 0 needs no case of its own
        pays &= source.blocks >= threshold * mine.blocks
    pays &= question.cluster.fetches.take(question.rows)
    if not pays.any():
        return Extended(mine.blocks, none, mine.compute_s, ttft_s, source, transfer_s)
    return Extended(
        np.where(pays, source.blocks, mine.blocks),
        np.where(pays, transfer_s, none),
        np.where(pays, compute_s, mine.compute_s),
        np.where(pays, fetched_s, ttft_s),
        source,
        transfer_s,
    )
