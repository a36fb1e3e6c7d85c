"""vLLM's MultiConnector around two connectors of ours: it saves to both and loads from one."""

from __future__ import annotations

import time
from contextlib import closing
from typing import TYPE_CHECKING

import pytest
from generationsupport import Engine, Turn, converse, loadable, transfer
from kvsupport import Daemon
from vllm.config import KVTransferConfig

from tiffin.kvstore.connectors.vllm.worker_side import WorkerSide

if TYPE_CHECKING:
    from pathlib import Path

    from tiffin.kvstore.connectors.vllm.orders import LoadOrder

pytestmark = pytest.mark.timeout(600)

# What an engine needs to load synchronously.
SYNCHRONOUS = {"enable_prefix_caching": False, "async_scheduling": False}


def together(*pools: KVTransferConfig) -> KVTransferConfig:
    names = ("kv_connector", "kv_connector_module_path", "kv_role", "kv_connector_extra_config")
    connectors = [{name: getattr(pool, name) for name in names} for pool in pools]
    return KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"connectors": connectors},
    )


def converse_twice(model: Path) -> list[Turn]:
    with Engine(model) as engine:
        return converse(engine, seed=10, turns=2)


def test_both_nodes_get_all_and_each_stands_in_for_the_other(
    model_folders: Path, node: Daemon
) -> None:
    model = model_folders / "llama"
    turns = converse_twice(model)
    expected = [loadable(prompt) for turn in turns for prompt in turn.prompts]
    with closing(Daemon(dram=256 << 20)) as other:
        pools = [transfer(one.url, "") for one in (node, other)]
        with Engine(model, together(*pools), enable_prefix_caching=False) as engine:
            engine.play(turns)
        for pool in (*pools, together(*pools)):
            with Engine(model, pool, enable_prefix_caching=False) as engine:
                assert engine.play(turns) == expected


@pytest.mark.parametrize("loading", ["synchronous", "asynchronous"])
def test_what_one_node_lacks_is_saved_there_once_it_is_loaded_from_the_other(
    model_folders: Path, node: Daemon, monkeypatch: pytest.MonkeyPatch, loading: str
) -> None:
    def load_late(side: WorkerSide, order: LoadOrder) -> int:
        time.sleep(0.05)  # a save that did not wait would find empty pages
        return load(side, order)

    load = WorkerSide._load
    monkeypatch.setattr(WorkerSide, "_load", load_late)
    model = model_folders / "llama"
    turns = converse_twice(model)
    with closing(Daemon(dram=256 << 20)) as full:
        empty_pool, full_pool = (transfer(one.url, "", loading=loading) for one in (node, full))
        with Engine(model, full_pool, **SYNCHRONOUS) as engine:
            engine.play(turns)
        with Engine(model, together(empty_pool, full_pool), **SYNCHRONOUS) as engine:
            engine.play(turns)
            assert engine.counter("loaded_tokens") > 0
    with Engine(model, empty_pool, **SYNCHRONOUS) as engine:
        engine.play(turns)
        assert engine.counter("loaded_tokens") > 0
