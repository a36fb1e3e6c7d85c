"""Runs a request on its placement: one call, or prefill and then decode; or several routes raced.

Every answer that is not used is closed, also after errors, so that no engine keeps computing for a
request that has ended.
"""

from __future__ import annotations

import asyncio
import hashlib
from typing import TYPE_CHECKING

from ..engines.engine_client import AnswerStream, EngineError, EngineGone, Whole
from ..openai import engine_bodies
from ..openai.openai_request import CHAT

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from msgspec import Raw

    from ...web.tracing import Span
    from ..config import GatewayConfig
    from ..engines.engine_client import Engines
    from ..engines.instance_cache import CallTarget, InstanceRoute
    from ..openai.openai_request import ClientRequest
    from .placement import Placement

    Answer = AnswerStream | Whole
    # Callback: the prefill of a route is done. An exception from it ends the request.
    Prefilled = Callable[[InstanceRoute], Awaitable[None]]


class Running:
    """Runs requests on the instances; see the module."""

    def __init__(self, engines: Engines, config: GatewayConfig) -> None:
        self._engines, self._config = engines, config

    async def run(
        self,
        ask: ClientRequest,
        placement: Placement,
        span: Span,
        attempt: int,
        prefilled: Prefilled,
        gone: set[str],
    ) -> tuple[int, Answer]:
        """Run the request on all routes of `placement`. Returns the number of the route that
        answers first, and its answer, which has begun. Calls of engines are spans of `span`;
        `attempt` makes the engine's request id unique per retry. Adds the names of instances that
        are gone to `gone`. Raises EngineError, and what `prefilled` raises."""
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
        prefilled: Prefilled,
        gone: set[str],
    ) -> Answer:
        own_id = {"x-request-id": engine_id}
        try:
            transfer: dict[str, Raw] | None = None
            if handed_over(ask, route):
                handoff = self._config.model(ask.model).handoff
                with span.call("prefill", **_instance(route.prefill)) as call:
                    told = await self._engines.prefill(
                        route.prefill, ask, {**call.headers, **own_id}, handoff
                    )
                if isinstance(told, Whole):
                    return told
                transfer = engine_bodies.handed_on(told, handoff)
                await prefilled(route)
            limit, shards = placement.output_tokens_max, placement.shards
            body = engine_bodies.answer_body(ask, limit, transfer, shards)
            with span.call("first token", **_instance(route.decode)) as call:
                headers = {**call.headers, **own_id}
                return await self._engines.answer(route.decode, ask, body, headers)
        except EngineGone as failure:
            gone.add(failure.target.name)
            raise


def _instance(target: CallTarget) -> dict[str, str]:
    """The attributes of a span that calls an instance."""
    return {"tiffin.instance": target.name, "server.address": target.url}


def handed_over(ask: ClientRequest, route: InstanceRoute) -> bool:
    """Whether the request is disaggregated: one instance prefills and another one decodes."""
    return route.split and not ask.whole


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


def _engine_id(ask: ClientRequest, attempt: int, number: int) -> str:
    """The request id for an engine. Engines refuse a duplicate id, and a cancelled attempt may
    still run there, so the id contains the attempt and the route. Engines have no tenants, and
    several tenants may use the same id, so an id chosen by the client gets a hash of its tenant.
    vLLM prepends the kind of the answer, which our id begins with already, so that prefix is
    removed."""
    wishes, whose = ask.wishes, ""
    if wishes.chosen and wishes.tenant:
        whose = f"-{hashlib.sha256(wishes.tenant.encode()).hexdigest()[:16]}"
    extra = f"-{attempt}{'' if number == 0 else f'-{number}'}" if attempt or number else ""
    kind = "chatcmpl-" if ask.path == CHAT else "cmpl-"
    return (wishes.request_id.removeprefix(kind) or kind) + whose + extra
