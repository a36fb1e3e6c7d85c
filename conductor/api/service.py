"""The conductor as a service: the core with a clock, what it tells Prometheus, and who follows it.

For one thread, the event loop's: the core is a plain object, and between two of its calls nothing
else happens. Whatever serves requests in this process goes through here, so that each decision is
counted and shown once.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from typing import TYPE_CHECKING

from ..errors import ConductorError, Conflict
from ..feeding import EVENTS_LABEL
from ..metrics import Metrics
from ..records import Decision, Load, Rejection, Role, Status
from ..state import state
from .intake import Limits
from .keying import Models, parse_schema
from .stream import Broadcast

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tiffin.kvstore import KVSchema

    from ..core import Conductor
    from ..feeding import Feeding
    from ..flips import Action
    from ..metrics import Family
    from ..news import News
    from ..records import InstanceSpec, Request, RequestEvent

log = logging.getLogger("tiffin.conductor")

# Different causes that are logged; whoever finds new ones for ever fills no log.
_CAUSES_MAX = 256


class Service:
    """See the module. `reasons` are functions that each say what is missing, "" if nothing is: a
    feed that is not connected, for one. `clock` is monotonic, `wall` the Unix time."""

    def __init__(
        self,
        core: Conductor,
        limits: Limits | None = None,
        *,
        reasons: tuple[Callable[[], str], ...] = (),
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        feeding: Feeding | None = None,
    ) -> None:
        self.core = core
        self.limits = limits or Limits()
        self.models = Models()
        self.metrics = Metrics(self._state)
        self.broadcast = Broadcast["Decision | Rejection"](
            self.limits.streams, self.limits.stream_backlog
        )
        self.clock = clock
        self._wall = wall
        self._reasons = reasons
        self._feeding = feeding
        self._stopping = False
        # What others said and we could not use: how often, and which causes were logged. Schemas
        # that contradict ours while an instance goes by ours; instances whose schema has not come.
        self._not_learnt: Counter[str] = Counter()
        self._causes: set[tuple[str, str]] = set()
        self._contradicting: dict[str, KVSchema] = {}
        self._schemaless: set[str] = set()
        # What tells instances their roles, while there is one (`acting.py`).
        self.act: Callable[[Sequence[Action]], None] | None = None

    def schedule(self, request: Request) -> Decision | Rejection:
        """Decide. A request that is asked about again, because an answer was lost, gets the same
        answer, and is not counted again."""
        now = self.clock()
        outcome = self.core.schedule(request, now)
        took_s = self.clock() - now
        self._tell_who_was_put_out()
        if outcome.decided_at < now:
            return outcome
        if isinstance(outcome, Decision):
            self.metrics.scheduled(request, outcome, took_s, now)
        else:
            self.metrics.rejected(request, outcome, took_s)
            self.metrics.timings.forget(request.id)  # of an earlier decision, whose instance left
        self.broadcast.give(outcome)
        return outcome

    def _tell_who_was_put_out(self) -> None:
        """Who had to leave its place in a queue for another request."""
        for rejection in self.core.put_out():
            self.metrics.timings.forget(rejection.request_id)
            self.broadcast.give(rejection)

    def observe(self, event: RequestEvent) -> Rejection | None:
        """What became of a request; a rejection if it is refused after its prefill. Raises
        UnknownRequest."""
        now = self.clock()
        self.core.observe(event, now)
        self._tell_who_was_put_out()
        self.metrics.observed(event, now)
        if event.kind != "prefill_done" or self.core.settings.admission.mode != "baseline":
            return None
        rejection = self.core.recheck(event.request_id, now)
        if rejection is not None:
            self.metrics.timings.forget(event.request_id)
            self.broadcast.give(rejection)
        return rejection

    def announce(self, spec: InstanceSpec | None, instance: str, load: Load | None) -> None:
        """An instance registers, or is heard of again. Only what changed is registered: a heartbeat
        with everything in it must not end a drain."""
        now = self.clock()
        if spec is not None and self._feeding is not None:
            # First, as it may refuse; an instance that is refused below is forgotten by `tick`.
            self._feeding.follow_instance(spec, self.models.schema(spec.model))
        if spec is not None and self.spec(instance) != spec:
            self.core.register(spec, now)
        self.core.heartbeat(instance, load or Load(), now)

    def learn(self, news: News) -> None:
        """What other conductors said about instances, and about our requests. Never raises for what
        they say: it is left out, logged once for each cause, and counted."""
        joined = {spec.id for spec in news.joined}
        for model, canonical in news.schemas:
            self._learn_schema(model, canonical, joined)
        for instance in news.left:
            self._unfollow(instance)
        # As they are now: they may have left, joined and changed in any order since the last news.
        for instance in dict.fromkeys((*news.left, *(spec.id for spec in news.joined))):
            spec = self.spec(instance)
            if spec is not None:
                self._follow(spec)
        for event in news.events:
            self.metrics.observed(event, self.clock())
        self._tell_who_was_put_out()
        self._catch_up()

    def _learn_schema(self, model: str, canonical: str, joined: set[str]) -> None:
        """Instances that have just joined by the same word don't speak for another schema."""
        self._contradicting.pop(model, None)
        if self.models.same(model, canonical) is not None:
            return
        try:
            schema = parse_schema(canonical)
            try:
                self.models.learn(model, schema, lambda: self._models_of_others(joined))
            except Conflict:
                self._contradicting[model] = schema  # until ours have left
                raise
        except ConductorError as error:
            self._leave_out("schema", f"the schema of {model[:200]!r}: {error}")

    def _models_of_others(self, but: set[str]) -> set[str]:
        specs = self.core.cluster.specs
        return {spec.model for spec in specs if spec is not None and spec.id not in but}

    def _follow(self, spec: InstanceSpec) -> None:
        """Follow an instance that another conductor told of, now or when its schema comes."""
        if self._feeding is None:
            return
        schema = self.models.schema(spec.model)
        if schema is None and spec.labels.get(EVENTS_LABEL):
            self._feeding.forget_instance(spec.id)  # if it was, then by another model's keys
            self._schemaless.add(spec.id)
            return
        self._schemaless.discard(spec.id)
        try:
            self._feeding.follow_instance(spec, schema)
        except ConductorError as error:
            self._feeding.forget_instance(spec.id)  # it is not there any more
            self._leave_out("instance", f"instance {spec.id[:200]!r}: {error}")

    def _unfollow(self, instance: str) -> None:
        self._schemaless.discard(instance)
        if self._feeding is not None:
            self._feeding.forget_instance(instance)

    def _catch_up(self) -> None:
        """Take what had to wait: schemas whose contradiction has left, and then instances."""
        for model, schema in list(self._contradicting.items()):
            if model not in self._models_of_others(set()):
                del self._contradicting[model]
                try:
                    self.models.learn(model, schema, set)
                except ConductorError as error:  # too many models
                    self._leave_out("schema", f"the schema of {model[:200]!r}: {error}")
        for instance in list(self._schemaless):
            spec = self.spec(instance)
            if spec is None:
                self._schemaless.discard(instance)
            elif self.models.schema(spec.model) is not None or not spec.labels.get(EVENTS_LABEL):
                self._follow(spec)

    def _leave_out(self, kind: str, why: str) -> None:
        self._not_learnt[kind] += 1
        if (kind, why) not in self._causes and len(self._causes) < _CAUSES_MAX:
            self._causes.add((kind, why))
            log.warning("another conductor says what can't be used: %s", why)

    def _state(self) -> Iterator[Family]:
        """For Prometheus: the core's, and ours."""
        yield from state(self.core, self.clock(), len(self.broadcast))
        yield (
            "news_left_out_total",
            "What other conductors said and could not be used here.",
            ("kind",),
            [((kind,), float(self._not_learnt[kind])) for kind in ("schema", "instance")],
        )

    def flip(self, instance: str, role: Role) -> None:
        """Begin to change an instance's role. Raises UnknownInstance, Conflict."""
        actions = self.core.flip(instance, role, self.clock())
        if self.act is not None:
            self.act(actions)

    def remove(self, instance: str) -> None:
        """Forget an instance. Raises UnknownInstance."""
        self.core.remove(instance, self.clock())
        self._unfollow(instance)

    def tick(self) -> None:
        """What time alone brings."""
        for request_id in self.core.tick(self.clock()):
            self.metrics.timings.forget(request_id)
        if self._feeding is not None:
            for instance in self._feeding.followed:
                if instance not in self.core.cluster:  # it was silent for too long
                    self._feeding.forget_instance(instance)
        self._catch_up()

    def spec(self, instance: str) -> InstanceSpec | None:
        """What an instance registered with; None if it did not."""
        cluster = self.core.cluster
        return cluster.spec(instance) if instance in cluster else None

    def url(self, instance: str) -> str:
        """Where requests for an instance are sent; "" if it did not say or has left."""
        spec = self.spec(instance)
        return spec.url if spec is not None else ""

    def unix_s(self, at: float) -> float:
        """The Unix time of a time of our clock."""
        return self._wall() - (self.clock() - at)

    def missing(self) -> list[str]:
        """Why nothing can be scheduled now, or not well; nothing if all is there."""
        if self._stopping:
            return ["the conductor is stopping"]
        ready = Counter(
            view.role for view in self.core.instances(self.clock()) if view.status is Status.READY
        )
        found = []
        if not ready[Role.PREFILL] + ready[Role.MIXED]:
            found.append("no instance that prefills is ready")
        if not ready[Role.DECODE] + ready[Role.MIXED]:
            found.append("no instance that decodes is ready")
        return found + [reason for check in self._reasons if (reason := check())]

    def stop(self) -> None:
        """Say that it stops, and end what would keep connections open."""
        self._stopping = True
        self.broadcast.close()
