"""The prefill queues of all instances, and how long a new request would wait in each. Pure.

A queue (`queue.py`) can give exact waiting times, by simulating itself; a decision among a thousand
instances has no time for that. So the queues' sums are kept as columns, seconds per class and row,
and the wait of a request of class c is estimated for all rows at once:

    running    the prefill that is running is not interrupted
    + higher   all waiting requests of higher classes
    + same     requests served before it in its own class: all (first come), or the shorter or
               longer ones (by powers of two); but from each other tenant not more seconds than its
               own tenant gets meanwhile: those of its waiting requests, plus its own
    + lower    reserved shares R of lower classes: (higher + same) · R / (1 - R) at most, and
               not more than the seconds waiting there

and, if c has a reserved share r itself, not more than (same + own seconds) / r.

The estimate assumes that no other request arrives. Later arrivals of a higher class make it too
low; aging and cancelled requests make it wrong either way.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from ..errors import Conflict
from .queue import PrefillQueue, Pushed, QueueSettings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from .fairness import Waiter

    Floats = NDArray[np.float64]
    Rows = NDArray[np.int64]

_ROWS_MIN = 64

# Size classes of prefill seconds, in powers of two: below 2 ms, ... , 32 s and more.
_SIZES = 16
_SIZE_MIN_S = 1 / 1024


class Queues:
    """One queue per row of the cluster, created with its first waiter."""

    _running_until: Floats  # [rows]: the estimated end of the prefills that were taken there
    _waiting: Rows  # [classes, rows]
    _class_s: Floats  # [classes, rows]
    _sized: Rows  # [classes, sizes, rows]: waiters of each size class, and their seconds
    _size_s: Floats
    _tenants: Rows  # [classes, rows]: tenants that have waiters

    def __init__(self, settings: QueueSettings | None = None) -> None:
        self._settings = settings or QueueSettings()
        self._queues: dict[int, PrefillQueue] = {}
        self._row_of: dict[str, int] = {}
        self._rows = 0
        self._reset(_ROWS_MIN)

    def __len__(self) -> int:
        return len(self._row_of)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._row_of

    def configure(self, settings: QueueSettings) -> None:
        """Change the settings. All waiters stay, in order of arrival; a waiter whose class no
        longer exists moves to the lowest one. The seconds that tenants and classes have earned are
        reset to 0."""
        before, running_until = self._queues, self._running_until
        self._settings, self._queues = settings, {}
        self._reset(self._rows)
        self._running_until = running_until
        for row, queue in before.items():
            for waiter in queue:
                self._queue(row).adopt(waiter)
                self._count(row, waiter, 1)

    def push(self, row: int, waiter: Waiter) -> Pushed:
        """Enqueue a waiter at an instance; see `PrefillQueue.push`.

        Raises InvalidRequest for an unknown class and an impossible estimate, Conflict for an id
        that waits already, there or elsewhere.
        """
        if waiter.request_id in self._row_of:
            raise Conflict(f"request {waiter.request_id!r} waits already")
        pushed = self._queue(row).push(waiter)
        for victim in pushed.preempted:
            self._uncount(row, victim)
        if pushed.accepted:
            self._count(row, waiter, 1)
        return pushed

    def begin(self, row: int, waiter: Waiter, now: float) -> bool:
        """Start a request at once on an instance with an empty queue: `push` and `take` in a tenth
        of the time. Returns False, and changes nothing, if the queue is not empty. Raises as
        `push`."""
        if self._queues.get(row):
            return False
        if waiter.request_id in self._row_of:
            raise Conflict(f"request {waiter.request_id!r} waits already")
        self._blank.check(waiter)
        self._grow(row)
        self._running_until[row] = max(self._running_until.item(row), now) + waiter.seconds
        return True

    def preempt(
        self, row: int, priority: str, *, places: int = 0, seconds: float = 0.0
    ) -> tuple[Waiter, ...]:
        """Preempt waiters of lower classes in an instance's queue; see `PrefillQueue.preempt`."""
        victims = self._queue(row).preempt(priority, places=places, seconds=seconds)
        for victim in victims:
            self._uncount(row, victim)
        return victims

    def take(self, row: int, now: float) -> Waiter | None:
        """Dequeue the next waiter of an instance, whose prefill begins now; None if the queue is
        empty."""
        queue = self._queues.get(row)
        waiter = None if queue is None else queue.take(now)
        if waiter is None:
            return None
        self._uncount(row, waiter)
        self._running_until[row] = max(float(self._running_until[row]), now) + waiter.seconds
        return waiter

    def done(self, row: int, now: float, left_s: float = 0.0) -> None:
        """Record that an instance has finished its prefills, except for `left_s` seconds."""
        self._grow(row)
        self._running_until[row] = now + left_s

    def remove(self, request_id: str) -> tuple[int, Waiter] | None:
        """Remove a waiter from its queue. Returns its row and the waiter; None if it does not wait
        anywhere."""
        row = self._row_of.get(request_id)
        if row is None:
            return None
        waiter = self._queues[row].remove(request_id)
        assert waiter is not None
        self._uncount(row, waiter)
        return row, waiter

    def forget(self, row: int) -> list[Waiter]:
        """Drop the queue of a removed instance. Returns its waiters, in order of arrival, to be
        sent elsewhere."""
        left = list(self._queues.get(row, ()))
        for waiter in left:
            self.remove(waiter.request_id)
        self._queues.pop(row, None)
        if row < self._rows:
            self._running_until[row] = -math.inf
        return left

    def at(self, row: int) -> PrefillQueue | None:
        """The queue of an instance, read-only; None if it never had a waiter."""
        return self._queues.get(row)

    def __iter__(self) -> Iterator[Waiter]:
        """All waiters of all queues."""
        for queue in list(self._queues.values()):
            yield from queue

    def waiting(self, rows: Rows) -> Rows:
        """The number of waiters at each of the rows."""
        self._grow(int(rows.max(initial=0)))
        waiting: Rows = self._waiting.take(rows, axis=1).sum(axis=0)
        return waiting

    def wait_s(
        self, rows: Rows, priority: str, seconds: float, now: float, tenant: str = ""
    ) -> Floats:
        """The estimated waiting time of a request that takes `seconds`, at each of the rows:
        float64 [rows].

        See the top of this file for the formula. Raises InvalidRequest for an unknown class.
        """
        number = self._blank.number(priority)
        self._grow(int(rows.max(initial=0)))
        running = np.maximum(self._running_until.take(rows) - now, 0.0)
        if not self._row_of:
            return running
        shares, class_s = self._shares, self._class_s
        before = same = self._same_s(rows, number, class_s[number].take(rows), seconds, tenant)
        for higher in range(number):
            before = before + class_s[higher].take(rows)
        lower_share = sum(shares[number + 1 :])
        if lower_share:
            reserved = [at for at in range(number + 1, len(shares)) if shares[at]]
            lower = sum(class_s[at].take(rows) for at in reserved)
            before = before + np.minimum(lower, before * (lower_share / (1.0 - lower_share)))
        if shares[number]:
            before = np.minimum(before, (same + seconds) / shares[number])
        waits: Floats = running + before
        return waits

    def _same_s(
        self, rows: Rows, number: int, class_s: Floats, seconds: float, tenant: str
    ) -> Floats:
        """Seconds of the same class that are served before a new waiter, [rows]."""
        order, same = self._settings.order, class_s
        if order != "fcfs":
            size = _size(seconds)
            sizes = slice(0, size + 1) if order == "shortest-first" else slice(size, _SIZES)
            same = self._size_s[number, sizes].take(rows, axis=1).sum(axis=0)
        if not self._settings.quantum_s:
            return same
        own, its_own = np.zeros(self._rows), self._tenant_s.get((number, tenant), {})
        own[np.fromiter(its_own.keys(), np.int64, len(its_own))] = np.fromiter(
            its_own.values(), np.float64, len(its_own)
        )
        own = own.take(rows)
        others = self._tenants[number].take(rows) - (own > 0.0)
        fair: Floats = np.minimum(same, own + others * (own + seconds))
        return fair

    def _queue(self, row: int) -> PrefillQueue:
        self._grow(row)
        queue = self._queues.get(row)
        if queue is None:
            queue = self._queues[row] = PrefillQueue(self._settings)
        return queue

    def _count(self, row: int, waiter: Waiter, sign: int) -> None:
        """Add a waiter to the columns (`sign` 1), or subtract it (-1)."""
        number = self._blank.number_of(waiter)
        self._row_of[waiter.request_id] = row
        self._waiting[number, row] += sign
        self._class_s[number, row] += sign * waiter.seconds
        size = _size(waiter.seconds)
        self._sized[number, size, row] += sign
        self._size_s[number, size, row] += sign * waiter.seconds
        self._count_tenant(row, waiter, number, sign)

    def _uncount(self, row: int, waiter: Waiter) -> None:
        self._count(row, waiter, -1)
        del self._row_of[waiter.request_id]
        number = self._blank.number_of(waiter)
        # Sums of floats that were added and subtracted end near zero, not at zero.
        if not self._waiting[number, row]:
            self._class_s[number, row] = 0.0
        size = _size(waiter.seconds)
        if not self._sized[number, size, row]:
            self._size_s[number, size, row] = 0.0

    def _count_tenant(self, row: int, waiter: Waiter, number: int, sign: int) -> None:
        key = (number, waiter.tenant)
        counts, seconds = (
            self._tenant_counts.setdefault(key, {}),
            self._tenant_s.setdefault(key, {}),
        )
        before = counts.get(row, 0)
        counts[row] = before + sign
        seconds[row] = seconds.get(row, 0.0) + sign * waiter.seconds
        if before == 0:
            self._tenants[number, row] += 1
        elif counts[row] == 0:
            self._tenants[number, row] -= 1
            del counts[row], seconds[row]
            if not counts:
                del self._tenant_counts[key], self._tenant_s[key]

    def _reset(self, rows: int) -> None:
        """Empty columns, for the classes of the settings."""
        classes = len(self._settings.classes)
        self._rows = rows
        self._blank = PrefillQueue(self._settings)
        self._row_of = {}
        self._shares = [item.reserved_share for item in self._settings.classes]
        self._running_until = np.full(rows, -math.inf)
        self._waiting = np.zeros((classes, rows), np.int64)
        self._class_s = np.zeros((classes, rows))
        self._sized = np.zeros((classes, _SIZES, rows), np.int64)
        self._size_s = np.zeros((classes, _SIZES, rows))
        self._tenants = np.zeros((classes, rows), np.int64)
        # Only rows where a tenant has waiters: there can be many tenants, each at few instances.
        self._tenant_s: dict[tuple[int, str], dict[int, float]] = {}
        self._tenant_counts: dict[tuple[int, str], dict[int, int]] = {}

    def _grow(self, row: int) -> None:
        if row < self._rows:
            return
        more = max(self._rows, row + 1 - self._rows)
        for name in ("_waiting", "_class_s", "_sized", "_size_s", "_tenants"):
            column = getattr(self, name)
            empty = np.zeros((*column.shape[:-1], more), column.dtype)
            setattr(self, name, np.concatenate((column, empty), axis=-1))
        idle = np.full(more, -math.inf)
        self._running_until = np.concatenate((self._running_until, idle))
        self._rows += more


def _size(seconds: float) -> int:
    """The size class of a prefill: the power of two that its seconds are in."""
    return min(max(math.frexp(seconds / _SIZE_MIN_S)[1] - 1, 0), _SIZES - 1)
