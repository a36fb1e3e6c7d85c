"""Holds requests back, and releases them in the order of their instance's queue. Pure.

An engine serves what it was sent in an order of its own, mostly that of arrival. So whoever is to
be overtaken must not be sent yet. A request is *released* or *held*: released ones are ahead in the
engine, up to a limit, held ones wait in the instance's queue (`prefill/queue.py`). When a place
becomes free, the queue's next request is released. A place is free again when

- the prefill is done,
- the request was cancelled, has expired, or ended otherwise,
- the request is late: by as much again as its prefill was predicted to take with all before it,
  and by a second at least. So nobody is held for ever by an engine that stands still, or whose
  reports are lost.

**How many are ahead**: `ahead_max`, and more as soon as all that is ahead should end within
`ahead_s`: an engine must have its next prompt when it is done with one, and gets it only after the
conductor has heard of that end. So a request can be overtaken until shortly before its turn. Of
several conductors each has a share of both, in proportion to the requests that it and the others
(`elsewhere`) have for the instance, and of `ahead_max` at least one: together they exceed the limit
by one for each conductor at most, and if the others have nothing there, one has all.

**Blocks that are fetched** come once the request is sent: an engine begins then, and computes
others meanwhile. Such a request waits for its turn as all others do, or whoever fetches would pass
all that are held. But all that wait are sent earlier, in their order, by as long as the blocks of
any of them take to come (`Waiter.fetch_s`, at most `FETCH_AHEAD_S_MAX`), so that these are there at
its turn. It has a place from its release on, and is computed once its blocks are there: before
those that were sent after it, and not before the one that is computed.

**Engines that ask** (`asks`) are sent everything at once and ask which request to compute: `next`
answers in the queue's order. So nothing is held for them, and one request counts as being computed.
The same holds for all instances if `ahead_max` is 0, where the order is a forecast alone.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..prefill.queue import Pushed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ..prefill.fairness import Waiter
    from ..prefill.queue import QueueSettings
    from ..prefill.wait_estimate import Queues

# A release is late by as much again as was predicted, and by at least this: the same as for
# prefills that others wait for (`state/inflight_prefills.py`).
LATE_S_MIN = 1.0
# Ends of holds kept until the next `ended` call. Who misses one asks again after a while.
ENDED_MAX = 65_536
_ACCEPTED = Pushed(True)


@dataclass(slots=True)
class _Released:
    """A request that is ahead in an engine. `ready_at`: when its blocks come; None: they are there.
    `counts`: it takes a place, as it is not late. `given`: it was the answer to an engine that
    asked. `begun`: the engine said so."""

    waiter: Waiter
    late_at: float
    ready_at: float | None = None
    counts: bool = True
    given: bool = False
    begun: bool = False

    @property
    def seconds(self) -> float:
        """Of what the engine could compute now."""
        return self.waiter.seconds if self.ready_at is None else 0.0


@dataclass(slots=True)
class _Engine:
    """What is ahead in one engine, in order of release, and how many of these count."""

    released: dict[str, _Released] = field(default_factory=dict)
    places: int = 0

    @property
    def seconds(self) -> float:
        """Of prefill, of those that count and have their blocks."""
        return sum(one.seconds for one in self.released.values() if one.counts)

    @property
    def first(self) -> str | None:
        """The one that is computed: the first one that has its blocks."""
        ready = (name for name, one in self.released.items() if one.ready_at is None)
        return next(ready, None)

    def busy_s(self, running_s: float, until_s: float, now: float) -> float:
        """Seconds until the engine stands still, which it may do up to `until_s` from now.
        `running_s`: left of what has its blocks."""
        busy_s = running_s
        coming = [one for one in self.released.values() if one.ready_at is not None and one.counts]
        for one in sorted(coming, key=_ready_at):
            ready_s = _ready_at(one) - now
            if ready_s > max(busy_s, until_s):
                break
            busy_s = max(busy_s, ready_s) + one.waiter.seconds
        return busy_s

    def ready(self, request_id: str) -> _Released:
        """The blocks of one have come: its engine computes it before those that were sent after it,
        and after the one that it computes."""
        one, first = self.released[request_id], self.first
        one.ready_at = None
        if first is not None and self.first == request_id:
            names = list(self.released)
            names.remove(request_id)
            names.insert(names.index(first) + 1, request_id)
            self.released = {name: self.released[name] for name in names}
        return one

    def seconds_from(self, request_id: str) -> float:
        """Of this one and those behind it."""
        behind = itertools.dropwhile(lambda item: item[0] != request_id, self.released.items())
        return sum(one.seconds for _, one in behind)

    def stop_counting(self, one: _Released) -> None:
        self.places -= one.counts
        one.counts = False


def _ready_at(one: _Released) -> float:
    return -math.inf if one.ready_at is None else one.ready_at


class Dispatcher:
    """What is ahead at each row of the cluster; see the top of the file. Not thread-safe.

    `elsewhere(row)`: requests that other conductors have there, waiting or ahead; None if there are
    no others. `sent(request_id, now)` is called when one that was held, and fetches, is released.
    """

    def __init__(self, queues: Queues, settings: QueueSettings) -> None:
        self._queues, self._settings = queues, settings
        self._engines: dict[int, _Engine] = {}
        self._asking: set[int] = set()
        self._late: list[tuple[float, int, str]] = []
        self._ended: deque[str] = deque(maxlen=ENDED_MAX)
        self.elsewhere: Callable[[int], int] | None = None
        self.sent: Callable[[str, float], None] = lambda request_id, now: None

    # -- the life of a request ---------------------------------------------------------------------

    def enter(self, row: int, waiter: Waiter, now: float) -> Pushed:
        """Release a request at once if a place is free and nobody waits; else enqueue it, once its
        blocks have come if nothing is held. Raises as `Queues.push`."""
        if waiter.fetch_s and not self._holds_at(row):
            pushed = self._queues.expect(row, waiter, now + waiter.fetch_s)
        elif self._free(row, now, waiter.fetch_s) and self._queues.begin(row, waiter, now):
            self._ahead(row, waiter, now)
            return _ACCEPTED
        else:
            pushed = self._queues.push(row, waiter)
        self._end(victim.request_id for victim in pushed.preempted)
        if pushed.accepted:
            self._go_on(row, now)
        return pushed

    def advance(self, now: float) -> None:
        """The blocks of some requests should have come by now."""
        for row, ready_at, request_id in self._queues.arrived(now):
            self._ready(row, request_id, ready_at)

    def fetched(self, request_id: str, now: float) -> None:
        """The blocks of a request have come. Who fetched for one that is held may say so, too."""
        row = self._queues.ready(request_id)
        if row is not None:
            self._ready(row, request_id, now)

    def began(self, row: int, request_id: str, began_at: float) -> None:
        """Its engine computes it since then: what is left there is known better. An engine with an
        order of its own may have taken another one than was thought, which then still waits."""
        if self._queues.ready_at(request_id) is not None:
            self.fetched(request_id, began_at)
        engine = self._engines.get(row)
        if engine is None:
            return
        if request_id not in engine.released and not self._holds_at(row):
            self._taken(row, engine, request_id, began_at)
        one = engine.released.get(request_id)
        if one is not None:
            one.begun = True
            self._queues.done(row, began_at, engine.seconds_from(request_id))

    def leave(self, row: int, request_id: str, now: float, ended_at: float | None = None) -> None:
        """Its prefill is done, or was given up, released or not. `ended_at`: when, if it was heard
        of later: the engine has gone on since then with what it had."""
        at = now if ended_at is None else ended_at
        engine = self._engines.get(row)
        if engine is None or request_id not in engine.released:
            if self._queues.remove(request_id) is not None:
                self._end((request_id,))
        else:
            computed = engine.first == request_id or engine.released[request_id].begun
            one = engine.released.pop(request_id)
            engine.stop_counting(one)
            if one.ready_at is not None:
                self._queues.remove(request_id)
            left_s = engine.seconds
            if not computed:  # it was given up, or overtaken in the engine: the others go on
                left_s = max(self._queues.running_s(row, at) - one.seconds, 0.0)
            self._queues.done(row, at, left_s)
        self._go_on(row, now, now if self._holds_at(row) else at)

    def next(self, row: int, n: int, now: float, *, idle: bool) -> list[str]:
        """The next `n` requests for an engine that asks, each of which is given once. `idle`: it
        has computed all that it was given before; their ends may be heard of later."""
        self.advance(now)
        engine = self._engines.setdefault(row, _Engine())
        done = [name for name, one in engine.released.items() if one.given] if idle else []
        for name in done:
            engine.stop_counting(engine.released.pop(name))
        if done:
            self._queues.done(row, now, engine.seconds)
        names = [name for name, one in engine.released.items() if not one.given][:n]
        while len(names) < n and (waiter := self._queues.take(row, now)) is not None:
            self._ahead(row, waiter, now)
            self._end((waiter.request_id,))
            names.append(waiter.request_id)
        for name in names:
            self.fetched(name, now)  # its engine computes it now
            engine.released[name].given = True
        return names

    def forget(self, row: int) -> None:
        """The instance of a row was removed. Whoever was held there has to be decided anew."""
        self._end(waiter.request_id for waiter in self._queues.forget(row))
        self._engines.pop(row, None)
        self._asking.discard(row)

    def wake(self, row: int) -> None:
        """The instance of a row gets nothing new: who waits for it is to ask where else."""
        self._end(self._waiting(row))

    def wake_all(self, names: Iterable[str]) -> None:
        """These requests are to ask where else."""
        self._end(names)

    # -- settings and time -------------------------------------------------------------------------

    def asks(self, row: int, yes: bool, now: float) -> None:
        """Set whether the engine of a row asks what to compute next."""
        if not yes:
            self._asking.discard(row)
        elif row not in self._asking:
            self._asking.add(row)
            self._send(self._waiting(row), now)

    def configure(self, settings: QueueSettings, now: float) -> None:
        """Change the settings, after those of the queues."""
        if not settings.ahead_max:
            self._send([waiter.request_id for waiter in self._queues], now)
        self._settings = settings
        for row in self._queues.rows():
            self._go_on(row, now)

    def tick(self, now: float) -> None:
        """Give up on what is late, and release what the shares of several conductors allow now."""
        self.advance(now)
        while self._late and self._late[0][0] <= now:
            _, row, name = heapq.heappop(self._late)
            engine = self._engines.get(row)
            one = None if engine is None else engine.released.get(name)
            if engine is not None and one is not None and one.late_at <= now:
                engine.stop_counting(one)
                self._go_on(row, now)
        if self.holding:
            # Of one conductor alone, only time gives places.
            until = now + self._settings.ahead_s if self.elsewhere is None else None
            for row in self._queues.rows(until):
                self._go_on(row, now)

    # -- what is held ------------------------------------------------------------------------------

    @property
    def holding(self) -> bool:
        """Whether requests are held at all."""
        return self._settings.ahead_max > 0

    def holds(self, request_id: str) -> bool:
        """Whether a request is held."""
        row = self._queues.row_of(request_id) if self.holding else None
        return row is not None and self._holds_at(row)

    def ahead(self, row: int) -> int:
        """How many requests are ahead in the engine of a row."""
        engine = self._engines.get(row)
        return engine.places if engine is not None else 0

    def ended(self) -> list[str]:
        """Requests whose holds have ended since the last call: released, preempted, or without an
        instance. For those who wait for that."""
        if not self._ended:
            return []
        names = list(self._ended)
        self._ended.clear()
        return names

    # -- inside ------------------------------------------------------------------------------------

    def _holds_at(self, row: int) -> bool:
        """Whether requests for the engine of a row are held."""
        return self.holding and row not in self._asking

    def _free(self, row: int, now: float, fetch_s: float = 0.0) -> bool:
        """Whether one more, whose blocks come in `fetch_s`, may be ahead in the engine of a row."""
        engine = self._engines.get(row)
        if engine is None or not engine.places:
            return True
        if not self._holds_at(row):
            return False
        share, settings = self._share(row, engine), self._settings
        most = max(1, round(settings.ahead_max * share))
        if engine.places < most:
            return True
        ahead_s = settings.ahead_s * share
        busy_s = engine.busy_s(self._queues.running_s(row, now), max(fetch_s, ahead_s), now)
        if not engine.seconds and busy_s <= fetch_s:  # it stands still
            return True
        return busy_s < fetch_s + ahead_s

    def _share(self, row: int, engine: _Engine) -> float:
        """This conductor's share of the places at a row."""
        others = self.elsewhere(row) if self.elsewhere is not None else 0
        if not others:
            return 1.0
        own = engine.places + self._queues.waiting_at(row)
        return own / (own + others)

    def _go_on(self, row: int, now: float, free_at: float = math.inf) -> None:
        """Release the queue's next ones while there are places. `free_at`: of the engine, if that
        was earlier, and it had them."""
        while self._next_goes(row, now):
            waiter = self._queues.take(row, now, free_at)
            if waiter is None:
                return
            self._ahead(row, waiter, now)
            self._end((waiter.request_id,))
            if self._queues.ready_at(waiter.request_id) is not None:
                self.sent(waiter.request_id, now)

    def _next_goes(self, row: int, now: float) -> bool:
        """Whether the next one in the queue may be ahead, or has to be, for one that fetches."""
        fetch_s = self._queues.longest_fetch_s(row)
        return self._free(row, now) or (fetch_s > 0.0 and self._free(row, now, fetch_s))

    def _ahead(self, row: int, waiter: Waiter, now: float) -> None:
        engine = self._engines.setdefault(row, _Engine())
        one = _Released(waiter, now, self._queues.ready_at(waiter.request_id))
        engine.released[waiter.request_id] = one
        engine.places += 1
        self._expect_end(row, one, now)

    def _expect_end(self, row: int, one: _Released, now: float) -> None:
        """When it is late."""
        until_s = self._queues.running_s(row, now)
        if one.ready_at is not None:  # else with its own
            until_s = max(until_s, one.ready_at - now) + one.waiter.seconds
        one.late_at = now + until_s + max(until_s, LATE_S_MIN)
        if self.holding:
            heapq.heappush(self._late, (one.late_at, row, one.waiter.request_id))

    def _taken(self, row: int, engine: _Engine, request_id: str, at: float) -> None:
        """An engine computes one that waits in the queue here, and not those that were taken for
        it."""
        found = self._queues.remove(request_id)
        if found is None:
            return
        for name, one in [*engine.released.items()]:
            if not (one.begun or one.given):
                engine.stop_counting(engine.released.pop(name))
                self._queues.back(row, one.waiter)
        self._ahead(row, found[1], at)

    def _ready(self, row: int, request_id: str, at: float) -> None:
        """The engine has a request already whose blocks have come, and computes it in its turn."""
        engine = self._engines.get(row)
        one = None if engine is None else engine.released.get(request_id)
        coming = one is not None and one.ready_at is not None
        if not coming and not self._holds_at(row):
            self._go_on(row, at)
            return
        found = self._queues.remove(request_id)
        assert found is not None
        self._queues.start(row, found[1], at)
        if engine is not None and coming:
            self._expect_end(row, engine.ready(request_id), at)
        else:  # it was sent before anything was held
            self._ahead(row, found[1], at)

    def _send(self, names: Iterable[str], now: float) -> None:
        """These are held no longer."""
        for name in names:
            if self._queues.row_of(name) is not None:
                self._queues.ready(name)
                self.sent(name, now)
            self._end((name,))

    def _waiting(self, row: int) -> list[str]:
        return [waiter.request_id for waiter in self._queues.at(row) or ()]

    def _end(self, names: Iterable[str]) -> None:
        if self.holding:
            self._ended.extend(names)
