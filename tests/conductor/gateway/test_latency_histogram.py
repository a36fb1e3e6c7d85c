"""What operators read from the gateway's latencies."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tiffin.conductor.gateway.engines.instance_cache import CallTarget, InstanceRoute
from tiffin.conductor.gateway.latency_histogram import Labels, LatencyHistogram
from tiffin.conductor.gateway.metrics import GatewayMetrics
from tiffin.conductor.gateway.openai.openai_request import COMPLETIONS, read_ask, read_wishes
from tiffin.conductor.gateway.requests.stream_latencies import StreamLatencies

P, D = Labels("prefill", "m", "p0"), Labels("decode", "m", "d0")
MIXED = Labels("mixed", "m", "d0")


def samples(text: bytes, name: str) -> list[Any]:
    families = text_string_to_metric_families(text.decode())
    return [one for family in families for one in family.samples if one.name == name]


def quantile(text: bytes, name: str, share: float, **labels: str) -> float:
    """Prometheus' `histogram_quantile`: linear within a bucket."""
    buckets = [
        (float(one.labels["le"]), one.value)
        for one in samples(text, f"{name}_bucket")
        if labels.items() <= one.labels.items()
    ]
    rank = share * buckets[-1][1]
    below, low = 0.0, 0.0
    for high, count in buckets:
        if count >= rank:
            return low + (high - low) * (rank - below) / (count - below)
        below, low = count, high
    raise AssertionError("no bucket")


@pytest.mark.parametrize("median_s", [0.02, 0.3, 4.0])
@pytest.mark.parametrize("share", [0.5, 0.95, 0.99])
def test_quantiles_are_within_five_percent(median_s: float, share: float) -> None:
    registry = CollectorRegistry()
    histogram = LatencyHistogram("ttft_seconds", "Time to first token.")
    registry.register(histogram)
    seen = np.random.default_rng(7).lognormal(np.log(median_s), 0.3, 3000)
    for one in seen:
        histogram.observe(P, float(one))
        histogram.observe(D, 50.0)  # another series changes nothing
    found = quantile(generate_latest(registry), "ttft_seconds", share, role="prefill")
    assert found == pytest.approx(float(np.quantile(seen, share)), rel=0.05)


def test_what_is_longer_than_all_buckets_is_counted() -> None:
    registry = CollectorRegistry()
    histogram = LatencyHistogram("itl_seconds", "Gaps.")
    registry.register(histogram)
    histogram.observe(D, 1e4)
    histogram.observe(D, 0.0, 3)
    histogram.observe(D, 5.0, 0)
    text = generate_latest(registry)
    assert samples(text, "itl_seconds_count")[0].value == 4
    assert samples(text, "itl_seconds_sum")[0].value == 1e4


def test_of_instances_that_are_gone_nothing_is_kept() -> None:
    metrics = GatewayMetrics()
    metrics.ttft_s.observe(P, 1.0)
    metrics.itl_s.observe(D, 1.0)
    metrics.keep({"d0"})
    names = {
        one.labels["instance"]
        for one in samples(metrics.text(), "tiffin_gateway_itl_seconds_count")
    }
    assert names == {"d0"}
    assert not samples(metrics.text(), "tiffin_gateway_ttft_seconds_count")


class TestStreams:
    def latencies(self, prefill: str, body: bytes = b"") -> tuple[GatewayMetrics, StreamLatencies]:
        metrics = GatewayMetrics()
        raw = body or b'{"model": "m", "prompt": "a", "stream": true}'
        ask = read_ask(COMPLETIONS, raw, read_wishes({}, "id", "", ()))
        route = InstanceRoute(CallTarget(prefill, ""), CallTarget("d0", ""))
        return metrics, StreamLatencies(metrics, ask, route)

    def counted(
        self, metrics: GatewayMetrics, name: str
    ) -> dict[tuple[str, ...], tuple[float, float]]:
        counts = samples(metrics.text(), f"tiffin_gateway_{name}_seconds_count")
        sums = samples(metrics.text(), f"tiffin_gateway_{name}_seconds_sum")
        return {
            (n.labels["role"], n.labels["model"], n.labels["instance"]): (n.value, s.value)
            for n, s in zip(counts, sums, strict=True)
        }

    def test_of_a_split_request_the_first_token_is_the_prefills_and_gaps_the_decodes(self) -> None:
        metrics, stream = self.latencies("p0")
        stream.first(1, started_at=10.0, now=12.0)
        stream.more(2, 12.5)
        stream.more(2, 13.0)  # no token in it
        stream.more(4, 13.5)  # two at once: one gap and none
        assert self.counted(metrics, "ttft") == {P: (1, 2.0)}
        assert self.counted(metrics, "itl") == {D: (3, 1.5)}

    def test_one_instance_has_the_role_mixed(self) -> None:
        metrics, stream = self.latencies("d0")
        stream.first(1, started_at=0.0, now=1.0)
        assert self.counted(metrics, "ttft") == {MIXED: (1, 1.0)}

    def test_what_cannot_be_split_is_computed_where_it_is_answered(self) -> None:
        body = b'{"model": "m", "prompt": "a", "stream": true, "n": 2}'
        metrics, stream = self.latencies("p0", body)
        stream.first(1, started_at=0.0, now=1.0)
        assert self.counted(metrics, "ttft") == {MIXED: (1, 1.0)}

    def test_an_answer_without_tokens_has_no_latencies(self) -> None:
        metrics, stream = self.latencies("p0")
        stream.first(0, started_at=0.0, now=1.0)
        stream.more(0, 2.0)
        assert not self.counted(metrics, "ttft")
        assert not self.counted(metrics, "itl")
