"""What a pool must not give an engine: blocks of another shape, and damaged ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from generationsupport import Engine, Turn, converse, loadable, spoil, transfer

if TYPE_CHECKING:
    from pathlib import Path

    from kvsupport import Daemon

pytestmark = pytest.mark.timeout(600)

OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "model": ("qwen2", {}),
    "weights": ("llama-other", {}),
    "dtype": ("llama", {"dtype": "bfloat16"}),
    "page-size": ("llama", {"block_size": 64}),
}


@pytest.fixture(scope="module")
def turn(model_folders: Path) -> Turn:
    """Prompts, and what an engine without a pool says to them."""
    with Engine(model_folders / "llama") as engine:
        (turn,) = converse(engine, seed=8, turns=1)
    return turn


def test_an_engine_of_another_shape_reads_nothing(
    turn: Turn, model_folders: Path, shared_node: Daemon, namespace: str
) -> None:
    model, pool = model_folders / "llama", transfer(shared_node.url, namespace)
    found = {}
    with Engine(model, pool) as engine:
        engine.play([turn])
    for what, (name, changes) in OTHERS.items():
        with Engine(model_folders / name, pool, enable_prefix_caching=False, **changes) as engine:
            answers = engine.generate(turn.prompts)
            found[what] = [answer.cached for answer in answers]
            assert engine.counter("lookups") == sum(len(one) >= 512 for one in turn.prompts)
    assert found == dict.fromkeys(OTHERS, [0] * len(turn.prompts))
    with Engine(model, pool, enable_prefix_caching=False) as engine:
        assert engine.play([turn]) == [loadable(prompt) for prompt in turn.prompts]


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_corrupted_bytes_change_tokens_only_if_nobody_verifies(
    turn: Turn, model_folders: Path, node: Daemon, policy: str
) -> None:
    """With the policy "fail" a request whose blocks are corrupt ends with an error."""
    model = model_folders / "llama"
    long = [index for index, prompt in enumerate(turn.prompts) if len(prompt) >= 512]
    with Engine(model, transfer(node.url, "")) as engine:
        engine.play([turn])
        spoil(engine, node.url, turn.prompts)
    with Engine(model, transfer(node.url, "", policy, verify="off")) as engine:
        answers = engine.generate(turn.prompts)
        assert any(answers[index].tokens != turn.said[index] for index in long)
    with Engine(model, transfer(node.url, "", policy, verify="always")) as engine:
        answers = engine.generate(turn.prompts)
        assert engine.counter("load_failures") > 0
        failed = [index for index, answer in enumerate(answers) if answer.reason == "error"]
        assert bool(failed) == (policy == "fail")
        assert set(failed) <= set(long)
        for index, answer in enumerate(answers):
            expected = turn.said[index]
            assert answer.tokens == (
                expected[: len(answer.tokens)] if index in failed else expected
            )
        engine.play([turn])  # what is corrupt is not there any more
