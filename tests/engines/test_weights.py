"""An engine whose weights are replaced finds and stores nothing under the names of the old ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from generationsupport import Engine, Turn, converse, loadable, transfer

if TYPE_CHECKING:
    from pathlib import Path

    from kvsupport import Daemon

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def old_and_new(model_folders: Path) -> tuple[Turn, Turn]:
    """The same prompts, and what fresh engines with either model's weights say to them."""
    with Engine(model_folders / "llama") as engine:
        (old,) = converse(engine, seed=9, turns=1)
    with Engine(model_folders / "llama-other") as engine:
        new = Turn(old.prompts, [answer.tokens for answer in engine.generate(old.prompts)])
    assert all(one != other for one, other in zip(old.said, new.said, strict=True))
    return old, new


def test_a_reset_begins_anew_and_its_blocks_are_the_engines_own(
    old_and_new: tuple[Turn, Turn], model_folders: Path, shared_node: Daemon, namespace: str
) -> None:
    old, new = old_and_new
    pool = transfer(shared_node.url, namespace)
    all_of_it = [loadable(prompt) for prompt in old.prompts]
    with Engine(model_folders / "llama", pool, enable_prefix_caching=False) as engine:
        engine.play([old])
        assert engine.play([old]) == all_of_it
        engine.change_weights(model_folders / "llama-other")
        assert engine.play([new]) == [0] * len(all_of_it)
        assert engine.play([new]) == all_of_it  # stored under the new name, and found by it
        engine.change_weights(model_folders / "llama")
        assert engine.play([old]) == [0] * len(all_of_it)
    with Engine(model_folders / "llama", pool, enable_prefix_caching=False) as engine:
        assert engine.play([old]) == all_of_it  # those of the files


def test_engines_with_one_version_share(
    old_and_new: tuple[Turn, Turn],
    model_folders: Path,
    shared_node: Daemon,
    namespace: str,
    tmp_path: Path,
) -> None:
    old, new = old_and_new
    version = tmp_path / "version"
    version.write_text("step-1")
    pool = transfer(shared_node.url, namespace, weights_version_file=str(version))
    all_of_it = [loadable(prompt) for prompt in old.prompts]
    with Engine(model_folders / "llama", pool, enable_prefix_caching=False) as engine:
        engine.play([old])
        version.write_text("step-2")
        engine.change_weights(model_folders / "llama-other")
        assert engine.play([new]) == [0] * len(all_of_it)
    named = transfer(shared_node.url, namespace, weights_version="step-2")
    with Engine(model_folders / "llama", named, enable_prefix_caching=False) as engine:
        engine.change_weights(model_folders / "llama-other", reset=False)
        assert engine.play([new]) == all_of_it
