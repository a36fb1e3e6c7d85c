"""Placement of requests: by the conductor, or while it does not answer as the operator chooses: by
what is known from its last decisions (`engines/last_known.py`), or not at all.

Never without admission: a conductor that is busy, or a gateway that is late itself, would otherwise
turn it off just when it is needed.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ...errors import ConductorError, ConductorLate, ConductorUnavailable, UnknownModel
from ...records import EXCLUDE_MAX, Rejection, Request
from ...wire.answers import Refusal
from ..engines.instance_cache import SHARDS_LABEL, InstanceRoute, Shard
from .event_outbox import REST_S

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from ...client.client import AsyncConductorClient
    from ...wire.models import DecisionReply
    from ..config import GatewayConfig
    from ..engines.instance_cache import Known
    from ..engines.last_known import LastKnown
    from ..metrics import GatewayMetrics
    from ..openai.openai_request import ClientRequest
    from ..openai.tokenizing import Sized
    from .conductor_reports import Health
    from .own_lateness import OwnLateness
    from .placing_queue import PlacingQueue

# Keepalive interval, as a share of the time after which the conductor's reservation for a request
# expires: one report may be lost.
_ALIVE_SHARE = 1 / 3
_ALIVE_S = 30.0  # keepalive interval for a decision without `expires_in_s`
# The least keepalive interval: when the gateway asks for a decision again, its reservation may be
# about to expire although the request goes on.
_ALIVE_MIN_S = 0.25
# This process is late, and not the conductor, if it did not run for such a part of a call's time.
_LATE_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a request runs: on all `routes`, raced, or on the only one.

    `fallback` is the reason why the conductor did not place the request, and then nothing is
    reported; "" if the conductor did. `in_doubt`: the conductor's answer did not arrive, so it may
    have placed the request elsewhere. `output_tokens_max` is where the conductor cuts the answer.
    `layerwise`: whether the prompt's KV is to be handed over while it is computed. The conductor
    expects an event within `alive_s`. `raced`: the conductor expects events to name
    the route. `predicted_ttft_s`: None if it is not predicted. `shards` says how the context is
    spread over several instances. `conductor` is the URL for the request's events, "" for that of
    the gateway's conductor. `model` answers, if not empty, in place of the one that was asked;
    `degraded` says what was given up to take the request. `held`: it is not to be sent before the
    conductor releases it. `fetched`: how many leading blocks the node of the instance that prefills
    has when what it fetches now has come, and within how many seconds that should be.
    """

    routes: tuple[InstanceRoute, ...]
    cached_tokens: int = 0
    layerwise: bool = False
    output_tokens_max: int | None = None
    alive_s: float = _ALIVE_S
    raced: bool = False
    predicted_ttft_s: float | None = None
    shards: tuple[Shard, ...] = ()
    fallback: str = ""
    in_doubt: bool = False
    conductor: str = ""
    model: str = ""
    degraded: tuple[str, ...] = ()
    held: bool = False
    fetched: tuple[int, float] | None = None


class NoInstance(Exception):
    """The gateway knows no instance that could serve the request. The message is for the client."""


class NoShards(Exception):
    """The conductor spreads a context over instances that do not support shards."""


class Placer:
    """Places requests; see the module. For one event loop."""

    def __init__(
        self,
        client: AsyncConductorClient,
        known: Known,
        last: LastKnown,
        health: Health,
        queue: PlacingQueue,
        lateness: OwnLateness,
        config: GatewayConfig,
        metrics: GatewayMetrics,
        clock: Callable[[], float],
        waiter: str,
    ) -> None:
        self._waiter = waiter
        self._client, self._known, self._last, self._health = client, known, last, health
        self._queue, self._lateness = queue, lateness
        self._config, self._metrics, self._clock = config, metrics, clock

    async def place(
        self,
        ask: ClientRequest,
        sized: Sized,
        avoid: Collection[str] = (),
        trace: Mapping[str, str] | None = None,
    ) -> Placement | Rejection:
        """Place the request, on none of the instances in `avoid`. Idempotent for an in-flight
        request: the conductor repeats its decision, unless an instance of it has left or is in
        `avoid`. Raises ConductorError, NoInstance, NoShards, Refusal."""
        if not self._health.try_again(self._clock()):
            return self.unplaced(ask, sized, avoid, "conductor_down")
        async with self._queue.turn(ask.wishes.tenant):
            began, lost_s = self._clock(), self._lateness.now_lost_s()
            try:
                decided = await self._ask(ask, sized, avoid, trace)
                if isinstance(decided, Rejection) and not decided.overloaded:
                    if placed := await self._forgotten(ask, sized, avoid):
                        return placed
                    if self._known.turn(ask.model, avoid):  # it has registered meanwhile
                        decided = await self._ask(ask, sized, avoid, trace)
            except ConductorUnavailable as error:
                late = self._is_late(error, began, lost_s)
                if not late:
                    self._health.failed(self._clock(), error)
                why = "conductor_late" if late else "conductor_down"
                return self.unplaced(ask, sized, avoid, why, error)
            except UnknownModel as error:
                # A restarted conductor knows no instance until the instances register again.
                if not len(self._known):
                    raise NoInstance("no instance is registered; try again") from error
                if ask.model not in self._known.models():
                    raise
                return self.unplaced(ask, sized, avoid, "model_unknown", error)
        self._health.answered(self._clock())
        if not isinstance(decided, Rejection):
            placed = self._usable(ask, decided, avoid)
            self._last.learn(sized.keys, placed.routes[0].prefill.name)
            return placed
        if avoid and not decided.overloaded:
            raise NoInstance(f"no other instance of {ask.model!r} that answers is known")
        return decided

    async def _ask(
        self,
        ask: ClientRequest,
        sized: Sized,
        avoid: Collection[str],
        trace: Mapping[str, str] | None,
    ) -> DecisionReply | Rejection:
        wishes, base = ask.wishes, self._known.base_of(ask.model)
        if base != ask.model:  # an adapter, which the conductor knows nothing of
            others = self._known.serving(base) - self._known.serving(ask.model)
            avoid = [*avoid, *others][:EXCLUDE_MAX]
        request = Request(
            id=wishes.request_id,
            model=base,
            prompt_tokens=sized.prompt_tokens,
            keys=sized.keys,
            part_keys=sized.part_keys,
            objectives=wishes.objectives,
            priority=wishes.priority,
            tenant=wishes.tenant,
            output_tokens=wishes.output_tokens,
            output_tokens_max=ask.output_tokens_max,
            output_class=wishes.output_class,
            # Without a stream the gateway can't see which of two raced routes is first.
            urgent=wishes.urgent and ask.stream,
            exclude=tuple(sorted(avoid)),
            first_token_from="decode",  # the answer that clients get is all of one instance
        )
        return await self._client.schedule(
            request,
            token_ids=sized.token_ids,
            namespace=sized.namespace,
            cache_salt=sized.cache_salt,
            media=sized.media,
            waiter=self._waiter,
            trace=trace,
        )

    def _usable(
        self, ask: ClientRequest, decided: DecisionReply, avoid: Collection[str]
    ) -> Placement:
        """The decision as a placement, without routes over instances in `avoid`. Raises NoInstance
        if no route is left, which happens only with a conductor that does not support `exclude`;
        NoShards."""
        first = InstanceRoute(
            self._known.target(decided.prefill, decided.prefill_url),
            self._known.target(decided.decode, decided.decode_url),
        )
        others = [
            InstanceRoute(self._known.target(a), self._known.target(b))
            for a, b in ((one.prefill, one.decode) for one in decided.alternatives)
        ]
        raced = [route for route in others if route.prefill.url and route.decode.url and ask.stream]
        routes = tuple(route for route in (first, *raced) if not route.uses(avoid))
        if not routes:
            raise NoInstance(f"{decided.decode!r}, or where it is prefilled, does not answer")
        expires_s = decided.expires_in_s
        return Placement(
            routes=routes,
            cached_tokens=decided.cached_tokens,
            layerwise=decided.layerwise,
            output_tokens_max=decided.output_tokens_max,
            alive_s=_ALIVE_S if expires_s is None else max(_ALIVE_MIN_S, expires_s * _ALIVE_SHARE),
            raced=bool(decided.alternatives),
            predicted_ttft_s=decided.predicted_ttft_s,
            shards=self._shards(decided),
            conductor=decided.conductor,
            model=decided.model,
            degraded=tuple(decided.degraded),
            held=decided.held is not None,
            fetched=None
            if decided.fetch_within_s is None
            else (max((f.stop for f in decided.fetches), default=0), decided.fetch_within_s),
        )

    def _shards(self, decided: DecisionReply) -> tuple[Shard, ...]:
        """Which instance holds how many tokens of a context that is spread. Raises NoShards."""
        unable = [one for one in decided.shards if not self._known.shares_contexts(one.instance)]
        if unable:
            raise NoShards(
                f"the conductor spreads a context over {unable[0].instance!r}, whose label "
                f'{SHARDS_LABEL!r} is not "true": register it with that, or unset spread.enabled'
            )
        return tuple(
            Shard(one.instance, self._known.url(one.instance), one.tokens) for one in decided.shards
        )

    def _is_late(self, error: ConductorUnavailable, began: float, lost_s: float) -> bool:
        """Whether a conductor that gave no answer lives: it says so, or has answered another call
        meanwhile, or it was this process that did not run."""
        if not isinstance(error, ConductorLate):
            return False
        took_s = self._clock() - began
        own_s = self._lateness.now_lost_s() - lost_s
        return (
            took_s < self._config.timeouts.conductor_s  # it said that it is busy
            or self._health.heard_since(began)
            or own_s > _LATE_SHARE * took_s
        )

    async def _forgotten(
        self, ask: ClientRequest, sized: Sized, avoid: Collection[str]
    ) -> Placement | None:
        """A placement over instances that the conductor does not list any more, for a request for
        which it has none that is ready: perhaps it was restarted. None if it lists all."""
        known = self._known
        if not self._config.fallback or not (
            known.turn(ask.model, avoid) or known.turn_forgotten(ask.model, avoid)
        ):
            return None
        with contextlib.suppress(ConductorError):  # what is known may be older than the restart
            known.update(await self._client.instances(), self._clock())
        return self._by_last_known(ask, sized, avoid, "model_unknown", known.turn_forgotten)

    def unplaced(
        self,
        ask: ClientRequest,
        sized: Sized,
        avoid: Collection[str],
        why: str,
        error: ConductorError | None = None,
    ) -> Placement:
        """The placement of a request that the conductor has not placed: by its last known state, if
        the operator allows it and there is room. Raises Refusal, and NoInstance if no instance is
        known."""
        if not self._config.fallback:
            raise self._refusal(why)
        placed = self._by_last_known(ask, sized, avoid, why, self._known.turn)
        if placed is None:
            if isinstance(error, UnknownModel):
                raise error
            raise NoInstance(f"no instance of {ask.model!r} that answers is known")
        return replace(placed, in_doubt=isinstance(error, ConductorUnavailable))

    def _by_last_known(
        self,
        ask: ClientRequest,
        sized: Sized,
        avoid: Collection[str],
        why: str,
        turn: Callable[..., InstanceRoute | None],
    ) -> Placement | None:
        """A placement on one of the instances among which `turn` chooses; None if there are none.
        Raises Refusal if none has room."""
        names = self._known.all_names()
        full, first = self._last.full(names), self._last.nearest(sized.keys, names)
        route = turn(ask.model, avoid, full, first)
        if route is None:
            if turn(ask.model, avoid) is None:
                return None
            raise self._refusal(why)
        self._metrics.fallbacks.labels(why).inc()
        return Placement(routes=(route,), fallback=why)

    def still(self, placed: Placement) -> Placement:
        """The placement of a request that the conductor holds and does not answer for any more: as
        it was decided, if that has room by the last known state. Raises Refusal."""
        why = "conductor_down"
        if not self._config.fallback or self._last.full(placed.routes[0].names):
            raise self._refusal(why)
        self._metrics.fallbacks.labels(why).inc()
        return replace(placed, fetched=None)  # nobody was told to

    def _refusal(self, why: str) -> Refusal:
        self._metrics.not_placed.labels(why).inc()
        return Refusal(503, "not_placed", _WHY_NOT[why], retry_after_s=REST_S)


_WHY_NOT = {
    "conductor_down": "the conductor does not answer",
    "conductor_late": "the conductor did not place this in time, it is busy",
    "model_unknown": "the conductor does not know the model's instances yet",
}
