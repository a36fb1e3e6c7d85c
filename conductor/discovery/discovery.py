"""Which engines there are, whom to ask now, and what to register of it. Pure: the caller looks up
names, asks engines, and carries out the actions.

    discovery = Discovery(1.0, 15.0, lambda: 10.0, core.requests_at, registered_at)
    discovery.found("dns engines:8000", [Place("http://10.0.0.21:8000", "10.0.0.21:8000")], options)
    for ask in discovery.due(now): ...                # ask each engine, then either of
    actions = discovery.answered(ask.place.url, Answer(spec, schema, load), now)
    actions = discovery.failed(ask.place.url, why, now)

An engine is known by its URL. It is asked what it is until it has said so, and then, every
`scrape_s`, how busy it is; what it is, again after a failure, since it may have been restarted as
another one, and every `models_s`, since adapters come and go.

- Answers are heartbeats. An engine that does not answer is silent, and the core knows what follows.
- **An instance's own heartbeats win.** Whoever registers the same URL, under any id, is the
  instance; answers count only once it is silent.
- A source that fails keeps what it last found: while DNS is away, engines are not.
- An engine that its sources list no more is drained, and removed when nothing runs on it or it
  does not answer any more. One that is listed again gets work again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tiffin.kvstore import KVSchema

    from ..records import InstanceSpec, Load
    from ..wire.engine_models import EngineOptions

# As many as instances may be registered.
ENGINES_MAX = 16_384
# The source of engines that operators add.
ADDED = "added"


@dataclass(frozen=True, slots=True)
class Place:
    """Where an engine is: its URL, and the id of its instance if its options give none."""

    url: str
    name: str


@dataclass(frozen=True, slots=True)
class Ask:
    """An engine to be asked: `whole` asks what it is, else only how busy it is. `instance`: as it
    is registered, "" if it is not."""

    place: Place
    options: EngineOptions
    whole: bool
    instance: str


class Answer(NamedTuple):
    """What an engine is, by its answers; None while that is known, and it was asked for its load
    only."""

    spec: InstanceSpec | None
    schema: KVSchema | None
    load: Load


@dataclass(frozen=True, slots=True)
class Announce:
    """Register an instance, or repeat it as a heartbeat; `anew`: even if nothing has changed, as it
    was drained."""

    spec: InstanceSpec
    schema: KVSchema
    load: Load
    anew: bool = False


@dataclass(frozen=True, slots=True)
class Leave:
    """Drain an instance, or with `now` remove it."""

    instance: str
    now: bool


@dataclass(frozen=True, slots=True)
class Beat:
    """A heartbeat for an instance that registered itself, and is silent."""

    instance: str
    load: Load


Action: TypeAlias = Announce | Beat | Leave


@dataclass(frozen=True, slots=True)
class EngineState:
    """What is known of an engine. `error`: why it is not registered, or does not answer;
    `failing_s`: since when. `told`: it sends heartbeats of its own. `leaving`: no source lists it
    any more. `removed`: by an operator."""

    url: str
    instance: str
    sources: tuple[str, ...]
    error: str
    failing_s: float | None
    told: bool
    leaving: bool
    removed: bool


@dataclass(slots=True)
class _Engine:
    place: Place
    options: EngineOptions
    sources: list[str] = field(default_factory=list)
    due_at: float = -math.inf
    whole_at: float = -math.inf  # when it was last asked what it is
    asking: bool = False
    known: tuple[InstanceSpec, KVSchema] | None = None
    registered: bool = False
    drained: bool = False  # by us, as no source lists it any more
    removed: bool = False
    error: str = ""
    failing_since: float | None = None
    told_as: str = ""  # the id under which it registered itself
    told_at: float = -math.inf

    @property
    def instance(self) -> str:
        return self.told_as or (self.known[0].id if self.known is not None else "")


class Discovery:
    """See the module. Not thread-safe. `timeout_s()`: how long heartbeats count; `runs(instance)`:
    how many requests an instance has; `registered_at(url)`: the instance that is there, or ""."""

    def __init__(
        self,
        scrape_s: float,
        models_s: float,
        timeout_s: Callable[[], float],
        runs: Callable[[str], int],
        registered_at: Callable[[str], str],
    ) -> None:
        self._scrape_s, self._models_s = scrape_s, models_s
        self._timeout_s, self._runs = timeout_s, runs
        self._registered_at = registered_at
        self._engines: dict[str, _Engine] = {}
        self._failing: dict[str, str] = {}  # sources, and why

    # -- sources -----------------------------------------------------------------------------------

    def found(self, source: str, places: Iterable[Place], options: EngineOptions) -> None:
        """A source's whole list. Of more than `ENGINES_MAX` engines the others are not taken."""
        self._failing.pop(source, None)
        listed = {place.url: place for place in places}
        for place in listed.values():
            self._list(source, place, options)
        for url, engine in list(self._engines.items()):
            if url not in listed and source in engine.sources:
                engine.sources.remove(source)
                if not engine.sources and (engine.removed or not engine.registered):
                    del self._engines[url]

    def add(self, place: Place, options: EngineOptions, now: float) -> Ask | None:
        """An operator names an engine, which stays until it is removed. Returns what to ask it
        now; None if `ENGINES_MAX` engines are known."""
        engine = self._list(ADDED, place, options)
        if engine is None:
            return None
        engine.options, engine.place = options, place
        engine.removed, engine.known = False, None
        return self._ask(engine, now)

    def discard(self, url: str) -> None:
        """An engine that was added is none."""
        engine = self._engines.get(url)
        if engine is not None and ADDED in engine.sources:
            engine.sources.remove(ADDED)
            if not engine.sources:
                del self._engines[url]

    def source_failed(self, source: str, why: str) -> None:
        """A source could not be asked; what it found before still holds."""
        self._failing[source] = why

    def _list(self, source: str, place: Place, options: EngineOptions) -> _Engine | None:
        engine = self._engines.get(place.url)
        if engine is None:
            if len(self._engines) >= ENGINES_MAX:
                return None
            engine = self._engines[place.url] = _Engine(place, options)
        if source not in engine.sources:
            engine.sources.append(source)
        return engine

    # -- asking ------------------------------------------------------------------------------------

    def due(self, now: float) -> list[Ask]:
        """Whom to ask now. Each is asked once until it has `answered` or `failed`."""
        return [
            self._ask(engine, now)
            for engine in self._engines.values()
            if engine.due_at <= now
            and not engine.asking
            and not engine.removed
            and not self._told(engine, now)
        ]

    def _ask(self, engine: _Engine, now: float) -> Ask:
        engine.asking, engine.due_at = True, now + self._scrape_s
        old = now - engine.whole_at >= self._models_s
        unknown = engine.known is None or engine.failing_since is not None
        whole = not engine.told_as and (unknown or old)
        engine.whole_at = now if whole else engine.whole_at
        return Ask(engine.place, engine.options, whole, engine.instance)

    def answered(self, url: str, answer: Answer, now: float) -> list[Action]:
        """What follows from an engine's answer."""
        engine = self._engines.get(url)
        if engine is None:
            return []
        engine.asking, engine.error, engine.failing_since = False, "", None
        if answer.spec is not None and answer.schema is not None:
            engine.known = answer.spec, answer.schema
        if engine.removed or self._told(engine, now):
            return []
        if engine.told_as:
            return [Beat(engine.told_as, answer.load)]
        if engine.known is None:
            return []
        if not engine.sources:
            return self._leave(engine, answer.load)
        if not engine.registered:
            other = self._registered_at(url)
            if other not in ("", engine.known[0].id):
                return self.heard(other, url, now)
        anew, engine.drained, engine.registered = engine.drained, False, True
        return [Announce(*engine.known, answer.load, anew)]

    def _leave(self, engine: _Engine, load: Load) -> list[Action]:
        """No source lists it: drain it, and remove it when nothing runs there."""
        assert engine.known is not None
        if engine.drained and not self._runs(engine.instance):
            del self._engines[engine.place.url]
            return [Leave(engine.instance, now=True)]
        told: list[Action] = [Announce(*engine.known, load)]
        if not engine.drained:
            engine.drained = True
            told.append(Leave(engine.instance, now=False))
        return told

    def failed(self, url: str, why: str, now: float) -> list[Action]:
        """What follows as an engine did not answer, or nothing that it could be registered by."""
        engine = self._engines.get(url)
        if engine is None:
            return []
        engine.asking, engine.error = False, why
        if engine.failing_since is None:
            engine.failing_since = now
        if engine.sources or self._told(engine, now):
            return []
        del self._engines[url]
        return [Leave(engine.instance, now=True)] if engine.registered else []

    def refused(self, url: str, why: str, now: float) -> None:
        """It could not be registered by what it answered."""
        engine = self._engines.get(url)
        if engine is not None:
            self.failed(url, why, now)
            engine.registered = False

    # -- what others say ---------------------------------------------------------------------------

    def heard(self, instance: str, url: str, now: float) -> list[Action]:
        """An instance has sent a heartbeat of its own. If it was registered for it under another
        id, that registration goes."""
        engine = self._engines.get(url.rstrip("/"))
        if engine is None:
            return []
        engine.told_at, engine.error, engine.failing_since = now, "", None
        if engine.told_as == instance:
            return []
        own = engine.known[0].id if engine.known is not None and engine.registered else instance
        engine.told_as, engine.registered = instance, False
        return [Leave(own, now=True)] if own != instance else []

    def instance_at(self, url: str) -> str:
        """As which instance the engine at a URL is registered; "" if it is not by us."""
        engine = self._engines.get(url.rstrip("/"))
        return engine.instance if engine is not None and engine.registered else ""

    def removed(self, instance: str) -> None:
        """An operator has removed an instance: it is not registered again, unless it is added, or
        its sources leave it out for a while."""
        for url, engine in list(self._engines.items()):
            if engine.instance == instance:
                engine.removed, engine.registered, engine.told_as = True, False, ""
                if ADDED in engine.sources:
                    engine.sources.remove(ADDED)
                if not engine.sources:
                    del self._engines[url]

    def forgotten(self, instance: str) -> None:
        """An instance that registered itself is known no more: it was silent for too long."""
        for engine in self._engines.values():
            if engine.told_as == instance:
                engine.told_as = ""

    def _told(self, engine: _Engine, now: float) -> bool:
        return now - engine.told_at < self._timeout_s()

    # -- reports -----------------------------------------------------------------------------------

    def states(self, now: float) -> list[EngineState]:
        """All engines, in the order in which they were found."""
        return [
            EngineState(
                url=url,
                instance=engine.instance,
                sources=tuple(engine.sources),
                error=engine.error,
                failing_s=None if engine.failing_since is None else now - engine.failing_since,
                told=self._told(engine, now),
                leaving=not engine.sources,
                removed=engine.removed,
            )
            for url, engine in self._engines.items()
        ]

    def failing(self) -> list[str]:
        """Sources that could not be asked, and why."""
        return [f"{source}: {why}" for source, why in self._failing.items()]

    def troubles(self, now: float) -> list[str]:
        """Sources that can't be asked, and engines that could not be registered, in words. Those
        that are registered and silent, the core knows."""
        return self.failing() + [
            f"{url}: {engine.error}, for {now - engine.failing_since:.0f} s"
            for url, engine in self._engines.items()
            if engine.failing_since is not None and not engine.registered and not engine.told_as
        ]
