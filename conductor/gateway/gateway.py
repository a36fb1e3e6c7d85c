"""The gateway wires up the instance cache, placement, execution, reports, metrics and limits."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

from tiffin.kvstore.credentials import read_token
from tiffin.kvstore.gc_tuning import give_back

from ..errors import ConductorError, ConductorLate, ConductorUnavailable
from ..records import EXCLUDE_MAX
from ..web.tracing import Tracing
from ..wire.answers import Refusal
from .clients.client_limits import ClientLimits
from .clients.quota_file import QuotaFile
from .config import needs_restart
from .engines.circuit_breakers import CircuitBreakers
from .engines.engine_client import EngineError, Engines, EngineUnfit
from .engines.health_checks import check_all
from .engines.instance_cache import Known
from .engines.last_known import LastKnown
from .metrics import GatewayMetrics
from .openai import engine_bodies
from .openai.model_aliases import chosen, conversation
from .openai.response_ids import holder
from .openai.tokenizing import Tokenizing
from .requests.conductor_reports import Health, Reporter
from .requests.execution import Running
from .requests.own_lateness import OwnLateness
from .requests.placement import NoInstance, Placer
from .requests.placing_queue import PlacingQueue
from .requests.releases import Releases
from .workers.shared_counts import SharedCounts

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Mapping

    from ..client.client import AsyncConductorClient
    from ..records import Rejection
    from ..web.tracing import Span
    from .config import GatewayConfig, GatewayLimits
    from .engines.engine_client import Relayed, Whole
    from .engines.rendered import Tokens
    from .openai.openai_request import ClientRequest
    from .openai.tokenizing import Sized
    from .requests.continuation import Continuation
    from .requests.placement import Placement

log = logging.getLogger("tiffin.gateway")

# How long shutdown waits for pending reports. Later ones are lost, and the conductor lets their
# requests expire.
_LAST_WORDS_S = 3.0
# How often the processes that share a quota file tell each other what they have granted.
_QUOTA_S = 1.0
# The most of an instance's KV room that a batch of texts is said to need, so that two run at once.
_BATCH_SHARE = 0.4
# How often memory that is free goes back to the system, which takes some ms: a peak of requests
# leaves some MB.
_GIVE_BACK_S = 600.0


class CapacityGate:
    """Admission by capacity: counts in-flight requests and the bytes of their bodies, those of all
    workers, and refuses what exceeds the limits. For one event loop."""

    def __init__(
        self, limits: GatewayLimits, metrics: GatewayMetrics, counts: SharedCounts
    ) -> None:
        self._limits, self._metrics, self._counts = limits, metrics, counts

    @property
    def requests(self) -> int:
        """Requests of this worker."""
        return self._counts.own[0]

    @property
    def held_bytes(self) -> int:
        """Bytes of their bodies."""
        return self._counts.own[1]

    def enter(self, priority: str = "") -> None:
        """Admit a request of this class, or of none; `leave` ends it. Raises Refusal if the gateway
        is full, or what is left is for other classes."""
        requests, share = self._counts.requests, self._limits.class_shares.get(priority, 1.0)
        if requests >= share * self._limits.requests:
            more = f", and what is left is not for {priority!r}" if share < 1.0 else ""
            raise _busy(f"{requests} requests are under way{more}")
        self._count(1, 0)

    def hold(self, nbytes: int) -> None:
        """Reserve the bytes of a body. Raises Refusal if there is no room for it."""
        if self._counts.held_bytes + nbytes > self._limits.held_bytes:
            raise _busy("the requests under way are too long")
        self._count(0, nbytes)

    def leave(self, nbytes: int) -> None:
        """Release a request that has ended, and the `nbytes` of its body."""
        self._count(-1, -nbytes)

    def _count(self, requests: int, nbytes: int) -> None:
        self._counts.add(requests, nbytes)
        self._metrics.in_flight.set(self.requests)
        self._metrics.held_bytes.set(self.held_bytes)


class Gateway:
    """See the module; use it in an `async with`. For one event loop.

    `client` calls the conductor; the gateway closes it. `counts`: those that it shares with other
    workers. Raises InvalidInput for files of the
    configuration that can't be used.
    """

    def __init__(
        self,
        client: AsyncConductorClient,
        config: GatewayConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
        tracing: Tracing | None = None,
        counts: SharedCounts | None = None,
    ) -> None:
        self.tracing = tracing or Tracing()
        self.config, self.clock = config, clock
        self._latest = config  # what was reloaded: aliases, and models' objectives
        self.clients = ClientLimits(config.clients, config.client_default, wall=time.time)
        self.metrics = GatewayMetrics(self.clients.totals)
        self.health = Health()
        self.known, self.last_known = Known(), LastKnown()
        self._lateness = OwnLateness()
        self.gate = CapacityGate(config.limits, self.metrics, counts or SharedCounts.alone())
        self._quota = QuotaFile(Path(config.quota_file)) if config.quota_file else None
        self._client = client
        self._tokenizing = Tokenizing(config, self._remote_tokens)
        token_file = config.engine_token_file
        token = read_token(Path(token_file)) if token_file else b""
        self._engines = Engines(config, token)
        self.breakers = CircuitBreakers(config.breakers)
        self.running = Running(self._engines, self.breakers, config, clock)
        self.placing_queue = PlacingQueue(config.timeouts.conductor_s, self.metrics, clock)
        self.releases = Releases(client, self.metrics, clock)
        self.placing = Placer(
            client, self.known, self.last_known, self.health, self.placing_queue, self._lateness,
            config, self.metrics, clock, self.releases.waiter,
        )  # fmt: skip
        self.reporter = Reporter(
            client,
            self.health,
            clock,
            tokens=config.report_tokens,
            interval_s=config.report_s,
            batch_s=config.report_batch_s,
            wait_s=config.timeouts.conductor_s,
        )
        self._complaint = ""
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._lateness.start()
        await self.refresh()
        await self._share_quotas()
        self._tasks = [
            asyncio.create_task(_often(self.config.refresh_s, self.refresh)),
            asyncio.create_task(_often(_QUOTA_S, self._share_quotas)),
            asyncio.create_task(_often(_GIVE_BACK_S, _give_back)),
        ]
        if self.config.breakers.check_s:
            checking = _often(self.config.breakers.check_s, self._check_health)
            self._tasks.append(asyncio.create_task(checking))
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._share_quotas()
        if self._quota is not None:
            self._quota.close()
        self._lateness.stop()
        await self.releases.close()
        await self.reporter.close(_LAST_WORDS_S)
        await self._engines.close()
        await self._client.close()
        self._tokenizing.close()

    def reload(self, config: GatewayConfig) -> list[str]:
        """Take clients' settings, objectives and aliases from another configuration. Returns the
        fields that differ and stay as they are until a restart."""
        fixed = needs_restart(self.config, config)
        self.clients.reload(config.clients, config.client_default, self.clock())
        self._latest = config
        return fixed

    def allowed(self, client: str, ask: ClientRequest) -> ClientRequest:
        """A client's request with the objectives and the class that it may have. Raises Refusal for
        a class that it may not name."""
        settings, wishes = self.clients.settings_of(client), ask.wishes
        model = self._latest.model(ask.model)
        wishes = replace(
            wishes,
            objectives=model.objectives.within(settings.objectives.within(wishes.objectives)),
            priority=settings.priority(wishes.priority),
        )
        return replace(ask, wishes=wishes)

    def named(self, client: str, ask: ClientRequest) -> ClientRequest:
        """A client's request to the model that the name in it stands for. What continues a response
        is for a model of the instance that has it."""
        shares = self._latest.aliases.get(ask.model)
        if not shares:
            return ask
        if ask.follows:
            own = holder(ask.follows, self.known.names())
            served = {one: part for one, part in shares.items() if own in self.known.serving(one)}
            shares = served or shares
        return engine_bodies.asked_of(ask, chosen(shares, conversation(client, ask)))

    async def forward(
        self, method: str, path: str, model: str, body: bytes, name: str = ""
    ) -> Whole | Relayed:
        """Pass a call on that is no request to be placed: to the instance of this name, or to any
        that serves the model, another one if that is gone. Raises Refusal."""
        gone = set[str]()
        for _ in range(1 + self.config.reschedules):
            target = self.known.target(name) if name else self.known.any(model, gone)
            if target is None:
                break
            try:
                return await self._engines.forward(target, method, path, body)
            except EngineUnfit as failure:
                log.warning("%s", failure)
                raise Refusal(502, failure.code, failure.why, final=True) from failure
            except EngineError as failure:
                log.warning("%s", failure)
                gone.add(target.name)
        why = f"no instance of {model!r} answers" if model else "its instance does not answer"
        raise Refusal(503, "no_instance", why, retry_after_s=1.0)

    async def settled(
        self, rest: Continuation, model: str, gone: Collection[str]
    ) -> list[int] | None:
        """How many of an answer's tokens are in the text that the client has, as an instance that
        is not gone says; None if none does."""
        silent = set(gone)
        for ids, loud in rest.candidates():
            text = None
            while text is None:
                target = self.known.any(model, silent)
                if target is None:
                    log.warning("no instance of %r says what text the tokens are", model)
                    return None
                text = await self._engines.detokenize(target, model, loud)
                if text is None:
                    silent.add(target.name)
            if rest.matches(text):
                return ids
        log.warning("the tokens of %r are not the text that its client has", model)
        return None

    async def size(self, ask: ClientRequest) -> Sized:
        """The prompt's length in tokens, and its block keys. Raises InvalidRequest."""
        started = self.clock()
        base = self.known.base_of(ask.model)
        sized = await self._tokenizing.size(ask, base, keyed=self.known.keyed(base))
        self.metrics.size_s.observe(self.clock() - started)
        self.metrics.sized.labels(sized.how).inc()
        self.metrics.prompt_tokens.inc(sized.prompt_tokens)
        return sized

    async def place(
        self, ask: ClientRequest, sized: Sized, avoid: Collection[str], span: Span
    ) -> Placement | Rejection:
        """Place the request, on none of the instances in `avoid`. Raises ConductorError,
        NoInstance, NoShards, Refusal."""
        started = self.clock()
        sized = self._fitting(ask, sized)
        try:
            with span.call("place") as call:
                return await self._place(ask, sized, avoid, call.headers)
        finally:
            self.metrics.place_s.observe(self.clock() - started)

    async def refresh(self) -> None:
        """Fetch the instance list from the conductor into the instance cache. Never raises
        ConductorError."""
        began = self.clock()
        try:
            instances = await self._client.instances()
        except ConductorUnavailable as error:
            # Late ones say nothing, if it answers others, or if it is this process that is late.
            if not (isinstance(error, ConductorLate) and self.health.heard_since(began)):
                self.health.failed(self.clock(), error)
        except ConductorError as error:
            self.health.answered(self.clock())
            if str(error) != self._complaint:  # once, not every two seconds
                log.error("the conductor does not say which instances there are: %s", error)
            self._complaint = str(error)
        else:
            self.health.answered(self.clock())
            self._complaint = ""
            self.known.update(instances, self.clock())
            self.metrics.keep(self.known.names())
        self.metrics.conductor_up.set(self.health.up)
        self.metrics.instances.set(len(self.known))

    def models(self) -> list[str]:
        """The models that instances serve, and the names that stand for them."""
        served = self.known.models()
        aliases = self._latest.aliases
        return [*served, *(name for name in aliases if set(aliases[name]) & set(served))]

    def missing(self) -> list[str]:
        """The reasons why the gateway is not ready to serve requests; empty if it is."""
        found = []
        if not self.health.up and not (self.config.fallback and self.known.models()):
            found.append("the conductor does not answer")
        if not self.known.models():
            found.append("no instance is known")
        return found

    async def _place(
        self, ask: ClientRequest, sized: Sized, gone: Collection[str], trace: Mapping[str, str]
    ) -> Placement | Rejection:
        others = self.known.serving(ask.model) - set(gone)
        if ask.follows:
            return await self._place_again(ask, sized, others, trace)
        weak = self.breakers.avoided(others, self.clock())
        if weak:
            try:
                avoid = [*gone, *weak][:EXCLUDE_MAX]
                return await self.placing.place(ask, sized, avoid, trace)
            except NoInstance as error:
                log.debug("instances that fail are tried nevertheless: %s", error)
        return await self.placing.place(ask, sized, gone, trace)

    def _fitting(self, ask: ClientRequest, sized: Sized) -> Sized:
        """A batch as the conductor is told of it: no longer than an instance has room for beside
        another one, since the engine holds back those of its texts that have none."""
        room = self.known.kv_room(ask.model) if ask.batch else None
        if room is None or sized.prompt_tokens <= (most := max(1, round(room * _BATCH_SHARE))):
            return sized
        return replace(sized, prompt_tokens=most)

    async def _place_again(
        self, ask: ClientRequest, sized: Sized, others: Collection[str], trace: Mapping[str, str]
    ) -> Placement | Rejection:
        """Place a request at the instance that has the response that it continues."""
        own = holder(ask.follows, others)
        if own is None or len(others) > EXCLUDE_MAX:
            raise NoInstance(f"the instance that has {ask.follows[:80]!r} is gone: send all input")
        return await self.placing.place(ask, sized, set(others) - {own}, trace)

    async def _check_health(self) -> None:
        """Ask all instances whether they are well."""
        timeout_s = self.config.breakers.check_timeout_s
        await check_all(self._engines, self.known, self.breakers, self.clock, timeout_s)
        self.metrics.circuits(self.known.names(), self.breakers.open(self.clock()))

    async def _share_quotas(self) -> None:
        """Add what was granted to the quota file, and learn what other processes have granted."""
        if self._quota is None:
            return
        day, spent = self.clients.day, self.clients.spent()
        try:
            used = await asyncio.to_thread(self._quota.add, day, spent)
        except sqlite3.Error as error:
            log.error("the quota file can't be written: %s", error)
            self.clients.unspend(spent)
        else:
            self.clients.keep(day, used, self.clock())

    async def _remote_tokens(self, ask: ClientRequest, media: bool) -> Tokens | None:
        target = self.known.any(ask.model)
        return None if target is None else await self._engines.tokenize(target, ask, media=media)


async def _often(interval_s: float, work: Callable[[], Awaitable[None]]) -> None:
    while True:
        await asyncio.sleep(interval_s)
        await work()


async def _give_back() -> None:
    give_back()


def _busy(why: str) -> Refusal:
    return Refusal(503, "gateway_busy", f"{why}: try again", retry_after_s=1.0)
