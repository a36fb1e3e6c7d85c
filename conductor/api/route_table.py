"""All routes as a table: what serves them, and how OpenAPI, the reference and metrics show them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..records import EVENT_KINDS
from ..web.auth import Right
from ..wire.models import (
    CANDIDATES_MAX,
    DECISIONS_MAX,
    HOT_MAX,
    ID_MAX,
    ID_PATTERN,
    MATCH_HOLDERS_MAX,
    NAME_MAX,
    DecisionReply,
    DecisionsReply,
    DrainBody,
    DrainReply,
    DrainsReply,
    EntryReply,
    EventBody,
    HealthReply,
    HotReply,
    InstanceBody,
    InstanceReply,
    InstancesReply,
    MatchBody,
    MatchReply,
    PlansReply,
    RoleBody,
    ScheduleBody,
)
from .routes import Routes

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from starlette.requests import Request
    from starlette.responses import Response

Schema = dict[str, Any]
SETTINGS = "settings"  # stands for the type of the core's settings


@dataclass(frozen=True, slots=True)
class Parameter:
    """Of a path (`required`) or a query."""

    name: str
    what: str
    schema: Schema


@dataclass(frozen=True, slots=True)
class Route:
    """One operation. `right` is what a token needs; None: nobody is asked. `own`: an instance may
    do it to itself, with a token of its own. `body` and `reply` are structs (or SETTINGS); `text`
    the content type of a reply that is not JSON. `others`: statuses beyond what every route has,
    with what they mean."""

    method: str
    path: str
    handler: Callable[[Routes, Request], Awaitable[Response]]
    tag: str
    right: Right | None = None
    own: bool = False
    body: type | str | None = None
    body_needed: bool = True
    reply: type | str | None = None
    text: str = ""
    others: tuple[tuple[int, str], ...] = ()
    query: tuple[Parameter, ...] = ()
    body_example: Any = None
    reply_example: Any = None

    @property
    def name(self) -> str:
        return self.handler.__name__

    @property
    def rights(self) -> str:
        """What a token has to allow, in words."""
        return f"`{self.right}`" + (f", or `{Right.INSTANCE}` of this id" if self.own else "")

    @property
    def pattern(self) -> str:
        """How metrics call it."""
        return f"{self.method} {self.path}"


def _number(name: str, what: str, default: int, most: int) -> Parameter:
    schema = {"type": "integer", "minimum": 0, "maximum": most, "default": default}
    return Parameter(name, what, schema)


_ID = {"type": "string", "minLength": 1, "maxLength": ID_MAX, "pattern": ID_PATTERN}
IN_PATH = {
    "request_id": Parameter("request_id", "The id that it was scheduled with.", _ID),
    "instance": Parameter("instance", "The instance's id.", _ID),
    "node": Parameter("node", "The node's name, if it has no slash.", _ID),
    "event": Parameter("event", "What happened.", {"type": "string", "enum": list(EVENT_KINDS)}),
}
_TENANT = Parameter(
    "tenant",
    "The tenant that it was scheduled with, if any.",
    {"type": "string", "maxLength": NAME_MAX},
)
_CANDIDATES = _number("candidates", "Candidates to show of each.", 0, CANDIDATES_MAX)
_NO_INSTANCE = (404, "No such instance is registered.")
_NO_NODE = (404, "No such node is in the pool, or the conductor follows none (`--directory`).")
_NO_REQUEST = (404, "No such request of this tenant is in flight.")

_DECISION = {
    "request_id": "chatcmpl-7f3a",
    "prefill": "prefill-3",
    "decode": "decode-1",
    "prefill_url": "http://10.0.0.13:8000",
    "decode_url": "http://10.0.0.21:8000",
    "policy": "kvcache_centric",
    "predicted_ttft_s": 0.41,
    "predicted_tbt_s": 0.021,
    "cached_tokens": 3584,
    "available_tokens": 3584,
    "fetches": [
        {"start": 4, "stop": 7, "source": "node-a/dram", "nbytes": 201326592, "seconds": 0.052}
    ],
    "layerwise": True,
    "wait_for": "",
    "output_tokens_max": None,
    "degraded": [],
    "shards": [],
    "alternatives": [],
    "expires_in_s": 60.0,
    "conductor": "",
}

_PLANS = {
    "leads": True,
    "leader": "host-a:9f3c52e0b1d4",
    "plans": [
        {
            "model": "llama-3-8b",
            "planned_at": 1790000000.0,
            "mode": "advise",
            "prefill": 2,
            "decode": 6,
            "mixed": 0,
            "load": 1.31,
            "serves_rate": 7.6,
            "best_prefill": 3,
            "instances_wanted": 13,
            "flip": {"instance": "decode-5", "role": "prefill"},
            "flip_now": False,
            "held_back": "only advice is asked for",
            "reasons": [
                {
                    "name": "rate",
                    "value": 10.0,
                    "unit": "requests/s",
                    "why": "constant over 12 intervals",
                }
            ],
        }
    ],
    "flips": [],
}
_NODE_DRAIN = {
    "kind": "node",
    "name": "node-a",
    "phase": "hot",
    "left_s": 588.0,
    "unique_blocks": 120,
    "moved_blocks": 64,
    "moved_bytes": 4294967296,
    "handed_over": 0,
    "left_blocks": 0,
    "failures": 0,
    "requests": 0,
}
_INSTANCE_DRAIN = {
    "kind": "instance",
    "name": "decode-1",
    "phase": "waiting",
    "left_s": 588.0,
    "unique_blocks": 12,
    "moved_blocks": 0,
    "moved_bytes": 0,
    "handed_over": 0,
    "left_blocks": 0,
    "failures": 0,
    "requests": 3,
}

ROUTES: tuple[Route, ...] = (
    Route(
        "POST",
        "/v1/schedule",
        Routes.schedule,
        "requests",
        Right.SCHEDULE,
        body=ScheduleBody,
        reply=DecisionReply,
        others=(
            (404, "No instance has registered this model."),
            (409, "Another prompt of this tenant is in flight under this id."),
            (429, "Rejected for load: what was predicted, and when to come back (Retry-After)."),
            (503, "Nothing that could serve it is ready."),
        ),
        body_example={
            "request_id": "chatcmpl-7f3a",
            "model": "llama-3-8b",
            "prompt_tokens": 4096,
            "block_keys": ["6f1ed002ab5595859014ebf0951522d9"],
            "objectives": {"ttft_s": 2.0, "tbt_s": 0.05},
            "output_tokens_max": 512,
        },
        reply_example=_DECISION,
    ),
    Route(
        "POST",
        "/v1/requests/{request_id}/{event}",
        Routes.event,
        "requests",
        Right.SCHEDULE,
        body=EventBody,
        body_needed=False,
        others=(
            _NO_REQUEST,
            (429, "Rejected after its prefill, which admission in the mode baseline does."),
        ),
        query=(_TENANT,),
        body_example={"tokens": 16},
    ),
    Route("GET", "/v1/instances", Routes.instances, "instances", Right.READ, reply=InstancesReply),
    Route(
        "GET",
        "/v1/instances/{instance}",
        Routes.instance,
        "instances",
        Right.READ,
        reply=InstanceReply,
        others=(_NO_INSTANCE,),
    ),
    Route(
        "PUT",
        "/v1/instances/{instance}",
        Routes.announce,
        "instances",
        Right.OPERATE,
        own=True,
        body=InstanceBody,
        others=(_NO_INSTANCE, (409, "Another instance keys this model differently.")),
        body_example={
            "model": "llama-3-8b",
            "role": "prefill",
            "profile": "llama-3.1-8b.h100.tp1.vllm",
            "url": "http://127.0.0.1:8000",
            "node": "node-a",
            "load": {"queued_prefill_tokens": 12000, "running": 0},
        },
    ),
    Route(
        "DELETE",
        "/v1/instances/{instance}",
        Routes.leave,
        "instances",
        Right.OPERATE,
        own=True,
        others=(_NO_INSTANCE,),
        query=(
            Parameter(
                "now", "Remove it instead of draining it.", {"type": "boolean", "default": False}
            ),
        ),
    ),
    Route(
        "POST",
        "/v1/instances/{instance}/role",
        Routes.flip,
        "instances",
        Right.OPERATE,
        body=RoleBody,
        others=(
            _NO_INSTANCE,
            (409, "It cannot be flipped now: too few would be left, or another is."),
        ),
        body_example={"role": "decode"},
    ),
    Route(
        "POST",
        "/v1/blocks/match",
        Routes.match,
        "blocks",
        Right.READ,
        body=MatchBody,
        reply=MatchReply,
        query=(_number("limit", "Holders to show.", 100, MATCH_HOLDERS_MAX),),
        body_example={"block_keys": ["6f1ed002ab5595859014ebf0951522d9"]},
        reply_example={
            "asked_blocks": 1,
            "blocks": 1,
            "holders": [{"holder": "node-a/dram", "blocks": 1, "age_s": 0.4}],
        },
    ),
    Route(
        "GET",
        "/v1/blocks/hot",
        Routes.hot,
        "blocks",
        Right.READ,
        reply=HotReply,
        query=(_number("limit", "Prefixes to show.", 100, HOT_MAX),),
    ),
    Route(
        "GET",
        "/v1/decisions",
        Routes.decisions,
        "decisions",
        Right.READ,
        reply=DecisionsReply,
        query=(
            _number("limit", "Entries to show.", 100, DECISIONS_MAX),
            _CANDIDATES,
            Parameter("instance", "Only what runs there.", {"type": "string"}),
            Parameter(
                "outcome", "Only these.", {"type": "string", "enum": ["decision", "rejection"]}
            ),
        ),
    ),
    Route(
        "GET",
        "/v1/decisions/stream",
        Routes.stream,
        "decisions",
        Right.READ,
        text="text/event-stream",
        others=((503, "Too many follow the decisions."),),
        query=(_CANDIDATES,),
    ),
    Route(
        "GET",
        "/v1/decisions/{request_id}/why",
        Routes.why,
        "decisions",
        Right.READ,
        reply=EntryReply,
        others=((404, "Not in the log, which keeps the latest."),),
        query=(_TENANT,),
    ),
    Route(
        "GET",
        "/v1/plans",
        Routes.plans,
        "pool",
        Right.READ,
        reply=PlansReply,
        reply_example=_PLANS,
    ),
    Route(
        "GET",
        "/v1/drains",
        Routes.drains,
        "pool",
        Right.READ,
        reply=DrainsReply,
        reply_example={"drains": [_NODE_DRAIN, _INSTANCE_DRAIN]},
    ),
    Route(
        "PUT",
        "/v1/nodes/{node}/drain",
        Routes.drain_node,
        "pool",
        Right.OPERATE,
        body=DrainBody,
        body_needed=False,
        reply=DrainReply,
        others=(_NO_NODE, (409, "It is just being told to take new blocks again.")),
        body_example={"deadline_s": 600},
        reply_example=_NODE_DRAIN | {"phase": "closing", "left_s": 600.0},
    ),
    Route(
        "DELETE",
        "/v1/nodes/{node}/drain",
        Routes.undrain_node,
        "pool",
        Right.OPERATE,
        reply=DrainReply,
        others=(_NO_NODE,),
        reply_example=_NODE_DRAIN | {"phase": "cancelled", "left_s": 0.0},
    ),
    Route("GET", "/v1/policy", Routes.settings, "settings", Right.READ, reply=SETTINGS),
    Route(
        "PATCH",
        "/v1/policy",
        Routes.patch,
        "settings",
        Right.OPERATE,
        body=dict,
        reply=SETTINGS,
    ),
    Route("GET", "/livez", Routes.livez, "health", reply=HealthReply),
    Route(
        "GET",
        "/readyz",
        Routes.readyz,
        "health",
        reply=HealthReply,
        others=((503, "Nothing could be scheduled now: `reasons`."),),
    ),
    Route("GET", "/metrics", Routes.metrics, "health", Right.READ, text="text/plain"),
)
