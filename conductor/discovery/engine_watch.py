"""Runs discovery in the conductor: looks engines up, asks them, and registers what they say.

One loop asks whoever is due; each source has a task that looks it up. Everything is decided by
`discovery.py`.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import ConductorError, InvalidRequest, UnknownInstance
from ..state.allowed_hosts import allowed_hosts, host_of
from ..wire.engine_models import EngineReply, EnginesReply
from ..wire.schema_text import parse_schema
from . import name_lookup
from .discovery import Announce, Answer, Beat, Discovery, Place
from .engine_facts import registration
from .engine_questions import EngineQuestions
from .kubernetes import ApiServer

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence
    from typing import Any

    from tiffin.kvstore import KVSchema

    from ..api.conductor_service import Service
    from ..records import InstanceSpec
    from ..wire.engine_models import EngineOptions
    from .discovery import Action, Ask
    from .settings import DiscoverySettings, SourceSettings

log = logging.getLogger("tiffin.conductor")

_LOOK_S = 0.1
# Engines that are being asked at a time: more would not be answered sooner by one event loop.
_ASKED_MAX = 64
# After a source could not be asked.
_PAUSE_S = 5.0


class EngineWatch:
    """See the module. Use it in an `async with`. The constructor raises InvalidRequest and
    InvalidInput for files that can't be read."""

    def __init__(self, service: Service, settings: DiscoverySettings) -> None:
        self._service, self._settings = service, settings
        self.discovery = Discovery(
            settings.scrape_s,
            settings.models_s,
            self._timeout_s,
            self._runs,
            self._registered_at,
        )
        self._questions = EngineQuestions(settings)
        self._schemas = {
            source.name: _schema_of(Path(source.schema_file))
            for source in settings.engines
            if source.schema_file
        }
        self._options = {source.name: source for source in settings.engines}
        self._asking = asyncio.Semaphore(_ASKED_MAX)
        self._tasks: set[asyncio.Task[None]] = set()
        self._api: ApiServer | None = None

    async def __aenter__(self) -> EngineWatch:
        self._service.engines = self
        if any(source.kubernetes for source in self._settings.engines):
            self._api = ApiServer(self._settings.kubernetes)
        for source in self._settings.engines:
            self._begin(self._follow(source))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._service.engines = None
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._questions.close()
        if self._api is not None:
            await self._api.close()

    async def run(self) -> None:
        """Ask whoever is due, until the task is cancelled."""
        while True:
            for ask in self.discovery.due(self._service.clock()):
                self._begin(self._ask_quietly(ask))
            await asyncio.sleep(_LOOK_S)

    # -- for the service ---------------------------------------------------------------------------

    async def add(self, url: str, options: EngineOptions) -> str:
        """Ask an engine, register it, and keep asking it. Returns its instance's id. Raises
        ConductorUnavailable if it does not answer, InvalidRequest with the name of the option for
        what it does not tell, and what a registration raises."""
        where = _place(url)
        check = allowed_hosts(self._service.core.settings.instances.allowed_hosts)
        check.check(where.url, "the engine")
        ask = self.discovery.add(where, options, self._service.clock())
        if ask is None:
            raise InvalidRequest("as many engines are known as there may be")
        try:
            return await self._ask(ask)
        except ConductorError:
            if not ask.instance:
                self.discovery.discard(where.url)
            raise

    def heard(self, instance: str, url: str) -> None:
        """An instance has sent a heartbeat of its own."""
        self._carry_out(self.discovery.heard(instance, url, self._service.clock()))

    def joined(self, specs: Sequence[InstanceSpec]) -> None:
        """Another conductor has these instances. Those that registered themselves, under ids that
        are not ours, are not registered twice."""
        for spec in specs:
            if spec.url and self.discovery.instance_at(spec.url) not in ("", spec.id):
                self.heard(spec.id, spec.url)

    def removed(self, instance: str) -> None:
        """An operator has removed an instance."""
        self.discovery.removed(instance)

    def troubles(self) -> list[str]:
        """What could not be asked or registered, in words."""
        return self.discovery.troubles(self._service.clock())

    def reply(self) -> EnginesReply:
        """All engines."""
        return EnginesReply(
            engines=[
                EngineReply(
                    url=one.url,
                    instance=one.instance,
                    sources=list(one.sources),
                    error=one.error,
                    failing_s=one.failing_s,
                    told=one.told,
                    removed=one.removed,
                )
                for one in self.discovery.states(self._service.clock())
            ],
            failing=self.discovery.failing(),
        )

    # -- sources -----------------------------------------------------------------------------------

    async def _follow(self, source: SourceSettings) -> None:
        while True:
            try:
                if source.kubernetes:
                    assert self._api is not None
                    async for places in self._api.follow(source):
                        self._found(source, places)
                else:
                    self._found(source, await self._look_up(source))
                    await asyncio.sleep(self._settings.resolve_s)
            except (ConductorError, TimeoutError) as error:
                why = str(error) or "no answer in time"
                log.warning("%s: %s", source.name, why)
                self.discovery.source_failed(source.name, why)
                await asyncio.sleep(_PAUSE_S)

    async def _look_up(self, source: SourceSettings) -> list[Place]:
        if source.url:
            return [_place(source.url)]
        if source.dns:
            return await name_lookup.addresses(source.dns, source.scheme)
        found = await name_lookup.services(source.srv, self._settings.timeout_s)
        return [name_lookup.place(source.scheme, *where) for where in found]

    def _found(self, source: SourceSettings, places: Sequence[Place]) -> None:
        self.discovery.found(source.name, places, source)

    # -- engines -----------------------------------------------------------------------------------

    async def _ask_quietly(self, ask: Ask) -> None:
        try:
            async with self._asking:
                await self._ask(ask)
        except ConductorError as error:
            log.debug("%s: %s", ask.place.url, error)  # `troubles` and its silence report it

    async def _ask(self, ask: Ask) -> str:
        """Ask an engine, and carry out what follows. Returns its instance's id."""
        url, clock = ask.place.url, self._service.clock
        try:
            answer = await self._answer(ask)
        except ConductorError as error:
            self._carry_out(self.discovery.failed(url, str(error), clock()))
            raise
        try:
            self._carry_out(self.discovery.answered(url, answer, clock()))
        except ConductorError as error:
            self.discovery.refused(url, str(error), clock())
            raise
        return answer.spec.id if answer.spec is not None else ask.instance

    async def _answer(self, ask: Ask) -> Answer:
        url, options = ask.place.url, ask.options
        if not ask.whole:
            spec = self._service.spec(ask.instance)
            metrics = await self._questions.metrics(url)
            return Answer(None, None, metrics.load(spec.kv_capacity_tokens if spec else 0))
        check = allowed_hosts(self._service.core.settings.instances.allowed_hosts)
        check.check(url, "the engine")
        facts = await self._questions.facts(url)
        model = options.model or next(iter(facts.models), "")
        home = self._service.home_of(model, options.id or ask.place.name, url)
        own = self._schema(options) or (None if home is None else home[1].schema)
        known = own or self._service.models.schema(model)
        spec, schema = registration(facts, options, url, ask.place.name, known, home)
        return Answer(spec, schema, facts.metrics.load(spec.kv_capacity_tokens))

    def _schema(self, options: EngineOptions) -> KVSchema | None:
        return next(
            (self._schemas.get(name) for name, one in self._options.items() if one is options),
            None,
        )

    def _carry_out(self, actions: Sequence[Action]) -> None:
        for action in actions:
            try:
                self._do(action)
            except UnknownInstance as error:  # it has left meanwhile
                log.debug("%s", error)
                if isinstance(action, Beat):
                    self.discovery.forgotten(action.instance)

    def _do(self, action: Action) -> None:
        service = self._service
        if isinstance(action, Announce):
            drains = not action.anew and self._drains_as(action.spec)
            if service.models.announced.of(action.spec.model) is None:
                service.learn_schema(action.spec, action.schema)
            service.announce(action.spec, action.spec.id, action.load, anew=action.anew)
            if drains:
                service.core.drain(action.spec.id, service.clock())
        elif isinstance(action, Beat):
            service.announce(None, action.instance, action.load)
        elif action.now:
            service.remove(action.instance)
        else:
            service.core.drain(action.instance, service.clock())

    def _drains_as(self, spec: InstanceSpec) -> bool:
        """Whether the instance is drained, and about to be registered with nothing but other
        labels, such as adapters that were loaded, or at another node: a registration would end the
        drain."""
        before = self._service.spec(spec.id)
        if before is None or before == spec:
            return False
        moved = replace(
            before,
            labels=spec.labels,
            node=spec.node,
            fetches=spec.fetches,
            block_bytes=spec.block_bytes,
        )
        if moved != spec:
            return False
        cluster = self._service.core.cluster
        return bool(cluster.draining[cluster.row(spec.id)])

    def _registered_at(self, url: str) -> str:
        specs = (one for one in self._service.core.cluster.specs if one is not None)
        return next((one.id for one in specs if one.url.rstrip("/") == url), "")

    def _runs(self, instance: str) -> int:
        core = self._service.core
        return core.requests_at(instance) if instance in core.cluster else 0

    def _timeout_s(self) -> float:
        return self._service.core.settings.core.heartbeat_timeout_s

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("discovery failed unexpectedly", exc_info=task.exception())


def _place(url: str) -> Place:
    """The place of one engine. Raises InvalidRequest for what is no URL."""
    host_of(url, "the engine's url")
    plain = url.rstrip("/")
    return Place(plain, plain.partition("://")[2].partition("/")[0])


def _schema_of(path: Path) -> KVSchema:
    try:
        text = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"can't read the schema {path}: {error}") from error
    return parse_schema(text)
