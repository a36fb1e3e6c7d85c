"""Requests that go on at another instance while they are decoded, with their KV. Pure.

An instance that changes its role has to be empty, and its longest answers may take minutes. One
that carries out the order `hand_over` (`pool/instance_orders.py`) sends a request's KV to the
instance that is chosen here, as for any request that is to be decoded, and the answer goes on
there. Until it says that this is done, the request counts where it was, and its place at the other
one is reserved. A request for which there is no room elsewhere stays until it ends, and so does one
whose TBT, or that of those who are there, would be missed.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ..admission import admission
from ..cost.transfer_model import TIERS
from ..decode.selection import DecodeChoice, DecodeQuestion, choose
from ..pool.instance_orders import HandOverRequest, carries_out
from .inflight_requests import RequestPhase
from .transfer_bookings import Move

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .conductor import Conductor
    from .inflight_requests import InflightRequest

# Requests on their way from one instance: as many as copies from a node that is drained, which
# serves meanwhile, too.
MOVES_MAX = 4
# Requests of one instance for which a place is sought in one piece: a millisecond.
TRIES_MAX = 8
# Until a request is tried again that found no room, or was not handed over.
RETRY_S = 5.0

_HBM = TIERS.index("hbm")


@dataclass(frozen=True, slots=True)
class _Going:
    """A request on its way between two rows; `reserved` is added to the load of the `target`."""

    source: int
    target: int
    reserved: dict[str, int]


class DecodeMoves:
    """The requests that one conductor moves, of those that it has placed. Not thread-safe."""

    def __init__(self, core: Conductor) -> None:
        self._core = core
        self._going: dict[str, _Going] = {}
        self._again_at: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._going)

    def begin(self, instance: str, now: float) -> list[HandOverRequest]:
        """The requests that an instance should hand over now: those first that would take longest
        there. None if it can't, or has no `block_bytes`."""
        cluster = self._core.cluster
        row, orders = cluster.row(instance), list[HandOverRequest]()
        if not carries_out(cluster.spec(instance), "hand_over") or not cluster.block_bytes[row]:
            return []
        room = MOVES_MAX - sum(one.source == row for one in self._going.values())
        for flight in heapq.nlargest(TRIES_MAX, self._movable(row, now), key=_left):
            if len(orders) >= room:
                break
            target = self._target(flight, now)
            if target < 0:
                self._again_at[flight.request.id] = now + RETRY_S
                continue
            self._begin(flight, target, now)
            orders.append(HandOverRequest(instance, flight.request.id, cluster.name(target)))
        return orders

    def ended(self, request_id: str, now: float, error: str = "") -> None:
        """Record the outcome of an order: the request decodes at its new instance, or (`error`)
        stays. No effect on one that has ended meanwhile."""
        core, one, flight = (
            self._core,
            self._going.get(request_id),
            self._core.ledger.get(request_id),
        )
        self.forget(request_id, now)
        if one is None or flight is None:
            return
        if error:
            self._again_at[request_id] = now + RETRY_S
            return
        core.ledger.move(flight, one.target, now)
        core.horizon.move(request_id, one.target, now)
        core.shadow.cancelled(request_id, now)  # it is no witness of either instance
        flight.decode_mark, flight.decode_tokens = None, 0
        flight.decision = replace(flight.decision, decode=core.cluster.name(one.target))

    def forget(self, request_id: str, now: float) -> None:
        """A request has ended, or moves no more."""
        self._again_at.pop(request_id, None)
        one = self._going.pop(request_id, None)
        if one is not None:
            less = {name: -amount for name, amount in one.reserved.items()}
            self._core.cluster.promise(one.target, now, **less)
            self._core.bookings.moved(request_id)

    def forget_row(self, row: int, now: float) -> None:
        """An instance is removed: what was on its way there stays where it is."""
        for request_id, one in list(self._going.items()):
            if row in (one.source, one.target):
                self.forget(request_id, now)

    # -- inside ------------------------------------------------------------------------------------

    def _movable(self, row: int, now: float) -> Iterator[InflightRequest]:
        """Requests that are being decoded by the instance of a row, which has given a token."""
        for flight in self._core.ledger:
            name = flight.request.id
            here = flight.decode_row == row and len(flight.shares) == 1
            before = flight.request.first_token_from == "prefill"
            decodes = flight.phase is RequestPhase.DECODE and flight.answered_tokens > before
            waits = name in self._going or self._again_at.get(name, now) > now
            if here and decodes and not waits:
                yield flight

    def _target(self, flight: InflightRequest, now: float) -> int:
        """The row of the instance where a request can go on; -1 if there is none."""
        core, settings = self._core, self._core.settings
        rows = core.cluster.rows_for(
            flight.request.model,
            prefill=False,
            key_space=core.cluster.key_spaces[flight.decode_row],
        )
        rows = rows[rows != flight.decode_row]
        if not len(rows):
            return -1
        source, targets = core.cluster.node.item(flight.decode_row), core.cluster.node.take(rows)
        nbytes = np.full(len(rows), float(self._nbytes(flight)))
        promised_s = core.horizon.promised.tightest_s(rows)
        margin = core.margins.tbt.factor
        question = DecodeQuestion(
            request=replace(flight.request, prompt_tokens=_context(flight), keys=()),
            cluster=core.cluster,
            rows=rows,
            output_tokens=_left(flight),
            settings=settings.decode,
            dice=core.dice,
            limits_s=admission.limits_s(settings.admission, flight.request, promised_s, margin),
            heavy=flight.heavy,
            move_s=core.transfers.seconds_from(source, _HBM, targets, nbytes, now),
            enforce=False,  # by the limits, which know the mode of admission
        )
        choice = choose(question)
        if not isinstance(choice, DecodeChoice):
            return -1
        limits_s = np.broadcast_to(question.limits_s, len(rows))
        kept = choice.tbt_s[choice.at] <= limits_s[choice.at]
        return int(rows[choice.at]) if kept else -1

    def _begin(self, flight: InflightRequest, target: int, now: float) -> None:
        cluster, source = self._core.cluster, flight.decode_row
        reserved = {
            "batch": 1,
            "context_tokens": _context(flight),
            "kv_used_tokens": flight.shares[source],
        }
        cluster.promise(target, now, **reserved)
        nodes = cluster.node.item(source), cluster.node.item(target)
        if nodes[0] != nodes[1]:
            self._core.bookings.moves(flight.request.id, Move(*nodes, self._nbytes(flight)), now)
        self._going[flight.request.id] = _Going(source, target, reserved)

    def _nbytes(self, flight: InflightRequest) -> int:
        """Bytes of the KV that it has."""
        cluster, row = self._core.cluster, flight.decode_row
        spec = cluster.specs[row]
        assert spec is not None
        return _context(flight) * cluster.block_bytes.item(row) // spec.block_tokens


def _context(flight: InflightRequest) -> int:
    """Tokens of its context so far."""
    return flight.request.prompt_tokens + flight.answered_tokens


def _left(flight: InflightRequest) -> int:
    """Tokens that its answer should still have."""
    return max(flight.decision.output_tokens - flight.answered_tokens, 1)
