"""`vllm serve` in its default mode, where the scheduler and each worker are processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from generationsupport import Engine, Turn, converse, loadable, transfer
from kvsupport import wait_until
from serversupport import Server

from tiffin.kvstore import Client, Prefix

if TYPE_CHECKING:
    from pathlib import Path

    from kvsupport import Daemon

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def turns(model_folders: Path) -> list[Turn]:
    """A conversation with an engine that has no pool."""
    with Engine(model_folders / "llama") as engine:
        return converse(engine, seed=2, turns=2)


def play(server: Server, turn: Turn) -> list[int]:
    """Check every answer of a turn; returns how many tokens were not computed."""
    answers = [server.complete(prompt) for prompt in turn.prompts]
    assert [answer.tokens for answer in answers] == turn.said
    return [answer.cached for answer in answers]


def await_stored(client: Client, prefixes: list[Prefix]) -> None:
    def stored() -> bool:
        return all(client.match(prefix).blocks == len(prefix) for prefix in prefixes)

    wait_until(stored, "the server has stored its prompts", 60.0)


def test_a_server_and_an_engine_in_this_process_share_blocks(
    turns: list[Turn], model_folders: Path, shared_node: Daemon, namespace: str, tmp_path: Path
) -> None:
    model, pool = model_folders / "llama", transfer(shared_node.url, namespace)
    first, second = turns
    with Engine(model, pool) as engine:
        engine.play([first])
        prefixes = [engine.prefix(prompt) for prompt in second.prompts]
    with (
        Server(model, pool, tmp_path / "log") as server,
        Client.open(shared_node.url) as client,
    ):
        assert play(server, first) == [loadable(prompt, 128) for prompt in first.prompts]
        play(server, second)
        await_stored(client, prefixes)
    with Engine(model, pool, enable_prefix_caching=False) as engine:
        cached = engine.play([second])
    assert cached == [loadable(prompt, 128) for prompt in second.prompts]


def test_tensor_parallel_workers_load_what_they_stored_in_parts(
    turns: list[Turn], model_folders: Path, shared_node: Daemon, namespace: str, tmp_path: Path
) -> None:
    pool = transfer(shared_node.url, namespace)
    (turn, _) = turns
    with Server(
        model_folders / "llama", pool, tmp_path / "log", "--tensor-parallel-size", "2"
    ) as server:
        play(server, turn)
        expected = [loadable(prompt, 128) for prompt in turn.prompts]
        wait_until(lambda: play(server, turn) == expected, "all blocks are stored", 120.0)
