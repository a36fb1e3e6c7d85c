"""Queues that are kept: a real conductor holds requests back, the gateway waits for their turn, and
a stub engine gets them in the order of the queue."""

from __future__ import annotations

import asyncio
import dataclasses
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
from gatewaysupport import MODEL, Engine, cluster, run, until

from tiffin.conductor.dispatch import dispatcher
from tiffin.conductor.errors import ConductorUnavailable
from tiffin.conductor.gateway.requests import releases

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from gatewaysupport import Cluster

ONE_AHEAD = {"queue": {"ahead_max": 1, "ahead_s": 0.0}}


class Steps(asyncio.Event):
    """A stub engine waits for a step before each event of an answer, and takes it."""

    def __init__(self) -> None:
        super().__init__()
        self._steps = asyncio.Semaphore(0)

    async def wait(self) -> bool:  # type: ignore[override]
        await self._steps.acquire()
        return True

    def whole(self) -> None:
        """Let one answer of one token pass: the token, the last event, the usage that the gateway
        has asked for, and [DONE]."""
        for _ in range(4):
            self._steps.release()


def engine_of(name: str = "m0") -> Engine:
    return Engine(name, answer=["x"], hold_at=0)


@asynccontextmanager
async def stepwise(*engines: Engine, **settings: Any) -> AsyncIterator[Cluster]:
    """Engines that give answers when they are told to, and a conductor that does not take a prefill
    for late however slow this machine is."""
    for engine in engines:
        engine.go = Steps()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatcher, "LATE_S_MIN", 1e6)
        async with cluster(*engines, settings={**ONE_AHEAD, **settings}) as it:
            yield it


def ask(it: Cluster, name: str, priority: str = "low", **more: Any) -> asyncio.Task[Any]:
    headers = {"x-request-id": name, "x-tiffin-priority": priority}
    return asyncio.create_task(it.post({"prompt": name, "stream": True, **more}, headers=headers))


def order(engine: Engine) -> list[str]:
    """The prompts that the engine has got."""
    return [body["prompt"] for body in engine.completions]


async def held(it: Cluster, count: int) -> None:
    await until(lambda: it.number("requests_queued") == count)


async def flood(it: Cluster, count: int) -> list[asyncio.Task[Any]]:
    """Requests of the low class, in this order; the first one is computed."""
    tasks = []
    for number in range(count):
        tasks.append(ask(it, f"low-{number}"))
        await until(lambda number=number: len(it.core.asked) == number + 1)  # type: ignore[misc]
    await held(it, count - 1)
    return tasks


@pytest.mark.slow
def test_a_request_of_a_higher_class_overtakes_a_flood_that_came_before() -> None:
    async def scenario() -> None:
        engine = engine_of()
        async with stepwise(engine) as it:
            tasks = await flood(it, 4)
            tasks.append(ask(it, "high", "high"))
            await held(it, 4)
            for number in range(5):
                await until(lambda number=number: len(engine.completions) == number + 1)
                engine.go.whole()  # type: ignore[attr-defined]
            assert {(await task).status_code for task in tasks} == {200}
            assert order(engine) == ["low-0", "high", "low-1", "low-2", "low-3"]

    run(scenario)


def test_without_a_limit_the_engine_gets_all_at_once() -> None:
    """And nobody asks for a release."""

    async def scenario() -> None:
        engine = engine_of()
        async with stepwise(engine, queue={"ahead_max": 0}) as it:
            tasks = [ask(it, "low-0"), ask(it, "low-1"), ask(it, "high", "high")]
            await until(lambda: len(engine.completions) == 3)
            for _ in tasks:
                engine.go.whole()  # type: ignore[attr-defined]
            assert {(await task).status_code for task in tasks} == {200}
            assert it.number("queued_duration_seconds_count") == 0

    run(scenario)


@pytest.mark.slow
def test_one_that_has_to_leave_a_full_queue_is_told() -> None:
    async def scenario() -> None:
        engine = engine_of()
        queue = {**ONE_AHEAD["queue"], "waiting_max": 2}
        async with stepwise(engine, queue=queue) as it:
            tasks = await flood(it, 3)
            tasks.append(ask(it, "high", "high"))
            response = await tasks[2]
            assert response.status_code == 429
            assert response.headers["x-tiffin-reject-reason"] == "preempted"
            for number in range(3):
                await until(lambda number=number: len(engine.completions) == number + 1)
                engine.go.whole()  # type: ignore[attr-defined]
            await asyncio.gather(*tasks)
            assert order(engine) == ["low-0", "high", "low-1"]

    run(scenario)


@pytest.mark.slow
def test_who_hangs_up_while_it_is_held_leaves_the_queue() -> None:
    async def scenario() -> None:
        engine = engine_of()
        async with stepwise(engine) as it:
            tasks = await flood(it, 3)
            tasks[1].cancel()
            await held(it, 1)
            await until(lambda: "cancelled" in it.core.kinds)
            for number in range(2):
                await until(lambda number=number: len(engine.completions) == number + 1)
                engine.go.whole()  # type: ignore[attr-defined]
            await asyncio.gather(tasks[0], tasks[2])
            assert order(engine) == ["low-0", "low-2"]

    run(scenario)


@pytest.mark.slow
def test_one_whose_instance_leaves_is_placed_elsewhere() -> None:
    async def scenario() -> None:
        engine, other = engine_of(), engine_of("m1")
        async with stepwise(engine, other) as it:
            now = asyncio.get_running_loop().time
            it.core.drain("m1", now())
            tasks = await flood(it, 2)
            spec = it.core.cluster.spec("m1")
            it.core.remove("m1", now())
            it.core.register(spec, now())
            it.core.drain("m0", now())
            it.service.tick()
            await until(lambda: len(other.completions) == 1)
            other.go.whole()  # type: ignore[attr-defined]
            assert (await tasks[1]).headers["x-tiffin-prefill"] == "m1"
            engine.go.whole()  # type: ignore[attr-defined]
            assert (await tasks[0]).headers["x-tiffin-prefill"] == "m0"

    run(scenario)


@pytest.mark.slow
@pytest.mark.parametrize("room", [True, False])
def test_without_its_conductor_a_held_request_is_sent_if_there_is_room(room: bool) -> None:
    """Nobody knows whose turn it is; its instance gets no more at a time than it had before."""

    async def scenario() -> None:
        engine = engine_of()
        async with stepwise(engine) as it:
            if room:  # of a moment ago
                known, route = it.gateway.last_known, it.gateway.known.turn(MODEL, ())
                assert route is not None
                for _ in range(2):
                    known.began(route, it.gateway.clock(), decided=True)
                for _ in range(2):
                    known.ended(route)
            tasks = await flood(it, 2)
            await it.stop_conductor()
            if room:
                await until(lambda: len(engine.completions) == 2)
            else:
                await until(lambda: it.number("not_placed_total") == 1)
            for _ in tasks:
                engine.go.whole()  # type: ignore[attr-defined]
            answers = [await task for task in tasks]
            assert [one.status_code for one in answers] == [200, 200 if room else 503]
            if not room:
                assert answers[1].headers["x-tiffin-reject-reason"] == "not_placed"
                assert int(answers[1].headers["retry-after"]) >= 1

    run(scenario)


def test_an_engine_that_asks_gets_all_at_once_and_knows_them_by_name() -> None:
    async def scenario() -> None:
        engine = engine_of()
        async with stepwise(engine) as it:
            now = asyncio.get_running_loop().time
            spec = it.core.cluster.spec("m0")
            it.core.register(dataclasses.replace(spec, labels={"pulls": "true"}), now())
            tasks = [ask(it, "low-0"), ask(it, "low-1"), ask(it, "high", "high")]
            await until(lambda: len(engine.completions) == 3)
            names = [h["x-tiffin-request"] for _, _, h in engine.calls if "x-tiffin-request" in h]
            given = it.service.next_prefills("m0", 9, idle=True)
            assert sorted(given) == sorted(names)
            high = next(one.id for one in it.core.asked if one.priority == "high")
            assert given.index(high) < 2, "behind the one that came first, at most"
            for _ in tasks:
                engine.go.whole()  # type: ignore[attr-defined]
            await asyncio.gather(*tasks)

    run(scenario)


class TestTheSharedCall:
    """All held requests of a gateway wait in one call."""

    @staticmethod
    def count(it: Cluster) -> dict[str, int]:
        """How often the conductor was asked for releases: of one request, of all."""
        calls = {"release": 0, "releases": 0}
        client = it.gateway._client
        for verb in calls:
            made = getattr(client, verb)

            def counted(*args: Any, verb: str = verb, made: Any = made, **named: Any) -> Any:
                calls[verb] += 1
                return made(*args, **named)

            setattr(client, verb, counted)
        return calls

    @pytest.mark.slow
    def test_it_is_one_at_a_time_and_none_asks_for_itself(self) -> None:
        async def scenario() -> None:
            engine = engine_of()
            async with stepwise(engine) as it:
                calls = self.count(it)
                tasks = await flood(it, 6)
                assert calls == {"release": 0, "releases": 1}
                for number in range(6):
                    await until(lambda number=number: len(engine.completions) == number + 1)
                    engine.go.whole()  # type: ignore[attr-defined]
                assert {(await task).status_code for task in tasks} == {200}
                assert calls["release"] == 0
                assert calls["releases"] <= 6
                assert not it.gateway.releases._calls[""]._waiting

        run(scenario)

    def test_each_asks_for_itself_when_it_fails(self) -> None:
        async def scenario() -> None:
            engine = engine_of()
            async with stepwise(engine) as it:
                client, failed = it.gateway._client, asyncio.Event()

                async def gone(*_: Any, **__: Any) -> Any:
                    await failed.wait()
                    raise ConductorUnavailable("its answer was lost")

                client.releases = gone  # type: ignore[method-assign,assignment]
                tasks = await flood(it, 3)
                failed.set()
                for number in range(3):
                    await until(lambda number=number: len(engine.completions) == number + 1)
                    engine.go.whole()  # type: ignore[attr-defined]
                assert {(await task).status_code for task in tasks} == {200}

        run(scenario)

    def test_a_release_that_overtakes_the_decision_is_not_lost(self) -> None:
        async def scenario() -> None:
            engine = engine_of()
            async with stepwise(engine) as it:
                tasks = await flood(it, 2)
                client, late = it.gateway._client, asyncio.Event()
                schedule = client.schedule

                async def slow(*args: Any, **named: Any) -> Any:
                    decided = await schedule(*args, **named)
                    await late.wait()
                    return decided

                client.schedule = slow  # type: ignore[method-assign]
                tasks.append(ask(it, "slow"))
                await until(lambda: len(it.core.asked) == 3)
                for number in range(2):
                    await until(lambda number=number: len(engine.completions) == number + 1)
                    engine.go.whole()  # type: ignore[attr-defined]
                shared = it.gateway.releases._calls[""]
                await until(lambda: bool(shared._early) or not shared.busy)
                late.set()
                await until(lambda: len(engine.completions) == 3)
                engine.go.whole()  # type: ignore[attr-defined]
                assert {(await task).status_code for task in tasks} == {200}

        run(scenario)

    def test_one_whose_release_is_lost_asks_now_and_then(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def scenario() -> None:
            engine = engine_of()
            async with stepwise(engine) as it:

                async def nothing(*_: Any, **__: Any) -> Any:
                    await asyncio.sleep(60.0)

                it.gateway._client.releases = nothing  # type: ignore[method-assign,assignment]
                tasks = await flood(it, 2)
                engine.go.whole()  # type: ignore[attr-defined]
                await until(lambda: len(engine.completions) == 2)
                engine.go.whole()  # type: ignore[attr-defined]
                assert {(await task).status_code for task in tasks} == {200}

        monkeypatch.setattr(releases, "WAIT_S", 0.05)
        run(scenario)
