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

if TYPE_CHECKING:
    from pathlib import Path

    from kvsupport import Daemon

pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize("loading", ["synchronous", "asynchronous"])
def test_a_fresh_engine_loads_what_another_stored(
    model_folders: Path,
    shared_node: Daemon,
    namespace: str,
    loading: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connector, "_device", lambda: "cuda")
    loads: list[object] = []
    scatter = DevicePageCopier.scatter

    def counted(copier: DevicePageCopier, *arguments: Any) -> None:
        loads.append(arguments)
        scatter(copier, *arguments)

    monkeypatch.setattr(DevicePageCopier, "scatter", counted)
    model = model_folders / "llama"
    with Engine(model) as engine:
        turns = converse(engine, seed=1, turns=2)
    pool = transfer(shared_node.url, namespace, loading=loading)
    with Engine(model, pool, enable_prefix_caching=False) as engine:
        engine.play(turns)
    with Engine(model, pool, enable_prefix_caching=False) as engine:
        cached = engine.play(turns)
    assert cached == [loadable(prompt, 128) for turn in turns for prompt in turn.prompts]
    assert loads
