"""The cost of rejections: would the rejected requests have met their objectives? Pure.

A rejected request that would have met its objectives is the price of admission control, and it is
invisible: a rejected request has no measured latency. The users of one router found after the fact
that 979 of 1,000 rejected requests could have been served, because the estimate of prefill was ten
times too high. So each rejected request is followed as a ghost (shadow accounting): the later
course of the requests that were admitted on its instances shows what would have happened to it.

**The estimate.** A ghost is placed in the prefill queue of its prefill instance, behind the last
request that was admitted there before it.

    start = when the prefill of that request ends, or the ghost's arrival if the queue was empty
    TTFT  = start + own · ratio - arrival
    TBT   = that of the first request to finish on its decode instance which decoded there when the
            ghost would have, plus the time that the ghost itself would have added to each step

`own` is the ghost's predicted TTFT without the queue, and `ratio` the median of observed to
predicted over the last requests on that instance (of all instances, if it has had none): so an
error of the prefill model, which rejected the ghost, does not affect it a second time.

**Limits.** Each ghost is judged as if it alone had been admitted. If all ghosts had been, they
would have delayed each other; and the requests behind them would have been later, which is not
counted either. "Would have met" is therefore an upper bound of the cost of rejections. The estimate
assumes first come, first served. Ghosts without enough later observations are counted as unknown,
neither as met nor as missed.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import inf
from statistics import median
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

if TYPE_CHECKING:
    from ..records import Objectives

# A ratio is the median of this many observations: enough to ignore a few outliers, few enough to
# follow an instance that has become slower.
RATIOS = 16
RATIO_MIN, RATIO_MAX = 0.01, 100.0
# Limit of admitted requests that are followed. The conductor ends each; the limit bounds the memory
# if it does not.
SERVED_MAX = 65_536


class ShadowSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How many refused requests are followed, and for how long."""

    ghosts_max: Annotated[int, Meta(ge=0, le=1_000_000)] = 4096
    """The oldest becomes unknown when there are more; some 500 bytes each. 0 switches it off."""

    expire_s: Annotated[float, Meta(gt=0.0, le=86_400.0)] = 120.0
    """A ghost of which nothing is known by then becomes unknown: the longest published objective
    for TTFT, 30 s, and time for somebody to finish at its decode instance."""


@dataclass(frozen=True, slots=True)
class Ghost:
    """A rejected request, and the instances that it would have run on.

    `own_s` is its predicted TTFT without the queue. `joining_s` is the time that it would have
    added to each decode step (d1 + d2 · context), `decode_s` its predicted decode time.
    """

    prefill_row: int
    decode_row: int
    objectives: Objectives
    own_s: float
    decode_s: float
    rejected_at: float
    joining_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ShadowCounts:
    """Counts of requests with an objective, since the start. `ghosts` are not judged yet; with
    them, all counts that start with `rejected` add up to the rejected requests."""

    admitted_met: int = 0
    admitted_missed: int = 0
    admitted_unknown: int = 0  # cancelled, or an event never came
    rejected_would_have_met: int = 0
    rejected_would_have_missed: int = 0
    rejected_unknown: int = 0
    ghosts: int = 0


@dataclass(slots=True)
class _Served:
    """An admitted request. Rows are -1 once their instance is removed."""

    objectives: Objectives
    prefill_row: int
    decode_row: int
    own_s: float
    admitted_at: float
    began_at: float | None = None  # estimated start of its prefill
    first_token_at: float | None = None


@dataclass(slots=True)
class _Follow:
    """The estimate for a ghost so far: None is not known yet."""

    ghost: Ghost
    behind: str = ""  # the admitted request whose prefill comes right before
    starts_at: float | None = None
    tbt_s: float | None = None


@dataclass(slots=True)
class _Row:
    """A prefill instance: its queued and running requests, in order, each with the ghosts right
    behind it."""

    waiting: dict[str, set[int]] = field(default_factory=dict)
    free_at: float = -inf  # when the last prefill ended
    ratios: deque[float] = field(default_factory=lambda: deque(maxlen=RATIOS))


class Shadow:
    """The shadow accounts: follows admitted requests and ghosts. Not thread-safe.

    The caller calls `admitted`, `prefill_done`, `first_token` and `finished` or `cancelled` for
    every admitted request; events of unknown requests are ignored. It must not pass rejections for
    other reasons than TTFT and TBT: KV room is not modelled here.
    """

    def __init__(self, settings: ShadowSettings | None = None) -> None:
        self.settings = settings or ShadowSettings()
        self._served: dict[str, _Served] = {}
        self._rows: dict[int, _Row] = {}
        self._ratios: deque[float] = deque(maxlen=RATIOS)  # of all instances
        # All ghosts by number, oldest first; and those without a TBT estimate by decode row.
        self._ghosts: dict[int, _Follow] = {}
        self._decoding: dict[int, dict[int, _Follow]] = {}
        self._next = 0
        self._counts: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._ghosts)

    @property
    def counts(self) -> ShadowCounts:
        """The counts so far."""
        return ShadowCounts(ghosts=len(self._ghosts), **self._counts)

    # -- the admitted ------------------------------------------------------------------------------

    def admitted(
        self,
        request_id: str,
        prefill_row: int,
        decode_row: int,
        objectives: Objectives,
        own_s: float,
        now: float,
    ) -> None:
        """Follow a request that was admitted on these instances; `own_s` as in `Ghost`."""
        self.cancelled(request_id, now)
        if len(self._served) >= SERVED_MAX:
            self.cancelled(next(iter(self._served)), now)
        self._served[request_id] = _Served(objectives, prefill_row, decode_row, own_s, now)
        self._rows.setdefault(prefill_row, _Row()).waiting[request_id] = set()

    def prefill_done(self, request_id: str, now: float) -> None:
        """Record the end of a request's prefill: the ghosts right behind it would have begun."""
        served = self._served.get(request_id)
        if served is None or served.began_at is not None:
            return
        served.began_at = served.admitted_at
        row = self._rows.get(served.prefill_row)
        if row is None:
            return
        served.began_at = max(served.admitted_at, row.free_at)
        row.free_at = now
        self._begin(row.waiting.pop(request_id, set()), now)

    def first_token(self, request_id: str, now: float) -> None:
        """Record a request's first token."""
        self.prefill_done(request_id, now)
        served = self._served.get(request_id)
        if served is None or served.first_token_at is not None or served.began_at is None:
            return
        served.first_token_at = now
        row = self._rows.get(served.prefill_row)
        if row is not None and served.own_s > 0:
            ratio = min(max((now - served.began_at) / served.own_s, RATIO_MIN), RATIO_MAX)
            self._ratios.append(ratio)
            row.ratios.append(ratio)

    def finished(self, request_id: str, tbt_s: float | None, now: float) -> None:
        """Record the end of a request; `tbt_s` is its mean time between tokens, None for an answer
        of one token."""
        served = self._served.pop(request_id, None)
        if served is None:
            return
        self._leave(request_id, served, now)
        self._judge_served(served, tbt_s)
        if tbt_s is not None and served.first_token_at is not None:
            self._witness(served.decode_row, served.first_token_at, tbt_s, now)

    def cancelled(self, request_id: str, now: float) -> None:
        """Drop a request that was given up, preempted, or has expired. Ghosts behind it move up."""
        served = self._served.pop(request_id, None)
        if served is None:
            return
        self._leave(request_id, served, now)
        if _any(served.objectives):
            self._count("admitted_unknown")

    # -- the refused -------------------------------------------------------------------------------

    def rejected(self, ghost: Ghost) -> None:
        """Follow a rejected request. It is ignored without an objective; if there are
        `ghosts_max` ghosts, the oldest one is counted as unknown."""
        if not self.settings.ghosts_max or not _any(ghost.objectives):
            return
        while len(self._ghosts) >= self.settings.ghosts_max:
            self._close(next(iter(self._ghosts)), "rejected_unknown")
        number, self._next = self._next, self._next + 1
        follow = self._ghosts[number] = _Follow(ghost)
        if ghost.objectives.tbt_s is not None:
            self._decoding.setdefault(ghost.decode_row, {})[number] = follow
        row = self._rows.get(ghost.prefill_row)
        if row is not None and row.waiting:
            follow.behind = next(reversed(row.waiting))
            row.waiting[follow.behind].add(number)
        else:
            self._begin({number}, ghost.rejected_at)

    def tick(self, now: float) -> None:
        """Expire ghosts after `expire_s`: judge them, or count them as unknown."""
        while self._ghosts:
            number, follow = next(iter(self._ghosts.items()))
            if now < follow.ghost.rejected_at + self.settings.expire_s:
                return
            self._judge(number)
            if number in self._ghosts:
                self._close(number, "rejected_unknown")

    def forget_row(self, row: int) -> None:
        """Drop the row of a removed instance, as it will be reused: its ghosts become unknown."""
        for number, follow in list(self._ghosts.items()):
            if row in (follow.ghost.prefill_row, follow.ghost.decode_row):
                self._close(number, "rejected_unknown")
        self._rows.pop(row, None)
        for served in self._served.values():
            served.prefill_row = -1 if served.prefill_row == row else served.prefill_row
            served.decode_row = -1 if served.decode_row == row else served.decode_row

    def check(self) -> None:
        """Raises AssertionError unless the indices of ghosts are consistent. For tests."""
        behind = {
            number: name
            for row in self._rows.values()
            for name, numbers in row.waiting.items()
            for number in numbers
        }
        decoding = {number for place in self._decoding.values() for number in place}
        for number, follow in self._ghosts.items():
            assert behind.pop(number, "") == follow.behind
            assert (follow.starts_at is None) == bool(follow.behind)
            wants_tbt = follow.ghost.objectives.tbt_s is not None and follow.tbt_s is None
            assert (number in decoding) == wants_tbt
        assert not behind
        assert decoding <= set(self._ghosts)
        assert all(self._decoding.values())
        assert all(name in self._served for row in self._rows.values() for name in row.waiting)

    # -- what follows from it ----------------------------------------------------------------------

    def _leave(self, request_id: str, served: _Served, now: float) -> None:
        """Remove a request from its prefill queue, if it is still in it; the ghosts behind it move
        behind the request before it."""
        row = self._rows.get(served.prefill_row)
        if row is None or request_id not in row.waiting:
            return
        order = list(row.waiting)
        before = order.index(request_id) - 1
        ghosts = row.waiting.pop(request_id)
        if before >= 0:
            row.waiting[order[before]] |= ghosts
            for number in ghosts:
                self._ghosts[number].behind = order[before]
        else:
            row.free_at = now
            self._begin(ghosts, now)

    def _begin(self, numbers: set[int], now: float) -> None:
        for number in numbers:
            follow = self._ghosts[number]
            follow.behind, follow.starts_at = "", max(now, follow.ghost.rejected_at)
            self._judge(number)

    def _witness(self, decode_row: int, first_token_at: float, tbt_s: float, now: float) -> None:
        """Use the TBT of a request that decoded on this row from `first_token_at` until `now` as
        the estimate for ghosts that would have decoded there at that time."""
        for number, follow in list(self._decoding.get(decode_row, {}).items()):
            joins_at = self._first_token_at(follow)
            if joins_at is None or joins_at > now:
                continue  # it would not be there yet
            if first_token_at <= joins_at + follow.ghost.decode_s:
                follow.tbt_s = tbt_s + follow.ghost.joining_s
                del self._decoding[decode_row][number]
                self._judge(number)

    def _first_token_at(self, follow: _Follow) -> float | None:
        if follow.starts_at is None:
            return None
        ratio = self._ratio(follow.ghost.prefill_row)
        if ratio is None:
            return None
        return follow.starts_at + follow.ghost.own_s * ratio

    def _ratio(self, prefill_row: int) -> float | None:
        row = self._rows.get(prefill_row)
        ratios = row.ratios if row is not None and row.ratios else self._ratios
        return median(ratios) if ratios else None

    def _judge(self, number: int) -> None:
        """Close a ghost if its estimates suffice: one missed objective is enough for "missed", both
        must be met for "met"."""
        follow = self._ghosts[number]
        ghost, objectives = follow.ghost, follow.ghost.objectives
        token_at = self._first_token_at(follow)
        ttft_s = None if token_at is None else token_at - ghost.rejected_at
        parts = (_within(ttft_s, objectives.ttft_s), _within(follow.tbt_s, objectives.tbt_s))
        if False in parts:
            self._close(number, "rejected_would_have_missed")
        elif None not in parts:
            self._close(number, "rejected_would_have_met")

    def _judge_served(self, served: _Served, tbt_s: float | None) -> None:
        if not _any(served.objectives):
            return
        if served.first_token_at is None:
            self._count("admitted_unknown")
            return
        ttft_s = served.first_token_at - served.admitted_at
        in_time = _within(ttft_s, served.objectives.ttft_s)
        in_pace = tbt_s is None or _within(tbt_s, served.objectives.tbt_s)
        self._count("admitted_met" if in_time and in_pace else "admitted_missed")

    def _close(self, number: int, result: str) -> None:
        follow = self._ghosts.pop(number)
        row = self._rows.get(follow.ghost.prefill_row)
        if row is not None and follow.behind:
            row.waiting[follow.behind].discard(number)
        decoding = self._decoding.get(follow.ghost.decode_row, {})
        decoding.pop(number, None)
        if not decoding:
            self._decoding.pop(follow.ghost.decode_row, None)
        self._count(result)

    def _count(self, result: str) -> None:
        self._counts[result] = self._counts.get(result, 0) + 1


def _any(objectives: Objectives) -> bool:
    return objectives.ttft_s is not None or objectives.tbt_s is not None


def _within(value_s: float | None, objective_s: float | None) -> bool | None:
    """Whether a value meets its objective; None if the value is not known yet."""
    if objective_s is None:
        return True
    return None if value_s is None else value_s <= objective_s
