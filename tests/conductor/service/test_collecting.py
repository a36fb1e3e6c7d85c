"""The garbage collector looks at new objects between answers, and rarely at all of them."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import TYPE_CHECKING

from tiffin.conductor.service.server import collecting
from tiffin.kvstore.gc_tuning import collect_young_only

if TYPE_CHECKING:
    import pytest


def test_new_objects_are_looked_at_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiffin.conductor.service.server.COLLECT_S", 0.0)
    looks, enough = list[int](), asyncio.Event()

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            looks.append(info["generation"])
            if len(looks) == 3:
                enough.set()

    async def scenario() -> None:
        task = asyncio.create_task(collecting())
        await asyncio.wait_for(enough.wait(), 20)
        task.cancel()

    gc.disable()
    gc.callbacks.append(note)
    try:
        asyncio.run(scenario())
    finally:
        gc.callbacks.remove(note)
        gc.enable()
    assert set(looks) == {0}


def test_a_cycle_that_outlives_a_look_is_freed_by_one_at_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tiffin.conductor.service.server.COLLECT_S", 0.0)
    monkeypatch.setattr("tiffin.conductor.service.server.COLLECT_ALL_S", 0.05)

    class Cycle:
        def __init__(self) -> None:
            self.itself = self

    async def scenario() -> None:
        cycle = Cycle()
        gc.collect(0)  # it grows old
        alive = weakref.ref(cycle)
        del cycle
        gc.collect(0)
        assert alive() is not None
        task = asyncio.create_task(collecting())
        while alive() is not None:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        task.cancel()

    gc.disable()
    try:
        asyncio.run(asyncio.wait_for(scenario(), 20))
    finally:
        gc.enable()


def test_what_outlives_a_look_is_looked_at_when_told_alone() -> None:
    before = gc.get_threshold()
    try:
        collect_young_only()
        assert gc.get_freeze_count() > 10_000, "what was there at the start"
        young, *older = gc.get_threshold()
        assert young <= 10_000, "a pause of some milliseconds"
        assert min(older) >= 1_000_000
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
