"""The service around the core: what other conductors say ends nothing here, and everybody hears
what became of requests."""

from __future__ import annotations

import asyncio
import logging
import random
from typing import TYPE_CHECKING

import pytest
from apisupport import MODEL, Recorder, profile

from tiffin.conductor.api.conductor_service import Service
from tiffin.conductor.core import Conductor
from tiffin.conductor.core.settings import Settings, patched
from tiffin.conductor.records import Decision, InstanceSpec, Rejection, Request, RequestEvent, Role
from tiffin.conductor.replicas.bulletins import Instance, SentSchema, pack
from tiffin.conductor.replicas.learnt_instances import News
from tiffin.conductor.replicas.redis_stream import share
from tiffin.conductor.replicas.replica import SharedConductor
from tiffin.conductor.service.feeds import EVENTS_LABEL, Feeding
from tiffin.kvstore import KVSchema

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from tiffin.conductor.replicas.bulletins import Word


def schema(block_tokens: int = 16) -> KVSchema:
    return KVSchema.gqa(
        model=MODEL, layers=1, kv_heads=1, head_dim=8, dtype="float16", block_tokens=block_tokens
    )


def text(block_tokens: int = 16) -> str:
    return schema(block_tokens).canonical_bytes().decode()


def spec(name: str = "i1", block_tokens: int = 16, **labels: str) -> InstanceSpec:
    return InstanceSpec(name, MODEL, Role.MIXED, "test", block_tokens=block_tokens, labels=labels)


PUBLISHES = {EVENTS_LABEL: "tcp://127.0.0.1:9"}


class Stream:
    """A stream in which others have said something."""

    def __init__(self) -> None:
        self._raws: list[bytes] = []
        self._said = 0
        self.exchanges = 0

    def say(self, *words: Word) -> None:
        raws, left_out = pack("other", self._said, list(words), whole=True)
        assert not left_out
        self._said += len(raws)
        self._raws += raws

    def exchange(self, bulletins: Sequence[bytes]) -> list[bytes]:
        self.exchanges += 1
        raws, self._raws = self._raws, []
        return raws

    def lead(self, name: str, lead_s: float) -> str:
        return "other"


class Home:
    """A conductor, its service and feeding, that shares a stream."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.core = SharedConductor("us", dice=random.Random(1), profile=profile)
        self.feeding = Feeding(lambda update: None, loop)
        self.service = Service(self.core, feeding=self.feeding, clock=loop.time)
        self.stream = Stream()
        self.now = loop.time

    async def hears(self, *words: Word) -> None:
        """Takes in these words, in the task that the process would end with."""
        self.stream.say(*words)
        before = self.stream.exchanges
        task = asyncio.create_task(
            share(self.core, self.stream, self.now, self.service.learn)  # type: ignore[arg-type]
        )
        async with asyncio.timeout(20):
            while self.stream.exchanges < before + 2 and not task.done():  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        assert not task.done(), task.exception()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    def left_out(self, kind: str) -> float:
        value = self.service.metrics.registry.get_sample_value(
            "tiffin_conductor_news_left_out_total", {"kind": kind}
        )
        assert value is not None
        return value


def at_home(scenario: Callable[[Home], Awaitable[None]]) -> None:
    async def run() -> None:
        home = Home(asyncio.get_running_loop())
        try:
            await scenario(home)
        finally:
            await home.feeding.close()

    asyncio.run(run())


class TestWhatOthersSay:
    def test_another_schema_of_a_model_waits_until_ours_has_left(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        async def scenario(home: Home) -> None:
            service = home.service
            service.models.learn(MODEL, schema(16), set)
            service.announce(spec("ours"), "ours", None)
            await home.hears(SentSchema(MODEL, text(32)))
            await home.hears(SentSchema(MODEL, text(16)), SentSchema(MODEL, text(32)))
            service.tick()
            assert service.models.schema(MODEL) == schema(16)
            assert home.left_out("schema") == 2
            service.remove("ours")
            service.tick()
            assert service.models.schema(MODEL) == schema(32)

        with caplog.at_level(logging.WARNING, logger="tiffin.conductor"):
            at_home(scenario)
        assert caplog.text.count("keys its blocks by another schema") == 1, "once per cause"

    def test_a_model_that_comes_back_is_keyed_as_it_says(self) -> None:
        """Who joins by the same word doesn't stand for the schema of before."""

        async def scenario(home: Home) -> None:
            home.service.models.learn(MODEL, schema(16), set)
            joins = Instance("i1", 1e9, spec("i1", 32, **PUBLISHES), "mixed")
            await home.hears(joins, SentSchema(MODEL, text(32)))
            assert home.service.models.schema(MODEL) == schema(32)
            assert home.feeding.followed == ["i1"]
            assert home.left_out("schema") == 0

        at_home(scenario)

    @pytest.mark.parametrize("ours", [False, True], ids=["by others", "by an instance here"])
    def test_an_instance_is_followed_when_its_schema_comes(self, ours: bool) -> None:
        async def scenario(home: Home) -> None:
            await home.hears(Instance("i1", 1e9, spec("i1", **PUBLISHES), "mixed"))
            assert "i1" in home.core.cluster
            assert home.feeding.followed == []
            assert home.left_out("instance") == 0, "it waits"
            if ours:
                home.service.models.learn(MODEL, schema(), set)
                home.service.tick()
            else:
                await home.hears(SentSchema(MODEL, text()))
            assert home.feeding.followed == ["i1"]

        at_home(scenario)

    def test_one_that_leaves_meanwhile_is_not(self) -> None:
        async def scenario(home: Home) -> None:
            await home.hears(Instance("i1", 1e9, spec("i1", **PUBLISHES), "mixed"))
            await home.hears(Instance("i1", 2e9, None), SentSchema(MODEL, text()))
            home.service.tick()
            assert home.feeding.followed == []

        at_home(scenario)

    def test_who_left_and_came_back_at_once_is_followed(self) -> None:
        async def scenario(home: Home) -> None:
            there = Instance("i1", 1e9, spec("i1", **PUBLISHES), "mixed")
            await home.hears(there, SentSchema(MODEL, text()))
            again = Instance("i1", 1.2e9, spec("i1", **PUBLISHES), "mixed")
            await home.hears(Instance("i1", 1.1e9, None), again)
            assert home.feeding.followed == ["i1"]

        at_home(scenario)

    def test_a_newer_format_and_a_bad_endpoint_harm_nothing_else(self) -> None:
        async def scenario(home: Home) -> None:
            bad = spec("bad", **{EVENTS_LABEL: "tcp://no-port"})
            await home.hears(
                SentSchema("new", '["tiffin-schema-9","new"]'),
                SentSchema(MODEL, text()),
                Instance("bad", 1e9, bad, "mixed"),
                Instance("good", 1e9, spec("good", **PUBLISHES), "mixed"),
            )
            assert home.service.models.schema(MODEL) == schema()
            assert home.feeding.followed == ["good"]
            assert (home.left_out("schema"), home.left_out("instance")) == (1, 1)

        at_home(scenario)

    def test_causes_that_differ_for_ever_fill_no_log(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        service = Service(Recorder())
        with caplog.at_level(logging.WARNING, logger="tiffin.conductor"):
            service.learn(News(schemas=[(f"m{number}", "[]") for number in range(1000)]))
        assert len(caplog.records) == 256


def test_who_is_preempted_is_told_and_timed_anew_when_it_comes_again() -> None:
    now = 0.0
    settings = patched(Settings(), {"queue": {"waiting_max": 1}, "admission": {"mode": "off"}})
    core = Conductor(settings, dice=random.Random(1), profile=profile)
    core.register(spec(), now)
    service = Service(core, clock=lambda: now)

    async def scenario() -> list[Decision | Rejection]:
        nonlocal now
        with service.broadcast.following() as follower:
            for name, priority in (("runs", "normal"), ("low", "low"), ("high", "high")):
                now += 1e-3
                service.schedule(Request(name, MODEL, 1000, priority=priority))
            return [shown.entry for shown in await follower.take(1)]

    told = [(one.request_id, type(one)) for one in asyncio.run(scenario())]
    assert told[2:] == [("low", Rejection), ("high", Decision)]
    now = 50.0
    for name in ("runs", "high"):
        service.observe(RequestEvent(name, "finished"))
    assert len(service.metrics.timings) == 0
    assert isinstance(service.schedule(Request("low", MODEL, 1000)), Decision)
    observed = service.metrics.timings.observe(RequestEvent("low", "first_token"), 50.5)
    assert observed is not None
    assert observed.observed_s == pytest.approx(0.5)
