"""Runs a request on its placement: one call, or prefill and then decode; or several routes raced.

Every answer that is not used is closed, also after errors, so that no engine keeps computing for a
request that has ended.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from ..engines.engine_client import AnswerStream, EngineError, EngineGone, EngineSlow, Whole
from ..openai import engine_bodies
from ..openai.openai_request import ID_KINDS, RESPONSES
from ..openai.response_ids import new_id

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Sequence

    from msgspec import Raw

    from ...web.tracing import Span
    from ..config import GatewayConfig, Handoff
    from ..engines.circuit_breakers import CircuitBreakers
    from ..engines.engine_client import Engines, Prefilled
    from ..engines.instance_cache import CallTarget, InstanceRoute
    from ..openai.openai_request import ClientRequest
    from ..openai.token_counter import Usage
    from .placement import Placement

    Answer = AnswerStream | Whole
    # Callback: the prefill of a route is done. An exception from it ends the request.
    OnPrefilled = Callable[[InstanceRoute, Usage | None], Awaitable[None]]


# TENANT/ID, or ID where there are no tenants (`state/request_ids.py`).
REQUEST_HEADER = "x-tiffin-request"


class Running:
    """Runs requests on the instances; see the module."""

    def __init__(
        self,
        engines: Engines,
        breakers: CircuitBreakers,
        config: GatewayConfig,
        clock: Callable[[], float],
    ) -> None:
        self._engines, self._breakers, self._config = engines, breakers, config
        self._clock = clock
        # By prefill instance: the number of the node at which it writes, as it said last.
        self._nodes: dict[str, int | None] = {}

    async def run(
        self,
        ask: ClientRequest,
        placement: Placement,
        span: Span,
        attempt: int,
        prefilled: OnPrefilled,
        gone: set[str],
    ) -> tuple[int, Answer]:
        """Run the request on all routes of `placement`. Returns the number of the route that
        answers first, and its answer, which has begun. Calls of engines are spans of `span`;
        `attempt` makes the engine's request id unique per retry. Adds the names of instances that
        are gone to `gone`. Raises EngineError, and what `prefilled` raises."""
        if placement.model:
            ask = engine_bodies.asked_of(ask, placement.model)
        calls = [
            self._route(
                ask, placement, route, span, _engine_id(ask, attempt, number), prefilled, gone
            )
            for number, route in enumerate(placement.routes)
        ]
        if len(calls) == 1:
            return 0, await calls[0]
        return await first(calls)

    async def _route(
        self,
        ask: ClientRequest,
        placement: Placement,
        route: InstanceRoute,
        span: Span,
        engine_id: str,
        prefilled: OnPrefilled,
        gone: set[str],
    ) -> Answer:
        answering = partial(self._answer, ask, placement, route, span, engine_id)
        try:
            fetched = placement.fetched if route is placement.routes[0] else None
            if not handed_over(ask, route):
                # Of a request that its decode instance computes whole, the other's node fetches.
                near = None if route.split or fetched is None else fetched
                return await answering(near and engine_bodies.being_fetched(near))
            handoff = self._config.model(ask.model).handoff
            if engine_bodies.stored_tokens(ask, handoff, route.prefill.block_tokens) == 0:
                await prefilled(route, None)  # there is no block to hand over
                return await answering(None)
            prefilling = self._prefill(ask, route, span, engine_id, handoff, fetched, prefilled)
            if handoff == "stream" and placement.layerwise:
                node = self._nodes.get(route.prefill.name)
                answer = answering(engine_bodies.beside_prefill(node))
                return await beside(prefilling, answer)
            told = await prefilling
            if isinstance(told, Whole):
                return told
            return await answering(engine_bodies.handed_on(told.kv_transfer_params, handoff))
        except (EngineGone, EngineSlow) as failure:
            self._breakers.failed(failure.target.name, self._clock())
            if isinstance(failure, EngineGone):
                gone.add(failure.target.name)
            raise

    async def _prefill(
        self,
        ask: ClientRequest,
        route: InstanceRoute,
        span: Span,
        engine_id: str,
        handoff: Handoff,
        fetched: tuple[int, float] | None,
        prefilled: OnPrefilled,
    ) -> Prefilled | Whole:
        """What the prefill instance told, or its refusal."""
        with span.call("prefill", **_instance(route.prefill)) as call:
            headers = {**call.headers, **_names(ask, engine_id)}
            told = await self._engines.prefill(route.prefill, ask, headers, handoff, fetched)
        self._breakers.succeeded(route.prefill.name)
        if not isinstance(told, Whole):
            if handoff == "stream":
                node = engine_bodies.writes_at(told.kv_transfer_params)
                self._nodes[route.prefill.name] = node
            await prefilled(route, told.usage)
        return told

    async def _answer(
        self,
        ask: ClientRequest,
        placement: Placement,
        route: InstanceRoute,
        span: Span,
        engine_id: str,
        transfer: dict[str, Raw] | None,
    ) -> Answer:
        limit, shards = placement.output_tokens_max, placement.shards
        response_id = new_id(route.decode.name) if ask.path == RESPONSES else ""
        body = engine_bodies.answer_body(
            ask, limit, transfer, shards, response_id, asks_usage=self._config.asks_usage
        )
        with span.call("first token", **_instance(route.decode)) as call:
            headers = {**call.headers, **_names(ask, engine_id)}
            answer = await self._engines.answer(route.decode, ask, body, headers)
        self._breakers.succeeded(route.decode.name)
        return answer


def _instance(target: CallTarget) -> dict[str, str]:
    """The attributes of a span that calls an instance."""
    return {"tiffin.instance": target.name, "server.address": target.url}


def handed_over(ask: ClientRequest, route: InstanceRoute) -> bool:
    """Whether the request is disaggregated: one instance prefills and another one decodes."""
    return route.split and not ask.whole


async def beside(
    prefilling: Coroutine[Any, Any, Prefilled | Whole],
    answering: Coroutine[Any, Any, Answer],
) -> Answer:
    """Run a prefill and the answer of the instance that takes its blocks meanwhile. Returns the
    answer, or the prefill's refusal. A prefill that fails ends the answer, which would wait for its
    blocks, unless that has begun. Raises what either raises."""
    prefill, answer = asyncio.ensure_future(prefilling), asyncio.ensure_future(answering)
    kept: Answer | None = None
    try:
        await asyncio.wait((prefill, answer), return_when=asyncio.FIRST_COMPLETED)
        if prefill.done() and not (answer.done() and answer.exception() is None):
            told = prefill.result()
            if isinstance(told, Whole):
                return told
        kept = await answer
        return kept
    finally:
        # A prefill that is behind its answer was not needed: the blocks were there.
        prefill.cancel()
        if kept is None:
            await _end([answer])
        await asyncio.gather(prefill, return_exceptions=True)


async def first(calls: Sequence[Awaitable[Answer]]) -> tuple[int, Answer]:
    """Race the calls. Returns the number of the call with the first good answer, and that answer;
    the other calls are cancelled. If no answer is good, the first answer of any status. Raises the
    last call's exception if no call gives an answer."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    kept: tuple[int, Answer] | None = None
    try:
        running = set(tasks)
        while running:
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=tasks.index):
                failure = task.exception()
                if failure is not None and not isinstance(failure, EngineError):
                    raise failure
                if failure is None and (kept is None or (task.result().good and not kept[1].good)):
                    kept = (tasks.index(task), task.result())
            if kept is not None and kept[1].good:
                return kept
        if kept is None:
            await tasks[-1]  # raises
        assert kept is not None
        return kept
    except BaseException:
        kept = None
        raise
    finally:
        await _end([task for number, task in enumerate(tasks) if kept is None or number != kept[0]])


async def _end(tasks: Sequence[asyncio.Future[Answer]]) -> None:
    for task in tasks:
        task.cancel()
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(outcome, AnswerStream | Whole):
            await outcome.close()


def _names(ask: ClientRequest, engine_id: str) -> dict[str, str]:
    """The headers that name a request to an engine, beside the type of its body: the id that it is
    to use, and the conductor's name, by which an engine that asks what is next is told (as in a
    URL: a tenant may be in any script)."""
    names = {"x-request-id": engine_id, REQUEST_HEADER: quote(ask.wishes.name)}
    return names | {"content-type": ask.content_type}


def _engine_id(ask: ClientRequest, attempt: int, number: int) -> str:
    """The request id for an engine. Engines refuse a duplicate id, and a cancelled attempt may
    still run there, so the id contains the attempt and the route. vLLM prepends the kind of the
    answer, which our id begins with already, so that prefix is removed."""
    extra = f"-{attempt}{'' if number == 0 else f'-{number}'}" if attempt or number else ""
    kind = ID_KINDS.get(ask.path, "")
    return ask.wishes.request_id.removeprefix(kind) + extra
