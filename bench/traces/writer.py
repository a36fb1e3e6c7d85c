"""Traces to files, in Mooncake's format (`readers.py`)."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from .trace import Trace, TraceRequest


def write(trace: Trace, path: Path) -> None:
    """Write the trace; arrivals keep their microseconds. Raises OSError."""
    path.write_text("".join(f"{line}\n" for line in lines(trace)), encoding="ascii")


def lines(trace: Trace) -> Iterator[str]:
    """One JSON object per request."""
    return (json.dumps(_fields(request)) for request in trace.requests)


def _fields(request: TraceRequest) -> dict[str, object]:
    milliseconds = round(request.arrival_s * 1000, 3)
    fields: dict[str, object] = {
        "timestamp": int(milliseconds) if milliseconds.is_integer() else milliseconds,
        "input_length": request.prompt_tokens,
        "output_length": request.output_tokens,
    }
    if request.blocks:
        fields["hash_ids"] = request.blocks
    return fields
