"""Nodes that copy from each other: for a client, before a node leaves, after one was lost."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest
from kvsupport import Background, fresh_prefix, wait_until, within
from poolsupport import LARGE, Cluster, Held, Member, check, fill, holders

from tiffin.kvstore.client.connection.node_link import LocalLink
from tiffin.kvstore.client.pool.replication import node_copy, replication_service
from tiffin.kvstore.client.pool.replication.replication_service import PinWatch
from tiffin.kvstore.errors import (
    Draining,
    InvalidInput,
    NodeUnavailable,
    NoRoom,
)
from tiffin.kvstore.node.core import messages

if TYPE_CHECKING:
    from tiffin.kvstore import Prefix


def prompt(blocks: int = 3) -> Prefix:
    return fresh_prefix(blocks, LARGE)


def queued(member: Member) -> int:
    """How many copies a node has queued or is making."""
    handler: Any = member.node._handlers[messages.Pull]
    count: int = handler.__self__._queued
    return count


class TestReplicating:
    def test_nodes_copy_from_each_other(self, cluster: Cluster) -> None:
        one, two, three = (cluster.start(name) for name in ("one", "two", "three"))
        prefix = prompt(5)
        one.put(prefix[:3])
        two.put(prefix[3:])
        cluster.settle()
        client = cluster.open()
        assert client.replicate(prefix, [three.number, one.number]) == {
            three.number: 5,
            one.number: 5,
        }
        assert one.has(prefix) == three.has(prefix) == [True] * 5
        for node in (one, two):
            node.stop()
        cluster.remember(three)
        check(cluster.open(), prefix)  # headers have their new offsets

    def test_nobody_has_it(self, cluster: Cluster) -> None:
        one = cluster.start("one")
        with pytest.raises(NoRoom, match="first block"):
            cluster.open().replicate(prompt(1), [one.number])

    @pytest.mark.slow
    def test_targets_that_cannot(self, cluster: Cluster) -> None:
        one, full = cluster.start("one"), cluster.start("full", 2)
        prefix = one.put(prompt(2))
        fill(full, 2)
        cluster.settle()
        client = cluster.open()
        with pytest.raises(NoRoom, match="node full has no room"):
            client.replicate(prefix, [full.number], timeout_s=5)
        with pytest.raises(NodeUnavailable):
            client.replicate(prefix, [4711])
        full.node.draining = True
        with pytest.raises(Draining):
            client.replicate(prefix, [full.number])

    def test_damage_is_not_copied(self, cluster: Cluster) -> None:
        one, two = cluster.start("one"), cluster.start("two")
        prefix = one.put(prompt(3))
        one.flip(prefix[1:])
        cluster.settle()
        assert cluster.open().replicate(prefix, [two.number]) == {two.number: 1}
        assert two.has(prefix)[1] is False
        wait_until(lambda: one.has(prefix) == [True, False, True], "the source is told")

    def test_a_pull_that_nobody_waits_for(self, cluster: Cluster) -> None:
        one, two = cluster.start("one"), cluster.start("two")
        prefix = one.put(prompt(3))
        cluster.settle()
        pull = messages.Pull(
            0, prefix.key_bytes, prefix.parent, prefix.start, one.number, 5.0, wait=False
        )
        assert cluster.open()._nodes.driver.ask(two.number, pull, 5.0).count == 0
        wait_until(lambda: two.has(prefix) == [True] * 3, "it is copied")

    @pytest.mark.parametrize(
        ("change", "error"),
        [
            ({"keys": b"x" * 15}, InvalidInput),
            ({"keys": b""}, None),
            ({"source": 0}, NodeUnavailable),
            ({"source": 1 << 62}, NodeUnavailable),
            ({"timeout_s": 0.0}, None),
        ],
        ids=str,
    )
    def test_pulls_that_cannot_be(
        self, cluster: Cluster, change: dict[str, object], error: type[Exception] | None
    ) -> None:
        one = cluster.start("one")
        client = cluster.open()
        fields = {"keys": bytes(32), "parent": bytes(16), "depth": 0, "source": one.number}
        pull = messages.Pull(0, **{**fields, "timeout_s": 1.0, **change})  # type: ignore[arg-type]
        if error is None:
            assert client._nodes.driver.ask(one.number, pull, 5.0).count == 0
        else:
            with pytest.raises(error):
                client._nodes.driver.ask(one.number, pull, 5.0)


class TestLimitsOfTime:
    def test_a_commit_has_the_time_that_moving_the_bytes_left(
        self, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A copy may wait for its turn nearly until the deadline, which its commit keeps too."""
        source, target = cluster.start("source"), cluster.start("target")
        prefix = source.put(prompt(1))
        cluster.settle()
        given: list[float] = []
        move, call = node_copy.Copier._move, LocalLink.call

        def slow(copier: Any, part: Any, *rest: Any) -> Any:
            skip = move(copier, part, *rest)
            given.append(part.left_s())
            monkeypatch.setattr(node_copy._Part, "left_s", lambda part: 0.5)  # as after a long copy
            return skip

        def noting(link: LocalLink, request: Any, timeout_s: float) -> Any:
            if isinstance(request, messages.Commit):
                given.append(timeout_s)
            return call(link, request, timeout_s)

        monkeypatch.setattr(node_copy.Copier, "_move", slow)
        monkeypatch.setattr(LocalLink, "call", noting)
        assert cluster.open().replicate(prefix, [target.number], timeout_s=20.0)
        assert given[0] > 1.0
        assert given[1] == 0.5

    def test_time_in_the_queue_is_spent(
        self, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A queued copy whose client's time is over is not made: the next one gets its turn."""
        source, target = cluster.start("source"), cluster.start("target")
        waited, here = source.put(prompt(1)), target.put(source.put(prompt(1)))
        cluster.settle()
        engine = cluster.open()._nodes.driver
        held, late = Held(node_copy.Copier.copy), []
        at_work: list[Any] = []

        def pull(prefix: Prefix, timeout_s: float) -> messages.Pull:
            keys = prefix.key_bytes
            return messages.Pull(0, keys, prefix.parent, 0, source.number, timeout_s)

        def hold(*arguments: Any) -> Any:
            at_work.append(arguments)
            return held(*arguments)

        def work(*arguments: Any) -> Any:
            late.append(arguments[-1] < time.monotonic())
            return copy_now(*arguments)

        copy_now = node_copy.Copier.copy
        with monkeypatch.context() as patch:
            patch.setattr(node_copy.Copier, "copy", hold)
            busy = [
                Background(lambda: engine.ask(target.number, pull(here, 20.0), 20.0).count)
                for _ in range(replication_service.COPIERS)
            ]
            wait_until(lambda: len(at_work) == queued(target) == len(busy), "all work")
            orders = [
                Background(lambda p=p: engine.ask(target.number, pull(p, 0.05), 20.0).count)
                for p in (waited, here)
            ]
            wait_until(lambda: queued(target) == len(busy) + 2, "two more wait")
            time.sleep(0.06)
            patch.setattr(node_copy.Copier, "copy", work)
            held.go.set()
            assert [one.result() for one in orders] == [0, 1], "what is here needs no time"
            assert [one.result() for one in busy] == [1] * len(busy)
        assert late == [True, True]
        assert target.has(waited) == [False]


class TestEvacuating:
    def test_others_have_every_block_afterwards(self, cluster: Cluster) -> None:
        leaving = cluster.start("leaving", 64)
        stems = prompt(6)
        fork = LARGE.prefix([*stems.tokens[:128], *range(1, 129)], namespace=stems.namespace)
        prompts = [leaving.put(p) for p in (stems, fork, prompt(1), prompt(8))]
        cluster.start("a", 24), cluster.start("b", 24)
        cluster.settle()
        client = cluster.open()
        blocks = len(leaving.node.core.index)
        assert blocks == 6 + 2 + 1 + 8
        assert client.evacuate(leaving.number, timeout_s=60) == blocks
        assert client.nodes()[leaving.number].draining or leaving.node.draining
        leaving.stop()
        cluster.remember(cluster.members["a"], cluster.members["b"])
        for one in prompts:
            assert client.match(one).blocks == len(one)
            check(client, one)

    def test_what_another_has_is_not_copied(self, cluster: Cluster) -> None:
        one, two = cluster.start("one"), cluster.start("two")
        prefix = one.put(prompt(3))
        two.put(prefix)
        cluster.settle()
        before = two.counters()["commits"]
        assert cluster.open().evacuate(one.number) == 3
        assert two.counters()["commits"] == before

    def test_a_chain_that_one_node_has_no_room_for_goes_to_two(self, cluster: Cluster) -> None:
        leaving = cluster.start("leaving")
        prefix = leaving.put(prompt(8))
        small = [cluster.start(f"small{i}", 5) for i in range(2)]
        cluster.settle()
        for member in small:  # 0 blocks: no room is taken
            fill(member, 0)
        assert cluster.open().evacuate(leaving.number, timeout_s=60) == 8
        assert all(names for names in holders(cluster, prefix))

    def test_two_nodes_that_hand_over_to_each_other_do_not_wait_for_ever(
        self, cluster: Cluster
    ) -> None:
        one, two = cluster.start("one", 64), cluster.start("two", 64)
        for member in (one, two):
            for _ in range(4):
                member.put(prompt(2))
        cluster.settle()
        client = cluster.open()
        both = [
            Background(
                lambda n=n: client._nodes.driver.ask(n, messages.Evacuate(0, 30.0), 30.0).count
            )
            for n in (one.number, two.number, one.number, two.number)
        ]
        with within(5, "two evacuations at a time"):
            assert all(8 <= evacuation.result(30) <= 16 for evacuation in both)
        assert len(one.node.core.index) == len(two.node.core.index) == 16

    def test_what_nobody_took_is_offered_again(
        self, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        leaving, other = cluster.start("leaving"), cluster.start("other")
        prefix = leaving.put(prompt(3))
        cluster.settle()
        copy, tried = node_copy.Copier.copy, []

        def busy_at_first(*arguments: Any) -> int:
            tried.append(1)
            if len(tried) <= 2:
                raise NodeUnavailable("too busy to answer")
            return copy(*arguments)

        monkeypatch.setattr(node_copy.Copier, "copy", busy_at_first)
        monkeypatch.setattr(replication_service, "OFFER_AGAIN_S", (0.0, 0.0))
        assert cluster.open().evacuate(leaving.number, timeout_s=60) == 3
        assert other.has(prefix) == [True] * 3

    def test_nobody_to_hand_over_to(
        self, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(replication_service, "OFFER_AGAIN_S", (0.0,))
        one = cluster.start("one")
        one.put(prompt(2))
        assert cluster.open().evacuate(one.number) == 0


class TestWatchingPins:
    def test_a_pinned_block_gets_another_replica_when_a_node_is_lost(
        self, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        looks = []
        monkeypatch.setattr(replication_service, "WATCH_S", 0.05)
        look = replication_service.Caretaker._look_after_pins
        monkeypatch.setattr(
            replication_service.Caretaker, "_look_after_pins", lambda c: (look(c), looks.append(c))
        )
        one, two, three = (cluster.start(name) for name in ("one", "two", "three"))
        prefix = one.put(prompt(3))
        two.put(prefix)
        cluster.settle()
        client = cluster.open()
        assert client.pin(prefix, hard=True) == 3
        looks.clear()
        wait_until(lambda: len(set(looks)) == 3 and len(looks) > 6, "all caretakers have looked")
        two.stop()
        cluster.remember(one, three)
        wait_until(lambda: three.has(prefix) == [True] * 3, "another replica is made", 20)

    def test_the_lowest_number_of_those_that_are_left_acts(self) -> None:
        key, others = b"k" * 16, PinWatch()
        assert others.lost([key], [(1, 2, 3)], 2) == []
        assert others.lost([key], [(2, 3)], 2) == [key]
        assert others.lost([key], [(2, 3)], 2) == [key]  # until there is another
        assert others.lost([key], [(2, 3, 4)], 2) == []
        assert others.lost([key], [(1, 2)], 2) == []  # 1 is asked to

    def test_a_directory_that_is_being_filled_anew_is_not_believed(self) -> None:
        key, watch = b"k" * 16, PinWatch()
        assert watch.lost([key], [(1, 2)], 1) == []
        assert watch.lost([key], [()], 1) == []
        assert watch.lost([key], [(1,)], 1) == [key]

    def test_what_is_not_pinned_any_more_is_forgotten(self) -> None:
        key, watch = b"k" * 16, PinWatch()
        watch.lost([key], [(1, 2)], 1)
        assert watch.lost([], [], 1) == []
        assert watch.known == {}
