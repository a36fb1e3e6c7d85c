"""Orders carried out by real nodes: copied bytes are right, and failures are only counted."""

from __future__ import annotations

import contextlib
import os
import random
import threading
from itertools import count
from typing import TYPE_CHECKING, Any

import pytest
from kvsupport import assert_right, fresh_prefix, wait_until
from poolsupport import LARGE, Cluster, fill

from tiffin.conductor.pool.draining import ENDED, DrainPhase, NodeDrain
from tiffin.conductor.pool.orders import (
    NO_PARENT,
    Admit,
    Copy,
    Drop,
    Ended,
    Evacuate,
    NodeSpace,
    Order,
    PoolView,
)
from tiffin.conductor.pool.popularity import Popularity
from tiffin.conductor.pool.replication import Replication
from tiffin.conductor.service import order_sender as carrying
from tiffin.conductor.service.order_sender import CarrierSettings, OrderCarrier
from tiffin.conductor.state.prefix_index import PrefixIndex
from tiffin.kvstore.directory import EmbeddedDirectory
from tiffin.kvstore.errors import NodeUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tiffin.kvstore import Prefix

_numbers = count(1)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """Nodes; checks that no thread or descriptor outlives the test."""
    threads, files = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
    pool = Cluster()
    try:
        yield pool
        pool.quiet()
    finally:
        pool.close()

    def ended() -> bool:
        new = set(threading.enumerate()) - threads
        return all(thread.name == "tiffin-uninterrupted" for thread in new)

    wait_until(ended, "all threads end")
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= files, "all descriptors are closed")


@pytest.fixture
def carry(cluster: Cluster) -> Iterator[Callable[..., OrderCarrier]]:
    """Makes carriers for the cluster, closed before it."""
    with contextlib.ExitStack() as stack:

        def make(**options: Any) -> OrderCarrier:
            members = EmbeddedDirectory.named(f"default:{cluster.name}")
            carrier = OrderCarrier(members, cluster.credentials, CarrierSettings(**options))
            stack.callback(carrier.close)
            return carrier

        yield make


def copy(prefix: Prefix, source: str, target: str) -> Copy:
    depth, parent = prefix.start, prefix.parent if prefix.start else NO_PARENT
    keys = tuple(prefix.keys)
    nbytes = len(keys) * prefix.schema.extent_bytes
    return Copy(next(_numbers), keys, parent, depth, source, target, nbytes, "test")


def outcome(carrier: OrderCarrier, *orders: Order) -> list[Ended]:
    """The outcomes of these orders, in their order."""
    carrier.submit(orders)
    found: list[Ended] = []
    wait_until(lambda: found.extend(carrier.finished()) or len(found) >= len(orders), "they end")
    by_number = {ended.number: ended for ended in found}
    return [by_number[order.number] for order in orders]


class TestCopies:
    def test_a_copy_is_made_is_right_and_is_pinned_until_it_is_dropped(
        self, cluster: Cluster, carry: Callable[..., OrderCarrier]
    ) -> None:
        a, b = cluster.start("a"), cluster.start("b")
        prefix = a.put(fresh_prefix(4, LARGE))
        cluster.settle()
        carrier = carry()
        (ended,) = outcome(carrier, copy(prefix, "a", "b"))
        assert (ended.blocks, ended.error) == (4, "")
        assert set(b.node.pinned_keys()) == set(prefix.keys)
        assert a.node.pinned_keys() == []
        (ended,) = outcome(carrier, Drop(next(_numbers), tuple(prefix.keys), "b", "cold"))
        assert (ended.blocks, b.node.pinned_keys()) == (4, [])
        assert b.has(prefix) == [True] * 4  # it may remain while there is room
        assert carrier.statistics() == {
            "waiting": 0,
            "done": {"copy": 1, "drop": 1},
            "failures": {},
            "pinned_blocks": 0,
        }
        a.stop()
        cluster.remember(b)
        with cluster.open().get(prefix) as blocks:
            assert blocks.complete
            assert_right(blocks, prefix)

    def test_the_rest_of_a_prefix(
        self, cluster: Cluster, carry: Callable[..., OrderCarrier]
    ) -> None:
        a, b = cluster.start("a"), cluster.start("b")
        prefix = a.put(fresh_prefix(4, LARGE))
        b.put(prefix[:2])
        cluster.settle()
        (ended,) = outcome(carry(), copy(prefix[2:], "a", "b"))
        assert ended.blocks == 2
        assert b.has(prefix) == [True] * 4
        assert set(b.node.pinned_keys()) == set(prefix.keys[2:])

    @pytest.mark.slow
    def test_a_target_without_room_has_none_of_it(
        self, cluster: Cluster, carry: Callable[..., OrderCarrier]
    ) -> None:
        a = cluster.start("a")
        fill(cluster.start("b", 2), 2)
        prefix = a.put(fresh_prefix(2, LARGE))
        cluster.settle()
        (ended,) = outcome(carry(), copy(prefix, "a", "b"))
        assert (ended.blocks, ended.error) == (0, "")

    def test_what_was_there_is_not_pinned_nor_unpinned(
        self, cluster: Cluster, carry: Callable[..., OrderCarrier]
    ) -> None:
        """The conductor does not remove another client's pin."""
        a, b = cluster.start("a"), cluster.start("b")
        prefix = a.put(fresh_prefix(2, LARGE))
        b.put(prefix)
        cluster.settle()
        assert cluster.open().pin(prefix, hard=True) == 2
        carrier = carry()
        (ended,) = outcome(carrier, copy(prefix, "a", "b"))
        assert ended.blocks == 2
        (ended,) = outcome(carrier, Drop(next(_numbers), tuple(prefix.keys), "b", "cold"))
        assert ended.blocks == 0
        assert set(b.node.pinned_keys()) == set(prefix.keys)

    def test_a_pin_that_has_ended_is_nobody_s_to_lift(
        self, cluster: Cluster, carry: Callable[..., OrderCarrier]
    ) -> None:
        """Another client may have set the pin again."""
        a, b = cluster.start("a"), cluster.start("b")
        prefix = a.put(fresh_prefix(2, LARGE))
        cluster.settle()
        carrier = carry(pin_s=0.05)
        outcome(carrier, copy(prefix, "a", "b"))
        wait_until(lambda: b.node.pinned_keys() == [], "our pin ends")
        assert cluster.open().pin(prefix, hard=True) == 2
        (ended,) = outcome(carrier, Drop(next(_numbers), tuple(prefix.keys), "b", "cold"))
        assert ended.blocks == 0
        assert set(b.node.pinned_keys()) == set(prefix.keys)

    def test_without_pins(self, cluster: Cluster, carry: Callable[..., OrderCarrier]) -> None:
        a, b = cluster.start("a"), cluster.start("b")
        prefix = a.put(fresh_prefix(2, LARGE))
        cluster.settle()
        outcome(carry(pin_s=0.0), copy(prefix, "a", "b"))
        assert b.has(prefix) == [True] * 2
        assert b.node.pinned_keys() == []


class TestTrouble:
    def test_failures_are_told_and_counted_and_not_repeated(
        self, cluster: Cluster, carry: Callable[..., OrderCarrier]
    ) -> None:
        a, b = cluster.start("a"), cluster.start("b")
        prefix, unknown = a.put(fresh_prefix(2, LARGE)), fresh_prefix(2, LARGE)
        cluster.settle()
        carrier = carry()
        admit, back = (Admit(next(_numbers), "b", on=on) for on in (False, True))
        assert outcome(carrier, admit)[0].error == ""
        assert b.node.draining
        ended = outcome(carrier, copy(prefix, "a", "b"), copy(prefix, "a", "nobody"))
        assert [(e.blocks, e.error) for e in ended] == [(0, "Draining"), (0, "NodeUnavailable")]
        assert outcome(carrier, back)[0].error == ""
        (ended_unknown,) = outcome(carrier, copy(unknown, "a", "b"))
        assert (ended_unknown.blocks, ended_unknown.error) == (0, "")
        assert carrier.statistics()["failures"] == {"Draining": 1, "NodeUnavailable": 1}
        assert carrier.finished() == []

    def test_a_node_that_is_gone(
        self, cluster: Cluster, carry: Callable[..., OrderCarrier]
    ) -> None:
        a, b = cluster.start("a"), cluster.start("b")
        prefix = a.put(fresh_prefix(2, LARGE))
        cluster.settle()
        b.hang_up()
        (ended,) = outcome(carry(), copy(prefix, "a", "b"))
        assert ended.error == NodeUnavailable.__name__

    def test_too_many_are_refused_at_once(
        self,
        cluster: Cluster,
        carry: Callable[..., OrderCarrier],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(carrying, "ORDERS_MAX", 2)
        cluster.start("a")
        carrier = carry()
        drops = [Drop(next(_numbers), (bytes(16),), "a", "cold") for _ in range(4)]
        ended = outcome(carrier, *drops)
        assert [e.error for e in ended][:2] == ["", ""]
        assert {e.error for e in ended[2:]} == {"QueueFull"}

    def test_closed_it_refuses_and_leaves_nothing(
        self, cluster: Cluster, carry: Callable[..., OrderCarrier]
    ) -> None:
        carrier = carry()
        carrier.close()
        (ended,) = outcome(carrier, Admit(next(_numbers), "a", on=False))
        assert ended.error == "Closed"


class TestWithTheCore:
    """Decisions and their execution together."""

    def pool(self, cluster: Cluster, popularity: Popularity) -> PoolView:
        """The view of the pool that a feed would give."""
        index, spaces = PrefixIndex(), {}
        for name, member in cluster.members.items():
            capacity = member.node.options.dram_bytes
            spaces[name] = NodeSpace(name, capacity, capacity // 2, member.node.draining)
            index.add(index.holder(name, "dram"), list(member.node.core.index), 0.0)
        return PoolView(spaces, index, popularity)

    def popular(self, *prefixes: Prefix, times: int = 5) -> Popularity:
        popularity = Popularity(random.Random(1), columns_log2=12)
        for prefix in prefixes:
            for _ in range(times):
                popularity.seen(prefix.keys, 0.0, block_bytes=LARGE.extent_bytes)
        return popularity

    def test_replication(self, cluster: Cluster, carry: Callable[..., OrderCarrier]) -> None:
        a, b = cluster.start("a", 64), cluster.start("b", 64)
        prefix = a.put(fresh_prefix(3, LARGE))
        cluster.settle()
        carrier, replication = carry(), Replication()
        popularity = self.popular(prefix)
        orders = replication.plan(self.pool(cluster, popularity), 1.0)
        for ended in outcome(carrier, *orders):
            replication.ended(ended, 2.0)
        assert b.has(prefix) == [True] * 3
        assert replication.copies("b") == list(prefix.keys)
        assert replication.plan(self.pool(cluster, popularity), 3.0) == []

    def test_a_node_is_emptied(self, cluster: Cluster, carry: Callable[..., OrderCarrier]) -> None:
        a, b = cluster.start("a"), cluster.start("b")
        hot, cold = a.put(fresh_prefix(3, LARGE)), a.put(fresh_prefix(2, LARGE))
        cluster.settle()
        carrier = carry()
        drain = NodeDrain("a", 0.0, lambda: next(_numbers))
        popularity = self.popular(hot)
        kinds: list[type] = []
        for now in range(1, 10):
            orders = drain.step(self.pool(cluster, popularity), float(now))
            kinds += [type(order) for order in orders]
            for ended in outcome(carrier, *orders):
                drain.ended(ended, float(now))
            if drain.phase in ENDED:
                break
            cluster.settle()
        assert drain.phase is DrainPhase.DONE
        assert kinds == [Admit, Copy, Evacuate]
        assert drain.progress(10.0).moved_blocks == 3
        assert drain.progress(10.0).handed_over == 5
        assert a.node.draining
        assert all(b.has(hot) + b.has(cold))
