"""Remote fetch: a candidate fetches the blocks of the longest cached prefix that it lacks itself:
Algorithm 1's second branch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ..records import Fetch
from .block_sources import places_of
from .local_cost import tier_block_s, turn_s
from .policy_registry import Choice

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .block_sources import Places
    from .delayed_others import DelayedOthers
    from .local_cost import Compute, Own
    from .policy_registry import Blocks, Floats, PolicyQuestion


@dataclass(slots=True)
class Longest:
    """The place that has the longest leading part of the prompt: `blocks`, in `parts` of (tier,
    start, stop), where tier 0 is its faster one."""

    question: PolicyQuestion
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
        """Seconds to transfer the blocks beyond `start_blocks` [candidates] to each candidate."""
        rows = self.question.rows
        each = [
            self._seconds(tier, rows, np.maximum(stop - np.maximum(start_blocks, start), 0))
            for tier, start, stop in self.parts
        ]
        return sum(each[1:], each[0])

    def fetches(self, at: int, start_block: int) -> tuple[Fetch, ...]:
        """The fetches of one candidate for the blocks beyond `start_block`. Empty if the place is
        the candidate's own node, from which the engine reads by itself."""
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
                source, name = self.places.names[self.place], self.places.tier(self.place, tier)
                found.append(Fetch(start, stop, source, name, nbytes, seconds))
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
    question: PolicyQuestion, places: Places, place: int, blocks: int
) -> list[tuple[int, int, int]]:
    """The parts (tier, start, stop) of a place's leading blocks; blocks in both tiers count as in
    the faster one. Tiers may alternate: blocks promoted from the disk lie between others that were
    not."""
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


def longest(question: PolicyQuestion) -> Longest | None:
    """The place with the longest leading part of the prompt; None if there is none. Of several, the
    place that would finish sending first, by its tier and by its transfers in flight; ties are
    broken at random, or one of a hundred holders of a hot prefix would have to send it to all the
    others."""
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


# Sets of holders up to this size are processed bit by bit, larger ones as arrays.
_FEW = 16


def _having_all(question: PolicyQuestion, places: Places) -> list[int]:
    """The places of the holders that have all cached leading blocks; empty if no holder or more
    than `_FEW` have. Usually there is one: the instance that computed the prompt last has all of
    it."""
    if question.best_blocks < question.match.blocks:
        return []
    holders = -1
    for run in question.match.runs:
        holders &= run.holders
    return places.having(holders) if holders.bit_count() <= _FEW else []


def _asked(question: PolicyQuestion, places: Places, few: list[int]) -> Longest:
    blocks = question.match.blocks
    found = [Longest(question, places, place, blocks) for place in few]
    slow = [int(not one.fast) for one in found]
    if len({int(places.nodes[place]) for place in few}) == 1 and places.nodes[few[0]] >= 0:
        # One sending node, so one link: the tier decides.
        tiers = [int(places.tiers[tier, place]) for tier, place in zip(slow, few, strict=True)]
        return found[tiers.index(min(tiers))]
    at = _first_to_send(question, places, np.array(few), np.array(slow), blocks)
    return found[at]


def _first_to_send(
    question: PolicyQuestion, places: Places, able: Blocks, slow: Blocks, blocks: int
) -> int:
    """The index in `able` of the place that would finish sending `blocks` blocks first; `slow`
    [able]: 1 for places that have some of them in their slower tier only."""
    nbytes = int(question.cluster.block_bytes[question.rows[0]]) * blocks
    seconds = question.transfers.seconds(
        places.nodes[able], places.tiers[slow, able], -1, nbytes, question.now
    )
    # Estimates that differ by less than a part in a million are equal.
    first = np.flatnonzero(seconds <= seconds.min() * (1 + 1e-6))
    return int(first[question.dice.randrange(len(first))])


@dataclass(slots=True)
class Extended:
    """The best plan of each candidate with its own blocks and those of the longest prefix, all
    [candidates]: where it `fetches`, blocks from `start_blocks` on come in `transfer_s` while the
    prompt queues. It uses `blocks`, has its turn in `turn_s`, and then occupies the instance for
    `own_s`: loading (`load_s`) and computing."""

    question: PolicyQuestion
    blocks: Blocks
    transfer_s: Floats
    turn_s: Floats
    load_s: Floats
    own_s: Floats
    fetches: NDArray[np.bool_]
    start_blocks: Blocks
    source: Longest | None

    @property
    def ttft_s(self) -> Floats:
        """The predicted TTFT, [candidates]."""
        return self.turn_s + self.own_s

    def choice(self, at: int, cost: Floats) -> Choice:
        """The answer that this candidate is chosen, by its `cost`."""
        terms = {
            "queue_s": self.question.queue_s,
            "transfer_s": self.transfer_s,
            "start_s": self.turn_s,
            "load_s": self.load_s,
            "prefill_s": self.own_s - self.load_s,
        }
        own_s, ready_s = self.own_s.item(at), self.transfer_s.item(at)
        blocks, orders = self.blocks.item(at), self.orders(at)
        return Choice(at, cost, self.ttft_s, blocks, own_s, terms, orders, ready_s)

    def orders(self, at: int) -> tuple[Fetch, ...]:
        """The fetches of one candidate."""
        if self.source is None or not self.fetches[at]:
            return ()
        return self.source.fetches(at, int(self.start_blocks[at]))


def extend(
    question: PolicyQuestion,
    mine: Own,
    compute: Compute,
    *,
    threshold: float = 1.0,
    others: DelayedOthers | None = None,
) -> Extended:
    """Per candidate the better of its own prefix and a fetch of the longest one, which must be
    longer by a factor of `threshold`: that with the lower TTFT. With `others` their delay counts as
    well, and fetches are considered only if one could be better than the best candidate is
    without."""
    zero_s, never = np.zeros(len(mine.blocks)), np.zeros(len(mine.blocks), np.bool_)
    alone = Extended(
        question=question,
        blocks=mine.blocks,
        transfer_s=zero_s,
        turn_s=turn_s(question),
        load_s=mine.load_s,
        own_s=mine.load_s + mine.compute_s,
        fetches=never,
        start_blocks=mine.blocks,
        source=None,
    )
    # No holder has more than each candidate uses already: most prompts of a hot prefix end here.
    if question.pool_blocks <= mine.blocks[mine.blocks.argmin()]:
        return alone
    compute_s, alone_s = compute.seconds(question.pool_blocks), alone.ttft_s
    if others is not None:
        alone_s = alone_s + others.seconds(alone.turn_s, alone.own_s)
        # The lower bound: all cached blocks available at once, with no transfer time.
        at_best = question.queue_s + compute_s * (1.0 + others.behind)
        if at_best[at_best.argmin()] >= alone_s[alone_s.argmin()]:
            return alone
    source = longest(question)
    if source is None:
        return alone
    if source.blocks != question.pool_blocks:
        compute_s = compute.seconds(source.blocks)
    start_blocks = mine.fetched_from(question)
    transfer_s = source.transfer_s(start_blocks)
    then_s = turn_s(question, transfer_s)
    load_s = mine.load_s
    if others is not None:  # blocks come to the node's memory, and are loaded from there
        fetched = np.maximum(source.blocks - start_blocks, 0)
        load_s = load_s + fetched * tier_block_s(question)[0]
    own_then_s = load_s + compute_s
    cost_s = then_s + own_then_s
    if others is not None:
        cost_s = cost_s + others.seconds(then_s, own_then_s)
    pays = (source.blocks > mine.blocks) & (cost_s < alone_s)
    if threshold > 1.0:  # multiplied, not divided, so that an own prefix of 0 is no special case
        pays &= source.blocks >= threshold * mine.blocks
    pays &= question.cluster.fetches.take(question.rows)
    if not pays.any():
        return alone
    return Extended(
        question=question,
        blocks=np.where(pays, source.blocks, mine.blocks),
        transfer_s=np.where(pays, transfer_s, zero_s),
        turn_s=np.where(pays, then_s, alone.turn_s),
        load_s=np.where(pays, load_s, mine.load_s),
        own_s=np.where(pays, own_then_s, alone.own_s),
        fetches=pays,
        start_blocks=start_blocks,
        source=source,
    )
