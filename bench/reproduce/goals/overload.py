"""Goodput under overload: requests per second that meet both objectives, as more come than a fleet
can serve, with the mode of admission that the conductor comes with.

Three fleets (`setups/fleets.py`) are short of prefill, short of decode, and balanced. The load is
offered as a multiple of what the fleet could serve by the profile; overload is two and three times
that, and the peak is the highest goodput at any lower load. The other modes stand beside it.

Admission by predicted times refuses long prompts first, and more requests are served the more there
are to choose from. So goodput is also counted in tokens, of the prompts and answers that were in
time.

What is promised has to hold as well: the predicted first tokens of those that are admitted, and how
many of these are later than their objective.

Of those who are refused at twice the load, a sample is replayed, each alone: everything else stays
as it was (`sim/cluster/refusals.py`). Most places that a refused request could have had
were somebody else's, so beside those who would have been in time stand those who would have been
without making anybody late who was not. There all is sent at once, as a replay has nobody who
releases.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

from tiffin.conductor.core.settings import Settings
from tiffin.conductor.cost import latency_profiles

from ...plots import Line, Plot
from ...sim.cluster.refusals import replay_refusals
from ...sim.cluster.simulation import simulate
from ...sim.results.outcomes import late_share, ttft_error_p90
from ..evidence import Evidence, Grid
from ..registry import Effort, reproduction
from ..setups.fleets import FLEETS, Fleet, goodput, offered, token_goodput, workload
from ..setups.judged import Cell, judged
from .first_tokens import ERROR_P90

if TYPE_CHECKING:
    from ...sim.cluster.refusals import Refusals
    from ..evidence import Goal
    from ..registry import Tell

LATE_SHARE = Settings().admission.late_share
MODE = Settings().admission.mode
OTHERS = tuple(mode for mode in ("off", "baseline", "early", "predictive") if mode != MODE)
LOADS = (0.75, 1.0, 1.5, 2.0, 3.0)
OVERLOADS = (2.0, 3.0)
LEAST_OF_PEAK = 0.92
WRONGLY_REFUSED = 0.05
# Replayed refusals of each fleet: a hundred in all, or each.
REPLAYED, REPLAYED_FULL = 34, 100


class Goodput(NamedTuple):
    """Per second, of what was in time; of those admitted, the share whose first token was late, and
    the p90 of the error of its prediction."""

    requests: float
    tokens: float
    late_share: float = 0.0
    error_p90: float = 0.0


UNITS = Goodput._fields[:2]


_LONGEST = """What is refused for its predicted TTFT is a long prompt first, so goodput in requests
rises where that in tokens stays. "baseline" refuses after the prefill: where only prefill is short
it serves as much or more, as it keeps no room for KV, and where decode is, prefills are wasted and
decodes too full. Balanced and decode-bound fleets run out of room for KV before steps are too long:
there "early" and "predictive" differ by less than two seeds do."""

_IN_STEAD = """Who is refused at a full fleet is not one who could not be served, but one in whose
stead another is. Each alone, with all others as they were, most would be in time where room for KV
is short: what is kept free of it, for predictions that err, is enough for one more. The share would
be 5% only if whoever is admitted were late as soon as anybody is added, and then any error would
make them late; where prefill is short, it is nearer to that, as what is refused there would mostly
be late itself. What refusing costs is what nobody else gets: those who would have been in time and
made nobody late."""

Curve = dict[float, Goodput]  # by load


def _curve(
    fleet: Fleet, mode: str, loads: tuple[float, ...], seeds: tuple[int, ...], tell: Tell
) -> Curve:
    """Goodput over the load, the mean over the seeds."""
    found: Curve = {}
    for load in loads:
        each = []
        for seed in seeds:
            tell(f"{fleet.name}, {mode}, {load:g} ×, seed {seed}")
            trace, options = workload(seed), fleet.options(mode, seed)
            jobs = simulate(offered(trace, load * fleet.rate(trace)), options).jobs
            rates = goodput(jobs, options), token_goodput(jobs, options)
            each.append(Goodput(*rates, late_share(jobs, options), ttft_error_p90(jobs)))
        found[load] = Goodput(*(fmean(values) for values in zip(*each, strict=True)))
    return found


@reproduction(
    "goals-overload",
    "Goals: goodput under overload",
    "no paper; Mooncake's modes of rejection (arXiv 2407.00079, section 7)",
)
def overloads(effort: Effort, tell: Tell) -> Evidence:
    """All fleets and modes."""
    seeds = effort.costly_seeds
    others = OVERLOADS if effort.is_full else OVERLOADS[:1]
    found = {
        (fleet.name, mode): _curve(fleet, mode, LOADS if mode == MODE else others, seeds, tell)
        for fleet in FLEETS
        for mode in (MODE, *OTHERS)
    }
    refused = _refusals(effort, tell)
    what = f"goodput at 2 and 3 times the load ≥ {LEAST_OF_PEAK:g} of its peak below"
    goals = (
        *(
            judged(
                f"{what}, {unit} per second, admission {MODE}",
                [
                    _kept(fleet.name, found[fleet.name, MODE], load, unit)
                    for fleet in FLEETS
                    for load in OVERLOADS
                ],
            )
            for unit in UNITS
        ),
        judged(
            f"goodput at twice the load is highest with the default, admission {MODE}",
            [_best(fleet.name, found) for fleet in FLEETS],
        ),
        *_promise_goals(found),
        *_refusal_goals(refused),
    )
    grids = (_grid(found), _refusal_grid(refused))
    return Evidence(
        goals=goals,
        grids=grids,
        plots=(_plot(found),),
        notes=(_LONGEST, _IN_STEAD),
        settings=FLEETS[0].options(MODE).shown,
    )


def _kept(fleet: str, curve: Curve, load: float, unit: str) -> Cell:
    rates: dict[float, float] = {at: getattr(one, unit) for at, one in curve.items() if at <= load}
    peak, kept = max(rates.values()), rates[load]
    form = ",.0f" if unit == "tokens" else ".2f"
    figure = f"{kept:{form}}/s of {peak:{form}}/s, {kept / peak:.2f}"
    return Cell(f"{fleet}, {load:g} ×", LEAST_OF_PEAK * peak / max(kept, 1e-9), figure)


def _best(fleet: str, found: dict[tuple[str, str], Curve]) -> Cell:
    load = OVERLOADS[0]
    ours = found[fleet, MODE][load].requests
    other = max(OTHERS, key=lambda mode: found[fleet, mode][load])
    theirs = found[fleet, other][load].requests
    return Cell(fleet, theirs / max(ours, 1e-9), f"{ours:.2f}/s; {other} {theirs:.2f}/s")


def _promise_goals(found: dict[tuple[str, str], Curve]) -> tuple[Goal, ...]:
    """Of those who are admitted at twice the load and more."""
    places = [(fleet.name, load) for fleet in FLEETS for load in OVERLOADS]
    late, errors = list[Cell](), list[Cell]()
    for fleet, load in places:
        one, where = found[fleet, MODE][load], f"{fleet}, {load:g} ×"
        late.append(Cell(where, one.late_share / LATE_SHARE, f"{one.late_share:.1%}"))
        errors.append(Cell(where, one.error_p90 / ERROR_P90, f"{one.error_p90:.1%}"))
    return (
        judged(f"admitted at 2 and 3 times the load, and late ≤ {LATE_SHARE:.0%}", late),
        judged(f"their predicted TTFT, p90 of the error ≤ {ERROR_P90:.0%}", errors),
    )


def _refusals(effort: Effort, tell: Tell) -> dict[str, Refusals]:
    """By fleet, some of those who are refused at twice the load, replayed."""
    sample = REPLAYED_FULL if effort.is_full else REPLAYED
    found = {}
    for fleet in FLEETS:
        tell(f"{fleet.name}, refusals")
        trace = workload(effort.seeds[0])
        faster = offered(trace, OVERLOADS[0] * fleet.rate(trace))
        options = replace(fleet.options(MODE, effort.seeds[0]), order="arrival")
        found[fleet.name] = replay_refusals(faster, options, latency_profiles.load, sample)
    return found


def _refusal_goals(found: dict[str, Refusals]) -> tuple[Goal, ...]:
    """Of those who are refused, who would have been in time."""
    alone, harmless = list[Cell](), list[Cell]()
    for fleet, one in found.items():
        of = f"of {len(one.replayed)} of {one.refused:,} refused"
        for cells, share in ((alone, one.met_share), (harmless, one.wrong_share)):
            cells.append(Cell(fleet, share / WRONGLY_REFUSED, f"{share:.0%} {of}"))
    most = f"≤ {WRONGLY_REFUSED:.0%}"
    return (
        judged(f"refused at twice the load, and would have been in time alone {most}", alone),
        judged(f"the same, without making others late {most}", harmless),
    )


def _refusal_grid(found: dict[str, Refusals]) -> Grid:
    """What each of them would have cost those who were served in its stead."""
    rows = []
    for fleet, one in found.items():
        broken = [replayed.broken for replayed in one.replayed if replayed.met]
        mean = f"{fmean(broken):.1f}" if broken else ""
        shares = (f"{share:.0%}" for share in (one.met_share, one.wrong_share))
        rows.append((fleet, f"{one.refused:,}", *shares, mean))
    columns = ("fleet", "refused", "in time alone", "and nobody late for it", "made late by one")
    return Grid("Those who are refused at twice the load, each taken alone", columns, tuple(rows))


def _grid(found: dict[tuple[str, str], Curve]) -> Grid:
    rows = tuple(
        (f"{fleet}, {mode}", *(_shown(curve[load]) if load in curve else "" for load in LOADS))
        for (fleet, mode), curve in found.items()
    )
    columns = ("fleet and mode", *(f"{load:g} ×" for load in LOADS))
    title = "Goodput by the load that is offered: requests/s, and thousands of tokens/s"
    return Grid(title, columns, rows)


def _shown(one: Goodput) -> str:
    return f"{one.requests:.2f}, {one.tokens / 1e3:.0f}"


def _plot(found: dict[tuple[str, str], Curve]) -> Plot:
    lines = tuple(
        Line(f"{fleet}, {mode}", tuple(curve), tuple(one.requests for one in curve.values()))
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
