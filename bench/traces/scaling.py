"""The same trace faster, shorter, or for more tenants."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING

from tiffin.kvstore.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .trace import Trace, TraceRequest


def at_rate(trace: Trace, factor: float) -> Trace:
    """The trace with `factor` times as many requests per second: its clock runs faster."""
    if factor <= 0:
        raise InvalidInput(f"a factor of a rate is above 0, not {factor}")
    faster = [replace(r, arrival_s=r.arrival_s / factor) for r in trace.requests]
    return replace(trace, requests=tuple(faster))


def window(trace: Trace, start_s: float, stop_s: float) -> Trace:
    """The requests that arrive in [start_s, stop_s), with `start_s` as the new start."""
    kept = [r for r in trace.requests if start_s <= r.arrival_s < stop_s]
    moved = [replace(r, arrival_s=r.arrival_s - start_s) for r in kept]
    return replace(trace, requests=tuple(moved))


def followed(trace: Trace, later: Trace) -> Trace:
    """The trace, and from its last arrival on another one of the same blocks."""
    begin_s = trace.requests[-1].arrival_s
    moved = [replace(r, arrival_s=r.arrival_s + begin_s) for r in later.requests]
    return replace(trace, requests=(*trace.requests, *moved))


def with_tenants(trace: Trace, count: int, seed: int) -> Trace:
    """`count` tenants with one copy of the trace each, which share no block.

    All but the first copy start somewhere within the trace, drawn from the seed, and go on with its
    start: else every burst would come `count` times at once. The span stays, the rate is `count`
    times as high. Ids are numbered anew, in order of appearance.
    """
    if count < 1:
        raise InvalidInput(f"a trace has at least one tenant, not {count}")
    chance = Random(seed)
    offsets = [0.0, *(chance.uniform(0, trace.span_s) for _ in range(count - 1))]
    copies = [
        (tenant, request)
        for tenant, offset in enumerate(offsets)
        for request in _rotated(trace, offset)
    ]
    copies.sort(key=lambda copy: copy[1].arrival_s)
    return replace(trace, requests=tuple(_renumbered(copies)))


def _rotated(trace: Trace, offset_s: float) -> list[TraceRequest]:
    """The trace as it is seen by one who comes `offset_s` late, and stays for its span."""
    if not offset_s:
        return list(trace.requests)
    start_s = trace.requests[0].arrival_s
    return [
        replace(r, arrival_s=start_s + (r.arrival_s - start_s - offset_s) % trace.span_s)
        for r in trace.requests
    ]


def _renumbered(copies: Sequence[tuple[int, TraceRequest]]) -> list[TraceRequest]:
    numbers: dict[tuple[int, int], int] = {}
    return [
        replace(
            request,
            tenant=f"tenant-{tenant}",
            blocks=tuple(numbers.setdefault((tenant, b), len(numbers)) for b in request.blocks),
        )
        for tenant, request in copies
    ]
