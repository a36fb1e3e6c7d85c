"""Long work in slices: one at a time, in turn, after what the loop has received."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest

from tiffin.conductor.web import time_slices
from tiffin.conductor.web.time_slices import TimeSlices


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


@pytest.mark.parametrize(
    ("pass_s", "least"),
    [(0.0, 0.0), (1e-4, 0.3), (1e-3, 0.3), (5e-3, 0.3)],
    ids=lambda value: f"{value:g}",
)
def test_a_busy_loop_leaves_the_jobs_a_third_of_its_time(
    monkeypatch: pytest.MonkeyPatch, pass_s: float, least: float
) -> None:
    """Of a conductor that has more to place than it can, the ends of requests are still taken."""
    monkeypatch.setattr(time_slices, "SLICE_S", 2.5e-4)
    monkeypatch.setattr(time_slices, "SHARE", 0.5)
    clock = Clock(monkeypatch)
    worked_s, slices_s = 0.0, [0.0]

    async def others() -> None:
        while True:
            clock.now_s += pass_s
            slices_s.append(0.0)
            await asyncio.sleep(0)

    async def work() -> None:
        nonlocal worked_s
        turns = TimeSlices()
        for _ in range(20_000):
            clock.now_s += 1e-5
            worked_s += 1e-5
            slices_s[-1] += 1e-5
            await turns.give()

    async def scenario() -> None:
        task = asyncio.create_task(others())
        await work()
        task.cancel()

    asyncio.run(scenario())
    assert worked_s / clock.now_s >= least * 0.9
    assert max(slices_s) <= max(2.5e-4, pass_s * 1.5) + 2e-5


def test_a_burst_makes_no_slice_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two decisions that come together do not wait longer than each would alone."""
    monkeypatch.setattr(time_slices, "SLICE_S", 2.5e-4)
    monkeypatch.setattr(time_slices, "SHARE", 0.5)
    clock = Clock(monkeypatch)
    slices_s = [0.0]

    async def others() -> None:
        while True:
            await asyncio.sleep(0)
            if slices_s[-1]:
                slices_s.append(0.0)
                clock.now_s += 0.03 if len(slices_s) % 200 == 0 else 0.0

    async def work() -> None:
        turns = TimeSlices()
        for _ in range(100_000):
            clock.now_s += 1e-5
            slices_s[-1] += 1e-5
            await turns.give()

    async def scenario() -> None:
        task = asyncio.create_task(others())
        await work()
        task.cancel()

    asyncio.run(scenario())
    assert len(slices_s) > 3000
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
