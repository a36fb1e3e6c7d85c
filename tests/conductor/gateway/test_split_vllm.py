"""A real vLLM prefills and another one decodes, with the KV through the pool: behind a real gateway
and a real conductor, each in a process of its own. One after the other, or both at once: then the
KV goes from one to the other layer by layer, while it is computed.

TIFFIN_VLLM=/path/to/venv/bin/python pytest -m slow tests/conductor/gateway/test_split_vllm.py
"""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from splitsupport import ANSWER_TOKENS, BLOCK_TOKENS, Split, split_vllm
from vllmsupport import MARKS, prompt

if TYPE_CHECKING:
    from collections.abc import Iterator

    from connectors.vllmserver import VllmServer

pytestmark = MARKS

TURNS = 3
LAYERS = 4
LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"timed": {"format": "at %(created).6f %(message)s"}},
    "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "timed"}},
    "loggers": {
        "tiffin.kvstore.connectors.vllm": {"handlers": ["stderr"], "level": "DEBUG"},
        "vllm": {"handlers": ["stderr"], "level": "INFO"},
    },
}


class Moved(NamedTuple):
    """An engine has published, or loaded, a layer of some blocks."""

    at_s: float
    layer: int
    blocks: int


def trace(one: VllmServer, what: str, skip: int = 0) -> list[Moved]:
    """What an engine says in its log that it has "published" or "loaded", without the first `skip`
    times."""
    lines = re.findall(rf"at (\d+\.\d+) \S+ layer (\d+) of (\d+) blocks {what}", one.log())
    return [Moved(float(at), int(layer), int(blocks)) for at, layer, blocks in lines[skip:]]


# What the connectors are told, by the gateway's hand-over.
SETTINGS: dict[str, dict[str, Any]] = {"pool": {}, "stream": {"layerwise": "always"}}


@pytest.fixture(scope="module", params=SETTINGS)
def split(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Split]:
    folder, handoff = tmp_path_factory.mktemp(request.param), request.param
    (folder / "logging.json").write_text(json.dumps(LOGGING))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_LOGGING_CONFIG_PATH", str(folder / "logging.json"))
        with split_vllm(folder, handoff, **SETTINGS[handoff]) as it:
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


@pytest.mark.parametrize("split", ["stream"], indirect=True)
def test_first_layers_are_loaded_before_the_last_ones_are_written(split: Split) -> None:
    ids = prompt(300, 7 * BLOCK_TOKENS + 40)
    earlier = [len(trace(one, what)) for one, what in sides(split)]
    said = split.ask(ids)
    published, loaded = (
        trace(one, what, skip) for (one, what), skip in zip(sides(split), earlier, strict=True)
    )
    for moved in (published, loaded):
        assert sum(one.blocks for one in moved) == 7 * LAYERS, "each layer of each block once"
    assert loaded[0].at_s < published[-1].at_s
    assert said == split.alone(ids)


def sides(split: Split) -> tuple[tuple[VllmServer, str], tuple[VllmServer, str]]:
    return (split.prefill, "published"), (split.decode, "loaded")


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
