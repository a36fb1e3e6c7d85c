"""Engines on loopback become instances, by every kind of source, and their load is known."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import threading
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dns.message
import dns.rrset
import pytest
from apisupport import Recorder
from enginesupport import FakeEngine, server_info

from tiffin.conductor.api.conductor_service import Service
from tiffin.conductor.core.settings import Settings, patched
from tiffin.conductor.discovery import name_lookup
from tiffin.conductor.discovery.engine_watch import EngineWatch
from tiffin.conductor.discovery.settings import DiscoverySettings, SourceSettings, read_discovery
from tiffin.conductor.errors import ConductorUnavailable, HostNotAllowed, InvalidRequest
from tiffin.conductor.records import InstanceSpec, Load, Rejection, Request, Role
from tiffin.conductor.replicas.replica import News
from tiffin.conductor.wire.engine_models import EngineOptions
from tiffin.kvstore import KVSchema
from tiffin.kvstore.format.key_space import KeySpace

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

PATIENCE_S = 30.0
OPTIONS = EngineOptions(profile="test")


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    with FakeEngine() as engine:
        yield engine


@contextlib.asynccontextmanager
async def watched(
    *sources: SourceSettings, core: Recorder | None = None, **more: Any
) -> AsyncIterator[tuple[Service, EngineWatch]]:
    loop = asyncio.get_running_loop()
    service = Service(core or Recorder(), clock=loop.time)
    settings = DiscoverySettings(engines=sources, scrape_s=0.1, resolve_s=0.2, **more)
    async with EngineWatch(service, settings) as watch:
        running = asyncio.ensure_future(watch.run())
        try:
            yield service, watch
        finally:
            running.cancel()


async def until(what: Callable[[], Any]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not what():  # noqa: ASYNC110 # it is a thread's work that is waited for, too
            await asyncio.sleep(0.01)


def source(**where: str) -> SourceSettings:
    return SourceSettings(profile="test", **where)  # type: ignore[arg-type]


def test_an_engine_by_its_url_and_its_load(engine: FakeEngine) -> None:
    async def check() -> None:
        core = Recorder()
        async with watched(source(url=f"{engine.url}/"), core=core) as (service, _):
            await until(lambda: engine.where in core.cluster)
            spec = service.spec(engine.where)
            assert spec is not None
            assert (spec.url, spec.kv_capacity_tokens) == (engine.url, 6144)
            assert service.models.schema("tiny") is not None
            engine.running, engine.waiting, engine.usage = 3, 2, 0.5
            expected = Load(queued=2, running=3, kv_used_tokens=3072)
            await until(lambda: core.loads.get(engine.where) == expected)
            assert len(core.registrations) == 1, "answers are heartbeats"
            assert service.missing() == []

    asyncio.run(check())


def test_adapters_that_come_and_go(engine: FakeEngine) -> None:
    """As vLLM's own routes load and unload them; a drain goes on meanwhile."""

    def serve(*adapters: str) -> None:
        listed = [{"id": "tiny", "root": "/m"}, *({"id": a, "parent": "tiny"} for a in adapters)]
        engine.routes["/v1/models"] = json.dumps({"data": listed}).encode()

    async def check() -> None:
        serve("sql")
        here = source(url=engine.url)
        async with watched(here, models_s=0.2) as (service, _):

            def told() -> str | None:
                spec = service.spec(engine.where)
                return None if spec is None else spec.labels.get("adapters")

            await until(lambda: told() == "sql")
            serve("sql", "french")
            await until(lambda: told() == "sql,french")
            service.core.drain(engine.where, service.clock())
            serve()
            await until(lambda: told() is None)
            row = service.core.cluster.row(engine.where)
            assert service.core.cluster.draining[row]

    asyncio.run(check())


def test_what_an_engine_has_announced_is_found_out(engine: FakeEngine) -> None:
    """At a node, whose name follows from the engine's; a drain goes on meanwhile."""
    schema = KVSchema.gqa(
        model="vllm:print", layers=1, kv_heads=1, head_dim=4, dtype="float32", block_tokens=512
    )
    space = KeySpace(
        schema=schema.canonical_bytes().decode(), models=("tiny",), engine=engine.where
    )

    async def check() -> None:
        async with watched(source(url=engine.url), models_s=0.2) as (service, _):

            def found() -> tuple[str, bool, int] | None:
                spec = service.spec(engine.where)
                return None if spec is None else (spec.node, spec.fetches, spec.block_bytes)

            await until(lambda: found() == ("", False, 0))
            service.core.drain(engine.where, service.clock())
            service.announced("node-a", [space.encoded()])
            assert service.models.schema("tiny") == schema
            await until(lambda: found() == ("node-a", True, schema.block_bytes))
            row = service.core.cluster.row(engine.where)
            assert service.core.cluster.draining[row]
            service.announced("node-a", [])
            await until(lambda: found() == ("", False, 0))
            assert service.models.schema("tiny") == schema  # its blocks may be anywhere
            assert service.core.cluster.draining[row]

    asyncio.run(check())


def test_every_address_of_a_name(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name with two addresses, as the machine's resolver has it."""
    with FakeEngine("127.0.0.2", engine.port) as second:

        def lookup(host: str, port: int, *_: Any, **__: Any) -> list[Any]:
            assert host == "engines.test"
            one = (socket.AF_INET, socket.SOCK_STREAM, 6, "")
            return [(*one, ("127.0.0.1", port)), (*one, ("127.0.0.2", port))]

        monkeypatch.setattr(socket, "getaddrinfo", lookup)

        async def check() -> None:
            core = Recorder()
            where = f"engines.test:{engine.port}"
            async with watched(source(dns=where), core=core):
                await until(lambda: len(core.cluster) == 2)
                assert sorted(core.cluster.names) == [engine.where, second.where]

        asyncio.run(check())


@contextlib.contextmanager
def name_server(records: list[str]) -> Iterator[tuple[str, int]]:
    """A DNS server that answers every question with these SRV records."""
    door = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    door.bind(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            raw, who = door.recvfrom(512)
            if raw == b"end":
                return
            asked = dns.message.from_wire(raw)
            answer = dns.message.make_response(asked)
            if records:
                name = asked.question[0].name
                answer.answer.append(dns.rrset.from_text(name, 1, "IN", "SRV", *records))
            door.sendto(answer.to_wire(), who)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield door.getsockname()
    finally:
        door.sendto(b"end", door.getsockname())
        thread.join()
        door.close()


def test_srv_records() -> None:
    records = ["0 5 8001 gpu-1.test.", "0 5 8002 gpu-2.test."]
    with name_server(records) as server:
        found = asyncio.run(name_lookup.services("_http._tcp.engines.test", 5.0, server))
    assert sorted(found) == [("gpu-1.test", 8001), ("gpu-2.test", 8002)]
    with name_server(["0 0 0 ."]) as server:
        assert asyncio.run(name_lookup.services("_http._tcp.none.test", 5.0, server)) == []
    with name_server([]) as server, pytest.raises(ConductorUnavailable, match="no SRV records"):
        asyncio.run(name_lookup.services("_http._tcp.none.test", 5.0, server))


def test_a_name_that_is_not_found_is_told(engine: FakeEngine) -> None:
    async def check() -> None:
        async with watched(source(dns="nobody.invalid:8000")) as (service, _):
            await until(service.notes)
            (note,) = service.notes()
            assert note.startswith("dns nobody.invalid:8000: no address of nobody.invalid")

    asyncio.run(check())


def test_one_that_falls_silent_is_named(engine: FakeEngine) -> None:
    async def check() -> None:
        core = Recorder()
        core.patch({"core": {"heartbeat_timeout_s": 0.5}}, 0.0)
        async with watched(source(url=engine.url), core=core) as (service, watch):
            await until(lambda: engine.where in core.cluster)
            engine.close()

            def lost() -> bool:
                service.tick()
                return bool(service.notes())

            await until(lost)
            (note,) = service.notes()
            assert note.startswith(f"{engine.where} is registered, silent for ")
            outcome = service.schedule(Request("r", "tiny", 100))
            assert isinstance(outcome, Rejection)
            assert f"{engine.where} is registered, silent for" in outcome.message
            assert watch.reply().engines[0].error
            engine.start()
            await until(lambda: not service.notes())

    asyncio.run(check())


def test_heartbeats_of_its_own_win(engine: FakeEngine) -> None:
    async def check() -> None:
        core = Recorder()
        async with watched(source(url=engine.url), core=core) as (service, watch):
            await until(lambda: engine.where in core.cluster)
            engine.running = 9
            spec = InstanceSpec("vllm-0", "tiny", Role.MIXED, "test", url=engine.url)
            service.announce(spec, "vllm-0", Load(running=1))
            watch.heard("vllm-0", engine.url)
            assert core.cluster.names == ["vllm-0"]
            asked = len(engine.asked)
            await asyncio.sleep(0.4)
            assert len(engine.asked) <= asked + 1  # one may have been on its way
            assert core.loads["vllm-0"] == Load(running=1)

    asyncio.run(check())


def test_one_that_registered_itself_before_is_not_registered_twice(engine: FakeEngine) -> None:
    async def check() -> None:
        core = Recorder()
        core.register(InstanceSpec("vllm-0", "tiny", Role.MIXED, "test", url=engine.url), 0.0)
        async with watched(source(url=engine.url), core=core) as (_, watch):
            await until(lambda: watch.reply().engines[0].told if watch.reply().engines else False)
            assert core.cluster.names == ["vllm-0"]

    asyncio.run(check())


def test_one_that_registered_itself_at_another_conductor_wins(engine: FakeEngine) -> None:
    async def check() -> None:
        core = Recorder()
        async with watched(source(url=engine.url), core=core) as (service, _):
            await until(lambda: engine.where in core.cluster)
            own = service.spec(engine.where)
            assert own is not None
            service.learn(News(joined=[own]))
            assert core.cluster.names == [engine.where], "we told them of it"
            spec = InstanceSpec("vllm-0", "tiny", Role.MIXED, "test", url=engine.url)
            core.register(spec, service.clock())
            service.learn(News(joined=[spec]))
            assert core.cluster.names == ["vllm-0"]

    asyncio.run(check())


def test_an_operator_adds_one(engine: FakeEngine) -> None:
    engine.routes["/server_info"] = json.dumps(server_info(live=1)).encode()

    async def check() -> None:
        core = Recorder()
        async with watched(core=core) as (service, watch):
            name = await watch.add(engine.url, OPTIONS)
            assert name == engine.where
            spec = service.spec(name)
            assert spec is not None
            assert spec.labels == {"kv_events": "tcp://127.0.0.1:1"}
            service.remove(name)
            watch.removed(name)
            assert watch.reply().engines == []
            with pytest.raises(InvalidRequest, match="option profile"):
                await watch.add(engine.url, EngineOptions())
            assert watch.reply().engines == [], "it is not asked again"
            with pytest.raises(HostNotAllowed, match="allowed_hosts"):
                await watch.add("http://192.0.2.1:8000", OPTIONS)
            engine.close()
            with pytest.raises(ConductorUnavailable, match="/metrics"):
                await watch.add(engine.url, OPTIONS)
            engine.start()

    asyncio.run(check())


def test_an_api_key(engine: FakeEngine, tmp_path: Path) -> None:
    engine.key = "k" * 32
    path = tmp_path / "key"
    path.write_text(engine.key)
    path.chmod(0o600)

    async def check() -> None:
        async with watched() as (_, watch):
            with pytest.raises(InvalidRequest, match="option api_key_file"):
                await watch.add(engine.url, OPTIONS)
        async with watched(api_key_file=str(path)) as (_, watch):
            assert await watch.add(engine.url, OPTIONS) == engine.where

    asyncio.run(check())


def test_a_schema_of_the_pool(engine: FakeEngine, tmp_path: Path) -> None:
    from tiffin.kvstore import KVSchema

    schema = KVSchema.gqa(model="tiny", layers=2, kv_heads=1, head_dim=8, dtype="float16")
    path = tmp_path / "schema"
    path.write_bytes(schema.canonical_bytes())
    one = SourceSettings(url=engine.url, profile="test", fetches=True, schema_file=str(path))

    async def check() -> None:
        async with watched(one) as (service, _):
            await until(lambda: service.spec(engine.where))
            assert service.models.schema("tiny") == schema
            spec = service.spec(engine.where)
            assert spec is not None
            assert (spec.block_bytes, spec.fetches) == (schema.block_bytes, True)

    asyncio.run(check())


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ({"engines": [{}]}, "one of url, dns, srv and kubernetes"),
        ({"engines": [{"url": "http://a:1", "dns": "b:1"}]}, "one of url"),
        ({"engines": [{"dns": "b:1", "id": "x"}]}, "id goes with url"),
        ({"engines": [{"dns": "b"}]}, "NAME:PORT"),
        ({"engines": [{"url": "http://a:1"}] * 2}, "there twice"),
        ({"engines": [{"url": "http://a:1", "role": "boss"}]}, "role"),
        ({"scrape": 1}, "scrape"),
    ],
)
def test_settings_that_cannot_be(content: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidRequest, match=f"discovery.*{why}"):
        read_discovery({"discovery": content})


def test_settings_are_taken_out_of_the_file_s() -> None:
    content: dict[str, Any] = {"core": {}, "discovery": {"scrape_s": 2}}
    assert read_discovery(content).scrape_s == 2.0
    assert content == {"core": {}}


def test_the_page_s_settings_are_taken() -> None:
    page = Path(__file__).parents[3] / "docs/conductor/discovery.md"
    (shown,) = re.findall(r"^```toml\n(.*?)^```$", page.read_text("utf-8"), re.M | re.S)
    content = tomllib.loads(shown)
    kinds = [one.name.partition(" ")[0] for one in read_discovery(content).engines]
    assert kinds == ["url", "dns", "srv", "kubernetes"]
    assert patched(Settings(), content).instances.allowed_hosts == ("10.0.0.0/16",)
    written = page.read_text("utf-8")
    for struct in (EngineOptions, SourceSettings, DiscoverySettings):
        for name in struct.__struct_fields__:
            assert f"`{name}`" in written or f"\n{name} = " in written or f"`{name}." in written, (
                name
            )
