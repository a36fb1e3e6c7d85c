"""What operators read from the gateway's latencies."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from latencysupport import SHARES, exact, quantile, samples, total
from prometheus_client.parser import text_string_to_metric_families

from tiffin.conductor.gateway.engines.instance_cache import CallTarget, InstanceRoute
from tiffin.conductor.gateway.latency_histogram import Labels, LatencyHistogram
from tiffin.conductor.gateway.metrics import GatewayMetrics
from tiffin.conductor.gateway.openai.openai_request import COMPLETIONS, read_ask, read_wishes
from tiffin.conductor.gateway.requests.stream_latencies import StreamLatencies

P, D = Labels("prefill", "m", "p0"), Labels("decode", "m", "d0")
MIXED = Labels("mixed", "m", "d0")


@st.composite
def latencies(draw: st.DrawFn) -> list[float]:
    """In seconds: one for all, a narrow band, a wide one, several bands, anything."""
    size = draw(st.integers(1, 400))
    dice = np.random.default_rng(draw(st.integers(0, 2**32)))
    middle = 10 ** draw(st.floats(-2.99, 1.99))
    made = {
        "one": lambda: np.full(size, middle),
        "narrow": lambda: dice.normal(middle, middle / 100, size),
        "lognormal": lambda: dice.lognormal(np.log(middle), 0.6, size),
        "exponential": lambda: dice.exponential(middle, size),
        "bands": lambda: middle * dice.choice([1.0, 1.04, 3.0, 20.0], size),
        "any": lambda: 10 ** dice.uniform(-3, 2, size),
    }
    shape = draw(st.sampled_from(sorted(made)))
    return list(np.clip(made[shape](), np.nextafter(0.001, 1), 100.0))


@given(seen=latencies(), share=st.sampled_from(SHARES))
@example(seen=[0.01301] * 9, share=0.99)  # of the buckets 0.013 to 0.015, 15% above
def test_quantiles_are_within_five_percent(seen: list[float], share: float) -> None:
    histogram = LatencyHistogram("ttft_seconds", "Time to first token.")
    for one in seen:
        histogram.observe(P, float(one))
        histogram.observe(D, 50.0)  # another series changes nothing
    found = quantile(histogram.text().encode(), "ttft_seconds", share, role="prefill")
    assert found == pytest.approx(exact(seen, share), rel=0.05)


def test_what_is_outside_all_buckets_is_counted() -> None:
    histogram = LatencyHistogram("itl_seconds", "Gaps.")
    histogram.observe(D, 1e4)
    histogram.observe(D, 0.0, 3)
    histogram.observe(D, 5.0, 0)
    text = histogram.text().encode()
    assert total(text, "itl_seconds_count") == 4
    assert total(text, "itl_seconds_sum") == 1e4
    assert total(text, "itl_seconds_bucket", le="0.001") == 3
    assert total(text, "itl_seconds_bucket", le="100") == 3
    assert total(text, "itl_seconds_bucket", le="+Inf") == 4


def test_the_text_is_what_prometheus_reads() -> None:
    """As its own library writes it, whatever an instance is called."""
    odd = Labels("decode", 'a "model"', "in\\stance\nä")
    metrics = GatewayMetrics()
    metrics.itl_s.observe(odd, 0.02, 7)
    families = text_string_to_metric_families(metrics.text().decode())
    (family,) = (one for one in families if one.name == "tiffin_gateway_itl_seconds")
    assert family.type == "histogram"
    assert {Labels(*(one.labels[key] for key in Labels._fields)) for one in family.samples} == {odd}
    assert total(metrics.text(), "tiffin_gateway_itl_seconds_count", instance=odd.instance) == 7
    assert metrics.text().count(b"# TYPE tiffin_gateway_ttft_seconds ") == 1


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
