"""Predictions against observations, and the metrics for Prometheus."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from apisupport import KEY, MODEL, Recorder
from prometheus_client.parser import text_string_to_metric_families

from tiffin.conductor.core.prediction_errors import ObservedTimes, Timings
from tiffin.conductor.core.state_metrics import state
from tiffin.conductor.records import (
    Decision,
    InstanceSpec,
    Load,
    Rejection,
    Request,
    RequestEvent,
    Role,
)
from tiffin.conductor.web.metrics import ConductorMetrics


def decision(name: str = "r", ttft_s: float = 0.5, tbt_s: float = 0.02) -> Decision:
    return Decision(name, "i", "i", "kv", ttft_s, tbt_s, 512, 1024)


def samples(metrics: ConductorMetrics) -> dict[str, float]:
    """The samples by name and labels."""
    return {
        sample.name.removeprefix("tiffin_conductor_")
        + "".join(f" {value}" for _, value in sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(metrics.text().decode())
        for sample in family.samples
    }


class TestTimings:
    def test_first_token_and_then_the_mean_between_reports(self) -> None:
        timings = Timings()
        timings.begin(decision(), now=10.0)
        seen = [
            timings.observe(RequestEvent("r", kind, tokens), now)
            for kind, tokens, now in (
                ("prefill_done", 0, 10.5),
                ("first_token", 0, 10.75),
                ("first_token", 0, 11.0),
                ("tokens", 16, 11.25),
                ("tokens", 4, 11.5),
                ("tokens", 0, 11.75),
                ("finished", 0, 12.0),
                ("tokens", 4, 12.5),
            )
        ]
        assert seen == [
            None,
            ObservedTimes("ttft", 0.5, 0.75),
            None,
            ObservedTimes("tbt", 0.02, 0.5 / 16, 16),
            ObservedTimes("tbt", 0.02, 0.25 / 4, 4),
            None,
            None,
            None,
        ]
        assert len(timings) == 0

    def test_of_a_race_the_first_route_alone_was_predicted(self) -> None:
        for route, seen in (
            (("p0", "d0"), ObservedTimes("ttft", 0.5, 1.0)),
            (("p1", "d0"), None),
        ):
            timings = Timings()
            timings.begin(replace(decision(), prefill="p0", decode="d0"), now=0.0)
            event = RequestEvent("r", "first_token", route=route)
            assert timings.observe(event, 1.0) == seen
            tokens = timings.observe(RequestEvent("r", "tokens", 4), 2.0)
            assert tokens == ObservedTimes("tbt", 0.02, 0.25, 4)

    def test_a_repeated_call_does_not_start_again(self) -> None:
        timings = Timings()
        timings.begin(decision(), now=0.0)
        timings.begin(decision(), now=5.0)
        assert timings.observe(RequestEvent("r", "first_token"), 6.0) == ObservedTimes(
            "ttft", 0.5, 6.0
        )

    def test_another_decision_about_the_same_request_begins_anew(self) -> None:
        """For example after a preemption."""
        timings = Timings(watched_max=2)
        timings.begin(decision(), now=0.0)
        timings.begin(decision("other"), now=1.0)
        timings.begin(replace(decision(ttft_s=0.25), decided_at=50.0), now=50.0)
        timings.begin(decision("third"), now=51.0)
        assert timings.observe(RequestEvent("other", "first_token"), 52.0) is None, "the oldest"
        seen = timings.observe(RequestEvent("r", "first_token"), 50.5)
        assert seen == ObservedTimes("ttft", 0.25, 0.5)

    def test_who_is_never_heard_of_leaves_for_newer_ones(self) -> None:
        timings = Timings(watched_max=2)
        for name in "abc":
            timings.begin(decision(name), now=0.0)
        assert len(timings) == 2
        assert timings.observe(RequestEvent("a", "first_token"), 1.0) is None
        timings.forget("b")
        timings.forget("b")
        assert len(timings) == 1


class TestMetrics:
    def test_a_request_from_decision_to_answer(self) -> None:
        metrics = ConductorMetrics()
        metrics.scheduled(Request("r", MODEL, 2048), decision(), 1e-4, now=0.0)
        metrics.observed(RequestEvent("r", "first_token"), now=1.0)
        found = samples(metrics)
        assert found["decisions_total kv"] == 1
        assert found["prompt_tokens_total"] == 2048
        assert found["cached_tokens_available_total"] == 1024
        assert found["cached_tokens_used_total"] == 512
        assert found["observed_ttft_seconds_sum"] == 1.0
        assert found["ttft_observed_ratio_sum"] == 2.0
        assert found["request_events_total first_token"] == 1

    def test_impossible_predictions_are_not_counted_as_times(self) -> None:
        metrics = ConductorMetrics()
        metrics.scheduled(Request("r", MODEL, 1), decision(ttft_s=math.inf, tbt_s=0.0), 0.0, 0.0)
        metrics.observed(RequestEvent("r", "first_token"), now=1.0)
        found = samples(metrics)
        assert found["predicted_ttft_seconds_count"] == 0
        assert found["predicted_tbt_seconds_count"] == 1
        assert found["ttft_observed_ratio_sum"] == 0.0

    def test_labels_are_bounded_whatever_clients_send(self) -> None:
        metrics = ConductorMetrics()
        for number in range(200):
            request = Request("r", MODEL, 1, priority=f"class-{number}")
            metrics.rejected(request, Rejection("r", "ttft", "full"), 0.0)
        rejections = {name for name in samples(metrics) if name.startswith("rejections_total")}
        assert len(rejections) == 65
        assert samples(metrics)["rejections_total other ttft"] == 200 - 64

    @pytest.mark.parametrize("role", list(Role))
    def test_the_state_of_a_conductor(self, role: Role) -> None:
        core = Recorder()
        core.register(InstanceSpec("i1", MODEL, role, "test", node="n"), now=0.0)
        core.heartbeat("i1", Load(running=1), now=0.0)
        core.hold("n", "dram", [KEY], now=1.0)
        found = samples(ConductorMetrics(lambda: state(core, 3.0, 2)))
        assert found[f"instances {role} ready"] == 1
        assert sum(value for name, value in found.items() if name.startswith("instances ")) == 1
        assert found["index_blocks"] == 1
        assert found["index_held_blocks dram"] == 1
        assert found["index_age_seconds dram"] == 2.0
        assert "index_age_seconds hbm" not in found, "nobody has said anything of it"
        assert found["followers"] == 2
        assert found["shadow_requests_total admitted_met"] == 0
        assert found["requests_ended_total expired"] == 0


def test_many_requests_cost_no_more_than_their_numbers() -> None:
    """The number of series that requests can create is bounded, whatever they contain."""
    metrics, dice = ConductorMetrics(), random.Random(7)
    for number in range(500):
        name = f"r{number}"
        metrics.scheduled(Request(name, f"model-{number}", 1), decision(name), 1e-4, 0.0)
        kind = dice.choice(("first_token", "tokens", "finished"))
        metrics.observed(RequestEvent(name, kind, 1), 1.0)
    before = len(samples(metrics))
    metrics.scheduled(Request("x", "another", 1), decision("x"), 1e-4, 0.0)
    assert len(samples(metrics)) == before
