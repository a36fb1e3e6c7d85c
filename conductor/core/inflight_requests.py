"""All in-flight requests, and the load reserved for each. Pure.

A decision makes reservations: a place in the queue of the prefill instance, and KV room for context
and answer at the decode instance. Events of the request turn reservations into load and release
them; a request without events expires. In whatever order events come, each amount that was added to
the cluster's columns is subtracted exactly once: when no request is in flight, all `own_...`
columns are zero.
"""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import chain
from typing import TYPE_CHECKING

from msgspec import structs

from ..admission.gaps import Gaps
from ..admission.hedging import HedgedRoute
from ..prefill.fairness import Waiter

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..dispatch.dispatcher import Dispatcher
    from ..records import Decision, Request, RequestEvent
    from ..state.instance_table import Cluster
    from .calibrated_profiles import DecodeMark
    from .transfer_bookings import Move


class RequestPhase(IntEnum):
    """The phase of a request; it only advances."""

    PREFILL = 0  # reserved, queued or being computed
    DECODE = 1
    ENDED = 2


# The second place of a race has an id of its own in the queues; no request has one like it.
_SECOND = "\0second"


@dataclass(frozen=True, slots=True)
class SecondPlace:
    """The place of a hedged request in the queue of its second route's prefill instance."""

    row: int
    prefill_s: float
    prefill_tokens: int


@dataclass(slots=True)
class InflightRequest:
    """One request in flight.

    `request` is what is served, after degradation, of what was `asked`. Rows are the cluster's; -1
    once their instance is removed. `own_s` is the predicted TTFT without the queue, `prefill_s`
    what of it occupies the prefill instance, `ready_at` when the blocks will have come that are
    fetched or waited for. `alone`: whether nothing was ahead of it, and there is nothing to fetch.
    `shares` has, by row, the tokens that are reserved in the HBM of an instance: of the decode
    instance alone, or of all instances that the context is spread over. `prefill_tokens_told`: what
    its engine computes, 0 if it does not tell; `decode_mark` is of an earlier report,
    `decode_tokens` were given since.
    """

    request: Request
    asked: Request
    decision: Decision
    prefill_row: int
    decode_row: int
    own_s: float
    prefill_s: float
    prefill_tokens: int
    shares: dict[int, int]
    heavy: bool
    decided_at: float
    expires_at: float
    ready_at: float = 0.0
    grows: bool = False  # its part of the KV room is what it has, not what is predicted
    alone: bool = False
    prefill_began_at: float | None = None
    prefill_tokens_told: int = 0
    prefill_observed: bool = False
    decode_mark: DecodeMark | None = None
    decode_tokens: int = 0
    hbm_blocks: int = 0  # leading blocks that its prefill instance had in HBM
    part_tokens: int = 0  # and its first tokens there, by part keys
    reported_tokens: int = 0  # of both, the first ones that its engine has reported there
    fetches: tuple[Move, ...] = ()
    brought: bool = False  # the order to fetch these was given to a node
    handover: tuple[Move, ...] = ()
    prefilled_s: float = 0.0  # from the decision to the end of the prefill, as predicted
    handover_s: float = 0.0  # from the end of the prefill until it can be decoded
    overlapped: bool = False  # its KV leaves while it is computed
    second: SecondPlace | None = None  # None without a race, and once it is released
    phase: RequestPhase = RequestPhase.PREFILL
    first_token_at: float | None = None
    last_token_at: float | None = None
    answered_tokens: int = 0
    found_tokens: int | None = None  # of the prompt, by its engine, as that says
    gaps: Gaps = field(default_factory=Gaps)
    context: dict[int, int] = field(default_factory=dict)  # tokens counted in the columns, by row

    def answered_last(self, tokens: int, at: float) -> None:
        """The last tokens of an answer, told with its end."""
        if tokens:
            self.answered_tokens += tokens
            self.last_token_at = at


def since_last(event: RequestEvent, flight: InflightRequest | None) -> RequestEvent:
    """The event with `tokens` for `total_tokens`: those that were not reported before."""
    if event.total_tokens is None:
        return event
    more = max(0, event.total_tokens - (0 if flight is None else flight.answered_tokens))
    return structs.replace(event, tokens=more, total_tokens=None)


class Ledger:
    """All in-flight requests, and their way through the prefill queues."""

    def __init__(self, cluster: Cluster, dispatch: Dispatcher) -> None:
        self._cluster = cluster
        self._dispatch = dispatch
        self._flights: dict[str, InflightRequest] = {}
        self._expiry: list[tuple[float, str]] = []
        self._present: Counter[int] = Counter()  # requests queued or running at each row

    def __len__(self) -> int:
        return len(self._flights)

    def __iter__(self) -> Iterator[InflightRequest]:
        return iter(list(self._flights.values()))

    def get(self, request_id: str) -> InflightRequest | None:
        """The in-flight request with this id, or None."""
        return self._flights.get(request_id)

    def begin(self, flight: InflightRequest, now: float) -> tuple[InflightRequest, ...] | None:
        """Make the reservations of a decision. Returns the requests that it preempted in the queue;
        they are still in flight, and the caller must end them. Returns None, with nothing reserved,
        if the queue is full."""
        request, row = flight.request, flight.prefill_row
        waiter = Waiter(
            *(request.id, flight.prefill_s, now, request.priority, request.tenant),
            fetch_s=max(flight.ready_at - now, 0.0),
        )
        pushed = self._dispatch.enter(row, waiter, now)
        if not pushed.accepted:
            return None
        self._flights[request.id] = flight
        self._cluster.promise(row, now, queued=1, queued_tokens=flight.prefill_tokens)
        for at, tokens in flight.shares.items():
            self._cluster.promise(at, now, kv_used_tokens=tokens)
        for at in {row, *flight.shares}:
            self._present[at] += 1
        heapq.heappush(self._expiry, (flight.expires_at, request.id))
        victims = self._preempted(pushed.preempted, now)
        if flight.second is None:
            return victims
        return victims + self._begin_second(flight, flight.second, now)

    def prefill_began(
        self, flight: InflightRequest, route: tuple[str, str] | None, began_at: float
    ) -> None:
        """Its engine computes a request since then; of a raced one, on this route."""
        own = route is None or route[0] == flight.decision.prefill
        if own and flight.phase is RequestPhase.PREFILL and flight.prefill_row >= 0:
            self._dispatch.began(flight.prefill_row, flight.request.id, began_at)

    def prefill_done(self, flight: InflightRequest, now: float, ended_at: float) -> bool:
        """Move a request whose prefill is done since `ended_at` from the queue to its decode
        instance. Returns False if that was done before: idempotent."""
        if flight.phase is not RequestPhase.PREFILL:
            return False
        self._leave_queue(flight, now, ended_at)
        if flight.prefill_row not in flight.shares:
            self._leave(flight.prefill_row)
        self._end_second(flight, now)
        flight.phase = RequestPhase.DECODE
        for row in flight.shares:
            self._count(flight, row, self._part(flight, row, flight.request.prompt_tokens), now)
        if flight.decode_row >= 0:
            self._cluster.promise(flight.decode_row, now, batch=1)
            self._cluster.heavy[flight.decode_row] += flight.heavy
        return True

    def tokens(self, flight: InflightRequest, count: int, now: float) -> None:
        """Count `count` more generated tokens of a request."""
        self.prefill_done(flight, now, now)
        flight.answered_tokens += count
        flight.last_token_at = now
        row = flight.decode_row
        if row >= 0:
            self._count(flight, row, count, now)
            if flight.grows and row in flight.shares:
                flight.shares[row] += count
                self._cluster.promise(row, now, kv_used_tokens=count)

    def rebind(self, flight: InflightRequest, row: int, now: float) -> None:
        """Another member of a spread request's runs everything but attention from now on."""
        if flight.phase is RequestPhase.DECODE and flight.decode_row >= 0:
            for at, one in ((flight.decode_row, -1), (row, 1)):
                self._cluster.promise(at, now, batch=one)
                self._cluster.heavy[at] += one * flight.heavy
        flight.decode_row = row

    def move(self, flight: InflightRequest, row: int, now: float) -> None:
        """A request that decodes on one instance goes on at the one of a row."""
        before = flight.decode_row
        kv, context = flight.shares.pop(before), flight.context.pop(before, 0)
        for at, one in ((before, -1), (row, 1)):
            self._cluster.promise(
                at, now, batch=one, context_tokens=one * context, kv_used_tokens=one * kv
            )
            self._cluster.heavy[at] += one * flight.heavy
        flight.shares[row], flight.context[row] = kv, context
        self._leave(before)
        self._present[row] += 1
        flight.decode_row = row

    def prolong(self, flight: InflightRequest, until: float) -> None:
        """Extend a request's expiry to `until`, never shorten it."""
        flight.expires_at = max(flight.expires_at, until)

    def end(self, flight: InflightRequest, now: float) -> bool:
        """End a request (finished, cancelled, preempted or expired) and release its reservations.
        Returns False if it had ended before: idempotent."""
        if flight.phase is RequestPhase.ENDED:
            return False
        for row in flight.shares:
            self._leave(row)
        self._end_second(flight, now)
        if flight.phase is RequestPhase.PREFILL:
            self._leave_queue(flight, now, now)
            if flight.prefill_row not in flight.shares:
                self._leave(flight.prefill_row)
        elif flight.decode_row >= 0:
            self._cluster.promise(flight.decode_row, now, batch=-1)
            self._cluster.heavy[flight.decode_row] -= flight.heavy
        for row, tokens in flight.shares.items():
            self._cluster.promise(row, now, kv_used_tokens=-tokens)
        for row, tokens in flight.context.items():
            self._cluster.promise(row, now, context_tokens=-tokens)
        flight.phase = RequestPhase.ENDED
        del self._flights[flight.request.id]
        return True

    def expired(self, now: float, most: int = 1 << 30) -> list[InflightRequest]:
        """At most `most` requests past their expiry. They are still in flight: the caller must end
        them."""
        late: dict[str, InflightRequest] = {}  # an id that was used again has several heap entries
        while self._expiry and self._expiry[0][0] <= now and len(late) < most:
            _, request_id = heapq.heappop(self._expiry)
            flight = self._flights.get(request_id)
            if flight is None:
                continue
            if flight.expires_at > now:  # prolonged since
                heapq.heappush(self._expiry, (flight.expires_at, request_id))
            else:
                late[request_id] = flight
        return list(late.values())

    def requests_at(self, row: int) -> int:
        """How many requests are queued or running at the instance of a row."""
        return self._present[row]

    def forget_row(self, row: int) -> None:
        """Detach all requests from the row of a removed instance, so that ending them later
        subtracts nothing from the row's next instance."""
        self._dispatch.forget(row)
        self._present.pop(row, None)
        for flight in self._flights.values():
            flight.prefill_row = -1 if flight.prefill_row == row else flight.prefill_row
            flight.decode_row = -1 if flight.decode_row == row else flight.decode_row
            flight.shares.pop(row, None)
            flight.context.pop(row, None)
            if flight.second is not None and flight.second.row == row:
                flight.second = None

    def _leave(self, row: int) -> None:
        """Count one request fewer at a row; no effect if the row was forgotten."""
        if row in self._present:
            self._present[row] -= 1
            if not self._present[row]:
                del self._present[row]

    def _part(self, flight: InflightRequest, row: int, tokens: int) -> int:
        """A row's part of `tokens`, in proportion to its share of all `shares`."""
        total = sum(flight.shares.values())
        return tokens * flight.shares[row] // total if total else 0

    def _count(self, flight: InflightRequest, row: int, tokens: int, now: float) -> None:
        flight.context[row] = flight.context.get(row, 0) + tokens
        self._cluster.promise(row, now, context_tokens=tokens)

    def _begin_second(
        self, flight: InflightRequest, place: SecondPlace, now: float
    ) -> tuple[InflightRequest, ...]:
        """Take the second place of a race; without one if that queue is full."""
        request, row = flight.request, place.row
        waiter = Waiter(
            request.id + _SECOND, place.prefill_s, now, request.priority, request.tenant
        )
        pushed = self._dispatch.enter(row, waiter, now)
        if not pushed.accepted:
            flight.second = None
            return ()
        self._cluster.promise(row, now, queued=1, queued_tokens=place.prefill_tokens)
        self._present[row] += 1
        return self._preempted(pushed.preempted, now)

    def _end_second(self, flight: InflightRequest, now: float) -> None:
        """Give the second place of a race back, once: it has a winner, or is over."""
        place, flight.second = flight.second, None
        if place is not None:
            waiter_id = flight.request.id + _SECOND
            self._leave_place(place.row, waiter_id, place.prefill_tokens, now, now)
            self._leave(place.row)

    def _preempted(self, waiters: tuple[Waiter, ...], now: float) -> tuple[InflightRequest, ...]:
        """The requests that have lost their place; who has lost a second one keeps the first."""
        victims = []
        for waiter in waiters:
            flight = self._flights.get(request_of(waiter.request_id))
            if flight is not None and waiter.request_id.endswith(_SECOND):
                self._end_second(flight, now)
            elif flight is not None:
                victims.append(flight)
        return tuple(victims)

    def _leave_queue(self, flight: InflightRequest, now: float, ended_at: float) -> None:
        row, tokens = flight.prefill_row, flight.prefill_tokens
        if row >= 0:
            self._leave_place(row, flight.request.id, tokens, now, ended_at)

    def _leave_place(
        self, row: int, waiter_id: str, tokens: int, now: float, ended_at: float
    ) -> None:
        self._cluster.promise(row, now, queued=-1, queued_tokens=-tokens)
        self._dispatch.leave(row, waiter_id, now, ended_at)


def request_of(waiter_id: str) -> str:
    """The request that has a place, which may be the second one of a race."""
    return waiter_id.removesuffix(_SECOND)


def chosen_route(decision: Decision) -> HedgedRoute:
    """The decision's own route, which the alternative routes are raced against."""
    return HedgedRoute(decision.prefill, decision.decode)


def route_of(flight: InflightRequest, event: RequestEvent) -> HedgedRoute:
    """The route that an event is about."""
    return chosen_route(flight.decision) if event.route is None else HedgedRoute(*event.route)


def avoids(request: Request, decision: Decision) -> bool:
    """Whether a request's `exclude` names an instance of its decision."""
    if not request.exclude:
        return False
    shards = (name for name, _ in decision.shards)
    names = {decision.prefill, decision.decode, *chain(*decision.alternatives), *shards}
    return not names.isdisjoint(request.exclude)


def is_same_prompt(one: Request, other: Request) -> bool:
    """Whether repeated calls with one id are about one prompt: by its length, and by the keys in
    the spaces that both have, as engines with other keys may have come since."""
    if (one.model, one.prompt_tokens) != (other.model, other.prompt_tokens):
        return False
    ours, theirs = one.keys_by_space, other.keys_by_space
    return all(ours[space].blocks == theirs[space].blocks for space in ours.keys() & theirs.keys())
