"""Updates of feeds reach the index of a running conductor, in the loop's thread."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

import pytest
from apisupport import KEY, MODEL, Recorder
from kvsupport import fresh_prefix
from poolsupport import LARGE, Cluster

from tiffin.conductor.api.app import create_app
from tiffin.conductor.errors import ConductorError, InvalidRequest
from tiffin.conductor.events.index_updates import Added
from tiffin.conductor.pool.orders import Drop, Ended
from tiffin.conductor.records import InstanceSpec, Role
from tiffin.conductor.service.action_runner import Acting
from tiffin.conductor.service.feeds import EVENTS_LABEL, REPLAY_LABEL, Feeding
from tiffin.conductor.wire.announced_spaces import AnnouncedSpaces
from tiffin.kvstore import KVSchema
from tiffin.kvstore.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Callable

    from tiffin.conductor.events.index_updates import Update

SCHEMA = KVSchema.gqa(
    model=MODEL, layers=1, kv_heads=1, head_dim=8, dtype="float16", block_tokens=16
)


async def until(true: Callable[[], bool]) -> None:
    """Let the loop run until `true()`."""
    async with asyncio.timeout(20):
        while not true():  # noqa: ASYNC110 - an index does not signal its changes
            await asyncio.sleep(0.01)


def test_a_pool_is_followed_and_its_links_known() -> None:
    cluster, core = Cluster(), Recorder()
    prefix = cluster.start("one").put(fresh_prefix(3, LARGE))

    ended: list[Ended] = []

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        feeding = Feeding(lambda update: core.apply(update, loop.time()), loop)
        feeding.follow_pool(f"embedded:{cluster.name}", "default", cluster.credentials)
        service = create_app(core, feeding=feeding, clock=loop.time).state.service
        await until(lambda: core.match(prefix.keys, loop.time()).blocks == 3)
        await until(lambda: feeding.missing() == "")
        assert [record.name for record in await feeding.records() or ()] == ["one"]
        async with Acting(service, feeding) as acting:
            await acting.step()
            feeding.carry_out([Drop(1, prefix.keys, "nobody", "a test")])
            await until(lambda: bool(ended.extend(feeding.finished()) or ended))
            await acting.step()
        assert [outcome.number for outcome in ended] == [1]
        assert ended[0].error, "there is no such node"
        await feeding.close()
        await feeding.close()
        assert await feeding.records() is None, "nobody knows"

    try:
        asyncio.run(scenario())
    finally:
        cluster.close()


def test_nodes_without_a_directory_are_followed_by_their_addresses() -> None:
    cluster, core = Cluster(), Recorder()
    member = cluster.start("one")
    prefix = member.put(fresh_prefix(3, LARGE))

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        feeding = Feeding(lambda update: core.apply(update, loop.time()), loop)
        feeding.follow_pool(f"tiffin://{member.address}", "default", cluster.credentials)
        await until(lambda: core.match(prefix.keys, loop.time()).blocks == 3)
        await until(lambda: feeding.missing() == "")
        assert feeding.notes() == []
        assert feeding.gives_orders
        (held,) = core.match(prefix.keys, loop.time()).holders
        assert held.holder == f"{member.address}/dram"
        await feeding.close()

    try:
        asyncio.run(scenario())
    finally:
        cluster.close()


def test_updates_are_applied_in_the_loop_and_a_bad_one_harms_no_other() -> None:
    applied: list[tuple[str, int]] = []

    def apply(update: Update) -> None:
        assert isinstance(update, Added)
        if update.name == "bad":
            raise ConductorError("too many holders")
        applied.append((update.name, threading.get_ident()))

    async def scenario() -> None:
        feeding = Feeding(apply, asyncio.get_running_loop())
        put = feeding._inbox
        for name in ("a", "bad", *(f"n{i}" for i in range(20))):
            await asyncio.to_thread(put, Added(name, "dram", [KEY] * 4096))
        await until(lambda: len(applied) == 21)
        await feeding.close()

    asyncio.run(scenario())
    assert {thread for _, thread in applied} == {threading.get_ident()}


def test_without_a_directory_nothing_is_missing() -> None:
    async def scenario() -> None:
        feeding = Feeding(lambda update: None, asyncio.get_running_loop())
        assert feeding.missing() == ""
        with pytest.raises(InvalidInput):
            feeding.follow_pool("ftp://x", "default", Cluster().credentials)
        with pytest.raises(InvalidInput, match="options of their own"):
            feeding.follow_pool("tiffin://h:1?token_file=/t", "default", Cluster().credentials)
        await feeding.close()

    asyncio.run(scenario())


class TestInstances:
    """Engines with the address of their publisher in their labels."""

    def spec(self, **labels: str) -> InstanceSpec:
        return InstanceSpec("i1", MODEL, Role.MIXED, "test", block_tokens=16, labels=labels)

    def test_they_are_followed_until_they_leave(self) -> None:
        core = Recorder()

        async def scenario() -> None:
            feeding = Feeding(lambda update: None, asyncio.get_running_loop())
            service = create_app(core, feeding=feeding).state.service
            service.models.learn(MODEL, SCHEMA, set)
            where = {EVENTS_LABEL: "tcp://127.0.0.1:9", REPLAY_LABEL: "tcp://127.0.0.1:9"}
            service.announce(self.spec(**where), "i1", None)
            service.announce(self.spec(**where), "i1", None)
            assert feeding.followed == ["i1"]
            service.announce(self.spec(), "i1", None)
            assert feeding.followed == []
            service.announce(self.spec(**where), "i1", None)
            service.remove("i1")
            assert feeding.followed == []
            service.announce(self.spec(**where), "i1", None)
            core.remove("i1", service.clock())  # another conductor may do that
            service.tick()
            assert feeding.followed == []
            await feeding.close()

        asyncio.run(scenario())

    @pytest.mark.parametrize(
        "endpoint",
        [
            "nowhere",
            "ipc:///etc/passwd",
            "file:///x",
            "tcp://no-port",
            "tcp://*:1",
            "tcp://h:*",
            "tcp://h:0",
            "tcp://h:65536",
            "tcp://h:5/x",
            "tcp://h:5;i:6",
            "tcp://u@h:5",
            "tcp://-h:5",
            "tcp://:5",
            "tcp://a b:5",
            "tcp://::1:5",
            "tcp://[::1:5",
            "tcp://[1:2]:5",
            "tcp://h:\u0665",
            "tcp://h:5\n",
            "tcp://" + "a" * 300 + ":5",
        ],
    )
    def test_what_nobody_can_connect_to_is_refused_before_it_registers(self, endpoint: str) -> None:
        core = Recorder()

        async def scenario() -> None:
            feeding = Feeding(lambda update: None, asyncio.get_running_loop())
            service = create_app(core, feeding=feeding).state.service
            with pytest.raises(InvalidRequest, match="schema"):
                service.announce(self.spec(**{EVENTS_LABEL: "tcp://127.0.0.1:9"}), "i1", None)
            service.models.learn(MODEL, SCHEMA, set)
            with pytest.raises(InvalidRequest):
                service.announce(self.spec(**{EVENTS_LABEL: endpoint}), "i1", None)
            labels = {EVENTS_LABEL: "tcp://127.0.0.1:9", REPLAY_LABEL: endpoint}
            with pytest.raises(InvalidRequest, match=REPLAY_LABEL):
                service.announce(self.spec(**labels), "i1", None)
            assert feeding.followed == []
            assert len(core.cluster) == 0
            await feeding.close()

        asyncio.run(scenario())

    @pytest.mark.parametrize(
        "endpoint",
        [
            "tcp://127.0.0.1:9",
            "tcp://localhost:65535",
            "tcp://engine-0.engines_a.svc:5557",
            "tcp://[::1]:5557",
            "tcp://[fe80::1%lo]:5557",
        ],
    )
    def test_what_is_taken_zeromq_takes_too(self, endpoint: str) -> None:
        """Otherwise the feed's thread would give it up, and an engine that is listed as followed
        would not be."""

        async def scenario() -> None:
            feeding = Feeding(lambda update: None, asyncio.get_running_loop())
            spec = self.spec(**{EVENTS_LABEL: endpoint})
            feeding.follow_instance(spec, SCHEMA, AnnouncedSpaces())
            assert feeding._engines is not None
            await until(lambda: feeding._engines is not None and "i1" in feeding._engines._engines)
            await feeding.close()

        asyncio.run(scenario())
