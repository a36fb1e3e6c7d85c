"""Hedged requests: an urgent request races over two routes, the first token wins. Pure.

A prediction of TTFT is right on average, and wrong where it matters: an engine that stalls, a link
that is busy. An urgent request may run over two routes, each a prefill instance and a decode
instance; when one of them yields the first token, the other is cancelled, once. If one fails, the
other continues alone. This is the hedged request of Dean and Barroso ("The tail at scale", 2013),
but with both routes started at once: an urgent request has no time to wait for half a prefill until
the first route looks slow.

A hedge costs a second prefill, so there is a budget, as for hedged reads in the pool: each
scheduled request adds `share` to the budget, a race takes 1, and at most `saved_max` is kept. When
the whole cluster is slow, hedging everything would only make it slower.

The second route has another prefill instance: the fastest one, preferably on another node, and none
if its predicted TTFT is more than `slower_max` times as long. It decodes at the same instance. Its
place in the queue is reserved like that of the first, until a prefill is done or the request ends
(`core/inflight_requests.py`).
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta

from ..errors import Conflict

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ..records import Request


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


class HedgedRoute(NamedTuple):
    """The instances of one route, by id."""

    prefill: str
    decode: str


@dataclass(frozen=True, slots=True)
class RacingStatistics:
    """Counts of races. `won_by_second` of the `finished` races were made faster by hedging;
    `denied` urgent requests were not hedged, as the budget or `races_max` was exhausted."""

    started: int = 0
    finished: int = 0
    won_by_second: int = 0
    lost: int = 0
    denied: int = 0
    under_way: int = 0
    budget: float = 0.0


class _Race:
    """One race. `running` are the routes neither cancelled nor failed; once there is a winner, it
    is the only one."""

    __slots__ = ("expires_at", "routes", "running", "winner")

    def __init__(self, routes: tuple[HedgedRoute, ...], expires_at: float) -> None:
        self.routes = routes
        self.running = list(routes)
        self.winner: HedgedRoute | None = None
        self.expires_at = expires_at


def second_route(
    ttft_s: NDArray[np.float64],
    at: int,
    settings: RacingSettings,
    nodes: NDArray[np.int32] | None = None,
) -> int | None:
    """The candidate for the second route, besides candidate `at`; None if none is fast enough.

    `ttft_s` [candidates] is the predicted TTFT, infinite where the request can not run. Of the
    candidates within `slower_max`, the fastest on another node is taken, by `nodes` [candidates]
    (-1: no known node), else the fastest.
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

    Every route of a race is returned exactly once as one to cancel, or has won, or has failed.
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
        """Change the settings. Races under way continue."""
        self._settings = settings
        self._budget = min(self._budget, settings.saved_max) if settings.share else 0.0

    def scheduled(self) -> None:
        """Add to the budget for a scheduled request, urgent or not."""
        self._budget = min(self._settings.saved_max, self._budget + self._settings.share)

    def may_race(self, request: Request) -> bool:
        """Whether this request may be hedged, if there is a second route; counts a denial."""
        if not (self._settings.enabled and request.urgent):
            return False
        if self._budget < 1.0 or len(self._races) >= self._settings.races_max:
            self._counts["denied"] += 1
            return False
        return True

    def start(self, request_id: str, routes: Sequence[HedgedRoute], now: float) -> None:
        """Start a race over two routes or more; the first is the decision's own route.

        Raises Conflict if the request is in a race already, for fewer than two routes, and if two
        of them are the same.
        """
        if request_id in self._races:
            raise Conflict(f"request {request_id!r} is in a race already")
        if len(routes) < 2 or len(set(routes)) < len(routes):
            raise Conflict(f"request {request_id!r}: a race needs two different routes")
        self._races[request_id] = _Race(tuple(routes), now + self._settings.expires_s)
        self._budget = max(0.0, self._budget - (len(routes) - 1))
        self._counts["started"] += 1

    def first_token(self, request_id: str, route: HedgedRoute) -> tuple[HedgedRoute, ...]:
        """Record the first token of a route. Returns the routes to cancel now.

        The first route to report wins. A later token of a loser changes nothing and returns (), as
        does a request that is not in a race.
        """
        race = self._races.get(request_id)
        if race is None or race.winner is not None or route not in race.running:
            return ()
        losers = tuple(other for other in race.running if other != route)
        race.winner, race.running = route, [route]
        self._counts["finished"] += 1
        self._counts["won_by_second"] += route != race.routes[0]
        return losers

    def winner(self, request_id: str) -> HedgedRoute | None:
        """The route that yielded the first token; None without a race or a first token."""
        race = self._races.get(request_id)
        return None if race is None else race.winner

    def failed(self, request_id: str, route: HedgedRoute) -> tuple[HedgedRoute, ...]:
        """Record that a route failed. Returns the routes that still run; () if there is none: the
        request is lost, its race is dropped, and it may be scheduled again."""
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

    def lost(self, instance: str) -> dict[str, tuple[HedgedRoute, ...]]:
        """Fail all routes over a removed instance. Returns, for each request with such a route, its
        routes that still run."""
        hit = [
            (request_id, route)
            for request_id, race in self._races.items()
            for route in race.running
            if instance in route
        ]
        return {request_id: self.failed(request_id, route) for request_id, route in hit}

    def end(self, request_id: str) -> tuple[HedgedRoute, ...]:
        """Drop the race of a request that has finished or was cancelled. Returns the routes to
        cancel; none if there is a winner, as the others were cancelled before."""
        race = self._races.pop(request_id, None)
        return () if race is None or race.winner is not None else tuple(race.running)

    def expired(self, now: float) -> dict[str, tuple[HedgedRoute, ...]]:
        """Drop the races past their expiry. Returns the routes to cancel, by request."""
        late = [key for key, race in self._races.items() if race.expires_at <= now]
        return {request_id: self.end(request_id) for request_id in late}

    def statistics(self) -> RacingStatistics:
        """Counts since the start, and the remaining budget."""
        return RacingStatistics(**self._counts, under_way=len(self._races), budget=self._budget)
