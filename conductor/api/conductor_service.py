"""The conductor as a service: the core with a clock, Prometheus metrics, the decision stream and
the feeds.

Not thread-safe: only the event loop's thread may call it. The core is a plain object without locks.
All code that serves requests in this process goes through `Service`, so that each decision is
counted and streamed once.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ..core.hold import hold_of
from ..core.inflight_requests import RequestPhase
from ..core.silence import NAMED_MAX, silent, unmeasured
from ..core.state_metrics import state
from ..errors import ConductorError, Conflict, InvalidRequest, UnknownModel, UnknownRequest
from ..pool.orders import FETCH_FACTOR, FETCH_MORE_S, fetch_orders
from ..records import Decision, Load, Rejection, RequestEvent
from ..replicas.replica import SharedConductor
from ..state.allowed_hosts import EVENTS_LABEL, check_hosts
from ..state.sliced_work import finished
from ..web.metrics import ConductorMetrics
from ..web.tracing import Tracing
from ..wire import conversions
from ..wire.block_keys import KeyedModels
from ..wire.decision_text import Shown
from ..wire.schema_text import parse_schema
from .decision_stream import Broadcast
from .release_mailboxes import ReleaseMailboxes
from .release_waiters import ReleaseWaiters
from .request_bodies import Limits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from tiffin.kvstore import KVSchema

    from ..core.conductor import Conductor
    from ..core.hold import Hold
    from ..core.settings import Settings
    from ..discovery.engine_watch import EngineWatch
    from ..pool.orders import Copy
    from ..pool.role_flip import Action
    from ..recording.recorder import Recorder
    from ..records import InstanceSpec, Request, Role
    from ..replicas.replica import News
    from ..service.feeds import Feeding
    from ..state.sliced_work import Work
    from ..web.metrics import Family
    from ..wire.announced_spaces import Keyed
    from ..wire.models import ScheduleBody

log = logging.getLogger("tiffin.conductor")

# How many different causes are logged: a conductor that sends ever new ones does not fill the log.
_CAUSES_MAX = 256
# How long the feeds' health is cached: a check looks at all their nodes.
_FEEDS_S = 1.0
# Who asks after a request whose instance gets nothing new is answered so late, as asking for the
# decision again may change nothing.
_MOVED_S = 1.0


class Service:
    """See the module. `reasons` are health checks: each returns why the service is not ready, such
    as a feed that is not connected, or "". `clock` is monotonic, `wall` the Unix time. `recorder`
    is told of every request, and what became of it."""

    def __init__(
        self,
        core: Conductor,
        limits: Limits | None = None,
        *,
        reasons: tuple[Callable[[], str], ...] = (),
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        feeding: Feeding | None = None,
        tracing: Tracing | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self.core = core
        self._recorder = recorder
        self.tracing = tracing or Tracing()
        self.limits = limits or Limits()
        self.models = KeyedModels()
        self.metrics = ConductorMetrics(self._state)
        self.broadcast = Broadcast[Shown](self.limits.streams, self.limits.stream_backlog)
        self.clock = clock
        self._releases = ReleaseWaiters()
        self.mailboxes = ReleaseMailboxes(core.dispatch.holds)
        self._wall = wall
        self._reasons = reasons
        self._feeding = feeding
        self._stopping = False
        # Caches of `missing`: about the instances, by the instance table's version, and about
        # `reasons`, by time.
        self._no_instances: tuple[int, list[str]] = (-1, [])
        self._no_feeds: tuple[float, list[str]] = (-math.inf, [])
        # News of other conductors that could not be used: counts, and the causes that were logged.
        # Schemas that contradict ours while an instance uses ours; instances whose schema has not
        # arrived yet.
        self._not_learnt: Counter[str] = Counter()
        self._causes: set[tuple[str, str]] = set()
        self._contradicting: dict[str, KVSchema] = {}
        self._schemaless: set[str] = set()
        # Held by the one batch of events that is being taken: of several, one at a time has slices.
        self.batch_turn = asyncio.Lock()
        # Callback that sends role changes to the instances, while `action_runner.py` runs.
        self.act: Callable[[Sequence[Action]], None] | None = None
        # While it runs: the engines that this conductor asks itself.
        self.engines: EngineWatch | None = None

    def request_of(self, body: ScheduleBody, tokens: NDArray[np.uint32] | None) -> Request:
        """The request of a body whose token ids are `tokens`. Raises InvalidRequest, and
        UnknownModel if token ids can't have keys as no instance has registered: of a conductor
        that was restarted, the request itself is not wrong."""
        model = body.model
        if (
            tokens is not None
            and self.models.schema(model) is None
            and self.core.cluster.model_number(model) is None
        ):
            raise UnknownModel(f"no instance has registered model {model!r}")
        return conversions.to_request(body, tokens, self.models, self._held)

    def _held(self, keys: Sequence[bytes]) -> int:
        """How many leading blocks somebody has."""
        return self.core.index.match(keys).blocks

    def schedule(self, request: Request) -> Decision | Rejection:
        """Place a request. Idempotent: a retry, after an answer was lost, gets the same decision
        and is not counted again."""
        now = self.clock()
        outcome = self.core.schedule(request, now)
        took_s = self.clock() - now
        self._tell_who_waits()
        if outcome.decided_at < now:
            return outcome
        if self._recorder is not None:
            self._recorder.look(self.core, now)
            self._recorder.scheduled(request, outcome, now)
        if isinstance(outcome, Decision):
            self._bring(outcome.request_id)
            self.metrics.scheduled(request, outcome, took_s, now)
        else:
            self.metrics.rejected(request, outcome, took_s)
            # Drop the timings of an earlier decision whose instance has left.
            self.metrics.timings.forget(request.id)
        self._show(outcome)
        return outcome

    def _tell_who_waits(self) -> None:
        """Publish the rejections of requests that another request has preempted from a queue, and
        wake whoever waits for the release of a request that is held no more."""
        for rejection in self.core.put_out():
            self._rejected_after_all(rejection)
        ended = self.core.dispatch.ended()
        for name in ended:
            self._bring(name)
        self._releases.wake(ended)
        self.mailboxes.put(ended)

    def _bring(self, name: str) -> None:
        """Have the node of the instance that prefills a request fetch what the decision counts on
        elsewhere, unless the request is held: its engine asks only when it gets to it."""
        flight = self.core.ledger.get(name)
        if self._feeding is None or flight is None or flight.brought:
            return
        if flight.phase is RequestPhase.PREFILL and not self.core.dispatch.holds(name):
            flight.brought = True
            self._feeding.carry_out(self._fetch_orders(flight.decision, flight.request.keys))

    def _fetch_orders(self, decision: Decision, keys: Sequence[bytes]) -> list[Copy]:
        spec = self.spec(decision.prefill) if decision.fetches else None
        if spec is None or self._feeding is None or not self._feeding.gives_orders:
            return []
        return fetch_orders(decision.fetches, keys, spec.node, self._home_of)

    def _home_of(self, instance: str) -> str:
        spec = self.spec(instance)
        return "" if spec is None else spec.node

    def fetch_within_s(self, decision: Decision) -> float | None:
        """See `DecisionReply`."""
        flight = self.core.ledger.get(decision.request_id)
        if flight is None or not self._fetch_orders(decision, flight.request.keys):
            return None
        return FETCH_FACTOR * sum(one.seconds for one in decision.fetches) + FETCH_MORE_S

    def _rejected_after_all(self, rejection: Rejection) -> None:
        self.metrics.timings.forget(rejection.request_id)
        if self._recorder is not None:
            self._recorder.rejected(rejection)
        self._show(rejection)

    def _show(self, outcome: Decision | Rejection) -> None:
        """Queue a decision for the subscribers. Its text is made once, when the first of them takes
        it."""
        if len(self.broadcast):
            self.broadcast.give(Shown(outcome, self.unix_s))

    def observe(self, event: RequestEvent) -> Rejection | None:
        """Process an event of an in-flight request. Returns a rejection if the request is rejected
        after its prefill. Raises UnknownRequest."""
        now, event = self.clock(), self.core.counted(event)
        self.core.observe(event, now)
        self._tell_who_waits()
        at = now - event.age_s
        self.metrics.observed(event, at)
        if self._recorder is not None:
            self._recorder.observed(event, at)
        if event.kind != "prefill_done" or self.core.settings.admission.mode != "baseline":
            return None
        rejection = self.core.recheck(event.request_id, now)
        if rejection is not None:
            self._rejected_after_all(rejection)
        return rejection

    def hold(self, name: str) -> Hold | None:
        """The hold of a request; None if it is not held."""
        return hold_of(self.core, name, self.clock()) if self.core.dispatch.holds(name) else None

    async def release(self, name: str, wait_s: float) -> Hold | Rejection:
        """Wait up to `wait_s` until a request is held no more: whether it still is, or its
        rejection if it was preempted. The request of who asks is alive. Raises UnknownRequest."""
        ends_at = self.clock() + wait_s
        found = self.released(name)
        if isinstance(found, Rejection):
            return found
        self.observe(RequestEvent(name, "alive"))
        while not isinstance(found, Rejection) and found.state != "released":
            left_s = ends_at - self.clock()
            moved = found.state == "moved"
            if left_s <= 0 or self._stopping:
                break
            await self._releases.wait(name, min(left_s, _MOVED_S) if moved else left_s)
            found = self.released(name)
            if moved:
                break
        return found

    def released(self, name: str) -> Hold | Rejection:
        """Whether a request is held, or its rejection if it was preempted. Raises
        UnknownRequest."""
        try:
            return hold_of(self.core, name, self.clock())
        except UnknownRequest:
            outcome = self.core.decision(name)
            if isinstance(outcome, Rejection):
                return outcome
            raise

    def next_prefills(self, instance: str, n: int, *, idle: bool) -> list[str]:
        """The names of the next requests for an instance that asks. Raises UnknownInstance."""
        names = self.core.next_prefills(instance, n, self.clock(), idle=idle)
        self._tell_who_waits()
        return names

    def announce(
        self, spec: InstanceSpec | None, instance: str, load: Load | None, *, anew: bool = False
    ) -> None:
        """Process an instance's registration or heartbeat. An unchanged `spec` is not registered
        again, unless `anew`: a heartbeat that contains it must not end a drain. Raises
        HostNotAllowed."""
        now = self.clock()
        if spec is not None:
            check_hosts(spec, self.core.settings.instances.allowed_hosts)
        if spec is not None and self._feeding is not None:
            # First, because it may raise; if `register` raises below, `tick` stops following the
            # instance.
            self._feeding.follow_instance(
                spec, self.models.schema(spec.model), self.models.announced
            )
        if spec is not None and (anew or self.spec(instance) != spec):
            self.core.register(spec, now)
            self._set_key_space(spec)
            for note in unmeasured([spec]):
                log.warning("%s", note)
        self.core.heartbeat(instance, load or Load(), now)

    def announced(self, node: str, spaces: Sequence[bytes]) -> None:
        """The engines at a node have announced these key spaces, and no others."""
        models = self.models.announced.announced(node, spaces)
        for model in models:
            names = ", ".join(one.name for one in self.models.announced.all_of(model))
            how = f"by the key space of its engines ({names})" if names else "as its instances say"
            log.info("prompts of %s are keyed %s", model, how)
        for spec in self.core.cluster.specs:
            if spec is not None and spec.model in models:
                self._follow(spec)

    def _set_key_space(self, spec: InstanceSpec) -> None:
        keyed = self.models.announced.at(spec)
        self.core.cluster.set_key_space(spec.id, "" if keyed is None else keyed.name)

    def home_of(self, model: str, engine: str, url: str) -> tuple[str, Keyed] | None:
        """The node that an engine has open, and what it has announced there, as far as is known."""
        here = [] if self._feeding is None else self._feeding.nodes_at(urlsplit(url).hostname or "")
        return self.models.announced.node_of(model, engine, here)

    def learn_schema(self, spec: InstanceSpec, schema: str | KVSchema) -> None:
        """Learn the schema, or its canonical text, with which an instance registers. Raises
        InvalidRequest, and Conflict if another instance of its model has another one."""
        if isinstance(schema, str):
            schema = self.models.same(spec.model, schema) or parse_schema(schema)
        if schema.block_tokens != spec.block_tokens:
            raise InvalidRequest(
                f"block_tokens is {spec.block_tokens}, and {schema.block_tokens} in the schema"
            )
        self.models.learn(spec.model, schema, lambda: self._models_of_others({spec.id}))
        if isinstance(self.core, SharedConductor):
            self.core.schema(spec.model, self.models.canonical(spec.model))

    def learn(self, news: News) -> None:
        """Apply news of other conductors about instances. Never raises for invalid news: they are
        skipped, logged once per cause, and counted."""
        joined = {spec.id for spec in news.joined}
        for model, canonical in news.schemas:
            self._learn_schema(model, canonical, joined)
        if self.engines is not None:
            self.engines.joined(news.joined)
        for _, why in news.refused:
            self._leave_out("instance", why)
        for instance in news.left:
            self._unfollow(instance)
        # Look up the current spec: an instance may have left, joined and changed in any order since
        # the last news.
        for instance in dict.fromkeys((*news.left, *(spec.id for spec in news.joined))):
            spec = self.spec(instance)
            if spec is not None:
                self._follow(spec)
        self._catch_up()

    def _learn_schema(self, model: str, canonical: str, joined: set[str]) -> None:
        """Learn a model's schema. The instances in `joined`, from the same news, do not count as
        using the schema that is known so far."""
        self._contradicting.pop(model, None)
        if self.models.same(model, canonical) is not None:
            return
        try:
            schema = parse_schema(canonical)
            try:
                self.models.learn(model, schema, lambda: self._models_of_others(joined))
            except Conflict:
                self._contradicting[model] = schema  # until the instances that use ours have left
                raise
        except ConductorError as error:
            self._leave_out("schema", f"the schema of {model[:200]!r}: {error}")

    def _models_of_others(self, but: set[str]) -> set[str]:
        specs = self.core.cluster.specs
        return {spec.model for spec in specs if spec is not None and spec.id not in but}

    def _follow(self, spec: InstanceSpec) -> None:
        """Follow the events of an instance that another conductor reported, now or as soon as its
        schema arrives."""
        self._set_key_space(spec)
        if self._feeding is None:
            return
        schema = self.models.schema(spec.model)
        if schema is None and spec.labels.get(EVENTS_LABEL):
            # If it was followed before, then with the keys of another model.
            self._feeding.forget_instance(spec.id)
            self._schemaless.add(spec.id)
            return
        self._schemaless.discard(spec.id)
        try:
            self._feeding.follow_instance(spec, schema, self.models.announced)
        except ConductorError as error:
            self._feeding.forget_instance(spec.id)  # its previous endpoint is out of date
            self._leave_out("instance", f"instance {spec.id[:200]!r}: {error}")

    def _unfollow(self, instance: str) -> None:
        self._schemaless.discard(instance)
        if self._feeding is not None:
            self._feeding.forget_instance(instance)

    def _catch_up(self) -> None:
        """Retry deferred news: schemas whose contradicting instances have left, then the instances
        that waited for a schema."""
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
        """Metric families for Prometheus: the core's state, and this service's counters."""
        yield from state(self.core, self.clock(), len(self.broadcast))
        yield (
            "news_left_out_total",
            "What other conductors said and could not be used here.",
            ("kind",),
            [((kind,), float(self._not_learnt[kind])) for kind in ("schema", "instance")],
        )
        yield (
            "events_left_out_total",
            "Events of an instance's cache that do not count: of unknown kinds, media and sizes.",
            ("instance", "what"),
            [
                ((name, what), float(count))
                for name, counts in self._left_out().items()
                for what, count in counts.items()
            ],
        )

    def _left_out(self) -> dict[str, dict[str, int]]:
        return {} if self._feeding is None else self._feeding.left_out()

    def flip(self, instance: str, role: Role) -> None:
        """Start to change an instance's role. Raises UnknownInstance, Conflict."""
        actions = self.core.flip(instance, role, self.clock())
        if self.act is not None:
            self.act(actions)

    def patch(self, changes: dict[str, Any]) -> Settings:
        """Change settings. Removes instances at hosts that are no longer allowed. Raises
        InvalidRequest; then no setting has changed."""
        before = self.core.settings.instances
        settings = self.core.patch(changes, self.clock())
        if settings.instances != before:
            self._remove_outside(settings.instances.allowed_hosts)
        return settings

    def _remove_outside(self, allowed_hosts: tuple[str, ...]) -> None:
        for spec in list(filter(None, self.core.cluster.specs)):
            try:
                check_hosts(spec, allowed_hosts)
            except InvalidRequest as error:
                log.warning("removed: %s", error)
                self.remove(spec.id)

    def remove(self, instance: str) -> None:
        """Remove an instance, and stop following its events. Raises UnknownInstance."""
        self.core.remove(instance, self.clock())
        self._unfollow(instance)
        self._tell_who_waits()

    def tick(self) -> None:
        """Do the periodic work: expire requests and instances, and retry deferred news."""
        finished(self.ticking())

    def ticking(self) -> Work[None]:
        """`tick` in pieces, between which requests may be placed."""
        now = self.clock()
        expired = yield from self.core.ticking(now)
        for request_id in expired:
            self.metrics.timings.forget(request_id)
            if self._recorder is not None:
                self._recorder.expired(request_id)
        self._tell_who_waits()
        if self._recorder is not None:
            self._recorder.look(self.core, now)
        if self._feeding is not None:
            for instance in self._feeding.followed:
                if instance not in self.core.cluster:  # it was silent for too long
                    self._feeding.forget_instance(instance)
        self._catch_up()

    def spec(self, instance: str) -> InstanceSpec | None:
        """The spec with which an instance registered; None if it is not registered."""
        cluster = self.core.cluster
        return cluster.spec(instance) if instance in cluster else None

    @property
    def address(self) -> str:
        """The URL of this conductor, for clients; "" if there are no others."""
        return self.core.address if isinstance(self.core, SharedConductor) else ""

    def url(self, instance: str) -> str:
        """The URL for an instance's requests; "" if it registered without one or has left."""
        spec = self.spec(instance)
        return spec.url if spec is not None else ""

    def unix_s(self, at: float) -> float:
        """Convert a time of `clock` to Unix time."""
        return self._wall() - (self.clock() - at)

    def missing(self) -> list[str]:
        """The reasons why the service is not ready; empty if it is. Cheap to poll: instances are
        checked only after they have changed, and `reasons` at most once a second."""
        if self._stopping:
            return ["the conductor is stopping"]
        cluster, now = self.core.cluster, self.clock()
        if self._no_instances[0] != cluster.version:
            # Without any to prefill that is ready, those that decode compute, too.
            prefill = cluster.prefills & (cluster.ready | (cluster.ready & cluster.decodes).any())
            able = (("prefills", prefill), ("decodes", cluster.ready & cluster.decodes))
            lacking = [does for does, column in able if not column.any()]
            found = [f"no instance that {does} is ready" for does in lacking]
            self._no_instances = cluster.version, found
        if now >= self._no_feeds[0] + _FEEDS_S:
            self._no_feeds = now, [reason for check in self._reasons if (reason := check())]
        return self._no_instances[1] + self._no_feeds[1]

    def notes(self) -> list[str]:
        """What operators should know though requests can be placed: silent instances, engines that
        could not be registered, what of their events does not count, instances whose blocks have
        no known size, and a pool without nodes. At most `NAMED_MAX` of each."""
        engines = [] if self.engines is None else self.engines.troubles()
        left_out = [
            f"{name}: {', '.join(counts)} are not in the index"
            for name, counts in self._left_out().items()
        ]
        return [
            *([] if self._feeding is None else self._feeding.notes()),
            *silent(self.core.cluster, self.clock()),
            *engines[:NAMED_MAX],
            *left_out[:NAMED_MAX],
            *unmeasured(self.core.cluster.specs),
            *self.models.announced.notes()[:NAMED_MAX],
        ]

    def stop(self) -> None:
        """Report "stopping" as not ready, and end the streams, which would keep connections
        open."""
        self._stopping = True
        self.broadcast.close()
        self._releases.wake_all()
        self.mailboxes.close()
