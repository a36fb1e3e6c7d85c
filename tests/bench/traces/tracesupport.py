"""Traces for tests."""

from __future__ import annotations

from importlib.resources import as_file, files
from typing import TYPE_CHECKING

from tiffin.bench.traces.readers import read
from tiffin.bench.traces.trace import Trace, TraceRequest

if TYPE_CHECKING:
    from collections.abc import Sequence


def shipped_slice() -> Trace:
    """The slice of a real trace that ships with the demo."""
    with as_file(files("tiffin.bench.data") / "conversation_slice.jsonl") as path:
        return read(path)


def trace_of(*chains: Sequence[int], answer: int = 1) -> Trace:
    """A request per second and chain, of full blocks."""
    requests = [
        TraceRequest(float(at), 512 * len(chain), answer, tuple(chain))
        for at, chain in enumerate(chains)
    ]
    return Trace("test", tuple(requests))
