"""The conductor: one plain object that is told what happens and says what to do. Pure.

`schedule` decides about a request, `observe` hears what became of it, `tick` lets time pass. The
REST service, the simulator and the tests drive the same object; whoever does gives it `now`.
"""

from __future__ import annotations

import contextlib
import random
from collections import OrderedDict, deque
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

from . import admission, profiles
from .admission import Forecast, Outlook
from .arrivals import Arrivals
from .calibration import Calibration
from .checks import check_instance, check_load, check_request
from .cluster import Cluster
from .computing import Computing
from .deciding import Parts, Refused, decide
from .errors import Conflict, InvalidRequest, UnknownRequest
from .feeds.routed import Holdings
from .forecast import check_predictor
from .horizon import Horizon
from .index import PrefixIndex
from .ledger import Ledger, Phase
from .lengths import Lengths
from .names import Names
from .policies.base import policy
from .popularity import Popularity
from .queues import Queues
from .racing import Races, Route
from .records import (
    EVENT_KINDS,
    TOKENS_MAX,
    Decision,
    InstanceSpec,
    Load,
    Rejection,
    RequestEvent,
    Role,
    Status,
)
from .settings import Settings, patched
from .shadow import Shadow
from .steering import Steering
from .transfers import Transfers
from .view import View

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from .deciding import Accepted
    from .feeds.updates import Update
    from .flips import Action
    from .ledger import Flight
    from .popularity import HotPrefix
    from .profiles import Profile
    from .records import Request


# Preempted requests that somebody is still to be told of; the simulator tells nobody.
PUT_OUT_MAX = 1024

Outcome = TypeVar("Outcome", "Decision", "Rejection")


@dataclass(frozen=True, slots=True)
class InstanceView:
    """An instance, as it is now. `load`: requests and tokens, ours and others'."""

    spec: InstanceSpec
    role: Role
    status: Status
    heard_s: float
    load: dict[str, float]


@dataclass(frozen=True, slots=True)
class MatchView:
    """Who holds a prefix: (label, leading blocks, seconds since it was heard of) per holder."""

    blocks: int
    holders: list[tuple[str, int, float]]


class Conductor:
    """See the top of the file. Not thread-safe.

    `profile(name)` finds a latency profile; those that ship by default.
    """

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        dice: random.Random | None = None,
        profile: Callable[[str], Profile] = profiles.load,
    ) -> None:
        self.settings = settings = settings or Settings()
        check_predictor(settings.planner.predictor)
        dice = dice or random.Random()
        self.cluster = Cluster()
        self.index = PrefixIndex()
        self.holdings = Holdings(self.index)
        self.queues = Queues(settings.queue)
        self.transfers = Transfers(self.cluster.node_number, settings.transfers)
        self.computing = Computing()
        self.horizon = Horizon()
        self.lengths = Lengths(settings.lengths)
        self.calibration = Calibration(settings.calibration)
        self.races = Races(settings.racing)
        self.shadow = Shadow(settings.shadow)
        self.popularity = Popularity(dice, settings.popularity)
        self.ledger = Ledger(self.cluster, self.queues)
        self.names = Names(self.cluster, self.holdings, self.transfers, self.ledger)
        self.steering = Steering(self)
        self._profile = profile
        self._latency: dict[str, tuple[float, ...]] = {}  # of each instance, uncorrected
        self._log: OrderedDict[str, Decision | Rejection] = OrderedDict()
        self.arrivals = Arrivals(self.popularity, dice)
        self._put_out: deque[Rejection] = deque(maxlen=PUT_OUT_MAX)
        self._counts = dict.fromkeys(
            ("decided", "rejected", "expired", "preempted", "rescheduled"), 0
        )
        self._parts = Parts(
            cluster=self.cluster,
            view=View(self.cluster, self.index),
            queues=self.queues,
            transfers=self.transfers,
            computing=self.computing,
            horizon=self.horizon,
            lengths=self.lengths,
            calibration=self.calibration,
            races=self.races,
            settings=settings,
            policy=policy(settings.policy.name),
            dice=dice,
        )

    # -- requests ----------------------------------------------------------------------------------

    def schedule(self, request: Request, now: float) -> Decision | Rejection:
        """Where a request runs, or why it is not taken.

        The same id again gets the same decision while the request is in flight. One whose instance
        has gone since, or is in `request.exclude`, is decided anew, and so is one whose instance is
        silent, if there is another. Raises InvalidRequest, UnknownModel, and Conflict for another
        prompt under an id that is in flight.
        """
        check_request(request)
        flight = self.ledger.get(request.id)
        if flight is not None:
            if prompt_of(flight.request) != prompt_of(request):
                raise Conflict(f"request {request.id!r} is in flight with another prompt")
            avoided = avoids(request, flight.decision)
            if self._stands(flight) and not avoided:
                return flight.decision
            if avoided or min(flight.prefill_row, flight.decode_row) < 0:
                self._end(flight, now, "rescheduled")
                flight = None
        outcome = decide(self._parts, request, now)
        if flight is not None:
            if isinstance(outcome, Refused):
                return flight.decision  # perhaps it is only we who don't hear of it
            self._end(flight, now, "rescheduled")
        if isinstance(outcome, Refused):
            return self._refuse(outcome)
        return self._begin(outcome, now)

    def observe(self, event: RequestEvent, now: float) -> None:
        """What became of a request. Events that come twice, or late, change nothing. Raises
        UnknownRequest, and InvalidRequest for an event that does not exist."""
        if event.kind not in EVENT_KINDS or event.tokens < 0 or event.tokens > TOKENS_MAX:
            raise InvalidRequest(
                f"event {event.kind!r} of {event.tokens} tokens: there are {', '.join(EVENT_KINDS)}"
            )
        flight = self.ledger.get(event.request_id)
        if flight is None:
            raise UnknownRequest(f"no request {event.request_id!r} is in flight")
        self.ledger.prolong(flight, now + self.settings.core.decision_ttl_s)
        if event.kind == "alive":
            return
        if event.kind in ("finished", "cancelled"):
            self._finish(flight, event.kind == "finished", now)
            return
        route = _chosen(flight.decision) if event.route is None else Route(*event.route)
        self._prefilled(flight, route, now)
        if event.kind == "first_token":
            self._first_token(flight, route, now)
        elif event.kind == "tokens":
            self._tokens(flight, event.tokens, now)

    def recheck(self, request_id: str, now: float) -> Rejection | None:
        """The second check of admission's mode "baseline", when a prefill is done: a rejection, and
        the request is not in flight any more; or None. Raises UnknownRequest."""
        flight = self.ledger.get(request_id)
        if flight is None:
            raise UnknownRequest(f"no request {request_id!r} is in flight")
        row, c = flight.decode_row, self.cluster
        if row < 0:
            return None  # its instance has gone: who asks again gets another
        more = flight.phase is Phase.PREFILL  # else the columns have it already
        batch = int(c.batch[row]) + more
        context = float(c.context_tokens[row]) + more * flight.request.prompt_tokens
        tbt_s = float(c.d0[row] + c.d1[row] * batch + c.d2[row] * context)
        forecast = Forecast(flight.decision.predicted_ttft_s, tbt_s, tbt_s)
        verdict = admission.decide_decode(
            Outlook(flight.request, forecast), self.settings.admission, self._parts.dice
        )
        if verdict.admitted:
            return None
        self._end(flight, now, "rejected")
        return self._logged(verdict.rejection(request_id, now))

    def tick(self, now: float) -> list[str]:
        """Let time pass: what was not heard of is lost. Returns the requests that expired."""
        late = self.ledger.expired(now)
        for flight in late:
            self._end(flight, now, "expired")
        self.arrivals.count(now)
        self.races.expired(now)
        self.computing.expire(now)
        self.holdings.expire(now)
        self.horizon.advance(now)
        self.shadow.tick(now)
        timeout_s = self.settings.core.heartbeat_timeout_s
        silent = self.cluster.used & (self.cluster.heard_at < now - timeout_s)
        for row in silent.nonzero()[0].tolist():
            self.cluster.set_status(self.cluster.name(row), Status.LOST)
        gone = self.cluster.used & (self.cluster.heard_at < now - self.settings.core.forget_s)
        for row in gone.nonzero()[0].tolist():
            self.remove(self.cluster.name(row), now)
        self.names.tick(now)
        return [flight.request.id for flight in late]

    # -- instances ---------------------------------------------------------------------------------

    def register(self, spec: InstanceSpec, now: float) -> None:
        """An instance is there, or has changed what it says of itself. Raises InvalidRequest for
        what makes no sense, and for a profile that does not exist."""
        check_instance(spec)
        latency = self._profile(spec.profile).latency
        self._check_alike(spec)
        self.names.make_room()
        before = self.cluster.spec(spec.id).model if spec.id in self.cluster else ""
        self.cluster.register(spec, latency, now)
        if before == spec.model and spec.id in self.steering.flipping():
            self.cluster.assign(spec.id, on=False)  # it may have to restart for its new role
        self._latency[spec.id] = latency
        self.index.holder(spec.id, "hbm")
        if spec.node:
            self.index.holder(spec.node, "dram")
            self.index.holder(spec.node, "nvme")
        self._correct(spec.id)

    def heartbeat(self, instance: str, load: Load, now: float) -> None:
        """An instance lives, and reports its load. Raises UnknownInstance, InvalidRequest."""
        check_load(load)
        self.cluster.heard(instance, load, now)

    def remove(self, instance: str, now: float) -> None:
        """An instance has left. Its requests are decided anew if they are asked for again. Raises
        UnknownInstance."""
        row = self.cluster.row(instance)
        for flight in self.ledger:
            if row in (flight.prefill_row, flight.decode_row):
                self._released(flight)
        self.ledger.forget_row(row)
        self.horizon.forget_row(row, now)
        self.shadow.forget_row(row)
        self.computing.leave(row=row)
        self.races.lost(instance)
        self.holdings.drop_instance(instance)
        self.calibration.forget(instance)
        self._latency.pop(instance, None)
        self.cluster.remove(instance)

    def drain(self, instance: str, now: float) -> None:
        """Give it nothing new; what it has it may finish (`steering.drains`). Raises
        UnknownInstance."""
        self.cluster.assign(instance, on=False)
        self.steering.drain_instance(instance, now)

    def flip(self, instance: str, role: Role, now: float) -> list[Action]:
        """Change its role by the protocol: nothing new, drain, commit, verify. Returns what the
        instance itself has to do now (`Steering.committed`, `verified`). Raises UnknownInstance,
        and Conflict if it can't be now."""
        return self.steering.flip(instance, role, now)

    def instances(self, now: float) -> list[InstanceView]:
        """All that are registered, oldest first."""
        return [self._instance(name, now) for name in self.cluster.names]

    # -- blocks ------------------------------------------------------------------------------------

    def apply(self, update: Update, now: float) -> None:
        """What a feed says about who holds what."""
        self.holdings.apply(update, now)

    def links(self, node: str, links: dict[str, list[float]]) -> None:
        """What a node has measured on its ways from others: [bytes/s, seconds] by their names.
        Nodes that nobody else has spoken of are none."""
        known = {name: way for name, way in links.items() if self.cluster.find_node(name) >= 0}
        self.transfers.observe(node, known)

    def match(self, keys: Sequence[bytes], now: float) -> MatchView:
        """Who holds a prefix, the longest first."""
        match = self.index.match(keys)
        lengths = match.lengths(self.index.width).tolist()
        holders = [
            (self.index.label(number), lengths[number], self.index.age_s(number, now))
            for number in self.index.numbers()
            if number < len(lengths) and lengths[number]
        ]
        return MatchView(match.blocks, sorted(holders, key=lambda one: -one[1]))

    def hot(self, n: int, now: float) -> list[HotPrefix]:
        """The most popular prefixes."""
        self.arrivals.count(now)
        return self.popularity.hot(n, now)

    # -- what was decided --------------------------------------------------------------------------

    def decision(self, request_id: str) -> Decision | Rejection | None:
        """The last decision about a request, with every term; None if it was forgotten."""
        return self._log.get(request_id)

    def decisions(self, limit: int) -> list[Decision | Rejection]:
        """The latest decisions, the last one first."""
        latest: Iterable[Decision | Rejection] = reversed(self._log.values())
        return [one for one, _ in zip(latest, range(limit), strict=False)]

    def patch(self, changes: dict[str, Any], now: float) -> Settings:
        """Change settings while running. All of it or, if anything does not validate, nothing:
        raises InvalidRequest."""
        settings = patched(self.settings, changes)
        check_predictor(settings.planner.predictor)
        if settings.policy.name != self.settings.policy.name:
            self._parts.policy = policy(settings.policy.name)
        self.settings = self._parts.settings = settings
        self.queues.configure(settings.queue)
        self.transfers.configure(settings.transfers)
        self.lengths.configure(settings.lengths)
        self.calibration.configure(settings.calibration)
        self.races.configure(settings.racing)
        self.popularity.configure(settings.popularity, now)
        self.shadow.settings = settings.shadow
        self.steering.configure()
        return settings

    def statistics(self) -> dict[str, Any]:
        """Plain numbers."""
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

    def _begin(self, accepted: Accepted, now: float) -> Decision | Rejection:
        flight, request = accepted.flight, accepted.flight.request
        decision = flight.decision
        preempted = self.ledger.begin(flight, now)
        if preempted is None:
            return self._refuse(Refused(self._queue_full(flight, now)))
        self._make_way(preempted, request.id, now)
        for node, nbytes in flight.transfers:
            self.transfers.begin(node, nbytes, now)
        ready_at = now + decision.predicted_ttft_s
        node_number = int(self.cluster.node[flight.prefill_row])
        self.computing.begin(
            request.id, flight.prefill_row, node_number, request.keys,
            min(flight.hbm_blocks, len(request.keys)), ready_at, now,
        )  # fmt: skip
        output = accepted.plan.output_tokens
        decode_s = admission.expected_decode_s(
            self.settings.admission, output, decision.predicted_tbt_s
        )
        context = request.prompt_tokens + output // 2
        self.horizon.promise(request.id, flight.decode_row, context, ready_at, decode_s, now)
        self.shadow.admitted(
            request.id, flight.prefill_row, flight.decode_row, request.objectives, flight.own_s, now
        )
        spec = self.cluster.specs[flight.prefill_row]
        assert spec is not None
        self.arrivals.came(request, spec)
        self.races.scheduled()
        if decision.alternatives:
            others = [Route(*other) for other in decision.alternatives]
            self.races.start(request.id, [_chosen(decision), *others], now)
        computed = request.prompt_tokens - decision.cached_tokens
        self.steering.came(request.model, request.prompt_tokens, computed, now)
        self._counts["decided"] += 1
        self._logged(decision)
        return decision

    def _stands(self, flight: Flight) -> bool:
        """Whether those who have something left to do for a request are there to do it."""
        rows = (flight.prefill_row, flight.decode_row)
        if min(rows) < 0:
            return False
        left = rows if flight.phase is Phase.PREFILL else rows[1:]
        return all(self.cluster.status[row] is not Status.LOST for row in left)

    def _computed(self, flight: Flight, route: Route, now: float) -> None:
        """What was computed on an instance is there. Of one that says itself what it has, only what
        it had not before is guessed. Not when it is decided: nobody could fetch it yet, and who
        would rather wait for it asks `computing`."""
        name, keys = route.prefill, flight.request.keys
        if name != flight.decision.prefill:  # another route of a race was faster
            there = name in self.cluster and route in flight.decision.alternatives
        else:
            there = flight.prefill_row >= 0
            if self.holdings.speaks(name):
                keys = keys[flight.hbm_blocks :]
        if there:
            self.holdings.routed(name, keys, now)

    def _make_way(self, victims: Iterable[Flight], by: str, now: float) -> None:
        """These had to leave their queue for another request."""
        for victim in victims:
            self._end(victim, now, "preempted")
            self._put_out.append(self._logged(_preempted(victim, by, now)))

    def put_out(self) -> list[Rejection]:
        """Requests that had to leave their queues since the last call, for whoever tells them."""
        found = list(self._put_out)
        self._put_out.clear()
        return found

    def _refuse(self, refused: Refused) -> Rejection:
        if refused.ghost is not None and refused.rejection.reason in ("ttft", "tbt"):
            self.shadow.rejected(refused.ghost)
        self._counts["rejected"] += 1
        return self._logged(refused.rejection)

    def _queue_full(self, flight: Flight, now: float) -> Rejection:
        wait_s = flight.decision.predicted_ttft_s - flight.own_s
        return Rejection(
            flight.request.id,
            "queue_full",
            f"{flight.decision.prefill} has as many waiting as settings.queue.waiting_max allows",
            flight.decision.predicted_ttft_s,
            flight.decision.predicted_tbt_s,
            admission.retry_after_s(wait_s, self.settings.admission, self._parts.dice),
            candidates=flight.decision.candidates,
            decided_at=now,
        )

    def _logged(self, outcome: Outcome) -> Outcome:
        self._log.pop(outcome.request_id, None)
        self._log[outcome.request_id] = outcome
        while len(self._log) > self.settings.core.log_max:
            self._log.popitem(last=False)
        return outcome

    def _prefilled(self, flight: Flight, route: Route, now: float) -> None:
        if self.ledger.prefill_done(flight, now):
            self._released(flight)
            self._computed(flight, route, now)
            self.horizon.start(flight.request.id, now)
            self.shadow.prefill_done(flight.request.id, now)

    def _first_token(self, flight: Flight, route: Route, now: float) -> None:
        if flight.first_token_at is not None:
            return
        flight.first_token_at = flight.last_token_at = now
        flight.answered_tokens = max(flight.answered_tokens, 1)
        self.shadow.first_token(flight.request.id, now)
        self.races.first_token(flight.request.id, route)
        if flight.prefill_row < 0 or route != _chosen(flight.decision):
            return  # another route's time says nothing about the one that was predicted
        predicted_s, observed_s = flight.decision.predicted_ttft_s, now - flight.decided_at
        for key in self._keys(flight.prefill_row):
            self.calibration.observe_ttft(key, predicted_s, observed_s, flight.factor)
        self._correct(self.cluster.name(flight.prefill_row))

    def _tokens(self, flight: Flight, count: int, now: float) -> None:
        last = flight.last_token_at
        self.ledger.tokens(flight, count, now)
        if count and last is not None and flight.decode_row >= 0 and now > last:
            predicted_s, observed_s = flight.decision.predicted_tbt_s, (now - last) / count
            for key in self._keys(flight.decode_row):
                self.calibration.observe_tbt(key, predicted_s, observed_s, flight.tbt_factor)
            self._correct(self.cluster.name(flight.decode_row))

    def _finish(self, flight: Flight, finished: bool, now: float) -> None:
        tbt_s: float | None = None
        first, last, tokens = flight.first_token_at, flight.last_token_at, flight.answered_tokens
        if first is not None and last is not None and tokens > 1:
            tbt_s = (last - first) / (tokens - 1)
        if finished:
            with contextlib.suppress(InvalidRequest):  # too many holders: it ends all the same
                self._prefilled(flight, _chosen(flight.decision), now)
            self.shadow.finished(flight.request.id, tbt_s, now)
            if tokens:
                self.lengths.observe(flight.request, tokens)
                self.steering.answered(flight.request.model, tokens, now)
        self._end(flight, now, None)

    def _end(self, flight: Flight, now: float, why: str | None) -> None:
        """It is in flight no more. Whatever it held is free, once."""
        self._released(flight)
        if self.ledger.end(flight, now):
            self.horizon.end(flight.request.id, now)
            self.shadow.cancelled(flight.request.id, now)  # nothing, if it has finished
            self.races.end(flight.request.id)
            if why is not None:
                self._counts[why] += 1

    def _released(self, flight: Flight) -> None:
        """Its prefill is over: nobody waits for it, and what it fetched is there."""
        self.computing.end(flight.request.id)
        for node, nbytes in flight.transfers:
            self.transfers.end(node, nbytes)
        flight.transfers = ()

    def _keys(self, row: int) -> tuple[str, str]:
        """What an observation is about: the instance, and its profile for those to come."""
        spec = self.cluster.specs[row]
        assert spec is not None
        return spec.id, spec.profile

    def _correct(self, instance: str) -> None:
        """The columns have the profile's coefficients times what was learnt."""
        row = self.cluster.row(instance)
        keys = self._keys(row)
        prefill, decode = self.calibration.factor(*keys), self.calibration.tbt_factor(*keys)
        factors = (prefill, prefill, prefill, decode, decode, decode)
        values = zip(("c0", "c1", "c2", "d0", "d1", "d2"), self._latency[instance], strict=True)
        for (name, value), factor in zip(values, factors, strict=True):
            getattr(self.cluster, name)[row] = value * factor

    def _check_alike(self, spec: InstanceSpec) -> None:
        """Raises Conflict for an instance that cuts its model's prompts into other blocks."""
        for other in self.cluster.specs:
            if other is not None and other.model == spec.model and other.id != spec.id:
                if other.block_tokens != spec.block_tokens:
                    raise Conflict(
                        f"block_tokens of {spec.id!r} is {spec.block_tokens}, and of {other.id!r}, "
                        f"which serves {spec.model!r} as well, {other.block_tokens}"
                    )
                return

    def _instance(self, name: str, now: float) -> InstanceView:
        cluster, row = self.cluster, self.cluster.row(name)
        role = cluster.role(row)
        columns = ("queued", "queued_tokens", "batch", "context_tokens", "kv_used_tokens")
        load = {column: float(getattr(cluster, column)[row]) for column in columns}
        heard_s = max(0.0, now - float(cluster.heard_at[row]))
        return InstanceView(cluster.spec(name), role, cluster.status[row], heard_s, load)

    def requests_at(self, instance: str) -> int:
        """Requests in flight that wait for, or run at, an instance: it is empty when there are
        none. Raises UnknownInstance."""
        return self.ledger.requests_at(self.cluster.row(instance))


def _preempted(victim: Flight, by: str, now: float) -> Rejection:
    return Rejection(
        victim.request.id,
        "preempted",
        f"it had to leave a full queue for {by!r}, which is of a higher class: send it again",
        retry_after_s=max(1.0, victim.decision.predicted_ttft_s),
        decided_at=now,
    )


def _chosen(decision: Decision) -> Route:
    """Where it runs, and what others may be raced against."""
    return Route(decision.prefill, decision.decode)


def avoids(request: Request, decision: Decision) -> bool:
    """Whether a request excludes an instance of its decision."""
    if not request.exclude:
        return False
    shards = (name for name, _ in decision.shards)
    names = {decision.prefill, decision.decode, *chain(*decision.alternatives), *shards}
    return not names.isdisjoint(request.exclude)


def prompt_of(request: Request) -> tuple[object, ...]:
    """What a request id stands for: with another one of these, it is another request."""
    return request.model, request.prompt_tokens, request.keys
