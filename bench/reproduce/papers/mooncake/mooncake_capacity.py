"""Mooncake's comparison with engines that prefill and decode on the same GPUs (FAST '25, section
5.2, and figure 8): the conversation trace on 16 nodes.

Not published: the rate at which the trace is replayed, how many of Mooncake's nodes prefill, and
the budget of tokens of chunked prefill. Here it is the trace's own rate (others beside it), 8 and
8, and vLLM 0.5.1's default of 512.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ....plots import Line, Plot
from ....sim.instances.engine_options import EngineMode, EngineOptions
from ...evidence import Comparison, Evidence, Statement
from ...registry import reproduction
from ...setups.mooncake_systems import (
    ENGINES,
    MOONCAKE,
    MOONCAKE_CLUSTER,
    NODES,
    SYSTEMS,
    Workload,
    colocated,
    disaggregated,
    served,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from ...registry import Effort, Tell
    from ...setups.mooncake_systems import Served

TTFT_S = 30.0
TBT_S = (0.1, 0.2, 0.3)
# Per cent of the requests that met both, for each TBT; read off a figure.
PUBLISHED_EFFECTIVE = {
    MOONCAKE: (96.6, 99.9, 100.0),
    "vLLM": (16.1, 38.8, 62.8),
    "vLLM, prefix caching": (15.1, 34.3, 56.0),
    "vLLM, chunked prefill": (9.4, 28.8, 55.4),
}
PUBLISHED_GAIN = (498.0, 157.0, 59.0)  # per cent more than the best engine
PUBLISHED_TBT_MS = {MOONCAKE: (74, 92, 114), "vLLM": (244, 562, 1352)}  # p50, p90, p99
# Mean GPU seconds of a prefill, figure 8.
PUBLISHED_PREFILL_S = {
    "conversation": (1.062, 1.661, 1.523, 2.021),
    "synthetic": (0.733, 2.022, 1.896, 2.437),
}
RATES = (1.0, 1.25, 1.5, 1.75)
# Other budgets of chunked prefill, as the default is not what the paper's figures look like.
BUDGETS = (512, 1024, 2048, 4096)
_LARGE_BUDGET = 2048


_BASELINES = """The engines of the baselines do better here than in the paper at the trace's own
rate: their median TBT is 99 ms, at 1.25, 1.5 and 1.75 times the rate 166, 272 and 453 ms, and the
paper's 244. At 1.5 times the rate plain vLLM and prefix caching are near the paper's shares at 200
and 300 ms. With chunks of 512 tokens no gap is long, so the paper's share of chunked prefill cannot
come out; with 2,048 it is near the paper's at that rate."""


_TBT = """Mooncake's TBT is lower here than in the paper (p50 of 31 ms, and 74), and
that is not explained: with 14 of the nodes prefilling it is 46 ms, at 1.75 times the rate 33 ms."""


_FIXED_PART = """What an engine of the baselines needs beside the profile, the part of a chunk
that does not grow with it, is a decode step's (the weights are read once); with the 15 ms that
another fit of this hardware has, chunked prefill takes 2.06 and 2.64 s. Mooncake's figure on the
look-alike is high as the profile is: with the real trace and a cache without limit it has 0.814."""


@reproduction(
    "mooncake-effective-capacity",
    "Requests that meet their objectives: Mooncake and vLLM",
    "Mooncake, FAST '25, section 5.2",
)
def effective_capacity(effort: Effort, tell: Tell) -> Evidence:
    """Effective request capacity, the distributions, and both over the rate."""
    by_rate = {}
    for rate in RATES:
        tell(f"{rate:g} times the rate")
        by_rate[rate] = {name: served(name, Workload("conversation", rate)) for name in SYSTEMS}
    own = by_rate[1.0]
    comparisons = [
        Comparison(f"{name}, TBT ≤ {1e3 * tbt_s:.0f} ms", value, effective(own[name], tbt_s), "%")
        for name, values in PUBLISHED_EFFECTIVE.items()
        for value, tbt_s in zip(values, TBT_S, strict=True)
    ]
    comparisons += [
        Comparison(f"more than the best engine, TBT ≤ {1e3 * tbt_s:.0f} ms", value, ours, "%")
        for value, ours, tbt_s in zip(PUBLISHED_GAIN, gains(own), TBT_S, strict=True)
    ]
    comparisons += [
        Comparison(
            f"{name}, TBT {label}", value, 1e3 * float(np.quantile(own[name].tbt_s, q)), "ms"
        )
        for name, values in PUBLISHED_TBT_MS.items()
        for label, q, value in zip(("p50", "p90", "p99"), (0.5, 0.9, 0.99), values, strict=True)
    ]
    like = _likest(by_rate)
    statements = [
        *_over_rates(by_rate, like),
        *_budgets(by_rate[like], like, tell),
        _splits(tell),
    ]
    plots = (*_distributions(by_rate), _rate_plot(by_rate))
    return Evidence(tuple(comparisons), tuple(statements), plots, (_BASELINES, _TBT))


@reproduction(
    "mooncake-prefill-time", "GPU time of a prefill, by system", "Mooncake, FAST '25, figure 8"
)
def prefill_time(effort: Effort, tell: Tell) -> Evidence:
    """Mean GPU seconds, on the conversation trace and a look-alike of the synthetic one."""
    comparisons = []
    means = {}
    for workload, values in PUBLISHED_PREFILL_S.items():
        seeds = effort.seeds if workload == "synthetic" else effort.seeds[:1]
        shown = workload if workload == "conversation" else "synthetic, a look-alike"
        for name, published in zip(SYSTEMS, values, strict=True):
            tell(f"{workload}, {name}")
            runs = [served(name, Workload(workload, seed=seed)).compute_s for seed in seeds]
            means[workload, name] = float(np.mean([run.mean() for run in runs]))
            comparisons.append(
                Comparison(f"{shown}: {name}", published, means[workload, name], "s")
            )
    order = [MOONCAKE, "vLLM, prefix caching", "vLLM", "vLLM, chunked prefill"]
    ordered = [[means[workload, name] for name in order] for workload in PUBLISHED_PREFILL_S]
    says = "Mooncake takes least, then prefix caching, then plain vLLM, and chunks take most"
    figures = "; ".join(" < ".join(f"{value:.3f}" for value in values) for values in ordered)
    holds = all(values == sorted(values) for values in ordered)
    return Evidence(tuple(comparisons), (Statement(says, holds, figures),), notes=(_FIXED_PART,))


def effective(one: Served, tbt_s: float) -> float:
    """Per cent of the requests."""
    return one.effective(TTFT_S, tbt_s)


def gains(found: Mapping[str, Served]) -> list[float]:
    """By how many per cent more requests meet their objectives than of the best engine, by TBT."""
    more = []
    for tbt_s in TBT_S:
        best = max(effective(found[name], tbt_s) for name in ENGINES)
        more.append(100 * (effective(found[MOONCAKE], tbt_s) / best - 1))
    return more


def _likest(by_rate: Mapping[float, Mapping[str, Served]]) -> float:
    """The rate at which plain vLLM's median TBT is nearest to the paper's."""
    published_s = PUBLISHED_TBT_MS["vLLM"][0] / 1e3
    return min(by_rate, key=lambda rate: abs(np.median(by_rate[rate]["vLLM"].tbt_s) - published_s))


def _over_rates(
    by_rate: Mapping[float, Mapping[str, Served]], like: float
) -> tuple[Statement, ...]:
    """At which rate plain vLLM is as slow as the paper's, and what the others do there."""
    medians_ms = {
        rate: 1e3 * float(np.median(found["vLLM"].tbt_s)) for rate, found in by_rate.items()
    }
    found = by_rate[like]
    more = gains(found)
    worst = min(ENGINES, key=lambda name: effective(found[name], TBT_S[0]))
    return (
        Statement(
            f"plain vLLM's median TBT is nearest to the paper's {PUBLISHED_TBT_MS['vLLM'][0]} ms at"
            " another rate than the trace's own",
            like != 1.0,
            ", ".join(f"{rate:g} ×: {value:.0f} ms" for rate, value in medians_ms.items()),
        ),
        Statement(
            f"at {like:g} × the rate Mooncake serves several times as many as the best engine"
            " within a TBT of 100 ms",
            more[0] > 100,
            f"{_gains(more)}; {'; '.join(f'{name} {_three(one)}' for name, one in found.items())}",
        ),
        Statement(
            f"at {like:g} × the rate chunked prefill is the worst within 100 ms",
            "chunked" in worst,
            f"worst: {worst}",
        ),
    )


def _splits(tell: Tell) -> Statement:
    """Mooncake's nodes, divided otherwise."""
    found = {}
    for prefill in (8, 10, 12):
        tell(f"{prefill} prefill")
        options = replace(MOONCAKE_CLUSTER, prefill=prefill, decode=NODES - prefill)
        found[prefill] = disaggregated(Workload("conversation"), options)
    shares = [effective(one, TBT_S[0]) for one in found.values()]
    return Statement(
        "how many of its nodes prefill matters little",
        max(shares) - min(shares) < 2,
        "; ".join(f"{p} and {NODES - p}: {_three(one)}" for p, one in found.items()),
    )


def _budgets(found: Mapping[str, Served], rate: float, tell: Tell) -> tuple[Statement, ...]:
    """Chunks of other sizes."""
    tell("budgets of chunked prefill")
    workload, name = Workload("conversation", rate), "vLLM, chunked prefill"
    by_budget = {
        budget: colocated(workload, EngineOptions(EngineMode.CHUNKED, batched_tokens=budget))
        for budget in BUDGETS
    }
    more = gains({**found, name: by_budget[_LARGE_BUDGET]})
    published = PUBLISHED_EFFECTIVE[name][1]
    return (
        Statement(
            f"at {rate:g} × the rate chunks of 512 tokens are too good to be the paper's: within"
            f" 200 ms they serve twice its {published}%",
            effective(by_budget[512], TBT_S[1]) > 2 * published,
            "; ".join(f"{budget} tokens: {_three(one)}" for budget, one in by_budget.items()),
        ),
        Statement(
            f"with chunks of {_LARGE_BUDGET} tokens Mooncake serves at least half as many again as"
            " the best engine at each TBT",
            min(more) > 50,
            _gains(more),
        ),
    )


def _gains(more: list[float]) -> str:
    each = ", ".join(f"{gain:+.0f}%" for gain in more)
    return f"{each} at 100, 200, 300 ms"


def _three(one: Served) -> str:
    return "/".join(f"{effective(one, tbt_s):.1f}" for tbt_s in TBT_S) + "%"


def _distributions(by_rate: Mapping[float, Mapping[str, Served]]) -> list[Plot]:
    """Cumulative, at the trace's own rate and at 1.5 times that."""
    plots = []
    for rate in (1.0, 1.5):
        for kind, label in (("ttft", "TTFT"), ("tbt", "TBT, longest tenth of the gaps")):
            lines = tuple(
                Line(name, *_cumulative(one.ttft_s if kind == "ttft" else one.tbt_s))
                for name, one in by_rate[rate].items()
            )
            if kind == "tbt" and rate == 1.0:
                lines += tuple(
                    Line(
                        f"{name}, paper", tuple(v / 1e3 for v in values), (50.0, 90.0, 99.0), "dots"
                    )
                    for name, values in PUBLISHED_TBT_MS.items()
                )
            name, title = f"mooncake-{kind}-{rate:g}x", f"{label}, at {rate:g} × the trace's rate"
            plots.append(Plot(name, title, "seconds", "% of requests", lines, log_x=True))
    return plots


def _cumulative(
    seconds: NDArray[np.float64],
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    shares = np.linspace(0.5, 99.5, 199)
    finite = np.where(np.isfinite(seconds), seconds, 1e6)
    values = np.maximum(np.quantile(finite, shares / 100), 1e-3)
    return tuple(values.tolist()), tuple(shares.tolist())


def _rate_plot(by_rate: Mapping[float, Mapping[str, Served]]) -> Plot:
    rates = tuple(by_rate)
    lines = tuple(
        Line(name, rates, tuple(effective(by_rate[rate][name], TBT_S[0]) for rate in rates))
        for name in SYSTEMS
    )
    return Plot(
        "mooncake-effective-capacity",
        "Requests within a TTFT of 30 s and a TBT of 100 ms",
        "times the trace's rate",
        "% of requests",
        lines,
    )
