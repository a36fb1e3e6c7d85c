"""The service around the core: no record of another conductor ends the process, and followers hear
the outcome of requests."""

from __future__ import annotations

import asyncio
import gc
import logging
import random
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec
import pytest
from apisupport import MODEL, Recorder, profile

from tiffin.conductor.api.conductor_service import Service
from tiffin.conductor.api.event_batches import observe_all
from tiffin.conductor.core import Conductor
from tiffin.conductor.core.settings import Settings, patched
from tiffin.conductor.records import Decision, InstanceSpec, Rejection, Request, RequestEvent, Role
from tiffin.conductor.replicas.redis_link import Met, share
from tiffin.conductor.replicas.replica import News, SharedConductor
from tiffin.conductor.replicas.states import InstanceRecord, State, pack
from tiffin.conductor.service.feeds import EVENTS_LABEL, Feeding
from tiffin.kvstore import KVSchema

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


def schema(block_tokens: int = 16) -> KVSchema:
    return KVSchema.gqa(
        model=MODEL, layers=1, kv_heads=1, head_dim=8, dtype="float16", block_tokens=block_tokens
    )


def text(block_tokens: int = 16) -> str:
    return schema(block_tokens).canonical_bytes().decode()


def spec(name: str = "i1", block_tokens: int = 16, **labels: str) -> InstanceSpec:
    return InstanceSpec(name, MODEL, Role.MIXED, "test", block_tokens=block_tokens, labels=labels)


PUBLISHES = {EVENTS_LABEL: "tcp://127.0.0.1:9"}


def record(
    name: str, block_tokens: int = 16, schema_of: int | None = 16, **labels: str
) -> InstanceRecord:
    """The record of an instance, with the schema of a model with this number of tokens in a
    block."""
    said = "" if schema_of is None else text(schema_of)
    return InstanceRecord(name, spec(name, block_tokens, **labels), "mixed", schema=said)


class Hash:
    """A double of the shared hash: records that other conductors have written."""

    def __init__(self) -> None:
        self.records: dict[str, bytes] = {}
        self.exchanges = 0

    def exchange(self, state: State, changes: object, **times: float) -> Met:
        self.exchanges += 1
        return Met({state.name: state}, "other", dict(self.records))

    def leave(self, name: str) -> None:
        pass


class Home:
    """A conductor that shares a hash, its service and its feeds."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.core = SharedConductor("us", dice=random.Random(1), profile=profile)
        self.feeding = Feeding(lambda update: None, loop)
        self.service = Service(self.core, feeding=self.feeding, clock=loop.time)
        self.hash = Hash()
        self.now = loop.time

    async def hears(self, *records: InstanceRecord) -> None:
        """Reads these records, in the task whose failure would end the process."""
        self.hash.records |= {one.instance: pack(one) for one in records}
        before = self.hash.exchanges
        task = asyncio.create_task(
            share(self.core, self.hash, self.now, self.service.learn)  # type: ignore[arg-type]
        )
        async with asyncio.timeout(20):
            while self.hash.exchanges < before + 2 and not task.done():  # noqa: ASYNC110
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
            await home.hears(record("theirs", 16, 32))
            await home.hears(record("theirs", 16, 16))
            await home.hears(record("theirs", 16, 32))
            service.tick()
            assert service.models.schema(MODEL) == schema(16)
            assert home.left_out("schema") == 2
            service.remove("ours")
            service.remove("theirs")
            service.tick()
            assert service.models.schema(MODEL) == schema(32)

        with caplog.at_level(logging.WARNING, logger="tiffin.conductor"):
            at_home(scenario)
        assert caplog.text.count("keys its blocks by another schema") == 1, "once per cause"

    def test_a_model_that_comes_back_is_keyed_as_it_says(self) -> None:
        """An instance that joins with a new schema does not keep the old schema in use."""

        async def scenario(home: Home) -> None:
            home.service.models.learn(MODEL, schema(16), set)
            await home.hears(record("i1", 32, 32, **PUBLISHES))
            assert home.service.models.schema(MODEL) == schema(32)
            assert home.feeding.followed == ["i1"]
            assert home.left_out("schema") == 0

        at_home(scenario)

    @pytest.mark.parametrize("ours", [False, True], ids=["by others", "by an instance here"])
    def test_an_instance_is_followed_when_its_schema_comes(self, ours: bool) -> None:
        async def scenario(home: Home) -> None:
            await home.hears(record("i1", schema_of=None, **PUBLISHES))
            assert "i1" in home.core.cluster
            assert home.feeding.followed == []
            assert home.left_out("instance") == 0, "it waits"
            if ours:
                home.service.models.learn(MODEL, schema(), set)
                home.service.tick()
            else:
                await home.hears(record("i2"))
            assert home.feeding.followed == ["i1"]

        at_home(scenario)

    def test_one_that_leaves_meanwhile_is_not(self) -> None:
        async def scenario(home: Home) -> None:
            await home.hears(record("i1", schema_of=None, **PUBLISHES))
            await home.hears(InstanceRecord("i1", None), record("i2"))
            home.service.tick()
            assert home.feeding.followed == []

        at_home(scenario)

    def test_who_left_and_came_back_is_followed(self) -> None:
        async def scenario(home: Home) -> None:
            await home.hears(record("i1", **PUBLISHES))
            await home.hears(InstanceRecord("i1", None))
            assert home.feeding.followed == []
            await home.hears(record("i1", **PUBLISHES))
            assert home.feeding.followed == ["i1"]

        at_home(scenario)

    def test_a_newer_format_and_a_bad_endpoint_harm_nothing_else(self) -> None:
        async def scenario(home: Home) -> None:
            newer = InstanceRecord(
                "new", replace(spec("new"), model="new"), schema='["tiffin-schema-9","new"]'
            )
            bad = record("bad", **{EVENTS_LABEL: "tcp://no-port"})
            await home.hears(newer, bad, record("good", **PUBLISHES))
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
    settings = patched(
        Settings(),
        {"queue": {"waiting_max": 1, "ahead_max": 1, "ahead_s": 0.0}, "admission": {"mode": "off"}},
    )
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


@pytest.mark.slow
def test_events_that_fail_leave_no_garbage_to_the_collector() -> None:
    """It looks at young objects only: cycles that outlive that are never freed."""
    service = Service(Conductor(dice=random.Random(1), profile=profile))
    bad = [
        b'{"request_id": "nobodys", "event": "alive"}',
        b'{"request_id": "nobodys", "event": "unheard-of"}',
        b'{"request_id": 1}',
        b'{"request_id": "\xff"}',
    ]
    asyncio.run(observe_all(service, [msgspec.Raw(text) for text in bad]))

    async def scenario() -> int:
        gc.collect()
        reply = await observe_all(service, [msgspec.Raw(text) for text in bad])
        assert [one.status for one in reply.failed] == [404, 400, 422, 400]
        return gc.collect()

    gc.disable()
    try:
        assert asyncio.run(scenario()) == 0
    finally:
        gc.enable()
