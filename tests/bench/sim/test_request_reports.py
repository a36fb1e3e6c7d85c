"""What the conductor is told of a request, and when that happened."""

from __future__ import annotations

import random
from collections import defaultdict
from typing import TYPE_CHECKING

import pytest

from tiffin.bench.sim.cluster.simulation import SimulationOptions, simulate
from tiffin.bench.traces.trace import Trace, TraceRequest
from tiffin.conductor.core import Conductor

if TYPE_CHECKING:
    from tiffin.bench.sim.cluster.simulation import Profiles
    from tiffin.conductor.records import RequestEvent

# Two prompts at one instance, over a network that takes 0.4 s for the first of them.
TRACE = Trace("two", (TraceRequest(0.0, 5120, 3), TraceRequest(0.1, 5120, 3)))
SENDING_S = 0.4
OPTIONS = SimulationOptions(
    prefill=1, decode=1, bandwidth_bytes_s=5120 * 327_680 / SENDING_S, latency_s=0.0, late_s=0.0
)


class Listener(Conductor):
    """The core, which writes down when it is told what of each request."""

    def __init__(self, options: SimulationOptions, profiles: Profiles) -> None:
        super().__init__(options.settings(), dice=random.Random(0), profile=profiles)
        self.heard: dict[str, dict[str, float]] = defaultdict(dict)

    def observe(self, event: RequestEvent, now: float) -> None:
        self.heard[event.request_id].setdefault(event.kind, now)
        super().observe(event, now)


def heard(options: SimulationOptions) -> list[dict[str, float]]:
    """By request: when the conductor is told of each event."""
    cores: list[Listener] = []

    def core(options: SimulationOptions, profiles: Profiles) -> Conductor:
        cores.append(Listener(options, profiles))
        return cores[0]

    simulate(TRACE, options, core=core)
    return list(cores[0].heard.values())


def test_it_hears_of_the_begin_of_a_prefill_and_of_the_end_of_its_hand_over() -> None:
    first, second = heard(OPTIONS)
    assert first["prefill_began"] == pytest.approx(0.0)
    assert second["prefill_began"] == pytest.approx(first["prefill_done"])
    for one in (first, second):
        order = ["prefill_began", "prefill_done", "first_token", "handed_over", "finished"]
        assert sorted(order, key=one.__getitem__) == order
        assert one["handed_over"] - one["prefill_done"] == pytest.approx(SENDING_S)


def test_layer_by_layer_the_last_layer_is_waited_for() -> None:
    layers = 4
    options = SimulationOptions(
        prefill=1, decode=1, bandwidth_bytes_s=OPTIONS.bandwidth_bytes_s, latency_s=0.0,
        late_s=0.0, layerwise=True, layers=layers,
    )  # fmt: skip
    first, second = heard(options)
    assert second["handed_over"] - second["prefill_done"] == pytest.approx(SENDING_S / layers)
    # It shares the card with the layers of the second.
    assert first["handed_over"] - first["prefill_done"] == pytest.approx(2 * SENDING_S / layers)
