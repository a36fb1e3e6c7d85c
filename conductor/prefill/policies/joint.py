"""The policy "joint": the prefill instance and the source of each range are chosen together.

Algorithm 1 has one source, the longest prefix, and adds its transfer to the queue. Here:

- every range of the prompt comes from the cheapest source for that instance: its HBM, its node's
  DRAM or NVMe, or another place, or is computed (`fetch_plan.py`), where computing tokens [a, b)
  takes c1 (b - a) + c2 (b² - a²) seconds;
- a source's transfers in flight add to its cost, so many requests for one prefix use many sources;
- blocks are fetched while the request waits in the queue;
- a request can wait for blocks that another instance is computing right now, and fetch them then.

To evaluate all of it for a thousand instances would take milliseconds. So the search goes in
rounds, and ends as soon as no instance can be better than the best so far:

1. each instance with its own cached blocks (always);
2. with the blocks of a prefill in flight (if there is one);
3. with the longest prefix (Algorithm 1's second branch);
4. the most promising `refine_max` of them with up to `sources_max` places, all ranges.

"Can be better" is decided by a lower bound: the queue, the fastest tier, and computing the blocks
that no holder has. Every number that is reported is of a feasible plan; those of instances that a
round left out may be too high.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ...records import Fetch
from ..awaited_blocks import awaited
from ..block_sources import places_of
from ..fetch_plan import NEVER_S, Plans
from ..handover_wait import handover_waits_s
from ..local_cost import Compute, own, turn_s
from ..policy_registry import Choice, quickest, register
from ..remote_fetch import extend
from ..source_ranges import chosen_places, lanes, stretches

if TYPE_CHECKING:
    from ..block_sources import Places
    from ..local_cost import Own
    from ..policy_registry import Blocks, Floats, PolicyQuestion
    from ..remote_fetch import Extended

# Sets of holders up to this size are processed one by one.
_FEW = 16

# Plans whose TTFTs differ by less than this share are equal: the rest is rounding.
_SAME = 1e-9


@register("joint")
class Joint:
    """The lowest TTFT over instances and sources."""

    name = "joint"

    def choose(self, question: PolicyQuestion) -> Choice:
        """The cost is the predicted TTFT in seconds."""
        return _Search(question).choice()


@dataclass(slots=True)
class _Refined:
    """Round 4: the plans of the candidates `at`, with the places `chosen` as sources 1 and up."""

    at: Blocks
    chosen: Blocks
    plans: Plans


class _Search:
    """One decision. `ttft_s`, `start_s` [candidates] are of the best plan so far of each candidate,
    and `round` [candidates] is the round that found it."""

    def __init__(self, question: PolicyQuestion) -> None:
        # Prompts whose blocks still come are taken for queued, or for later than this one, once for
        # all plans.
        question = replace(question, queue_s=turn_s(question), coming=None)
        self.question, self.settings = question, question.settings.joint
        self.compute = Compute(question)
        self.mine: Own = own(question, self.compute)
        self.places: Places = places_of(question)
        wait_max_s = self.settings.wait_max_s
        wait = self.settings.wait
        self.awaited = awaited(question, self.mine, self.compute, wait_max_s) if wait else None
        self.extended: Extended | None = None
        self.refined: _Refined | None = None
        self.start_s = self._start_s(self.mine.load_s)
        self.ttft_s = self.start_s + self.mine.compute_s
        self.round = np.ones(len(self.ttft_s), np.int64)
        self._search()

    def _search(self) -> None:
        known = max(self.question.pool_blocks, self.awaited.computed.blocks if self.awaited else 0)
        lacking = known - self.question.hbm_blocks
        if int(lacking.max()) <= 0:
            return
        floor_s = self._floor_s(known, lacking)
        for search in (self._wait, self._fetch_longest, self._refine):
            could = np.flatnonzero(floor_s < self.ttft_s.min() * (1 - _SAME))
            if not len(could):
                return
            floor_s = search(could, floor_s)

    def _floor_s(self, known: int, lacking: Blocks) -> Floats:
        """The lower bound of each candidate's TTFT: all known blocks arrive at the speed of the
        fastest tier, or as many of them as the queueing time allows."""
        question = self.question
        if self.awaited is not None:  # the blocks may need no transfer at all
            return question.queue_s + self.compute.seconds(known)
        ways = question.transfers.settings
        fastest = max(
            ways.hbm_bandwidth_bytes_s, ways.dram_bandwidth_bytes_s, ways.nvme_bandwidth_bytes_s
        )
        block_s = np.maximum(question.cluster.block_bytes[question.rows], 1) / fastest
        all_s = self._start_s(lacking * block_s) + self.compute.seconds(known)
        some = np.minimum(question.hbm_blocks + question.queue_s / block_s, float(known))
        floor_s: Floats = np.minimum(all_s, question.queue_s + self.compute.seconds(some))
        return floor_s

    def _improve(
        self, number: int, ttft_s: Floats, started_s: Floats, at: Blocks | None = None
    ) -> None:
        """Take the plans found by round `number` for the candidates `at` (None: all), where they
        are better."""
        if at is None:
            better = np.flatnonzero(ttft_s < self.ttft_s * (1 - _SAME))
            where = better
        else:
            better = np.flatnonzero(ttft_s < self.ttft_s[at] * (1 - _SAME))
            where = at[better]
        self.ttft_s[where], self.start_s[where] = ttft_s[better], started_s[better]
        self.round[where] = number

    def _start_s(self, bring_s: Floats) -> Floats:
        return np.maximum(self.question.queue_s, bring_s)

    # -- round 2: wait for a prefill in flight -----------------------------------------------------

    def _wait(self, could: Blocks, floor_s: Floats) -> Floats:
        """Round 2. Candidates fetch the blocks once the other instance has computed them."""
        wait = self.awaited
        if wait is not None:
            self._improve(2, np.where(wait.able, wait.turn_s + wait.own_s, NEVER_S), wait.turn_s)
        return floor_s

    # -- round 3: fetch from the place with the longest prefix -------------------------------------

    def _fetch_longest(self, could: Blocks, floor_s: Floats) -> Floats:
        best = extend(self.question, self.mine, self.compute)
        self.extended = best
        self._improve(3, best.ttft_s, best.turn_s)
        return self._floor_of_one_sender(best, floor_s) if self._one_sender(best) else floor_s

    def _one_sender(self, best: Extended) -> bool:
        """Whether no place has blocks that the node with the longest prefix could not send as fast:
        then the only plan left to try is to fetch less. This is the usual case for the tail that
        only this prompt has."""
        source, places = best.source, self.places
        if source is None or not source.fast or self.awaited is not None:
            return False
        base, holders = int(self.question.hbm_blocks.min()), 0
        for run in self.question.match.runs:
            if run.stop > base:
                holders |= run.holders
        if source.blocks < self.question.pool_blocks or holders.bit_count() > _FEW:
            return False
        node, tier = places.nodes[source.place], places.tiers[0, source.place]
        others = places.having(holders)
        near = all(places.nodes[place] == node for place in others)
        return bool(node >= 0 and near and all(places.tiers[0, p] >= tier for p in others))

    def _floor_of_one_sender(self, best: Extended, floor_s: Floats) -> Floats:
        """A tighter bound, for candidates with own blocks in HBM only: the end, or the corner of
        `fetch_plan.py`. Of L blocks that take T, at most L queue / T arrive while the request
        waits in the queue, and one more may be worth it."""
        question = self.question
        lacking = question.pool_blocks - question.hbm_blocks
        free = lacking * question.queue_s / np.maximum(best.whole_s, 1e-9) + 1.0
        some = np.minimum(question.hbm_blocks + free, float(question.pool_blocks))
        # When all blocks arrive within the queueing time, the corner is the end.
        corner_s = question.queue_s + self.compute.seconds(some)
        end_s = np.minimum(self.ttft_s, corner_s)
        end_s = np.where(question.queue_s < best.whole_s, end_s, self.ttft_s)
        alone = question.hbm_blocks == question.local_blocks
        tight: Floats = np.where(alone, np.maximum(end_s, floor_s), floor_s)
        return tight

    # -- round 4: the most promising, with all sources ---------------------------------------------

    def _refine(self, could: Blocks, floor_s: Floats) -> Floats:
        question, settings = self.question, self.settings
        at = self._promising(could, floor_s)
        base = int(question.hbm_blocks[at].min())
        chosen = chosen_places(question, self.places, at, base, self.compute, settings.sources_max)
        source = self.extended.source if self.extended else None
        if source is not None and source.place not in chosen:
            chosen = np.append(chosen[: settings.sources_max - 1], source.place)
        begin_s, block_s = lanes(question, self.places, chosen, at)
        parts = stretches(question, self.places, chosen, at, base, block_s)
        if not parts:
            return floor_s
        fixed_s = np.concatenate((np.zeros((1, len(at))), begin_s))
        queue_s, compute = question.queue_s[at], self.compute.of(at)
        plans = Plans(parts, fixed_s, queue_s, compute)
        self.refined = _Refined(at, chosen, plans)
        self._improve(4, plans.ttft_s, plans.start_s, at)
        return floor_s

    def _promising(self, could: Blocks, floor_s: Floats) -> Blocks:
        """The candidates of `could` with the best plan so far, and those with the lowest bound
        (some are in both and evaluated twice); ties are broken at random."""
        count = self.settings.refine_max
        if len(could) <= count:
            return could
        turn = self.question.dice.randrange(len(could))
        could = np.concatenate((could[turn:], could[:turn]))
        half = (count + 1) // 2
        near = np.argpartition(self.ttft_s[could], half)[:half]
        able = np.argpartition(floor_s[could], count - half)[: count - half]
        return could[np.concatenate((near, able))]

    # -- the choice --------------------------------------------------------------------------------

    def choice(self) -> Choice:
        """The best candidate, with the fetches of its plan."""
        work_s = self.ttft_s - self.question.queue_s
        waits_s = handover_waits_s(self.question, self.ttft_s, work_s)
        at = quickest(self.question, self.ttft_s, work_s, waits_s)
        number = int(self.round[at])
        blocks, fetches = self._plan(at, number)
        terms = {
            "queue_s": self.question.queue_s,
            "start_s": self.start_s,
            "prefill_s": self.ttft_s - self.start_s,
            "handover_wait_s": waits_s,
        }
        own_s, waits = float(self.ttft_s[at] - self.start_s[at]), ""
        ready_s = sum(fetch.seconds for fetch in fetches)
        if number == 2 and self.awaited is not None:
            waits, ready_s = self.awaited.computed.request_id, float(self.awaited.ready_s[at])
        return Choice(at, self.ttft_s, self.ttft_s, blocks, own_s, terms, fetches, ready_s, waits)

    def _plan(self, at: int, number: int) -> tuple[int, tuple[Fetch, ...]]:
        """The plan of a candidate from round `number`: (cached blocks used, fetches)."""
        mine = int(self.mine.blocks[at])
        if number == 2 and self.awaited is not None:
            return self.awaited.computed.blocks, self.awaited.orders(at)
        if number == 3 and self.extended is not None:
            return int(self.extended.blocks[at]), self.extended.orders(at)
        if number == 4 and self.refined is not None:
            return self._refined_plan(at)
        return mine, ()

    def _refined_plan(self, at: int) -> tuple[int, tuple[Fetch, ...]]:
        refined = self.refined
        assert refined is not None
        candidate = int(np.flatnonzero(refined.at == at)[0])
        row = int(self.question.rows[at])
        spec = self.question.cluster.specs[row]
        assert spec is not None
        fetches = []
        for piece in refined.plans.pieces(candidate):
            place = int(refined.chosen[piece.source - 1]) if piece.source else -1
            # No fetch needed: the engine itself reads blocks of its instance and its node.
            if place < 0 or self.places.is_local(place, spec.node):
                continue
            nbytes = (piece.stop - piece.start) * spec.block_bytes
            source, tier = self.places.names[place], self.places.tier(place, piece.tier)
            fetches.append(Fetch(piece.start, piece.stop, source, tier, nbytes, piece.seconds))
        return int(refined.plans.blocks[candidate]), tuple(fetches)
