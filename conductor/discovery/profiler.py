"""Measures a live engine's latency by its OpenAI API, with token ids, for a latency profile.

Prompts are random ids, so that no cache has them; a part that is to be cached was sent before, and
how much of it the engine found, it tells in `/metrics`. The engine should have nothing else to do.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Any

import msgspec

from ..client.http_session import HttpFailure, HttpSession
from ..errors import ConductorUnavailable, InvalidRequest
from .profile_ladder import (
    ANSWER_TOKENS,
    DecodeStep,
    DecodeWindow,
    Limits,
    PrefillStep,
    decode_steps,
    prefill_steps,
)

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from ..cost.profile_fit import Point
    from .engine_facts import EngineFacts
    from .engine_questions import EngineQuestions

# Ids that models reserve come first, or last.
_FIRST_ID, _LAST_ID, _IDS_MIN = 100, 32_000, 64
_ANSWER_BYTES_MAX = 1 << 20
_LINE_BYTES_MAX = 1 << 20


class Profiler:
    """Measures one engine. `say` gets a line of progress after each point. Every method raises
    ConductorUnavailable if the engine fails, InvalidRequest if it can't be measured."""

    def __init__(
        self,
        url: str,
        model: str,
        questions: EngineQuestions,
        http: HttpSession,
        say: Callable[[str], None],
        *,
        dice: random.Random,
        timeout_s: float,
    ) -> None:
        self._url, self._model, self._questions, self._http = url, model, questions, http
        self._say, self._dice, self._timeout_s = say, dice, timeout_s
        self._ids = (_FIRST_ID, _LAST_ID)

    async def check(self) -> None:
        """Whether the engine is idle, and which token ids it takes."""
        busy = (await self._questions.metrics(self._url)).running
        if busy:
            raise InvalidRequest(f"it has {busy} requests running: measure it while it is idle")
        first, last = self._ids
        while True:
            self._ids = (first, last)
            status, _ = await self._ask([last - 1] * 2)
            if status == 200:
                return
            last //= 2
            first = min(first, last // 4)
            if last < _IDS_MIN:
                raise InvalidRequest(f"/v1/completions answered {status} to prompts of token ids")

    async def prefill(self, limits: Limits, repeats: int) -> list[Point]:
        """(prompt tokens, cached tokens, seconds) of prompts one at a time."""
        steps = prefill_steps(limits)
        points: list[Point] = []
        caches = True
        for step in steps:
            if step.cached and not caches:
                continue
            await self._prefill(step)  # compiles, allocates
            for _ in range(repeats):
                point = await self._prefill(step)
                if step.cached and not point[1]:
                    self._say("it caches no prefixes: only whole prompts are measured")
                    caches = False
                    break
                points.append(point)
                self._say(
                    f"prefill of {point[0]:,} tokens, {point[1]:,} cached: {1e3 * point[2]:.1f} ms"
                )
        return points

    async def _prefill(self, step: PrefillStep) -> Point:
        start = self._prompt(step.cached)
        if step.cached:
            await self._answered([*start, *self._prompt(1)])
        before = await self._hits()
        prompt = [*start, *self._prompt(step.tokens - step.cached)]
        began_s = time.perf_counter()
        await self._answered(prompt)
        seconds = time.perf_counter() - began_s
        after = await self._hits()
        cached = step.cached if before is None or after is None else round(after - before)
        return step.tokens, min(cached, step.tokens - 1), seconds

    async def decode(self, limits: Limits, repeats: int) -> list[Point]:
        """(batch, context together, seconds of a step) of batches."""
        points: list[Point] = []
        too_many: int | None = None
        for step in decode_steps(limits):
            if too_many is not None and step.batch >= too_many:
                continue
            for _ in range(repeats):
                point = await self._decode(step)
                if point is None:
                    self._say(f"it does not run {step.batch} requests at a time: no larger batches")
                    too_many = step.batch
                    break
                points.append(point)
                self._say(
                    f"step of {point[0]} requests with {point[1]:,} tokens together: "
                    f"{1e3 * point[2]:.2f} ms"
                )
        return points

    async def _decode(self, step: DecodeStep) -> Point | None:
        window, done = DecodeWindow(step), asyncio.Event()

        async def follow(stream: int) -> None:
            body = {**self._body(self._prompt(step.context)), "max_tokens": ANSWER_TOKENS}
            body |= {"stream": True, "stream_options": _USAGE}
            async with contextlib.aclosing(self._events(body)) as events:
                async for tokens in events:
                    if window.arrived(stream, time.perf_counter(), tokens):
                        done.set()
            done.set()  # one has ended: the others are too late

        tasks = [asyncio.ensure_future(follow(at)) for at in range(step.batch)]
        ended = asyncio.ensure_future(done.wait())
        try:
            async with asyncio.timeout(self._timeout_s):
                await asyncio.wait((ended, *tasks), return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError as error:
            said = f"{step.batch} requests took longer than {self._timeout_s:g} s"
            raise ConductorUnavailable(said) from error
        finally:
            for task in (ended, *tasks):
                task.cancel()
            found = await asyncio.gather(*tasks, return_exceptions=True)
        for failure in found:
            if isinstance(failure, ConductorUnavailable):
                raise failure
        return window.point()

    # -- HTTP --------------------------------------------------------------------------------------

    def _prompt(self, tokens: int) -> list[int]:
        first, last = self._ids
        return [self._dice.randrange(first, last) for _ in range(tokens)]

    def _body(self, ids: list[int]) -> dict[str, Any]:
        return {
            "model": self._model,
            "prompt": ids,
            "max_tokens": 1,
            "temperature": 0,
            "ignore_eos": True,
        }

    async def _hits(self) -> float | None:
        return (await self._questions.metrics(self._url)).hit_tokens

    async def _answered(self, ids: list[int]) -> None:
        status, body = await self._ask(ids)
        if status != 200:
            raise ConductorUnavailable(
                f"/v1/completions answered {status}: {body[:300].decode('utf-8', 'replace')}"
            )

    async def _ask(self, ids: list[int]) -> tuple[int, bytes]:
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await self._http.send(
                    "POST", f"{self._url}/v1/completions", _encoded(self._body(ids)), _JSON
                )
                try:
                    return answer.status, await answer.read(_ANSWER_BYTES_MAX)
                finally:
                    answer.close()
        except HttpFailure as error:
            raise ConductorUnavailable(f"/v1/completions: {error}") from error
        except TimeoutError as error:
            raise ConductorUnavailable(
                f"/v1/completions: no answer in {self._timeout_s:g} s"
            ) from error

    async def _events(self, body: dict[str, Any]) -> Any:
        """The tokens of a stream so far, after each of its events with any."""
        answer = None
        try:
            answer = await self._http.send(
                "POST", f"{self._url}/v1/completions", _encoded(body), _JSON
            )
            if answer.status != 200:
                said = (await answer.read(_ANSWER_BYTES_MAX))[:300].decode("utf-8", "replace")
                raise ConductorUnavailable(f"/v1/completions answered {answer.status}: {said}")
            count, rest = 0, b""
            while piece := await answer.piece():
                *lines, rest = (rest + piece).split(b"\n")
                if len(rest) > _LINE_BYTES_MAX:
                    raise ConductorUnavailable("/v1/completions: a line without an end")
                for line in lines:
                    tokens = _tokens(line, count)
                    if tokens > count:
                        count = tokens
                        yield count
        except HttpFailure as error:
            raise ConductorUnavailable(f"/v1/completions: {error}") from error
        finally:
            if answer is not None:
                answer.close()


_JSON = {"content-type": "application/json"}
# vLLM then tells with each event how many tokens there are: it may send several in one.
_USAGE = {"include_usage": True, "continuous_usage_stats": True}
_encoder = msgspec.json.Encoder()


class _Usage(msgspec.Struct):
    completion_tokens: int = 0


class _Event(msgspec.Struct):
    choices: list[dict[str, Any]] = msgspec.field(default_factory=list)
    usage: _Usage | None = None


_event = msgspec.json.Decoder(_Event)


def _tokens(line: bytes, before: int) -> int:
    """The tokens so far after a line of a stream: as it says, else one more for each event."""
    data = line.removeprefix(b"data:").strip()
    if not line.startswith(b"data:") or data == b"[DONE]":
        return before
    try:
        event = _event.decode(data)
    except msgspec.DecodeError as error:
        raise ConductorUnavailable(f"/v1/completions: no event of a stream: {error}") from error
    if event.usage is not None and event.usage.completion_tokens:
        return event.usage.completion_tokens
    return before + bool(event.choices)


def _encoded(body: dict[str, Any]) -> bytes:
    return _encoder.encode(body)


def limits_of(
    facts: EngineFacts, tokens_max: int, batch_max: int, kv_capacity_tokens: int | None
) -> Limits:
    """What can be measured of an engine. Raises InvalidRequest, which names the option."""
    capacity = kv_capacity_tokens or facts.kv_capacity_tokens
    if not capacity:
        raise InvalidRequest(
            "it does not tell how much its KV cache holds: give the option kv_capacity_tokens"
        )
    longest = (
        tokens_max if facts.max_model_len is None else min(tokens_max, facts.max_model_len - 1)
    )
    return Limits(
        tokens_max=longest,
        kv_capacity_tokens=capacity,
        block_tokens=facts.block_tokens or 1,
        batch_max=min(batch_max, facts.batch_max or batch_max),
    )
