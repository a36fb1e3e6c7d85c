"""Runs a request where it was placed: one call, or prefill and then decode; several routes raced.

Whatever happens, an answer that is not used is closed, so that no engine goes on for nobody.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from . import bodies
from .asking import CHAT
from .engines import EngineError, EngineGone, Stream, Whole

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from msgspec import Raw

    from .asking import Ask
    from .config import GatewayConfig
    from .engines import Engines
    from .known import Route
    from .placing import Placement

    Answer = Stream | Whole
    # The prefill of a route is done. What it raises ends the request.
    Prefilled = Callable[[Route], Awaitable[None]]


class Running:
    """See the module."""

    def __init__(self, engines: Engines, config: GatewayConfig) -> None:
        self._engines, self._config = engines, config

    async def run(
        self,
        ask: Ask,
        placement: Placement,
        headers: Mapping[str, str],
        attempt: int,
        prefilled: Prefilled,
        gone: set[str],
    ) -> tuple[int, Answer]:
        """The route that answers first, by its number, and its answer, begun. `headers` go to the
        engines with it; `attempt` keeps apart what is sent for one request. Adds to `gone` the
        names of instances that are. Raises EngineError, and what `prefilled` raises."""
        calls = [
            self._route(
                ask, placement, route,
                {**headers, "x-request-id": _engine_id(ask, attempt, number)}, prefilled, gone,
            )
            for number, route in enumerate(placement.routes)
        ]  # fmt: skip
        if len(calls) == 1:
            return 0, await calls[0]
        return await first(calls)

    async def _route(
        self,
        ask: Ask,
        placement: Placement,
        route: Route,
        headers: Mapping[str, str],
        prefilled: Prefilled,
        gone: set[str],
    ) -> Answer:
        try:
            transfer: dict[str, Raw] | None = None
            if handed_over(ask, route):
                by_params = self._config.model(ask.model).handoff == "vllm"
                told = await self._engines.prefill(
                    route.prefill, ask, headers, remote_decode=by_params
                )
                if isinstance(told, Whole):
                    return told
                transfer = told if by_params else None
                await prefilled(route)
            limit, shards = placement.output_tokens_max, placement.shards
            body = bodies.answer_body(ask, limit, transfer, shards)
            return await self._engines.answer(route.decode, ask, body, headers)
        except EngineGone as failure:
            gone.add(failure.target.name)
            raise


def handed_over(ask: Ask, route: Route) -> bool:
    """Whether one instance computes the prompt, and another one answers."""
    return route.split and not ask.whole


async def first(calls: Sequence[Awaitable[Answer]]) -> tuple[int, Answer]:
    """The first good answer and the number of its call; the others are cancelled. If none is good,
    the first one that is an answer at all. Raises what the last call raised if there is none."""
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
        if isinstance(outcome, Stream | Whole):
            await outcome.close()


def _engine_id(ask: Ask, attempt: int, number: int) -> str:
    """Engines refuse an id twice, and an attempt that was cancelled may not have ended there. vLLM
    puts the kind of the answer before it, which ours has already."""
    extra = f"-{attempt}{'' if number == 0 else f'-{number}'}" if attempt or number else ""
    kind = "chatcmpl-" if ask.path == CHAT else "cmpl-"
    return (ask.wishes.request_id.removeprefix(kind) or kind) + extra
