"""Where a request runs: asks the conductor, or gives instances their turns while it is silent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import ConductorError, ConductorUnavailable, UnknownModel
from ..records import Rejection, Request
from .known import SHARDS_LABEL, Route, Shard, Target

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from ..api.models import DecisionReply
    from ..client import AsyncConductorClient
    from .asking import Ask
    from .config import GatewayConfig
    from .known import Known
    from .metrics import Metrics
    from .reporting import Health
    from .tokenizing import Sized

# Of the time after which the conductor forgets a request: one report may be lost.
_ALIVE_SHARE = 1 / 3
_ALIVE_S = 30.0  # of a decision that does not say when it ends
# Of a decision that was asked for again, which may have come to its end, and the request has not.
_ALIVE_MIN_S = 0.25


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a request runs: on the first of `routes`, or on all of them, raced.

    `fallback` says why the conductor has not decided it, and then nothing is reported; "" if it
    has. `in_doubt`: it may have decided something else, and its answer did not come.
    `output_tokens_max` is where the conductor cuts the answer. Within `alive_s` it wants to hear of
    it. `raced`: it wants to hear of which route. `wait_for` is a request whose blocks this one
    waits for, included in `predicted_ttft_s` (None: not predicted). `shards` of its context are at
    several instances.
    """

    routes: tuple[Route, ...]
    cached_tokens: int = 0
    output_tokens_max: int | None = None
    alive_s: float = _ALIVE_S
    raced: bool = False
    wait_for: str = ""
    predicted_ttft_s: float | None = None
    shards: tuple[Shard, ...] = ()
    fallback: str = ""
    in_doubt: bool = False


class NoInstance(Exception):
    """Nothing is known that could serve the request. `why`, for the client."""


class NoShards(Exception):
    """The conductor spreads a context over instances that can't serve one so."""


class Placing:
    """See the module. For one event loop."""

    def __init__(
        self,
        client: AsyncConductorClient,
        known: Known,
        health: Health,
        config: GatewayConfig,
        metrics: Metrics,
        clock: Callable[[], float],
    ) -> None:
        self._client, self._known, self._health = client, known, health
        self._config, self._metrics, self._clock = config, metrics, clock

    async def place(
        self, ask: Ask, sized: Sized, avoid: Collection[str] = ()
    ) -> Placement | Rejection:
        """Where to run it, not on those to `avoid`. Asking again about a request in flight gives
        the same decision, unless an instance of it has left or is to be avoided. Raises
        ConductorError, NoInstance, NoShards."""
        if not self._health.try_again(self._clock()):
            return self._by_turns(ask, avoid, "conductor_down")
        try:
            decided = await self._ask(ask, sized, avoid)
        except ConductorUnavailable as error:
            self._health.failed(self._clock(), error)
            return self._by_turns(ask, avoid, "conductor_down", error)
        except UnknownModel as error:
            # A conductor that was restarted knows nobody until they say that they are there.
            if ask.model not in self._known.models():
                raise
            return self._by_turns(ask, avoid, "model_unknown", error)
        self._health.answered()
        if not isinstance(decided, Rejection):
            return self._usable(ask, decided, avoid)
        if avoid and not decided.overloaded:
            raise NoInstance(f"no other instance of {ask.model!r} that answers is known")
        return decided

    async def _ask(
        self, ask: Ask, sized: Sized, avoid: Collection[str]
    ) -> DecisionReply | Rejection:
        wishes = ask.wishes
        request = Request(
            id=wishes.request_id,
            model=ask.model,
            prompt_tokens=sized.prompt_tokens,
            keys=sized.keys,
            objectives=wishes.objectives,
            priority=wishes.priority,
            tenant=wishes.tenant,
            output_tokens_max=ask.output_tokens_max,
            # Of an answer that is not streamed nobody sees which route is first.
            urgent=wishes.urgent and ask.stream,
            exclude=tuple(sorted(avoid)),
        )
        namespace = self._config.model(ask.model).namespace if sized.token_ids else ""
        return await self._client.schedule(request, token_ids=sized.token_ids, namespace=namespace)

    def _usable(self, ask: Ask, decided: DecisionReply, avoid: Collection[str]) -> Placement:
        """The decision, without routes over instances that do not answer. Raises NoInstance if none
        is left, which only a conductor does that knows nothing of `exclude`; NoShards."""
        first = Route(
            Target(decided.prefill, decided.prefill_url or self._known.url(decided.prefill)),
            Target(decided.decode, decided.decode_url or self._known.url(decided.decode)),
        )
        others = [
            Route(Target(a, self._known.url(a)), Target(b, self._known.url(b)))
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
            output_tokens_max=decided.output_tokens_max,
            alive_s=_ALIVE_S if expires_s is None else max(_ALIVE_MIN_S, expires_s * _ALIVE_SHARE),
            raced=bool(decided.alternatives),
            wait_for=decided.wait_for,
            predicted_ttft_s=decided.predicted_ttft_s,
            shards=self._shards(decided),
        )

    def _shards(self, decided: DecisionReply) -> tuple[Shard, ...]:
        """Who holds how much of a context that is spread. Raises NoShards."""
        unable = [one for one in decided.shards if not self._known.shares_contexts(one.instance)]
        if unable:
            raise NoShards(
                f"the conductor spreads a context over {unable[0].instance!r}, whose label "
                f'{SHARDS_LABEL!r} is not "true": register it with that, or unset spread.enabled'
            )
        return tuple(
            Shard(one.instance, self._known.url(one.instance), one.tokens) for one in decided.shards
        )

    def _by_turns(
        self,
        ask: Ask,
        avoid: Collection[str],
        why: str,
        error: ConductorError | None = None,
    ) -> Placement:
        route = self._known.turn(ask.model, avoid) if self._config.fallback else None
        if route is None:
            if error is not None:
                raise error
            raise NoInstance(
                f"no instance of {ask.model!r} that answers is known"
                if self._config.fallback
                else f"the conductor did not place {ask.model!r}, and fallback is off"
            )
        self._metrics.fallbacks.labels(why).inc()
        in_doubt = isinstance(error, ConductorUnavailable)
        return Placement(routes=(route,), fallback=why, in_doubt=in_doubt)
