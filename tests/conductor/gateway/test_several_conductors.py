"""A gateway with several conductors: events go to the conductor that has decided.

Here one core decides, with the address of a double, which records the events that it gets.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from gatewaysupport import Engine, cluster, run, serving, until

from tiffin.conductor.records import Role

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

PROMPT = {"prompt": "Who carries the lunch of Mumbai?"}


@asynccontextmanager
async def noting() -> AsyncIterator[tuple[str, list[str]]]:
    """The address of a double of a conductor, and the events that it got."""
    told: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert scope["path"] == "/v1/events"
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message["body"], message.get("more_body", False)
        events = json.loads(body)["events"]
        told.extend(event["event"] for event in events)
        answer = json.dumps({"taken": len(events), "failed": []}).encode()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": answer})

    async with serving(app) as url:
        yield url, told


def test_events_go_to_the_one_that_decided() -> None:
    async def scenario() -> None:
        engines = Engine("p0", Role.PREFILL), Engine("d0", Role.DECODE)
        async with noting() as (url, told), cluster(*engines) as it:
            it.core.address = url
            async with it.stream(PROMPT) as answer:
                assert answer.status_code == 200
                await answer.aread()
            await it.idle()
            assert set(told) - {"tokens"} == {"prefill_done", "first_token", "finished"}
            assert (told[0], told[-1]) == ("prefill_done", "finished")
            assert it.core.events == []

    run(scenario)


def test_one_that_is_gone_harms_no_answer() -> None:
    async def scenario() -> None:
        async with cluster(Engine("m0")) as it:
            async with noting() as (it.core.address, _):
                pass
            async with it.stream(PROMPT) as answer:
                assert answer.status_code == 200
                await answer.aread()
            await it.idle()
            # The event goes to the gateway's own conductor, which has decided here.
            assert it.core.kinds[-1] == "finished"
            assert len(it.core.ledger) == 0

    run(scenario)


def test_one_that_has_decided_before_another_is_told_that_its_decision_is_void() -> None:
    async def scenario() -> None:
        engines = Engine("m0", die_at=-1), Engine("m1", die_at=-1)
        async with (
            noting() as (first, told_first),
            noting() as (second, told_second),
            cluster(*engines) as it,
        ):
            it.core.address = first
            schedule, asked = it.core.schedule, asyncio.Event()

            def from_now_on_at_the_second(request: Any, now: float) -> Any:
                if asked.is_set():
                    it.core.address = second
                    for engine in engines:
                        engine.die_at = None
                asked.set()
                return schedule(request, now)

            it.core.schedule = from_now_on_at_the_second  # type: ignore[method-assign]
            answer = await it.post(PROMPT)
            assert answer.status_code == 200
            await it.idle()
            await until(lambda: told_first == ["cancelled"])
            assert told_second[-1] == "finished"

    run(scenario)
