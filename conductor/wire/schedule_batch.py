"""Bodies of `POST /v1/schedules`: several prompts in one call, and where each runs."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from .models import Body, DecisionReply, ErrorDetail, Reply, ScheduleBody

# A gateway sends what has come while its last calls were under way: some tens, when it is busy.
SCHEDULES_MAX = 64


class SchedulesBody(Body, frozen=True, kw_only=True):
    """Prompts to be scheduled, in this order."""

    requests: Annotated[list[ScheduleBody], Meta(max_length=SCHEDULES_MAX)]


class ScheduleTexts(Body, frozen=True, kw_only=True):
    """As `SchedulesBody`, with prompts that are decoded one by one: a bad one spoils no other."""

    requests: Annotated[list[msgspec.Raw], Meta(max_length=SCHEDULES_MAX)]


class ScheduleOutcome(Reply, frozen=True, kw_only=True):
    """What `POST /v1/schedule` would have answered: a decision, or an error such as a
    rejection."""

    status: Annotated[int, Meta(description="The status that it would have got alone.")]
    decision: DecisionReply | None = None
    error: ErrorDetail | None = None


class SchedulesReply(Reply, frozen=True, kw_only=True):
    """What became of the prompts, in their order."""

    outcomes: list[ScheduleOutcome]
