"""The verbs of the conductor's clients, without the network: each encodes a request, and decodes
its answer.

`client.py` makes methods of them, blocking and in asyncio. Pure.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeAlias, TypeVar
from urllib.parse import quote, urlencode

import msgspec

from ..errors import ConductorUnavailable, InvalidRequest, UnknownRequest
from ..records import Rejection
from ..state.part_keys import PART_TOKENS
from ..wire.engine_models import EnginesReply
from ..wire.error_codes import REJECTED, error_of
from ..wire.event_batch import EventFailure, EventsReply
from ..wire.models import (
    DecisionReply,
    DecisionsReply,
    EntryReply,
    ErrorDetail,
    ErrorReply,
    HealthReply,
    InstanceReply,
    InstancesReply,
    MatchReply,
    NextReply,
    NextsReply,
    ReleaseReply,
    ReleasesReply,
)
from ..wire.pool_models import DrainReply, DrainsReply, HotPrefixReply, HotReply, PlansReply
from ..wire.schedule_batch import SchedulesReply

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from httpx_sse import ServerSentEvent

    from tiffin.kvstore import KVSchema
    from tiffin.kvstore.format.media import Media

    from ..errors import ConductorError
    from ..records import InstanceSpec, Load, Request, RequestEvent, Role
    from ..wire.schedule_batch import ScheduleOutcome

# What became of one event of several: None if it was taken.
EventResult: TypeAlias = "Rejection | ConductorError | None"

T = TypeVar("T")
R = TypeVar("R")

# How long a call waits for the release of a held request before it asks again: less than proxies
# leave a silent connection, and than a third of a request's time to live at the conductor.
WAIT_S = 20.0
# How long a conductor may take to ask an engine what it is: some questions, one after the other.
ASK_S = 30.0
# How long a batch of events may wait behind decisions and the batches of other clients. Nobody
# waits for it, and a batch that is given up and sent again costs the conductor its work twice.
BATCH_WAIT_S = 8.0

_encoder = msgspec.json.Encoder()
_error = msgspec.json.Decoder(ErrorReply)
_entry = msgspec.json.Decoder(EntryReply)


@dataclass(frozen=True, slots=True)
class RestCall(Generic[T]):
    """One HTTP request and the function that decodes its answer.

    `repeatable`: the client may retry the call when its answer was lost. `ends` returns the result
    if the conductor answers a retry with UnknownRequest, as it knows the request no longer. `at`:
    the URL of the conductor that is called, if it is not the client's own; one that has forgotten
    the request is no error. If it is gone the client's own is called, or with `only_there` none.
    `waits_s`: how long the conductor may wait before it answers, beside the client's timeout.
    """

    method: str
    path: str
    read: Callable[[int, bytes], T]
    body: bytes | None = None
    repeatable: bool = True
    ends: Callable[[], T] | None = None
    at: str = ""
    only_there: bool = False
    waits_s: float = 0.0

    def answered(self, status: int, body: bytes, *, again: bool) -> T:
        """Decode an answer; `again`: it is that of a retry. Raises ConductorError."""
        try:
            return self.read(status, body)
        except UnknownRequest:
            if (again or self.at) and self.ends is not None:
                return self.ends()
            raise


def schedule(
    request: Request,
    *,
    token_ids: Sequence[int] | None = None,
    namespace: str = "",
    cache_salt: str = "",
    media: Sequence[Media] = (),
    waiter: str = "",
    trace: Mapping[str, str] | None = None,
) -> RestCall[DecisionReply | Rejection]:
    """Place a request: a decision, or a rejection with its reason. With `token_ids` the client
    does not send the keys and the length in `request`, and the conductor computes them, in a
    `namespace`, with a `cache_salt`, and with the images, sounds and videos of `media`. `waiter`:
    who asks for its release, with others, by `releases`. `trace`: the headers of its W3C trace
    context."""
    return schedule_one(
        prompt(
            request,
            token_ids=token_ids,
            namespace=namespace,
            cache_salt=cache_salt,
            media=media,
            waiter=waiter,
            trace=trace,
        )
    )


def prompt(
    request: Request,
    *,
    token_ids: Sequence[int] | None = None,
    namespace: str = "",
    cache_salt: str = "",
    media: Sequence[Media] = (),
    waiter: str = "",
    trace: Mapping[str, str] | None = None,
) -> bytes:
    """The body that places a request, for `schedule_one` and `schedule_many`."""
    objectives = request.objectives
    body: dict[str, Any] = {
        "request_id": request.id,
        "model": request.model,
        "objectives": {"ttft_s": objectives.ttft_s, "tbt_s": objectives.tbt_s},
        "priority": request.priority,
        "tenant": request.tenant,
        "output_tokens": request.output_tokens,
        "output_tokens_max": request.output_tokens_max,
        "output_class": request.output_class,
        "urgent": request.urgent,
    }
    if request.exclude:
        body["exclude"] = list(request.exclude)
    if request.first_token_from != "prefill":
        body["first_token_from"] = request.first_token_from
    if waiter:
        body["waiter"] = waiter
    if trace:
        body["trace"] = dict(trace)
    if token_ids is not None:
        body |= {"token_ids": list(token_ids), "namespace": namespace}
        if cache_salt:  # which an older conductor does not take
            body["cache_salt"] = cache_salt
        if media:
            body["media"] = [one._asdict() for one in media]
    else:
        body["prompt_tokens"] = request.prompt_tokens
        if request.keys:
            body["block_keys"] = [key.hex() for key in request.keys]
        if request.part_keys:
            body["part_keys"] = [key.hex() for key in request.part_keys]
    return _encode(body)


def schedule_one(text: bytes) -> RestCall[DecisionReply | Rejection]:
    """Place the request of a body of `prompt`."""
    return RestCall("POST", "/v1/schedule", _placed, text)


def schedule_many(
    texts: Sequence[bytes],
) -> RestCall[list[DecisionReply | Rejection | ConductorError]]:
    """Place the requests of bodies of `prompt`, 1 to `SCHEDULES_MAX`. Returns for each, in their
    order, what `schedule_one` returns or raises."""

    def read(status: int, body: bytes) -> list[DecisionReply | Rejection | ConductorError]:
        found = [_outcome(one) for one in _schedules_reply(status, body).outcomes]
        if len(found) != len(texts):
            raise ConductorUnavailable(f"{len(found)} answers to {len(texts)} prompts")
        return found

    joined = b'{"requests":[' + b",".join(texts) + b"]}"
    return RestCall("POST", "/v1/schedules", read, joined)


def observe(event: RequestEvent) -> RestCall[Rejection | None]:
    """Report an event of an in-flight request, to the conductor that decided it if the event names
    one. Returns a rejection if the conductor rejects the request after its prefill, as admission in
    the mode "baseline" does. Raises UnknownRequest, but not for an event that names its conductor.
    """
    path = f"/v1/requests/{_segment(event.request_id)}/{_segment(event.kind)}{_of(event.tenant)}"
    body = _about(event)
    raw = _encode(body) if body else None
    # A cancellation goes to no other conductor, which may have made a new decision for the request.
    again, only_there = _idempotent(event), event.kind == "cancelled"
    return RestCall("POST", path, _heard, raw, again, lambda: None, event.conductor, only_there)


def observe_many(
    events: Sequence[RequestEvent], conductor: str = "", *, forgotten: bool = False
) -> RestCall[list[EventResult]]:
    """Report events of several requests, 1 to `EVENTS_MAX`, to the conductor at this URL ("": the
    client's own), and to no other one. Returns for each event, in their order: None, a rejection
    after its prefill, or the error of this event alone; an empty list if the conductor is gone.
    `forgotten`: UnknownRequest is no error."""
    items = [
        {"request_id": event.request_id, "event": event.kind}
        | ({"tenant": event.tenant} if event.tenant else {})
        | _about(event)
        for event in events
    ]
    repeatable = all(map(_idempotent, events))

    def read(status: int, body: bytes) -> list[EventResult]:
        found: list[EventResult] = [None] * len(events)
        for failed in _events_reply(status, body).failed:
            if failed.at < len(found):
                found[failed.at] = _result(failed, forgotten=forgotten)
        return found

    return RestCall(
        "POST", "/v1/events", read, _encode({"events": items}), repeatable,
        list, conductor, only_there=True, waits_s=BATCH_WAIT_S,
    )  # fmt: skip


def _about(event: RequestEvent) -> dict[str, Any]:
    """What an event says beside its kind."""
    body: dict[str, Any] = {"age_s": event.age_s} if event.age_s else {}
    if event.total_tokens is not None:
        body["total_tokens"] = event.total_tokens
    elif event.kind == "tokens" or event.tokens:
        body["tokens"] = event.tokens
    if event.found_tokens is not None:
        body["found_tokens"] = event.found_tokens
    if event.route is not None:
        body["route"] = {"prefill": event.route[0], "decode": event.route[1]}
    return body


def _idempotent(event: RequestEvent) -> bool:
    return event.kind != "tokens" or event.total_tokens is not None


def _result(failed: EventFailure, *, forgotten: bool) -> EventResult:
    error = failed.error
    if (rejection := _rejection_of(error)) is not None:
        return rejection
    problem = error_of(failed.status, error.code, error.message)
    return None if isinstance(problem, UnknownRequest) and forgotten else problem


def release(
    request_id: str, *, tenant: str = "", wait_s: float = WAIT_S, conductor: str = ""
) -> RestCall[ReleaseReply | Rejection]:
    """Wait up to `wait_s` for the release of a held request, at the `conductor` that decided it.
    Returns a rejection if the request was preempted. Raises UnknownRequest."""
    asked: dict[str, str] = {"wait_s": f"{wait_s:g}"}
    if tenant:
        asked["tenant"] = tenant
    path = f"/v1/requests/{_segment(request_id)}/release?{_query(asked)}"
    return RestCall(
        "GET", path, _released, at=conductor, only_there=bool(conductor), waits_s=wait_s
    )


class Released(NamedTuple):
    """A request that is held no more: its release, or its rejection."""

    tenant: str
    request_id: str
    outcome: ReleaseReply | Rejection


def releases(
    waiter: str, *, wait_s: float = WAIT_S, conductor: str = ""
) -> RestCall[list[Released]]:
    """Wait up to `wait_s` for the release of any request that was scheduled with this `waiter`, at
    the `conductor` that decided it. Returns all that were released since the last call; of a call
    without an answer they are lost, so it is not repeated."""
    path = f"/v1/releases/{_segment(waiter)}?{_query({'wait_s': f'{wait_s:g}'})}"

    def read(status: int, body: bytes) -> list[Released]:
        found = []
        for one in _releases_reply(status, body).releases:
            outcome = one.release or (_rejection_of(one.error) if one.error else None)
            if outcome is not None:
                found.append(Released(one.tenant, one.request_id, outcome))
        return found

    return RestCall(
        "POST", path, read, b"", repeatable=False, at=conductor, only_there=bool(conductor),
        waits_s=wait_s,
    )  # fmt: skip


def next_prefills(instance: str, n: int = 1, *, idle: bool = True) -> RestCall[list[NextReply]]:
    """The next `n` requests that an instance computes, for an engine that asks. `idle`: it has
    computed all that it was given before. Each is given once, so the call is not retried."""
    read = _reader(NextsReply)
    body = _encode({"n": n, "idle": idle})
    return RestCall(
        "POST",
        f"{_instance(instance)}/next",
        lambda status, raw: read(status, raw).requests,
        body,
        repeatable=False,
    )


def register(
    spec: InstanceSpec, load: Load | None = None, schema: KVSchema | None = None
) -> RestCall[None]:
    """Register an instance, or repeat its registration, best with every heartbeat. With `schema`,
    clients can send prompts of its model as token ids."""
    body = asdict(spec)
    path = _instance(body.pop("id"))
    if spec.part_tokens == PART_TOKENS:
        del body["part_tokens"]  # which an older conductor does not take
    if load is not None:
        body["load"] = asdict(load)
    if schema is not None:
        body["schema"] = {"canonical": schema.canonical_bytes().decode("ascii")}
    return RestCall("PUT", path, _nothing, _encode(body))


def heartbeat(instance: str, load: Load) -> RestCall[None]:
    """Report that an instance is alive, and its load. Raises UnknownInstance: then register."""
    return RestCall("PUT", _instance(instance), _nothing, _encode({"load": asdict(load)}))


def drain(instance: str) -> RestCall[None]:
    """Drain an instance: it gets no new work."""
    return RestCall("DELETE", _instance(instance), _nothing)


def remove(instance: str) -> RestCall[None]:
    """Remove an instance at once."""
    return RestCall("DELETE", f"{_instance(instance)}?now=true", _nothing)


def flip(instance: str, role: Role) -> RestCall[None]:
    """Start to change an instance's role. Raises UnknownInstance, Conflict."""
    return RestCall("POST", f"{_instance(instance)}/role", _nothing, _encode({"role": role}))


def instances() -> RestCall[list[InstanceReply]]:
    """All registered instances."""
    read = _reader(InstancesReply)
    return RestCall("GET", "/v1/instances", lambda status, body: read(status, body).instances)


def instance(name: str) -> RestCall[InstanceReply]:
    """One registered instance. Raises UnknownInstance."""
    return RestCall("GET", _instance(name), _reader(InstanceReply))


def match(
    keys: Sequence[bytes], *, part_keys: Sequence[bytes] = (), limit: int = 100
) -> RestCall[MatchReply]:
    """The holders of a prefix, and how many of its blocks, or of its first tokens, each has; at
    most `limit` holders."""
    body = {"block_keys": [key.hex() for key in keys]}
    if part_keys:
        body["part_keys"] = [key.hex() for key in part_keys]
    path = f"/v1/blocks/match?limit={limit:d}"
    return RestCall("POST", path, _reader(MatchReply), _encode(body))


def hot(limit: int = 100) -> RestCall[list[HotPrefixReply]]:
    """The most popular prefixes."""
    read = _reader(HotReply)
    path = f"/v1/blocks/hot?limit={limit:d}"
    return RestCall("GET", path, lambda status, body: read(status, body).prefixes)


def decisions(
    limit: int = 100, *, candidates: int = 0, instance: str | None = None
) -> RestCall[list[EntryReply]]:
    """The latest entries of the decision log."""
    read = _reader(DecisionsReply)
    asked: dict[str, int | str] = {"limit": limit, "candidates": candidates}
    if instance is not None:
        asked["instance"] = instance
    path = f"/v1/decisions?{urlencode(asked)}"
    return RestCall("GET", path, lambda status, body: read(status, body).decisions)


def why(request_id: str, *, tenant: str = "") -> RestCall[EntryReply]:
    """The decision about a request, with all candidates and every term of their costs; without a
    tenant, about the latest request with this id. Raises UnknownRequest."""
    path = f"/v1/decisions/{_segment(request_id)}/why{_of(tenant)}"
    return RestCall("GET", path, _reader(EntryReply))


def plans() -> RestCall[PlansReply]:
    """The conductor's fleet plans with their reasons, and whether this conductor leads."""
    return RestCall("GET", "/v1/plans", _reader(PlansReply))


def drains() -> RestCall[list[DrainReply]]:
    """The drains of nodes and instances, in progress and ended."""
    read = _reader(DrainsReply)
    return RestCall("GET", "/v1/drains", lambda status, body: read(status, body).drains)


def drain_node(node: str, deadline_s: float | None = None) -> RestCall[DrainReply]:
    """Drain a kvstore node; `drains` shows the progress. Raises UnknownNode, and Conflict while an
    order to take new blocks again is on its way to the node."""
    body = None if deadline_s is None else _encode({"deadline_s": deadline_s})
    return RestCall("PUT", _drain(node), _reader(DrainReply), body)


def undrain_node(node: str) -> RestCall[DrainReply]:
    """Let a node take new blocks again. Raises UnknownNode."""
    return RestCall("DELETE", _drain(node), _reader(DrainReply))


def settings() -> RestCall[dict[str, Any]]:
    """All settings."""
    return RestCall("GET", "/v1/policy", _reader(dict[str, Any]))


def add_engine(url: str, **options: Any) -> RestCall[InstanceReply]:
    """Let the conductor ask an engine what it is, register it, and ask it for its load from then
    on. `options`: the fields of `EngineOptions`. Raises InvalidRequest, which names the option, for
    what the engine does not tell, and ConductorUnavailable if it does not answer."""
    read = _reader(InstanceReply)
    return RestCall("POST", "/v1/engines", read, _encode({"url": url, **options}), waits_s=ASK_S)


def engines() -> RestCall[EnginesReply]:
    """The engines that the conductor asks."""
    return RestCall("GET", "/v1/engines", _reader(EnginesReply))


def patch(changes: dict[str, Any]) -> RestCall[dict[str, Any]]:
    """Change some settings, and return all. Raises InvalidRequest; then none has changed."""
    return RestCall("PATCH", "/v1/policy", _reader(dict[str, Any]), _encode(changes))


def ready() -> RestCall[HealthReply]:
    """Whether the conductor is ready to schedule requests, and if not, why."""
    # "Not ready" (503) is a valid answer, too.
    read = msgspec.json.Decoder(HealthReply)

    def health(status: int, body: bytes) -> HealthReply:
        if status in (200, 503):
            with contextlib.suppress(msgspec.DecodeError):
                return read.decode(body)
        raise failure(status, body)

    return RestCall("GET", "/readyz", health)


def following(candidates: int) -> str:
    """The path of the decision stream."""
    return f"/v1/decisions/stream?candidates={candidates:d}"


def entry_of(event: ServerSentEvent) -> EntryReply | None:
    """The entry that an event of the stream has, if any. Raises ConductorUnavailable for a
    malformed event."""
    if event.event != "decision":
        return None
    try:
        return _entry.decode(event.data)
    except msgspec.DecodeError as error:
        raise ConductorUnavailable(f"this is no stream of decisions: {error}") from error


def failure(status: int, body: bytes) -> ConductorError:
    """The error for an answer that is no success."""
    try:
        detail = _error.decode(body).error
    except msgspec.DecodeError:  # perhaps the answer of a proxy
        return error_of(status, "", f"the answer was {status}, and not a conductor's")
    return error_of(status, detail.code, detail.message)


def _reader(kind: type[R]) -> Callable[[int, bytes], R]:
    decoder = msgspec.json.Decoder(kind)

    def read(status: int, body: bytes) -> R:
        if status != 200:
            raise failure(status, body)
        try:
            return decoder.decode(body)
        except msgspec.DecodeError as error:
            raise ConductorUnavailable(f"this is no answer of a conductor: {error}") from error

    return read


_events_reply = _reader(EventsReply)


_read_decision = _reader(DecisionReply)


_schedules_reply = _reader(SchedulesReply)


def _outcome(one: ScheduleOutcome) -> DecisionReply | Rejection | ConductorError:
    if one.decision is not None:
        return one.decision
    if one.error is None:
        return ConductorUnavailable("this is no answer of a conductor: a prompt has no outcome")
    rejection = _rejection_of(one.error)
    return rejection or error_of(one.status, one.error.code, one.error.message)


def _placed(status: int, body: bytes) -> DecisionReply | Rejection:
    if status in (429, 503):
        rejection = _rejection(body)
        if rejection is not None:
            return rejection
    return _read_decision(status, body)


_read_release = _reader(ReleaseReply)
_releases_reply = _reader(ReleasesReply)


def _released(status: int, body: bytes) -> ReleaseReply | Rejection:
    rejection = _rejection(body) if status == 429 else None
    return rejection or _read_release(status, body)


def _heard(status: int, body: bytes) -> Rejection | None:
    rejection = _rejection(body) if status == 429 else None
    if rejection is None:
        _nothing(status, body)
    return rejection


def _rejection(body: bytes) -> Rejection | None:
    """Decode a rejection; None for another error of the same status."""
    try:
        return _rejection_of(_error.decode(body).error)
    except msgspec.DecodeError:
        return None


def _rejection_of(detail: ErrorDetail) -> Rejection | None:
    told = detail.tiffin
    if not detail.code.startswith(REJECTED) or told is None:
        return None
    return Rejection(
        told.request_id,
        told.reason,
        detail.message,
        told.predicted_ttft_s,
        told.predicted_tbt_s,
        told.retry_after_s,
        {name: math.inf if value is None else value for name, value in told.terms.items()},
    )


def _nothing(status: int, body: bytes) -> None:
    if status != 204:
        raise failure(status, body)


def _instance(instance: str) -> str:
    return f"/v1/instances/{_segment(instance)}"


def _drain(node: str) -> str:
    return f"/v1/nodes/{_segment(node)}/drain"


def _of(tenant: str) -> str:
    """The query string with a request's tenant. Raises InvalidRequest."""
    return f"?tenant={_quoted(tenant, 'a tenant')}" if tenant else ""


def _query(asked: Mapping[str, str]) -> str:
    """A query string. Raises InvalidRequest."""
    return "&".join(f"{name}={_quoted(value, name)}" for name, value in asked.items())


def _segment(text: str) -> str:
    """Quote an id as a segment of a path. Raises InvalidRequest for text that would change the
    path."""
    if text in ("", ".", "..") or "/" in text:
        raise InvalidRequest(
            f"{text!r} can't be an id: it is 1 to 256 characters without a slash, not '.' or '..'"
        )
    return _quoted(text, "an id")


def _quoted(text: str, what: str) -> str:
    try:
        return quote(text, safe="")
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{what} is text that encodes as UTF-8: {error.reason}") from error


def _encode(body: Any) -> bytes:
    try:
        return _encoder.encode(body)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidRequest(f"this can't be sent as JSON: {error}") from error
