"""The hand-over of the KV, whole and by layers: closed forms."""

from __future__ import annotations

import pytest

from tiffin.bench.sim.clock import VirtualClock
from tiffin.bench.sim.nodes.handover import HandOver
from tiffin.bench.sim.nodes.network import Network

# The network takes the last thousandth of a byte for sent.
LAYERS, BANDWIDTH_BYTES_S = 10, 100.0


def layerwise_s(nbytes: float, prefill_s: float, latency_s: float = 0.0) -> float:
    clock, at_s = VirtualClock(), list[float]()
    network = Network(clock, BANDWIDTH_BYTES_S, latency_s)
    hand = HandOver("p", "d", nbytes, LAYERS, synchronisation_s=0.5)
    hand.layerwise(clock, network, prefill_s, lambda: at_s.append(clock.now_s))
    clock.run(lambda: True)
    assert sum(network.moved_bytes.values()) == pytest.approx(nbytes)
    return at_s[0]


def test_whole_it_takes_its_bytes_after_the_prefill() -> None:
    clock, at_s = VirtualClock(), list[float]()
    network = Network(clock, BANDWIDTH_BYTES_S, 1.0)
    HandOver("p", "d", 300.0, LAYERS).serialized(network, lambda: at_s.append(clock.now_s))
    clock.run(lambda: True)
    assert at_s == [pytest.approx(1.0 + 3.0, rel=1e-4)]


@pytest.mark.parametrize("prefill_s", [3.0, 5.0, 20.0])
def test_by_layers_only_the_last_one_is_waited_for(prefill_s: float) -> None:
    """As long as a layer is computed no faster than it is sent."""
    assert layerwise_s(300.0, prefill_s) == pytest.approx(prefill_s + 0.3 + 0.5, rel=1e-4)


def test_a_slow_network_is_behind() -> None:
    """It sends from the end of the first layer on, without a pause."""
    assert layerwise_s(300.0, 1.0) == pytest.approx(0.1 + 3.0 + 0.5, rel=1e-4)
