"""Caps of answers that already run, which follow the load of the instance that decodes them. Pure.

Admission looks ahead, and a forecast can be wrong: answers are longer than predicted, or others
send requests there too. Then steps take longer than somebody was promised. Before all are late, the
longest answers of classes that the operator names (`cap_classes`) end where they are:

    step    d0 + d1 · batch + d2 · context, of what decodes there now
    limit   the tightest TBT objective of a request in flight there
    cap     answered tokens of as few of the longest answers as have to end for step <= limit;
            never below `cap_tokens_min`

An instance that is within its limit raises its cap by `RELAX` at each tick, until no answer there
comes near it and it is gone. Who sends answers on, the gateway, asks for the caps every second or
two; so a cap is a state, not an order: it holds for all answers there, those that come later too.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ..core.inflight_requests import InflightRequest
    from ..state.instance_table import Cluster
    from .admission import AdmissionSettings

# A tick is a second. A cap that is doubled in some three ticks is back at twice its length when
# answers of that length, at 25 ms per token and some hundred tokens, have come.
RELAX = 1.25


class OutputCaps:
    """By row of the cluster, in tokens; rows without an entry have no cap."""

    def __init__(self) -> None:
        self._caps: dict[int, int] = {}

    def at(self, row: int) -> int | None:
        """The cap of answers of capped classes at a row; None without one."""
        return self._caps.get(row)

    def forget(self, row: int) -> None:
        """The row's instance was removed."""
        self._caps.pop(row, None)

    def tick(
        self, cluster: Cluster, flights: Iterable[InflightRequest], settings: AdmissionSettings
    ) -> None:
        """Set the caps by what decodes now."""
        if not settings.cap_classes:
            self._caps.clear()
            return
        there: dict[int, list[InflightRequest]] = {}
        for flight in flights:
            if flight.decode_row >= 0 and flight.last_token_at is not None:
                there.setdefault(flight.decode_row, []).append(flight)
        self._caps = {row: cap for row, cap in self._caps.items() if row in there}
        for row, running in there.items():
            self._set(row, self._cap(cluster, row, running, settings), running)

    def _cap(
        self,
        cluster: Cluster,
        row: int,
        running: list[InflightRequest],
        settings: AdmissionSettings,
    ) -> int | None:
        """The cap of one row, from its load and its cap before."""
        batch, context = cluster.batch.item(row), cluster.context_tokens.item(row)
        d0, d1, d2 = cluster.d0.item(row), cluster.d1.item(row), cluster.d2.item(row)
        limit_s = tightest_s(running)
        over_s = d0 + d1 * batch + d2 * context - limit_s
        before = self._caps.get(row)
        if over_s <= 0:
            return None if before is None else math.ceil(before * RELAX)
        cap = before
        for flight in _longest(running, settings):
            cap = flight.answered_tokens if cap is None else min(cap, flight.answered_tokens)
            over_s -= d1 + d2 * (flight.request.prompt_tokens + flight.answered_tokens)
            if over_s <= 0:
                break
        return cap

    def _set(self, row: int, cap: int | None, running: list[InflightRequest]) -> None:
        # Twice the longest answer there: no one comes near it before the next ticks.
        if cap is None or cap > 2 * max(flight.answered_tokens for flight in running):
            self._caps.pop(row, None)
        else:
            self._caps[row] = cap


def tightest_s(running: Iterable[InflightRequest]) -> float:
    """The tightest TBT objective of these requests; infinite if none has one."""
    objectives = (flight.request.objectives.tbt_s for flight in running)
    return min((tbt_s for tbt_s in objectives if tbt_s is not None), default=math.inf)


def caps_by_class(cap: int | None, settings: AdmissionSettings) -> Mapping[str, int]:
    """What an instance's cap means for each class."""
    return {} if cap is None else dict.fromkeys(settings.cap_classes, cap)


def _longest(running: list[InflightRequest], settings: AdmissionSettings) -> list[InflightRequest]:
    """Those that may be cut, the longest answer first."""
    able = [
        flight
        for flight in running
        if flight.asked.priority in settings.cap_classes
        and flight.answered_tokens >= settings.cap_tokens_min
    ]
    return sorted(able, key=lambda flight: -flight.answered_tokens)
