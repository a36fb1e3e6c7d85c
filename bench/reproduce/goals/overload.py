"""Goodput under overload: requests per second that meet both objectives, as more come than a fleet
can serve, with the mode of admission that the conductor comes with.

Three fleets (`setups/fleets.py`) are short of prefill, short of decode, and balanced. The load is
offered as a multiple of what the fleet could serve by the profile; overload is two and three times
that, and the peak is the highest goodput at any load. The other modes stand beside it.
"""

from __future__ import annotations

from statistics import fmean
from typing import TYPE_CHECKING

from tiffin.conductor.core.settings import Settings

from ...plots import Line, Plot
from ...sim.cluster.simulation import simulate
from ..evidence import Evidence, Grid
from ..registry import Effort, reproduction
from ..setups.fleets import FLEETS, Fleet, goodput, offered, workload
from ..setups.judged import Cell, judged

if TYPE_CHECKING:
    from ..registry import Tell

MODE = Settings().admission.mode
OTHERS = tuple(mode for mode in ("off", "baseline", "early", "predictive") if mode != MODE)
LOADS = (0.75, 1.0, 1.5, 2.0, 3.0)
OVERLOADS = (2.0, 3.0)
LEAST_OF_PEAK = 0.92

Curve = dict[float, float]  # by load, requests per second


def _curve(
    fleet: Fleet, mode: str, loads: tuple[float, ...], seeds: tuple[int, ...], tell: Tell
) -> Curve:
    """Goodput over the load, the mean over the seeds."""
    found: Curve = {}
    for load in loads:
        rates = []
        for seed in seeds:
            tell(f"{fleet.name}, {mode}, {load:g} ×, seed {seed}")
            trace = workload(seed)
            options = fleet.options(mode, seed)
            outcome = simulate(offered(trace, load * fleet.rate(trace)), options)
            rates.append(goodput(outcome.jobs, options))
        found[load] = fmean(rates)
    return found


@reproduction(
    "goals-overload",
    "Goals: goodput under overload",
    "no paper; Mooncake's modes of rejection (arXiv 2407.00079, section 7)",
)
def overloads(effort: Effort, tell: Tell) -> Evidence:
    """All fleets and modes."""
    seeds = effort.seeds if effort.is_full else effort.seeds[:1]
    others = LOADS if effort.is_full else OVERLOADS[:1]
    found = {
        (fleet.name, mode): _curve(fleet, mode, LOADS if mode == MODE else others, seeds, tell)
        for fleet in FLEETS
        for mode in (MODE, *OTHERS)
    }
    goals = (
        judged(
            f"goodput at 2 and 3 times the load ≥ {LEAST_OF_PEAK:g} of its peak, admission {MODE}",
            [
                _kept(fleet.name, found[fleet.name, MODE], load)
                for fleet in FLEETS
                for load in OVERLOADS
            ],
        ),
        judged(
            f"goodput at twice the load is highest with the default, admission {MODE}",
            [_best(fleet.name, found) for fleet in FLEETS],
        ),
    )
    return Evidence(goals=goals, grids=(_grid(found),), plots=(_plot(found),))


def _kept(fleet: str, curve: Curve, load: float) -> Cell:
    peak, kept = max(curve.values()), curve[load]
    figure = f"{kept:.2f}/s of {peak:.2f}/s, {kept / peak:.2f}"
    return Cell(f"{fleet}, {load:g} ×", LEAST_OF_PEAK * peak / max(kept, 1e-9), figure)


def _best(fleet: str, found: dict[tuple[str, str], Curve]) -> Cell:
    load = OVERLOADS[0]
    ours = found[fleet, MODE][load]
    other = max(OTHERS, key=lambda mode: found[fleet, mode][load])
    theirs = found[fleet, other][load]
    return Cell(fleet, theirs / max(ours, 1e-9), f"{ours:.2f}/s; {other} {theirs:.2f}/s")


def _grid(found: dict[tuple[str, str], Curve]) -> Grid:
    rows = tuple(
        (
            f"{fleet}, {mode}",
            *(f"{curve[load]:.2f}" if load in curve else "" for load in LOADS),
        )
        for (fleet, mode), curve in found.items()
    )
    columns = ("fleet and mode", *(f"{load:g} ×" for load in LOADS))
    return Grid("Goodput, requests/s, by the load that is offered", columns, rows)


def _plot(found: dict[tuple[str, str], Curve]) -> Plot:
    lines = tuple(
        Line(f"{fleet}, {mode}", tuple(curve), tuple(curve.values()))
        for (fleet, mode), curve in found.items()
        if mode == MODE
    )
    return Plot(
        "goals-overload",
        "Goodput under overload",
        "load, × what the fleet could serve",
        "requests/s that met both objectives",
        lines,
    )
