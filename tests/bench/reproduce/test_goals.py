"""Goals can say no: each is judged by its worst place, and stands in the tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tiffin.bench.reproduce import registry
from tiffin.bench.reproduce.evidence import Evidence, Goal
from tiffin.bench.reproduce.goals import first_tokens, goodput, networks, overload
from tiffin.bench.reproduce.goals.first_tokens import ALGORITHM_1, DEFAULT, HALF, NEAR, POLICIES
from tiffin.bench.reproduce.goals.overload import Goodput
from tiffin.bench.reproduce.registry import Effort, Reproduction, named
from tiffin.bench.reproduce.report import Finding, goal_table, html_page, markdown
from tiffin.bench.reproduce.setups.contest import ORACLES
from tiffin.bench.reproduce.setups.judged import Cell, judged
from tiffin.bench.reproduce.setups.saturation import saturating_factor
from tiffin.bench.sim.cluster.oracle import POLICY as ORACLE
from tiffin.bench.sim.cluster.refusals import Refusals, ReplayedRefusal
from tiffin.bench.sim.cluster.simulation import SimulationOptions, SimulationOutcome, simulate
from tiffin.bench.sim.results.outcomes import Quantiles, Summary
from tiffin.bench.sim.results.usage import Usage
from tiffin.bench.traces.generator import generate
from tiffin.bench.traces.scaling import at_rate
from tiffin.kvstore.errors import InvalidInput

if TYPE_CHECKING:
    from tiffin.bench.reproduce.setups.contest import Results
    from tiffin.bench.traces.trace import Trace

EFFORT = Effort(seeds=(0,))


def told(text: str) -> None:
    pass


# -- judging ---------------------------------------------------------------------------------------


def test_the_worst_place_decides() -> None:
    cells = [Cell("here", 0.7, "7"), Cell("there", 1.1, "11"), Cell("elsewhere", 1.0, "10")]
    goal = judged("ten at most", cells)
    assert goal == Goal("ten at most", "2 of 3; the worst: 11 (there)", False)
    assert judged("ten at most", cells[::2]).reached
    assert judged("ten at most", cells[:1]).figure == "7 (here)"


def summary(
    mean_s: float,
    p99_s: float = 10.0,
    bias: float = 0.02,
    error: float = 0.1,
    hits: float = 0.40,
    second_s: float = 0.5,
) -> Summary:
    times = Quantiles(mean_s, mean_s, mean_s, p99_s)
    return Summary(
        *("", 10, {}, times, times, 1.0, hits, 0.405),
        ttft_bias=bias,
        ttft_error_p90=error,
        moved_bytes=0,
        usage=Usage(0, 0, 0, {}, 1.0),
        attained=None,
        span_s=100.0,
        second_s=Quantiles(second_s, second_s, second_s, second_s),
        second_alone_s=0.25,
    )


def results(ours: Summary, algorithm_1_s: float, oracle_s: float, best_s: float) -> Results:
    found = {policy: [summary(best_s)] for policy in POLICIES}
    return {
        **found,
        ALGORITHM_1: [summary(algorithm_1_s)],
        ORACLE: [summary(oracle_s)],
        DEFAULT: [ours],
    }


def reached(ours: Summary, algorithm_1_s: float, oracle_s: float, best_s: float) -> list[bool]:
    found = {
        ("a trace", share): results(ours, algorithm_1_s, oracle_s, best_s)
        for share in (HALF, *NEAR)
    }
    return [goal.reached for goal in first_tokens._goals("all", found)]


def test_all_goals_of_first_tokens_are_reached_by_one_who_is_good() -> None:
    assert reached(summary(4.0), 5.0, 4.0, 3.0) == [True] * 10, "0.8 of Algorithm 1's"
    assert reached(summary(5.0), 5.0, 5.0, 4.95) == [True] * 10, "near the best oracle"


@pytest.mark.parametrize(
    ("ours", "missed"),
    [
        (summary(4.5), [0, 4]),  # neither 0.8 of Algorithm 1's nor near an oracle
        (summary(5.1), [0, 2, 4]),
        (summary(4.0, p99_s=10.3), [1, 3]),
        (summary(4.0, p99_s=10.6), [1, 3, 8]),
        (summary(4.0, bias=-0.04), [5]),
        (summary(4.0, error=0.21), [6]),
        (summary(4.0, hits=0.39), [7]),
        (summary(4.0, second_s=0.51), [9]),
    ],
)
def test_each_goal_is_missed_alone(ours: Summary, missed: list[int]) -> None:
    found = reached(ours, 5.0, 4.0, 3.0)
    assert [number for number, holds in enumerate(found) if not holds] == missed


# -- measuring -------------------------------------------------------------------------------------


def small(seed: int) -> Trace:
    return generate("multi-turn", 30, seed)


def test_at_saturation_gpus_prefill_all_the_time() -> None:
    options, some = SimulationOptions(prefill=2, policy=ALGORITHM_1), generate("multi-turn", 120, 0)
    trace = at_rate(some, saturating_factor(some, options))
    busy_s = sum(job.compute_s for job in simulate(trace, options).jobs)
    assert busy_s / options.prefill == pytest.approx(trace.span_s, rel=0.05)


def test_a_network_is_asked_for_half_of_what_it_carries_at_most() -> None:
    trace, slow = small(0), networks.card(0.5)
    fast = networks.card(800)
    assert networks.slowed(trace, fast) == trace
    slowed = networks.slowed(trace, slow)
    sent_bytes_s = slowed.prompt_tokens * slow.token_bytes / slowed.span_s
    assert sent_bytes_s == pytest.approx(0.5 * slow.prefill * slow.bandwidth_bytes_s)


@pytest.mark.slow
def test_first_tokens_have_a_table_for_each_trace_and_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_tokens, "_trace", lambda name, seed, lasts_s: small(seed))
    monkeypatch.setattr(first_tokens, "_factor", lambda name, seed, lasts_s: 4.0)
    found = first_tokens.conversations(EFFORT, told)
    assert len(found.grids) == 2 * (1 + len(NEAR))
    for table in found.grids:
        assert {row[0] for row in table.rows} == set(POLICIES)
    assert len(found.goals) == 10
    (plot,) = found.plots
    assert [line.name for line in plot.lines] == list(POLICIES)
    assert set(ORACLES) < set(POLICIES)


@pytest.mark.slow
def test_goodput_and_networks_compare_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(goodput, "conversation", lambda: small(0))
    monkeypatch.setattr(goodput, "WARM_UP_S", small(0).span_s / 2)
    rates = {"act": 4.4, "off": 4.0}

    def found_rate(trace: Trace, options: SimulationOptions, policy: str, warm_up: Trace) -> float:
        assert len(trace.requests) + len(warm_up.requests) == len(small(0).requests)
        return rates[options.planner]

    monkeypatch.setattr(goodput, "goodput", found_rate)
    monkeypatch.setattr(goodput, "colocated_goodput", lambda trace, engine: 1.0)
    over_algorithm_1, over_engines = goodput.conversations(EFFORT, told).goals
    assert "4.40/s, 1.10 × 4.00/s" in over_algorithm_1.figure
    assert not over_algorithm_1.reached
    assert over_engines.reached
    rates["act"] = 4.7
    assert goodput.conversations(EFFORT, told).goals[0].reached
    monkeypatch.setattr(networks, "_at_fast", lambda workload, seed, full: small(seed))
    found = networks.networks(EFFORT, told)
    assert len(found.grids[0].rows) == len(networks.WORKLOADS) * len(networks.GIGABITS)
    assert len(found.goals) == 3
    assert found.settings.startswith("`order` held with `ahead_max` 2")


def test_an_overload_is_judged_by_the_peak_and_by_other_modes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    falling = {load: Goodput(5.0 - load, 10_000.0, 0.05, 0.19) for load in overload.LOADS}
    falling[3.0] = Goodput(2.0, 10_000.0, 0.02, 0.21)

    def curve(fleet: object, mode: str, loads: tuple[float, ...], *_: object) -> overload.Curve:
        return {load: falling[load] if mode == overload.MODE else Goodput(3.5, 0) for load in loads}

    monkeypatch.setattr(overload, "_curve", curve)
    refused = [
        ReplayedRefusal("ttft", 100, met=True, broken=2),
        ReplayedRefusal("ttft", 100, met=False, broken=0),
    ]

    def replayed(trace: object, options: SimulationOptions, *_: object) -> Refusals:
        return Refusals(SimulationOutcome(options), 5, tuple(refused))

    monkeypatch.setattr(overload, "replay_refusals", replayed)
    found = overload.overloads(EFFORT, told)
    kept, kept_tokens, best, late, errors, alone, harmless = found.goals
    assert late.reached
    assert errors.figure.startswith("3 of 6; the worst: 21.0% (prefill-bound, 3 ×)")
    assert kept.figure.startswith("0 of 6; the worst: 2.00/s of 4.25/s, 0.47")
    assert kept_tokens.reached
    assert not best.reached
    assert alone.figure.startswith("0 of 3; the worst: 50% of 2 of 5 refused")
    assert harmless.reached, "who would have made others late was refused rightly"
    loads, refusals = found.grids
    assert len(loads.rows) == 3 * (1 + len(overload.OTHERS))
    assert refusals.rows[0][1:] == ("5", "50%", "0%", "2.0"), "one in time, who makes two late"


def test_what_rises_with_the_load_has_not_fallen() -> None:
    rising = {load: Goodput(load, 1.0) for load in overload.LOADS}
    assert overload._kept("", rising, 2.0, "requests").reached


# -- showing ---------------------------------------------------------------------------------------


def finding(name: str, goals: tuple[Goal, ...]) -> Finding:
    evidence = Evidence(goals=goals)
    return Finding(Reproduction(name, name, "no paper", lambda effort, tell: evidence), evidence, 1)


def test_the_goals_of_all_findings_stand_in_one_table_at_the_top() -> None:
    some = finding("one", (Goal("fast", "1 s", True), Goal("cheap", "9 €", False)))
    more = finding("two", (Goal("good", "best", True),))
    page = markdown([some, more], "images")
    assert "Goals: 2 of 3 are reached." in page
    assert "| cheap | 9 € | **no** |" in page
    assert page.index("| good | best | yes |") < page.index("## one")
    table = goal_table([some, more])
    assert table is not None
    assert list(table.columns[2].cells) == ["yes", "NO", "yes"]
    assert "cheap" in html_page([some])
    assert some.plain()["goals"][1]["reached"] is False
    nothing = finding("none", ())
    assert goal_table([nothing]) is None
    assert "## Goals" not in markdown([nothing], "images")


def test_reproductions_are_named_by_patterns_too(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {one: finding(one, ()).reproduction for one in ("goals-a", "goals-b", "paper")}
    monkeypatch.setattr(registry, "reproductions", lambda: known)
    assert [one.name for one in named(["goals-*", "goals-a"])] == ["goals-a", "goals-b"]
    with pytest.raises(InvalidInput, match=r"no reproduction 'other-\*'"):
        named(["other-*"])
