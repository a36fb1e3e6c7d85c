"""What a decision counts on at another node is fetched by the node of the instance that is chosen,
when the decision is made, or when the request is released."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from apisupport import MODEL, Recorder
from kvsupport import fresh_prefix
from poolsupport import LARGE, Cluster

from tiffin.conductor.api.app import create_app
from tiffin.conductor.pool.orders import NO_PARENT, UNWATCHED, Copy, fetch_orders
from tiffin.conductor.records import Decision, Fetch, InstanceSpec, Request, RequestEvent, Role
from tiffin.conductor.service.feeds import Feeding

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from poolsupport import Member

    from tiffin.conductor.api.conductor_service import Service
    from tiffin.kvstore import Prefix

KEYS = [bytes([n]) * 16 for n in range(6)]


def fetch(start: int, stop: int, source: str = "one", tier: str = "dram") -> Fetch:
    return Fetch(start, stop, source, tier, 100 * (stop - start), 0.01)


def homes(instance: str) -> str:
    return {"of one": "one", "of two": "two"}.get(instance, "")


class TestOrders:
    def test_parts_of_one_source_are_one_order(self) -> None:
        (order,) = fetch_orders([fetch(1, 3), fetch(3, 6, tier="nvme")], KEYS, "two", homes)
        assert order == Copy(UNWATCHED, tuple(KEYS[1:]), KEYS[0], 1, "one", "two", 500, "fetch")

    def test_of_two_sources_each_has_its_own(self) -> None:
        orders = fetch_orders([fetch(0, 2), fetch(2, 6, source="three")], KEYS, "two", homes)
        assert [(o.source, o.depth, o.parent) for o in orders] == [
            ("one", 0, NO_PARENT),
            ("three", 2, KEYS[1]),
        ]

    def test_what_no_node_can_fetch(self) -> None:
        for engine in ("unknown", "of two"):
            hbm = fetch(0, 2, source=engine, tier="hbm")
            assert fetch_orders([hbm], KEYS, "two", homes) == []

    def test_what_is_in_an_engine_is_copied_from_its_node(self) -> None:
        (order,) = fetch_orders([fetch(0, 2, "of one", "hbm"), fetch(2, 4)], KEYS, "two", homes)
        assert (order.source, len(order.keys)) == ("one", 4)

    def test_what_is_here_or_nowhere(self) -> None:
        assert fetch_orders([fetch(0, 2, source="two")], KEYS, "two", homes) == []
        assert fetch_orders([fetch(0, 2)], KEYS, "", homes) == []


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    pool = Cluster()
    yield pool
    pool.close()


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not true():  # noqa: ASYNC110 - a node does not signal what has come
            await asyncio.sleep(0.01)


def request(name: str, prefix: Prefix) -> Request:
    """One that the instance at the node with its blocks may not have."""
    tokens = len(prefix) * LARGE.block_tokens + 10
    return Request(name, MODEL, tokens, prefix.keys, exclude=("a",))


def decided(service: Service, name: str, prefix: Prefix) -> Decision:
    found = service.schedule(request(name, prefix))
    assert isinstance(found, Decision)
    return found


def run(cluster: Cluster, scenario: Callable[[Service, Member, Member], Any], **spec: Any) -> None:
    """A scenario with engines "a" and "b" at the nodes "one" and "two"."""

    async def all_of_it() -> None:
        one, two = cluster.start("one"), cluster.start("two")
        core, loop = Recorder(), asyncio.get_running_loop()
        feeding = Feeding(lambda update: core.apply(update, loop.time()), loop)
        feeding.follow_pool(f"embedded:{cluster.name}", "default", cluster.credentials)
        service = create_app(core, feeding=feeding, clock=loop.time).state.service
        about = {"block_tokens": LARGE.block_tokens, "block_bytes": LARGE.block_bytes, **spec}
        for name, node in (("a", "one"), ("b", "two")):
            one_spec = InstanceSpec(name, MODEL, Role.MIXED, "test", node=node, **about)
            service.announce(one_spec, name, None)
        await scenario(service, one, two)
        await feeding.close()

    asyncio.run(all_of_it())


async def known(service: Service, prefix: Prefix, holders: int = 1) -> None:
    """Until the conductor knows all of it, and so many that have some of it."""

    def knows() -> bool:
        match = service.core.match(prefix.keys, service.clock())
        return match.blocks == len(prefix) and len(match.holders) == holders

    await until(knows)


def test_the_node_fetches_when_the_decision_is_made(cluster: Cluster) -> None:
    async def scenario(service: Service, one: Member, two: Member) -> None:
        prefix = one.put(fresh_prefix(6, LARGE))
        two.put(prefix[:2])
        await known(service, prefix, 2)
        decision = decided(service, "r1", prefix)
        assert (decision.prefill, decision.fetches[0].start) == ("b", 2)
        within_s = service.fetch_within_s(decision)
        assert within_s is not None
        assert within_s > sum(one.seconds for one in decision.fetches)
        await until(lambda: two.has(prefix) == [True] * 6)

    run(cluster, scenario)


def test_of_a_held_request_when_it_is_released(cluster: Cluster) -> None:
    async def scenario(service: Service, one: Member, two: Member) -> None:
        prefix = one.put(fresh_prefix(6, LARGE))
        await known(service, prefix)
        service.core.patch({"queue": {"ahead_max": 1, "ahead_s": 0}}, service.clock())
        before = decided(service, "before", fresh_prefix(20, LARGE))
        assert not service.core.dispatch.holds("before")
        decision = decided(service, "held", prefix)
        assert decision.fetches
        assert service.core.dispatch.holds("held")
        assert service.fetch_within_s(decision) is not None
        await asyncio.sleep(0.1)
        assert two.has(prefix) == [False] * 6
        service.observe(RequestEvent(before.request_id, "finished"))
        await until(lambda: two.has(prefix) == [True] * 6)

    run(cluster, scenario)


def test_nobody_waits_for_what_is_not_fetched(cluster: Cluster) -> None:
    async def scenario(service: Service, one: Member, _: Member) -> None:
        prefix = one.put(fresh_prefix(6, LARGE))
        await known(service, prefix)
        decision = decided(service, "r1", prefix)
        assert decision.fetches == ()
        assert service.fetch_within_s(decision) is None

    run(cluster, scenario, fetches=False)
