"""Draining nodes of a real pool over REST: the whole way from the route to the last block."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
from apisupport import MODEL, Recorder
from gatewaysupport import serving, until
from kvsupport import assert_right, fresh_prefix
from poolsupport import LARGE, Cluster, holders

from tiffin.conductor.api.app import create_app
from tiffin.conductor.client import AsyncConductorClient
from tiffin.conductor.errors import Conflict, UnknownNode
from tiffin.conductor.pool import draining
from tiffin.conductor.pool.draining import ENDED
from tiffin.conductor.records import Decision, InstanceSpec, Request, Role
from tiffin.conductor.service.action_runner import Acting
from tiffin.conductor.service.feeds import Feeding

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from tiffin.conductor.wire.pool_models import DrainReply
    from tiffin.kvstore import Prefix

NAMES = ("a", "b", "c")


@dataclass
class World:
    """A conductor with a pool, and a client of it. It steers only when the test says so."""

    pool: Cluster
    core: Recorder
    acting: Acting
    client: AsyncConductorClient

    def ask_for(self, prefix: Prefix, times: int) -> None:
        """`times` requests whose prompts begin with `prefix` come and end."""
        for number in range(times):
            name = f"{prefix.keys[-1].hex()}-{number}"
            now = asyncio.get_running_loop().time()
            tokens = len(prefix) * LARGE.block_tokens + 7
            asked = Request(name, MODEL, tokens, tuple(prefix.keys))
            assert isinstance(self.core.schedule(asked, now), Decision)
            self.core.arrivals.count(now)  # of many requests at a time only some are counted

    async def knows(self, *prefixes: Prefix) -> None:
        for prefix in prefixes:
            await until(lambda p=prefix: self.core.match(p.keys, 0.0).blocks == len(p))
        await self.acting.step()

    async def drain(self, node: str) -> DrainReply:
        """The state of the node's drain."""
        return next(one for one in await self.client.drains() if one.name == node)

    async def steer(self, node: str, *phases: str) -> DrainReply:
        """Steer until the node's drain is in one of these phases."""
        async with asyncio.timeout(30):
            while (found := await self.drain(node)).phase not in phases:
                await self.acting.step()
                await asyncio.sleep(0.01)
        return found


@pytest.fixture
def pool() -> Iterator[Cluster]:
    cluster = Cluster()
    for name in NAMES:
        cluster.start(name, 48)
    yield cluster
    cluster.close()


@asynccontextmanager
async def world(pool: Cluster, core: Recorder | None = None) -> AsyncIterator[World]:
    core = core or Recorder()
    loop = asyncio.get_running_loop()
    core.patch({"replication": {"enabled": False}}, loop.time())
    for name in NAMES:
        node, size, nbytes = name, LARGE.block_tokens, LARGE.extent_bytes
        spec = InstanceSpec(
            f"i-{name}", MODEL, Role.MIXED, "test", node=node, block_tokens=size, block_bytes=nbytes
        )
        core.register(spec, loop.time())
    feeding = Feeding(lambda update: core.apply(update, loop.time()), loop)
    feeding.follow_pool(f"embedded:{pool.name}", "default", pool.credentials)
    app = create_app(core, feeding=feeding, clock=loop.time)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(feeding.close)
        acting = await stack.enter_async_context(Acting(app.state.service, feeding))
        url = await stack.enter_async_context(serving(app))
        client = await stack.enter_async_context(AsyncConductorClient(url))
        await acting.step()
        yield World(pool, core, acting, client)


def test_what_is_hot_and_unique_leaves_first_and_all_of_it_is_elsewhere(pool: Cluster) -> None:
    a, b = pool.members["a"], pool.members["b"]
    hot, warm, cold, shared = (a.put(fresh_prefix(n, LARGE)) for n in (5, 3, 4, 2))
    b.put(shared)
    pool.settle()

    async def scenario() -> None:
        async with world(pool) as it:
            await it.knows(hot, warm, cold, shared)
            for prefix, times in ((hot, 20), (warm, 10), (shared, 30)):
                it.ask_for(prefix, times)
            told = await it.client.drain_node("a", deadline_s=60.0)
            assert (told.kind, told.name, told.phase) == ("node", "a", "closing")
            await it.steer("a", "hot")
            assert a.node.draining
            halfway = await it.steer("a", "rest")
            assert (halfway.moved_blocks, halfway.failures) == (8, 0)
            assert [bool(set(names) - {"a"}) for names in holders(pool, hot)] == [True] * 5
            done = await it.steer("a", *ENDED)
            assert (done.phase, done.handed_over, done.left_blocks) == ("done", 14, 0)

    asyncio.run(scenario())
    a.stop()
    pool.remember(b, pool.members["c"])
    pool.settle()
    client = pool.open()
    for prefix in (hot, warm, cold, shared):
        with client.get(prefix) as blocks:
            assert blocks.complete
            assert_right(blocks, prefix)


def test_a_pool_without_room_is_not_done(pool: Cluster) -> None:
    a = pool.members["a"]
    rest = a.put(fresh_prefix(4, LARGE))
    pool.settle()
    for name in "bc":
        pool.members[name].node.draining = True

    async def scenario() -> None:
        async with world(pool) as it:
            await it.knows(rest)
            await it.client.drain_node("a")
            ended = await it.steer("a", *ENDED)
            assert (ended.phase, ended.handed_over, ended.left_blocks) == ("failed", 0, 4)

    asyncio.run(scenario())


def test_cancelled_it_takes_new_blocks_again(pool: Cluster) -> None:
    a = pool.members["a"]

    async def scenario() -> None:
        async with world(pool) as it:
            with pytest.raises(UnknownNode):
                await it.client.drain_node("nobody")
            await it.client.drain_node("a")
            await it.steer("a", "hot", "rest", "done")
            assert a.node.draining
            assert (await it.client.undrain_node("a")).phase == "cancelled"
            with pytest.raises(Conflict):
                await it.client.drain_node("a")
            await it.acting.step()
            await until(lambda: not a.node.draining)
            assert (await it.drain("a")).failures == 0

    asyncio.run(scenario())
    a.put(fresh_prefix(2, LARGE))


def test_any_conductor_can_end_a_drain(pool: Cluster) -> None:
    """Also one that does not know of it: the conductor that drains the node notices that the node
    is open again."""
    a = pool.members["a"]

    async def scenario() -> None:
        async with world(pool) as it, world(pool) as other:
            await it.client.drain_node("a")
            drain = it.core.steering._node_drains["a"]
            drain._hand_over = lambda now: []  # type: ignore[method-assign]
            async with asyncio.timeout(20):
                while not drain._was_closed:  # until the directory lists it as closed
                    await it.acting.step()
                    await asyncio.sleep(0.01)
            assert [one.name for one in await other.client.drains()] == []
            await other.client.undrain_node("a")
            await other.acting.step()
            await until(lambda: not a.node.draining)
            await it.steer("a", "cancelled")

    asyncio.run(scenario())


def test_a_node_that_dies_is_lost(pool: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draining, "GONE_S", 0.1)
    a = pool.members["a"]
    cold = a.put(fresh_prefix(4, LARGE))
    pool.settle()

    async def scenario() -> None:
        async with world(pool) as it:
            await it.knows(cold)
            await it.client.drain_node("a")
            await asyncio.to_thread(a.stop)
            ended = await it.steer("a", *ENDED)
            assert ended.phase == "lost"
            with pytest.raises(UnknownNode):
                await it.client.drain_node("a")

    asyncio.run(scenario())
