"""The REST routes: what each one reads, calls and answers.

Handlers raise ConductorError and Refusal; `rest_route.py` makes answers of them.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from fastapi import Query, Request
from starlette.responses import Response, StreamingResponse

from ..core.settings import Settings
from ..errors import InvalidRequest, UnknownRequest
from ..records import Decision, PromptKeys, Rejection, Role
from ..state.request_ids import name_of
from ..web.auth import Right
from ..web.hang_ups import has_hung_up
from ..web.metrics import CONTENT_TYPE
from ..web.time_slices import TimeSlices
from ..wire import conversions, event_batch, models, pool_models, schedule_batch
from ..wire.answers import JSON, Refusal, answer, answer_all, ready, rejected
from ..wire.block_keys import media_of, parse_keys
from ..wire.decision_text import Shown
from . import engine_routes, queue_routes
from .decision_stream import events as stream_events
from .event_batches import observe, observe_all
from .parameters import Candidates, EventKind, InstanceId, NodeName, RequestId, Tenant  # noqa: TC001
from .prompt_decoding import MatchText, ScheduleText, read_token_ids
from .rest_route import (
    HotRoute,
    RestRoute,
    body_of,
    door_of,
    rest,
    router_of,
    service_of,
)
from .scheduling import place, place_all

if TYPE_CHECKING:
    from starlette.routing import BaseRoute

_encoder = msgspec.json.Encoder()

# Of a decision in the log; `why` has all, of sixteen thousand instances at most.
_ALL = 1 << 30

_NO_INSTANCE = {404: "No such instance is registered."}
_NO_NODE = {404: "No such node is in the pool, or the conductor follows none (`--directory`)."}


_hot, _api = router_of(HotRoute), router_of(RestRoute)


def rest_routes() -> list[BaseRoute]:
    """All REST routes, which every application shares."""
    return [
        *_hot.routes,
        *queue_routes.hot.routes,
        *engine_routes.api.routes,
        *_api.routes,
    ]


# -- requests --------------------------------------------------------------------------------------


@_hot.post(
    "/v1/schedule",
    **rest(
        "requests",
        Right.SCHEDULE,
        models.DecisionReply,
        {
            404: "No instance has registered this model.",
            409: "Another prompt of this tenant is in flight under this id.",
            429: "Rejected for load: what was predicted, and when to come back (Retry-After).",
            503: "Nothing that could serve it is ready, or too much is being received.",
        },
        body=models.ScheduleBody,
    ),
)
async def schedule(http: Request) -> Response:
    """Decide where a request runs.

    Asking again with the same `request_id` and `tenant` gives the same decision while the
    request is in flight, so a call whose answer was lost can be repeated; if an instance of it
    has gone or is in `exclude`, it is decided anew. Another conductor decides anew, too. Ask
    with token ids, with block keys, or with a length alone.

    **Held requests.** With `held` in the answer it is not the request's turn yet: send it to its
    instance after its release, for which `GET /v1/requests/{request_id}/release` waits. Sent
    earlier, it is computed in the order in which the engine gets it, and the promises of classes,
    tenants and order are void.

    **Rejections.** 429 is for load: come back after `Retry-After` (whole seconds, from the
    prediction), or ask another conductor. 503 is for nothing that could serve it. Both carry
    `x-tiffin-reject-reason`, and in `error.tiffin` the `reason`, what was predicted and every term:

    | reason | status | |
    |---|---|---|
    | `ttft`, `tbt` | 429 | an objective would be missed |
    | `kv_room` | 429 | no decode instance has room for the context and a place in its batch |
    | `queue_full` | 429 | as many wait as may |
    | `preempted` | 429 | it waited, and had to leave for one of a higher class |
    | `no_prefill`, `no_decode` | 503 | no instance with this role is ready |
    """
    body = await body_of(http, ScheduleText)
    gone = partial(has_hung_up, http.scope)
    outcome = await place(service_of(http), body, http.headers, gone)
    return rejected(outcome) if isinstance(outcome, Rejection) else answer(outcome)


@_hot.post(
    "/v1/schedules",
    **rest(
        "requests",
        Right.SCHEDULE,
        schedule_batch.SchedulesReply,
        body=schedule_batch.SchedulesBody,
    ),
)
async def schedules(http: Request) -> Response:
    """Decide where several requests run, one after the other, in one call: as many calls of
    `/v1/schedule`. What one of them would have answered is an outcome here, and harms no other.

    A busy client that sends together what has come during its last call takes half as much of the
    conductor's time for each."""
    body = await body_of(http, schedule_batch.ScheduleTexts)
    gone = partial(has_hung_up, http.scope)
    return answer(await place_all(service_of(http), body.requests, http.headers, gone))


@_hot.post(
    "/v1/requests/{request_id}/{event}",
    **rest(
        "requests",
        Right.SCHEDULE,
        errors={
            404: "No such request of this tenant is in flight.",
            429: "Rejected after its prefill, which admission in the mode baseline does.",
        },
        body=models.EventBody,
        optional=True,
    ),
)
async def event(
    http: Request, request_id: RequestId, event: EventKind, tenant: Tenant = ""
) -> Response:
    """Say what became of a request: it keeps its place, moves on, or gives it back. Of several
    conductors, say it to the one that decided: its address is `conductor` of the decision.

    Name the `tenant` that it was scheduled with: ids belong to a tenant.
    `tokens` takes a body with how many more have been answered; `prefill_began`, `prefill_done`,
    `handed_over` and `first_token` of a race take one with the route. `prefill_began` says that
    the engine starts to compute the prompt, `handed_over` that all of its KV is where it is
    decoded; who does not know these leaves them out, and they are estimated. A request that was
    not heard of for as long as its decision said is taken for lost, and is not known any more: say
    `alive` of one of which there is nothing else to be said, such as one that waits for its first
    token.
    """
    body = await body_of(http, models.EventBody, optional=True)
    rejection = observe(service_of(http), request_id, tenant, event, body)
    return _done() if rejection is None else rejected(rejection)


@_hot.post(
    "/v1/events",
    **rest("requests", Right.SCHEDULE, event_batch.EventsReply, body=event_batch.EventsBody),
)
async def events(http: Request) -> Response:
    """Say what became of several requests in one call, in the order in which it happened: as many
    calls with one event each. An event that can't be taken, or after which its request is rejected,
    is listed in `failed`, and the others are taken. Of several conductors, send it those events
    whose requests it decided.

    A client that sends what happened every 50 ms, with `total_tokens`, costs the conductor a
    tenth of a call for each event, and may repeat a call whose answer was lost."""
    body = await body_of(http, event_batch.EventTexts)
    gone = partial(has_hung_up, http.scope)
    return answer(await observe_all(service_of(http), body.events, gone))


# -- instances -------------------------------------------------------------------------------------


@_api.get("/v1/instances", **rest("instances", Right.READ, models.InstancesReply))
async def instances(http: Request) -> Response:
    """All instances: what they registered with, status, load."""
    service, turns = service_of(http), TimeSlices()
    core, texts = service.core, list[bytes]()
    for name in core.cluster.names:
        if name in core.cluster:  # still
            view = core.instance(name, service.clock())
            texts.append(_encoder.encode(conversions.instance_reply(view, service.models)))
        await turns.give()
    return answer_all("instances", texts)


@_api.get(
    "/v1/instances/{instance}", **rest("instances", Right.READ, models.InstanceReply, _NO_INSTANCE)
)
async def instance(http: Request, instance: InstanceId) -> Response:
    """One instance."""
    service = service_of(http)
    view = service.core.instance(instance, service.clock())
    return answer(conversions.instance_reply(view, service.models))


@_hot.put(
    "/v1/instances/{instance}",
    **rest(
        "instances",
        Right.OPERATE,
        errors={**_NO_INSTANCE, 409: "Another instance keys this model differently."},
        body=models.InstanceBody,
        own=True,
    ),
)
async def announce(http: Request, instance: InstanceId) -> Response:
    """Register an instance, or say that it is still there and how busy it is.

    Send everything each time: then a conductor that was restarted knows the instance again
    after its next heartbeat. A body with `load` alone is a heartbeat; it answers 404 for an
    instance that is not registered. A heartbeat does not end a drain, but a changed
    registration does. Its url, and the labels `role_url`, `orders_url`, `kv_events` and
    `kv_events_replay`, are at hosts of the setting `instances.allowed_hosts`.
    """
    conversions.check_id(instance, "an instance's id")
    service = service_of(http)
    body = await body_of(http, models.InstanceBody)
    spec = None if conversions.is_heartbeat(body) else conversions.to_spec(instance, body)
    if spec is not None and body.schema is not None:
        service.learn_schema(spec, body.schema.canonical)
    load = conversions.to_load(body.load) if body.load is not None else None
    service.announce(spec, instance, load)
    if service.engines is not None:
        service.engines.heard(instance, service.url(instance))
    return _done()


@_api.delete(
    "/v1/instances/{instance}", **rest("instances", Right.OPERATE, errors=_NO_INSTANCE, own=True)
)
async def leave(
    http: Request,
    instance: InstanceId,
    now: Annotated[bool, Query(description="Remove it instead of draining it.")] = False,
) -> Response:
    """Drain an instance: it gets no new work, and finishes what it has. With `?now=true` it is
    removed at once, whatever runs; requests that are asked about again are decided anew."""
    service = service_of(http)
    if now:
        service.remove(instance)
        if service.engines is not None:
            service.engines.removed(instance)
    else:
        service.core.drain(instance, service.clock())
    return _done()


@_api.post(
    "/v1/instances/{instance}/role",
    **rest(
        "instances",
        Right.OPERATE,
        errors={
            **_NO_INSTANCE,
            409: "Too few would be left in its role, or another one is flipped.",
        },
        body=models.RoleBody,
    ),
)
async def flip(http: Request, instance: InstanceId) -> Response:
    """Begin to change what an instance does: it gets no new work, finishes what it has or hands it
    over, saves its blocks, is told its role (where its label `role_url` says) and asked to show it,
    and then gets work again.
    Refused if too few would be left in its role. `GET /v1/plans` shows where it is."""
    body = await body_of(http, models.RoleBody)
    service_of(http).flip(instance, Role(body.role))
    return _done()


# -- blocks ----------------------------------------------------------------------------------------


@_api.post(
    "/v1/blocks/match", **rest("blocks", Right.READ, models.MatchReply, body=models.MatchBody)
)
async def match(
    http: Request,
    limit: Annotated[
        int, Query(ge=0, le=models.MATCH_HOLDERS_MAX, description="Holders to show.")
    ] = 100,
) -> Response:
    """Who holds how much of a prefix, the longest part first; `limit` of them."""
    service = service_of(http)
    body = await body_of(http, MatchText)
    tokens = await read_token_ids(body)
    if (body.block_keys is None) == (tokens is None):
        raise InvalidRequest("send block_keys, or token_ids with a model")
    if body.block_keys is not None:
        parts = parse_keys(body.part_keys, "part_keys")
        spaces: tuple[PromptKeys, ...] = (PromptKeys(parse_keys(body.block_keys), parts),)
    elif body.model is None or body.part_keys:
        raise InvalidRequest("token_ids need a model, whose keys they have, and no part_keys")
    else:
        assert tokens is not None
        media = media_of(body.media, len(tokens))
        spaces = service.models.keys(body.model, tokens, body.namespace, media=media)
    views = [service.core.match(one.blocks, service.clock(), one.parts) for one in spaces]
    holders = [one for view in views for one in view.holders]
    holders.sort(key=lambda one: (-one.blocks, -one.part_tokens))
    reply = models.MatchReply(
        asked_blocks=max(len(one.blocks) for one in spaces),
        blocks=max(view.blocks for view in views),
        holders=[models.HolderReply(**one._asdict()) for one in holders[:limit]],
    )
    return answer(reply)


@_api.get("/v1/blocks/hot", **rest("blocks", Right.READ, pool_models.HotReply))
async def hot(
    http: Request,
    limit: Annotated[int, Query(ge=0, le=models.HOT_MAX, description="Prefixes to show.")] = 100,
) -> Response:
    """The most popular prefixes; `limit` of them."""
    service, turns, texts = service_of(http), TimeSlices(), list[bytes]()
    for prefix in await turns.finish(service.core.finding_hot(limit, service.clock())):
        texts.append(_encoder.encode(conversions.hot_reply(prefix)))
        await turns.give()
    return answer_all("prefixes", texts)


# -- decisions -------------------------------------------------------------------------------------


@_api.get("/v1/decisions", **rest("decisions", Right.READ, models.DecisionsReply))
async def decisions(
    http: Request,
    limit: Annotated[
        int, Query(ge=0, le=models.DECISIONS_MAX, description="Entries to show.")
    ] = 100,
    candidates: Candidates = 0,
    instance: Annotated[str | None, Query(description="Only what runs there.")] = None,
    outcome: Annotated[
        Literal["decision", "rejection"] | None, Query(description="Only these.")
    ] = None,
    kept: Annotated[
        str | None,
        Query(
            max_length=64,
            description="Of what is kept for longer: `missed`, `mispredicted`, `lost`, `asked`, or "
            "a rejection's reason.",
        ),
    ] = None,
) -> Response:
    """The latest decisions and rejections, `limit` of them, each with `candidates` of its
    candidates, and with what became of the request. `instance` and `outcome` choose among the
    latest.

    The log of the latest has some seconds of a busy fleet. Kept for longer, and chosen by `kept`,
    are requests that `missed` an objective, were `mispredicted` (by a factor of two), were `lost`
    (nothing more was heard of them) or `asked` about, and rejections by their reason: 500 of each,
    which are a sample of the last hour if there were more."""
    service = service_of(http)
    everything = instance is None and outcome is None
    most = limit if everything else models.DECISIONS_MAX
    core = service.core
    entries = core.decisions(most) if kept is None else core.log.kept(kept, most)
    chosen = [one for one in entries if _wanted(one, instance, outcome)][:limit]
    turns, texts = TimeSlices(), list[bytes]()
    for entry in chosen:
        texts.append(Shown(entry, service.unix_s, core.log.became(entry)).text(candidates))
        await turns.give()
    return answer_all("decisions", texts)


@_api.get(
    "/v1/decisions/stream",
    **rest(
        "decisions",
        Right.READ,
        str,
        {503: "Too many follow the decisions."},
        media="text/event-stream",
    ),
)
async def stream(http: Request, candidates: Candidates = 0) -> Response:
    """Decisions as they are made, as server-sent events: `decision` with an entry of the log,
    `missed` with how many a slow reader did not get."""
    broadcast = service_of(http).broadcast
    if broadcast.full:
        raise Refusal(503, "too_many_streams", "too many follow the decisions", retry_after_s=10.0)
    return StreamingResponse(
        stream_events(broadcast, candidates),
        media_type="text/event-stream",
        headers={"cache-control": "no-store", "x-accel-buffering": "no"},
    )


@_api.get(
    "/v1/decisions/{request_id}/why",
    **rest(
        "decisions", Right.READ, models.EntryReply, {404: "Not in the log, which keeps the latest."}
    ),
)
async def why(http: Request, request_id: RequestId, tenant: Tenant = "") -> Response:
    """Why a request runs where it runs, or was rejected: all candidates that are kept with every
    term of their cost, how many were left out and why, and what became of the request beside what
    was predicted. Without `tenant`, of the latest request with this id, whoever's it is. Who is
    asked about is kept in the log for longer."""
    service = service_of(http)
    entry = service.core.log.asked(name_of(tenant, request_id), service.clock())
    if entry is None:
        raise UnknownRequest(f"no decision about {request_id!r} is in the log: it keeps the latest")
    text = Shown(entry, service.unix_s, service.core.log.became(entry)).text(_ALL)
    return Response(text, media_type=JSON)


# -- the pool as a whole ---------------------------------------------------------------------------


@_api.get("/v1/plans", **rest("pool", Right.READ, pool_models.PlansReply))
async def plans(http: Request) -> Response:
    """What this conductor would do about the instances of each model, with every number behind
    it, and the flips that it carries out. Each conductor plans; the one that leads orders."""
    service = service_of(http)
    steering, now, unix_s = service.core.steering, service.clock(), service.unix_s
    return answer(
        pool_models.PlansReply(
            leads=steering.leads(now),
            leader=steering.lease.leader(now) if steering.lease is not None else "",
            plans=[conversions.plan_reply(*one, unix_s) for one in steering.plans().items()],
            flips=[conversions.flip_reply(flip, unix_s) for flip in steering.flips()],
        )
    )


@_api.get("/v1/drains", **rest("pool", Right.READ, pool_models.DrainsReply))
async def drains(http: Request) -> Response:
    """Nodes and instances that are emptied, and those that were: how far, and what is lost if
    one stops now. Of several conductors each shows those that it was asked for."""
    service = service_of(http)
    found = service.core.steering.drains(service.clock())
    return answer(
        pool_models.DrainsReply(drains=[conversions.drain_reply(progress) for progress in found])
    )


@_api.put(
    "/v1/nodes/{node}/drain",
    **rest(
        "pool",
        Right.OPERATE,
        pool_models.DrainReply,
        {**_NO_NODE, 409: "It is just being told to take new blocks again."},
        body=pool_models.DrainBody,
        optional=True,
    ),
)
async def drain_node(http: Request, node: NodeName) -> Response:
    """Empty a kvstore node before it stops: it takes nothing new, its hot blocks that no other
    node has are copied away first, and then it hands over the rest. It goes on serving what it
    has. The answer, and `GET /v1/drains` of this conductor, show how far it is; asked again
    meanwhile, it goes on as before. Instances on its host are drained by themselves."""
    body = await body_of(http, pool_models.DrainBody, optional=True)
    service = service_of(http)
    steering, now = service.core.steering, service.clock()
    steering.drain_node(node, now, body.deadline_s)
    return answer(conversions.drain_reply(steering.node_drain(node, now)))


@_api.delete(
    "/v1/nodes/{node}/drain", **rest("pool", Right.OPERATE, pool_models.DrainReply, _NO_NODE)
)
async def undrain_node(http: Request, node: NodeName) -> Response:
    """Let a node take new blocks again: its drain is cancelled, or undone if it has ended.
    Copies stay where they are. Any conductor can be asked; one that empties the node just now
    sees that it is open, and stops."""
    service = service_of(http)
    steering, now = service.core.steering, service.clock()
    steering.undrain_node(node, now)
    return answer(conversions.drain_reply(steering.node_drain(node, now)))


# -- settings, health ------------------------------------------------------------------------------


@_api.get("/v1/policy", **rest("settings", Right.READ, Settings))
async def settings(http: Request) -> Response:
    """All settings as they are."""
    return answer(service_of(http).core.settings)


@_api.patch("/v1/policy", **rest("settings", Right.OPERATE, Settings, body=dict))
async def patch(http: Request) -> Response:
    """Change settings while it runs: send only what changes, nested as in the answer. The whole
    is checked first; if anything is wrong, everything stays as it was."""
    changes = await body_of(http, dict[str, Any])
    return answer(service_of(http).patch(changes))


@_api.get("/livez", **rest("health", None, models.HealthReply))
async def livez(http: Request) -> Response:
    """Whether the process answers. No token needed."""
    return answer(models.HealthReply(status="ok"))


@_api.get(
    "/readyz",
    **rest("health", None, models.HealthReply, {503: "Nothing could be scheduled now: `reasons`."}),
)
async def readyz(http: Request) -> Response:
    """Whether a request could be scheduled now, else 503. No token needed; who sends one is
    told what is missing, and in `notes` which instances are silent, at most ten."""
    service, details = service_of(http), door_of(http).knows(http)
    return ready(service.missing(), service.notes() if details else [], details=details)


@_api.get("/metrics", **rest("health", Right.READ, str, media="text/plain"))
async def metrics(http: Request) -> Response:
    """For Prometheus."""
    text = await TimeSlices().finish(service_of(http).metrics.writing())
    return Response(text, headers={"content-type": CONTENT_TYPE})


def _done() -> Response:
    return Response(status_code=204)


def _wanted(entry: Decision | Rejection, instance: str | None, outcome: str | None) -> bool:
    decided = isinstance(entry, Decision)
    if outcome is not None and decided != (outcome == "decision"):
        return False
    if instance is None:
        return True
    return isinstance(entry, Decision) and instance in (entry.prefill, entry.decode)
