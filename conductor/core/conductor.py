"""The scheduler: one plain object that takes events and returns scheduling decisions. Pure.

`schedule` decides where a request runs, `observe` takes the request's events, and `tick` advances
time: it expires requests and marks silent instances as lost. The REST service, the simulator and
the tests drive the same object; the caller passes `now`.
"""

from __future__ import annotations

import random
from collections import deque
from math import inf
from typing import TYPE_CHECKING, Any, TypeVar

from ..admission import admission
from ..admission.counterfactual import Shadow
from ..admission.hedging import HedgedRoute, Races
from ..admission.margin import Margins
from ..admission.output_caps import OutputCaps, caps_by_class
from ..cost import latency_profiles
from ..cost.calibration import Calibration
from ..cost.transfer_model import TransferModel
from ..decode.load_forecast import Horizon
from ..decode.output_length import Lengths
from ..dispatch.dispatcher import Dispatcher
from ..errors import Conflict, UnknownRequest
from ..events.index_updates import Cleared, Gone
from ..events.routed_blocks import Holdings
from ..pool.arrival_buffer import ArrivalBuffer
from ..pool.demand_forecast import check_predictor
from ..pool.offered_demand import OfferedDemand
from ..pool.pool_controller import Steering
from ..pool.popularity import Popularity
from ..pool.prompt_sums import NO_PROMPTS, PromptSums
from ..prefill.policy_registry import policy
from ..prefill.wait_estimate import Queues
from ..records import (
    Decision,
    InstanceSpec,
    Load,
    Rejection,
    RequestEvent,
    Role,
    Status,
)
from ..state.id_allocator import Names
from ..state.inflight_prefills import Computing
from ..state.input_checks import check_alike, check_instance, check_load, check_request
from ..state.instance_table import Cluster
from ..state.part_keys import INDEXED_PARTS_MAX, PART_TOKENS
from ..state.prefix_index import PrefixIndex
from ..state.sliced_work import finished
from . import refusals
from .calibrated_profiles import CalibratedProfiles
from .decision_log import DecisionLog
from .decision_view import View
from .decode_moves import DecodeMoves
from .hold import PULLS_LABEL
from .inflight_requests import (
    Ledger,
    RequestPhase,
    avoids,
    chosen_route,
    is_same_prompt,
    request_of,
    since_last,
)
from .pipeline import RefusedRequest, decide
from .rebinder import Rebinder
from .request_events import RequestEvents
from .request_plan import Parts
from .settings import Settings, patched
from .state_views import instance_view, match_view
from .transfer_bookings import TransferBookings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from ..cost.latency_profiles import Profile
    from ..events.index_updates import Update
    from ..pool.popularity import HotPrefix
    from ..pool.role_flip import Action
    from ..records import Request
    from ..state.sliced_work import Work
    from .inflight_requests import InflightRequest
    from .pipeline import Accepted
    from .state_views import InstanceView, MatchView


# Preempted requests kept until the next `put_out` call; the simulator never calls it.
PUT_OUT_MAX = 1024
# Expired requests that are ended in one piece: half a millisecond.
EXPIRED_AT_ONCE = 16

Outcome = TypeVar("Outcome", "Decision", "Rejection")


class Conductor:
    """The scheduler: see the top of the file. Not thread-safe.

    `profile(name)` returns a latency profile; the default loads those that ship with the package.
    """

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        dice: random.Random | None = None,
        profile: Callable[[str], Profile] = latency_profiles.load,
    ) -> None:
        self.settings = settings = settings or Settings()
        check_predictor(settings.planner.predictor)
        self.dice = dice = dice or random.Random()
        self.cluster = Cluster()
        self.index = PrefixIndex()
        self.holdings = Holdings(self.index)
        self.parts = Holdings(PrefixIndex(INDEXED_PARTS_MAX))  # of part keys
        self.queues = Queues(settings.queue)
        self.transfers = TransferModel(self.cluster.node_number, settings.transfers)
        self.computing = Computing()
        self.horizon = Horizon()
        self.lengths = Lengths(settings.lengths)
        self.calibration = Calibration(settings.calibration)
        self.races = Races(settings.racing)
        self.shadow = Shadow(settings.shadow)
        self.margins = Margins(settings.admission.late_share)
        self.popularity = Popularity(dice, settings.popularity)
        self.dispatch = Dispatcher(self.queues, settings.queue)
        self.ledger = Ledger(self.cluster, self.dispatch)
        self.output_caps = OutputCaps()
        self.bookings = TransferBookings(self.cluster, self.transfers)
        self.dispatch.sent = self.bookings.sent
        self.names = Names(self.cluster, self.holdings, self.transfers, self.bookings)
        self.moves = DecodeMoves(self)
        self.rebinder = Rebinder(self)
        self.steering = Steering(self)
        self._profile = profile
        self.profiles = CalibratedProfiles(self.cluster, self.transfers, self.calibration)
        self.log = DecisionLog(self.ledger)
        self.arrivals = ArrivalBuffer(self.popularity, dice)
        self.offered = OfferedDemand()
        self._events = RequestEvents(self)
        self._put_out: deque[Rejection] = deque(maxlen=PUT_OUT_MAX)
        self._counts = dict.fromkeys(
            ("decided", "rejected", "expired", "preempted", "rescheduled"), 0
        )
        self._parts = Parts(
            cluster=self.cluster,
            view=View(self.cluster, self.index, self.parts.index),
            queues=self.queues,
            transfers=self.transfers,
            computing=self.computing,
            horizon=self.horizon,
            lengths=self.lengths,
            races=self.races,
            margins=self.margins,
            settings=settings,
            policy=policy(settings.policy.name),
            dice=dice,
        )

    # -- requests ----------------------------------------------------------------------------------

    def schedule(self, request: Request, now: float) -> Decision | Rejection:
        """Decide where a request runs, or reject it with a reason.

        Idempotent: the same id gets the same decision while the request is in flight. The request
        is rescheduled if one of its instances was removed or is in `request.exclude`, or if the
        instance is silent and another one can take the request. Raises InvalidRequest,
        UnknownModel, and Conflict for another prompt under an id that is in flight.
        """
        check_request(request)
        flight = self.ledger.get(request.id)
        if flight is not None:
            if not is_same_prompt(flight.asked, request):
                raise Conflict(f"request {request.id!r} is in flight with another prompt")
            avoided = avoids(request, flight.decision)
            if self._stands(flight) and not avoided:
                return flight.decision
            if avoided or min(flight.prefill_row, flight.decode_row) < 0:
                self.end(flight, now, "rescheduled")
                flight = None
        self.dispatch.advance(now)
        outcome = decide(self._parts, request, now)
        if flight is not None:
            if isinstance(outcome, RefusedRequest):
                return flight.decision  # the instance may be up, and only its heartbeats missing
            self.end(flight, now, "rescheduled")
        if isinstance(outcome, RefusedRequest):
            return self._refuse(request, outcome, now)
        return self._begin(outcome, now)

    def observe(self, event: RequestEvent, now: float) -> None:
        """Take an event of an in-flight request. Every event prolongs the request's expiry; a
        repeated or late `prefill_done` or `first_token` event changes nothing else. Raises
        UnknownRequest, and InvalidRequest for an event kind that does not exist and for `tokens`
        out of range."""
        self._events.take(self.counted(event), now)

    def counted(self, event: RequestEvent) -> RequestEvent:
        """The event with the tokens since the last one, if it has the total of all."""
        return since_last(event, self.ledger.get(event.request_id))

    def next_prefill(self, instance: str, now: float) -> str | None:
        """The id of the request that an idle instance computes next, as `next_prefills`."""
        return next(iter(self.next_prefills(instance, 1, now)), None)

    def next_prefills(self, instance: str, n: int, now: float, *, idle: bool = True) -> list[str]:
        """The ids of the next `n` requests that an instance computes, by the order of its queue:
        classes, tenants, shortest first. Each request is returned once. `idle`: it has computed
        all that it was given before. For instances that ask; of the others the conductor holds
        requests back (`hold.py`). Raises UnknownInstance."""
        row = self.cluster.row(instance)
        return [request_of(name) for name in self.dispatch.next(row, n, now, idle=idle)]

    def recheck(self, request_id: str, now: float) -> Rejection | None:
        """The second admission check of mode "baseline", after the prefill: returns a rejection and
        ends the in-flight request, or returns None. Raises UnknownRequest."""
        flight = self.ledger.get(request_id)
        if flight is None:
            raise UnknownRequest(f"no request {request_id!r} is in flight")
        if flight.decode_row < 0:
            return None  # its instance was removed: a retry by the client gets another one
        verdict = refusals.checked_again(flight, self.cluster, self.settings, self._parts.dice)
        if verdict.admitted:
            return None
        self.end(flight, now, "rejected")
        return self._logged(verdict.rejection(request_id, now))

    def tick(self, now: float) -> list[str]:
        """Advance time: expire requests without events and guessed blocks, mark silent instances as
        lost and remove those silent for `forget_s`. Returns the ids of expired requests."""
        return finished(self.ticking(now))

    def ticking(self, now: float) -> Work[list[str]]:
        """`tick` in pieces, between which requests may be placed."""
        expired: list[str] = []
        while late := self.ledger.expired(now, EXPIRED_AT_ONCE):
            for flight in late:
                self.end(flight, now, "expired")
                expired.append(flight.request.id)
            yield
        yield from self.arrivals.counting(now)
        self.races.expired(now)
        self.computing.expire(now)
        self.holdings.expire(now)
        self.parts.expire(now)
        yield
        self.horizon.advance(now)
        self.shadow.tick(now)
        self.output_caps.tick(self.cluster, self.ledger, self.settings.admission)
        yield
        self.profiles.tick(now)
        self.cluster.blend(now)
        timeout_s = self.settings.core.heartbeat_timeout_s
        silent = self.cluster.used & (self.cluster.heard_at < now - timeout_s)
        status = self.cluster.status
        lost = {row for row in silent.nonzero()[0].tolist() if status[row] is not Status.LOST}
        for row in lost:
            self.cluster.set_status(self.cluster.name(row), Status.LOST)
        self._wake(lost)
        self._forget_silent(now)
        yield
        self.dispatch.tick(now)
        self.names.tick(now)
        return expired

    # -- instances ---------------------------------------------------------------------------------

    def register(self, spec: InstanceSpec, now: float) -> None:
        """Add an instance, or update the specification of a registered one. Raises InvalidRequest
        for values out of range and for a latency profile that does not exist, and Conflict for
        `block_tokens` other than those of the model's other instances."""
        check_instance(spec)
        profile = self._profile(spec.profile)
        check_alike(spec, self.cluster.specs)
        self.names.make_room()
        before = self.cluster.spec(spec.id).model if spec.id in self.cluster else ""
        self.cluster.register(spec, profile.latency, now)
        if before == spec.model and spec.id in self.steering.flipping():
            self.cluster.assign(spec.id, on=False)  # a role flip may restart it: keep it draining
        self.dispatch.asks(self.cluster.row(spec.id), spec.labels.get(PULLS_LABEL) == "true", now)
        self.index.holder(spec.id, "hbm")
        self.parts.index.holder(spec.id, "hbm")
        if spec.node:
            self.index.holder(spec.node, "dram")
            self.index.holder(spec.node, "nvme")
        self.profiles.register(spec.id, profile, now)

    def heartbeat(self, instance: str, load: Load, now: float) -> None:
        """Take an instance's heartbeat with its load. Raises UnknownInstance, InvalidRequest."""
        check_load(load)
        row = self.cluster.row(instance)
        self.cluster.heard(instance, load, now, self._others_at(row, load, now))
        self.profiles.heartbeat(instance, load, now)

    def remove(self, instance: str, now: float) -> None:
        """Remove an instance. Its in-flight requests are rescheduled when the client sends them
        again. Raises UnknownInstance."""
        row = self.cluster.row(instance)
        for flight in self.ledger:
            if row in (flight.prefill_row, flight.decode_row):
                self._released(flight, now)
        self.moves.forget_row(row, now)
        self.ledger.forget_row(row)
        self.horizon.forget_row(row, now)
        self.shadow.forget_row(row)
        self.output_caps.forget(row)
        self.computing.leave(row=row)
        self.races.lost(instance)
        self.holdings.drop_instance(instance)
        self.parts.drop_instance(instance)
        self.profiles.forget(instance)
        self.cluster.remove(instance)

    def drain(self, instance: str, now: float) -> None:
        """Drain an instance: it gets no new requests, and finishes those in flight
        (`steering.drains` has the progress). Raises UnknownInstance."""
        self.unassign(instance)
        self.steering.drain_instance(instance, now)

    def unassign(self, instance: str) -> None:
        """Give an instance no new requests; those that are held for it are decided anew when they
        are asked about. Raises UnknownInstance."""
        row = self.cluster.row(instance)
        had_some = self.cluster.ready[row]
        self.cluster.assign(instance, on=False)
        if had_some:
            self._wake({row})

    def flip(self, instance: str, role: Role, now: float) -> list[Action]:
        """Flip an instance's role by the protocol: no new requests, drain, commit, verify. Returns
        the actions for the instance itself to carry out now (`Steering.committed`, `verified`).
        Raises UnknownInstance, and Conflict if the flip is not possible now."""
        return self.steering.flip(instance, role, now)

    def instances(self, now: float) -> list[InstanceView]:
        """All registered instances, oldest first."""
        return [self.instance(name, now) for name in self.cluster.names]

    def instance(self, name: str, now: float) -> InstanceView:
        """The current state of one instance. Raises UnknownInstance."""
        caps = caps_by_class(self.output_caps.at(self.cluster.row(name)), self.settings.admission)
        return instance_view(self.cluster, name, caps, now)

    def latency(self, instance: str) -> tuple[float, ...]:
        """(c0, c1, c2, d0, d1, d2) of an instance's latency profile, before calibration. Raises
        UnknownInstance."""
        self.cluster.row(instance)
        return self.profiles.latency(instance)

    # -- blocks ------------------------------------------------------------------------------------

    def apply(self, update: Update, now: float) -> None:
        """Apply an update from an event feed to the prefix index: which holder has which blocks."""
        if isinstance(update, Cleared | Gone):
            self.parts.apply(update, now)
        elif getattr(update, "parts", False):
            self.parts.apply(update, now)
            return
        self.holdings.apply(update, now)

    def links(self, node: str, links: dict[str, list[float]]) -> None:
        """Take a node's link measurements: [bytes/s, seconds] from each source node, by its name.
        Source nodes that have no number in the cluster table yet are ignored."""
        known = {name: way for name, way in links.items() if self.cluster.find_node(name) >= 0}
        self.transfers.observe(node, known)

    def match(
        self, keys: Sequence[bytes], now: float, part_keys: Sequence[bytes] = ()
    ) -> MatchView:
        """The holders of a prefix, the one with the longest leading part first."""
        return match_view(self.index, keys, self.parts.index, part_keys, now)

    def finding_hot(self, n: int, now: float) -> Work[list[HotPrefix]]:
        """The `n` most popular prefixes, as sliced work (`sliced_work.py`)."""
        yield from self.arrivals.counting(now)
        return (yield from self.popularity.finding_hot(n, now))

    # -- what was decided --------------------------------------------------------------------------

    def decision(self, request_id: str) -> Decision | Rejection | None:
        """The last decision about a request, with every cost term; None if the log no longer has
        it. `request_id` is the request's name, or an id alone: then the latest of any tenant."""
        return self.log.get(request_id)

    def decisions(self, limit: int) -> list[Decision | Rejection]:
        """The latest decisions, the last one first."""
        return self.log.latest(limit)

    def patch(self, changes: dict[str, Any], now: float) -> Settings:
        """Change settings at run time. Atomic: if any value does not validate, it raises
        InvalidRequest and changes nothing."""
        settings = patched(self.settings, changes)
        check_predictor(settings.planner.predictor)
        if settings.policy.name != self.settings.policy.name:
            self._parts.policy = policy(settings.policy.name)
        self.settings = self._parts.settings = settings
        self.queues.configure(settings.queue)
        self.dispatch.configure(settings.queue, now)
        self.transfers.configure(settings.transfers)
        self.lengths.configure(settings.lengths)
        self.calibration.configure(settings.calibration)
        self.races.configure(settings.racing)
        self.popularity.configure(settings.popularity, now)
        self.shadow.settings = settings.shadow
        self.margins.late_share = settings.admission.late_share
        self.steering.configure()
        return settings

    def statistics(self) -> dict[str, Any]:
        """Counters, and sizes of the tables."""
        return {
            **self._counts,
            "in_flight": len(self.ledger),
            "instances": len(self.cluster),
            "index_blocks": len(self.index),
            "guessed_blocks": self.holdings.guessed_blocks,
            "shadow": self.shadow.counts,
            "races": self.races.statistics(),
        }

    # -- inside ------------------------------------------------------------------------------------

    def _others_at(self, row: int, load: Load, now: float) -> NDArray[np.int64] | None:
        """What other conductors had at an instance when it measured its load; None if there are no
        others."""
        return None

    def _forget_silent(self, now: float) -> None:
        """Remove the instances that were silent for `forget_s`."""
        gone = self.cluster.used & (self.cluster.heard_at < now - self.settings.core.forget_s)
        for row in gone.nonzero()[0].tolist():
            self.remove(self.cluster.name(row), now)

    def _begin(self, accepted: Accepted, now: float) -> Decision | Rejection:
        flight, request = accepted.flight, accepted.flight.request
        decision = flight.decision
        preempted = self.ledger.begin(flight, now)
        if preempted is None:
            full = refusals.queue_full(flight, self.settings, self._parts.dice, now)
            refused = RefusedRequest(full, computed_tokens=flight.prefill_tokens)
            return self._refuse(request, refused, now)
        self._make_way(preempted, request.id, now)
        held = self.dispatch.holds(request.id)
        flight.reported_tokens = self._reported_tokens(flight)
        self.bookings.decided(flight, now, held=held)
        ready_at = now + flight.prefilled_s
        node_number = int(self.cluster.node[flight.prefill_row])
        self.computing.begin(
            request.id, flight.prefill_row, node_number, request.keys,
            min(flight.hbm_blocks, len(request.keys)), ready_at, now,
            0.0 if held else flight.ready_at,  # else it has its place already
        )  # fmt: skip
        output = accepted.plan.output_tokens
        decode_s = admission.expected_decode_s(
            self.settings.admission, output, decision.predicted_tbt_s
        )
        context = request.prompt_tokens + output // 2
        decodes_at = ready_at + flight.handover_s
        kv_tokens = flight.shares.get(flight.decode_row, 0)
        promised = accepted.verdict.promised
        ttft_s, tbt_s = promised.ttft_s or inf, promised.tbt_s or inf
        self.horizon.promise(
            request.id, flight.decode_row, context, decodes_at, decode_s, now, kv_tokens, tbt_s
        )
        if self.settings.admission.mode == "predictive":  # the others have no margins
            self.margins.admitted(request.id, ttft_s, tbt_s, now)
        self.shadow.admitted(
            request.id, flight.prefill_row, flight.decode_row, request.objectives, flight.own_s, now
        )
        spec = self.cluster.specs[flight.prefill_row]
        assert spec is not None
        self.arrivals.came(request, spec)
        self.races.scheduled()
        if decision.alternatives:
            others = [HedgedRoute(*other) for other in decision.alternatives]
            self.races.start(request.id, [chosen_route(decision), *others], now)
        self._offered(request, request.prompt_tokens - decision.cached_tokens, now)
        self._counts["decided"] += 1
        self._logged(decision)
        return decision

    def _reported_tokens(self, flight: InflightRequest) -> int:
        """The first tokens of a prompt that its prefill instance has reported in its HBM."""
        request, name = flight.request, flight.decision.prefill
        blocks = self.holdings.reported(name, request.keys[: flight.hbm_blocks])
        block_tokens = self.cluster.spec(name).block_tokens
        before = request.parts_after * block_tokens
        behind = max(0, flight.part_tokens - before) // PART_TOKENS
        parts = self.parts.reported(name, request.part_keys[:behind])
        sure = parts and blocks >= request.parts_after
        return max(blocks * block_tokens, before + parts * PART_TOKENS if sure else 0)

    def _offered(self, request: Request, computed_tokens: int | None, now: float) -> PromptSums:
        """Count a request as demand, unless it was counted before."""
        if not self.offered.is_new(request, now):
            return NO_PROMPTS
        tokens = request.prompt_tokens
        sums = PromptSums.of(tokens, tokens if computed_tokens is None else computed_tokens)
        self.steering.came(request.model, sums, now)
        return sums

    def _stands(self, flight: InflightRequest) -> bool:
        """Whether the instances with work left for a request are registered and not lost: both in
        the prefill phase, then the decode instance only. Of a held one, whether they get new
        requests."""
        if self.dispatch.holds(flight.request.id) and not self.takes_both(flight):
            return False
        rows = (flight.prefill_row, flight.decode_row)
        left = rows if flight.phase is RequestPhase.PREFILL else rows[1:]
        return all(row >= 0 and self.cluster.status[row] is not Status.LOST for row in left)

    def _wake(self, rows: set[int]) -> None:
        """Instances get nothing new: whoever is held to prefill or to decode there has to ask where
        else."""
        for row in rows:
            self.dispatch.wake(row)
        if rows and self.dispatch.holding:
            to_decode = [one.request.id for one in self.ledger if one.decode_row in rows]
            self.dispatch.wake_all(filter(self.dispatch.holds, to_decode))

    def takes_both(self, flight: InflightRequest) -> bool:
        """Whether both instances of a request get new requests."""
        rows = (flight.prefill_row, flight.decode_row)
        return all(row >= 0 and self.cluster.ready[row] for row in rows)

    def _make_way(self, victims: Iterable[InflightRequest], by: str, now: float) -> None:
        """End requests that were preempted in a full queue by the request `by`."""
        for victim in victims:
            self.end(victim, now, "preempted")
            self._put_out.append(self._logged(refusals.preempted(victim, by, now)))

    def put_out(self) -> list[Rejection]:
        """Rejections of the requests preempted since the last call; the caller delivers them."""
        if not self._put_out:
            return []
        found = list(self._put_out)
        self._put_out.clear()
        return found

    def _refuse(self, request: Request, refused: RefusedRequest, now: float) -> Rejection:
        self._offered(request, refused.computed_tokens, now)
        self.offered.counted(request, now)  # it may come again
        self.margins.refused(refused.rejection.reason, refused.rejection.decided_at)
        if refused.ghost is not None and refused.rejection.reason in ("ttft", "tbt"):
            self.shadow.rejected(refused.ghost)
        self._counts["rejected"] += 1
        return self._logged(refused.rejection)

    def _logged(self, outcome: Outcome) -> Outcome:
        self.log.put(outcome, self.settings.core.log_max)
        return outcome

    def end(self, flight: InflightRequest, now: float, why: str | None) -> None:
        """End an in-flight request and release its reservations, exactly once. It is counted under
        `why`; None: by its own event."""
        if why in ("rescheduled", "rejected", "preempted"):
            self.offered.counted(flight.request, now)  # it comes again
        self._released(flight, now)
        if self.ledger.end(flight, now):
            self.horizon.end(flight.request.id, now)
            self.margins.ended(flight.request.id, None)
            self.shadow.cancelled(flight.request.id, now)  # no effect on a finished request
            self.races.end(flight.request.id)
            if why is not None:
                self._counts[why] += 1
                self.log.ended(flight, why, now)

    def _released(self, flight: InflightRequest, now: float) -> None:
        """Drop it from the in-flight prefills, and end its transfers."""
        self.computing.end(flight.request.id)
        self.moves.forget(flight.request.id, now)
        self.rebinder.forget(flight.request.id)
        self.bookings.ended(flight.request.id)

    def requests_at(self, instance: str) -> int:
        """The number of in-flight requests that are queued or running at an instance; 0 when it has
        drained. Raises UnknownInstance."""
        return self.ledger.requests_at(self.cluster.row(instance))
