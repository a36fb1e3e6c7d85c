"""Reads of one prompt from several nodes, some of which are lost, slow, wrong or gone."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from kvsupport import SLACK_S, Background, assert_right, fresh_prefix, wait_until, within
from poolsupport import LARGE, Cluster, Member

from tiffin.kvstore.client.pool.peers import PoolOptions
from tiffin.kvstore.client.pool.remote import block_read, remote_node
from tiffin.kvstore.errors import ClientClosed, InvalidInput, NodeUnavailable
from tiffin.kvstore.node.core.node_core import CoreOptions
from tiffin.messenger.health import MAX_S, Health

if TYPE_CHECKING:
    from tiffin.kvstore import Client, Prefix

BLOCK = LARGE.extent_bytes
# In these tests a node that sends nothing for a quarter of a second is given up.
HEDGE_S = 0.25


def prompt(blocks: int = 4) -> Prefix:
    return fresh_prefix(blocks, LARGE)


def read(client: Client, prefix: Prefix, into: bool = True, timeout_s: float = 10.0) -> str:
    """Get all of it and compare every byte; how many blocks came, and the reason for the rest."""
    target = np.zeros((len(prefix), LARGE.block_bytes), np.uint8) if into else None
    with client.get(prefix, into=target, timeout_s=timeout_s) as blocks:
        assert_right(blocks, prefix)
        return f"{len(blocks)} {blocks.reason}"


def reads_of(member: Member) -> int:
    """How many blocks a node has served."""
    return member.counters()["dram_hits"]


class TestSeveralNodes:
    @pytest.mark.parametrize("into", [False, True], ids=["view", "into"])
    def test_head_from_one_and_tail_from_another(self, cluster: Cluster, into: bool) -> None:
        one, two = cluster.start("one"), cluster.start("two")
        prefix = prompt(6)
        one.put(prefix[:4])
        two.put(prefix[4:])
        cluster.settle()
        client = cluster.open()
        assert client.match(prefix).blocks == 6
        assert read(client, prefix, into) == "6 None"
        assert (reads_of(one), reads_of(two)) == (4, 2)

    def test_blocks_in_turns_on_three_nodes(self, cluster: Cluster) -> None:
        nodes = [cluster.start(name) for name in ("one", "two", "three")]
        prefix = prompt(9)
        for index in range(9):
            nodes[index % 3].put(prefix[index : index + 1])
        cluster.settle()
        assert read(cluster.open(), prefix) == "9 None"
        assert [reads_of(node) for node in nodes] == [3, 3, 3]

    def test_a_hole_ends_what_can_be_used(self, cluster: Cluster) -> None:
        one, two = cluster.start("one"), cluster.start("two")
        prefix = prompt(5)
        one.put(prefix[:2])
        two.put(prefix[3:])
        cluster.settle()
        client = cluster.open()
        assert client.match(prefix).blocks == 2
        assert client.exists(prefix) == [True, True, False, True, True]
        assert read(client, prefix) == "2 miss"
        assert reads_of(two) == 0

    def test_both_have_all_and_one_is_asked(self, cluster: Cluster) -> None:
        one, two = cluster.start("one"), cluster.start("two")
        prefix = prompt()
        one.put(prefix)
        two.put(prefix)
        cluster.settle()
        assert read(cluster.open(hedge_s=60.0), prefix) == "4 None"
        assert sorted([reads_of(one), reads_of(two)]) == [0, 4]

    def test_ranges_come_from_wherever_they_are(self, cluster: Cluster) -> None:
        one, two = cluster.start("one"), cluster.start("two")
        prefix = prompt(2)
        one.put(prefix[:1])
        two.put(prefix[1:])
        cluster.settle()
        client = cluster.open()
        with client.get(prefix) as whole:
            wanted = [block.layer(2).v[1:3].tobytes() for block in whole]
        with client.get(prefix, layers=(1, 3), heads=(1, 3)) as part:
            assert [block.layer(2).v.tobytes() for block in part] == wanted

    def test_a_prompt_larger_than_a_nodes_dram_comes_in_parts(
        self, cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        folder = tmp_path_factory.mktemp("nvme")
        one = cluster.start("one", 4, nvme_path=folder, nvme_bytes=16 * BLOCK, flush_s=0.0)
        prefix = one.put(prompt(10))
        cluster.settle()
        assert read(cluster.open(), prefix, timeout_s=30) == "10 None"

    def test_many_threads_share_one_client(self, cluster: Cluster) -> None:
        nodes = [cluster.start("one"), cluster.start("two")]
        prefixes = [prompt(3) for _ in range(6)]
        for index, prefix in enumerate(prefixes):
            nodes[index % 2].put(prefix[:2])
            nodes[1 - index % 2].put(prefix[2:])
        cluster.settle()
        client = cluster.open()

        def work(index: int) -> int:
            for turn in range(8):
                assert read(client, prefixes[(index + turn) % 6], bool(turn % 2)) == "3 None"
            return 1

        threads = [Background(lambda i=i: work(i)) for i in range(20)]
        assert sum(thread.result(60) for thread in threads) == 20
        assert all(link["errors"] == 0 for link in client.statistics()["links"].values())


class TestLostAndStalled:
    @pytest.fixture
    def prefix(self, cluster: Cluster) -> Prefix:
        """A prefix on `sick`, which is behind a relay, and on `well`."""
        sick, well = cluster.start("sick", relayed=True), cluster.start("well")
        prefix = sick.put(prompt(6))
        well.put(prefix)
        cluster.settle()
        return prefix

    def client(self, cluster: Cluster, **numbers: float) -> Client:
        """A client that asks `sick` first, because its measurement of `well` is slow."""
        client = cluster.open(**{"hedge_s": HEDGE_S, **numbers})
        for _ in range(20):
            client._nodes.driver.links.moved(cluster.members["well"].number, 1, 0.01)
        return client

    def test_only_missing_blocks_are_read_again_when_a_node_is_lost(
        self, cluster: Cluster, prefix: Prefix
    ) -> None:
        sick, well = cluster.members["sick"], cluster.members["well"]
        assert sick.network is not None
        client = self.client(cluster, hedge_s=60.0)
        sick.network.cut_after(int(3.5 * BLOCK))
        assert read(client, prefix) == "6 None"
        assert reads_of(well) == 3
        sick.network.mend()

    def test_only_missing_blocks_are_read_again_when_a_node_stalls(
        self, cluster: Cluster, prefix: Prefix, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(Health, "_rest_s", lambda _: MAX_S)
        sick, well = cluster.members["sick"], cluster.members["well"]
        assert sick.network is not None
        fetched: list[block_read.ReadOutcome] = []

        def noting(*how: Any) -> block_read.ReadOutcome:
            fetched.append(block_read.fetch(*how))
            return fetched[-1]

        monkeypatch.setattr(remote_node, "fetch", noting)
        for _ in range(20):
            client = self.client(cluster)
            assert client.match(prefix).blocks == 6
            fetched.clear()
            before = reads_of(well)
            sick.network.stall_after(int(2.5 * BLOCK))
            with within(HEDGE_S, "a read of a node that stalls"):
                assert read(client, prefix, timeout_s=30.0) == "6 None"
            assert fetched[0].reason == "stalled"
            assert reads_of(well) == before + 6 - fetched[0].blocks
            if fetched[0].blocks:  # none if this whole process was stopped before they came
                break
            sick.network.resume()
        # A chunk of the relay holds less than a block: two or three have come through whole.
        assert fetched[0].blocks in (1, 2)
        assert client._nodes.driver.links.down(time.monotonic()) == {sick.number}
        before = reads_of(well)
        assert read(client, prefix) == "6 None"  # `sick` rests for a while
        assert reads_of(well) == before + 6
        sick.network.resume()

    def test_a_node_that_never_answers_is_given_up_on(
        self, cluster: Cluster, prefix: Prefix
    ) -> None:
        sick = cluster.members["sick"]
        assert sick.network is not None
        client = self.client(cluster)
        sick.network.pause()
        with within(HEDGE_S, "a read of a node that says nothing"):
            assert read(client, prefix) == "6 None"
        sick.network.resume()

    @pytest.mark.slow
    def test_who_was_given_up_is_waited_for_when_the_other_is_lost(
        self, cluster: Cluster, prefix: Prefix
    ) -> None:
        """A node that is stopped for a moment is better than none."""
        sick, well = cluster.members["sick"], cluster.members["well"]
        assert sick.network is not None
        client = self.client(cluster)
        assert read(client, prefix) == "6 None"
        well.hang_up()
        for _ in range(2):  # then `well` is known to be lost, and `sick` to have been late
            sick.network.pause()
            resume = threading.Timer(0.4, sick.network.resume)
            resume.start()
            assert read(client, prefix, timeout_s=30.0) == "6 None"
            resume.join()

    def test_two_that_are_silent_take_turns(self, cluster: Cluster) -> None:
        """One of them may be dead, and the other stopped for a moment only."""
        still, dead = cluster.start("still", relayed=True), cluster.start("dead", relayed=True)
        prefix = still.put(dead.put(prompt(2)))
        cluster.settle()
        client = cluster.open(hedge_s=HEDGE_S)
        client.statistics()  # it is connected to both
        links = client._nodes.driver.links
        for _ in range(20):
            links.moved(dead.number, 1, 1.0)  # the other one is asked first
        assert still.network is not None
        assert dead.network is not None
        still.network.pause()
        dead.network.pause()
        reading = Background(lambda: read(client, prefix, timeout_s=60.0))
        wait_until(lambda: dead.number in links.down(time.monotonic()), "its turn has ended")
        still.network.resume()
        assert reading.result() == "2 None"
        dead.network.resume()

    def test_without_budget_nobody_else_is_asked(self, cluster: Cluster, prefix: Prefix) -> None:
        sick, well = cluster.members["sick"], cluster.members["well"]
        assert sick.network is not None
        client = self.client(cluster, hedge_share=0.0)
        sick.network.pause()
        assert read(client, prefix, timeout_s=0.5) == "0 deadline"
        assert reads_of(well) == 0
        sick.network.resume()

    def test_the_budget_is_spent_and_saved_up_again(self, cluster: Cluster) -> None:
        links = cluster.open(hedge_share=0.5)._nodes.driver.links
        for _ in range(10):
            assert links.may_hedge()
            links.hedged()
        assert not links.may_hedge()
        links.moved(1, 1000, 0.001)
        assert not links.may_hedge()
        links.moved(1, 1000, 0.001)
        assert links.may_hedge()

    def test_the_only_replica_is_waited_for(self, cluster: Cluster) -> None:
        only = cluster.start("only", relayed=True)
        prefix = only.put(prompt(2))
        cluster.settle()
        client = cluster.open(hedge_s=0.05)
        assert read(client, prefix) == "2 None"
        assert only.network is not None
        only.network.pause()
        resume = threading.Timer(0.4, only.network.resume)
        resume.start()
        assert read(client, prefix) == "2 None"
        resume.join()

    def test_a_silent_only_replica_costs_one_deadline_and_not_each_time(
        self, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(Health, "_rest_s", lambda _: MAX_S)
        only = cluster.start("only", relayed=True)
        prefix = only.put(prompt(2))
        cluster.settle()
        client = cluster.open(hedge_s=0.05)
        assert only.network is not None
        only.network.pause()
        with within(0.3, "a get within its deadline"):
            assert read(client, prefix, timeout_s=0.3) == "0 deadline"
        began = time.monotonic()
        assert read(client, prefix, timeout_s=30) == "0 lost"
        assert time.monotonic() - began < 15, "a node that was silent is left alone"
        only.network.resume()
        client._nodes.driver.links._ways[
            only.number
        ].health.retry_at = time.monotonic()  # its rest is over
        wait_until(lambda: read(client, prefix) == "2 None", "the node is asked again")

    def test_what_cannot_be_had_is_said_to_be_lost(self, cluster: Cluster) -> None:
        one = cluster.start("one")
        prefix = one.put(prompt(2))
        cluster.settle()
        client = cluster.open()
        one.hang_up()
        assert read(client, prefix) == "0 lost"
        assert client.match(prefix).blocks == 2  # by the directory

    def test_no_time_means_what_is_there_now(
        self, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(block_read, "GRACE_S", SLACK_S)  # enough for a delayed node
        one = cluster.start("one")
        prefix = one.put(prompt(2))
        cluster.settle()
        assert read(cluster.open(), prefix, timeout_s=0) == "2 None"


class TestHints:
    """Locations of the directory are hints, and may be wrong."""

    def test_an_entry_that_is_stale_costs_a_question_and_is_taken_back(
        self, cluster: Cluster
    ) -> None:
        one, two = cluster.start("one"), cluster.start("two")
        prefix = two.put(prompt())
        cluster.settle()
        cluster.forge(one.number, prefix)
        client = cluster.open()

        def is_taken_back() -> bool:
            client._nodes.driver.links.moved(two.number, 1, 1.0)  # the other one is asked first
            assert read(client, prefix) == "4 None"
            return cluster.directory.locate(prefix.keys[:1]) == [(two.number,)]

        wait_until(is_taken_back, "the stale entry is taken back")

    def test_blocks_that_nobody_has_are_a_miss(self, cluster: Cluster) -> None:
        one = cluster.start("one")
        prefix = prompt()
        cluster.forge(one.number, prefix)
        client = cluster.open()
        assert client.match(prefix).blocks == 4  # a hint
        assert read(client, prefix) == "0 miss"

    def test_entries_of_nodes_that_never_were_are_a_miss(self, cluster: Cluster) -> None:
        one = cluster.start("one")
        prefix = one.put(prompt(3))
        cluster.settle()
        state = cluster.directory._state
        with state.lock:
            for key in prefix.keys:
                state.holders[key] = (999, *state.holders[key])
        assert read(cluster.open(), prefix) == "3 None"
        with state.lock:
            for key in prefix.keys:
                state.holders[key] = state.holders[key][1:]

    @pytest.mark.parametrize(
        "address",
        ["", "nonsense", "a..b:1", "127.0.0.1:0", "x" * 290 + ":1", "::1:7", "127.0.0.1:1"],
    )
    def test_a_record_with_an_address_that_leads_nowhere(
        self, cluster: Cluster, address: str
    ) -> None:
        from msgspec.structs import replace

        one = cluster.start("one")
        prefix = one.put(prompt(2))
        cluster.settle()
        forged = replace(cluster.directory.nodes()[one.number], address=address, name="forged")
        number = cluster.directory.register(forged)
        cluster.forge(number, prefix)
        client = cluster.open()
        client._nodes.driver.links.moved(
            one.number, 1, 1.0
        )  # so that the forged one is tried first
        assert read(client, prefix) == "2 None"
        with pytest.raises(NodeUnavailable):
            client.replicate(prefix, [number])
        cluster.directory.withdraw(number)

    def test_a_record_of_something_that_is_no_node(self, cluster: Cluster) -> None:
        from socket import create_server

        from msgspec.structs import replace

        one = cluster.start("one")
        prefix = one.put(prompt(2))
        cluster.settle()
        with create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            record = cluster.directory.nodes()[one.number]
            number = cluster.directory.register(
                replace(record, address=f"127.0.0.1:{port}", name="web server")
            )
            cluster.forge(number, prefix)

            def greet() -> None:
                connection, _ = server.accept()
                with connection:
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")
                    connection.recv(1)

            greeter = Background(greet)
            client = cluster.open()
            client._nodes.driver.links.moved(one.number, 1, 1.0)
            assert read(client, prefix) == "2 None"
            greeter.result()
        cluster.directory.withdraw(number)

    def test_a_node_that_took_anothers_place_is_another_node(self, cluster: Cluster) -> None:
        """With another process at the address, no location of the first one is believed."""
        old = cluster.start("old", relayed=True)
        prefix = old.put(prompt(3))
        cluster.settle()
        client = cluster.open()
        assert read(client, prefix) == "3 None"
        new = cluster.start("new")
        assert old.network is not None
        host, _, port = new.address.rpartition(":")
        old.network._target = (host, int(port))
        old.network.cut()
        assert read(client, prefix) in ("0 miss", "0 lost")  # the new node lacks the blocks
        new.put(prefix)
        cluster.settle()
        wait_until(lambda: read(client, prefix) == "3 None", "the new node is found")
        assert reads_of(new) >= 3


class TestDamage:
    def test_another_replica_serves_and_the_node_is_told(self, cluster: Cluster) -> None:
        bad, good = cluster.start("bad"), cluster.start("good")
        prefix = bad.put(prompt())
        good.put(prefix)
        cluster.settle()
        bad.flip(prefix[2:])
        client = cluster.open(hedge_s=60.0)
        for _ in range(20):
            client._nodes.driver.links.moved(good.number, 1, 0.01)
        assert read(client, prefix) == "4 None"
        assert (reads_of(bad), reads_of(good)) == (4, 2)  # the bad block and the one behind it
        wait_until(lambda: bad.has(prefix) == [True, True, False, True], "the node drops it")
        assert bad.counters()["corrupt"] == 1

    def test_the_only_replica_is_bad(self, cluster: Cluster) -> None:
        bad = cluster.start("bad")
        prefix = bad.put(prompt())
        cluster.settle()
        bad.flip(prefix[1:])
        assert read(cluster.open(), prefix) == "1 corrupt"
        wait_until(lambda: bad.has(prefix) == [True, False, True, True], "the node drops it")

    def test_verification_can_be_left_out_but_not_of_headers(self, cluster: Cluster) -> None:
        bad = cluster.start("bad")
        prefix = bad.put(prompt(2))
        cluster.settle()
        bad.flip(prefix)
        bad.flip(prefix[1:], at=-LARGE.header_bytes + 20)
        with cluster.open(verify="off").get(prefix) as blocks:
            assert (len(blocks), blocks.reason) == (1, "corrupt")
        wait_until(lambda: bad.counters()["corrupt"] == 1, "the node drops it")

    def test_layers_are_verified_by_themselves(self, cluster: Cluster) -> None:
        bad = cluster.start("bad")
        prefix = bad.put(prompt(1))
        cluster.settle()
        bad.flip(prefix, at=LARGE.segments[2].offset)
        client = cluster.open()
        for layers, heads, complete in ((0, None, True), ((0, 2), (1, 2), True), (2, None, False)):
            with client.get(prefix, layers=layers, heads=heads) as blocks:
                assert blocks.complete == complete, layers
        wait_until(lambda: bad.counters()["corrupt"] == 1, "the node drops it")


class TestSpread:
    """Large reads over several streams."""

    def test_several_streams_bring_the_same_bytes(self, cluster: Cluster) -> None:
        one = cluster.start("one", 80)
        prefix = one.put(prompt(72))  # 18 MiB
        cluster.settle()
        client = cluster.open(streams=4)
        assert read(client, prefix) == "72 None"
        one.flip(prefix[40:])
        assert read(client, prefix) == "40 corrupt"
        wait_until(lambda: one.counters()["corrupt"] == 1, "the node drops it")

    @pytest.mark.parametrize(
        "numbers",
        [{"hedge_s": 0}, {"hedge_s": float("nan")}, {"hedge_share": 1.5}, {"hedge_share": -1},
         {"streams": 0}, {"streams": 9}],
        ids=str,
    )  # fmt: skip
    def test_options_that_cannot_be(self, numbers: dict[str, float]) -> None:
        with pytest.raises(InvalidInput):
            PoolOptions(**numbers)  # type: ignore[arg-type]


class TestClosing:
    def test_close_cuts_what_waits_for_a_stalled_node(self, cluster: Cluster) -> None:
        nodes = [cluster.start(f"n{i}", relayed=True) for i in range(3)]
        prefix = prompt(6)
        for i, node in enumerate(nodes):
            node.put(prefix[2 * i : 2 * i + 2])
        cluster.settle()
        client = cluster.open(hedge_s=60.0)
        assert read(client, prefix) == "6 None"
        target = np.zeros((6, LARGE.block_bytes), np.uint8)
        for node in nodes:
            assert node.network is not None
            node.network.pause()

        def get() -> str:
            try:
                return str(len(client.get(prefix, into=target, timeout_s=60)))
            except ClientClosed:
                return "closed"

        waiting = [Background(get) for _ in range(4)]
        time.sleep(0.1)
        with within(0, "closing while everybody stalls"):
            client.close()
        for one in waiting:
            assert one.result(5) in ("closed", "0")
        target[:] = 7  # it is the caller's again
        for node in nodes:
            assert node.network is not None
            node.network.resume()
        time.sleep(0.1)
        assert (target == 7).all()

    def test_close_cuts_a_hello_that_is_not_answered(self, cluster: Cluster) -> None:
        node = cluster.start("one", relayed=True)
        prefix = node.put(prompt(1))
        cluster.settle()
        assert node.network is not None
        node.network.pause()
        client = cluster.open(hedge_s=60.0)

        def get() -> str:
            try:
                return str(len(client.get(prefix, timeout_s=60)))
            except ClientClosed:
                return "closed"

        waiting = Background(get)
        time.sleep(0.1)
        began = time.monotonic()
        client.close()
        assert time.monotonic() - began < 4  # of the 5 s that a connection may take
        assert waiting.result(5) in ("closed", "0")
        node.network.resume()

    def test_a_closed_client_says_so(self, cluster: Cluster) -> None:
        cluster.start("one")
        client = cluster.open()
        client.close()
        client.close()
        with pytest.raises(ClientClosed):
            client.get(prompt(1))
        with pytest.raises(ClientClosed):
            client._nodes.driver.peer(1)

    def test_peers_that_left_are_forgotten(self, cluster: Cluster) -> None:
        client = cluster.open()
        engine = client._nodes.driver
        for index in range(12):
            member = cluster.start(f"n{index}")
            prefix = member.put(prompt(1))
            cluster.settle()
            assert read(client, prefix) == "1 None"
            member.stop()
            cluster.remember()
        assert len(engine._peers) < 12


def test_a_lease_that_ended_under_a_reader_is_a_loss(cluster: Cluster) -> None:
    """In a read over several streams, the lease may end before all ranges are requested."""
    one = cluster.start("one", 80, core=CoreOptions(remote_lease_s=0.05), relayed=True)
    prefix = one.put(prompt(72))
    cluster.settle()
    client = cluster.open(streams=4)
    assert read(client, prefix) in ("72 None", "0 lost")
