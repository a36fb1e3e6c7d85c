"""Engines whose layers are divided among pipeline stages share blocks with those that have all in
one worker, and say the same."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
from generationsupport import BLOCK_TOKENS, Engine, random_tokens, transfer

if TYPE_CHECKING:
    from pathlib import Path

    from kvsupport import Daemon
    from vllm.config import KVTransferConfig

pytestmark = pytest.mark.timeout(900)

Answers = list[tuple[list[int], int]]  # and how many tokens of each prompt were not computed


def make_room(worker: Any) -> None:
    """What vLLM 0.32 leaves out on a CPU without compilation: the memory in which a stage receives
    what the stage before it computed."""
    runner = worker.model_runner
    runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
        batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
    )


def staged(model: Path, pool: KVTransferConfig, stages: int, ranks: int = 1) -> Engine:
    """An engine of `stages` x `ranks` workers."""
    engine = Engine(
        model,
        pool,
        enable_prefix_caching=False,
        pipeline_parallel_size=stages,
        tensor_parallel_size=ranks,
        distributed_executor_backend="mp",
    )
    engine._llm.collective_rpc(make_room)
    return engine


def answers_of(engine: Engine, prompts: list[list[int]]) -> Answers:
    answers = [(one.tokens, one.cached) for one in engine.generate(prompts)]
    scheduler = getattr(engine.connector, "_scheduler", None)
    assert scheduler is None or not scheduler._leases.held_bytes, "a lease is kept"
    return answers


def test_stages_and_a_single_worker_share_blocks_both_ways(
    model_folders: Path, shared_node: Daemon, namespace: str
) -> None:
    dice = random.Random(7)
    ours = [random_tokens(dice, 2 * BLOCK_TOKENS + 100), random_tokens(dice, BLOCK_TOKENS + 30)]
    theirs = [random_tokens(dice, 3 * BLOCK_TOKENS + 10)]
    model = model_folders / "llama"
    pool = transfer(shared_node.url, namespace, loading="synchronous")
    with Engine(model, enable_prefix_caching=False) as alone:
        right = [tokens for tokens, _ in answers_of(alone, ours + theirs)]
    with Engine(model, pool, enable_prefix_caching=False) as single:
        assert answers_of(single, ours) == [(right[0], 0), (right[1], 0)]
    with staged(model, pool, stages=2) as engine:
        assert answers_of(engine, theirs) == [(right[2], 0)]
        found = answers_of(engine, ours)  # what the single worker stored
        assert found == [(right[0], 2 * BLOCK_TOKENS), (right[1], BLOCK_TOKENS)]
        assert answers_of(engine, theirs) == [(right[2], 3 * BLOCK_TOKENS)]  # its own
    with Engine(model, pool, enable_prefix_caching=False) as single:
        assert answers_of(single, theirs) == [(right[2], 3 * BLOCK_TOKENS)]


def test_ranks_of_stages_load_what_they_stored(
    model_folders: Path, shared_node: Daemon, namespace: str
) -> None:
    """Four workers, whose asynchronous loads all have to be reported."""
    dice = random.Random(8)
    prompts = [random_tokens(dice, 2 * BLOCK_TOKENS + 100), random_tokens(dice, BLOCK_TOKENS + 30)]
    pool = transfer(shared_node.url, namespace, loading="asynchronous")
    with staged(model_folders / "llama", pool, stages=2, ranks=2) as engine:
        first, second = answers_of(engine, prompts), answers_of(engine, prompts)
    assert [tokens for tokens, _ in second] == [tokens for tokens, _ in first]
    assert [cached for _, cached in first] == [0, 0]
    assert [cached for _, cached in second] == [2 * BLOCK_TOKENS, BLOCK_TOKENS]
