"""Both clients (blocking, asyncio) against a service on a port: same verbs, same errors, safe
retries."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from apisupport import KEY, MODEL, Recorder, profile
from directory.ports import free_port
from msgspec import structs
from serversupport import served, wait_for_follower

from tiffin.conductor.client import AsyncConductorClient, ConductorClient, calls
from tiffin.conductor.client.client import _url
from tiffin.conductor.errors import (
    ConductorLate,
    ConductorUnavailable,
    Conflict,
    InvalidRequest,
    NotAuthorized,
    UnknownInstance,
    UnknownModel,
    UnknownNode,
    UnknownRequest,
)
from tiffin.conductor.pool.orders import NodeSpace
from tiffin.conductor.records import (
    InstanceSpec,
    Load,
    Objectives,
    Rejection,
    Request,
    RequestEvent,
    Role,
)
from tiffin.conductor.replicas.replica import SharedConductor
from tiffin.conductor.web.auth import load_tokens
from tiffin.conductor.wire.event_batch import EVENTS_MAX
from tiffin.conductor.wire.models import DecisionReply
from tiffin.kvstore import KVSchema

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SCHEMA = KVSchema.gqa(
    model=MODEL, layers=2, kv_heads=2, head_dim=8, dtype="float16", block_tokens=16
)
SPEC = InstanceSpec("i 1?", MODEL, Role.MIXED, "test", url="http://localhost:1", block_tokens=16)
REQUEST = Request("r/1".replace("/", "-"), MODEL, 40, (KEY, KEY[::-1]), Objectives(60.0, 1.0))


@pytest.fixture(scope="module")
def service() -> Iterator[tuple[Recorder, str]]:
    core = Recorder()
    with served(core) as url:
        yield core, url


class Both:
    """Calls verbs of either client; runs coroutines."""

    def __init__(self, kind: str, url: str, **options: Any) -> None:
        self.kind, self.url, self.options = kind, url, options

    def __getattr__(self, verb: str) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            if self.kind == "blocking":
                with ConductorClient(self.url, **self.options) as client:
                    return getattr(client, verb)(*arguments, **named)

            async def run() -> Any:
                async with AsyncConductorClient(self.url, **self.options) as client:
                    return await getattr(client, verb)(*arguments, **named)

            return asyncio.run(run())

        return call


@pytest.fixture(params=["blocking", "asyncio"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def client(kind: str, service: tuple[Recorder, str]) -> Both:
    core, url = service
    core.reject = None
    for name in list(core.cluster.names):
        core.remove(name, 0.0)
    for flight in list(core.ledger):
        core.observe(RequestEvent(flight.request.id, "cancelled"), flight.decided_at)
    return Both(kind, url)


def test_a_request_from_schedule_to_its_end(client: Both, service: tuple[Recorder, str]) -> None:
    core, _ = service
    client.register(SPEC, Load(running=2))
    decision = client.schedule(REQUEST)
    assert isinstance(decision, DecisionReply)
    assert (decision.prefill, decision.prefill_url) == (SPEC.id, SPEC.url)
    assert core.requests[REQUEST.id] == REQUEST
    elsewhere = replace(REQUEST, id="r-2", exclude=("gone",))
    client.schedule(elsewhere)
    assert core.requests["r-2"] == elsewhere
    assert client.schedule(REQUEST).prefill == decision.prefill
    raced = RequestEvent(REQUEST.id, "first_token", route=("i 1?", "another"))
    assert client.observe(raced) is None
    client.observe(RequestEvent(REQUEST.id, "tokens", 4))
    client.observe(RequestEvent(REQUEST.id, "finished"))
    assert core.events[-2] == RequestEvent(REQUEST.id, "tokens", 4)
    assert core.events[-3] == raced
    with pytest.raises(UnknownRequest):
        client.observe(RequestEvent(REQUEST.id, "finished"))


def test_events_in_batches(client: Both, service: tuple[Recorder, str]) -> None:
    core, _ = service
    client.register(SPEC)
    for name in ("b-1", "b-2"):
        client.schedule(replace(REQUEST, id=name))
    told = [
        RequestEvent("b-1", "first_token", route=("i 1?", "another")),
        RequestEvent("unheard-of", "finished"),
        RequestEvent("b-1", "tokens", total_tokens=9),
        RequestEvent("b-2", "tokens", 4),
        RequestEvent("b-1", "finished"),
        RequestEvent("b-2", "finished"),
    ]
    assert client.observe_many([]) == []
    taken, unknown, *more = client.observe_many(told)
    assert (taken, more) == (None, [None] * 4)
    assert isinstance(unknown, UnknownRequest)
    assert core.events[-5:] == [
        told[0], RequestEvent("b-1", "tokens", 8), *told[3:],
    ]  # fmt: skip


@pytest.mark.slow
def test_a_batch_goes_to_the_conductors_that_decided(client: Both, kind: str) -> None:
    """One that has gone took with it what its events were about; other errors are told."""
    with served(Recorder()) as there, socket.create_server(("127.0.0.1", 0)) as silent:
        gone = f"http://127.0.0.1:{free_port()}"
        deaf = f"http://127.0.0.1:{silent.getsockname()[1]}"
        other = Both(kind, there)
        other.register(SPEC)
        other.schedule(replace(REQUEST, id="elsewhere"))
        hasty = Both(kind, client.url, timeout_s=0.2)
        results = hasty.observe_many(
            [
                RequestEvent("elsewhere", "finished", conductor=gone),
                RequestEvent("elsewhere", "finished", conductor=there),
                RequestEvent("elsewhere", "finished", conductor=there),
                RequestEvent("elsewhere", "finished"),
                RequestEvent("elsewhere", "finished", conductor=deaf),
            ]
        )
        assert results[:3] == [None, None, None]
        assert [type(one) for one in results[3:]] == [UnknownRequest, ConductorLate]


def test_more_events_than_a_batch_has(client: Both) -> None:
    results = client.observe_many([RequestEvent("nobody", "alive")] * (EVENTS_MAX + 3))
    assert len(results) == EVENTS_MAX + 3
    assert {type(one) for one in results} == {UnknownRequest}


def test_a_prompt_by_its_tokens(client: Both, service: tuple[Recorder, str]) -> None:
    client.register(SPEC, schema=SCHEMA)
    tokens = list(range(40))
    client.schedule(Request("t", MODEL, 40), token_ids=tokens, namespace="acme")
    assert service[0].requests["t"].keys == SCHEMA.prefix(tokens, "acme").keys


def test_a_rejection_is_an_answer(client: Both, service: tuple[Recorder, str]) -> None:
    client.register(SPEC)
    wanted = Rejection(REQUEST.id, "tbt", "too slow", 1.0, 0.5, 2.5, {"batch": 7.0})
    service[0].reject = wanted
    assert client.schedule(REQUEST) == wanted
    service[0].reject = Rejection("", "no_decode", "nobody decodes")
    assert client.schedule(REQUEST).reason == "no_decode"


def test_instances(client: Both) -> None:
    with pytest.raises(UnknownInstance):
        client.heartbeat(SPEC.id, Load())
    client.register(SPEC)
    client.heartbeat(SPEC.id, Load(running=3))
    client.drain(SPEC.id)
    one = client.instance(SPEC.id)
    assert (one.role, one.status, one.load["batch"]) == ("mixed", "draining", 3.0)
    with pytest.raises(Conflict):
        client.flip(SPEC.id, Role.DECODE)
    assert [found.id for found in client.instances()] == [SPEC.id]
    client.remove(SPEC.id)
    assert client.instances() == []


def test_looking(client: Both, service: tuple[Recorder, str]) -> None:
    core, _ = service
    assert client.ready().status == "not ready"
    client.register(SPEC)
    assert client.ready().reasons == []
    core.hold("node-a", "dram", [KEY], 0.0)
    client.schedule(REQUEST)
    matched = client.match([KEY])
    assert (matched.blocks, matched.holders[0].blocks) == (1, 1)
    assert client.hot(0) == []
    assert client.why(REQUEST.id).prefill == SPEC.id
    assert client.decisions(1, instance=SPEC.id)[0].request_id == REQUEST.id
    with pytest.raises(UnknownRequest):
        client.why("another")


def test_looking_at_the_pool(client: Both, service: tuple[Recorder, str]) -> None:
    core, _ = service
    client.register(SPEC)
    client.schedule(REQUEST)
    client.drain(SPEC.id)
    drains = {one.name: one for one in client.drains()}
    assert (drains[SPEC.id].kind, drains[SPEC.id].phase) == ("instance", "waiting")
    found = client.plans()
    assert (found.leads, found.leader) == (True, "")
    assert {one.model for one in found.plans} == set(core.steering.plans())


def test_a_node_is_drained_and_opened_again(
    client: Both, service: tuple[Recorder, str], kind: str
) -> None:
    core, _ = service
    core.steering.tick({f"n-{kind} 1?": NodeSpace(f"n-{kind} 1?", 1 << 30, 1 << 29)}, 0.0)
    for asked in (client.drain_node, client.undrain_node):
        with pytest.raises(UnknownNode):
            asked("another")
    drain = client.drain_node(f"n-{kind} 1?", deadline_s=60.0)
    assert (drain.kind, drain.phase) == ("node", "closing")
    assert 50 < drain.left_s < 60.001
    assert client.drain_node(f"n-{kind} 1?").left_s <= 60
    assert client.undrain_node(f"n-{kind} 1?").phase == "cancelled"
    with pytest.raises(Conflict):
        client.drain_node(f"n-{kind} 1?")


class TestSeveralConductors:
    """The client's own conductor is `service`; another one decides."""

    @pytest.fixture
    def other(self) -> Iterator[SharedConductor]:
        core = SharedConductor("other", profile=profile)
        core.register(SPEC, time.monotonic())
        with served(core) as core.address:
            yield core

    def test_events_go_to_the_one_that_decided(self, client: Both, other: SharedConductor) -> None:
        placed = Both(client.kind, other.address).schedule(REQUEST)
        assert placed.conductor == other.address
        for kind in ("first_token", "tokens", "finished"):
            assert len(other.ledger) == 1
            event = RequestEvent(REQUEST.id, kind, 3 * (kind == "tokens"))
            with pytest.raises(UnknownRequest):
                client.observe(event)
            client.observe(structs.replace(event, conductor=placed.conductor))
        assert len(other.ledger) == 0
        client.observe(RequestEvent(REQUEST.id, "finished", conductor=placed.conductor))

    def test_one_that_is_gone_is_no_error(
        self, client: Both, service: tuple[Recorder, str]
    ) -> None:
        gone = f"http://127.0.0.1:{free_port()}"
        for kind in ("alive", "tokens", "finished"):
            client.observe(RequestEvent("nobodys", kind, conductor=gone))
            Both(client.kind, client.url, retries=0).observe(
                RequestEvent("nobodys", kind, conductor=gone)
            )
        client.register(SPEC)
        assert client.schedule(replace(REQUEST, id="anew")).conductor == ""
        client.observe(RequestEvent("anew", "cancelled", conductor=gone))
        assert service[0].ledger.get("anew") is not None, "it is not this decision that is void"
        client.observe(RequestEvent("anew", "finished", conductor=gone))
        assert service[0].ledger.get("anew") is None, "decided anew by the client's own"

    def test_a_token_is_sent_to_no_one_without_tls_by_one_that_has_it(self) -> None:
        event = calls.observe(RequestEvent("r", "finished", conductor="http://10.0.0.9:7800/"))
        own = "https://10.0.0.8:7800"
        assert _url(own, event, 0) == _url(own, event, 1) == own + event.path
        assert _url("http://a", event, 0) == f"http://10.0.0.9:7800{event.path}"
        secure = replace(event, at="https://b:1")
        assert _url(own, secure, 0) == f"https://b:1{event.path}"


def test_settings(client: Both) -> None:
    changed = client.patch({"core": {"log_max": 77}})
    assert changed == client.settings()
    assert changed["core"]["log_max"] == 77
    with pytest.raises(InvalidRequest, match="log_max"):
        client.patch({"core": {"log_max": -1}})


def test_errors_come_back_as_what_they_were(client: Both) -> None:
    with pytest.raises(UnknownModel):
        client.schedule(Request("r", "another", 1))
    client.register(SPEC)
    client.schedule(REQUEST)
    with pytest.raises(Conflict):
        client.schedule(Request(REQUEST.id, MODEL, 39))
    for name in ("", ".", "..", "a/b", "\ud800"):
        with pytest.raises(InvalidRequest):
            client.instance(name)


def test_tokens_are_sent(kind: str, tmp_path: Path) -> None:
    paths = {}
    for name, text in {"known": "a" * 32, "other": "b" * 32, "line": f"read {'a' * 32}"}.items():
        paths[name] = tmp_path / name
        paths[name].write_text(text)
        paths[name].chmod(0o600)
    with served(Recorder(), load_tokens(paths["known"])) as url:
        assert Both(kind, url, token_file=paths["known"]).instances() == []
        for options in ({}, {"token_file": paths["other"]}):
            with pytest.raises(NotAuthorized):
                Both(kind, url, **options).instances()
        with pytest.raises(InvalidRequest, match="more than a token"):
            Both(kind, url, token_file=paths["line"]).instances()


@pytest.mark.parametrize("url", ["", "localhost:1", "ftp://h", "http://", "http://u:p@h", "a\0"])
def test_what_is_no_url_is_said(kind: str, url: str) -> None:
    with pytest.raises(InvalidRequest):
        Both(kind, url).instances()


def test_nobody_there(kind: str) -> None:
    with pytest.raises(ConductorUnavailable, match="no answer"):
        Both(kind, f"http://127.0.0.1:{free_port()}", retries=1).instances()


class Flaky:
    """Closes the first connections after reading their requests, then answers `answer`, each time
    after `late_s`."""

    def __init__(self, hang_up: int, answer: bytes, late_s: float = 0.0) -> None:
        self._left, self._answer, self._late_s = hang_up, answer, late_s
        self.requests: list[bytes] = []
        self._door = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._door.getsockname()[1]}"
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while True:
            connection, _ = self._door.accept()
            with connection:
                request = connection.recv(65536)
                if not request:
                    return
                self.requests.append(request)
                if self._left:
                    self._left -= 1
                    continue
                time.sleep(self._late_s)
                connection.sendall(self._answer)

    def __enter__(self) -> Flaky:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        socket.create_connection(self._door.getsockname()).close()
        self._thread.join()
        self._door.close()


def answer(status: str, body: bytes = b"") -> bytes:
    head = f"HTTP/1.1 {status}\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


class TestRepetition:
    def test_a_lost_answer_is_asked_for_again(self, kind: str) -> None:
        with Flaky(2, answer("200 OK", b'{"instances": []}')) as flaky:
            assert Both(kind, flaky.url).instances() == []
            assert len(flaky.requests) == 3

    def test_but_not_for_ever(self, kind: str) -> None:
        with Flaky(9, b"") as flaky:
            with pytest.raises(ConductorUnavailable):
                Both(kind, flaky.url, retries=1).instances()
            assert len(flaky.requests) == 2

    def test_tokens_that_may_have_been_counted_are_not_sent_again(self, kind: str) -> None:
        with Flaky(1, answer("204 No Content")) as flaky:
            with pytest.raises(ConductorUnavailable):
                Both(kind, flaky.url).observe(RequestEvent("r", "tokens", 5))
            assert len(flaky.requests) == 1

    @pytest.mark.parametrize(("tokens", "calls"), [({"tokens": 5}, 1), ({"total_tokens": 5}, 2)])
    def test_a_batch_is_repeated_if_its_tokens_are_totals(
        self, kind: str, tokens: dict[str, int], calls: int
    ) -> None:
        events = [RequestEvent("r", "alive"), RequestEvent("r", "tokens", **tokens)]
        with Flaky(1, answer("200 OK", b'{"taken": 2, "failed": []}')) as flaky:
            results = Both(kind, flaky.url).observe_many(events)
            assert len(flaky.requests) == calls
        assert (results == [None, None]) == (calls == 2)

    def test_a_batch_may_wait_for_its_turn(self, kind: str) -> None:
        """Given up, a busy conductor would have it twice."""
        late = Flaky(0, answer("200 OK", b'{"taken": 1, "failed": []}'), late_s=0.5)
        with late as conductor:
            events = [RequestEvent("r", "finished")]
            assert Both(kind, conductor.url, timeout_s=0.2).observe_many(events) == [None]
            assert len(conductor.requests) == 1

    def test_an_end_that_was_heard_the_first_time_is_an_end(self, kind: str) -> None:
        gone = b'{"error":{"message":"no","type":"t","code":"unknown_request"}}'
        with Flaky(1, answer("404 Not Found", gone)) as flaky:
            Both(kind, flaky.url).observe(RequestEvent("r", "finished"))
        with Flaky(0, answer("404 Not Found", gone)) as flaky, pytest.raises(UnknownRequest):
            Both(kind, flaky.url).observe(RequestEvent("r", "finished"))

    def test_who_never_answers_is_given_up(self, kind: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as door:
            url = f"http://127.0.0.1:{door.getsockname()[1]}"
            with pytest.raises(ConductorUnavailable):
                Both(kind, url, timeout_s=0.2).instances()


@pytest.mark.parametrize(
    ("status", "body", "error"),
    [
        (502, b"<html>", ConductorUnavailable),
        (404, b"nginx", InvalidRequest),
        (200, b"<html>", ConductorUnavailable),
        (200, b"{}", ConductorUnavailable),
        (503, b'{"error":{"message":"m","type":"t","code":"busy"}}', ConductorUnavailable),
        (413, b'{"error":{"message":"m","type":"t","code":"too_large"}}', InvalidRequest),
    ],
)
def test_answers_of_somebody_else(status: int, body: bytes, error: type[Exception]) -> None:
    with pytest.raises(error):
        calls.instances().answered(status, body, again=False)
    with pytest.raises(error):
        calls.schedule(REQUEST).answered(status, body, again=False)


class TestFollowing:
    def test_decisions_as_they_are_made(self, client: Both, service: tuple[Recorder, str]) -> None:
        _, url = service
        client.register(SPEC)
        names = ["a", "b", "c"]

        def place() -> None:
            with ConductorClient(url) as other:
                for name in names:
                    other.schedule(Request(name, MODEL, 10))

        async def follow() -> list[str]:
            found: list[str] = []
            async with AsyncConductorClient(url) as it:
                entries = it.follow(candidates=1)
                first = asyncio.ensure_future(anext(entries))
                await asyncio.to_thread(wait_for_follower, url)
                await asyncio.to_thread(place)
                found.append((await first).request_id)
                while len(found) < len(names):
                    found.append((await anext(entries)).request_id)
                await entries.aclose()
            return found

        assert asyncio.run(follow()) == names

    def test_line_separators_of_unicode_are_no_ends_of_lines(self, client: Both) -> None:
        """JSON does not escape them."""
        client.register(SPEC)
        tenant = "a\u2028b\x85c"

        async def follow() -> str:
            async with AsyncConductorClient(client.url) as it:
                entries = it.follow()
                first = asyncio.ensure_future(anext(entries))
                await asyncio.to_thread(wait_for_follower, client.url)
                await it.schedule(replace(REQUEST, id="unusual", tenant=tenant))
                found = (await first).tenant
                await entries.aclose()
            return found

        assert asyncio.run(follow()) == tenant

    def test_they_end_when_the_conductor_stops(self) -> None:
        got: list[Any] = []
        with contextlib.ExitStack() as stack:
            service = served(Recorder())
            url = service.__enter__()
            client = stack.enter_context(ConductorClient(url))
            thread = threading.Thread(target=lambda: got.extend(client.follow()))
            thread.start()
            wait_for_follower(url)
            service.__exit__(None, None, None)
            thread.join(timeout=10)
            assert not thread.is_alive()
        assert got == []


def test_a_prompt_by_its_keys(client: Both, service: tuple[Recorder, str]) -> None:
    client.register(replace(SPEC, part_tokens=64))
    (shown,) = client.instances()
    assert shown.part_tokens == 64
    keys = tuple(bytes([n]) * 16 for n in range(4))
    client.schedule(Request("k", MODEL, 40, keys[:2], part_keys=keys[2:]))
    asked = service[0].requests["k"]
    assert (asked.keys, asked.part_keys) == (keys[:2], keys[2:])


def test_who_holds_the_first_tokens_of_a_prompt(
    client: Both, service: tuple[Recorder, str]
) -> None:
    client.register(SPEC)
    keys = tuple(bytes([100 + n]) * 16 for n in range(4))
    service[0].hold(SPEC.id, "hbm", keys[:3], 0.0, parts=True)
    found = client.match((), part_keys=keys)
    assert found.blocks == 0
    (holder,) = found.holders
    assert (holder.holder, holder.blocks, holder.part_tokens) == (f"{SPEC.id}/hbm", 0, 48)
    assert client.match(()).holders == []


def test_an_older_conductor_is_told_only_what_it_knows() -> None:
    assert b"part" not in (calls.register(SPEC).body or b"")
    assert b"part" not in (calls.schedule(Request("r", MODEL, 40)).body or b"")
