"""The best fleets of the fast search, in the whole simulation: the conductor's core decides, blocks
are cached, fetched and evicted, and transfers share the network."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from ..sim.cluster.simulation import simulate
from ..sim.results.goodput import TARGET_SHARE, highest_rate
from ..sim.results.outcomes import attained_share
from ..traces.scaling import at_rate

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..sim.cluster.simulation import SimulationOptions
    from ..traces.trace import Trace
    from .ratio import Estimate, Fleet

    Tell = Callable[[str, float], None]

# To within which share goodput is found: each step is a whole simulation.
PRECISION = 0.05

# From the rate that is expected, the search goes in steps of so much.
_STEP = 1.15


@dataclass(frozen=True, slots=True)
class Confirmed:
    """A fleet, and its requests per second within the objectives: as the fast search has it, and
    in the whole simulation. `attained`: share of requests at the trace's own rate. None where that
    was not simulated."""

    fleet: Fleet
    estimated: float
    goodput: float | None
    attained: float | None

    @property
    def served(self) -> float:
        """As well as it is known."""
        return self.estimated if self.goodput is None else self.goodput


def options_of(fleet: Fleet, like: SimulationOptions) -> SimulationOptions:
    """The simulation of a fleet."""
    return replace(
        like,
        prefill=fleet.prefills,
        decode=fleet.decodes,
        profile=fleet.prefill.profile.name,
        decode_profile=fleet.decode.profile.name,
        kv_capacity_tokens=fleet.decode.kv_tokens,
        batch_max=fleet.decode.batch_max,
    )


def confirm(
    trace: Trace,
    estimates: Sequence[Estimate],
    like: SimulationOptions,
    *,
    target_share: float = TARGET_SHARE,
    tell: Tell = lambda text, share: None,
) -> list[Confirmed]:
    """The fleets by their goodput in the whole simulation. The search for each begins at its
    estimate, corrected by how far the one before was off. `tell` is told what is simulated, and the
    share of it that is done."""
    found: list[Confirmed] = []
    correction = 1.0
    for one in estimates:
        attained_at = partial(_attained, trace, one.fleet, options_of(one.fleet, like), tell)
        factor = highest_rate(
            attained_at,
            target_share=target_share,
            start=correction * one.goodput / trace.rate,
            precision=PRECISION,
            step=_STEP,
        )
        goodput = factor * trace.rate
        correction = goodput / one.goodput if goodput else correction
        found.append(Confirmed(one.fleet, one.goodput, goodput, attained_at(1.0)))
    return sorted(found, key=lambda one: (-one.served, one.fleet.gpus))


def _attained(
    trace: Trace, fleet: Fleet, options: SimulationOptions, tell: Tell, factor: float
) -> float:
    text = f"{fleet.label} at {factor * trace.rate:.2f} requests/s"
    outcome = simulate(at_rate(trace, factor), options, lambda share: tell(text, share))
    return attained_share(outcome.jobs, options.ttft_s, options.tbt_s) or 0.0
