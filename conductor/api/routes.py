"""The routes: what each one reads, calls and answers. `app.py` puts them into a table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from starlette.responses import Response, StreamingResponse

from ..errors import InvalidRequest, UnknownRequest
from ..records import EVENT_KINDS, Decision, Role
from ..replicas.replica import SharedConductor
from ..state.request_ids import name_of
from ..web.metrics import CONTENT_TYPE
from ..web.time_slices import TimeSlices
from ..wire.answers import JSON, Refusal, answer, answer_all, ready, rejected
from ..wire.block_keys import parse_keys, parse_schema
from ..wire.conversions import (
    check_id,
    decision_reply,
    drain_reply,
    flip_reply,
    hot_reply,
    instance_reply,
    is_heartbeat,
    plan_reply,
    to_event,
    to_load,
    to_request,
    to_spec,
)
from ..wire.decision_text import Shown
from ..wire.models import (
    CANDIDATES_MAX,
    DECISIONS_MAX,
    HOT_MAX,
    MATCH_HOLDERS_MAX,
    DrainBody,
    DrainsReply,
    EventBody,
    HealthReply,
    HolderReply,
    InstanceBody,
    MatchReply,
    PlansReply,
    RoleBody,
)
from .decision_stream import events
from .prompt_decoding import match_decoder, read_token_ids, schedule_decoder
from .request_bodies import Intake

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.requests import Request as HttpRequest

    from ..records import Rejection
    from .authorisation import Door
    from .conductor_service import Service

_event = msgspec.json.Decoder(EventBody)
_instance = msgspec.json.Decoder(InstanceBody)
_role = msgspec.json.Decoder(RoleBody)
_drain = msgspec.json.Decoder(DrainBody)
_changes = msgspec.json.Decoder(dict[str, Any])
_encoder = msgspec.json.Encoder()

_NO_CONTENT = 204
# Of a decision in the log; `why` has all, of sixteen thousand instances at most.
_ALL = 1 << 30


class Routes:
    """Handlers, each from a request to a response. They raise ConductorError and Refusal."""

    def __init__(self, service: Service, door: Door) -> None:
        self._service, self._door = service, door
        self._core = service.core
        self._intake = Intake(service.limits, "; of a prompt send block_keys, 35 for each block")

    # -- requests ----------------------------------------------------------------------------------

    async def schedule(self, http: HttpRequest) -> Response:
        """Decide where a request runs.

        Asking again with the same `request_id` and `tenant` gives the same decision while the
        request is in flight, so a call whose answer was lost can be repeated; if an instance of it
        has gone or is in `exclude`, it is decided anew. Another conductor decides anew, too. Ask
        with token ids, with block keys, or with a length alone.
        """
        service = self._service
        body = await self._intake.body(http, schedule_decoder)
        tokens = await read_token_ids(body)
        outcome = service.schedule(to_request(body, tokens, service.models))
        if isinstance(outcome, Decision):
            return answer(decision_reply(outcome, service.url, service.clock(), service.address))
        return rejected(outcome)

    async def event(self, http: HttpRequest) -> Response:
        """Say what became of a request: it keeps its place, moves on, or gives it back. Of several
        conductors, say it to the one that decided: its address is `conductor` of the decision.

        Name the `tenant` that it was scheduled with: ids belong to a tenant.
        `tokens` takes a body with how many more have been answered, `prefill_done` and
        `first_token` of a race one with the route. A request that was not heard of for as long as
        its decision said is taken for lost, and is not known any more: say `alive` of one of which
        there is nothing else to be said, such as one that waits for its first token.
        """
        tenant = http.query_params.get("tenant", "")
        name = name_of(tenant, check_id(http.path_params["request_id"], "request_id"))
        kind = http.path_params["event"]
        if kind not in EVENT_KINDS:
            raise InvalidRequest(f"no event {kind[:64]!r}; there are {', '.join(EVENT_KINDS)}")
        body = await self._intake.optional(http, _event, EventBody())
        try:
            rejection = self._service.observe(to_event(name, kind, body))
        except UnknownRequest as error:
            if tenant:
                raise
            raise UnknownRequest(
                f"{error}; of a tenant's request say whose: ?tenant=..."
            ) from error
        if rejection is not None:
            return rejected(rejection)
        return Response(status_code=_NO_CONTENT)

    # -- instances ---------------------------------------------------------------------------------

    async def announce(self, http: HttpRequest) -> Response:
        """Register an instance, or say that it is still there and how busy it is.

        Send everything each time: then a conductor that was restarted knows the instance again
        after its next heartbeat. A body with `load` alone is a heartbeat; it answers 404 for an
        instance that is not registered. A heartbeat does not end a drain, but a changed
        registration does. Its url, and the labels `role_url`, `kv_events` and `kv_events_replay`,
        are at hosts of the setting `instances.allowed_hosts`.
        """
        instance = check_id(http.path_params["instance"], "an instance's id")
        body = await self._intake.body(http, _instance)
        spec = None if is_heartbeat(body) else to_spec(instance, body)
        if spec is not None and body.schema is not None:
            self._learn(instance, spec.model, spec.block_tokens, body.schema.canonical)
        load = to_load(body.load) if body.load is not None else None
        self._service.announce(spec, instance, load)
        return Response(status_code=_NO_CONTENT)

    async def leave(self, http: HttpRequest) -> Response:
        """Drain an instance: it gets no new work, and finishes what it has. With `?now=true` it is
        removed at once, whatever runs; requests that are asked about again are decided anew."""
        instance = check_id(http.path_params["instance"], "an instance's id")
        if _flag(http.query_params, "now"):
            self._service.remove(instance)
        else:
            self._core.drain(instance, self._service.clock())
        return Response(status_code=_NO_CONTENT)

    async def instances(self, http: HttpRequest) -> Response:
        """All instances: what they registered with, status, load."""
        core, turns = self._core, TimeSlices()
        texts: list[bytes] = []
        for name in core.cluster.names:
            if name in core.cluster:  # still
                view = core.instance(name, self._service.clock())
                texts.append(_encoder.encode(instance_reply(view)))
            await turns.give()
        return answer_all("instances", texts)

    async def instance(self, http: HttpRequest) -> Response:
        """One instance."""
        instance = check_id(http.path_params["instance"], "an instance's id")
        return answer(instance_reply(self._core.instance(instance, self._service.clock())))

    async def flip(self, http: HttpRequest) -> Response:
        """Begin to change what an instance does: it gets no new work, finishes what it has, is told
        its role (where its label `role_url` says) and asked to show it, and then gets work again.
        Refused if too few would be left in its role. `GET /v1/plans` shows where it is."""
        instance = check_id(http.path_params["instance"], "an instance's id")
        body = await self._intake.body(http, _role)
        self._service.flip(instance, Role(body.role))
        return Response(status_code=_NO_CONTENT)

    # -- blocks ------------------------------------------------------------------------------------

    async def match(self, http: HttpRequest) -> Response:
        """Who holds how much of a prefix, the longest part first; `limit` of them."""
        limit = _number(http.query_params, "limit", 100, MATCH_HOLDERS_MAX)
        body = await self._intake.body(http, match_decoder)
        tokens = await read_token_ids(body)
        if (body.block_keys is None) == (tokens is None):
            raise InvalidRequest("send block_keys, or token_ids with a model")
        if body.block_keys is not None:
            keys = parse_keys(body.block_keys)
        elif body.model is not None:
            assert tokens is not None
            keys = self._service.models.keys(body.model, tokens, body.namespace)
        else:
            raise InvalidRequest("token_ids need a model: whose keys?")
        view = self._core.match(keys, self._service.clock())
        found = [
            HolderReply(holder=name, blocks=blocks, age_s=age_s)
            for name, blocks, age_s in view.holders[:limit]
        ]
        return answer(MatchReply(asked_blocks=len(keys), blocks=view.blocks, holders=found))

    async def hot(self, http: HttpRequest) -> Response:
        """The most popular prefixes; `limit` of them."""
        limit = _number(http.query_params, "limit", 100, HOT_MAX)
        turns, texts = TimeSlices(), list[bytes]()
        for prefix in await turns.finish(self._core.finding_hot(limit, self._service.clock())):
            texts.append(_encoder.encode(hot_reply(prefix)))
            await turns.give()
        return answer_all("prefixes", texts)

    # -- decisions ---------------------------------------------------------------------------------

    async def decisions(self, http: HttpRequest) -> Response:
        """The latest decisions and rejections, `limit` of them, each with `candidates` of its
        candidates. `instance` and `outcome` choose among the latest."""
        asked = http.query_params
        limit = _number(asked, "limit", 100, DECISIONS_MAX)
        candidates = _number(asked, "candidates", 0, CANDIDATES_MAX)
        instance, outcome = asked.get("instance"), asked.get("outcome")
        if outcome not in (None, "decision", "rejection"):
            raise InvalidRequest("outcome is decision or rejection")
        everything = instance is None and outcome is None
        entries = self._core.decisions(limit if everything else DECISIONS_MAX)
        kept = [one for one in entries if _wanted(one, instance, outcome)][:limit]
        turns, texts = TimeSlices(), list[bytes]()
        for entry in kept:
            texts.append(Shown(entry, self._service.unix_s).text(candidates))
            await turns.give()
        return answer_all("decisions", texts)

    async def why(self, http: HttpRequest) -> Response:
        """Why a request runs where it runs: all candidates with every term of their cost. Without
        `tenant`, of the latest request with this id, whoever's it is."""
        request_id = check_id(http.path_params["request_id"], "request_id")
        entry = self._core.decision(name_of(http.query_params.get("tenant", ""), request_id))
        if entry is None:
            raise UnknownRequest(
                f"no decision about {request_id!r} is in the log: it keeps the latest"
            )
        return Response(Shown(entry, self._service.unix_s).text(_ALL), media_type=JSON)

    async def stream(self, http: HttpRequest) -> Response:
        """Decisions as they are made, as server-sent events: `decision` with an entry of the log,
        `missed` with how many a slow reader did not get."""
        candidates = _number(http.query_params, "candidates", 0, CANDIDATES_MAX)
        broadcast = self._service.broadcast
        if broadcast.full:
            raise Refusal(
                503, "too_many_streams", "too many follow the decisions", retry_after_s=10.0
            )
        return StreamingResponse(
            events(broadcast, candidates),
            media_type="text/event-stream",
            headers={"cache-control": "no-store", "x-accel-buffering": "no"},
        )

    # -- the pool as a whole -----------------------------------------------------------------------

    async def plans(self, http: HttpRequest) -> Response:
        """What this conductor would do about the instances of each model, with every number behind
        it, and the flips that it carries out. Each conductor plans; the one that leads orders."""
        service, steering = self._service, self._core.steering
        now, unix_s = service.clock(), service.unix_s
        return answer(
            PlansReply(
                leads=steering.leads(now),
                leader=steering.lease.leader(now) if steering.lease is not None else "",
                plans=[plan_reply(*one, unix_s) for one in steering.plans().items()],
                flips=[flip_reply(flip, unix_s) for flip in steering.flips()],
            )
        )

    async def drains(self, http: HttpRequest) -> Response:
        """Nodes and instances that are emptied, and those that were: how far, and what is lost if
        one stops now. Of several conductors each shows those that it was asked for."""
        found = self._core.steering.drains(self._service.clock())
        return answer(DrainsReply(drains=[drain_reply(progress) for progress in found]))

    async def drain_node(self, http: HttpRequest) -> Response:
        """Empty a kvstore node before it stops: it takes nothing new, its hot blocks that no other
        node has are copied away first, and then it hands over the rest. It goes on serving what it
        has. The answer, and `GET /v1/drains` of this conductor, show how far it is; asked again
        meanwhile, it goes on as before. Instances on its host are drained by themselves."""
        node = check_id(http.path_params["node"], "a node's name")
        body = await self._intake.optional(http, _drain, DrainBody())
        steering, now = self._core.steering, self._service.clock()
        steering.drain_node(node, now, body.deadline_s)
        return answer(drain_reply(steering.node_drain(node, now)))

    async def undrain_node(self, http: HttpRequest) -> Response:
        """Let a node take new blocks again: its drain is cancelled, or undone if it has ended.
        Copies stay where they are. Any conductor can be asked; one that empties the node just now
        sees that it is open, and stops."""
        node = check_id(http.path_params["node"], "a node's name")
        steering, now = self._core.steering, self._service.clock()
        steering.undrain_node(node, now)
        return answer(drain_reply(steering.node_drain(node, now)))

    # -- settings, health --------------------------------------------------------------------------

    async def settings(self, http: HttpRequest) -> Response:
        """All settings as they are."""
        return answer(self._core.settings)

    async def patch(self, http: HttpRequest) -> Response:
        """Change settings while it runs: send only what changes, nested as in the answer. The whole
        is checked first; if anything is wrong, everything stays as it was."""
        changes = await self._intake.body(http, _changes)
        return answer(self._service.patch(changes))

    async def livez(self, http: HttpRequest) -> Response:
        """Whether the process answers. No token needed."""
        return answer(HealthReply(status="ok"))

    async def readyz(self, http: HttpRequest) -> Response:
        """Whether a request could be scheduled now, else 503. No token needed; who sends one is
        told what is missing."""
        return ready(self._service.missing(), details=self._door.knows(http))

    async def metrics(self, http: HttpRequest) -> Response:
        """For Prometheus."""
        return Response(self._service.metrics.text(), headers={"content-type": CONTENT_TYPE})

    def _learn(self, instance: str, model: str, block_tokens: int, canonical: str) -> None:
        models = self._service.models
        known = models.same(model, canonical)
        schema = known or parse_schema(canonical)
        if schema.block_tokens != block_tokens:
            raise InvalidRequest(
                f"block_tokens is {block_tokens}, and {schema.block_tokens} in the schema"
            )
        if known is None:
            specs = self._core.cluster.specs
            models.learn(
                model,
                schema,
                lambda: {s.model for s in specs if s is not None and s.id != instance},
            )
        if isinstance(self._core, SharedConductor):
            self._core.schema(model, canonical)


def _wanted(entry: Decision | Rejection, instance: str | None, outcome: str | None) -> bool:
    decided = isinstance(entry, Decision)
    if outcome is not None and decided != (outcome == "decision"):
        return False
    if instance is None:
        return True
    return isinstance(entry, Decision) and instance in (entry.prefill, entry.decode)


def _number(asked: Mapping[str, str], name: str, default: int, most: int) -> int:
    """A number of the query, from 0 to `most`. Raises InvalidRequest."""
    text = asked.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) <= 9 and int(text) <= most):
        raise InvalidRequest(f"{name} is a number from 0 to {most}")
    return int(text)


def _flag(asked: Mapping[str, str], name: str) -> bool:
    text = asked.get(name, "false")
    if text not in ("true", "false"):
        raise InvalidRequest(f"{name} is true or false")
    return text == "true"
