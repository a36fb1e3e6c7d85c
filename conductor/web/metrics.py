"""The conductor's Prometheus metrics: counters of events, and its state at each scrape.

Base units throughout: seconds, bytes, tokens; counters end in `_total`. Label values come from the
configuration; where a client could send another value, `_LABELS_MAX` bounds their number, so that
no client can flood a monitoring system with them. docs/conductor/service.md explains each.
"""

from __future__ import annotations

from collections import Counter as Counts
from itertools import chain
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from ..core.prediction_errors import Timings
from ..state.sliced_work import finished
from .tally import Tally

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from prometheus_client.metrics_core import Metric

    from ..records import Decision, Rejection, Request, RequestEvent
    from ..state.sliced_work import Work

    # A metric's name, help text, label names, and rows of label values and number.
    Family = tuple[str, str, tuple[str, ...], list[tuple[tuple[str, ...], float]]]

PREFIX = "tiffin_conductor_"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# A label has at most so many values; further ones count as "other".
_LABELS_MAX = 64

_TTFT_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0)
_TBT_S = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0)
_DECISION_S = (5e-5, 1e-4, 1.5e-4, 2e-4, 3e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.05, 0.25)
_HTTP_S = (2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.05, 0.25, 1.0, 5.0)
# Observed divided by predicted: 1 is a perfect prediction, 2 was twice as slow.
_RATIO = (0.1, 0.25, 0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0, 10.0)


class ConductorMetrics:
    """The conductor's metrics, in a registry of their own. For the event loop's thread.

    `state` is a callback for each scrape; it returns gauges, and counters where the name ends in
    `_total`.
    """

    def __init__(self, state: Callable[[], Iterable[Family]] = tuple) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self.timings = Timings()
        self._seen: dict[str, set[str]] = {}
        self._state = state
        self._policies: dict[str, Counter] = {}
        self._decisions = self._counter("decisions", "Requests that were placed.", "policy")
        self._rejections = self._counter(
            "rejections", "Requests that were not taken.", "reason", "priority"
        )
        self._prompt = self._counter("prompt_tokens", "Tokens of the prompts that were placed.")
        self._available = self._counter(
            "cached_tokens_available", "Of them, what some holder had when it was decided."
        )
        self._used = self._counter("cached_tokens_used", "Of those, what the decision uses.")
        self._expected = self._counter(
            "cached_tokens_expected", "Of those, of requests whose engine told what it found."
        )
        self._found = self._counter(
            "cached_tokens_found", "Of the same requests, what the engine had or loaded."
        )
        self._astray = self._counter(
            "cached_tokens_astray", "The sum of the differences of each request's two numbers."
        )
        self._events: Counts[str] = Counts()  # by kind
        self._tallies: list[Tally] = []
        self._decision_s = self._tally(
            "decision_duration_seconds", "Time to decide about one request.", _DECISION_S
        )
        self._predicted = {
            "ttft": self._tally("predicted_ttft_seconds", "Time to first token.", _TTFT_S),
            "tbt": self._tally("predicted_tbt_seconds", "Time between tokens.", _TBT_S),
        }
        self._observed = {
            "ttft": self._tally("observed_ttft_seconds", "The same, as reported.", _TTFT_S),
            "tbt": self._tally(
                "observed_tbt_seconds", "The same: means of what was reported at a time.", _TBT_S
            ),
        }
        self._ratio = {
            "ttft": self._tally("ttft_observed_ratio", "Observed TTFT by predicted TTFT.", _RATIO),
            "tbt": self._tally("tbt_observed_ratio", "Observed TBT by predicted TBT.", _RATIO),
        }
        self._http = self._counter("http_requests", "Answers.", "route", "status")
        self._http_s = Histogram(
            PREFIX + "http_request_duration_seconds",
            "From the head of a request to its answer.",
            ("route",),
            registry=self.registry,
            buckets=_HTTP_S,
        )
        self._answers: dict[tuple[str, int], tuple[Counter, Histogram]] = {}
        self.registry.register(_State(self))

    def scheduled(self, request: Request, decision: Decision, took_s: float, now: float) -> None:
        """Count a request that was placed."""
        counter = self._policies.get(decision.policy)
        if counter is None:
            label = self._label("policy", decision.policy)
            counter = self._policies.setdefault(label, self._decisions.labels(label))
        counter.inc()
        self._decision_s.observe(took_s)
        self._prompt.inc(request.prompt_tokens)
        self._available.inc(decision.available_tokens)
        self._used.inc(decision.cached_tokens)
        self._predicted["ttft"].observe(decision.predicted_ttft_s)
        self._predicted["tbt"].observe(decision.predicted_tbt_s)
        self.timings.begin(decision, now)

    def rejected(self, request: Request, rejection: Rejection, took_s: float) -> None:
        """Count a request that was rejected."""
        reason = self._label("reason", rejection.reason)
        self._rejections.labels(reason, self._label("priority", request.priority)).inc()
        self._decision_s.observe(took_s)

    def observed(self, event: RequestEvent, now: float) -> None:
        """Count an event of an in-flight request, and observe its TTFT or TBT."""
        self._events[event.kind] += 1
        if event.found_tokens is not None:
            self._compare(event, event.found_tokens)
        observed = self.timings.observe(event, now)
        if observed is None:
            return
        self._observed[observed.kind].observe(observed.observed_s)
        if observed.predicted_s > 0:
            self._ratio[observed.kind].observe(observed.observed_s / observed.predicted_s)

    def _compare(self, event: RequestEvent, found_tokens: int) -> None:
        """Count what an engine found beside what the decision counted on."""
        expected = self.timings.expected_tokens(event)
        if expected is not None:
            self._expected.inc(expected)
            self._found.inc(found_tokens)
            self._astray.inc(abs(found_tokens - expected))

    def answered(self, route: str, status: int, took_s: float) -> None:
        """Count an HTTP answer. `route` is the route's pattern, not the path of the request."""
        kept = self._answers.get((route, status))
        if kept is None:  # a lookup of labels takes longer than counting, so cache them
            counter, duration = self._http.labels(route, str(status)), self._http_s.labels(route)
            kept = self._answers[route, status] = counter, duration
        kept[0].inc()
        kept[1].observe(took_s)

    def text(self) -> bytes:
        """All metrics as text of type `CONTENT_TYPE`."""
        return finished(self.writing())

    def writing(self) -> Work[bytes]:
        """`text` in pieces, one for each metric."""
        texts = list[bytes]()
        for metric in self.registry.collect():
            texts.append(generate_latest(_Alone(metric)))
            yield
        return b"".join(texts)

    def state(self) -> Iterator[Metric]:
        """The current state as metrics, and what is counted here."""
        yield from (tally.family() for tally in self._tallies)
        for name, what, labels, rows in chain(self._state(), [self._events_by_kind()]):
            kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            family = kind(PREFIX + name, what, labels=labels)
            for values, number in rows:
                family.add_metric(values, number)
            yield family

    def _events_by_kind(self) -> Family:
        rows: list[tuple[tuple[str, ...], float]]
        rows = [((kind,), float(count)) for kind, count in self._events.items()]
        return "request_events_total", "What became of requests.", ("kind",), rows

    def _label(self, name: str, value: str) -> str:
        seen = self._seen.setdefault(name, set())
        if value in seen:
            return value
        if len(seen) >= _LABELS_MAX:
            return "other"
        seen.add(value)
        return value

    def _counter(self, name: str, what: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, what, labels, registry=self.registry)

    def _tally(self, name: str, what: str, bounds: tuple[float, ...]) -> Tally:
        tally = Tally(PREFIX + name, what, bounds)
        self._tallies.append(tally)
        return tally


class _Alone(CollectorRegistry):
    """A registry of one metric that was collected already."""

    def __init__(self, metric: Metric) -> None:
        super().__init__()
        self._metric = metric

    def collect(self) -> Iterator[Metric]:
        yield self._metric


class _State:
    """The collector that the registry calls at each scrape."""

    def __init__(self, metrics: ConductorMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics.state()
