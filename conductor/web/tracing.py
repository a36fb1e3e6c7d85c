"""Distributed tracing: the W3C trace context of a request, on its way through the services.

Without a collector a request's trace context is passed on as it came. With one, at an OTLP endpoint
over HTTP, each service adds its spans; that needs the extra `tracing` (OpenTelemetry).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from tiffin.kvstore.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

    from opentelemetry.sdk.trace.export import SpanExporter

HEADERS = ("traceparent", "tracestate")

Attributes = dict[str, str | int | float | bool]


class Span:
    """A part of a request's way, for an `async with` or `with` block in any thread or task, or to
    be ended by `end`. This one records nothing. `headers` are for calls that the span makes."""

    def __init__(self, headers: Mapping[str, str]) -> None:
        self.headers = {name: headers[name] for name in HEADERS if name in headers}

    def call(self, name: str, **attributes: str | float) -> Span:
        """A span within this one: a call of another service."""
        return self

    def set(self, attributes: Attributes) -> None:
        """Add attributes."""

    def end(self, failure: str = "") -> None:
        """End the span, with a reason if it has failed. Only the first call counts."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.end("" if error is None else f"{type(error).__name__}: {error}")


class Tracing:
    """The spans of one service. This one passes trace contexts on and records nothing."""

    def begin(self, name: str, headers: Mapping[str, str]) -> Span:
        """A span of a request that arrived with these headers."""
        return Span(headers)

    def close(self) -> None:
        """Send what is recorded."""


def open_tracing(service: str, endpoint: str) -> Tracing:
    """Tracing of a service with this name to an OTLP endpoint, such as
    http://127.0.0.1:4318/v1/traces; "" records nothing. Raises InvalidInput for what is no such
    URL, or if the extra is missing."""
    if not endpoint:
        return Tracing()
    if not endpoint.startswith(("http://", "https://")):
        raise InvalidInput(
            f"--otlp-endpoint {endpoint!r} is no URL of a collector: http://HOST:4318/v1/traces"
        )
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise InvalidInput(
            f"--otlp-endpoint needs the extra `tracing`: pip install 'tiffin[tracing]' ({error})"
        ) from error
    return recording(service, OTLPSpanExporter(endpoint=endpoint))


def recording(service: str, exporter: SpanExporter) -> Tracing:
    """Tracing of a service with this name, whose spans `exporter` gets in batches, in a thread of
    its own. Needs the extra `tracing`."""
    from .recorded_spans import RecordedTracing

    return RecordedTracing(service, exporter)
