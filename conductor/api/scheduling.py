"""Places prompts for the REST routes, one or several in a call."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import asdict

from ..errors import ConductorError
from ..records import Decision, Rejection
from ..web.hang_ups import HUNG_UP
from ..web.time_slices import TimeSlices
from ..wire import conversions
from ..wire.answers import Refusal, invalid_json, told
from ..wire.schedule_batch import ScheduleOutcome, SchedulesReply
from .prompt_decoding import ScheduleText, read_token_ids

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ..wire.models import DecisionReply
    from .conductor_service import Service

_text = msgspec.json.Decoder(ScheduleText)


async def place(
    service: Service, body: ScheduleText, trace: Mapping[str, str], gone: Callable[[], bool]
) -> DecisionReply | Rejection:
    """Decide where a prompt runs. `trace`: the headers of its W3C trace context, if the body does
    not have one. `gone` tells whether its client has hung up: then it may have cancelled the prompt
    while its tokens were read, in slices, and nobody would end what is decided now. Raises
    ConductorError, Refusal."""
    if body.trace is not None:
        trace = {name: value for name, value in asdict(body.trace).items() if value}
    with service.tracing.begin("schedule", trace) as span:
        tokens = await read_token_ids(body)
        if gone():
            raise Refusal(HUNG_UP, "hung_up", "the client has hung up")
        outcome = service.schedule(service.request_of(body, tokens))
        span.set(conversions.span_attributes(outcome))
    if not isinstance(outcome, Decision):
        return outcome
    hold = service.hold(outcome.request_id)
    if hold is not None and body.waiter:
        service.mailboxes.expect(outcome.request_id, body.waiter)
    return conversions.decision_reply(
        *(outcome, service.url, service.clock(), service.address, hold),
        service.fetch_within_s(outcome),
    )


async def place_all(
    service: Service,
    texts: Sequence[msgspec.Raw],
    trace: Mapping[str, str],
    gone: Callable[[], bool],
) -> SchedulesReply:
    """Place prompts in their order, each as if it came alone, in slices. `gone` as in `place`."""
    outcomes, turns = list[ScheduleOutcome](), TimeSlices()
    for text in texts:
        outcomes.append(await _outcome(service, text, trace, gone))
        await turns.give()
    return SchedulesReply(outcomes=outcomes)


async def _outcome(
    service: Service, text: msgspec.Raw, trace: Mapping[str, str], gone: Callable[[], bool]
) -> ScheduleOutcome:
    try:
        found = await place(service, _text.decode(text), trace, gone)
    except (msgspec.DecodeError, RecursionError) as error:
        return _without_place(invalid_json(error))
    except UnicodeDecodeError:
        return _without_place(Refusal(400, "invalid_json", "the prompt is not UTF-8"))
    except (ConductorError, Refusal) as error:
        return _without_place(error)
    if isinstance(found, Rejection):
        return _without_place(found)
    return ScheduleOutcome(status=200, decision=found)


def _without_place(why: ConductorError | Refusal | Rejection) -> ScheduleOutcome:
    status, error = told(why)
    return ScheduleOutcome(status=status, error=error)
