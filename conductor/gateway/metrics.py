"""The gateway's Prometheus metrics. docs/conductor/gateway.md explains each.

Label values come from the configuration or from the gateway's decisions, never from what clients
send.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from .latency_histogram import LatencyHistogram

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

PREFIX = "tiffin_gateway_"

_TOTAL_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 900.0)
_SHORT_S = (2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 2.0)


class GatewayMetrics:
    """The gateway's metrics, in a registry of their own."""

    def __init__(self, clients: Mapping[tuple[str, str], int] | None = None) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        if clients is not None:
            self.registry.register(_ClientTotals(clients))
        self.requests = self._counter("requests", "Answers.", "route", "status")
        self.cancelled = self._counter("cancelled", "Requests whose client hung up.")
        self.broken = self._counter("broken_streams", "Streams that an instance did not end.")
        self.cut = self._counter("cut_answers", "Answers that were ended because of the load.")
        self.fallbacks = self._counter(
            "fallbacks", "Requests that were placed without the conductor.", "why"
        )
        self.not_placed = self._counter(
            "not_placed",
            "Requests that were refused, as the conductor did not place them in time.",
            "why",
        )
        for why in ("conductor_down", "conductor_late", "model_unknown"):
            self.fallbacks.labels(why)  # an alert needs their zeros
            self.not_placed.labels(why)
        self.not_placed.labels("queue")
        self.rescheduled = self._counter(
            "rescheduled", "Requests that were placed again: an instance was gone."
        )
        self.poisoned = self._counter(
            "poisoned_requests", "Requests that were not tried on a third instance.", "why"
        )
        self.continued = self._counter(
            "continued_streams", "Streams that broke off and went on at another instance."
        )
        self.races = self._counter("races", "Requests that ran on two routes.", "winner")
        self.sized = self._counter("prompts", "How prompts' lengths were found out.", "how")
        self.prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts.")
        self.answered_tokens = self._counter("answered_tokens", "Tokens of answers.")
        self.size_s = self._histogram(
            "tokenize_duration_seconds", "Time to tokenise a prompt and make its keys.", _SHORT_S
        )
        self.place_s = self._histogram(
            "place_duration_seconds", "Time to a decision, with the way to the conductor.", _SHORT_S
        )
        self.queued_s = self._histogram(
            "queued_duration_seconds", "Time until requests were released to their turn.", _TOTAL_S
        )
        self.ttft_s = LatencyHistogram(
            PREFIX + "ttft_seconds", "From a request's head to the first token of its stream."
        )
        self.itl_s = LatencyHistogram(
            PREFIX + "itl_seconds",
            "Between two events with tokens of a stream, each gap by itself.",
        )
        self.total_s = self._histogram(
            "request_duration_seconds", "From a request's head to the end of its answer.", _TOTAL_S
        )
        self.in_flight = self._gauge("requests_in_flight", "Requests at the moment.")
        self.queued = self._gauge("requests_queued", "Of these, those that wait for their turn.")
        self._circuits = Gauge(
            PREFIX + "circuits_open", "1 if an instance gets no requests: it fails.",
            ["instance"], registry=self.registry,
        )  # fmt: skip
        self.placing = self._gauge(
            "requests_placing", "Of these, those that wait for a call to the conductor."
        )
        self.held_bytes = self._gauge("held_bytes", "Bytes of all bodies.")
        self._gauge("workers", "Worker processes that answer the scrape.").set(1)
        self.conductor_up = self._gauge("conductor_up", "1 if the conductor answers.")
        self.instances = self._gauge("instances", "Instances that it last spoke of.")

    def circuits(self, known: Collection[str], open_ones: Collection[str]) -> None:
        """Set which of the known instances get no requests."""
        self._circuits.clear()
        for name in known:
            self._circuits.labels(name).set(name in open_ones)

    def keep(self, instances: Collection[str]) -> None:
        """Drop the latencies of all other instances: instances come and go."""
        self.ttft_s.keep(instances)
        self.itl_s.keep(instances)

    def text(self) -> bytes:
        """All metrics in Prometheus' text format, for a scrape."""
        latencies = self.ttft_s.text() + self.itl_s.text()
        return generate_latest(self.registry) + latencies.encode()

    def _counter(self, name: str, what: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, what, labels, registry=self.registry)

    def _gauge(self, name: str, what: str) -> Gauge:
        return Gauge(PREFIX + name, what, registry=self.registry)

    def _histogram(self, name: str, what: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(PREFIX + name, what, registry=self.registry, buckets=buckets)


class _ClientTotals(Collector):
    """What clients have used and what was refused to them, as `ClientLimits.totals` counts it. The
    label is a name of the configuration; all others together are `other`."""

    def __init__(self, totals: Mapping[tuple[str, str], int]) -> None:
        self._totals = totals

    def collect(self) -> Iterator[CounterMetricFamily]:
        """At each scrape."""
        requests = CounterMetricFamily(
            PREFIX + "client_requests", "Requests of a client that were let in.", labels=["client"]
        )
        tokens = CounterMetricFamily(
            PREFIX + "client_tokens", "Tokens of its prompts and answers.", labels=["client", "of"]
        )
        limited = CounterMetricFamily(
            PREFIX + "client_limited", "Requests beyond a limit.", labels=["client", "limit"]
        )
        for (client, kind), count in list(self._totals.items()):
            name = client or "other"
            if kind == "requests":
                requests.add_metric([name], count)
            elif kind in ("prompt_tokens", "answer_tokens"):
                tokens.add_metric([name, kind.removesuffix("_tokens")], count)
            else:
                limited.add_metric([name, kind], count)
        yield from (requests, tokens, limited)
