"""What the connector does in vLLM's hooks, in which order; vLLM itself is not needed.

`tests/engines` runs the connector in a real vLLM, which has no GPU there: so that nothing would go
wrong if a load did not wait for the steps before it.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("torch")

from tiffin.kvstore.connectors.vllm.orders import LoadOrder, SaveOrder, StepOrders

if TYPE_CHECKING:
    from collections.abc import Iterator

MODULES = (
    "vllm",
    "vllm.distributed.kv_transfer.kv_connector.v1.base",
    "vllm.distributed.kv_transfer.kv_connector.v1.metrics",
    "vllm.platforms",
    "vllm.v1.metrics.cache_hit_source",
)
OURS = ("tiffin.kvstore.connectors.vllm.connector", "tiffin.kvstore.connectors.vllm.metrics")


class Anything(ModuleType):
    """A module with a class of every name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        names: dict[str, Any] = {"HOST": 1, "DISK": 2, "P2P": 3}
        names["bind_connector_metadata"] = lambda self, metadata: None
        setattr(self, name, type(name, (), names))
        return getattr(self, name)


@pytest.fixture
def connector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The connector's module, over modules that stand for vLLM's."""
    for name in MODULES:
        monkeypatch.setitem(sys.modules, name, Anything(name))
    for name in OURS:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module(OURS[0])
    for name in OURS:
        sys.modules.pop(name, None)


class Calls:
    """Notes which methods were called, in order."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.options: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        def note(*_: Any, **options: Any) -> None:
            self.names.append(name)
            self.options |= options

        return note


class Forward:
    """vLLM's context of a forward pass. `attn_metadata`: None in a step without one."""

    def __init__(self, *, full: bool = False, attn_metadata: Any = (1,)) -> None:
        self.cudagraph_runtime_mode = self
        self.has_full_cudagraphs = lambda: full
        self.attn_metadata = attn_metadata


def connector_with(connector: Any, calls: Calls, orders: StepOrders) -> Any:
    made = object.__new__(connector.TiffinConnector)
    made._worker = made._copier = calls
    made._scheduler = None
    made._saves_by_layer = True
    made._layers = {"first": 0, "second": 1}
    made._get_connector_metadata = lambda: connector.Metadata(orders)
    return made


def prefix() -> Any:
    return range(1)


def test_a_load_waits_for_the_steps_before_it(connector: Any) -> None:
    calls = Calls()
    load = LoadOrder(1, "r", prefix(), 0, (1,))
    connector_with(connector, calls, StepOrders(loads=[load])).start_load_kv(Forward())
    assert calls.names == ["step_begins", "begin"]


@pytest.mark.parametrize(
    ("forward", "expected"),
    [
        (Forward(), True),
        (Forward(full=True), False),  # it replays without a word to layers
        (Forward(attn_metadata=None), False),
    ],
)
def test_loads_go_on_beside_steps_whose_layers_wait(
    connector: Any, forward: Forward, expected: bool
) -> None:
    calls = Calls()
    load = LoadOrder(1, "r", prefix(), 0, (1,))
    connector_with(connector, calls, StepOrders(loads=[load])).start_load_kv(forward)
    assert calls.options == {"layers_wait": expected}


def test_layers_wait_and_the_end_of_a_step_too(connector: Any) -> None:
    calls = Calls()
    made = connector_with(connector, calls, StepOrders())
    made.wait_for_layer_load("layers.0")
    made.wait_for_save()
    assert calls.names == ["wait_for_layer", "finish_loads", "end_layers"]


@pytest.mark.parametrize(
    ("extra", "expected"),
    [({}, False), ({"layerwise": "never"}, False), ({"layerwise": "always"}, True)],
)
def test_full_graphs_are_given_up_only_for_those_who_say_so(
    connector: Any, extra: dict[str, Any], expected: bool
) -> None:
    assert connector.TiffinConnector.requires_piecewise_for_cudagraph(extra) is expected


def test_a_step_without_loads_costs_no_event(connector: Any) -> None:
    calls = Calls()
    save = SaveOrder(1, "r", prefix(), (1,))
    connector_with(connector, calls, StepOrders(saves=[save])).start_load_kv(None)
    assert calls.names == ["begin"]


def test_saves_by_layer_begin_before_the_forward_pass(connector: Any) -> None:
    calls = Calls()
    made = connector_with(connector, calls, StepOrders())
    made.bind_connector_metadata(connector.Metadata(StepOrders()))
    for name in ("first", "shares the cache of the first", "second"):
        made.save_kv_layer(name, None, None)
    made.wait_for_save()
    assert calls.names == [
        "begin_layer_saves",
        "computed",
        "computed",
        "finish_loads",
        "end_layers",
    ]


def test_without_them_the_hooks_of_layers_save_nothing(connector: Any) -> None:
    calls = Calls()
    made = connector_with(connector, calls, StepOrders())
    made._saves_by_layer = False
    made.bind_connector_metadata(connector.Metadata(StepOrders()))
    made.save_kv_layer("first", None, None)
    made.wait_for_save()
    assert calls.names == ["finish_loads"]


def test_a_copier_is_closed_once_no_thread_copies(connector: Any) -> None:
    calls = Calls()
    made = connector_with(connector, calls, StepOrders())
    made._worker = worker = Calls()
    worker.names = calls.names
    made.shutdown()
    assert calls.names == ["close", "close"]
    assert made._worker is None
    assert made._copier is None
    made.shutdown()
    assert len(calls.names) == 2


@pytest.mark.parametrize(
    ("rocm", "device", "expected"),
    [(False, "cuda", "cuda"), (True, "cuda", "rocm"), (False, "cpu", "cpu"), (False, "xpu", "xpu")],
)
def test_rocm_is_not_taken_for_cuda(connector: Any, rocm: bool, device: str, expected: str) -> None:
    platform = type("Platform", (), {"device_type": device, "is_rocm": lambda self: rocm})
    connector.current_platform = platform()
    assert connector._device() == expected
