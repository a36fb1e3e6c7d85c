"""Moves bindings of spread contexts while requests run, by orders to their instances. Pure.

Which ones is decided by `decode/rebinding.py`, every `rebind_every_s`. Until the instance says that
it has changed its routes, and if it does not, the binding counts where it was.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING

from ..decode.rebinding import proposed
from ..pool.instance_orders import RebindRequest, carries_out

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .conductor import Conductor
    from .inflight_requests import InflightRequest


class Rebinder:
    """The bindings of one conductor's requests. Not thread-safe."""

    def __init__(self, core: Conductor) -> None:
        self._core = core
        self._next_at = -inf
        self._targets: dict[str, int] = {}  # by request: the row it is on its way to

    def due(self, now: float) -> list[RebindRequest]:
        """The moves to order now: none between two times of looking, nor while some are under way,
        of which it is not known yet what they bring."""
        spread, cluster = self._core.settings.spread, self._core.cluster
        if not spread.rebind_every_s or now < self._next_at or self._targets:
            return []
        self._next_at = now + spread.rebind_every_s
        moves = proposed(cluster, self._movable(), spread.rebind_s, spread.rebind_every_s)
        self._targets = {move.request_id: move.target for move in moves}
        return [
            RebindRequest(cluster.name(move.source), move.request_id, cluster.name(move.target))
            for move in moves
        ]

    def ended(self, request_id: str, now: float, error: str = "") -> None:
        """Record the outcome of an order: the binding has moved, or (`error`) stays. No effect on a
        request that has ended, or whose instances have left."""
        row, flight = self._targets.pop(request_id, -1), self._core.ledger.get(request_id)
        if error or flight is None or row not in flight.shares or flight.decode_row < 0:
            return
        self._core.ledger.rebind(flight, row, now)
        flight.decision = replace(flight.decision, decode=self._core.cluster.name(row))

    def forget(self, request_id: str) -> None:
        """A request has ended, or an instance of it has left."""
        self._targets.pop(request_id, None)

    def _movable(self) -> Iterator[InflightRequest]:
        cluster = self._core.cluster
        for flight in self._core.ledger:
            spec = cluster.specs[flight.decode_row] if flight.decode_row >= 0 else None
            if len(flight.shares) > 1 and spec is not None and carries_out(spec, "rebind"):
                yield flight
