"""The conductor that the simulator drives is the one behind REST: told the same, it decides so too.

A simulation is recorded as a script: everything that its core is told and asked, and when. Then the
script is told to a service through its REST API, by the calls of the client, with the script's
clock and the same dice. Every answer is that of the simulation: instances, fetches, predictions to
the last bit, rejections with their reasons and terms.

What REST can not say (`NOT_OVER_REST`) is told to the service's core: blocks come over its feeds,
and are applied as `service/server.py` does. Ticks are those of the service, which a task of the
server calls.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tiffin.bench.reproduce.setups.inputs import conversation
from tiffin.bench.sim.cluster.simulation import SimulationOptions, simulate
from tiffin.bench.traces.scaling import at_rate
from tiffin.bench.traces.trace import Trace
from tiffin.conductor.api.app import create_app
from tiffin.conductor.client import calls
from tiffin.conductor.core import Conductor
from tiffin.conductor.errors import UnknownRequest
from tiffin.conductor.records import Decision, Rejection
from tiffin.conductor.wire.conversions import decision_reply

if TYPE_CHECKING:
    from collections.abc import Callable

    from tiffin.bench.sim.cluster.simulation import Profiles
    from tiffin.conductor.api.conductor_service import Service
    from tiffin.conductor.events.index_updates import Update
    from tiffin.conductor.records import InstanceSpec, Load, Request, RequestEvent
    from tiffin.conductor.wire.models import DecisionReply

    Script = list[tuple[str, tuple[Any, ...], float]]
    Outcomes = list[Decision | Rejection]

REQUESTS = 200
RATE = 2.0  # times the trace's own: several requests wait for each of few instances
OPTIONS = SimulationOptions(prefill=3, decode=2, cache_tokens=200_000, seed=7)
BUSY: dict[str, Any] = {"ttft_s": 8.0, "tbt_s": 0.1, "admission": "predictive"}


# Blocks come over the feeds. Nothing asks a service what to prefill next: engines have an order.
NOT_OVER_REST = ("apply", "next_prefill")


class ScriptedCore(Conductor):
    """The core, which writes down what it is told (`script`) and what it decides (`outcomes`)."""

    def __init__(self, options: SimulationOptions, profiles: Profiles) -> None:
        dice = random.Random(options.seed)
        super().__init__(options.settings(), dice=dice, profile=profiles)
        self.script: Script = []
        self.outcomes: Outcomes = []

    def _told(self, what: str, *said: Any, now: float) -> None:
        self.script.append((what, said, now))

    def register(self, spec: InstanceSpec, now: float) -> None:
        self._told("register", spec, now=now)
        super().register(spec, now)

    def heartbeat(self, instance: str, load: Load, now: float) -> None:
        self._told("heartbeat", instance, load, now=now)
        super().heartbeat(instance, load, now)

    def schedule(self, request: Request, now: float) -> Decision | Rejection:
        self._told("schedule", request, now=now)
        self.outcomes.append(super().schedule(request, now))
        return self.outcomes[-1]

    def observe(self, event: RequestEvent, now: float) -> None:
        self._told("observe", event, now=now)
        super().observe(event, now)

    def apply(self, update: Update, now: float) -> None:
        self._told("apply", update, now=now)
        super().apply(update, now)

    def next_prefill(self, instance: str, now: float) -> str | None:
        self._told("next_prefill", instance, now=now)
        return super().next_prefill(instance, now)

    def tick(self, now: float) -> list[str]:
        self._told("tick", now=now)
        return super().tick(now)


class ToldService:
    """A service with a clock that stands, and the REST calls that tell it a script."""

    def __init__(self, options: SimulationOptions) -> None:
        core = Conductor(options.settings(), dice=random.Random(options.seed))
        self.now_s = 0.0
        app = create_app(core, clock=lambda: self.now_s)
        self._service: Service = app.state.service
        self._http = httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://localhost"
        )
        self.answers: list[DecisionReply | Rejection] = []

    async def tell(self, what: str, said: tuple[Any, ...]) -> None:
        """Tell one line of the script."""
        if what in NOT_OVER_REST:
            getattr(self._service.core, what)(*said, self.now_s)
        elif what == "tick":
            self._service.tick()
        elif what == "schedule":
            self.answers.append(await self._call(calls.schedule(*said)))
        else:
            call: Callable[..., calls.RestCall[Any]] = getattr(calls, what)
            await self._call(call(*said))

    async def _call(self, call: calls.RestCall[Any]) -> Any:
        answer = await self._http.request(
            call.method, call.path, content=call.body, headers={"content-type": "application/json"}
        )
        try:
            return call.answered(answer.status_code, answer.content, again=False)
        except UnknownRequest:  # the simulation's core knew it no more, either
            return None


async def retold(script: Script, options: SimulationOptions) -> list[DecisionReply | Rejection]:
    service = ToldService(options)
    for what, said, now in script:
        service.now_s = now
        await service.tell(what, said)
    return service.answers


def scripted(trace: Trace, options: SimulationOptions) -> ScriptedCore:
    made = list[ScriptedCore]()

    def core(given: SimulationOptions, profiles: Profiles) -> Conductor:
        made.append(ScriptedCore(given, profiles))
        return made[0]

    simulate(trace, options, core=core)
    return made[0]


def shown(outcome: Decision | Rejection) -> DecisionReply | tuple[Any, ...]:
    """All that REST says of an outcome."""
    if isinstance(outcome, Decision):
        return decision_reply(outcome, lambda instance: "", outcome.decided_at)
    return (
        *(outcome.request_id, outcome.reason, outcome.message, outcome.terms),
        *(outcome.predicted_ttft_s, outcome.predicted_tbt_s, outcome.retry_after_s),
    )


@pytest.fixture(scope="module")
def trace() -> Trace:
    """The shipped trace's first requests, which share prefixes."""
    whole = conversation()
    return at_rate(Trace(whole.name, whole.requests[:REQUESTS]), RATE)


ASKS: dict[str, Any] = {"order": "conductor", "queue_order": "shortest-first"}


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, BUSY, ASKS], ids=["calm", "predictive", "asks for prefills"])
@pytest.mark.parametrize("policy", ["random", "least_loaded", "kvcache_centric"])
def test_a_service_decides_as_the_simulators_core(
    trace: Trace, policy: str, more: dict[str, Any]
) -> None:
    options = replace(OPTIONS, policy=policy, **more)
    core = scripted(trace, options)
    answers = asyncio.run(retold(core.script, options))
    assert len(answers) == REQUESTS
    for outcome, answer in zip(core.outcomes, answers, strict=True):
        told = shown(answer) if isinstance(answer, Rejection) else answer
        assert told == shown(outcome)


@pytest.mark.slow
def test_the_script_has_what_could_differ(trace: Trace) -> None:
    """Else the comparison would show little."""
    calm = [one for one in scripted(trace, OPTIONS).outcomes if isinstance(one, Decision)]
    assert any(one.fetches for one in calm)
    assert any(one.cached_tokens for one in calm)
    busy = scripted(trace, replace(OPTIONS, **BUSY)).outcomes
    assert 10 < sum(isinstance(one, Rejection) for one in busy) < REQUESTS - 10


@pytest.mark.slow
def test_a_service_with_other_dice_decides_otherwise(trace: Trace) -> None:
    options = replace(OPTIONS, policy="random")
    core = scripted(trace, options)
    answers = asyncio.run(retold(core.script, replace(options, seed=OPTIONS.seed + 1)))
    assert answers != [shown(one) for one in core.outcomes]
