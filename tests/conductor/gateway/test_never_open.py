"""Requests that the conductor does not place in time: they are refused, or placed by its last known
state, and never without admission."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from typing import TYPE_CHECKING, Any

import pytest
from gatewaysupport import MODEL, Engine, changed, cluster, run, until

from tiffin.conductor.errors import ConductorLate, ConductorUnavailable
from tiffin.conductor.gateway.engines.instance_cache import CallTarget, InstanceRoute
from tiffin.conductor.gateway.engines.last_known import INTERVAL_S, PREFIXES_MAX, LastKnown
from tiffin.conductor.gateway.metrics import GatewayMetrics
from tiffin.conductor.gateway.requests import placing_queue
from tiffin.conductor.gateway.requests.conductor_reports import Health
from tiffin.conductor.gateway.requests.own_lateness import OwnLateness
from tiffin.conductor.gateway.requests.placing_queue import PlacingQueue
from tiffin.conductor.wire.answers import Refusal
from tiffin.conductor.wire.error_codes import error_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from gatewaysupport import Cluster

PROMPT = [1, 2, 3]


def route(name: str, decode: str = "") -> InstanceRoute:
    return InstanceRoute(CallTarget(name, ""), CallTarget(decode or name, ""))


def keys(count: int, of: str = "a") -> list[bytes]:
    return [f"{of}{number}".encode() for number in range(count)]


class TestLastKnown:
    def test_an_instance_gets_as_many_as_it_had_and_one_at_least(self) -> None:
        known = LastKnown()
        assert known.full(["a", "b"]) == frozenset()
        for _ in range(3):
            known.began(route("a", "b"), 0.0, decided=True)
        assert known.full("ab") == {"a", "b"}
        known.ended(route("a", "b"))
        assert known.full("ab") == frozenset()
        known.began(route("a"), 1.0, decided=False)
        assert known.full("ab") == {"a"}
        known.began(route("a"), 1.0, decided=False)  # of two at once, say: it raises no limit
        known.ended(route("a"))
        assert known.full("ab") == {"a"}
        known.began(route("c"), 1.0, decided=False)
        assert known.full("c") == {"c"}

    def test_a_peak_counts_for_this_interval_and_the_last(self) -> None:
        known = LastKnown()

        def burst(size: int, now: float) -> None:
            for _ in range(size):
                known.began(route("a"), now, decided=True)
            for _ in range(size):
                known.ended(route("a"))

        def limit() -> int:
            size = 0
            while not known.full("a"):
                known.began(route("a"), 0.0, decided=False)
                size += 1
            for _ in range(size):
                known.ended(route("a"))
            return size

        burst(5, 0.0)
        burst(2, INTERVAL_S)
        assert limit() == 5
        burst(2, 2 * INTERVAL_S)
        assert limit() == 2

    def test_a_prompt_goes_where_its_longest_prefix_went_last(self) -> None:
        known = LastKnown()
        known.learn(keys(8), "a")
        known.learn([*keys(4), *keys(4, "b")], "b")
        assert known.nearest(keys(8), "ab") == "a"
        assert known.nearest([*keys(4), *keys(9, "x")], "ab") == "b"
        assert known.nearest([*keys(4), *keys(9, "x")], "a") == "", "b has it, and is not here"
        assert known.nearest(keys(3, "y"), "ab") == known.nearest([], "ab") == ""

    def test_what_is_remembered_is_bounded(self) -> None:
        known = LastKnown()
        for number in range(PREFIXES_MAX + 10):
            known.learn([str(number).encode()], "a")
        assert known.nearest([b"3"], "a") == ""
        assert known.nearest([str(PREFIXES_MAX).encode()], "a") == "a"


class TestThePlacingQueue:
    @pytest.fixture(autouse=True)
    def two_at_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(placing_queue, "AT_ONCE", 2)

    class Clock:
        now = 0.0

        def __call__(self) -> float:
            return self.now

    def queue(self, clock: Callable[[], float], patience_s: float = 5.0) -> PlacingQueue:
        return PlacingQueue(patience_s, GatewayMetrics(), clock)

    @staticmethod
    async def held(it: PlacingQueue, hold: asyncio.Event, tenant: str = "") -> None:
        """A call that lasts until `hold` is set."""
        async with it.turn(tenant):
            await hold.wait()

    async def holding(
        self, it: PlacingQueue, count: int, tenant: str = ""
    ) -> tuple[asyncio.Event, list[asyncio.Task[None]]]:
        """So many such calls that have begun, or wait."""
        hold = asyncio.Event()
        tasks = [asyncio.create_task(self.held(it, hold, tenant)) for _ in range(count)]
        await asyncio.sleep(0)
        return hold, tasks

    def test_tenants_take_turns(self) -> None:
        async def scenario() -> None:
            it, placed = self.queue(self.Clock()), list[str]()
            go = asyncio.Semaphore(0)

            async def place(name: str) -> None:
                async with it.turn(name[0]):
                    placed.append(name)
                    await go.acquire()

            names = ["a0", "a1", "a2", "a3", "a4", "b0", "c0"]
            tasks = []
            for name in names:
                tasks.append(asyncio.create_task(place(name)))
                await asyncio.sleep(0)
            assert (placed, len(it)) == (["a0", "a1"], 5)
            for _ in names:
                go.release()
                await asyncio.sleep(0.001)
            await asyncio.gather(*tasks)
            assert placed == ["a0", "a1", "a2", "b0", "c0", "a3", "a4"]
            assert (len(it), it._calls) == (0, 0)

        asyncio.run(scenario())

    def test_who_would_wait_for_too_long_is_told_so_at_once(self) -> None:
        async def scenario() -> None:
            clock = self.Clock()
            it = self.queue(clock, patience_s=0.5)
            hold, running = await self.holding(it, 3)
            clock.now = 0.3  # in which none was placed
            with pytest.raises(Refusal, match="1 requests wait") as refused:
                await self.held(it, hold)
            assert refused.value.status == 503
            assert refused.value.retry_after_s == pytest.approx(0.6)
            with pytest.raises(Refusal):
                it.check("")
            hold.set()
            await asyncio.gather(*running)
            it.check("")

        asyncio.run(scenario())

    def test_a_burst_tells_its_pace_before_anybody_is_refused(self) -> None:
        """Its first calls take long, as the burst itself is read meanwhile."""

        async def scenario() -> None:
            clock = self.Clock()
            it = self.queue(clock, patience_s=2.0)
            hold, running = await self.holding(it, 90)
            clock.now = 0.9  # nothing was placed
            it.check("")
            assert len(it) == 88
            clock.now = 1.01
            with pytest.raises(Refusal):
                it.check("")
            hold.set()
            await asyncio.gather(*running)
            for _ in range(2):  # of a new queue nothing is known
                hold, flood = await self.holding(it, 100)
                assert len(it) == 98
                hold.set()
                await asyncio.gather(*flood)

        asyncio.run(scenario())

    def test_the_flood_of_one_tenant_refuses_no_other(self) -> None:
        async def scenario() -> None:
            clock = self.Clock()
            it = self.queue(clock, patience_s=2.0)
            hold, running = await self.holding(it, 20, "a")
            clock.now = 1.0
            with pytest.raises(Refusal, match="18 requests wait"):
                it.check("a")
            it.check("b")
            _, more = await self.holding(it, 1, "b")
            with pytest.raises(Refusal, match="3 requests wait"):
                it.check("b")
            for task in (*running, *more):
                task.cancel()
            await asyncio.gather(*running, *more, return_exceptions=True)
            assert (len(it), it._calls) == (0, 0)
            hold.set()

        asyncio.run(scenario())

    def test_who_is_placed_quickly_may_be_many(self) -> None:
        """Ten per second are placed, so twenty may wait for two seconds."""

        async def scenario() -> None:
            clock = self.Clock()
            it = self.queue(clock, patience_s=2.0)
            places = [asyncio.Semaphore(0) for _ in range(60)]

            async def place(number: int) -> None:
                async with it.turn(""):
                    await places[number].acquire()

            tasks = [asyncio.create_task(place(number)) for number in range(32)]
            await asyncio.sleep(0)
            for number in range(11):
                clock.now += 0.1
                places[number].release()
                await asyncio.sleep(0.001)
            assert len(it) == 19
            it.check("")
            tasks += [asyncio.create_task(place(number)) for number in range(32, 33)]
            await asyncio.sleep(0)
            with pytest.raises(Refusal):
                it.check("")
            for one in places:
                one.release()
            await asyncio.gather(*tasks)

        asyncio.run(scenario())

    def test_who_waits_for_too_long_or_goes_leaves_no_gap(self) -> None:
        async def scenario() -> None:
            it = self.queue(self.Clock(), patience_s=0.05)
            hold = asyncio.Event()

            async def place() -> None:
                async with it.turn(""):
                    await hold.wait()

            running = [asyncio.create_task(place()) for _ in range(2)]
            await asyncio.sleep(0)
            gone = asyncio.create_task(place())
            await asyncio.sleep(0)
            gone.cancel()
            with pytest.raises(Refusal, match="wait to be placed"):
                await place()
            assert len(it) == 0
            # Its turn comes just as it goes: the next one takes it.
            last = [asyncio.create_task(place()) for _ in range(2)]
            await asyncio.sleep(0)
            hold.set()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            last[0].cancel()
            await asyncio.gather(*running, *last, return_exceptions=True)
            assert (len(it), it._calls) == (0, 0)
            async with it.turn(""):
                pass

        asyncio.run(scenario())

    def test_who_goes_just_before_its_turn_is_passed_by(self) -> None:
        async def scenario() -> None:
            it = self.queue(self.Clock())
            hold = asyncio.Event()

            async def place(tenant: str) -> None:
                async with it.turn(tenant):
                    await hold.wait()

            running = [asyncio.create_task(place("a")) for _ in range(2)]
            await asyncio.sleep(0)
            waiting = [asyncio.create_task(place(tenant)) for tenant in ("a", "b", "b")]
            await asyncio.sleep(0)
            hold.set()  # the calls end in the next round, before those that go notice it
            waiting[0].cancel()
            waiting[1].cancel()
            await asyncio.gather(*running, waiting[2])
            gone = await asyncio.gather(*waiting[:2], return_exceptions=True)
            assert [type(one) for one in gone] == [asyncio.CancelledError] * 2
            assert (len(it), it._calls) == (0, 0)

        asyncio.run(scenario())


def test_a_process_that_does_not_run_knows_how_late_it_is() -> None:
    async def scenario() -> None:
        it = OwnLateness()
        it.start()
        await asyncio.sleep(0)
        before_s = it.now_lost_s()
        time.sleep(0.3)  # noqa: ASYNC251 # that is what is to be noticed
        assert it.now_lost_s() - before_s >= 0.2
        await asyncio.sleep(0.01)
        assert it.lost_s - before_s >= 0.2
        it.stop()

    asyncio.run(scenario())


def test_health_knows_since_when_it_has_heard_nothing() -> None:
    health = Health()
    assert not health.heard_since(0.0)
    health.answered(5.0)
    assert health.heard_since(4.0)
    assert not health.heard_since(6.0)


def test_a_conductor_that_says_it_is_busy_is_not_gone() -> None:
    assert type(error_of(503, "busy", "too much")) is ConductorLate
    assert type(error_of(503, "", "nginx")) is ConductorUnavailable


def unanswered(it: Cluster, error: Exception, *, heard: bool = False) -> None:
    """From now on placing raises `error`; `heard`: while other calls are answered."""

    async def schedule(*_: Any, **__: Any) -> Any:
        if heard:
            await it.gateway.refresh()
        raise error

    it.gateway._client.schedule = schedule  # type: ignore[method-assign,assignment]


class TestLate:
    def test_a_call_that_is_late_beside_others_takes_nobody_off(self) -> None:
        async def scenario() -> None:
            async with cluster(Engine("m0")) as it:
                unanswered(it, ConductorLate("no answer"), heard=True)
                response = await it.post({"prompt": PROMPT})
                assert response.status_code == 200
                assert response.headers["x-tiffin-fallback"] == "conductor_late"
                assert it.gateway.health.up, "the next one is placed by the conductor again"

        run(scenario)

    def test_and_is_refused_if_the_operator_wants_that(self) -> None:
        async def scenario() -> None:
            engine = Engine("m0")
            async with cluster(engine, config=changed(fallback=False)) as it:
                unanswered(it, ConductorLate("no answer"), heard=True)
                for stream in (True, False):
                    response = await it.post({"prompt": PROMPT, "stream": stream})
                    assert response.status_code == 503
                    assert response.json()["error"]["code"] == "not_placed"
                    assert response.headers["x-tiffin-reject-reason"] == "not_placed"
                    assert int(response.headers["retry-after"]) >= 1
                assert it.number("not_placed_total") == 2
                assert engine.completions == []

        run(scenario)

    def test_one_that_can_not_be_reached_is_gone(self) -> None:
        async def scenario() -> None:
            async with cluster(Engine("m0")) as it:

                async def schedule(*_: Any, **__: Any) -> Any:
                    raise ConductorUnavailable("no connection")

                it.gateway._client.schedule = schedule  # type: ignore[method-assign,assignment]
                response = await it.post({"prompt": PROMPT})
                assert response.headers["x-tiffin-fallback"] == "conductor_down"
                assert not it.gateway.health.up

        run(scenario)


class TestAdmission:
    def test_no_more_at_a_time_than_the_conductor_admitted(self) -> None:
        async def scenario() -> None:
            engine = Engine("m0", hold_at=1)
            async with cluster(engine) as it:
                first = asyncio.create_task(it.post({"prompt": PROMPT, "stream": True}))
                await until(lambda: len(engine.completions) == 1)
                await it.stop_conductor()
                second = await it.post({"prompt": PROMPT, "stream": True})
                assert second.status_code == 503
                assert second.json()["error"]["code"] == "not_placed"
                engine.go.set()
                assert (await first).status_code == 200
                third = await it.post({"prompt": PROMPT, "stream": True})
                assert third.status_code == 200
                assert third.headers["x-tiffin-fallback"] == "conductor_down"
                assert it.number("not_placed_total") == 1

        run(scenario)

    def test_prefixes_go_where_they_were(self) -> None:
        async def scenario() -> None:
            engines = [Engine(f"m{number}") for number in range(3)]
            async with cluster(*engines) as it:
                known = it.gateway.last_known
                known.learn([b"k" * 16], "m1")
                sized = it.gateway.size

                async def with_keys(ask: Any) -> Any:
                    return dataclasses.replace(await sized(ask), keys=(b"k" * 16,))

                it.gateway.size = with_keys  # type: ignore[method-assign]
                await it.stop_conductor()
                for _ in range(4):
                    response = await it.post({"prompt": PROMPT, "model": MODEL})
                    assert response.headers["x-tiffin-decode"] == "m1"

        run(scenario)
