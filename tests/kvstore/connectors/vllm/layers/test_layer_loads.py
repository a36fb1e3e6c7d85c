"""Loads beside a forward pass, without an engine: who waits for what, and what an error does."""

from __future__ import annotations

import math
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from kvsupport import Background

from tiffin.kvstore.connectors.vllm.layers.layer_loads import LayerLoads, beside_forward

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

LAYERS = ("a", "b", "c", "d")
ORDERS: list[Any] = [SimpleNamespace(number=1), SimpleNamespace(number=2)]


class LateCopier:
    """Copies two layers, and so on, when a test lets it. `awaited`: events, in their order."""

    def __init__(self, layers: Sequence[int] = (2, 4)) -> None:
        self._layers = layers
        self.gates = [threading.Event() for _ in layers]
        self.error: Exception | None = None
        self.at_end: Exception | None = None
        self.asked: list[object] = []
        self.awaited: list[str] = []

    def scatter_layers(self, loads: Sequence[object]) -> Iterator[tuple[int, str]]:
        self.asked.append(loads)
        for gate, end in zip(self.gates, self._layers, strict=True):
            assert gate.wait(30), "the gate was not opened"
            if self.error is not None:
                raise self.error
            yield end, f"{end} layers"
        if self.at_end is not None:
            raise self.at_end

    def await_layers(self, event: str) -> None:
        self.awaited.append(event)

    def open(self) -> None:
        for gate in self.gates:
            gate.set()


@pytest.fixture
def copier() -> LateCopier:
    return LateCopier()


@pytest.fixture
def loads(copier: LateCopier) -> Iterator[LayerLoads]:
    loads = LayerLoads(copier, LAYERS)  # type: ignore[arg-type]
    yield loads
    copier.open()
    loads.close()


def begin(loads: LayerLoads) -> None:
    loads.begin(ORDERS, ["two", "loads"])  # type: ignore[list-item]


def forward(loads: LayerLoads) -> None:
    for layer in LAYERS:
        loads.wait(layer)


@pytest.mark.parametrize(
    ("layerwise", "nbytes", "limit", "expected"),
    [
        ("auto", 99, 100, False),
        ("auto", 100, 100, True),
        ("auto", 1 << 40, math.inf, False),
        ("always", 1, math.inf, True),
        ("never", 100, 1, False),
    ],
)
def test_only_loads_that_are_worth_it_are_copied_beside_a_forward_pass(
    layerwise: Any, nbytes: int, limit: float, expected: bool
) -> None:
    assert beside_forward(layerwise, nbytes, limit) is expected


def test_a_layer_waits_for_its_own_pages_only(copier: LateCopier, loads: LayerLoads) -> None:
    begin(loads)
    copier.gates[0].set()
    loads.wait("a")
    loads.wait("b")
    assert copier.awaited == ["2 layers", "2 layers"]
    waiting = Background(lambda: loads.wait("c"))
    assert copier.awaited == ["2 layers", "2 layers"]
    copier.gates[1].set()
    waiting.result()
    loads.wait("d")
    assert copier.awaited == ["2 layers", "2 layers", "4 layers", "4 layers"]
    assert copier.asked == [["two", "loads"]]  # in one call: each layer of both
    orders, taken_s = loads.finish()
    assert list(orders) == ORDERS
    assert taken_s > 0


def test_layers_may_be_asked_for_in_any_order_and_again(
    copier: LateCopier, loads: LayerLoads
) -> None:
    copier.open()
    begin(loads)
    for layer in "dcabad":
        loads.wait(layer)
    assert copier.awaited == [f"{2 if layer in 'ab' else 4} layers" for layer in "dcabad"]
    assert len(loads.finish()[0]) == 2


def test_a_layer_without_pages_of_its_own_waits_for_all(
    copier: LateCopier, loads: LayerLoads
) -> None:
    """It may read those of any."""
    copier.open()
    begin(loads)
    loads.wait("of another cache")
    assert copier.awaited == ["4 layers"]


def test_a_step_without_loads_waits_for_nothing(copier: LateCopier, loads: LayerLoads) -> None:
    forward(loads)
    assert loads.finish() == ((), 0.0)
    assert not copier.awaited


def test_the_end_of_a_step_waits_for_all_layers(copier: LateCopier, loads: LayerLoads) -> None:
    begin(loads)
    copier.gates[0].set()
    ended: list[object] = []
    forwarding = Background(lambda: (forward(loads), ended.append(loads.finish())))
    assert not ended
    copier.gates[1].set()
    forwarding.result()
    assert len(ended) == 1
    assert loads.finish() == ((), 0.0)  # each load ends once


def test_one_step_follows_the_other(copier: LateCopier, loads: LayerLoads) -> None:
    copier.open()
    for _ in range(3):
        begin(loads)
        forward(loads)
        assert list(loads.finish()[0]) == ORDERS


def test_a_step_does_not_begin_within_another(copier: LateCopier, loads: LayerLoads) -> None:
    begin(loads)
    with pytest.raises(AssertionError, match="had ended"):
        begin(loads)


@pytest.mark.parametrize("layer", ["c", "d", "of another cache"])
def test_an_error_in_the_copying_thread_is_the_engines(
    copier: LateCopier, loads: LayerLoads, layer: str
) -> None:
    begin(loads)
    copier.gates[0].set()
    loads.wait("a")  # was copied before
    copier.error = RuntimeError("torch says no")
    copier.gates[1].set()
    for _ in range(2):  # for ever: no load of this step ends
        with pytest.raises(RuntimeError, match="torch says no"):
            loads.wait(layer)
        with pytest.raises(RuntimeError, match="torch says no"):
            loads.finish()


def test_an_error_after_the_last_layer_is_the_engines(
    copier: LateCopier, loads: LayerLoads
) -> None:
    """As of a device that reports what it did before."""
    copier.at_end = RuntimeError("the device has failed")
    copier.open()
    begin(loads)
    forward(loads)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="the device has failed"):
            loads.finish()


def test_layers_that_were_not_copied_are_an_error() -> None:
    copier = LateCopier([3])
    copier.open()
    loads = LayerLoads(copier, LAYERS)  # type: ignore[arg-type]
    begin(loads)
    with pytest.raises(AssertionError, match="3 of 4 layers were copied"):
        forward(loads)
    with pytest.raises(AssertionError, match="3 of 4"):
        loads.finish()
    loads.close()


def test_a_layer_that_did_not_wait_ends_the_engine_once_all_is_copied(
    copier: LateCopier, loads: LayerLoads
) -> None:
    """Nobody knows what it read; but nobody writes to its pages any more."""
    begin(loads)
    finishing = Background(loads.finish)
    copier.open()
    with pytest.raises(RuntimeError, match="did not wait for the loads of a, b, c, d"):
        finishing.result()
    loads.wait("b")
    with pytest.raises(RuntimeError, match="the loads of a, c, d"):
        loads.finish()
