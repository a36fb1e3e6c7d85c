"""The conductor as a service: the core with a clock, what it tells Prometheus, and who follows it.

For one thread, the event loop's: the core is a plain object, and between two of its calls nothing
else happens. Whatever serves requests in this process goes through here, so that each decision is
counted and shown once.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING

from ..metrics import Metrics
from ..records import Decision, Load, Role, Status
from ..state import state
from .intake import Limits
from .keying import Models, parse_schema
from .stream import Broadcast

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..core import Conductor
    from ..feeding import Feeding
    from ..flips import Action
    from ..records import InstanceSpec, Rejection, Request, RequestEvent
    from ..shared import News


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
        self.metrics = Metrics(lambda: state(core, clock(), len(self.broadcast)))
        self.broadcast = Broadcast["Decision | Rejection"](
            self.limits.streams, self.limits.stream_backlog
        )
        self.clock = clock
        self._wall = wall
        self._reasons = reasons
        self._feeding = feeding
        self._stopping = False
        # What tells instances their roles, while there is one (`acting.py`).
        self.act: Callable[[Sequence[Action]], None] | None = None

    def schedule(self, request: Request) -> Decision | Rejection:
        """Decide. A request that is asked about again, because an answer was lost, gets the same
        answer, and is not counted again."""
        now = self.clock()
        outcome = self.core.schedule(request, now)
        took_s = self.clock() - now
        if outcome.decided_at < now:
            return outcome
        if isinstance(outcome, Decision):
            self.metrics.scheduled(request, outcome, took_s, now)
        else:
            self.metrics.rejected(request, outcome, took_s)
        self.broadcast.give(outcome)
        return outcome

    def observe(self, event: RequestEvent) -> Rejection | None:
        """What became of a request; a rejection if it is refused after its prefill. Raises
        UnknownRequest."""
        now = self.clock()
        self.core.observe(event, now)
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
        """What other conductors said about instances, and about our requests."""
        for model, canonical in news.schemas:
            schema = parse_schema(canonical)
            self.models.learn(model, schema, self._models_now)
        for spec in news.joined:
            if self._feeding is not None:
                self._feeding.follow_instance(spec, self.models.schema(spec.model))
        for instance in news.left:
            if self._feeding is not None:
                self._feeding.forget_instance(instance)
        for event in news.events:
            self.metrics.observed(event, self.clock())

    def _models_now(self) -> set[str]:
        specs = self.core.cluster.specs
        return {spec.model for spec in specs if spec is not None}

    def flip(self, instance: str, role: Role) -> None:
        """Begin to change an instance's role. Raises UnknownInstance, Conflict."""
        actions = self.core.flip(instance, role, self.clock())
        if self.act is not None:
            self.act(actions)

    def remove(self, instance: str) -> None:
        """Forget an instance. Raises UnknownInstance."""
        self.core.remove(instance, self.clock())
        if self._feeding is not None:
            self._feeding.forget_instance(instance)

    def tick(self) -> None:
        """What time alone brings."""
        for request_id in self.core.tick(self.clock()):
            self.metrics.timings.forget(request_id)
        if self._feeding is not None:
            for instance in self._feeding.followed:
                if instance not in self.core.cluster:  # it was silent for too long
                    self._feeding.forget_instance(instance)

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
