"""Which instances get no requests, how they come back, and which requests are not tried again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest
from gatewaysupport import CONFIG, Engine, cluster, run, until
from hypothesis import given
from hypothesis import strategies as st

from tiffin.conductor.gateway.config import BreakerSettings
from tiffin.conductor.gateway.engines.circuit_breakers import CircuitBreakers
from tiffin.conductor.gateway.engines.engine_client import (
    EngineDied,
    EngineFailed,
    EngineGone,
    Whole,
)
from tiffin.conductor.gateway.engines.instance_cache import CallTarget
from tiffin.conductor.gateway.requests.poison import Poisonous, own_answer

if TYPE_CHECKING:
    from collections.abc import Sequence

ALL = ["a", "b", "c"]


def breakers(**settings: float) -> CircuitBreakers:
    return CircuitBreakers(BreakerSettings(**{"open_s": 5, "slow_start_s": 20, **settings}))


def got(circuits: CircuitBreakers, name: str, begin: float, end: float) -> float:
    """The share of 1,000 requests between two times that may go to an instance."""
    times = [begin + (end - begin) * n / 1000 for n in range(1000)]
    return sum(name not in circuits.avoided(ALL, now) for now in times) / 1000


def test_three_failures_in_a_row_open_and_one_success_forgives() -> None:
    circuits = breakers()
    for _ in range(5):
        circuits.failed("a", 0.0)
        circuits.failed("a", 0.0)
        circuits.succeeded("a")
    assert circuits.avoided(ALL, 0.0) == set()
    for _ in range(3):
        circuits.failed("a", 0.0)
    assert circuits.avoided(ALL, 4.9) == {"a"}
    assert circuits.open(4.9) == ["a"]


def test_it_comes_back_slowly() -> None:
    circuits = breakers()
    for _ in range(3):
        circuits.failed("a", 0.0)
    assert got(circuits, "a", 0.0, 4.9) == 0.0
    assert got(circuits, "a", 5.0, 15.0) == pytest.approx(0.255, abs=0.01)
    assert got(circuits, "a", 15.0, 25.0) == pytest.approx(0.75, abs=0.01)
    assert got(circuits, "a", 25.0, 35.0) == 1.0


def test_one_failure_while_it_comes_back_opens_for_twice_as_long() -> None:
    circuits, now = breakers(open_max_s=15), 0.0
    for _ in range(3):
        circuits.failed("a", now)
    for open_s in (5, 10, 15, 15):
        assert got(circuits, "a", now, now + open_s - 0.1) == 0.0
        now += open_s
        assert got(circuits, "a", now, now + 1.0) > 0.0
        circuits.failed("a", now + 1.0)
        now += 1.0


def test_health_checks_open_and_keep_it_open() -> None:
    circuits = breakers()
    for now in (0.0, 2.0):
        circuits.checked("a", healthy=False, now=now)
    circuits.checked("a", healthy=True, now=3.0)
    circuits.checked("a", healthy=False, now=4.0)
    assert circuits.open(4.0) == [], "not in a row"
    for now in (6.0, 8.0, 20.0):
        circuits.checked("a", healthy=False, now=now)
    assert circuits.open(100.0) == ["a"]
    circuits.checked("a", healthy=True, now=100.0)
    assert circuits.open(100.0) == []
    assert 0.0 < got(circuits, "a", 100.0, 101.0) < 0.2


@given(failures=st.lists(st.tuples(st.sampled_from(ALL), st.booleans()), max_size=60))
def test_there_is_always_one_left(failures: list[tuple[str, bool]]) -> None:
    circuits = breakers()
    for now, (name, good) in enumerate(failures):
        if good:
            circuits.succeeded(name)
        else:
            circuits.failed(name, float(now))
        assert len(circuits.avoided(ALL, float(now))) < len(ALL)


def test_those_that_have_left_are_forgotten() -> None:
    circuits = breakers(failures=1)
    circuits.failed("a", 0.0)
    circuits.keep(["b"])
    assert circuits.avoided(ALL, 0.0) == set()


# -- poison ----------------------------------------------------------------------------------------


def failed(name: str, message: str) -> EngineFailed:
    body = f'{{"error":{{"message":"{message}","code":500}}}}'.encode()
    return EngineFailed(CallTarget(name, ""), Whole(500, {}, body))


def died(name: str) -> EngineDied:
    return EngineDied(CallTarget(name, ""), "its connection broke")


def test_the_second_answer_with_the_same_words_is_the_clients() -> None:
    first, second = (
        failed("a", "request 17 at 0x7fa3bc00ee"),
        failed("b", "request 4 at 0x7fffffffff"),
    )
    assert own_answer([first]) is None
    assert own_answer([first, second]) is second.answer
    assert own_answer([first, failed("b", "out of memory")]) is None
    assert own_answer([first, EngineGone(CallTarget("c", ""), "refused"), second]) is second.answer


def test_two_deaths_are_enough() -> None:
    assert own_answer([died("a")]) is None
    assert own_answer([died("a"), died("a")]) is None, "one instance, restarted meanwhile"
    with pytest.raises(Poisonous, match="a and b ended"):
        own_answer([died("a"), failed("c", "busy"), died("b")])


def engines(**fields: object) -> list[Engine]:
    return [Engine(f"m{n}", **fields) for n in range(3)]  # type: ignore[arg-type]


def asked(those: Sequence[Engine]) -> int:
    return sum(len(one.completions) for one in those)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_ends_engines_meets_two_of_them(stream: bool) -> None:
    those = engines(die_at=-1 if not stream else 0)

    async def scenario() -> None:
        async with cluster(*those, config=CONFIG) as it:
            said = await it.post({"prompt": [1], "stream": stream})
            assert (said.status_code, said.json()["error"]["code"]) == (502, "request_poisonous")
            assert asked(those) == 2
            assert it.number('poisoned_requests_total{why="died"}') == 1

    run(scenario)


def test_an_error_of_its_own_is_passed_on_in_the_engines_words() -> None:
    those = engines(status=500)

    async def scenario() -> None:
        async with cluster(*those, config=CONFIG) as it:
            said = await it.post({"prompt": [1]})
            assert (said.status_code, said.json()["error"]["message"]) == (500, "no")
            assert asked(those) == 2

    run(scenario)


def test_a_dead_instance_gets_no_more_requests_and_comes_back() -> None:
    dead, alive = Engine("m0", status=503), Engine("m1")
    settings = BreakerSettings(open_s=0.05, slow_start_s=0.05, check_s=0.02)
    config = msgspec.structs.replace(CONFIG, breakers=settings)

    async def scenario() -> None:
        async with cluster(dead, alive, config=config) as it:
            await until(lambda: "m0" in it.gateway.breakers.open(it.gateway.clock()))
            before = len(dead.completions)
            for _ in range(20):
                assert (await it.post({"prompt": [1]})).status_code == 200
            assert len(dead.completions) == before
            await until(lambda: it.number("circuits_open") == 1)
            assert it.number('circuits_open{instance="m0"}') == 1
            dead.status = 200

            def back() -> bool:
                return "m0" not in it.gateway.breakers.open(it.gateway.clock())

            await until(back)

    run(scenario)
