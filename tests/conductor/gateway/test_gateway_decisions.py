"""The gateway carries out decisions: requests that wait for other requests' blocks, contexts over
several instances; and keep-alive comments in slow streams."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
import pytest
from gatewaysupport import (
    CONFIG,
    MODEL,
    TIMES,
    Engine,
    Heard,
    changed,
    cluster,
    run,
    skip,
    until,
)

from tiffin.conductor.core.inflight_requests import RequestPhase
from tiffin.conductor.records import Decision, Rejection, Request, RequestEvent, Role
from tiffin.conductor.wire.models import DecisionReply
from tiffin.kvstore import KVSchema

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from gatewaysupport import Cluster

SPLIT = {"disaggregation": {"form": "remote"}}
PROMPT = "Where does the lunch of Mumbai come from, and who carries it?"
LONG_S = 60.0


def deciding(change: Callable[[Decision], dict[str, Any]]) -> type[Heard]:
    """A conductor whose decisions are changed by `change`."""

    class Changed(Heard):
        def schedule(self, request: Any, now: float) -> Any:
            decided = super().schedule(request, now)
            if isinstance(decided, Decision):
                return dataclasses.replace(decided, **change(decided))
            return decided

    return Changed


@asynccontextmanager
async def decided(
    change: Callable[[Decision], dict[str, Any]], *engines: Engine, **options: Any
) -> AsyncIterator[Cluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gatewaysupport.Heard", deciding(change))
        async with cluster(*engines, **options) as it:
            yield it


def ask(it: Cluster, name: str, *, stream: bool = True) -> asyncio.Task[Any]:
    headers = {"x-request-id": name}
    return asyncio.create_task(it.post({"prompt": PROMPT, "stream": stream}, headers=headers))


class TestPlacedAgain:
    """The conductor's new decision when the chosen instance is gone."""

    @asynccontextmanager
    async def pool(self, schedule: Callable[[Heard, Any, float], Any]) -> AsyncIterator[Cluster]:
        class Saying(Heard):
            def schedule(self, request: Any, now: float) -> Any:
                return schedule(self, request, now)

        engines = Engine("m0", die_at=-1), Engine("m1", die_at=-1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("gatewaysupport.Heard", Saying)
            async with cluster(*engines) as it:
                yield it

    def test_that_others_have_too_much_to_do(self) -> None:
        async def scenario() -> None:
            def schedule(core: Heard, request: Any, now: float) -> Any:
                if request.exclude:
                    return Rejection(request.id, "ttft", "too long a queue", retry_after_s=7.0)
                return Heard.schedule(core, request, now)

            async with self.pool(schedule) as it:
                response = await ask(it, "a")
                assert response.status_code == 429
                assert response.headers["retry-after"] == "7"

        run(scenario)

    def test_the_same_as_before(self) -> None:
        """The conductor avoids no instance, so trying again would change nothing."""

        async def scenario() -> None:
            def schedule(core: Heard, request: Any, now: float) -> Any:
                return Heard.schedule(core, dataclasses.replace(request, exclude=()), now)

            async with self.pool(schedule) as it:
                response = await ask(it, "a")
                assert response.status_code == 503
                assert response.json()["error"]["code"] == "no_instance"
                await it.idle()
                assert it.core.kinds == ["cancelled"]
                assert it.core.statistics()["in_flight"] == 0

        run(scenario)


def spread(decision: Decision) -> dict[str, Any]:
    return {"shards": (("d0", 4096), ("d1", 2048)), "decode": "d0"}


class TestContextsOverSeveralInstances:
    @asynccontextmanager
    async def pool(
        self, *able: str, **options: Any
    ) -> AsyncIterator[tuple[Cluster, Engine, Engine, Engine]]:
        """Two decode instances, of which the `able` ones can share a context."""
        engines = Engine("p0", Role.PREFILL), Engine("d0", Role.DECODE), Engine("d1", Role.DECODE)
        async with decided(spread, *engines, settings=SPLIT, **options) as it:
            for name in able:
                spec = dataclasses.replace(it.core.cluster.spec(name), labels={"kv_shards": "true"})
                it.core.register(spec, asyncio.get_running_loop().time())
            await it.gateway.refresh()
            yield it, *engines

    @pytest.mark.parametrize("stream", [True, False])
    def test_engines_that_can_are_told(self, stream: bool) -> None:
        async def scenario() -> None:
            async with self.pool("d0", "d1") as (it, prefill, decode, other):
                assert (await ask(it, "a", stream=stream)).status_code == 200
                (body,) = decode.completions
                assert body["kv_transfer_params"]["shards"] == [
                    {"instance": "d0", "url": decode.url, "tokens": 4096},
                    {"instance": "d1", "url": other.url, "tokens": 2048},
                ]
                assert body["kv_transfer_params"]["remote_block_ids"] == [7, 8], "and the others"
                assert "shards" not in prefill.completions[0]["kv_transfer_params"]

        run(scenario)

    def test_over_the_pool_too(self) -> None:
        async def scenario() -> None:
            default = msgspec.structs.replace(CONFIG.default, handoff="pool")
            config = changed(default=default)
            async with self.pool("d0", "d1", config=config) as (it, _, decode, _):
                assert (await ask(it, "a")).status_code == 200
                told = decode.completions[0]["kv_transfer_params"]
                assert list(told) == ["tiffin", "shards"], "and no address"

        run(scenario)

    def test_if_one_of_them_can_not_it_is_refused(self, caplog: pytest.LogCaptureFixture) -> None:
        """A single instance might lack room for the context, or be slower than promised."""

        async def scenario() -> None:
            async with self.pool("d0") as (it, prefill, decode, _):
                response = await ask(it, "a")
                assert response.status_code == 503
                assert response.json()["error"]["code"] == "misconfigured"
                assert prefill.completions == decode.completions == []
                await it.idle()
                assert it.core.kinds == ["cancelled"]

        with caplog.at_level(logging.ERROR, "tiffin.gateway"):
            run(scenario)
        assert "'d1'" in caplog.text
        assert "kv_shards" in caplog.text


def events_of(body: bytes) -> list[bytes]:
    return [part for part in body.split(b"\n\n") if part]


class TestLongWaits:
    """The conductor forgets a request after `decision_ttl_s` without events."""

    SETTINGS: ClassVar = {"core": {"decision_ttl_s": 4.5}}
    ALIVE_S = 1.5  # the interval of the gateway's reports

    @pytest.mark.parametrize("stream", [True, False])
    def test_one_that_waits_for_its_first_token_keeps_its_place(self, stream: bool) -> None:
        async def scenario() -> None:
            engine = Engine("p", Role.PREFILL)
            engine.compute.clear()
            other = Engine("d", Role.DECODE)
            async with cluster(engine, other, settings={**SPLIT, **self.SETTINGS}) as it:
                answer = ask(it, "a", stream=stream)
                await until(lambda: len(engine.completions) == 1)
                flight = it.core.ledger.get(it.core.asked[0].id)
                assert flight is not None
                decided_until = flight.decision.expires_at
                for told in (1, 2):
                    skip(self.ALIVE_S)
                    await until(lambda told=told: it.core.kinds.count("alive") >= told)
                assert it.core.tick(decided_until) == []
                assert set(it.core.kinds) == {"alive"}
                assert flight.phase is RequestPhase.PREFILL, "it waits still"
                engine.compute.set()
                assert (await answer).status_code == 200
                await it.idle()
                assert it.core.kinds[-1] == "finished"

        run(scenario)

    def test_one_that_is_asked_for_again_late_is_not_reported_all_the_time(self) -> None:
        async def scenario() -> None:
            async with cluster(Engine("m0"), settings=self.SETTINGS) as it:
                reply = await it.gateway._client.schedule(Request("x", "llama-3-8b", 100))
                assert isinstance(reply, DecisionReply)
                late = msgspec.structs.replace(reply, expires_in_s=0.0)
                placed = it.gateway.placing._usable(None, late, ())  # type: ignore[arg-type]
                assert placed.alive_s == 0.25
                it.core.observe(RequestEvent("x", "cancelled"), it.gateway.clock())

        run(scenario)


class TestStreamsThatTakeLong:
    """Bytes have to come every few seconds, or proxies end the connection."""

    CONFIG = changed(keepalive_s=0.02)

    def test_comments_until_the_first_token(self) -> None:
        async def scenario() -> None:
            engine = Engine("m0", hold_at=0)
            async with cluster(engine, config=self.CONFIG) as it:
                async with it.stream({"prompt": PROMPT}) as response:
                    assert response.status_code == 200
                    assert response.headers["content-type"].startswith("text/event-stream")
                    assert response.headers["cache-control"] == "no-store"
                    assert "x-request-id" in response.headers
                    assert "x-tiffin-decode" not in response.headers, "it may yet be another one"
                    body, chunks = b"", response.aiter_raw()
                    while body.count(b": waiting\n\n") < 3:
                        body += await anext(chunks)
                    engine.go.set()
                    body += b"".join([chunk async for chunk in chunks])
                comments = body.removesuffix(engine.sent)
                assert set(events_of(comments)) == {b": waiting"}
                await it.idle()
                assert it.core.kinds[-1] == "finished"
                assert it.number("requests_total") == 1
                assert it.number("broken_streams_total") == 0

        run(scenario)

    def test_never(self) -> None:
        async def scenario() -> None:
            engine = Engine("m0", hold_at=0)
            timeouts = msgspec.structs.replace(TIMES, first_token_s=0.2)
            config = changed(keepalive_s=0.0, timeouts=timeouts)
            async with cluster(engine, config=config) as it:
                assert (await ask(it, "a")).status_code == 504

        run(scenario)

    def test_answers_in_one_piece_have_none(self) -> None:
        async def scenario() -> None:
            engine = Engine("m0", hold_at=0)
            timeouts = msgspec.structs.replace(TIMES, total_s=0.2)
            config = changed(keepalive_s=0.02, timeouts=timeouts)
            async with cluster(engine, config=config) as it:
                assert (await ask(it, "a", stream=False)).status_code == 504

        run(scenario)

    def test_a_rejection_has_its_status_however_long_it_takes(self) -> None:
        async def scenario() -> None:
            async with cluster(Engine("m0"), config=self.CONFIG) as it:
                place = it.gateway.place

                async def slowly(*arguments: Any) -> Any:
                    await asyncio.sleep(0.2)
                    return await place(*arguments)

                it.gateway.place = slowly  # type: ignore[method-assign]
                headers = {"x-tiffin-ttft-ms": "0.001"}
                response = await it.post({"prompt": PROMPT, "stream": True}, headers=headers)
                assert response.status_code == 429

        run(scenario)

    def test_it_is_placed_again_all_the_same(self) -> None:
        async def scenario() -> None:
            engines = Engine("p0", Role.PREFILL), Engine("p1", Role.PREFILL)
            decode = Engine("d0", Role.DECODE)
            for engine in engines:
                engine.compute.clear()
            async with cluster(*engines, decode, settings=SPLIT, config=self.CONFIG) as it:
                async with it.stream({"prompt": PROMPT}) as response:
                    await until(lambda: any(engine.completions for engine in engines))
                    dead, alive = sorted(engines, key=lambda engine: not engine.completions)
                    dead.die_at = -1
                    dead.compute.set()
                    alive.compute.set()
                    body = await response.aread()
                assert body.endswith(decode.sent)
                assert it.number("rescheduled_total") == 1

        run(scenario)

    @pytest.mark.parametrize(
        ("odd", "code"),
        [
            (None, "engine_failed"),
            (("application/json", b'{"error":\n\n{"message": "no", "code": "odd"}}'), "odd"),
            (("text/html", b"<p>\n\nwelcome</p>"), "engine_failed"),
        ],
    )
    def test_what_goes_wrong_later_is_an_event(
        self, odd: tuple[str, bytes] | None, code: str
    ) -> None:
        async def scenario() -> None:
            prefill, decode = Engine("p0", Role.PREFILL), Engine("d0", Role.DECODE, odd=odd)
            prefill.compute.clear()
            config = msgspec.structs.replace(self.CONFIG, reschedules=0)
            async with cluster(prefill, decode, settings=SPLIT, config=config) as it:
                async with it.stream({"prompt": PROMPT}) as response:
                    assert response.status_code == 200
                    prefill.die_at = -1 if odd is None else None
                    prefill.compute.set()
                    *_, last = events_of(await response.aread())
                assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == code
                assert it.number("broken_streams_total") == 1
                await it.idle()
                assert it.core.kinds[-1] == "cancelled"

        run(scenario)

    def test_a_rejection_after_the_prefill_is_an_event(self) -> None:
        async def scenario() -> None:
            prefill, decode = Engine("p0", Role.PREFILL), Engine("d0", Role.DECODE)
            prefill.compute.clear()
            settings = {**SPLIT, "admission": {"mode": "baseline"}}
            headers = {"x-tiffin-tbt-ms": "0.001"}
            async with (
                cluster(prefill, decode, settings=settings, config=self.CONFIG) as it,
                it.stream({"prompt": PROMPT}, headers=headers) as response,
            ):
                prefill.compute.set()
                *_, last = events_of(await response.aread())
                error = json.loads(last.removeprefix(b"data: "))["error"]
                assert error["code"] == "rejected_tbt"
                assert error["tiffin"]["retry_after_s"] > 0

        run(scenario)

    def test_an_answer_that_takes_too_long(self) -> None:
        async def scenario() -> None:
            engine = Engine("m0", hold_at=0)
            timeouts = msgspec.structs.replace(TIMES, total_s=4.0)
            config = changed(keepalive_s=0.02, timeouts=timeouts)
            async with cluster(engine, config=config) as it:
                async with it.stream({"prompt": PROMPT}) as response:
                    chunks = response.aiter_raw()
                    body = await anext(chunks)
                    await until(lambda: bool(engine.completions))
                    skip(4.0)
                    body += b"".join([chunk async for chunk in chunks])
                *_, last = events_of(body)
                assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "timeout"
                await until(lambda: engine.aborted == 1)

        run(scenario)

    def test_the_client_hangs_up_while_it_waits(self) -> None:
        async def scenario() -> None:
            engine = Engine("m0", hold_at=0)
            async with cluster(engine, config=self.CONFIG) as it:
                async with it.stream({"prompt": PROMPT}) as response:
                    await anext(response.aiter_raw())
                await until(lambda: engine.aborted == 1)
                await it.idle()
                assert it.core.kinds[-1] == "cancelled"

        run(scenario)


def test_prefixes_find_their_blocks_with_no_configuration_at_all() -> None:
    """The conductor has the schema that an instance registered with, and makes the keys."""
    schema = KVSchema.gqa(
        model=MODEL, layers=2, kv_heads=2, head_dim=8, dtype="float16", block_tokens=16
    )

    async def scenario() -> None:
        async with cluster(Engine("m0")) as it:
            prompt = list(range(40))
            await it.post({"prompt": prompt})
            assert it.core.asked[-1].keys == ()
            spec = dataclasses.replace(it.core.cluster.spec("m0"), block_tokens=16)
            it.service.learn_schema(spec, schema)
            await it.gateway.refresh()
            await it.post({"prompt": prompt})
            assert it.core.asked[-1].keys == schema.prefix(prompt).keys

    run(scenario)
