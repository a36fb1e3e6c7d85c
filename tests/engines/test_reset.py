"""New weights in a running engine: what a reset of its caches does to the blocks in the pool."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from generationsupport import Engine as RealEngine
from generationsupport import converse, transfer
from test_scheduler import AHEAD, POLICIES, STORED, WAYS, Way, prompt

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kvsupport import Daemon
    from schedulersupport import Engine

OTHER = prompt(100, seed=3)


@WAYS
def test_nothing_from_before_a_reset_is_found(start: Callable[..., Engine], way: Way) -> None:
    engine = start(**way)
    engine.answer(STORED)
    assert engine.reset()
    assert engine.answer(STORED).cached == 0
    engine.scheduler.reset_prefix_cache()  # vLLM's own cache only: the weights are the same
    assert engine.answer(STORED).cached == 96


@WAYS
def test_nothing_of_after_a_reset_is_found_by_others(
    start: Callable[..., Engine], way: Way
) -> None:
    engine = start(**way)
    engine.answer(STORED)
    assert engine.reset()
    engine.answer(OTHER)
    other = start(**way)
    assert other.answer(STORED).cached == 96
    assert other.answer(OTHER).cached == 0


def test_engines_share_a_version_that_they_are_told(
    start: Callable[..., Engine], tmp_path: Path
) -> None:
    file = tmp_path / "version"
    file.write_text("7")
    settings = {"weights_version_file": str(file)}
    first, second = start(settings=settings), start(settings=settings)
    first.answer(STORED)
    assert second.answer(STORED).cached == 96
    file.write_text("8")
    assert first.reset()
    assert second.reset()
    assert first.answer(STORED).cached == 0
    assert second.answer(STORED).cached == 96
    assert start(settings={"weights_version": "8"}).answer(STORED).cached == 96


def test_a_reset_without_a_version_says_so_and_forgets(
    start: Callable[..., Engine], tmp_path: Path
) -> None:
    file = tmp_path / "version"
    file.write_text("7")
    engine = start(settings={"weights_version_file": str(file)})
    engine.answer(STORED)
    file.unlink()
    assert not engine.reset()
    assert engine.answer(STORED).cached == 0


@AHEAD
def test_a_save_that_a_reset_overtakes_is_of_the_weights_before(
    start: Callable[..., Engine], ahead: bool
) -> None:
    engine = start(ahead=ahead, caching=False)
    engine.saves.held = True
    request = engine.add(STORED)
    while not engine.told[request].reason:
        engine.step()
    while not len(engine.saves):
        engine.step()
    engine.reset()
    engine.finish()
    assert engine.answer(STORED).cached == 0
    assert start().answer(STORED).cached == 96


@AHEAD
@POLICIES
def test_a_load_that_a_reset_overtakes_has_failed(
    start: Callable[..., Engine], ahead: bool, policy: str
) -> None:
    start().answer(STORED)
    engine = start(ahead=ahead, policy=policy, loading="asynchronous")
    engine.loads.held = True
    request = engine.add(STORED)
    while not engine.ordered:
        engine.step()
    assert not engine.reset()  # as the load has pages
    engine.finish()
    told = engine.told[request]
    assert told.reason == ("error" if policy == "fail" else "length")
    assert told.cached == 0
    assert not engine.saved.keys() & set(engine.prefix(STORED).keys)


@AHEAD
def test_what_runs_during_a_reset_is_not_stored_afterwards(
    start: Callable[..., Engine], ahead: bool
) -> None:
    engine = start(ahead=ahead)
    request = engine.add(prompt(40), 60)
    while len(engine.told[request].tokens) < 10:
        engine.step()
    before = dict(engine.saved)
    assert engine.reset(running=True)
    engine.finish()
    assert engine.saved == before
    assert engine.told[request].reason == "length"


@AHEAD
def test_pages_that_a_reset_frees_are_not_saved_once_others_have_them(
    start: Callable[..., Engine], ahead: bool
) -> None:
    """Also if the request is given up before the next step."""
    engine = start(ahead=ahead, pages=40)
    engine.saves.held = True
    request = engine.add(STORED, 40)
    while not len(engine.saves):
        engine.step()
    assert engine.reset(running=True)
    engine.abort(request)
    others = [engine.add(prompt(60, seed=seed), 10) for seed in (5, 6)]
    while not all(engine.told[one].reason for one in others):
        engine.step()
    engine.finish()  # looks at every stored block
    assert start().answer(STORED).cached == 0


@pytest.mark.timeout(600)
@pytest.mark.parametrize("way", ["reset-first", "reset-after"])
def test_new_weights_answer_as_a_fresh_engine_with_them(
    model_folders: Path, shared_node: Daemon, namespace: str, way: str
) -> None:
    model, other = model_folders / "llama", model_folders / "llama-other"
    settings: dict[str, Any] = {"layerwise": "always"} if way == "reset-first" else {}
    with RealEngine(other) as engine:
        (turn,) = converse(engine, seed=8, turns=1)
    with RealEngine(model, transfer(shared_node.url, namespace, **settings)) as engine:
        before = engine.generate(turn.prompts)
        assert [answer.tokens for answer in before] != turn.said
        if way == "reset-first":
            assert engine.reset()
        engine.reload(other)
        if way == "reset-after":
            assert engine.reset()
        answers = engine.generate(turn.prompts[1:2])
        assert (answers[0].tokens, answers[0].cached) == (turn.said[1], 0)
        engine.play([turn])
    with RealEngine(model, transfer(shared_node.url, namespace)) as engine:
        again = engine.generate(turn.prompts)
        assert [answer.tokens for answer in again] == [answer.tokens for answer in before]
