"""A request's trace: from its client through the gateway and the conductor to the engines."""

from __future__ import annotations

import threading
from collections import defaultdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import pytest
from apisupport import MODEL
from gatewaysupport import Engine, cluster, run
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tiffin.conductor.records import Role
from tiffin.conductor.web.tracing import Tracing, open_tracing, recording
from tiffin.kvstore.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Iterator

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1"}
PROMPT = "a" * 600


class Spans:
    """What the gateway and the conductor record, each by its own tracing."""

    def __init__(self) -> None:
        self._exporters = InMemorySpanExporter(), InMemorySpanExporter()
        gateway, conductor = self._exporters
        self.tracing = recording("gateway", gateway), recording("conductor", conductor)

    def __enter__(self) -> Spans:
        return self

    def __exit__(self, *_: object) -> None:
        for one in self.tracing:
            one.close()

    def recorded(self) -> dict[str, list[Any]]:
        """The spans by name, once tracing is closed."""
        found = defaultdict(list)
        for exporter in self._exporters:
            for span in exporter.get_finished_spans():
                found[span.name].append(span)
        return found


def parent(header: str) -> str:
    return header.split("-")[2]


def span_id(span: Any) -> str:
    return f"{span.context.span_id:016x}"


def test_one_trace_of_a_split_request() -> None:
    p, d = Engine("p0", Role.PREFILL), Engine("d0", Role.DECODE)
    spans = Spans()

    async def scenario() -> None:
        with spans:
            async with (
                cluster(p, d, tracing=spans.tracing) as it,
                it.stream({"prompt": PROMPT}, headers=HEADERS) as response,
            ):
                await response.aread()

    run(scenario)
    found = spans.recorded()
    every = [span for those in found.values() for span in those]
    assert {f"{span.context.trace_id:032x}" for span in every} == {TRACE}
    (root,), (place,), (schedule,) = (
        found["POST /v1/completions"],
        found["place"],
        found["schedule"],
    )
    (prefill,), (first,) = found["prefill"], found["first token"]
    assert f"{root.parent.span_id:016x}" == PARENT
    assert {f"{one.parent.span_id:016x}" for one in (place, prefill, first)} == {span_id(root)}
    assert f"{schedule.parent.span_id:016x}" == span_id(place), "over the wire"
    assert parent(p.calls[-1][2]["traceparent"]) == span_id(prefill)
    assert parent(d.calls[-1][2]["traceparent"]) == span_id(first)
    assert d.calls[-1][2]["tracestate"] == "vendor=1"
    assert root.attributes["tiffin.prefill"] == schedule.attributes["tiffin.prefill"] == "p0"
    assert root.attributes["tiffin.decode"] == schedule.attributes["tiffin.decode"] == "d0"
    assert root.attributes["tiffin.end"] == "finished"
    assert prefill.attributes["tiffin.instance"] == "p0"
    assert prefill.end_time <= first.start_time
    (tokenize,), (decode,) = found["tokenize"], found["decode"]
    assert tokenize.end_time <= place.start_time
    assert first.end_time <= decode.start_time
    assert decode.attributes["tiffin.instance"] == "d0"
    assert root.attributes["gen_ai.operation.name"] == "text_completion"
    assert root.attributes["gen_ai.usage.input_tokens"] == len(PROMPT)
    assert root.attributes["gen_ai.usage.output_tokens"] == len(d.answer)


def test_a_request_without_a_trace_begins_one() -> None:
    engine, spans = Engine("m0"), Spans()

    async def scenario() -> None:
        with spans:
            async with cluster(engine, tracing=spans.tracing) as it:
                await it.post({"prompt": PROMPT})
                await it.post({"prompt": PROMPT})

    run(scenario)
    roots = spans.recorded()["POST /v1/completions"]
    assert len({span.context.trace_id for span in roots}) == 2
    assert all(span.parent is None for span in roots)
    answered = [headers for path, _, headers in engine.calls if path != "/tokenize"]
    sent = {headers["traceparent"].split("-")[1] for headers in answered}
    assert sent == {f"{span.context.trace_id:032x}" for span in roots}


def test_failures_are_seen() -> None:
    """An engine that is gone, then a retry; and a rejection."""
    dead, spans = Engine("m0", die_at=0), Spans()

    async def scenario() -> None:
        with spans:
            async with cluster(dead, tracing=spans.tracing) as it:
                assert (await it.post({"prompt": PROMPT, "stream": True})).status_code == 503

    run(scenario)
    found = spans.recorded()
    (failed,) = found["first token"]
    assert not failed.status.is_ok
    assert "EngineDied" in failed.status.description
    assert [one.attributes.get("tiffin.rejected") for one in found["schedule"]] == [
        None,
        "no_prefill",
    ]
    assert found["POST /v1/completions"][0].attributes["tiffin.end"] == "cancelled"


def test_without_a_collector_the_context_passes_as_it_came() -> None:
    async def scenario() -> None:
        p, d = Engine("p0", Role.PREFILL), Engine("d0", Role.DECODE)
        async with cluster(p, d) as it:
            await it.post({"prompt": PROMPT}, headers={**HEADERS, "x-other": "1"})
            for engine in (p, d):
                sent = engine.calls[-1][2]
                assert HEADERS.items() <= sent.items()
                assert "x-other" not in sent

    run(scenario)


# -- the collector -------------------------------------------------------------------------------


class Collector(ThreadingHTTPServer):
    """An OTLP collector over HTTP: it keeps what it gets."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.received: list[ExportTraceServiceRequest] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1/traces"


class _Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.received.append(ExportTraceServiceRequest.FromString(body))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_a_collector_gets_the_spans(collector: Collector) -> None:
    tracing = open_tracing("tiffin-gateway", collector.url)
    with tracing.begin("POST /v1/completions", HEADERS) as span:
        span.set({"gen_ai.request.model": MODEL})
        with pytest.raises(ValueError, match="no"), span.call("place"):
            raise ValueError("no")
    tracing.close()
    (sent,) = collector.received
    (resource,) = sent.resource_spans
    names = {one.key: one.value.string_value for one in resource.resource.attributes}
    assert names["service.name"] == "tiffin-gateway"
    spans = {span.name: span for span in resource.scope_spans[0].spans}
    assert spans["place"].parent_span_id == spans["POST /v1/completions"].span_id
    assert spans["place"].status.message == "ValueError: no"
    assert spans["POST /v1/completions"].trace_id.hex() == TRACE


def test_what_is_no_collector_is_refused() -> None:
    with pytest.raises(InvalidInput, match="http://HOST:4318/v1/traces"):
        open_tracing("tiffin-gateway", "collector:4318")
    assert type(open_tracing("tiffin-gateway", "")) is Tracing


def test_a_span_ends_once() -> None:
    exporter = InMemorySpanExporter()
    tracing = recording("x", exporter)
    span = tracing.begin("a", {})
    span.end("late")
    span.end()
    tracing.close()
    (recorded,) = exporter.get_finished_spans()
    assert recorded.status.description == "late"
