"""Takes events in batches: each for itself, in slices, so that no batch holds up a decision."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from ..errors import ConductorError, InvalidRequest, UnknownRequest
from ..records import EVENT_KINDS
from ..state.request_ids import name_of
from ..web.time_slices import TimeSlices
from ..wire import conversions
from ..wire.answers import Refusal, invalid_json, told
from ..wire.event_batch import EventFailure, EventItem, EventsReply

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..records import Rejection
    from ..wire.models import ErrorDetail, EventBody
    from .conductor_service import Service

_item = msgspec.json.Decoder(EventItem)


def _stays() -> bool:
    return False


async def observe_all(
    service: Service, texts: Sequence[msgspec.Raw], gone: Callable[[], bool] = _stays
) -> EventsReply:
    """Take events in their order. Those that can't be taken are listed in the answer. `gone`: a
    function that tells whether the client has hung up.

    Of a client that hung up while its batch waited for its turn nothing is taken: it sends what
    counts again, and a busy conductor that took both would fall behind further with each batch."""
    failed: list[EventFailure] = []
    waits = service.batch_turn.locked()
    async with service.batch_turn:  # or each of many batches would take a slice before a decision
        if waits and gone():
            return EventsReply(taken=0, failed=[])
        turns = TimeSlices()
        for at, text in enumerate(texts):
            failure = _observe(service, text)
            if failure is not None:
                status, error = failure
                failed.append(EventFailure(at=at, status=status, error=error))
            await turns.give()
    return EventsReply(taken=len(texts) - len(failed), failed=failed)


def _observe(service: Service, text: msgspec.Raw) -> tuple[int, ErrorDetail] | None:
    """Take an event; status and error if that fails. An exception that was returned would refer to
    the frame of its caller, and be garbage that only the collector finds."""
    try:
        item = _item.decode(text)
        rejection = observe(service, item.request_id, item.tenant, item.event, item)
    except (msgspec.DecodeError, RecursionError) as error:
        return told(invalid_json(error))
    except UnicodeDecodeError:
        return told(Refusal(400, "invalid_json", "the event is not UTF-8"))
    except ConductorError as error:
        return told(error)
    return None if rejection is None else told(rejection)


def observe(
    service: Service, request_id: str, tenant: str, kind: str, body: EventBody | EventItem
) -> Rejection | None:
    """Take one event. Returns a rejection if the request is rejected after its prefill. Raises
    ConductorError."""
    conversions.check_id(request_id, "request_id")
    if kind not in EVENT_KINDS:
        raise InvalidRequest(f"no event {kind[:64]!r}; there are {', '.join(EVENT_KINDS)}")
    try:
        return service.observe(conversions.to_event(name_of(tenant, request_id), kind, body))
    except UnknownRequest as error:
        if tenant:
            raise
        raise UnknownRequest(f"{error}; of a tenant's request say whose: ?tenant=...") from error
