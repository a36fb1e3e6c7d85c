"""Spans that OpenTelemetry records. Only `tracing.py` imports this, where its libraries are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from .tracing import Span, Tracing

if TYPE_CHECKING:
    from collections.abc import Mapping

    from opentelemetry.sdk.trace.export import SpanExporter

    from .tracing import Attributes

_propagator = TraceContextTextMapPropagator()


class RecordedTracing(Tracing):
    """See `tracing.recording`. A request without a trace context begins a trace."""

    def __init__(self, service: str, exporter: SpanExporter) -> None:
        resource = Resource.create({"service.name": service})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("tiffin")

    def begin(self, name: str, headers: Mapping[str, str]) -> Span:
        """A span of a request that arrived with these headers."""
        parent = _propagator.extract(dict(headers))
        span = self._tracer.start_span(name, parent, SpanKind.SERVER)
        return _Recorded(self._tracer, span)

    def close(self) -> None:
        """Send what is recorded, and end the thread."""
        self._provider.shutdown()


class _Recorded(Span):
    def __init__(self, tracer: trace.Tracer, span: trace.Span) -> None:
        self._tracer, self._span = tracer, span
        self._context = trace.set_span_in_context(span)
        headers: dict[str, str] = {}
        _propagator.inject(headers, self._context)
        super().__init__(headers)

    def call(self, name: str, **attributes: Any) -> Span:
        span = self._tracer.start_span(name, self._context, SpanKind.CLIENT, attributes)
        return _Recorded(self._tracer, span)

    def set(self, attributes: Attributes) -> None:
        self._span.set_attributes(attributes)

    def end(self, failure: str = "") -> None:
        if failure and self._span.is_recording():
            self._span.set_status(Status(StatusCode.ERROR, failure))
        if self._span.is_recording():  # else OpenTelemetry warns of a second end
            self._span.end()
