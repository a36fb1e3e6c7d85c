"""Where puts go, how many copies there are, and what works while the directory is unavailable."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, Any

import pytest
from kvsupport import Background, assert_right, fresh_prefix, payloads_of, wait_until, within
from poolsupport import LARGE, Cluster, Member, check, fill, holders

from tiffin.kvstore import Client, KVSchema
from tiffin.kvstore.client.pool.remote import block_write
from tiffin.kvstore.client.pool.replica_choice import place
from tiffin.kvstore.directory.base import NodeRecord
from tiffin.kvstore.errors import (
    Draining,
    InvalidInput,
    NodeUnavailable,
    NoRoom,
    StaleLease,
)

if TYPE_CHECKING:
    from tiffin.kvstore import Prefix


SPLIT = KVSchema.gqa(
    model="split", layers=1, kv_heads=2, head_dim=8, dtype="bfloat16", block_tokens=16, shards=2
)


def prompt(blocks: int = 3) -> Prefix:
    return fresh_prefix(blocks, LARGE)


class TestPlacement:
    def test_home_comes_first(self, cluster: Cluster) -> None:
        home, _ = cluster.start("home"), cluster.start("other")
        client, prefix = cluster.open(home), prompt()
        assert client.put(prefix, payloads_of(prefix)).stored == (0, 1, 2)
        assert holders(cluster, prefix) == [["home"]] * 3
        check(client, prefix)

    def test_without_a_home_the_emptier_of_two_is_chosen(self, cluster: Cluster) -> None:
        cluster.start("full", 8)
        fill(cluster.members["full"], 6)
        cluster.start("empty", 64)
        cluster.settle()
        client = cluster.open()
        wait_until(
            lambda: (
                {r.free_bytes for r in client.nodes().values()}
                == {2 * LARGE.extent_bytes, 64 * LARGE.extent_bytes}
            ),
            "the directory knows what is free",
        )
        for _ in range(3):
            prefix = prompt(1)
            client.put(prefix, payloads_of(prefix))
            assert holders(cluster, prefix) == [["empty"]]

    def test_what_was_put_is_found_at_once(self, cluster: Cluster) -> None:
        """Before the directory has it."""
        cluster.start("one"), cluster.start("two")
        for _ in range(10):
            client, prefix = cluster.open(), prompt(2)
            assert client.put(prefix, payloads_of(prefix)).complete
            check(client, prefix)
            assert client.match(prefix).blocks == 2
            assert client.pin(prefix) == 2
            assert client.remove(prefix) == 2
            assert client.exists(prefix)[0] in (False, True)  # a hint
            client.close()

    def test_nodes_without_room_are_passed_over(self, cluster: Cluster) -> None:
        home, full = cluster.start("home", 4), cluster.start("full", 4)
        cluster.start("roomy")
        for member in (home, full):
            fill(member, 4)
        client, prefix = cluster.open(home), prompt()
        with within(0.4, "a put that finds no room at two nodes"):
            assert client.put(prefix, payloads_of(prefix)).stored == (0, 1, 2)
        assert holders(cluster, prefix) == [["roomy"]] * 3

    def test_home_with_room_for_a_part_leaves_the_whole_to_another(self, cluster: Cluster) -> None:
        home = cluster.start("home", 4)
        cluster.start("roomy")
        fill(home, 2)
        client, prefix = cluster.open(home), prompt(4)
        assert client.put(prefix, payloads_of(prefix)).complete
        assert cluster.members["roomy"].has(prefix) == [True] * 4

    def test_slots_are_of_another_node_while_home_is_full(self, cluster: Cluster) -> None:
        home = cluster.start("home", 4)
        cluster.start("roomy")
        fill(home, 4)
        client, prefix = cluster.open(home), prompt()
        with within(0.4, "a reservation that finds no room at home"):
            slots = client.reserve(prefix, timeout_s=30.0)
        with slots:
            for slot, payload in zip(slots, payloads_of(prefix), strict=True):
                slot.view[:] = payload
        assert slots.stored == (0, 1, 2)
        assert holders(cluster, prefix) == [["roomy"]] * 3

    def test_a_full_home_that_is_alone_refuses_a_reservation(self, cluster: Cluster) -> None:
        home = cluster.start("home", 4)
        fill(home, 4)
        with pytest.raises(NoRoom):
            cluster.open(home).reserve(prompt(), timeout_s=0.1)

    def test_no_room_anywhere_is_a_result(self, cluster: Cluster, patient: None) -> None:
        home, other = cluster.start("home", 4), cluster.start("other", 4)
        for member in (home, other):
            fill(member, 4)
        prefix = prompt()
        for client in (cluster.open(home), cluster.open()):
            result = client.put(prefix, payloads_of(prefix), timeout_s=0.3)
            assert (result.stored, result.reason) == ((), "no_room")

    def test_a_put_waits_where_most_of_it_is(self, cluster: Cluster) -> None:
        home, other = cluster.start("home", 4), cluster.start("other", 4)
        pinned = fill(home, 3)
        fill(other, 4)
        client, prefix = cluster.open(home), prompt()
        waiting = Background(lambda: client.put(prefix, payloads_of(prefix), timeout_s=30))
        wait_until(lambda: home.node.statistics()["waiting_requests"], "the put waits at home")
        with Client.attach(home.node) as operator:
            for one in pinned:
                operator.unpin(one)
        result = waiting.result()
        assert (result.stored, result.resident, result.reason) == ((0, 1, 2), (), None)

    def test_draining_nodes_are_not_chosen(self, cluster: Cluster) -> None:
        home, leaving, staying = (cluster.start(n) for n in ("home", "leaving", "staying"))
        home.node.draining = leaving.node.draining = True
        client = cluster.open(home)
        wait_until(lambda: client.nodes()[leaving.number].draining, "the directory is told")
        for _ in range(4):
            prefix = prompt(1)
            assert client.put(prefix, payloads_of(prefix)).complete
            assert holders(cluster, prefix) == [["staying"]]
        staying.node.draining = True
        prefix = prompt(1)
        with pytest.raises(Draining):
            client.put(prefix, payloads_of(prefix))

    def test_nodes_that_do_not_answer_are_passed_over(self, cluster: Cluster) -> None:
        gone, mute = cluster.start("gone"), cluster.start("mute", relayed=True)
        cluster.start("well", 4)
        gone.hang_up()
        assert mute.network is not None
        mute.network.pause()
        client = cluster.open()
        for _ in range(4):
            prefix = prompt(1)
            with within(5, "a put that meets two sick nodes"):
                assert client.put(prefix, payloads_of(prefix), timeout_s=30).complete
            assert holders(cluster, prefix) == [["well"]]
        mute.network.resume()

    def test_a_node_that_stalls_under_a_put(
        self, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its reservation ends with the connection, so that no writer finds the keys busy."""
        sick = cluster.start("sick", 64, relayed=True)
        cluster.start("well", 8)
        client, prefix = cluster.open(), prompt(4)
        assert sick.network is not None
        wait_until(lambda: len(client.nodes()) == 2, "both are known")
        monkeypatch.setattr(block_write, "STALL_S", 0.2)
        failed = client._nodes.driver.links.failed

        def noted(*arguments: Any, **late: bool) -> None:
            monkeypatch.setattr(block_write, "STALL_S", 20.0)  # enough for the other node
            failed(*arguments, **late)

        monkeypatch.setattr(client._nodes.driver.links, "failed", noted)
        sick.network.stall_after(2 * LARGE.extent_bytes, "to")
        assert client.put(prefix, payloads_of(prefix), timeout_s=30).complete
        assert holders(cluster, prefix) == [["well"]] * 4
        sick.network.resume()
        wait_until(lambda: not any(s["write_leases"] for s in sessions(sick)), "it ends")
        sick.put(prefix)

    def test_a_block_larger_than_any_node_is_a_mistake(self, cluster: Cluster) -> None:
        cluster.start("small", 1, schema=fresh_prefix(1).schema)
        client, prefix = cluster.open(), prompt(1)
        with pytest.raises(InvalidInput, match="does not fit"):
            client.put(prefix, payloads_of(prefix))
        assert client._nodes.driver.links.down(time.monotonic()) == set()  # which is not its fault

    def test_a_pool_without_nodes(self, cluster: Cluster) -> None:
        client, prefix = cluster.open(), prompt(1)
        with pytest.raises(NodeUnavailable):
            client.put(prefix, payloads_of(prefix))
        assert client.match(prefix).blocks == 0
        assert client.get(prefix).missing[0].reason == "miss"
        found = client.statistics()
        assert found.pop("directory")["reason"] == ""
        assert found == {"nodes": {}, "links": {}, "home": None}

    def test_two_choices_are_even_enough(self) -> None:
        dice = random.Random(7)
        free = dict.fromkeys(range(1, 21), 1000)

        def record(number: int) -> NodeRecord:
            return NodeRecord(f"n{number}", "h:1", "", "", 1000, free[number], number=number)

        for _ in range(2000):
            (chosen,) = place({n: record(n) for n in free}, 1, 1, dice)
            free[chosen] -= 1
        assert max(free.values()) - min(free.values()) < 15


def sessions(member: Member) -> list[dict[str, int]]:
    found: list[dict[str, int]] = member.node.statistics()["sessions"]
    return found


class TestReplicas:
    def test_synchronous_replicas_are_there_when_the_put_returns(self, cluster: Cluster) -> None:
        home = cluster.start("home")
        for name in ("a", "b", "c"):
            cluster.start(name)
        client, prefix = cluster.open(home), prompt()
        assert client.put(prefix, payloads_of(prefix), replicas=3).stored == (0, 1, 2)
        for names in holders(cluster, prefix):
            assert len(names) == 3
            assert "home" in names

    def test_replicas_are_on_different_nodes_even_when_home_has_restarted(
        self, cluster: Cluster
    ) -> None:
        """A restarted home has another number."""
        home = cluster.start("home")
        cluster.start("other")
        client = cluster.open(home)
        assert client.home_number == home.number
        renamed = client.nodes()[home.number]
        again = cluster.directory.register(renamed)
        cluster.directory.withdraw(home.number)
        assert client.home_number == again
        prefix = prompt()
        client.put(prefix, payloads_of(prefix), replicas=2)
        assert holders(cluster, prefix) == [["home", "other"]] * 3
        wait_until(lambda: home._told()["number"] != home.number, "home registers again")
        cluster.directory.withdraw(again)

    def test_too_few_nodes(self, cluster: Cluster) -> None:
        cluster.start("one"), cluster.start("two")
        client, prefix = cluster.open(), prompt()
        with pytest.raises(NoRoom, match="2 of 3"):
            client.put(prefix, payloads_of(prefix), replicas=3)
        assert holders(cluster, prefix) == [["one", "two"]] * 3  # as many as there are nodes

    @pytest.mark.parametrize("replicas", [1, 2])
    def test_who_was_only_silent_is_waited_for_when_nobody_else_is_left(
        self, cluster: Cluster, replicas: int
    ) -> None:
        """A node that is stopped for a moment does not cost a replica."""
        still = cluster.start("still", relayed=True)
        if replicas == 2:
            cluster.start("well")
        client, prefix = cluster.open(), prompt()
        assert still.network is not None
        still.network.pause()
        # Another node is listed, and gone: with a single candidate the client would not hurry.
        gone = cluster.start("gone")
        client.nodes()
        cluster.remember(*(member for member in cluster.members.values() if member is not gone))
        gone.hang_up()
        putting = Background(
            lambda: client.put(prefix, payloads_of(prefix), replicas=replicas, timeout_s=30)
        )
        wait_until(
            lambda: still.number in client._nodes.driver.links.down(time.monotonic()), "given up"
        )
        still.network.resume()
        assert putting.result().complete
        assert "still" in holders(cluster, prefix)[0]

    def test_who_was_only_silent_is_waited_for_before_a_full_one(self, cluster: Cluster) -> None:
        full, still = cluster.start("full", 4), cluster.start("still", relayed=True)
        fill(full, 2)
        client, prefix = cluster.open(), prompt(4)
        assert still.network is not None
        still.network.pause()
        putting = Background(lambda: client.put(prefix, payloads_of(prefix), timeout_s=60))
        wait_until(
            lambda: still.number in client._nodes.driver.links.down(time.monotonic()), "given up"
        )
        still.network.resume()
        assert putting.result().complete
        assert still.has(prefix) == [True] * 4

    def test_too_little_room_for_the_second(self, cluster: Cluster, patient: None) -> None:
        home, small = cluster.start("home"), cluster.start("small", 4)
        fill(small, 2)
        client, prefix = cluster.open(home), prompt(4)
        with pytest.raises(NoRoom, match="1 of 2"):
            client.put(prefix, payloads_of(prefix), replicas=2, timeout_s=0.5)

    def test_asynchronous_replicas_come_by_themselves(self, cluster: Cluster) -> None:
        home = cluster.start("home")
        cluster.start("a"), cluster.start("b")
        client, prefix = cluster.open(home), prompt(5)
        client.put(prefix, payloads_of(prefix), replicas=3, sync=False)
        wait_until(lambda: holders(cluster, prefix) == [["home", "a", "b"]] * 5, "copies are made")
        check(cluster.open(), prefix)

    def test_closing_waits_for_what_was_ordered(self, cluster: Cluster) -> None:
        cluster.start("a"), cluster.start("b")
        client = cluster.open()
        prefixes = [prompt(2) for _ in range(5)]
        for prefix in prefixes:
            client.put(prefix, payloads_of(prefix), replicas=2, sync=False)
        client.close()
        for prefix in prefixes:
            assert holders(cluster, prefix) == [["a", "b"]] * 2

    @pytest.mark.parametrize("replicas", [0, -1, 17, "2", 1.5, None])
    def test_numbers_that_cannot_be(self, cluster: Cluster, replicas: int) -> None:
        client, prefix = cluster.open(), prompt(1)
        with pytest.raises(InvalidInput, match="replicas"):
            client.put(prefix, payloads_of(prefix), replicas=replicas)


class TestReserving:
    def test_without_a_home_slots_are_sent_when_committed(self, cluster: Cluster) -> None:
        cluster.start("one")
        client, prefix = cluster.open(), prompt(4)
        client.put(prefix[:2], payloads_of(prefix[:2]))
        with client.reserve(prefix) as slots:
            assert (slots.resident, [slot.index for slot in slots]) == ((0, 1), [2, 3])
            for slot in slots:
                slot.view[:] = payloads_of(prefix)[slot.index]
            assert client.match(prefix).blocks == 2
        assert slots.stored == (2, 3)
        check(client, prefix)

    def test_what_finds_no_room_is_not_stored(self, cluster: Cluster) -> None:
        one = cluster.start("one", 4)
        fill(one, 4)
        client = cluster.open()
        slots = client.reserve(prompt(2), timeout_s=0.2)
        for slot in slots:
            slot.view[:] = 1
        slots.commit()
        assert slots.stored == ()
        with pytest.raises(StaleLease):
            slots.commit()


class TestHomeCopies:
    @pytest.fixture
    def far(self, cluster: Cluster) -> tuple[Member, Prefix]:
        cluster.start("home")
        far = cluster.start("far")
        prefix = far.put(prompt(4))
        cluster.settle()
        return far, prefix

    @pytest.mark.parametrize(("admission", "reads"), [("always", 1), ("second", 2), ("never", 99)])
    @pytest.mark.parametrize("into", [False, True], ids=["view", "into"])
    def test_blocks_come_home_after_so_many_reads(
        self, cluster: Cluster, far: tuple[Member, Prefix], admission: str, reads: int, into: bool
    ) -> None:
        home, (node, prefix) = cluster.members["home"], far
        client = cluster.open(home, admission=admission)
        target = bytearray(4 * LARGE.block_bytes) if into else None
        for turn in range(1, 4):
            with client.get(prefix, into=target) as blocks:
                assert blocks.complete
                assert_right(blocks, prefix)
            assert home.has(prefix) == [turn >= reads] * 4, turn
        served = node.counters()["dram_hits"]
        assert served == 4 * min(reads, 3)

    def test_a_copy_at_home_is_read_where_it_lies(
        self, cluster: Cluster, far: tuple[Member, Prefix]
    ) -> None:
        import numpy as np

        home, (_, prefix) = cluster.members["home"], far
        client = cluster.open(home, admission="always")
        with client.get(prefix, layers=1) as blocks:
            assert all(np.shares_memory(b.bytes, client.near_link.mapping.memory) for b in blocks)

    def test_copies_are_verified_whatever_the_client_trusts(
        self, cluster: Cluster, far: tuple[Member, Prefix]
    ) -> None:
        home, (node, prefix) = cluster.members["home"], far
        node.flip(prefix[2:])
        client = cluster.open(home, admission="always", verify="off")
        client.get(prefix).release()
        assert home.has(prefix) == [True, True, False, False]
        wait_until(lambda: node.counters()["corrupt"] == 1, "the node is told")

    def test_a_full_home_is_no_obstacle(self, cluster: Cluster, far: tuple[Member, Prefix]) -> None:
        home, (_, prefix) = cluster.members["home"], far
        fill(home, 14)  # there is room for half of it
        client = cluster.open(home, admission="always")
        with within(0.05, "a get that finds home full"):
            check(client, prefix)
        assert home.has(prefix) == [True, True, False, False]

    def test_blocks_that_are_not_to_be_had_leave_no_reservation(
        self, cluster: Cluster, far: tuple[Member, Prefix]
    ) -> None:
        home, (node, prefix) = cluster.members["home"], far
        client = cluster.open(home, admission="always")
        node.hang_up()
        assert client.get(prefix).missing[0].reason == "lost"
        assert home.node.statistics()["tiers"]["dram"]["reserved_bytes"] == 0

    def test_admission_is_one_of_three(self, cluster: Cluster) -> None:
        home = cluster.start("home")
        with pytest.raises(InvalidInput, match="always, second, never"):
            cluster.open(home, admission="sometimes")


class TestWishes:
    def test_pins_and_removals_reach_every_holder(self, cluster: Cluster) -> None:
        nodes = [cluster.start(name) for name in ("home", "a", "b")]
        prefix = prompt(2)
        for node in nodes:
            node.put(prefix)
        cluster.settle()
        client = cluster.open(nodes[0])
        assert client.pin(prefix, hard=True) == 2
        assert all(node.node.statistics()["pinned_blocks"] == 2 for node in nodes)
        assert client.unpin(prefix) == 2
        assert all(node.node.statistics()["pinned_blocks"] == 0 for node in nodes)
        assert client.remove(prefix) == 2
        assert holders(cluster, prefix) == [[], []]
        assert client.remove(prefix) == 0

    def test_a_removal_reaches_whom_the_directory_does_not_name(self, cluster: Cluster) -> None:
        one = cluster.start("one")
        prefix = one.put(prompt(1))
        cluster.settle()
        cluster.directory.publish(one.number, [], list(prefix.keys), 1)
        assert cluster.open().remove(prefix) == 1

    def test_a_removal_that_did_not_reach_everybody_is_an_error(self, cluster: Cluster) -> None:
        one, two = cluster.start("one"), cluster.start("two")
        prefix = one.put(prompt(1))
        two.hang_up()
        with pytest.raises(NodeUnavailable):
            cluster.open().remove(prefix)
        assert one.has(prefix) == [False]

    def test_a_home_whose_socket_broke_is_told_by_its_port(
        self, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        home = cluster.start("home")
        prefix = home.put(prompt(2))
        cluster.settle()
        client = cluster.open(home)

        def broken(*_: object) -> None:
            raise NodeUnavailable("the socket broke")

        monkeypatch.setattr(client.near_link, "call", broken)
        check(client, prefix)
        assert client.pin(prefix) == 2
        assert client.remove(prefix) == 2
        assert home.has(prefix) == [False, False]

    @pytest.mark.parametrize("ttl_s", [0, -1, float("nan"), "1"])
    def test_pins_that_end_before_they_begin(self, cluster: Cluster, ttl_s: float) -> None:
        one = cluster.start("one")
        prefix = one.put(prompt(1))
        cluster.settle()
        with pytest.raises(InvalidInput, match="ttl_s"):
            cluster.open().pin(prefix, ttl_s=ttl_s)
        assert one.node.statistics()["pinned_blocks"] == 0


class TestDirectoryAway:
    def test_home_goes_on_and_publishes_later(self, cluster: Cluster) -> None:
        home, far = cluster.start("home"), cluster.start("far")
        distant = far.put(prompt(2))
        cluster.settle()
        handle = cluster.flaky()
        client = cluster.open(home, members=handle)
        handle.away = True
        prefix = prompt(2)
        assert client.put(prefix, payloads_of(prefix)).complete
        check(client, prefix)
        assert client.match(prefix).blocks == 2
        assert client.exists(prefix) == [True, True]
        assert client.pin(prefix) == 2
        assert client.get(distant).missing[0].reason == "directory"
        with client.reserve(prompt(1)) as slots:
            slots[0].view[:] = 0
        assert slots.stored == (0,)
        handle.away = False
        check(client, distant)

    def test_nodes_that_were_known_are_still_used(self, cluster: Cluster) -> None:
        cluster.start("one")
        handle = cluster.flaky()
        client = cluster.open(members=handle)
        assert len(client.nodes()) == 1
        handle.away = True
        prefix = prompt(2)
        assert client.put(prefix, payloads_of(prefix)).complete
        numbers = client.statistics()
        assert list(numbers["nodes"]) == ["one"]
        assert not numbers["directory"]["healthy"]
        assert client.get(prefix).missing[0].reason == "directory"
        with pytest.raises(NodeUnavailable, match="the directory is away"):
            client.remove(prefix)
        assert cluster.members["one"].has(prefix) == [False, False]

    def test_the_log_says_it_once_and_not_with_every_read(
        self, cluster: Cluster, caplog: pytest.LogCaptureFixture
    ) -> None:
        """A busy engine reads a thousand times during the seconds of a restart of Redis."""
        home, far = cluster.start("home"), cluster.start("far")
        distant = far.put(prompt(1))
        cluster.settle()
        handle = cluster.flaky()
        client = cluster.open(home, members=handle)

        def said() -> list[str]:
            lines = [r.getMessage() for r in caplog.records if "directory" in r.getMessage()]
            caplog.clear()
            return lines

        said()
        for _ in range(2):
            handle.away = True
            for _ in range(5):
                assert client.match(distant).blocks == 0
                assert client.get(distant).missing[0].reason == "directory"
            (line,) = said()
            assert line.startswith("the directory is away")
            handle.away = False
            check(client, distant)
            assert said() == ["the directory answers again"]

    def test_a_client_that_never_knew_anybody_says_so(self, cluster: Cluster) -> None:
        cluster.start("one")
        handle = cluster.flaky()
        handle.away = True
        client, prefix, split = cluster.open(members=handle), prompt(1), fresh_prefix(1, SPLIT)
        with client.reserve(prefix) as slots:
            for verb in (
                lambda: client.put(prefix, payloads_of(prefix)),
                lambda: client.put(prefix, payloads_of(prefix), replicas=2, sync=False),
                lambda: client.put(split, payloads_of(split), shard=(0, 2)),
                lambda: client.put(prefix, payloads_of(prefix), node=1),
                lambda: client.reserve(split, shard=(0, 2)),
                lambda: client.reserve(prefix, node=1),
                lambda: slots.publish(0),
                lambda: client.remove(prefix),
                lambda: client.evacuate(1),
                client.nodes,
                client.statistics,
            ):
                with pytest.raises(NodeUnavailable, match="no node of the pool is known"):
                    verb()
            slots.abort()
        with client.reserve(prefix) as slots:
            slots[0].skip()
        with pytest.raises(NodeUnavailable), client.reserve(prefix) as slots:
            pass
        assert client.match(prefix).blocks == 0
        assert client.exists(prefix) == [False]
        assert client.pin(prefix) == client.unpin(prefix) == 0
        with client.get(prefix) as blocks:
            assert blocks.reason == "directory"
        with client.stream(prefix) as stream:
            assert not stream.blocks
        with pytest.raises(NoRoom):
            client.replicate(prefix, [1])


class TestStatistics:
    def test_every_node_and_every_way_by_name(self, cluster: Cluster) -> None:
        home, far = cluster.start("home"), cluster.start("far")
        prefix = far.put(prompt(2))
        cluster.settle()
        client = cluster.open(home)
        check(client, prefix)
        numbers = client.statistics()
        assert set(numbers) == {"nodes", "links", "home", "directory"}
        assert set(numbers["nodes"]) == {"home", "far"}
        assert numbers["home"] == "home"
        assert numbers["nodes"]["far"]["directory"]["number"] == far.number
        assert numbers["nodes"]["far"]["directory"]["healthy"]
        link = numbers["links"]["far"]
        assert (link["transfers"], link["errors"], link["up"]) == (1, 0, True)
        assert link["bytes"] >= 2 * LARGE.block_bytes
        assert link["latency_s"] > 0
        assert link["bandwidth_bytes_s"] > 0

    def test_two_nodes_of_one_name(self, cluster: Cluster) -> None:
        from msgspec.structs import replace

        one = cluster.start("one")
        other = cluster.directory.register(replace(cluster.directory.nodes()[one.number]))
        names = cluster.open().statistics()["nodes"]
        assert set(names) == {f"one ({one.number})", f"one ({other})"}
        cluster.directory.withdraw(other)


def test_what_was_put_to_a_node_is_found_at_once(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the directory has it."""
    one, two = cluster.start("one"), cluster.start("two")
    client = cluster.open()
    members = client._nodes.driver.members
    monkeypatch.setattr(members, "locate", lambda keys: [()] * len(keys))
    for node in (one, two):
        prefix = fresh_prefix(2)
        assert client.put(prefix, payloads_of(prefix), node=node.number).complete
        with client.get(prefix) as blocks:
            assert blocks.complete
            assert_right(blocks, prefix)
