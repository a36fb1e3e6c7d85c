"""What an event of an in-flight request changes: in which phase it is, what is booked for it, and
what is learnt from it. Pure."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from ..errors import InvalidRequest, UnknownRequest
from ..records import EVENT_KINDS, TOKENS_MAX
from ..state.part_keys import PART_TOKENS
from .inflight_requests import RequestPhase, chosen_route, route_of

if TYPE_CHECKING:
    from ..admission.hedging import HedgedRoute
    from ..records import RequestEvent
    from .conductor import Conductor
    from .inflight_requests import InflightRequest


class RequestEvents:
    """Takes the events of one conductor's requests. Not thread-safe."""

    def __init__(self, core: Conductor) -> None:
        self._core = core

    def take(self, event: RequestEvent, now: float) -> None:
        """See `Conductor.observe`; `tokens` are those since the last event."""
        core = self._core
        if event.kind not in EVENT_KINDS or event.tokens < 0 or event.tokens > TOKENS_MAX:
            raise InvalidRequest(
                f"event {event.kind!r} of {event.tokens} tokens: there are {', '.join(EVENT_KINDS)}"
            )
        flight = core.ledger.get(event.request_id)
        if flight is None:
            raise UnknownRequest(f"no request {event.request_id!r} is in flight")
        core.ledger.prolong(flight, now + core.settings.core.decision_ttl_s)
        at = now - event.age_s  # when it happened
        if event.found_tokens is not None and event.route in (None, chosen_route(flight.decision)):
            flight.found_tokens = event.found_tokens
        if event.kind == "prefill_began":
            core.ledger.prefill_began(flight, event.route, at)
        if event.kind in ("alive", "fetched", "prefill_began", "handed_over"):
            if event.route in (None, chosen_route(flight.decision)):
                self._moving(flight, event, now)
            return
        if event.kind in ("finished", "cancelled"):
            flight.answered_last(event.tokens, at)
            self._finish(flight, event.kind == "finished", now)
            return
        if event.kind == "tokens" and flight.phase is not RequestPhase.PREFILL:
            self._tokens(flight, event.tokens, at)  # most events of a request
            return
        route = route_of(flight, event)
        if event.kind in ("prefill_done", "first_token") and route == chosen_route(flight.decision):
            core.profiles.prefill_done(flight, event.kind, at)
        self._prefilled(flight, route, now, at)
        if event.kind == "prefill_done":
            return
        if event.kind == "first_token":
            self._first_token(flight, route, at)
        else:
            self._tokens(flight, event.tokens, at)

    def _moving(self, flight: InflightRequest, event: RequestEvent, now: float) -> None:
        """An event that only says what its blocks and its KV do."""
        core = self._core
        if event.kind == "fetched":
            core.bookings.fetched(event.request_id, now)
            core.dispatch.fetched(event.request_id, now)
        elif event.kind == "prefill_began":
            core.bookings.prefill_began(event.request_id, now)
            core.profiles.prefill_began(flight, event.tokens, now - event.age_s)
        elif event.kind == "handed_over":
            core.bookings.handed_over(event.request_id, now)
            core.profiles.handed_over(flight, now - event.age_s)

    def _prefilled(
        self, flight: InflightRequest, route: HedgedRoute, now: float, ended_at: float
    ) -> None:
        core = self._core
        if core.ledger.prefill_done(flight, now, ended_at):
            core.computing.end(flight.request.id)
            core.bookings.prefilled(flight.request.id, now)
            self._computed(flight, route, now)
            core.horizon.start(flight.request.id, now)
            core.shadow.prefill_done(flight.request.id, now)

    def _first_token(self, flight: InflightRequest, route: HedgedRoute, now: float) -> None:
        core = self._core
        if flight.first_token_at is not None:
            return
        if flight.request.first_token_from == "decode":
            core.bookings.handed_over(flight.request.id, now)
        flight.first_token_at = flight.last_token_at = now
        flight.answered_tokens = max(flight.answered_tokens, 1)
        core.shadow.first_token(flight.request.id, now)
        core.races.first_token(flight.request.id, route)
        core.margins.first_token(flight.request.id, now)

    def _tokens(self, flight: InflightRequest, count: int, now: float) -> None:
        core = self._core
        if count:  # they were decoded: its KV is there, since some time
            core.bookings.handed_over(flight.request.id, now, told=False)
        last = flight.last_token_at
        core.profiles.tokens(flight, count, now)
        core.ledger.tokens(flight, count, now)
        if last is not None:
            flight.gaps.add(now - last, count)

    def _finish(self, flight: InflightRequest, finished: bool, now: float) -> None:
        core = self._core
        tbt_s, tokens = flight.gaps.tbt_s(), flight.answered_tokens
        if finished:
            core.margins.ended(flight.request.id, flight.gaps)
            with contextlib.suppress(InvalidRequest):  # too many holders: end the request anyway
                self._prefilled(flight, chosen_route(flight.decision), now, now)
            core.shadow.finished(flight.request.id, tbt_s, now)
            if tokens:
                core.lengths.observe(flight.request, tokens)
                core.steering.answered(flight.request.model, tokens, now)
        core.log.ended(flight, "finished" if finished else "cancelled", now)
        core.end(flight, now, None)

    def _computed(self, flight: InflightRequest, route: HedgedRoute, now: float) -> None:
        """Enter the blocks of a finished prefill in the index as guesses, if its engine keeps them.
        For an instance that publishes its own block events, only blocks that it did not have before
        are guessed. This is not done when the request is scheduled: until the prefill is done no
        instance can fetch the blocks, and who is queued behind it finds it in `computing`."""
        core = self._core
        name, keys, parts = route.prefill, flight.request.keys, flight.request.part_keys
        if name != flight.decision.prefill:  # another route of a race was faster
            there = name in core.cluster and route in flight.decision.alternatives
        else:
            there = flight.prefill_row >= 0
            if core.holdings.speaks(name):
                keys = keys[flight.hbm_blocks :]
                parts = parts[flight.part_tokens // PART_TOKENS :]
        if flight.request.parts_after:
            parts = ()  # of a block whose own key is in `keys`, or of a tail, which ends elsewhere
        if there and core.cluster.spec(name).prefix_caching:
            core.holdings.routed(name, keys, now)
            if parts:
                core.parts.routed(name, parts, now)
