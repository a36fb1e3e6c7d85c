"""Held requests over REST: what the decision says, waiting for the release, engines that ask."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from apisupport import MODEL, Recorder, spec_body
from serversupport import served

from tiffin.conductor.api.app import create_app
from tiffin.conductor.api.release_mailboxes import (
    LETTERS_MAX,
    MAILBOXES_MAX,
    ReleaseMailboxes,
)
from tiffin.conductor.api.release_waiters import ReleaseWaiters
from tiffin.conductor.client import AsyncConductorClient, ConductorClient
from tiffin.conductor.errors import InvalidRequest, UnknownInstance, UnknownRequest
from tiffin.conductor.records import InstanceSpec, Rejection, Request, RequestEvent, Role

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tiffin.conductor.api.conductor_service import Service

QUEUE = {"queue": {"ahead_max": 1, "ahead_s": 0.0, "waiting_max": 2}}


class Told:
    """A service with a clock that stands, told by REST."""

    def __init__(self) -> None:
        self.core, self.now_s = Recorder(), 0.0
        self.core.patch(QUEUE, 0.0)
        app = create_app(self.core, clock=lambda: self.now_s)
        self.service: Service = app.state.service
        self.http = httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://localhost"
        )

    async def call(self, method: str, path: str, body: Any = None) -> httpx.Response:
        return await self.http.request(method, path, json=body)

    async def register(self, name: str = "i", **changes: Any) -> None:
        await self.call("PUT", f"/v1/instances/{name}", spec_body(**changes))

    async def ask(self, name: str, priority: str = "normal", **more: Any) -> httpx.Response:
        body = {"request_id": name, "model": MODEL, "prompt_tokens": 4096, "priority": priority}
        return await self.call("POST", "/v1/schedule", {**body, **more})

    async def release(self, name: str, query: str = "") -> httpx.Response:
        return await self.call("GET", f"/v1/requests/{name}/release{query}")

    async def tell(self, name: str, kind: str) -> None:
        await self.call("POST", f"/v1/requests/{name}/{kind}")

    async def waits(self, name: str) -> asyncio.Task[httpx.Response]:
        """A call that waits for the release."""
        task = asyncio.create_task(self.release(name, "?wait_s=60"))
        async with asyncio.timeout(20):
            while not len(self.service._releases):  # noqa: ASYNC110 # it can't notify
                await asyncio.sleep(0.001)
        return task


async def told() -> Told:
    it = Told()
    await it.register()
    await it.ask("first")
    return it


def test_the_decision_says_whether_the_request_is_held() -> None:
    async def scenario() -> None:
        it = Told()
        await it.register()
        assert (await it.ask("a")).json()["held"] is None
        assert (await it.ask("b")).json()["held"]["place"] == 1
        held = (await it.ask("c")).json()["held"]
        assert held["place"] == 2
        assert held["release_s"] > (await it.ask("b")).json()["held"]["release_s"]
        assert (await it.ask("h", "high")).json()["held"]["place"] == 1
        assert (await it.release("a")).json()["state"] == "released"

    asyncio.run(scenario())


def test_a_call_waits_until_the_release() -> None:
    async def scenario() -> None:
        it = await told()
        await it.ask("b")
        assert (await it.release("b")).json()["state"] == "held"
        waiting = await it.waits("b")
        await it.tell("first", "prefill_done")
        released = (await waiting).json()
        assert released["state"] == "released"
        assert released["first_token_s"] > 0
        assert not len(it.service._releases)

    asyncio.run(scenario())


def test_who_asks_after_a_request_keeps_it_alive() -> None:
    async def scenario() -> None:
        it = await told()
        await it.ask("b")
        for it.now_s in (100.0, 200.0, 300.0):
            await it.tell("first", "alive")
            assert (await it.release("b")).json()["state"] == "held"
            assert it.core.ledger.expired(it.now_s) == []
        assert it.core.ledger.get("b") is not None

    asyncio.run(scenario())


def test_one_that_had_to_leave_a_full_queue_is_rejected_while_it_waits_and_after() -> None:
    async def scenario() -> None:
        it = await told()
        await it.ask("l1", "low")
        await it.ask("l2", "low")
        waiting = await it.waits("l2")
        assert (await it.ask("h", "high")).status_code == 200
        for answer in (await waiting, await it.release("l2")):
            assert answer.status_code == 429
            assert answer.headers["x-tiffin-reject-reason"] == "preempted"

    asyncio.run(scenario())


@pytest.mark.slow
@pytest.mark.parametrize("how", ["drain", "remove"])
def test_one_whose_instance_gets_nothing_new_is_to_be_decided_anew(how: str) -> None:
    async def scenario() -> None:
        it = await told()
        await it.ask("b")
        await it.register("j")
        waiting = await it.waits("b")
        query = "?now=true" if how == "remove" else ""
        await it.call("DELETE", f"/v1/instances/i{query}")
        it.service.tick()
        assert (await waiting).json()["state"] == "moved"
        again = (await it.ask("b")).json()
        assert (again["prefill"], again["held"]) == ("j", None)

    asyncio.run(scenario())


def test_one_that_ended_or_never_was_is_not_known() -> None:
    async def scenario() -> None:
        it = await told()
        await it.ask("b")
        await it.tell("b", "cancelled")
        for name in ("b", "never"):
            assert (await it.release(name)).status_code == 404
        for wait_s in ("-1", "61", "soon", "nan"):
            assert (await it.release("first", f"?wait_s={wait_s}")).status_code == 400
        await it.ask("b", tenant="acme")
        assert (await it.release("b", "?tenant=acme")).json()["state"] == "held"

    asyncio.run(scenario())


def test_a_service_that_stops_lets_nobody_wait() -> None:
    async def scenario() -> None:
        it = await told()
        await it.ask("b")
        waiting = await it.waits("b")
        it.service.stop()
        assert (await waiting).json()["state"] == "held"
        assert (await it.release("b", "?wait_s=60")).json()["state"] == "held"

    asyncio.run(scenario())


def test_several_calls_may_wait_for_one_request() -> None:
    async def scenario() -> None:
        waiters = ReleaseWaiters()
        calls = [asyncio.create_task(waiters.wait("a", 60.0)) for _ in range(2)]
        calls.append(asyncio.create_task(waiters.wait("b", 0.001)))
        await asyncio.sleep(0)
        waiters.wake(["a", "nobody"])
        await asyncio.gather(*calls)
        assert not len(waiters)

    asyncio.run(scenario())


class TestMailboxes:
    """One call waits for all held requests of a client."""

    @staticmethod
    async def taken(it: Told, waiter: str = "w", wait_s: float = 0.0) -> list[dict[str, Any]]:
        answer = await it.call("POST", f"/v1/releases/{waiter}?wait_s={wait_s:g}")
        assert answer.status_code == 200, answer.text
        found: list[dict[str, Any]] = answer.json()["releases"]
        return found

    def test_has_what_was_released_since_the_last_call_each_once(self) -> None:
        async def scenario() -> None:
            it = await told()
            assert (await it.ask("a", waiter="w")).json()["held"]
            assert (await it.ask("c", "high", waiter="another")).json()["held"]
            assert await self.taken(it) == []
            await it.tell("first", "finished")
            (found,) = await self.taken(it, "another")
            assert (found["request_id"], found["status"]) == ("c", 200)
            await it.tell("c", "finished")
            (found,) = await self.taken(it)
            assert found["request_id"] == "a"
            assert found["release"]["state"] == "released"
            assert found["release"]["first_token_s"] > 0.0
            assert await self.taken(it) == []

        asyncio.run(scenario())

    def test_a_call_waits_for_the_first(self) -> None:
        async def scenario() -> None:
            it = await told()
            waiting = asyncio.create_task(self.taken(it, wait_s=60.0))
            await it.ask("a", tenant="t/1", waiter="w")
            assert not waiting.done()
            await it.tell("first", "finished")
            (found,) = await waiting
            assert (found["tenant"], found["request_id"]) == ("t/1", "a")

        asyncio.run(scenario())

    def test_has_those_that_had_to_leave_a_full_queue(self) -> None:
        async def scenario() -> None:
            it = await told()
            for name in ("a", "b"):
                await it.ask(name, "low", waiter="w")
            await it.ask("c", "high")
            (found,) = await self.taken(it)
            assert (found["request_id"], found["status"], found["release"]) == ("b", 429, None)
            assert found["error"]["tiffin"]["reason"] == "preempted"

        asyncio.run(scenario())

    def test_has_none_that_ended_meanwhile(self) -> None:
        async def scenario() -> None:
            it = await told()
            await it.ask("a", waiter="w")
            await it.tell("first", "finished")
            await it.tell("a", "cancelled")
            assert await self.taken(it) == []

        asyncio.run(scenario())

    def test_a_service_that_stops_lets_nobody_wait(self) -> None:
        async def scenario() -> None:
            it = await told()
            waiting = asyncio.create_task(self.taken(it, wait_s=60.0))
            await asyncio.sleep(0.01)
            it.service.stop()
            assert await waiting == []

        asyncio.run(scenario())

    def test_a_name_that_is_none_is_refused(self) -> None:
        async def scenario() -> None:
            it = Told()
            for path in ("x" * 300, "w?wait_s=61", "w?wait_s=x"):
                answer = await it.call("POST", f"/v1/releases/{path}")
                assert answer.status_code == 400, path

        asyncio.run(scenario())

    def test_their_memory_is_bounded(self) -> None:
        """Requests that end while they are held, names that nobody takes, clients that vanish."""
        held = {"held"}
        it = ReleaseMailboxes(held.__contains__)
        it.expect("held", "w")
        for number in range(20_000):
            it.expect(f"ended-{number}", "w")
        assert len(it) < 3000
        for number in range(LETTERS_MAX + 10):
            it.expect(f"n{number}", "w")
            it.put([f"n{number}"])
        for number in range(2 * MAILBOXES_MAX):
            it.expect(f"m{number}", f"w{number}")
            it.put([f"m{number}"])
        assert len(it._mailboxes) == MAILBOXES_MAX

        async def scenario() -> None:
            it.expect("held", "w")
            it.put(["held"])
            assert await it.take("w", 0.0) == ["held"]

        asyncio.run(scenario())


def test_an_engine_asks_what_is_next() -> None:
    async def scenario() -> None:
        it = Told()
        await it.register(labels={"pulls": "true"})
        for name, priority in (("a", "low"), ("b", "low"), ("h", "high")):
            assert (await it.ask(name, priority, tenant="acme")).json()["held"] is None
        path = "/v1/instances/i/next"
        first = (await it.call("POST", path, {"n": 2})).json()["requests"]
        assert first == [{"request_id": name, "tenant": "acme"} for name in ("a", "h")]
        assert (await it.call("POST", path)).json()["requests"][0]["request_id"] == "b"
        assert (await it.call("POST", path)).json()["requests"] == []
        assert (await it.call("POST", "/v1/instances/none/next")).status_code == 404

    asyncio.run(scenario())


# -- the clients -----------------------------------------------------------------------------------


def prompt(name: str, priority: str = "low") -> Request:
    return Request(name, MODEL, 100_000, priority=priority)


@pytest.fixture
def url() -> Iterator[str]:
    core = Recorder()
    core.patch(QUEUE, 0.0)
    with served(core) as url, ConductorClient(url) as client:
        client.register(InstanceSpec("i", MODEL, Role.MIXED, "test"))
        for name in ("first", "l1", "l2"):
            client.schedule(prompt(name))
        yield url


def test_a_blocking_client_waits_for_a_release(url: str) -> None:
    with ConductorClient(url, timeout_s=5.0) as client:
        waits = client.release("l1", wait_s=0.01)
        assert not isinstance(waits, Rejection)
        assert waits.state == "held"
        client.observe(RequestEvent("first", "prefill_done"))
        now = client.release("l1", wait_s=10.0)
        assert not isinstance(now, Rejection)
        assert now.state == "released"
        with pytest.raises(UnknownRequest):
            client.release("never")
        with pytest.raises(InvalidRequest):
            client.release("l1", wait_s=61.0)
        assert [one.request_id for one in client.next_prefills("i", 8)] == ["l1", "l2"]
        with pytest.raises(UnknownInstance):
            client.next_prefills("j")


def test_calls_of_an_async_client_wait_for_longer_than_its_timeout(url: str) -> None:
    async def scenario() -> None:
        async with AsyncConductorClient(url, timeout_s=5.0) as client:
            rejected = asyncio.create_task(client.release("l2", wait_s=30.0))
            others = [asyncio.create_task(client.release("l1", wait_s=30.0)) for _ in range(120)]
            await client.schedule(prompt("high", "high"))
            found = await rejected
            assert isinstance(found, Rejection)
            assert found.reason == "preempted"
            for name in ("first", "high"):
                await client.observe(RequestEvent(name, "prefill_done"))
            states = {getattr(one, "state", "") for one in await asyncio.gather(*others)}
            assert states == {"released"}

    asyncio.run(scenario())
