"""Long work in slices: one at a time, in turn, after what the loop has received."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest

from tiffin.conductor.web.time_slices import TimeSlices


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step is a slice."""
    monkeypatch.setattr("tiffin.conductor.web.time_slices.SLICE_S", 0.0)


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
