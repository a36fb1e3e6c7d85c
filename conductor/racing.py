"""Urgent requests over two routes: whoever gives the first token first goes on. Pure.

A prediction of TTFT is right on average, and wrong where it hurts: an engine that stalls, a link
that is busy. A request that is marked urgent may run over two routes, each a prefill instance and a
decode instance; at the first token of either, the other is cancelled, once. If one fails, the other
goes on alone. The idea is the hedged request of Dean and Barroso ("The tail at scale", 2013), begun
at once: half a prefill spent waiting for a sign of trouble is what an urgent request does not have.

It costs a second prefill, so there is a budget, as there is for hedged reads in the pool: each
request that is scheduled adds `share` to an account that pays 1 for a race and holds at most
`saved_max`. When everything is slow, everything twice would be slower.

The second route has another prefill instance: the best that is, where it can be, on another node,
and none if it is predicted to take more than `slower_max` times as long. It may decode at the same
instance, or at another.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta

from .errors import Conflict

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from .records import Request


class RacingSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Which requests are raced, and how many."""

    enabled: bool = False
    """Whether urgent requests are raced at all."""

    share: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.05
    """Of all requests that may be raced, in the long run. Each costs a prefill for nothing."""

    saved_max: Annotated[float, Meta(ge=1.0, le=1000.0)] = 10.0
    """Races that may be started in a row although the share would not allow them."""

    slower_max: Annotated[float, Meta(ge=1.0, le=100.0)] = 2.0
    """How many times the best TTFT the second route may be predicted to take."""

    expires_s: Annotated[float, Meta(gt=0.0, le=86_400.0)] = 300.0
    """A race without a first token or an end for so long is forgotten, all its routes cancelled."""

    races_max: Annotated[int, Meta(ge=1, le=1_000_000)] = 10_000
    """Races under way at a time; beyond it nothing is raced."""


class Route(NamedTuple):
    """The instances of one attempt, by id."""

    prefill: str
    decode: str


@dataclass(frozen=True, slots=True)
class RacingStatistics:
    """`won_by_second` of `finished` races are those that racing has made faster; `denied` urgent
    requests found the budget spent."""

    started: int = 0
    finished: int = 0
    won_by_second: int = 0
    lost: int = 0
    denied: int = 0
    under_way: int = 0
    budget: float = 0.0


class _Race:
    """`running` are routes neither cancelled nor failed. Once there is a winner, it is the only
    one."""

    __slots__ = ("expires_at", "routes", "running", "winner")

    def __init__(self, routes: tuple[Route, ...], expires_at: float) -> None:
        self.routes = routes
        self.running = list(routes)
        self.winner: Route | None = None
        self.expires_at = expires_at


def second_route(
    ttft_s: NDArray[np.float64],
    at: int,
    settings: RacingSettings,
    nodes: NDArray[np.int32] | None = None,
) -> int | None:
    """The candidate that a request is raced on beside candidate `at`; None if none is worth it.

    `ttft_s` [candidates] is predicted for each, infinite where it can not run. Of those fast enough
    the fastest on another node is taken, by `nodes` [candidates] (-1: on no known one), else the
    fastest.
    """
    fast = (ttft_s <= settings.slower_max * ttft_s[at]) & np.isfinite(ttft_s)
    fast[at] = False
    if not fast.any():
        return None
    if nodes is not None:
        elsewhere = fast & ((nodes != nodes[at]) | (nodes == -1))
        fast = elsewhere if elsewhere.any() else fast
    return int(np.where(fast, ttft_s, np.inf).argmin())


class Races:
    """All races under way, and the budget for more.

    Every route of a race is in exactly one answer as one to cancel, or has won, or has failed.
    """

    def __init__(self, settings: RacingSettings | None = None) -> None:
        self._settings = settings or RacingSettings()
        self._races: OrderedDict[str, _Race] = OrderedDict()
        self._budget = self._settings.saved_max if self._settings.share else 0.0
        self._counts = dict.fromkeys(("started", "finished", "won_by_second", "lost", "denied"), 0)

    def __len__(self) -> int:
        return len(self._races)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._races

    def configure(self, settings: RacingSettings) -> None:
        """Change the settings. Races under way go on."""
        self._settings = settings
        self._budget = min(self._budget, settings.saved_max) if settings.share else 0.0

    def scheduled(self) -> None:
        """A request, urgent or not, was given a place: it adds to the budget."""
        self._budget = min(self._settings.saved_max, self._budget + self._settings.share)

    def may_race(self, request: Request) -> bool:
        """Whether this request is raced if there is a second route."""
        if not (self._settings.enabled and request.urgent):
            return False
        if self._budget < 1.0 or len(self._races) >= self._settings.races_max:
            self._counts["denied"] += 1
            return False
        return True

    def start(self, request_id: str, routes: Sequence[Route], now: float) -> None:
        """A request runs over two routes, or more; the first is the one that was chosen.

        Raises Conflict if it is in a race already, or two of its routes are the same.
        """
        if request_id in self._races:
            raise Conflict(f"request {request_id!r} is in a race already")
        if len(routes) < 2 or len(set(routes)) < len(routes):
            raise Conflict(f"request {request_id!r}: a race needs two different routes")
        self._races[request_id] = _Race(tuple(routes), now + self._settings.expires_s)
        self._budget = max(0.0, self._budget - (len(routes) - 1))
        self._counts["started"] += 1

    def first_token(self, request_id: str, route: Route) -> tuple[Route, ...]:
        """A route has given its first token: the routes to cancel now.

        The first to call wins. A loser whose token was already under way changes nothing, and is
        not to be cancelled again; nor does a request that is not in a race.
        """
        race = self._races.get(request_id)
        if race is None or race.winner is not None or route not in race.running:
            return ()
        losers = tuple(other for other in race.running if other != route)
        race.winner, race.running = route, [route]
        self._counts["finished"] += 1
        self._counts["won_by_second"] += route != race.routes[0]
        return losers

    def winner(self, request_id: str) -> Route | None:
        """The route that gave the first token; None without a race, or while it is open."""
        race = self._races.get(request_id)
        return None if race is None else race.winner

    def failed(self, request_id: str, route: Route) -> tuple[Route, ...]:
        """A route can not go on: those that still run. () if none does, and the request is lost;
        it is then forgotten, and may be scheduled again."""
        race = self._races.get(request_id)
        if race is None:
            return ()
        if route in race.running:
            race.running.remove(route)
        if not race.running:
            self._counts["lost"] += race.winner is None
            del self._races[request_id]
            return ()
        return tuple(race.running)

    def lost(self, instance: str) -> dict[str, tuple[Route, ...]]:
        """An instance is gone: by request, the routes that still run, of all that used it."""
        hit = [
            (request_id, route)
            for request_id, race in self._races.items()
            for route in race.running
            if instance in route
        ]
        return {request_id: self.failed(request_id, route) for request_id, route in hit}

    def end(self, request_id: str) -> tuple[Route, ...]:
        """The request has finished, or was cancelled: the routes to cancel. Not the winner: that
        one knows."""
        race = self._races.pop(request_id, None)
        return () if race is None or race.winner is not None else tuple(race.running)

    def expired(self, now: float) -> dict[str, tuple[Route, ...]]:
        """Races nobody has heard of for too long, with the routes to cancel. They are forgotten."""
        late = [key for key, race in self._races.items() if race.expires_at <= now]
        return {request_id: self.end(request_id) for request_id in late}

    def next_expiry(self) -> float:
        """When `expired` has something to say; infinite if nothing is under way."""
        return min((race.expires_at for race in self._races.values()), default=math.inf)

    def statistics(self) -> RacingStatistics:
        """Counts since the start, and what is left of the budget."""
        return RacingStatistics(**self._counts, under_way=len(self._races), budget=self._budget)
