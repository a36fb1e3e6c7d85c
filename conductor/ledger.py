"""What was promised to whom: every request in flight, and the load it stands for. Pure.

A decision reserves: prefill seconds in the queue of one instance, room for context and answer at
another. Events of the request turn promises into load and end them; a request that is not heard of
expires. Whatever happens, and in whatever order, each amount that was added to the cluster's
columns is taken off once: when nothing is in flight, all `own_...` columns are zero.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .cluster import Cluster
    from .records import Decision, Request


class Phase(IntEnum):
    """How far a request has come; it never goes back."""

    PREFILL = 0  # promised, waiting or being computed
    DECODE = 1
    ENDED = 2


@dataclass(slots=True)
class Flight:
    """One request in flight. Rows are the cluster's; `versions` tell whether they still are those
    of the same instances."""

    request: Request
    decision: Decision
    prefill_row: int
    decode_row: int
    prefill_s: float
    prefill_tokens: int
    decode_tokens: int  # of context and expected answer, reserved in HBM
    heavy: bool
    decided_at: float
    expires_at: float
    phase: Phase = Phase.PREFILL
    prefill_done_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    answered_tokens: int = 0
    prefill_instance: str = ""
    decode_instance: str = ""
    context_tokens: int = 0  # counted in the decode instance's column
    extra: dict[str, float] = field(default_factory=dict)


class Ledger:
    """All requests in flight."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._flights: dict[str, Flight] = {}
        # Per row: what is queued there, in order, and how long each should take.
        self._queued: dict[int, dict[str, float]] = {}
        self._expiry: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self._flights)

    def __iter__(self) -> Iterator[Flight]:
        return iter(list(self._flights.values()))

    def get(self, request_id: str) -> Flight | None:
        """The request, if it is in flight."""
        return self._flights.get(request_id)

    def begin(self, flight: Flight, now: float) -> None:
        """Reserve what the decision promised."""
        cluster, row = self._cluster, flight.prefill_row
        self._flights[flight.request.id] = flight
        flight.prefill_instance = cluster.name(row)
        flight.decode_instance = cluster.name(flight.decode_row)
        cluster.promise(row, queued=1, queued_tokens=flight.prefill_tokens)
        self._queued.setdefault(row, {})[flight.request.id] = flight.prefill_s
        cluster.free_at[row] = max(float(cluster.free_at[row]), now) + flight.prefill_s
        cluster.promise(flight.decode_row, kv_used_tokens=flight.decode_tokens)
        heapq.heappush(self._expiry, (flight.expires_at, flight.request.id))

    def prefill_done(self, flight: Flight, now: float) -> None:
        """Its prompt is computed: it leaves the queue, and runs at its decode instance."""
        if flight.phase is not Phase.PREFILL:
            return
        self._leave_queue(flight, now)
        flight.phase, flight.prefill_done_at = Phase.DECODE, now
        row = self._decode_row(flight)
        if row is not None:
            flight.context_tokens = flight.request.prompt_tokens
            self._cluster.promise(row, batch=1, context_tokens=flight.context_tokens)
            self._cluster.heavy[row] += flight.heavy

    def tokens(self, flight: Flight, count: int, now: float) -> None:
        """It has answered `count` more tokens."""
        self.prefill_done(flight, now)
        if flight.phase is not Phase.DECODE:
            return
        flight.answered_tokens += count
        flight.last_token_at = now
        row = self._decode_row(flight)
        if row is not None:
            flight.context_tokens += count
            self._cluster.promise(row, context_tokens=count)

    def end(self, flight: Flight, now: float) -> None:
        """It has finished, was cancelled or preempted, or expired."""
        if flight.phase is Phase.ENDED:
            return
        if flight.phase is Phase.PREFILL:
            self._leave_queue(flight, now)
        row = self._decode_row(flight)
        if row is not None:
            self._cluster.promise(row, kv_used_tokens=-flight.decode_tokens)
            if flight.phase is Phase.DECODE:
                self._cluster.promise(row, batch=-1, context_tokens=-flight.context_tokens)
                self._cluster.heavy[row] -= flight.heavy
        flight.phase = Phase.ENDED
        del self._flights[flight.request.id]

    def expired(self, now: float) -> list[Flight]:
        """Requests that were not heard of for too long. They are still in flight: end them."""
        late = []
        while self._expiry and self._expiry[0][0] <= now:
            _, request_id = heapq.heappop(self._expiry)
            flight = self._flights.get(request_id)
            if flight is None:
                continue
            if flight.expires_at > now:  # it was heard of since
                heapq.heappush(self._expiry, (flight.expires_at, request_id))
            else:
                late.append(flight)
        return late

    def of(self, instance: str) -> list[Flight]:
        """Requests that wait for, or run at, an instance."""
        return [f for f in self if instance in (f.prefill_instance, f.decode_instance)]

    def forget_row(self, row: int) -> None:
        """An instance is removed: its row begins anew, and nothing is taken from it later."""
        self._queued.pop(row, None)
        for flight in self._flights.values():
            if flight.prefill_row == row:
                flight.prefill_row = -1
            if flight.decode_row == row:
                flight.decode_row = -1

    def queued_s(self, row: int) -> float:
        """Seconds of prefill that were promised to an instance and are not done."""
        return sum(self._queued.get(row, {}).values())

    def _leave_queue(self, flight: Flight, now: float) -> None:
        row = flight.prefill_row
        if row < 0:
            return
        queue = self._queued[row]
        last = flight.request.id == next(iter(queue)) and len(queue) == 1
        del queue[flight.request.id]
        self._cluster.promise(row, queued=-1, queued_tokens=-flight.prefill_tokens)
        # What is left begins now at the latest: estimates do not add up their errors.
        left_s = 0.0 if last else sum(queue.values())
        self._cluster.free_at[row] = min(float(self._cluster.free_at[row]), now + left_s)

    def _decode_row(self, flight: Flight) -> int | None:
        return flight.decode_row if flight.decode_row >= 0 else None
