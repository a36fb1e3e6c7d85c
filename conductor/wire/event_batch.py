"""Bodies of `POST /v1/events`: events of many requests in one call, and what became of each."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from ..records import EVENT_KINDS
from .models import Body, ErrorDetail, EventBody, Id, Name, Reply

# A gateway with a thousand streams at 25 ms per token tells of 130 of them in 50 ms.
EVENTS_MAX = 1024


class EventItem(EventBody, frozen=True, kw_only=True):
    """One event: as that of `POST /v1/requests/{request_id}/{event}`."""

    request_id: Id
    event: Annotated[
        str, Meta(description="What happened.", extra_json_schema={"enum": list(EVENT_KINDS)})
    ]
    tenant: Annotated[Name, Meta(description="The tenant that it was scheduled with, if any.")] = ""


class EventsBody(Body, frozen=True, kw_only=True):
    """Events in the order in which they happened, of any number of requests."""

    events: Annotated[list[EventItem], Meta(max_length=EVENTS_MAX)]


class EventTexts(Body, frozen=True, kw_only=True):
    """As `EventsBody`, with events that are decoded one by one: a bad one spoils no other."""

    events: Annotated[list[msgspec.Raw], Meta(max_length=EVENTS_MAX)]


class EventFailure(Reply, frozen=True, kw_only=True):
    """An event that was not taken, or after which the request was rejected."""

    at: Annotated[int, Meta(description="Its place in the list, from 0.")]
    status: Annotated[int, Meta(description="The status that it would have got alone.")]
    error: ErrorDetail


class EventsReply(Reply, frozen=True, kw_only=True):
    """What became of the events: those that `failed` does not list were taken."""

    taken: int
    failed: list[EventFailure]
