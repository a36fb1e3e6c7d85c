"""The prefill queues of all instances, and how long a new request would wait in each. Pure.

A queue (`queue.py`) can give exact waiting times, by simulating itself; a decision among a thousand
instances has no time for that. So the queues' sums are kept as columns, seconds per class and row,
and the wait of a request of class c is estimated for all rows at once:

    running    the prefill that is running is not interrupted
    + higher   all waiting requests of higher classes
    + same     requests served before it in its own class: all (first come), or the shorter or
               longer ones (by powers of two), and of the others those that will have waited for
               `aging_s` by its turn; but from each other tenant not more seconds than its own
               tenant gets meanwhile: those of its waiting requests, plus its own
    + lower    reserved shares R of lower classes: (higher + same) · R / (1 - R) at most, and
               not more than the seconds waiting there

and, if c has a reserved share r itself, not more than (same + own seconds) / r.

The estimate assumes that no other request arrives. Later arrivals of a higher class, or of shorter
prompts, make it too low; cancelled requests make it too high.

**Aging.** The other sizes have `others` seconds, which have waited for `age` in the mean, as if
evenly for 0 to 2 · age: so they reach `aging_s` between `aging_s` - 2 · age and `aging_s` from now.
Those that do before a turn in `w` seconds go before it, a share of (w - aging_s + 2 · age) /
(2 · age) of them, between none and all. The turn is where both agree (`_with_aged`).

A queue holds GPU seconds, so a request that was sent, and whose blocks still come, is not in it: an
instance computes others meanwhile. vLLM's scheduler skips a request that waits for remote KV, and
the request keeps its place. Likewise here: it is `coming`, and takes the place of its arrival once
its blocks are due (`arrived`). One that is held back waits in the queue as all others do: its
blocks come when it was sent (`dispatch/`), shortly before its turn.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..errors import Conflict
from .queue import PrefillQueue, Pushed, QueueSettings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from .fairness import Waiter

    Floats = NDArray[np.float64]
    Rows = NDArray[np.int64]

# Those who wait are sent so much earlier at most because one of them fetches: it is what a higher
# class may have to wait for it. On cards of 50 Gb/s, longer does not make the waits shorter.
FETCH_AHEAD_S_MAX = 5.0

_ROWS_MIN = 64
_TINY_S = 1e-9

# Size classes of prefill seconds, in powers of two: below 2 ms, ... , 32 s and more.
_SIZES = 16
_SIZE_MIN_S = 1 / 1024


class Coming(NamedTuple):
    """The requests whose blocks still come, taken as one for each candidate: GPU seconds, and when
    it is ready, as seconds from now, on average; and how many `requests` they are. All
    [candidates]."""

    seconds: Floats
    ready_s: Floats
    requests: Rows


class Queues:
    """One queue per row of the cluster, created with its first waiter."""

    _running_until: Floats  # [rows]: the estimated end of the prefills that were taken there
    _waiting: Rows  # [classes, rows]
    _class_s: Floats  # [classes, rows]
    _sized: Rows  # [classes, sizes, rows]: waiters of each size class, and their seconds
    _size_s: Floats
    _size_at: Floats  # [classes, sizes, rows]: the sum of seconds · when they arrived
    _tenants: Rows  # [classes, rows]: tenants that have waiters
    _coming_s: Floats  # [rows]: seconds of those whose blocks still come
    _coming_at: Floats  # [rows]: the sum of seconds · when they are ready
    _coming_count: Rows  # [rows]

    def __init__(self, settings: QueueSettings | None = None) -> None:
        self._settings = settings or QueueSettings()
        self._queues: dict[int, PrefillQueue] = {}
        self._row_of: dict[str, int] = {}
        self._coming: dict[str, tuple[int, float, Waiter]] = {}  # row, and when it is ready
        self._fetch_s: dict[int, dict[str, float]] = {}  # by row, of those in queues that fetch
        self._ready_at: list[tuple[float, str]] = []  # a heap, with stale entries
        self._rows = 0
        self._reset(_ROWS_MIN)

    def __len__(self) -> int:
        return len(self._row_of) + len(self._coming)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._row_of or request_id in self._coming

    def configure(self, settings: QueueSettings) -> None:
        """Change the settings. All waiters stay, in order of arrival; a waiter whose class no
        longer exists moves to the lowest one. The seconds that tenants and classes have earned are
        reset to 0."""
        before, running_until = self._queues, self._running_until
        coming = self._coming_s, self._coming_at, self._coming_count
        self._settings, self._queues = settings, {}
        self._reset(self._rows)
        self._running_until = running_until
        self._coming_s, self._coming_at, self._coming_count = coming
        for row, queue in before.items():
            for waiter in queue:
                self._queue(row).adopt(waiter)
                self._count(row, waiter, 1)

    def push(self, row: int, waiter: Waiter) -> Pushed:
        """Enqueue a waiter at an instance; see `PrefillQueue.push`.

        Raises InvalidRequest for an unknown class and an impossible estimate, Conflict for an id
        that waits already, there or elsewhere.
        """
        if waiter.request_id in self:
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
        if waiter.request_id in self:
            raise Conflict(f"request {waiter.request_id!r} waits already")
        self._blank.check(waiter)
        if waiter.fetch_s:
            self._come(row, waiter, now + waiter.fetch_s)
        else:
            self.start(row, waiter, now)
        return True

    def start(self, row: int, waiter: Waiter, now: float) -> None:
        """An instance computes a waiter that is in no queue."""
        self._grow(row)
        self._running_until[row] = max(self._running_until.item(row), now) + waiter.seconds

    def expect(self, row: int, waiter: Waiter, ready_at: float) -> Pushed:
        """Announce a waiter whose blocks will have come at `ready_at`. It needs a place as one that
        is pushed does, and takes it then (`arrived`). Raises as `push`."""
        pushed = self.push(row, waiter)
        if pushed.accepted:
            self._queues[row].remove(waiter.request_id)
            self._uncount(row, waiter)
            self._come(row, waiter, ready_at)
        return pushed

    def arrived(self, now: float) -> list[tuple[int, float, str]]:
        """Put the waiters whose blocks are due into their queues. Returns the row of each, when it
        was due, and its id."""
        found: list[tuple[int, float, str]] = []
        while self._ready_at and self._ready_at[0][0] <= now:
            ready_at, request_id = heapq.heappop(self._ready_at)
            coming = self._coming.get(request_id)
            if coming is not None and coming[1] == ready_at:
                found.append((coming[0], ready_at, request_id))
                self.ready(request_id)
        return found

    def ready(self, request_id: str) -> int | None:
        """The blocks of a waiter have come: put it into its queue, also if that is full. Returns
        its row; None if it was not coming. One that is in its queue fetches nothing any more."""
        found = self._left(request_id)
        if found is None:
            self._fetch_s.get(self._row_of.get(request_id, -1), {}).pop(request_id, None)
            return None
        row, waiter = found
        self.back(row, replace(waiter, fetch_s=0.0))
        return row

    def back(self, row: int, waiter: Waiter) -> None:
        """A waiter that was taken waits still, in its place by arrival."""
        self._queue(row).adopt(waiter)
        self._count(row, waiter, 1)

    def coming(self, rows: Rows, now: float) -> Coming | None:
        """The waiters at each of the rows whose blocks still come; None if there are none."""
        if not self._coming:
            return None
        self._grow(int(rows.max(initial=0)))
        seconds = self._coming_s.take(rows)
        ready_s = self._coming_at.take(rows) / np.maximum(seconds, _TINY_S) - now
        return Coming(seconds, ready_s, self._coming_count.take(rows))

    def take(self, row: int, now: float, free_at: float = math.inf) -> Waiter | None:
        """Dequeue the next waiter of an instance, whose prefill begins now, or began when the
        instance was free (`free_at`) and it had come; None if the queue is empty. If it fetches, it
        is `coming` from now on."""
        queue = self._queues.get(row)
        waiter = None if queue is None else queue.take(now)
        if waiter is None:
            return None
        fetch_s = self._fetch_s.get(row, {}).get(waiter.request_id, 0.0)
        self._uncount(row, waiter)
        if fetch_s:
            self._come(row, waiter, now + fetch_s)
            return waiter
        begins_at = min(now, max(free_at, waiter.arrived_at))
        self._running_until[row] = max(self._running_until.item(row), begins_at) + waiter.seconds
        return waiter

    def longest_fetch_s(self, row: int) -> float:
        """How long the blocks of anybody in the queue of a row take to come at most, once it is
        sent; 0 if nobody fetches. Not above `FETCH_AHEAD_S_MAX`."""
        longest_s = max(self._fetch_s.get(row, {}).values(), default=0.0)
        return min(longest_s, FETCH_AHEAD_S_MAX)

    def ready_at(self, request_id: str) -> float | None:
        """When the blocks of a waiter will have come; None if it is not coming."""
        coming = self._coming.get(request_id)
        return None if coming is None else coming[1]

    def done(self, row: int, now: float, left_s: float = 0.0) -> None:
        """Record that an instance has finished its prefills, except for `left_s` seconds."""
        self._grow(row)
        self._running_until[row] = now + left_s

    def remove(self, request_id: str) -> tuple[int, Waiter] | None:
        """Remove a waiter from its queue. Returns its row and the waiter; None if it does not wait
        anywhere."""
        row = self._row_of.get(request_id)
        if row is None:
            return self._left(request_id)
        waiter = self._queues[row].remove(request_id)
        assert waiter is not None
        self._uncount(row, waiter)
        return row, waiter

    def forget(self, row: int) -> list[Waiter]:
        """Drop the queue of a removed instance. Returns its waiters, in order of arrival, to be
        sent elsewhere."""
        left = list(self._queues.get(row, ()))
        left += [waiter for at, _, waiter in self._coming.values() if at == row]
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
        """All waiters of all queues, and those whose blocks still come."""
        for queue in list(self._queues.values()):
            yield from queue
        yield from [waiter for _, _, waiter in self._coming.values()]

    @property
    def waiting_in_all(self) -> int:
        """The number of waiters in all queues, without those whose blocks still come."""
        return len(self._row_of)

    def rows(self, until: float | None = None) -> list[int]:
        """The rows where somebody waits; with `until`, those whose prefills should have ended by
        then, or would have if somebody there, who fetches, is sent as much earlier."""
        waiting = self._waiting.any(axis=0)
        if until is not None:
            ending = self._running_until < until
            for row in self._fetch_s:
                fetch_s = self.longest_fetch_s(row)
                ending[row] = self._running_until.item(row) < until + fetch_s
            waiting &= ending
        rows: list[int] = np.flatnonzero(waiting).tolist()
        return rows

    def row_of(self, request_id: str) -> int | None:
        """The row of the queue that a request waits in; None if it waits nowhere."""
        return self._row_of.get(request_id)

    def waiting_at(self, row: int) -> int:
        """The number of waiters at a row."""
        return len(self._queues.get(row, ()))

    def place(self, row: int, priority: str) -> int:
        """How many of this class and of higher ones wait at a row: the last one's place, unless the
        order lets others pass."""
        number = self._blank.number(priority)
        self._grow(row)
        return int(self._waiting[: number + 1, row].sum())

    def running_s(self, row: int, now: float) -> float:
        """Seconds left of the prefills that were taken at a row, as estimated."""
        self._grow(row)
        return max(self._running_until.item(row) - now, 0.0)

    def waiting(self, rows: Rows) -> Rows:
        """The number of waiters at each of the rows whose blocks are there."""
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
        ahead = running
        for higher in range(number):
            ahead = ahead + class_s[higher].take(rows)
        same = self._same_s(rows, number, ahead, seconds, tenant, now)
        before = ahead - running + same
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
        self, rows: Rows, number: int, ahead: Floats, seconds: float, tenant: str, now: float
    ) -> Floats:
        """Seconds of the same class that are served before a new waiter, [rows]; `ahead` are those
        of what is computed and of higher classes."""
        order = self._settings.order
        same: Floats = self._class_s[number].take(rows)
        if order != "fcfs":
            size = _size(seconds)
            sizes = slice(size + 1, _SIZES) if order == "shortest-first" else slice(0, size)
            others = self._size_s[number, sizes].take(rows, axis=1).sum(axis=0)
            arrived = self._size_at[number, sizes].take(rows, axis=1).sum(axis=0)
            age_s = np.maximum(now - arrived / np.maximum(others, _TINY_S), 0.0)
            first = same - others
            same = first + _with_aged(ahead + first, others, age_s, self._settings.aging_s)
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
        self._size_at[number, size, row] += sign * waiter.seconds * waiter.arrived_at
        self._count_tenant(row, waiter, number, sign)
        if waiter.fetch_s and sign > 0:
            self._fetch_s.setdefault(row, {})[waiter.request_id] = waiter.fetch_s

    def _uncount(self, row: int, waiter: Waiter) -> None:
        self._count(row, waiter, -1)
        del self._row_of[waiter.request_id]
        fetching = self._fetch_s.get(row)
        if fetching is not None:
            fetching.pop(waiter.request_id, None)
            if not fetching:
                del self._fetch_s[row]
        number = self._blank.number_of(waiter)
        # Sums of floats that were added and subtracted end near zero, not at zero.
        if not self._waiting[number, row]:
            self._class_s[number, row] = 0.0
        size = _size(waiter.seconds)
        if not self._sized[number, size, row]:
            self._size_s[number, size, row] = self._size_at[number, size, row] = 0.0

    def _come(self, row: int, waiter: Waiter, ready_at: float) -> None:
        """The blocks of a waiter that is in no queue come at `ready_at`."""
        self._grow(row)
        self._coming[waiter.request_id] = (row, ready_at, waiter)
        self._count_coming(row, waiter, ready_at, 1)
        heapq.heappush(self._ready_at, (ready_at, waiter.request_id))

    def _left(self, request_id: str) -> tuple[int, Waiter] | None:
        """Take out a waiter whose blocks were coming."""
        coming = self._coming.pop(request_id, None)
        if coming is None:
            return None
        row, ready_at, waiter = coming
        self._count_coming(row, waiter, ready_at, -1)
        if len(self._ready_at) > 2 * len(self._coming) + 16:  # most entries are stale
            self._ready_at = [(at, name) for name, (_, at, _) in self._coming.items()]
            heapq.heapify(self._ready_at)
        return row, waiter

    def _count_coming(self, row: int, waiter: Waiter, ready_at: float, sign: int) -> None:
        self._coming_count[row] += sign
        self._coming_s[row] += sign * waiter.seconds
        self._coming_at[row] += sign * waiter.seconds * ready_at
        if not self._coming_count[row]:  # rounding
            self._coming_s[row] = self._coming_at[row] = 0.0

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
        self._fetch_s = {}
        self._shares = [item.reserved_share for item in self._settings.classes]
        self._running_until = np.full(rows, -math.inf)
        self._waiting = np.zeros((classes, rows), np.int64)
        self._class_s = np.zeros((classes, rows))
        self._sized = np.zeros((classes, _SIZES, rows), np.int64)
        self._size_s = np.zeros((classes, _SIZES, rows))
        self._size_at = np.zeros((classes, _SIZES, rows))
        self._tenants = np.zeros((classes, rows), np.int64)
        self._coming_s = np.zeros(rows)
        self._coming_at = np.zeros(rows)
        self._coming_count = np.zeros(rows, np.int64)
        # Only rows where a tenant has waiters: there can be many tenants, each at few instances.
        self._tenant_s: dict[tuple[int, str], dict[int, float]] = {}
        self._tenant_counts: dict[tuple[int, str], dict[int, int]] = {}

    def _grow(self, row: int) -> None:
        if row < self._rows:
            return
        more = max(self._rows, row + 1 - self._rows)
        columns = ("_waiting", "_class_s", "_sized", "_size_s", "_size_at", "_tenants")
        for name in (*columns, "_coming_s", "_coming_at", "_coming_count"):
            column = getattr(self, name)
            empty = np.zeros((*column.shape[:-1], more), column.dtype)
            setattr(self, name, np.concatenate((column, empty), axis=-1))
        idle = np.full(more, -math.inf)
        self._running_until = np.concatenate((self._running_until, idle))
        self._rows += more


def _with_aged(turn_s: Floats, others_s: Floats, age_s: Floats, aging_s: float) -> Floats:
    """Seconds of others that will have aged by the turn of a request, which is in `turn_s` without
    them. All [rows]."""
    window_s = 2.0 * age_s
    early_s = turn_s - (aging_s - window_s)  # since the first of them has aged
    # The turn moves back by each that goes before it, so that more of them age.
    aged: Floats = others_s * np.maximum(early_s, 0.0) / np.maximum(window_s - others_s, _TINY_S)
    found: Floats = np.where(early_s > 0.0, np.minimum(aged, others_s), 0.0)
    return found


def _size(seconds: float) -> int:
    """The size class of a prefill: the power of two that its seconds are in."""
    return min(max(math.frexp(seconds / _SIZE_MIN_S)[1] - 1, 0), _SIZES - 1)
