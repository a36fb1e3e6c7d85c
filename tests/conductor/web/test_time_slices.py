"""Long work in slices: one at a time, in turn, after what the loop has received."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import TYPE_CHECKING

import pytest

from tiffin.conductor.web import time_slices
from tiffin.conductor.web.time_slices import TimeSlices

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step is a slice."""
    monkeypatch.setattr("tiffin.conductor.web.time_slices.SLICE_S", 0.0)
    monkeypatch.setattr("tiffin.conductor.web.time_slices.SHARE", 0.0)


async def passes(of: list[str], until: asyncio.Event) -> None:
    """Note the passes of the event loop."""
    while not until.is_set():
        of.append("pass")
        await asyncio.sleep(0)


async def job(name: str, slices: int, of: list[str]) -> None:
    turns = TimeSlices()
    for _ in range(slices):
        of.append(name)
        await turns.give()


def test_of_several_jobs_one_has_a_slice_at_a_time_in_turn() -> None:
    async def scenario() -> list[str]:
        seen, ended = list[str](), asyncio.Event()
        counting = asyncio.create_task(passes(seen, ended))
        await asyncio.gather(*(job(name, 4, seen) for name in "abc"))
        ended.set()
        await counting
        return seen

    seen = asyncio.run(scenario())
    slices = [one for one in seen if one != "pass"]
    assert slices == list("abc") * 4
    between, last = list[int](), 0
    for at, one in enumerate(seen):
        if one != "pass":
            between.append(at - last - 1)
            last = at
    # What a pass reads is served in the next one: both are over before another slice begins.
    assert all(passed >= 2 for passed in between[3:]), seen


class Clock:
    """Time that passes as it is told, for both clocks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        monkeypatch.setattr(time_slices, "_worked_s", lambda: self.now_s)
        monkeypatch.setattr(time_slices.time, "perf_counter", lambda: self.now_s)


def slices_beside(
    monkeypatch: pytest.MonkeyPatch, pass_s: Callable[[int], float], steps: int
) -> tuple[list[float], float]:
    """Work in steps of ten microseconds, beside passes of the loop that take others so long.
    Returns the seconds that were worked before each pass, and of all."""
    monkeypatch.setattr(time_slices, "SLICE_S", 2.5e-4)
    monkeypatch.setattr(time_slices, "SHARE", 0.5)
    clock = Clock(monkeypatch)
    slices_s = [0.0]

    async def others() -> None:
        while True:
            clock.now_s += pass_s(len(slices_s))
            slices_s.append(0.0)
            await asyncio.sleep(0)

    async def work() -> None:
        turns = TimeSlices()
        for _ in range(steps):
            clock.now_s += 1e-5
            slices_s[-1] += 1e-5
            await turns.give()

    async def scenario() -> None:
        task = asyncio.create_task(others())
        await work()
        task.cancel()

    asyncio.run(scenario())
    return slices_s, clock.now_s


@pytest.mark.parametrize(
    ("pass_s", "least"),
    [(0.0, 0.0), (1e-4, 0.3), (1e-3, 0.3), (5e-3, 0.3)],
    ids=lambda value: f"{value:g}",
)
def test_a_busy_loop_leaves_the_jobs_a_third_of_its_time(
    monkeypatch: pytest.MonkeyPatch, pass_s: float, least: float
) -> None:
    """Of a conductor that has more to place than it can, the ends of requests are still taken."""
    slices_s, all_s = slices_beside(monkeypatch, lambda _: pass_s, 20_000)
    assert sum(slices_s) / all_s >= least * 0.9
    assert max(slices_s) <= max(2.5e-4, pass_s * 1.5) + 2e-5


def test_a_burst_makes_no_slice_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decisions that come together do not wait longer than each would alone."""

    def burst_s(passes: int) -> float:
        return 0.0 if passes % 600 else 0.03

    slices_s, _ = slices_beside(monkeypatch, burst_s, 100_000)
    assert sum(map(bool, slices_s)) > 3000
    assert len(slices_s) > 3 * 600
    assert max(slices_s) <= 2.5e-4 + 2e-5


def test_a_cancelled_job_holds_up_nobody() -> None:
    async def scenario() -> list[str]:
        seen = list[str]()
        first, second = (asyncio.create_task(job(name, 3, seen)) for name in "ab")
        await asyncio.sleep(0)
        first.cancel()
        await second
        return seen

    assert asyncio.run(scenario()) == ["a", "b", "b", "b"]


def test_a_loop_that_has_ended_is_forgotten() -> None:
    async def scenario() -> weakref.ref[asyncio.AbstractEventLoop]:
        await job("a", 3, [])
        return weakref.ref(asyncio.get_running_loop())

    loop = asyncio.run(scenario())
    gc.collect()
    assert loop() is None
