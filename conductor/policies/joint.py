"""Where a prompt is prefilled and where each range of it comes from, decided together.

Algorithm 1 knows one source, the longest prefix, and adds its transfer to the queue. Here:

- every range of the prompt comes from whatever is cheapest for that instance: its HBM, its node's
  DRAM or NVMe, another place's, or is computed (`plans.py`), seconds of computing tokens [a, b)
  being c1 (b - a) + c2 (b² - a²);
- a source costs what it is sending already, so many requests for one prefix use many sources;
- blocks are brought while the request waits in the queue;
- blocks that another request is computing right now can be waited for, on the same instance or,
  with a transfer, on another one.

Looking at all of it for a thousand instances would take milliseconds. So it goes in rounds, each of
which ends the matter if no instance can be better than the best so far:

1. each instance with what it has (always);
2. with what is being computed (if something is);
3. with the longest prefix (Algorithm 1's second branch);
4. the most promising `refine_max` of them with up to `sources_max` places, all ranges.

"Can be better" is a bound: the queue, the fastest tier, and computing what nobody has. Every
number that is reported is of a plan that could be carried out; those of instances that a round left
out may be too high.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..records import Fetch
from ..transfers import TIERS
from .base import Choice, quickest, register
from .fetching import extend
from .local import Compute, own, start_s
from .places import places_of
from .plans import NEVER_S, Plans
from .stretches import chosen_places, lanes, stretches

if TYPE_CHECKING:
    from ..computing import Computed
    from .base import Blocks, Floats, Question
    from .fetching import Extended
    from .local import Own
    from .places import Places

# Sets of holders up to this size are gone through one by one.
_FEW = 16

# Plans that differ by less than this part are the same, calculated another way.
_SAME = 1e-9


@register("joint")
class Joint:
    """The lowest TTFT over instances and sources."""

    name = "joint"

    def choose(self, question: Question) -> Choice:
        """The cost is the predicted TTFT in seconds."""
        return _Search(question).choice()


@dataclass(slots=True)
class _Refined:
    """Round 4: the plans of the candidates `at`, with the places `chosen` as sources 1 and up."""

    at: Blocks
    chosen: Blocks
    plans: Plans


class _Search:
    """One decision. `ttft_s`, `start_s` [candidates] are the best so far of each candidate, and
    `round` [candidates] which round found it."""

    def __init__(self, question: Question) -> None:
        self.question, self.settings = question, question.settings.joint
        self.compute = Compute(question)
        self.mine: Own = own(question, self.compute)
        self.places: Places = places_of(question)
        self.computed: Computed | None = self._being_computed()
        self.extended: Extended | None = None
        self.refined: _Refined | None = None
        self.start_s = self._start_s(self.mine.load_s)
        self.ttft_s = self.start_s + self.mine.compute_s
        self.round = np.ones(len(self.ttft_s), np.int64)
        self._search()

    def _search(self) -> None:
        known = max(self.question.pool_blocks, self.computed.blocks if self.computed else 0)
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
        """No candidate can be faster than this: if all that is known comes to it at the speed of
        the fastest tier, or as much of it as the time in the queue allows."""
        question = self.question
        if self.computed is not None:  # its blocks need not move at all
            return question.queue_s + self.compute.seconds(known)
        ways = question.transfers.settings
        fastest = max(
            ways.hbm_bandwidth_bytes_s, ways.dram_bandwidth_bytes_s, ways.nvme_bandwidth_bytes_s
        )
        block_s = np.maximum(question.cluster.block_bytes[question.rows], 1) / fastest
        all_s = self._start_s(lacking * block_s) + self.compute.seconds(known)
        free = question.queue_s / block_s if self.settings.overlap else 0.0
        some = np.minimum(question.hbm_blocks + free, float(known))
        floor_s: Floats = np.minimum(all_s, question.queue_s + self.compute.seconds(some))
        return floor_s

    def _improve(
        self, number: int, ttft_s: Floats, started_s: Floats, at: Blocks | None = None
    ) -> None:
        """Round `number` found these, for the candidates `at` (None: all)."""
        if at is None:
            better = np.flatnonzero(ttft_s < self.ttft_s * (1 - _SAME))
            where = better
        else:
            better = np.flatnonzero(ttft_s < self.ttft_s[at] * (1 - _SAME))
            where = at[better]
        self.ttft_s[where], self.start_s[where] = ttft_s[better], started_s[better]
        self.round[where] = number

    def _start_s(self, bring_s: Floats) -> Floats:
        return start_s(self.question.queue_s, bring_s, overlap=self.settings.overlap)

    # -- round 2: wait for what is being computed --------------------------------------------------

    def _being_computed(self) -> Computed | None:
        """What may be waited for."""
        question = self.question
        if not self.settings.wait or not len(question.computing):
            return None
        computed = question.computing.match(question.request.keys, question.now)
        if computed is None or computed.ready_at - question.now > self.settings.wait_max_s:
            return None
        return computed if question.cluster.used[computed.row] else None

    def _wait(self, could: Blocks, floor_s: Floats) -> Floats:
        """The same instance has the blocks once they are ready; to all others they are sent
        then."""
        if self.computed is None:
            return floor_s
        question, computed = self.question, self.computed
        ready_s = computed.ready_at - question.now
        lacking = np.maximum(computed.blocks - self.mine.blocks, 0)
        transfer_s = self._computed_transfer_s(lacking)
        there_s = np.maximum(ready_s, self.mine.load_s) + transfer_s
        # Without overlap, only the transfer comes on top: others' prefill goes on while one waits.
        waited_s = np.maximum(question.queue_s, ready_s) + self.mine.load_s + transfer_s
        started_s = np.maximum(question.queue_s, there_s) if self.settings.overlap else waited_s
        same = question.rows == computed.row
        started_s = np.where(same, np.maximum(question.queue_s, ready_s), started_s)
        ttft_s = started_s + self.compute.seconds(computed.blocks)
        able = same | question.cluster.fetches.take(question.rows)
        self._improve(2, np.where((lacking > 0) & able, ttft_s, NEVER_S), started_s)
        return floor_s

    def _computed_transfer_s(self, blocks: Blocks) -> Floats:
        """Seconds to send so many of the computed blocks to each candidate."""
        question = self.question
        cluster, computed = question.cluster, self.computed
        assert computed is not None
        nbytes = blocks * cluster.block_bytes[question.rows]
        return question.transfers.seconds(
            int(cluster.node[computed.row]),
            TIERS.index("hbm"),
            cluster.node[question.rows],
            nbytes,
            question.now,
        )

    # -- round 3: fetch from who has the longest prefix --------------------------------------------

    def _fetch_longest(self, could: Blocks, floor_s: Floats) -> Floats:
        best = extend(self.question, self.mine, self.compute, overlap=self.settings.overlap)
        self.extended = best
        self._improve(3, best.ttft_s, best.ttft_s - best.compute_s)
        return self._floor_of_one_sender(best, floor_s) if self._one_sender(best) else floor_s

    def _one_sender(self, best: Extended) -> bool:
        """Whether nobody has anything that the longest prefix's node could not send as fast: then
        all that is left to try is to fetch less. It is the rule for a prompt's own tail."""
        source, places = best.source, self.places
        if source is None or not source.fast or self.computed is not None:
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
        """The bound, for those that have nothing but HBM themselves: the end, or the corner of
        `plans.py`. Of L blocks that take T, at most L queue / T come while one waits, and one more
        may be worth it."""
        question = self.question
        end_s = self.ttft_s
        if self.settings.overlap:
            lacking = question.pool_blocks - question.hbm_blocks
            free = lacking * question.queue_s / np.maximum(best.whole_s, 1e-9) + 1.0
            some = np.minimum(question.hbm_blocks + free, float(question.pool_blocks))
            # When all of them come in time, the corner is the end.
            corner_s = question.queue_s + self.compute.seconds(some)
            end_s = np.where(question.queue_s < best.whole_s, np.minimum(end_s, corner_s), end_s)
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
        plans = Plans(parts, fixed_s, queue_s, compute, overlap=settings.overlap)
        self.refined = _Refined(at, chosen, plans)
        self._improve(4, plans.ttft_s, plans.start_s, at)
        return floor_s

    def _promising(self, could: Blocks, floor_s: Floats) -> Blocks:
        """Those of `could` with the best plan so far, and those with the lowest bound (some are
        both, and looked at twice); of equal ones, others each time."""
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
        """The best candidate, with its plan as orders."""
        at = quickest(self.question, self.ttft_s, self.ttft_s - self.question.queue_s)
        number = int(self.round[at])
        blocks, fetches = self._plan(at, number)
        terms = {
            "queue_s": self.question.queue_s,
            "start_s": self.start_s,
            "prefill_s": self.ttft_s - self.start_s,
        }
        waits = self.computed.request_id if self.computed and number == 2 else ""
        return Choice(at, self.ttft_s, self.ttft_s, blocks, terms, fetches, waits)

    def _plan(self, at: int, number: int) -> tuple[int, tuple[Fetch, ...]]:
        """(blocks that are used, what is fetched for it)."""
        mine = int(self.mine.blocks[at])
        if number == 2 and self.computed is not None:
            return self.computed.blocks, self._computed_fetch(at, mine)
        if number == 3 and self.extended is not None:
            return int(self.extended.blocks[at]), self.extended.fetches(at, mine)
        if number == 4 and self.refined is not None:
            return self._refined_plan(at)
        return mine, ()

    def _computed_fetch(self, at: int, start: int) -> tuple[Fetch, ...]:
        question, computed = self.question, self.computed
        assert computed is not None
        if question.rows[at] == computed.row:
            return ()
        blocks = np.full(len(question.rows), computed.blocks - start)
        seconds = float(self._computed_transfer_s(blocks)[at])
        nbytes = (computed.blocks - start) * int(question.cluster.block_bytes[question.rows[at]])
        source = f"{question.cluster.name(computed.row)}/hbm"
        return (Fetch(start, computed.blocks, source, nbytes, seconds),)

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
            # The engine reads by itself what it and its node have.
            if place < 0 or self.places.is_local(place, spec.node):
                continue
            nbytes = (piece.stop - piece.start) * spec.block_bytes
            label = self.places.label(place, piece.tier)
            fetches.append(Fetch(piece.start, piece.stop, label, nbytes, piece.seconds))
        return int(refined.plans.blocks[candidate]), tuple(fetches)
