"""The prefill queue of one instance: priority classes, tenants, order, preemption. Pure.

The next request is chosen in three steps, from outside to inside:

1. **Class**: the highest priority class with a waiting request, except for reserved shares. A class
   with a reserved share earns that share of every second that is served while it waits behind a
   higher one. When it has earned the seconds of its first request, that one is served ahead of
   higher classes, and its seconds are deducted. So a lower class is served ahead of waiting higher
   ones for at most its share of all seconds served, and a class that always has waiting requests
   gets its share, less one request. The highest class that waits is served in its own right: it
   earns nothing, and what it had earned is gone, or it could be spent in a row later.
2. **Tenant**: deficit round robin (`fairness.py`).
3. **Order** within the tenant: first come, shortest or longest first, with aging.

A queue has a limit. A request that finds the queue full preempts the newest request of the lowest
class, if that class is lower than its own: the newest has waited least and loses least. Preemption
leaves each class its reserved share of the places, too.

The queue has the requests that the conductor holds back (`dispatch/`). If it holds back none, it is
a model of the instance's queue: an engine that was sent more requests than it can start serves them
in an order of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, NamedTuple

import msgspec
from msgspec import Meta

from ..errors import Conflict, InvalidRequest
from .fairness import Order, Ring, Waiter

if TYPE_CHECKING:
    from collections.abc import Iterator

# Over 11 days: an estimate beyond it is a mistake in a profile, and would block a queue for good.
SECONDS_MAX = 1e6

# Every class adds a row of numbers to each decision (`wait_estimate.py`).
CLASSES_MAX = 8

# At 1, lower classes together would always go first.
RESERVED_SHARE_MAX = 0.9

# No prefill is that short, so a smaller quantum would only add arithmetic.
QUANTUM_S_MIN = 0.001

Name = Annotated[str, Meta(min_length=1, max_length=64)]


class PriorityClass(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One class of priority."""

    name: Name
    """What requests call it."""

    reserved_share: Annotated[float, Meta(ge=0.0, lt=1.0)] = 0.0
    """Of prefill time, and of places in the queue, that higher classes leave to it."""


class QueueSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """In which order prefills are served. Raises ValueError for names given twice, and for shares
    that leave nothing to priority."""

    classes: Annotated[tuple[PriorityClass, ...], Meta(min_length=1, max_length=CLASSES_MAX)] = (
        PriorityClass(name="high"),
        PriorityClass(name="normal", reserved_share=0.2),
        PriorityClass(name="low", reserved_share=0.05),
    )
    """All classes, the highest first."""

    order: Order = "fcfs"
    """Within one tenant. Shortest-first lowers the mean wait (TetriInfer measured 7.8 % less
    latency); longest-first is for batch work whose longest request decides when all is done."""

    aging_s: Annotated[float, Meta(ge=0.0, le=86_400.0)] = 10.0
    """Who has waited so long is served before all who have not, of the same tenant."""

    quantum_s: Annotated[float, Meta(ge=0.0, le=3600.0)] = 0.5
    """Prefill seconds that one tenant gets per turn. Smaller is fairer in the short run; 0 switches
    fairness between tenants off. Half a second is a prompt of some 4,000 tokens for a model of 70
    billion parameters on eight A800."""

    tenant_weights: dict[Name, Annotated[float, Meta(ge=0.01, le=100.0)]] = {}
    """Turns of a tenant are longer by this factor; 1 for who is not named."""

    waiting_max: Annotated[int, Meta(ge=1, le=65_536)] = 1024
    """Requests that may wait at one instance: far more than any objective allows to be waited
    for, few enough to be rebuilt when a setting changes."""

    preempting: bool = True
    """Whether a full queue lets a higher class push out a lower one."""

    ahead_max: Annotated[int, Meta(ge=0, le=65_536)] = 2
    """Requests that are sent ahead to an engine; all others are held back until it is their turn,
    and can be overtaken until then. One would do if predictions were exact (`ahead_s`): the second
    keeps an engine busy that is faster than predicted. 0 holds nothing: then the engine has an
    order of its own, and this one is a forecast."""

    ahead_s: Annotated[float, Meta(ge=0.0, le=3600.0)] = 0.3
    """The next one is sent, too, when all that is ahead should end within this time, or the engine
    would stand still between two: 0.1 s each for the news of an end, for the request, and for the
    conductor to look (`service/server.py`). It is also some steps of an engine that computes
    several short prompts in one."""

    def __post_init__(self) -> None:
        names = [item.name for item in self.classes]
        if len(set(names)) < len(names):
            raise ValueError("classes: give each name once")
        if sum(item.reserved_share for item in self.classes) > RESERVED_SHARE_MAX:
            raise ValueError(f"classes: reserve at most {RESERVED_SHARE_MAX} altogether")
        if 0.0 < self.quantum_s < QUANTUM_S_MIN:
            raise ValueError(f"quantum_s: at least {QUANTUM_S_MIN}, or 0 for no fairness")


class Pushed(NamedTuple):
    """Whether a waiter was accepted, and the waiters that were preempted for it."""

    accepted: bool
    preempted: tuple[Waiter, ...] = ()


@dataclass(slots=True)
class _Class:
    """One class of one queue. `earned_s`: the seconds that its reserved share has earned. They grow
    with each request served while the class waits behind a higher one, are spent when a waiter is
    served ahead of a higher class, and are lost when the class is the highest that waits, and when
    no waiter is left. Never negative."""

    name: str
    reserved_share: float
    ring: Ring
    kept: int  # places that preemption leaves to it
    waiting: int = 0
    earned_s: float = 0.0


class PrefillQueue:
    """The waiters of one instance. Every waiter that was accepted leaves once: taken, removed, or
    preempted by `push`."""

    def __init__(self, settings: QueueSettings) -> None:
        self._settings = settings
        self._classes = [_new_class(item, settings) for item in settings.classes]
        self._numbers = {item.name: number for number, item in enumerate(settings.classes)}
        # All waiters, by id, in order of arrival.
        self._waiters: dict[str, tuple[int, Waiter]] = {}

    def __len__(self) -> int:
        return len(self._waiters)

    def __iter__(self) -> Iterator[Waiter]:
        """All waiters, in order of arrival."""
        return (waiter for _, waiter in list(self._waiters.values()))

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiters

    def push(self, waiter: Waiter) -> Pushed:
        """Enqueue a waiter; not accepted if the queue is full and no waiter can be preempted.

        Raises InvalidRequest for an unknown class and an impossible estimate, Conflict for an id
        that waits already.
        """
        number = self.check(waiter)
        if waiter.request_id in self._waiters:
            raise Conflict(f"request {waiter.request_id!r} waits here already")
        preempted: tuple[Waiter, ...] = ()
        if len(self) >= self._settings.waiting_max:
            preempted = self._preempt(number) if self._settings.preempting else ()
            if not preempted:
                return Pushed(False)
        self._add(number, waiter)
        return Pushed(True, preempted)

    def check(self, waiter: Waiter) -> int:
        """Validate a waiter; returns the number of its class. Raises InvalidRequest for an unknown
        class, and for an impossible estimate."""
        if not (0.0 < waiter.seconds <= SECONDS_MAX and math.isfinite(waiter.arrived_at)):
            raise InvalidRequest(
                f"request {waiter.request_id!r}: prefill of {waiter.seconds} s, arrived at "
                f"{waiter.arrived_at}; give more than 0 s, at most {SECONDS_MAX:.0f} s"
            )
        return self.number(waiter.priority)

    def adopt(self, waiter: Waiter) -> None:
        """Enqueue a waiter of a queue with earlier settings: regardless of the limit, and in the
        lowest class if its own no longer exists. Raises Conflict for an id that waits already."""
        if waiter.request_id in self._waiters:
            raise Conflict(f"request {waiter.request_id!r} waits here already")
        self._add(self.number_of(waiter), waiter)

    def first(self, now: float) -> Waiter | None:
        """The next waiter, which stays in the queue; None if the queue is empty."""
        picked = self._pick(now)
        return None if picked is None else picked[1]

    def take(self, now: float) -> Waiter | None:
        """Dequeue the next waiter; None if the queue is empty."""
        picked = self._pick(now)
        if picked is None:
            return None
        number, waiter, ahead = picked
        top, *lower = (one for one in self._classes if one.waiting)
        top.earned_s = 0.0
        for one in lower:
            one.earned_s += one.reserved_share * waiter.seconds
        served = self._classes[number]
        if ahead:
            served.earned_s -= waiter.seconds
        served.ring.take(now)
        self._left(number, waiter)
        return waiter

    def remove(self, request_id: str) -> Waiter | None:
        """Remove a waiter that was cancelled or sent elsewhere. None if it does not wait here."""
        found = self._waiters.get(request_id)
        if found is None:
            return None
        number, waiter = found
        self._classes[number].ring.remove(waiter)
        self._left(number, waiter)
        return waiter

    def number(self, priority: str) -> int:
        """The number of a priority class, 0 the highest. Raises InvalidRequest if unknown."""
        number = self._numbers.get(priority)
        if number is None:
            known = ", ".join(self._numbers)
            raise InvalidRequest(f"no class of priority {priority!r}; there are {known}")
        return number

    def number_of(self, waiter: Waiter) -> int:
        """The number of a waiter's class; the lowest one if its own no longer exists."""
        return self._numbers.get(waiter.priority, len(self._classes) - 1)

    def _pick(self, now: float) -> tuple[int, Waiter, bool] | None:
        """The next waiter with its class's number, and whether it is served ahead of a higher class
        with waiters."""
        top: tuple[int, Waiter, bool] | None = None
        for number, one in enumerate(self._classes):
            if not one.waiting:
                continue
            if top is None:
                top = (number, one.ring.first(now), False)
            elif one.earned_s > 0.0 and one.earned_s >= (head := one.ring.first(now)).seconds:
                return number, head, True
        return top

    def _preempt(self, number: int) -> tuple[Waiter, ...]:
        """Remove the newest waiter of the lowest class below this one that has more places than its
        share; () if there is none."""
        for lower in range(len(self._classes) - 1, number, -1):
            if self._classes[lower].waiting <= self._classes[lower].kept:
                continue
            waiters = reversed(self._waiters.values())
            newest = next(waiter for at, waiter in waiters if at == lower)
            self.remove(newest.request_id)
            return (newest,)
        return ()

    def _add(self, number: int, waiter: Waiter) -> None:
        self._waiters[waiter.request_id] = (number, waiter)
        self._classes[number].ring.push(waiter)
        self._classes[number].waiting += 1

    def _left(self, number: int, waiter: Waiter) -> None:
        del self._waiters[waiter.request_id]
        one = self._classes[number]
        one.waiting -= 1
        if not one.waiting:
            one.earned_s = 0.0


def _new_class(item: PriorityClass, settings: QueueSettings) -> _Class:
    ring = Ring(settings.order, settings.aging_s, settings.quantum_s, settings.tenant_weights)
    kept = int(item.reserved_share * settings.waiting_max)
    return _Class(item.name, item.reserved_share, ring, kept)
