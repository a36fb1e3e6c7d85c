"""A real vLLM prefills and another one decodes, with the KV through the pool: behind a real gateway
and a real conductor, each in a process of its own.

TIFFIN_VLLM=/path/to/venv/bin/python pytest -m slow tests/conductor/gateway/test_split_vllm.py
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from splitsupport import ANSWER_TOKENS, BLOCK_TOKENS, Split, split_vllm
from vllmsupport import MARKS, prompt

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = MARKS

TURNS = 3


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Split]:
    with split_vllm(tmp_path_factory.mktemp("split")) as it:
        yield it


@pytest.mark.parametrize("stream", [False, True])
def test_a_split_answers_as_one_instance_does(split: Split, stream: bool) -> None:
    """Conversations whose turns grow: tokens are those of one instance, and the decode instance
    computes what is behind the last whole block only."""
    for conversation in range(4):
        ids = prompt(10 * stream + conversation, 700 + 300 * conversation)
        for _ in range(TURNS):
            before = split.loaded_tokens()
            said = split.ask(ids, stream=stream)
            assert said == split.alone(ids)
            assert len(said) == ANSWER_TOKENS
            loaded = split.loaded_tokens() - before
            assert loaded == len(ids) // BLOCK_TOKENS * BLOCK_TOKENS, "all of what was promised"
            ids = [*ids, *said, *prompt(len(ids), 200)]


def test_many_at_a_time(split: Split) -> None:
    prompts = [prompt(100 + number, 600 + 100 * number) for number in range(8)]
    with ThreadPoolExecutor(4) as clients:
        said = list(clients.map(split.ask, prompts))
    assert said == [split.alone(ids) for ids in prompts]


def test_a_short_prompt_has_no_block_to_wait_for(split: Split) -> None:
    ids = prompt(200, 100)
    before = split.loaded_tokens()
    assert split.ask(ids) == split.alone(ids)
    assert split.loaded_tokens() == before
