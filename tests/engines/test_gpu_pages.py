"""Whole engines on a CPU whose pages the connector takes for those of a GPU.

They go as rows of K and V through buffers into the pool's own format. What the rows of a CPU mean
is nobody's concern.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from generationsupport import Engine, converse, loadable, transfer

from tiffin.kvstore.connectors.vllm import connector
from tiffin.kvstore.connectors.vllm.pages.device_page_copier import DevicePageCopier
from tiffin.kvstore.errors import InvalidInput

if TYPE_CHECKING:
    from pathlib import Path

    from kvsupport import Daemon

pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize(
    "settings",
    [
        {"loading": "synchronous"},
        {"loading": "asynchronous"},
        {"loading": "synchronous", "layerwise": "always"},
    ],
    ids=["synchronous", "asynchronous", "layerwise"],
)
def test_a_fresh_engine_loads_what_another_stored(
    model_folders: Path,
    shared_node: Daemon,
    namespace: str,
    settings: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connector, "_device", lambda: "cuda")
    loads: list[object] = []
    way = "scatter_layers" if "layerwise" in settings else "scatter"
    scatter = getattr(DevicePageCopier, way)

    def counted(copier: DevicePageCopier, *arguments: Any) -> Any:
        loads.append(arguments)
        return scatter(copier, *arguments)

    monkeypatch.setattr(DevicePageCopier, way, counted)
    model = model_folders / "llama"
    with Engine(model) as engine:
        turns = converse(engine, seed=1, turns=2)
    pool = transfer(shared_node.url, namespace, **settings)
    with Engine(model, pool, enable_prefix_caching=False) as engine:
        engine.play(turns)
    with Engine(model, pool, enable_prefix_caching=False) as engine:
        cached = engine.play(turns)
    assert cached == [loadable(prompt) for turn in turns for prompt in turn.prompts]
    assert loads


@pytest.mark.parametrize("loading", ["synchronous", "asynchronous"])
def test_an_engine_with_an_hbm_tier_loads_a_second_time_without_the_bus(
    model_folders: Path,
    shared_node: Daemon,
    namespace: str,
    loading: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What it saves, and what another engine has saved. The tier is in host memory here."""
    monkeypatch.setattr(connector, "_device", lambda: "cuda")
    model = model_folders / "llama"
    with Engine(model) as engine:
        turns = converse(engine, seed=1, turns=2)
    all_loadable = [loadable(prompt) for turn in turns for prompt in turn.prompts]
    pool = transfer(shared_node.url, namespace, loading=loading, hbm_bytes="64MiB")
    with Engine(model, pool, enable_prefix_caching=False) as engine:
        engine.play(turns)
        monkeypatch.setattr(DevicePageCopier, "scatter", _bus)
        loaded, hits = engine.counter("loaded_tokens"), engine.counter("hit_tokens", tier="hbm")
        assert engine.play(turns) == all_loadable
        loaded = engine.counter("loaded_tokens") - loaded
        assert engine.counter("hit_tokens", tier="hbm") - hits == loaded >= sum(all_loadable) > 0
    monkeypatch.undo()
    monkeypatch.setattr(connector, "_device", lambda: "cuda")
    with Engine(model, pool, enable_prefix_caching=False) as engine:
        for _ in range(2):
            assert engine.play(turns) == all_loadable
        hits = engine.counter("hit_tokens", tier="hbm")
        assert engine.counter("loaded_tokens") / 2 <= hits < engine.counter("loaded_tokens")


def _bus(*_: Any) -> None:
    raise AssertionError("a block came from the pool")


def test_an_engine_on_a_cpu_refuses_an_hbm_tier(
    model_folders: Path, shared_node: Daemon, namespace: str
) -> None:
    pool = transfer(shared_node.url, namespace, hbm_bytes="64MiB")
    with pytest.raises(InvalidInput, match="hbm_bytes is set, and this engine has no GPU"):
        Engine(model_folders / "llama", pool)
