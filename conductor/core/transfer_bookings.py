"""The transfers of requests and of orders, booked where their bytes move: each begins once and ends
once. Pure.

    a request's fetches    from its decision until `fetched`, or its prefill begins; of one that is
                           held, planned from its decision, and in flight from its release
    its hand-over          planned from its decision; in flight from `prefill_done` (overlapped:
                           from `prefill_began`) until `handed_over`, or its first decoded tokens
    a move while decoding  from its order until its outcome
    a copy by an order     from its order until its outcome

Whatever happens to the request ends all of them. Nobody has to report a hand-over: the cards' model
counts it for as long as it takes to be sent (`card_queue.py`). Transfers whose begin and end were
told, and that had both cards to themselves, teach the link's speed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from ..pool.orders import Copy

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ..cost.transfer_model import TransferModel
    from ..pool.orders import Order
    from ..records import Fetch
    from ..state.instance_table import Cluster
    from .inflight_requests import InflightRequest


class Move(NamedTuple):
    """Bytes from one node to another, by their numbers; -1 for a node that is not known.
    `from_disk`: its time is not that of the network alone."""

    source: int
    target: int
    nbytes: int
    from_disk: bool = False


class _Begun(NamedTuple):
    """A move in flight. `begun`: how many transfers had begun at both cards then, with this one;
    -1 if it did not have them to itself."""

    move: Move
    began_at: float
    begun: int


@dataclass(slots=True)
class _Booked:
    """What is booked for a request: what it fetches, or will fetch, what it will hand over, what it
    does."""

    to_fetch: tuple[Move, ...]
    planned: tuple[Move, ...]
    overlapped: bool
    fetches: list[_Begun] = field(default_factory=list)
    handover: list[_Begun] = field(default_factory=list)


class TransferBookings:
    """All of them, by the request's id or the order's number. Every method may be called for one
    that has none."""

    def __init__(self, cluster: Cluster, transfers: TransferModel) -> None:
        self._cluster, self._transfers = cluster, transfers
        self._requests: dict[str, _Booked] = {}
        self._moves: dict[str, _Begun] = {}
        self._copies: dict[int, tuple[_Begun, int]] = {}  # and how many blocks it has

    def __len__(self) -> int:
        return len(self._requests) + len(self._moves) + len(self._copies)

    def nodes(self) -> set[int]:
        """The numbers of all nodes that something is booked at."""
        moves = [one.move for one, _ in self._copies.values()]
        moves += [one.move for one in self._moves.values()]
        for booked in self._requests.values():
            moves += [one.move for one in (*booked.fetches, *booked.handover)]
            moves += (*booked.to_fetch, *booked.planned)
        return {number for move in moves for number in (move.source, move.target)}

    # -- requests ----------------------------------------------------------------------------------

    def decided(self, flight: InflightRequest, now: float, *, held: bool = False) -> None:
        """A request was placed: its fetches begin, unless it is `held`, and its KV will be handed
        over when its prefill is done (overlapped: when that begins)."""
        decision = flight.decision
        ready_s = flight.prefilled_s - (flight.own_s if flight.overlapped else 0.0)
        self._plan(flight.handover, now + max(ready_s, 0.0))
        booked = _Booked(flight.fetches, flight.handover, flight.overlapped)
        self._requests[decision.request_id] = booked
        turn_at = flight.decided_at + decision.predicted_ttft_s - flight.own_s
        self._plan(booked.to_fetch, max(now, turn_at - max(flight.ready_at - now, 0.0)))
        if not held:
            self.sent(decision.request_id, now)

    def sent(self, request_id: str, now: float) -> None:
        """It was sent to its engine, which begins to fetch."""
        booked = self._requests.get(request_id)
        if booked is not None:
            moves = booked.to_fetch
            self._stop_fetches(booked)
            booked.fetches = [self._begin(move, now) for move in moves]

    def fetched(self, request_id: str, now: float) -> None:
        """All that it fetches has come."""
        booked = self._requests.get(request_id)
        if booked is None:
            return
        if len(booked.fetches) == 1:
            self._learn(booked.fetches[0], now)
        self._stop_fetches(booked)

    def prefill_began(self, request_id: str, now: float) -> None:
        """Its blocks are there; overlapped, its KV begins to leave."""
        booked = self._requests.get(request_id)
        if booked is not None:
            self._stop_fetches(booked)
            if booked.overlapped:
                self._hand_over(booked, now)

    def prefilled(self, request_id: str, now: float) -> None:
        """Its blocks were there, and its KV leaves."""
        booked = self._requests.get(request_id)
        if booked is not None:
            self._stop_fetches(booked)
            self._hand_over(booked, now)

    def handed_over(self, request_id: str, now: float, *, told: bool = True) -> None:
        """Its KV is where it is decoded. `told`: since now; else since some time."""
        booked = self._requests.get(request_id)
        if booked is None:
            return
        if told and len(booked.handover) == 1 and not booked.overlapped:
            self._learn(booked.handover[0], now)
        self._cancel_plans(booked.planned)  # if that is told before the end of its prefill
        booked.planned = ()
        self._end(booked.handover)

    def ended(self, request_id: str) -> None:
        """It has ended, or an instance of it has gone: nothing moves for it any more."""
        booked = self._requests.pop(request_id, None)
        if booked is not None:
            self._cancel_plans(booked.planned)
            self._stop_fetches(booked)
            self._end(booked.handover)

    def moves(self, request_id: str, move: Move, now: float) -> None:
        """A request that decodes is ordered to go on elsewhere: its KV is sent."""
        self._moves[request_id] = self._begin(move, now)

    def moved(self, request_id: str) -> None:
        """It is there, or stays."""
        one = self._moves.pop(request_id, None)
        if one is not None:
            self._end([one])

    # -- orders ------------------------------------------------------------------------------------

    def ordered(self, order: Order, now: float) -> None:
        """An order is sent to a node: a copy begins."""
        if isinstance(order, Copy):
            number = self._cluster.find_node
            move = Move(number(order.source), number(order.target), order.nbytes)
            self._copies[order.number] = self._begin(move, now), len(order.keys)

    def carried_out(self, number: int, blocks: int, now: float | None) -> None:
        """An order has been carried out, with so many blocks that are there now; `now` is None if
        it has failed, or nobody knows. A copy teaches only if all of it was sent."""
        begun, keys = self._copies.pop(number, (None, 0))
        if begun is not None:
            if now is not None and blocks == keys:
                self._learn(begun, now)
            self._end([begun])

    # -- inside ------------------------------------------------------------------------------------

    def _begin(self, move: Move, now: float) -> _Begun:
        in_flight, begun = self._transfers.traffic(move.source, move.target)
        self._transfers.begin(move.source, move.nbytes, now, target_node=move.target)
        known = move.source >= 0 and move.target >= 0 and not move.from_disk
        return _Begun(move, now, begun + 2 if known and not in_flight else -1)

    def _hand_over(self, booked: _Booked, now: float) -> None:
        moves, booked.planned = booked.planned, ()
        self._cancel_plans(moves)
        booked.handover += [self._begin(move, now) for move in moves]

    def _stop_fetches(self, booked: _Booked) -> None:
        """What it fetches is there, or nobody fetches it."""
        self._cancel_plans(booked.to_fetch)
        booked.to_fetch = ()
        self._end(booked.fetches)

    def _plan(self, moves: tuple[Move, ...], ready_at: float) -> None:
        for move in moves:
            self._transfers.plan(move.source, move.target, move.nbytes, ready_at)

    def _cancel_plans(self, moves: tuple[Move, ...]) -> None:
        for move in moves:
            self._transfers.unplan(move.source, move.target, move.nbytes)

    def _end(self, moves: list[_Begun]) -> None:
        for move, _, _ in moves:
            self._transfers.end(move.source, move.nbytes, target_node=move.target)
        moves.clear()

    def _learn(self, one: _Begun, now: float) -> None:
        move = one.move
        if one.begun >= 0 and self._transfers.traffic(move.source, move.target)[1] == one.begun:
            self._transfers.moved(move.source, move.target, move.nbytes, now - one.began_at)


# -- what a decision moves -------------------------------------------------------------------------


def fetched_moves(cluster: Cluster, fetches: Iterable[Fetch], row: int) -> tuple[Move, ...]:
    """What the instance of a row fetches."""
    target = int(cluster.node[row])
    found = []
    for fetch in fetches:
        source = _node(cluster, fetch)
        if source != target:  # its own node's blocks, or its neighbour's, go over no link
            found.append(Move(source, target, fetch.nbytes, fetch.tier == "nvme"))
    return tuple(found)


def handed_over_moves(cluster: Cluster, row: int, shares: dict[int, float]) -> tuple[Move, ...]:
    """What leaves the prefill instance's node for those that decode, by row its bytes: nothing for
    the same node."""
    source = int(cluster.node[row])
    targets = ((int(cluster.node[target]), nbytes) for target, nbytes in shares.items())
    return tuple(Move(source, to, int(nbytes)) for to, nbytes in targets if to != source)


def _node(cluster: Cluster, fetch: Fetch) -> int:
    """The number of the node of a fetch's source; -1 for an instance that was removed."""
    name = fetch.source
    if fetch.tier == "hbm":
        return int(cluster.node[cluster.row(name)]) if name in cluster else -1
    return cluster.node_number(name)
