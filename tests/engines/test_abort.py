"""Requests that clients give up while they load, compute and save."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from generationsupport import Answer, Engine, converse_with_many, loadable, transfer
from kvsupport import is_quiet, wait_until

from tiffin.kvstore import Client

if TYPE_CHECKING:
    from pathlib import Path

    from kvsupport import Daemon

pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize("loading", ["asynchronous", "synchronous"])
def test_aborted_requests_harm_nobody(model_folders: Path, node: Daemon, loading: str) -> None:
    """Of 200 requests a good part is aborted, at random times."""
    model, dice = model_folders / "llama", random.Random(9)
    pool = transfer(node.url, "", loading=loading)
    options = {"enable_prefix_caching": False, "async_scheduling": False}
    with Engine(model, enable_prefix_caching=False) as engine:
        turns = converse_with_many(engine, seed=9, conversations=10)
    aborted = 0
    with Engine(model, pool, **options) as engine:
        for _ in range(5):
            for turn in turns:
                names = [str(index) for index in range(len(turn.prompts))]
                engine.start(turn.prompts)
                answers: dict[str, Answer] = {}
                for name in dice.sample(names, 3):
                    for _ in range(dice.randrange(12)):
                        answers |= engine.step()
                    if name not in answers:
                        engine.abort([name])
                        aborted += 1
                answers |= engine.finish()
                for name, answer in answers.items():
                    said = turn.said[int(name)]
                    if answer.reason == "abort":
                        assert answer.tokens == said[: len(answer.tokens)]
                    else:
                        assert answer.tokens == said
        assert aborted > 30  # the others had ended
        with Client.open(node.url) as client:
            wait_until(lambda: is_quiet(client.statistics()), "no lease is left", 60.0)
    with Engine(model, pool, **options) as engine:
        cached = engine.play(turns)
    assert cached == [loadable(prompt) for turn in turns for prompt in turn.prompts]
