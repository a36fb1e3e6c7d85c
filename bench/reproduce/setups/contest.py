"""Policies on the same traces: each of several seeds gives a trace, and all policies replay it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from math import sqrt
from statistics import fmean, stdev
from typing import TYPE_CHECKING

from ...sim.cluster.oracle import POLICY as ORACLE
from ...sim.cluster.oracle import Oracle
from ...sim.cluster.simulation import simulate
from ...sim.results.goodput import highest_rate
from ...sim.results.outcomes import attained_share, summarise
from ...traces.scaling import at_rate, followed
from ..evidence import Grid, Statement

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ...sim.cluster.simulation import SimulationOptions, SimulationOutcome
    from ...sim.results.outcomes import Summary
    from ...traces.trace import Trace

OURS = "kvcache_centric"
# The same, but all is sent to engines as soon as it was decided.
AT_ONCE = f"{OURS}, sent at once"
PEERS = ("algorithm_1", "kv_cost", "prefix_aware", "preble", "least_loaded", "random")
ALL = (ORACLE, OURS, *PEERS)
# By name, what a second of computing counts for beside one of waiting.
ORACLES = {ORACLE: 0.0, "oracle, work x 4": 4.0}

# Two means that differ by less count as equal.
SAME_SHARE = 0.01
NEAR_SHARE = 0.10

# Quantiles of Student's distribution for 95% on both sides, by degrees of freedom.
_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean, and half of its 95% confidence interval; None with one value."""

    mean: float
    half: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Interval:
        """Of values that chance has in them."""
        if len(values) < 2:
            return cls(values[0], None)
        quantile = _STUDENT[min(len(values) - 1, len(_STUDENT)) - 1]
        return cls(fmean(values), quantile * stdev(values) / sqrt(len(values)))

    def shown(self, form: str) -> str:
        """As in "1.49 ± 0.03"."""
        half = "" if self.half is None else f" ± {format(self.half, form)}"
        return format(self.mean, form) + half


@dataclass(frozen=True, slots=True)
class Scenario:
    """`trace` gives that of a seed."""

    title: str
    trace: Callable[[int], Trace]
    options: SimulationOptions


Results = dict[str, list["Summary"]]  # by policy, in order of the seeds


def replay(trace: Trace, options: SimulationOptions, policy: str) -> Summary:
    """The summary of one policy, or of one of the oracles, on a trace. Ours is held back as the
    options say; what it is compared with is sent at once, as others do."""
    return replace(summarise(trace, _simulated(trace, options, policy)), policy=policy)


def _simulated(trace: Trace, options: SimulationOptions, policy: str) -> SimulationOutcome:
    if policy == OURS:
        return simulate(trace, replace(options, policy=policy))
    at_once = replace(options, order="arrival")
    if policy not in ORACLES:
        return simulate(trace, replace(at_once, policy=OURS if policy == AT_ONCE else policy))
    scheduler = partial(Oracle, work_weight=ORACLES[policy])
    return simulate(trace, at_once, scheduler=scheduler)


def contest(
    scenario: Scenario,
    seeds: Sequence[int],
    tell: Callable[[str], None],
    policies: Sequence[str] = ALL,
) -> Results:
    """All policies on the traces of all seeds."""
    found: Results = {policy: [] for policy in policies}
    for seed in seeds:
        trace = scenario.trace(seed)
        for policy in policies:
            tell(f"{scenario.title}, seed {seed}, {policy}")
            found[policy].append(replay(trace, replace(scenario.options, seed=seed), policy))
    return found


def goodput(
    trace: Trace, options: SimulationOptions, policy: str, warm_up: Trace | None = None
) -> float:
    """Requests per second that the policy can serve with its objectives met, by a trace that is
    replayed faster or slower. The requests of `warm_up` come first, at their own rate, and do not
    count."""

    def attained(factor: float) -> float:
        whole = at_rate(trace, factor)
        if warm_up is not None:
            whole = followed(warm_up, whole)
        judged = _simulated(whole, options, policy).jobs[-len(trace.requests) :]
        share = attained_share(judged, options.ttft_s, options.tbt_s)
        assert share is not None, "there are objectives"
        return share

    return highest_rate(attained, start=2.0, precision=0.05) * trace.rate


def mean_ttft_s(results: Results) -> dict[str, Interval]:
    """By policy."""
    return {
        policy: Interval.of([one.ttft_s.mean for one in found]) for policy, found in results.items()
    }


def grid(title: str, results: Results) -> Grid:
    """A row for each policy, the lowest mean TTFT first."""
    means = mean_ttft_s(results)
    columns = (
        *("policy", "TTFT mean, s", "TTFT p99, s", "found", "GPU time, s", "fetched, TB"),
        *("second token after, s", "p99"),
    )
    rows = []
    for policy in sorted(results, key=lambda policy: means[policy].mean):
        figure = partial(_figure, results[policy])
        rows.append(
            (
                policy,
                means[policy].shown(".2f"),
                figure(lambda one: one.ttft_s.p99).shown(".1f"),
                figure(lambda one: one.hit_share * 100).shown(".1f") + "%",
                figure(lambda one: one.compute_s).shown(".3f"),
                figure(lambda one: one.usage.fetched_bytes / 1e12).shown(".2f"),
                figure(lambda one: one.second_s.mean).shown(".2f"),
                figure(lambda one: one.second_s.p99).shown(".2f"),
            )
        )
    return Grid(title, columns, tuple(rows))


def _figure(found: Sequence[Summary], of: Callable[[Summary], float]) -> Interval:
    return Interval.of([of(one) for one in found])


def statements(title: str, means: Mapping[str, Interval]) -> list[Statement]:
    """Whether any peer is faster than ours, and whether the oracle is far."""
    mine, mark = means[OURS].mean, means[ORACLE].mean
    faster = [peer for peer in PEERS if means[peer].mean < mine * (1 - SAME_SHARE)]
    best = min(PEERS, key=lambda peer: means[peer].mean)
    beside = f"{mine:.2f} s; the best peer, {best}, {means[best].mean:.2f} s"
    far = f"{mine:.2f} s; the oracle {mark:.2f} s ({mine / mark - 1:+.0%})"
    near = mine <= mark * (1 + NEAR_SHARE)
    return [
        Statement(f"{title}: no peer is faster than {OURS}", not faster, beside),
        Statement(f"{title}: {OURS} is near the oracle", near, far),
    ]
