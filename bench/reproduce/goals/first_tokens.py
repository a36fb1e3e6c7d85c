"""Time to the first token near saturation, beside exact Algorithm 1 and beside schedulers that know
everything.

`default` is the policy that the conductor comes with; all settings are its own. A trace is
replayed at shares of the rate at which Algorithm 1 saturates: there its GPUs would prefill from the
first arrival to the last (`setups/saturation.py`). Above it queues grow as long as a trace lasts,
so who needs less GPU time gains most, and below it who waits less.

Of the traces, the conversation trace and those like it were there when the policies were written;
the look-alike of the tool and agent trace, whose prompts share more, and Azure's code trace, whose
prompts share nothing, were not looked at for them. It is the first ten minutes of each, and
half an hour with the full effort.

Ours is held back until its turn, as the conductor does by default; beside it stands the same policy
with all sent at once, as Algorithm 1 and the oracles send. What a prompt's KV needs to be handed
over is not in TTFT but in the wait for the second token: it is compared with a hand-over over idle
cards and a step of an idle instance.

`oracle` is greedy with exact knowledge. The best oracle is the best, afterwards and for each
figure, of that one and of one that pays for the GPU seconds that a prompt takes as well (`oracle,
work x 4`: each counts as four of waiting): no scheduler knows ahead which it will be.
Two times that differ by less than 1% count as equal.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from statistics import fmean
from typing import TYPE_CHECKING

from tiffin.conductor.core.settings import Settings

from ...plots import Line, Plot
from ...sim.cluster.options import SHIPPED
from ...sim.cluster.oracle import POLICY as ORACLE
from ...traces.look_alike import look_alike
from ...traces.scaling import at_rate, window
from ..evidence import Evidence
from ..registry import Effort, reproduction
from ..setups.contest import AT_ONCE, ORACLES, SAME_SHARE, Scenario, contest, grid
from ..setups.inputs import azure_code, conversation
from ..setups.judged import Cell, judged
from ..setups.saturation import saturating_factor
from ..setups.toolagent_look_alike import toolagent

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ...sim.results.outcomes import Quantiles, Summary
    from ...traces.trace import Trace
    from ..evidence import Goal, Grid
    from ..registry import Tell
    from ..setups.contest import Results

DEFAULT = Settings().policy.name
ALGORITHM_1 = "algorithm_1"
POLICIES = tuple(dict.fromkeys((DEFAULT, AT_ONCE, ALGORITHM_1, *ORACLES)))

# Shares of the rate at which Algorithm 1 saturates.
NEAR = (0.9, 1.1)
HALF = 0.5
# Those between are for the plot: one seed.
BETWEEN = (0.7, 1.0)

_ORDER = """What placement can gain below saturation is small: in order of arrival, the mean wait at
busy instances hardly depends on who waits at which, and GPU time is least when all is found that
the ideal cache finds. There the default is ahead of the greedy oracle, as it counts the delay of
those who come after a prompt. So 0.8 times Algorithm 1's is reached where that one computes more
than it has to. Another order does not reach it everywhere: the shortest prompt first halves the
median and doubles the p99."""
_LATE = """The conductor hears 0.1 s late what has happened, and is told how late. If it took the
next prefill to begin when it hears of the end of the one before, every wait behind would be 0.1 s
too long: a bias of 4.6% where prompts are short (tool & agent, 0.9)."""

GAIN = 0.8  # of Algorithm 1's
NEAR_BEST = 1.02  # of the best oracle's
NEAR_GREEDY = 1.05  # of the greedy oracle's
BIAS, ERROR_P90 = 0.03, 0.20
HELD = 1.05  # times what it is if all is sent at once
SECOND = 2.0  # times what it takes alone
HIT_POINTS = 1.0

# Of a trace, with the default effort and with the full one.
SHORT_S, LONG_S = 600.0, 1800.0

_SOURCE = "no paper; Mooncake's Algorithm 1 and schedulers with exact knowledge"


@cache
def _trace(name: str, seed: int, lasts_s: float) -> Trace:
    return window(_TRACES[name](seed), 0.0, lasts_s)


def lasts_s(effort: Effort) -> float:
    """How long a trace is, in its own time."""
    return LONG_S if effort.is_full else SHORT_S


_TRACES: dict[str, Callable[[int], Trace]] = {
    "conversation": lambda seed: conversation(),
    "like conversation": lambda seed: look_alike(conversation(), seed),
    "tool & agent": toolagent,
    "Azure code": lambda seed: azure_code(),
}


@cache
def _factor(name: str, seed: int, lasts_s: float) -> float:
    options = replace(SHIPPED, order="arrival", policy=ALGORITHM_1, seed=seed)
    return saturating_factor(_trace(name, seed, lasts_s), options)


def _seeds(name: str, effort: Effort) -> tuple[int, ...]:
    """Of a trace that is there once, chance has no part but in ties."""
    if name == "like conversation" or (name == "tool & agent" and effort.is_full):
        return effort.seeds
    return effort.seeds[:1]


def measured(name: str, share: float, effort: Effort, tell: Tell) -> Results:
    """All policies on a trace, at a share of the rate at which Algorithm 1 saturates."""
    part = lasts_s(effort)

    def trace(seed: int) -> Trace:
        return at_rate(_trace(name, seed, part), share * _factor(name, seed, part))

    scenario = Scenario(f"{name}, {share:g} of saturation", trace, SHIPPED)
    return contest(scenario, _seeds(name, effort), tell, POLICIES)


@reproduction("goals-first-tokens", "Goals: first tokens of conversations", _SOURCE)
def conversations(effort: Effort, tell: Tell) -> Evidence:
    """On the trace that everybody knows, and on those like it."""
    found = _found(("conversation", "like conversation"), effort, tell)
    plot = _plot(found, effort, tell)
    goals, notes = _goals("conversations", found), (_ORDER, _LATE)
    return Evidence(
        goals=goals, grids=_grids(found), plots=(plot,), notes=notes, settings=SHIPPED.shown
    )


@reproduction("goals-first-tokens-unseen", "Goals: first tokens of other traces", _SOURCE)
def unseen(effort: Effort, tell: Tell) -> Evidence:
    """On traces that no policy was written with."""
    found = _found(("tool & agent", "Azure code"), effort, tell)
    goals, notes = _goals("other traces", found), (_ORDER, _LATE)
    return Evidence(goals=goals, grids=_grids(found), notes=notes, settings=SHIPPED.shown)


# -- what is judged --------------------------------------------------------------------------------

Found = dict[tuple[str, float], "Results"]  # by trace and share of saturation


def _found(names: Sequence[str], effort: Effort, tell: Tell) -> Found:
    return {
        (name, share): measured(name, share, effort, tell)
        for name in names
        for share in (HALF, *NEAR)
    }


def _goals(traces: str, found: Found) -> tuple[Goal, ...]:
    near = {place: results for place, results in found.items() if place[1] in NEAR}
    half = {place: results for place, results in found.items() if place[1] == HALF}
    gain = f"≤ {GAIN:g} × Algorithm 1's, or ≤ {NEAR_BEST:g} × the best oracle's"
    return (
        *(
            judged(
                f"{traces}: {figure} TTFT at {' and '.join(f'{s:g}' for s in NEAR)} of saturation "
                + gain,
                [_gains(place, results, figure) for place, results in near.items()],
            )
            for figure in ("mean", "p99")
        ),
        *(
            judged(
                f"{traces}: {figure} TTFT at {HALF:g} of saturation ≤ Algorithm 1's",
                [
                    _over(place, results, figure, ALGORITHM_1, 1 + SAME_SHARE)
                    for place, results in half.items()
                ],
            )
            for figure in ("mean", "p99")
        ),
        judged(
            f"{traces}: mean TTFT ≤ {NEAR_GREEDY:g} × the greedy oracle's, at all rates",
            [
                _over(place, results, "mean", ORACLE, NEAR_GREEDY)
                for place, results in found.items()
            ],
        ),
        judged(
            f"{traces}: predicted TTFT, bias near saturation ≤ {BIAS:.0%}",
            [_bias(place, results) for place, results in near.items()],
        ),
        judged(
            f"{traces}: predicted TTFT, p90 of the error near saturation ≤ {ERROR_P90:.0%}",
            [_error(place, results) for place, results in near.items()],
        ),
        judged(
            f"{traces}: hit rate within {HIT_POINTS:g} point of one ideal LRU cache of all memory",
            [_hits(place, results) for place, results in found.items()],
        ),
        judged(
            f"{traces}: p99 TTFT at {NEAR[-1]:g} of saturation ≤ {HELD:g} × that with all sent at "
            "once",
            [
                _over(place, results, "p99", AT_ONCE, HELD)
                for place, results in near.items()
                if place[1] == NEAR[-1]
            ],
        ),
        judged(
            f"{traces}: mean wait from the first to the second token near saturation ≤ "
            f"{SECOND:g} × that on idle cards",
            [second_token(_where(place), results[DEFAULT]) for place, results in near.items()],
        ),
    )


def _where(place: tuple[str, float]) -> str:
    return f"{place[0]}, {place[1]:g}"


def _ttft_s(one: Summary, figure: str) -> float:
    of: Quantiles = one.ttft_s
    return of.mean if figure == "mean" else of.p99


def _mean_s(results: Results, policy: str, figure: str) -> float:
    return fmean(_ttft_s(one, figure) for one in results[policy])


def _gains(place: tuple[str, float], results: Results, figure: str) -> Cell:
    ours, theirs = (_mean_s(results, policy, figure) for policy in (DEFAULT, ALGORITHM_1))
    best = min(_mean_s(results, oracle, figure) for oracle in ORACLES)
    excess = min(ours / theirs / GAIN, ours / best / NEAR_BEST)
    text = f"{ours:.2f} s, {ours / theirs:.2f} × Algorithm 1's, {ours / best:.2f} × the best's"
    return Cell(_where(place), excess, text)


def _over(place: tuple[str, float], results: Results, figure: str, mark: str, most: float) -> Cell:
    ours, theirs = (_mean_s(results, policy, figure) for policy in (DEFAULT, mark))
    text = f"{ours:.2f} s, {ours / theirs:.3f} × {theirs:.2f} s"
    return Cell(_where(place), ours / theirs / most, text)


def _bias(place: tuple[str, float], results: Results) -> Cell:
    bias = fmean(one.ttft_bias for one in results[DEFAULT])
    return Cell(_where(place), abs(bias) / BIAS, f"{bias:+.1%}")


def _error(place: tuple[str, float], results: Results) -> Cell:
    error = fmean(one.ttft_error_p90 for one in results[DEFAULT])
    return Cell(_where(place), error / ERROR_P90, f"{error:.1%}")


def second_token(where: str, found: Sequence[Summary]) -> Cell:
    """Its wait after the first one, beside that alone."""
    wait_s = fmean(one.second_s.mean for one in found)
    alone_s = fmean(one.second_alone_s for one in found)
    text = f"{wait_s:.2f} s, {wait_s / alone_s:.2f} × {alone_s:.2f} s"
    return Cell(where, wait_s / alone_s / SECOND, text)


def _hits(place: tuple[str, float], results: Results) -> Cell:
    """The ideal cache loses nothing to time: more than it is possible, as eviction differs."""
    ours = 100 * fmean(one.hit_share for one in results[DEFAULT])
    ideal = 100 * fmean(one.ideal_hit_share for one in results[DEFAULT])
    return Cell(_where(place), (ideal - ours) / HIT_POINTS, f"{ours:.1f}% beside {ideal:.1f}%")


def _grids(found: Found) -> tuple[Grid, ...]:
    return tuple(
        grid(f"{name}, {share:g} of saturation", results)
        for (name, share), results in found.items()
    )


def _plot(found: Found, effort: Effort, tell: Tell) -> Plot:
    """Mean TTFT over the rate, on the conversation trace."""
    name = "conversation"
    by_share = {share: results for (where, share), results in found.items() if where == name}
    by_share |= {share: measured(name, share, effort, tell) for share in BETWEEN}
    shares = tuple(sorted(by_share))
    lines = tuple(
        Line(
            policy,
            shares,
            tuple(_mean_s(by_share[share], policy, "mean") for share in shares),
            "dots" if policy in ORACLES else "line",
        )
        for policy in POLICIES
    )
    return Plot(
        "goals-first-tokens",
        "The conversation trace near saturation, 8 and 8 instances",
        "of the rate at which Algorithm 1 saturates",
        "mean TTFT, s",
        lines,
        log_y=True,
    )
