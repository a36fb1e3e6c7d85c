"""What was promised to whom: every request in flight, and the load it stands for. Pure.

A decision reserves: a place in the queue of one instance, room for context and answer at another.
Events of the request turn promises into load and end them; a request that is not heard of expires.
Whatever happens, and in whatever order, each amount that was added to the cluster's columns is
taken off once: when nothing is in flight, all `own_...` columns are zero.
"""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING

from .fairness import Waiter

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .cluster import Cluster
    from .queues import Queues
    from .records import Decision, Request


class Phase(IntEnum):
    """How far a request has come; it never goes back."""

    PREFILL = 0  # promised, waiting or being computed
    DECODE = 1
    ENDED = 2


@dataclass(slots=True)
class Flight:
    """One request in flight.

    Rows are the cluster's, -1 once their instance has gone. `own_s` is what was predicted for its
    prefill without the queue, `factor` what that was corrected with. `kv_tokens` are reserved in
    the HBM of each row of `shares`: its decode instance alone, or all that its context is spread
    over.
    """

    request: Request
    decision: Decision
    prefill_row: int
    decode_row: int
    own_s: float
    prefill_s: float
    prefill_tokens: int
    shares: dict[int, int]
    heavy: bool
    decided_at: float
    expires_at: float
    factor: float = 1.0
    tbt_factor: float = 1.0
    hbm_blocks: int = 0  # leading ones that its prefill instance had in HBM
    transfers: tuple[tuple[int, int], ...] = ()  # (source node, bytes) that are being fetched
    phase: Phase = Phase.PREFILL
    prefill_done_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    answered_tokens: int = 0
    context: dict[int, int] = field(default_factory=dict)  # counted in columns, by row


class Ledger:
    """All requests in flight, and the queues that they wait in."""

    def __init__(self, cluster: Cluster, queues: Queues) -> None:
        self._cluster = cluster
        self._queues = queues
        self._flights: dict[str, Flight] = {}
        self._running: dict[int, str] = {}  # per row, whose prefill should be under way
        self._expiry: list[tuple[float, str]] = []
        self._present: Counter[int] = Counter()  # requests that wait for, or run at, each row

    def __len__(self) -> int:
        return len(self._flights)

    def __iter__(self) -> Iterator[Flight]:
        return iter(list(self._flights.values()))

    def get(self, request_id: str) -> Flight | None:
        """The request, if it is in flight."""
        return self._flights.get(request_id)

    def begin(self, flight: Flight, now: float) -> tuple[Flight, ...] | None:
        """Reserve what the decision promised. Returns those that had to leave the queue for it, in
        flight still: end them. None if the queue is full, and nothing was reserved."""
        request, row = flight.request, flight.prefill_row
        waiter = Waiter(request.id, flight.prefill_s, now, request.priority, request.tenant)
        preempted: tuple[Waiter, ...] = ()
        if row not in self._running and self._queues.begin(row, waiter, now):
            self._running[row] = request.id
        else:
            accepted, preempted = self._queues.push(row, waiter)
            if not accepted:
                return None
        self._flights[request.id] = flight
        self._cluster.promise(row, queued=1, queued_tokens=flight.prefill_tokens)
        for at, tokens in flight.shares.items():
            self._cluster.promise(at, kv_used_tokens=tokens)
        for at in {row, *flight.shares}:
            self._present[at] += 1
        heapq.heappush(self._expiry, (flight.expires_at, request.id))
        self._go_on(row, now)
        victims = (self._flights.get(one.request_id) for one in preempted)
        return tuple(victim for victim in victims if victim is not None)

    def prefill_done(self, flight: Flight, now: float) -> bool:
        """Its prompt is computed: it leaves the queue and runs at its decode instance. Whether that
        is news."""
        if flight.phase is not Phase.PREFILL:
            return False
        self._leave_queue(flight, now)
        if flight.prefill_row not in flight.shares:
            self._leave(flight.prefill_row)
        flight.phase, flight.prefill_done_at = Phase.DECODE, now
        for row in flight.shares:
            self._count(flight, row, self._part(flight, row, flight.request.prompt_tokens))
        if flight.decode_row >= 0:
            self._cluster.promise(flight.decode_row, batch=1)
            self._cluster.heavy[flight.decode_row] += flight.heavy
        return True

    def tokens(self, flight: Flight, count: int, now: float) -> None:
        """It has answered `count` more tokens."""
        self.prefill_done(flight, now)
        flight.answered_tokens += count
        flight.last_token_at = now
        if flight.decode_row >= 0:
            self._count(flight, flight.decode_row, count)

    def prolong(self, flight: Flight, until: float) -> None:
        """It was heard of."""
        flight.expires_at = max(flight.expires_at, until)

    def end(self, flight: Flight, now: float) -> bool:
        """It has finished, was cancelled or preempted, or expired. Whether that is news."""
        if flight.phase is Phase.ENDED:
            return False
        for row in flight.shares:
            self._leave(row)
        if flight.phase is Phase.PREFILL:
            self._leave_queue(flight, now)
            if flight.prefill_row not in flight.shares:
                self._leave(flight.prefill_row)
        elif flight.decode_row >= 0:
            self._cluster.promise(flight.decode_row, batch=-1)
            self._cluster.heavy[flight.decode_row] -= flight.heavy
        for row, tokens in flight.shares.items():
            self._cluster.promise(row, kv_used_tokens=-tokens)
        for row, tokens in flight.context.items():
            self._cluster.promise(row, context_tokens=-tokens)
        flight.phase = Phase.ENDED
        del self._flights[flight.request.id]
        return True

    def expired(self, now: float) -> list[Flight]:
        """Requests that were not heard of for too long. They are still in flight: end them."""
        late: dict[str, Flight] = {}  # an id that was used again has several entries
        while self._expiry and self._expiry[0][0] <= now:
            _, request_id = heapq.heappop(self._expiry)
            flight = self._flights.get(request_id)
            if flight is None:
                continue
            if flight.expires_at > now:  # it was heard of since
                heapq.heappush(self._expiry, (flight.expires_at, request_id))
            else:
                late[request_id] = flight
        return list(late.values())

    def requests_at(self, row: int) -> int:
        """How many requests wait for, or run at, an instance."""
        return self._present[row]

    def forget_row(self, row: int) -> None:
        """An instance is removed: its row begins anew, and nothing is taken from it later."""
        self._queues.forget(row)
        self._running.pop(row, None)
        self._present.pop(row, None)
        for flight in self._flights.values():
            flight.prefill_row = -1 if flight.prefill_row == row else flight.prefill_row
            flight.decode_row = -1 if flight.decode_row == row else flight.decode_row
            flight.shares.pop(row, None)
            flight.context.pop(row, None)

    def _leave(self, row: int) -> None:
        """One request fewer; none is counted where the instance has gone."""
        if row in self._present:
            self._present[row] -= 1
            if not self._present[row]:
                del self._present[row]

    def _part(self, flight: Flight, row: int, tokens: int) -> int:
        """What a row holds of `tokens`, as its share is of all."""
        total = sum(flight.shares.values())
        return tokens * flight.shares[row] // total if total else 0

    def _count(self, flight: Flight, row: int, tokens: int) -> None:
        flight.context[row] = flight.context.get(row, 0) + tokens
        self._cluster.promise(row, context_tokens=tokens)

    def _leave_queue(self, flight: Flight, now: float) -> None:
        row = flight.prefill_row
        if row < 0:
            return
        self._cluster.promise(row, queued=-1, queued_tokens=-flight.prefill_tokens)
        if self._running.get(row) == flight.request.id:
            del self._running[row]
            self._queues.done(row, now)
        else:  # the engine has an order of its own, or it was given up
            self._queues.remove(flight.request.id)
        self._go_on(row, now)

    def _go_on(self, row: int, now: float) -> None:
        """The instance begins with the next one, as far as we know."""
        if row not in self._running:
            waiter = self._queues.take(row, now)
            if waiter is not None:
                self._running[row] = waiter.request_id
