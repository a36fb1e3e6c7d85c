"""`vllm serve` in its default mode, where the scheduler and each worker are processes."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest
from generationsupport import Engine, Turn, converse, converse_with_many, loadable, transfer
from kvsupport import is_quiet, wait_until
from loadsupport import Load
from serversupport import Server

from tiffin.kvstore import Client, Prefix

if TYPE_CHECKING:
    from pathlib import Path

    from kvsupport import Daemon

pytestmark = pytest.mark.timeout(900)

TWO_RANKS = ("--tensor-parallel-size", "2")


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
        assert play(server, first) == [loadable(prompt) for prompt in first.prompts]
        play(server, second)
        await_stored(client, prefixes)
    with Engine(model, pool, enable_prefix_caching=False) as engine:
        cached = engine.play([second])
    assert cached == [loadable(prompt) for prompt in second.prompts]


def test_tensor_parallel_workers_load_what_they_stored_in_parts(
    turns: list[Turn], model_folders: Path, shared_node: Daemon, namespace: str, tmp_path: Path
) -> None:
    pool = transfer(shared_node.url, namespace, layerwise="always")
    (turn, _) = turns
    with Server(model_folders / "llama", pool, tmp_path / "log", *TWO_RANKS) as server:
        play(server, turn)
        expected = [loadable(prompt) for prompt in turn.prompts]
        wait_until(lambda: play(server, turn) == expected, "all blocks are stored", 120.0)


def test_a_killed_worker_leaves_nothing_half_written(
    model_folders: Path, node: Daemon, namespace: str, tmp_path: Path
) -> None:
    """vLLM ends an engine one of whose workers has died. This one dies while the other has written
    its part of a block."""
    model, pool = model_folders / "llama", transfer(node.url, namespace)
    with Engine(model, max_num_seqs=8) as engine:
        turns = converse_with_many(engine, seed=9, conversations=30, turns=2)
    script = [pair for turn in turns for pair in zip(turn.prompts, turn.said, strict=True)]

    def numbers() -> dict[str, Any]:
        with Client.open(node.url) as client:
            return client.statistics()

    def half_written() -> bool:
        """Stop a worker where it is, unless nothing is being written."""
        worker.suspend()
        time.sleep(0.3)  # the other one does what it can without
        if numbers()["tiers"]["dram"]["reserved_bytes"]:
            return True
        worker.resume()
        return False

    with Server(model, pool, tmp_path / "killed.log", *TWO_RANKS) as server:
        (_, worker) = server.workers()
        with Load([server], script, seed=9) as load:
            load.await_answers(4)
            wait_until(half_written, "a block is half written", 60.0)
            worker.kill()
            wait_until(lambda: not server.healthy(), "the server has ended", 60.0)
        load.assert_ended(server)
    assert "died unexpectedly" in server.log()
    # The part that was written waits for the other one until the node's `--write-lease-s` is over.
    wait_until(lambda: is_quiet(numbers()), "no lease and no reservation is left", 90.0)
    with Server(model, pool, tmp_path / "log", *TWO_RANKS) as server:
        answers = server.generate([prompt for prompt, _ in script])
        assert [answer.tokens for answer in answers] == [said for _, said in script]
        assert server.counter("loaded_tokens") > 0
        assert server.counter("load_failures") == 0
    with Engine(model, pool) as engine:
        engine.play(turns)
    assert numbers()["counters"]["corrupt"] == 0
