"""The garbage collector looks at new objects between answers, and at no others."""

from __future__ import annotations

import asyncio
import gc
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


def test_what_outlives_a_look_is_never_looked_at() -> None:
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
