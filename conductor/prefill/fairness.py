"""Fair queueing within one priority class: deficit round robin over tenants. Pure.

Two orders, one inside the other.

**Between tenants**: deficit round robin (Shreedhar and Varghese, SIGCOMM '95). The tenants form a
ring. In its turn a tenant gets a quantum of seconds, added to its deficit counter, and is served
while the counter covers its first waiting request; the unused rest carries over to its next turn,
and is lost when the tenant's queue is empty. Two tenants that both always have waiting requests are
served the same seconds, to within a quantum and two requests, no matter how long each one's
requests are. Round robin by request count would give most time to the tenant with the longest
requests.

**Within a tenant**: first come, shortest first, or longest first, among requests that have not
waited for `aging_s`; a request that has is served before all others, in order of arrival. So no
request is overtaken by one that arrived more than `aging_s` later.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

Order = Literal["fcfs", "shortest-first", "longest-first"]


@dataclass(frozen=True, slots=True)
class Waiter:
    """A request that waits for prefill: `seconds` is the estimated prefill time, `arrived_at` the
    time when it entered this queue. `fetch_s`: how long its blocks take to come once it is sent to
    its instance; 0 if they are there."""

    request_id: str
    seconds: float
    arrived_at: float
    priority: str = "normal"
    tenant: str = ""
    fetch_s: float = 0.0


class Line:
    """The queue of one tenant, in order of arrival."""

    __slots__ = ("_aging_s", "_heap", "_order", "_sequence", "_waiting")

    def __init__(self, order: Order, aging_s: float) -> None:
        self._order = order
        self._aging_s = aging_s
        self._sequence = 0
        # Oldest first. The heap also has stale entries of waiters that were removed: their sequence
        # number differs from the one here, or their id is not here.
        self._waiting: OrderedDict[str, tuple[int, Waiter]] = OrderedDict()
        self._heap: list[tuple[float, int, str]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Waiter]:
        """All waiters, oldest first."""
        return (waiter for _, waiter in self._waiting.values())

    def push(self, waiter: Waiter) -> None:
        """Add a waiter, mostly at the end; before those that arrived later than it, if it had to
        wait for its blocks."""
        self._sequence += 1
        later = []
        while self._waiting and self._newest.arrived_at > waiter.arrived_at:
            later.append(self._waiting.popitem())
        self._waiting[waiter.request_id] = (self._sequence, waiter)
        self._waiting.update(reversed(later))
        if self._order != "fcfs":
            size_s = waiter.seconds if self._order == "shortest-first" else -waiter.seconds
            heapq.heappush(self._heap, (size_s, self._sequence, waiter.request_id))

    def remove(self, request_id: str) -> Waiter:
        """Remove and return a waiter, at any position. Raises KeyError."""
        waiter = self._waiting.pop(request_id)[1]
        # Stale heap entries are removed at the top, or all at once when most entries are stale.
        if len(self._heap) > 2 * len(self._waiting) + 16:
            self._heap = [item for item in self._heap if self._waits(item)]
            heapq.heapify(self._heap)
        return waiter

    def first(self, now: float) -> Waiter:
        """The waiter that is served next. The queue must not be empty."""
        oldest = next(iter(self._waiting.values()))[1]
        if self._order == "fcfs" or now - oldest.arrived_at >= self._aging_s:
            return oldest
        while not self._waits(self._heap[0]):
            heapq.heappop(self._heap)
        return self._waiting[self._heap[0][2]][1]

    @property
    def _newest(self) -> Waiter:
        return self._waiting[next(reversed(self._waiting))][1]

    def _waits(self, item: tuple[float, int, str]) -> bool:
        waiting = self._waiting.get(item[2])
        return waiting is not None and waiting[0] == item[1]


@dataclass(slots=True)
class _Place:
    """One tenant in the ring: its queue, and its deficit counter in seconds."""

    line: Line
    quantum_s: float
    deficit_s: float = 0.0


@dataclass(slots=True)
class Ring:
    """All tenants with waiting requests. `quantum_s` of 0: one queue for all, without fairness
    between tenants.

    `weights` multiply the quantum of a tenant; 1 for a tenant without a weight. A tenant's state
    is kept only while it has waiting requests.
    """

    order: Order
    aging_s: float
    quantum_s: float
    weights: Mapping[str, float] = field(default_factory=dict)
    _places: OrderedDict[str, _Place] = field(default_factory=OrderedDict)
    _given: bool = False  # whether the tenant in front already has this turn's quantum

    def __len__(self) -> int:
        return sum(len(place.line) for place in self._places.values())

    def __bool__(self) -> bool:
        return bool(self._places)

    def push(self, waiter: Waiter) -> None:
        """Add a waiter. A new tenant enters the ring behind all others."""
        name = self._tenant(waiter)
        place = self._places.get(name)
        if place is None:
            quantum_s = self.quantum_s * self.weights.get(name, 1.0)
            place = self._places[name] = _Place(Line(self.order, self.aging_s), quantum_s)
        place.line.push(waiter)

    def first(self, now: float) -> Waiter:
        """The waiter that is served next: turns the ring until the deficit counter of the tenant in
        front covers its first waiter. The ring must not be empty.

        Idempotent: repeated calls without a change in between return the same waiter.
        """
        fruitless = 0
        while True:
            place = next(iter(self._places.values()))
            head = place.line.first(now)
            if not self.quantum_s:
                return head
            if not self._given:
                place.deficit_s += place.quantum_s
                self._given = True
            if place.deficit_s >= head.seconds:
                return head
            self._places.move_to_end(next(iter(self._places)))
            self._given = False
            fruitless += 1
            if fruitless == len(self._places):
                self._skip_rounds(now)
                fruitless = 0

    def take(self, now: float) -> Waiter:
        """Remove and return the next waiter, and charge its seconds to its tenant."""
        waiter = self.first(now)
        self._places[self._tenant(waiter)].deficit_s -= waiter.seconds
        self.remove(waiter)
        return waiter

    def remove(self, waiter: Waiter) -> None:
        """Remove a waiter without charging its tenant. Raises KeyError."""
        name = self._tenant(waiter)
        line = self._places[name].line
        line.remove(waiter.request_id)
        if not line:
            if name == next(iter(self._places)):
                self._given = False
            del self._places[name]

    def _skip_rounds(self, now: float) -> None:
        """Fast-forward after a whole round in which no tenant was served. Until one can be, rounds
        only add quanta: add them all at once, or a waiter of a hundred seconds would take a
        thousand rounds of a tenth of a second."""
        rounds = min(
            math.ceil((place.line.first(now).seconds - place.deficit_s) / place.quantum_s)
            for place in self._places.values()
        )
        for place in self._places.values():
            place.deficit_s += (rounds - 1) * place.quantum_s

    def _tenant(self, waiter: Waiter) -> str:
        return waiter.tenant if self.quantum_s else ""
