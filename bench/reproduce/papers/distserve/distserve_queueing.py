"""DistServe's queueing model of prefill (OSDI '24, section 3.1): tensor parallelism or a pipeline.

The formulas are compared with a discrete-event simulation of what they describe: Poisson arrivals,
prompts of one length, one queue in front of one or two stages.
"""

from __future__ import annotations

from collections import deque
from random import Random
from typing import TYPE_CHECKING

import numpy as np

from tiffin.conductor.cost import latency_profiles
from tiffin.conductor.cost.latency_model import prefill_s

from ....plots import Line, Plot
from ....sim.clock import VirtualClock
from ...evidence import Comparison, Evidence, Statement
from ...registry import reproduction

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ...registry import Effort, Tell

_PROMPT_TOKENS = 512  # section 3.1
_REQUESTS = 20_000
_WARM_UP = 1_000  # requests that are not counted: the queue begins empty
_LOADS = (0.1, 0.3, 0.5, 0.7, 0.9, 1.1, 1.3)  # rate times service time; of one GPU


def one_instance_s(rate: float, service_s: float) -> float:
    """Mean TTFT on one GPU: D + R D² / (2 (1 - R D)), an M/D/1 queue (equation 1)."""
    return service_s + rate * service_s**2 / (2 * (1 - rate * service_s))


def inter_op_s(rate: float, service_s: float) -> float:
    """On a pipeline of two: D + R D² / (4 (2 - R D)) (equation 2)."""
    return service_s + rate * service_s**2 / (4 * (2 - rate * service_s))


def intra_op_s(rate: float, service_s: float, speed_up: float) -> float:
    """On two that are K times as fast: D / K + R D² / (2 K (K - R D)) (equation 3)."""
    waiting_s = rate * service_s**2 / (2 * speed_up * (speed_up - rate * service_s))
    return service_s / speed_up + waiting_s


def simulated_s(rate: float, stages_s: Sequence[float], seed: int, count: int = _REQUESTS) -> float:
    """Mean TTFT of a pipeline whose stages take so long each."""
    clock, dice = VirtualClock(), Random(seed)
    pipeline = _Pipeline(clock, stages_s)
    at_s = 0.0
    for _ in range(count):
        at_s += dice.expovariate(rate)
        clock.at(at_s, lambda at_s=at_s: pipeline.enqueue(0, at_s))  # type: ignore[misc]
    clock.run(lambda: True)
    return float(np.mean(pipeline.ttft_s[min(_WARM_UP, count // 2) :]))


class _Pipeline:
    """Stages with a queue in front of each; a request is its arrival."""

    def __init__(self, clock: VirtualClock, stages_s: Sequence[float]) -> None:
        self._clock, self._stages_s = clock, stages_s
        self._queues: list[deque[float]] = [deque() for _ in stages_s]
        self._busy = [False] * len(stages_s)
        self.ttft_s: list[float] = []

    def enqueue(self, stage: int, arrival_s: float) -> None:
        """A request comes to a stage, or is through the last one."""
        if stage == len(self._stages_s):
            self.ttft_s.append(self._clock.now_s - arrival_s)
            return
        self._queues[stage].append(arrival_s)
        if not self._busy[stage]:
            self._next(stage)

    def _next(self, stage: int) -> None:
        self._busy[stage] = bool(self._queues[stage])
        if self._busy[stage]:
            arrival_s = self._queues[stage].popleft()
            self._clock.after(self._stages_s[stage], lambda: self._done(stage, arrival_s))

    def _done(self, stage: int, arrival_s: float) -> None:
        self.enqueue(stage + 1, arrival_s)
        self._next(stage)


def crossing(difference: Callable[[float], float], low: float, high: float) -> float:
    """Where a function that goes from below 0 to above is 0, to half a percent."""
    while high - low > 5e-3 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if difference(middle) < 0 else (low, middle)
    return (low + high) / 2


def _measured(degree: int) -> float:
    profile = latency_profiles.load(f"opt-13b.a100.tp{degree}.distserve")
    return float(prefill_s(*profile.prefill, _PROMPT_TOKENS, 0))


@reproduction(
    "distserve-queueing",
    "Tensor or pipeline parallelism for prefill",
    "DistServe, OSDI '24, equations 1 to 3",
)
def queueing(effort: Effort, tell: Tell) -> Evidence:
    """Closed forms and simulation over the rate, and where the curves cross. D and K are those of
    OPT-13B on one and two A100."""
    service_s = _measured(1)
    speed_up = service_s / _measured(2)
    halves, faster = (service_s / 2, service_s / 2), (service_s / speed_up,)
    systems: dict[str, tuple[Callable[[float], float], Sequence[float], float]] = {
        "one GPU": (lambda rate: one_instance_s(rate, service_s), (service_s,), 1.0),
        "inter-op": (lambda rate: inter_op_s(rate, service_s), halves, 2.0),
        "intra-op": (lambda rate: intra_op_s(rate, service_s, speed_up), faster, speed_up),
    }
    comparisons, lines = [], []
    for name, (formula, stages_s, load_max) in systems.items():
        tell(name)
        rates = [load / service_s for load in _LOADS if load < 0.97 * load_max]
        means = [[simulated_s(rate, stages_s, seed) for seed in effort.seeds] for rate in rates]
        ours = [float(np.mean(values)) for values in means]
        fine = np.linspace(rates[0], rates[-1], 60).tolist()
        lines.append(Line(name, tuple(fine), tuple(formula(rate) for rate in fine)))
        lines.append(Line(f"{name}, simulated", tuple(rates), tuple(ours), "dots"))
        for rate, mean_s in zip(rates[2::2], ours[2::2], strict=True):
            what = f"mean TTFT, {name}, {rate:.1f} requests/s"
            comparisons.append(Comparison(what, formula(rate), mean_s, "s"))

    def in_theory(rate: float) -> float:
        return intra_op_s(rate, service_s, speed_up) - inter_op_s(rate, service_s)

    def in_simulation(rate: float) -> float:
        pairs = [
            simulated_s(rate, faster, seed) - simulated_s(rate, halves, seed)
            for seed in effort.seeds
        ]
        return float(np.mean(pairs))

    tell("crossing")
    bounds = (0.1 / service_s, 0.95 * speed_up / service_s)
    expected = crossing(in_theory, *bounds)
    found = crossing(in_simulation, *bounds)
    comparisons.append(Comparison("rate where the curves cross", expected, found, "requests/s"))
    low, high = 0.5 * found, 1.2 * found
    below_s, above_s = in_simulation(low), in_simulation(high)
    figures = (
        f"D {service_s * 1e3:.0f} ms, K {speed_up:.2f}: intra-op is {-below_s * 1e3:.1f} ms faster "
        f"at {low:.1f} requests/s, inter-op {above_s * 1e3:.1f} ms at {high:.1f}"
    )
    holds = below_s < 0 < above_s
    text = "intra-op is better at low rates, inter-op at high ones"
    title = "Mean TTFT, OPT-13B, prompts of 512 tokens"
    plot = Plot("distserve-queueing", title, "requests/s", "seconds", tuple(lines))
    return Evidence(tuple(comparisons), (Statement(text, holds, figures),), (plot,))
