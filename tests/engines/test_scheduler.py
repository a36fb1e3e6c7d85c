"""The connector under vLLM's own scheduler and cache manager, with a model that is arithmetic."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest
from schedulersupport import Engine, Options

from tiffin.kvstore.connectors.vllm import TiffinConnector

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kvsupport import Daemon


@pytest.fixture
def start(
    shared_node: Daemon, model_folders: Path, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Engine]]:
    """A function that starts engines, all with one pool."""
    # vLLM's groups of tensor-parallel workers need processes.
    monkeypatch.setattr(TiffinConnector, "_rank", lambda self: 0)
    with ExitStack() as stack:

        def start(**changes: Any) -> Engine:
            options = Options(shared_node.url, namespace, model_folders / "llama", **changes)
            engine = Engine(options)
            stack.callback(engine.close)
            return engine

        yield start


def prompt(count: int, seed: int = 0) -> list[int]:
    return [(index * 7919 + seed * 104729 + 13) % 997 for index in range(count)]


LOADING = pytest.mark.parametrize("loading", ["synchronous", "asynchronous"])
AHEAD = pytest.mark.parametrize("ahead", [False, True], ids=["one-by-one", "ahead"])


@LOADING
@AHEAD
def test_an_engine_loads_what_another_computed(
    start: Callable[..., Engine], loading: str, ahead: bool
) -> None:
    tokens = prompt(100)
    assert start(ahead=ahead).answer(tokens).cached == 0
    assert start(loading=loading, ahead=ahead).answer(tokens).cached == 96
