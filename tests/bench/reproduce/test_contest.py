"""Policies beside each other: intervals, and statements that can fail."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tiffin.bench.reproduce.setups.contest import (
    ALL,
    AT_ONCE,
    OURS,
    PEERS,
    Interval,
    Scenario,
    contest,
    goodput,
    grid,
    mean_ttft_s,
    replay,
    statements,
)
from tiffin.bench.sim.cluster.options import SHIPPED
from tiffin.bench.sim.cluster.oracle import POLICY as ORACLE
from tiffin.bench.sim.cluster.simulation import SimulationOptions, SimulationOutcome, simulate
from tiffin.bench.traces.generator import generate
from tiffin.bench.traces.trace import Trace, TraceRequest


def test_an_interval_is_students() -> None:
    one = Interval.of([1.0, 2.0, 3.0, 4.0, 5.0])
    assert one.mean == 3.0
    assert one.half == pytest.approx(2.776 * math.sqrt(2.5) / math.sqrt(5))
    assert Interval.of([4.0]).half is None
    assert Interval(1.234, 0.56).shown(".1f") == "1.2 ± 0.6"


def means(**changed: float) -> dict[str, Interval]:
    return {policy: Interval(changed.get(policy, 2.0), None) for policy in ALL}


def test_a_peer_that_is_faster_is_said_to_be() -> None:
    said = {one.text: one.holds for one in statements("t", means(preble=1.9))}
    assert said[f"t: no peer is faster than {OURS}"] is False
    assert said[f"t: {OURS} is near the oracle"] is True
    assert all(one.holds for one in statements("t", means()))


def test_an_oracle_that_is_far_is_said_to_be() -> None:
    said = {one.text: one for one in statements("t", means(oracle=1.0, random=9.0))}
    far = said[f"t: {OURS} is near the oracle"]
    assert not far.holds
    assert "+100%" in far.figures


def test_all_replay_the_same_trace() -> None:
    options = SimulationOptions(prefill=2, decode=2)
    scenario = Scenario("small", lambda seed: generate("tool-agent", 60, seed), options)
    told: list[str] = []
    results = contest(scenario, (0, 1), told.append, (ORACLE, OURS, "random"))
    assert len(told) == 6
    for found in results.values():
        assert [one.requests for one in found] == [60, 60]
    assert [one.policy for one in results[ORACLE]] == [ORACLE, ORACLE]
    table = grid("small", results)
    assert {row[0] for row in table.rows} == {ORACLE, OURS, "random"}
    shown = [mean_ttft_s(results)[row[0]].mean for row in table.rows]
    assert shown == sorted(shown)


def test_ours_is_held_and_the_others_are_sent_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[tuple[str, str]]()

    def spied(trace: Trace, options: SimulationOptions, **more: Any) -> SimulationOutcome:
        seen.append((options.order, options.policy))
        return simulate(trace, options, **more)

    monkeypatch.setattr("tiffin.bench.reproduce.setups.contest.simulate", spied)
    for policy in (OURS, AT_ONCE, "algorithm_1", ORACLE):
        assert replay(generate("tool-agent", 5, 0), SHIPPED, policy).policy == policy
    assert [order for order, _ in seen] == ["held", "arrival", "arrival", "arrival"]
    assert [policy for _, policy in seen[:3]] == [OURS, OURS, "algorithm_1"]


@pytest.mark.slow
def test_goodput_is_where_a_queue_of_one_server_is_too_long() -> None:
    """Equal prompts at equal distances wait for nobody up to the rate of service, and then all the
    longer."""
    requests = tuple(TraceRequest(float(number), 4_000, 1) for number in range(200))
    options = SimulationOptions(prefill=1, decode=1, ttft_s=1.0, tbt_s=0.1)
    found = goodput(Trace("even", requests), options, "least_loaded")
    service_s = 0.53  # 0.098 + 0.104 ms · 4,000 + 0.9 ns · 4,000²
    assert found == pytest.approx(1 / service_s, rel=0.08)


@pytest.mark.slow
def test_what_comes_before_the_judged_requests_does_not_count() -> None:
    """Prompts that miss the objective whatever comes, and when these are done, those above."""
    requests = tuple(TraceRequest(float(number), 4_000, 1) for number in range(100))
    late = tuple(TraceRequest(5.0 * number, 12_000, 1) for number in range(50))
    before = Trace("long", (*late, TraceRequest(260.0, 10, 1)))
    options = SimulationOptions(prefill=1, decode=1, ttft_s=1.0, tbt_s=0.1)
    alone = goodput(Trace("even", requests), options, "least_loaded")
    assert goodput(Trace("even", requests), options, "least_loaded", before) == alone


def test_peers_and_ours_are_policies_of_the_conductor() -> None:
    for policy in (OURS, *PEERS):
        assert SimulationOptions(policy=policy).settings().policy.name == policy
