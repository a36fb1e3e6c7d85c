"""What was removed from a pool stays removed: copies under way, and nodes that were away."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from kvsupport import Background, fresh_prefix, payloads_of, wait_until
from poolsupport import LARGE, Cluster, Held, Member, check, holders

from tiffin.kvstore import Client
from tiffin.kvstore.client.pool import removal
from tiffin.kvstore.client.pool.replication.node_copy import Copier
from tiffin.kvstore.client.pool.verb_driver import VerbDriver
from tiffin.kvstore.errors import DeadlineExceeded, NodeUnavailable, NoRoom
from tiffin.kvstore.node.core.removal_memory import BarredKeys, RemovalLog
from tiffin.kvstore.node.node import Node

if TYPE_CHECKING:
    from pathlib import Path

    from tiffin.kvstore import Prefix


def prompt(blocks: int = 3) -> Prefix:
    return fresh_prefix(blocks, LARGE)


def by_replicate(client: Client, prefix: Prefix, source: Member, target: Member) -> None:
    with pytest.raises(NoRoom, match="no other node is known to have"):
        client.replicate(prefix, [target.number])


def by_evacuation(client: Client, prefix: Prefix, source: Member, target: Member) -> None:
    client.evacuate(source.number)


def by_prefetch(client: Client, prefix: Prefix, source: Member, target: Member) -> None:
    client.prefetch(prefix).wait()


def by_reading(client: Client, prefix: Prefix, source: Member, target: Member) -> None:
    client.get(prefix).release()


WAYS = [by_replicate, by_evacuation, by_prefetch, by_reading]


def hold(patch: pytest.MonkeyPatch, owner: Any, name: str, *, after: bool = False) -> Held:
    """Hold this method's first call, before or after it does its work."""
    action = getattr(owner, name)
    held = Held(lambda *_, **__: None)

    def holding(*arguments: Any, **keywords: Any) -> Any:
        if not after:
            held()
        result = action(*arguments, **keywords)
        if after:
            held()
        return result

    patch.setattr(owner, name, holding)
    return held


class TestCopiesUnderWay:
    @pytest.mark.parametrize("way", WAYS)
    def test_a_copy_that_leased_its_source_before_the_removal_is_not_stored(
        self, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, way: Any
    ) -> None:
        """The bytes are read, and the commit comes after the removal was answered."""
        target, source = cluster.start("target"), cluster.start("source")
        prefix = source.put(prompt())
        cluster.settle()
        client = cluster.open(target, admission="always")
        read = (VerbDriver, "read") if way is by_reading else (Copier, "_move")
        held = hold(monkeypatch, *read, after=True)
        copying = Background(lambda: way(client, prefix, source, target))
        assert held.reached.wait(30)
        assert cluster.open().remove(prefix) == 3
        held.go.set()
        copying.result()
        assert holders(cluster, prefix) == [[]] * 3
        cluster.quiet()

    def test_a_removal_that_came_to_the_target_before_the_reservation(
        self, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The source was leased before. The source is asked once more, even if the target has
        forgotten the removal."""
        target, source = cluster.start("target"), cluster.start("source")
        prefix = source.put(prompt())
        cluster.settle()
        client = cluster.open()
        held = hold(monkeypatch, Copier, "_copy_leased")
        monkeypatch.setattr(BarredKeys, "bars", lambda *_: False)
        copying = Background(lambda: by_replicate(client, prefix, source, target))
        assert held.reached.wait(30)
        assert cluster.open().remove(prefix) == 3
        held.go.set()
        copying.result()
        assert holders(cluster, prefix) == [[]] * 3
        cluster.quiet()

    def test_a_put_after_the_removal_is_stored_and_may_be_copied_later(
        self, cluster: Cluster
    ) -> None:
        target, source = cluster.start("target"), cluster.start("source")
        prefix = source.put(prompt())
        cluster.settle()
        client = cluster.open(target, admission="always")
        assert client.remove(prefix) == 3
        source.put(prefix)
        cluster.settle()
        check(client, prefix)  # from there: it is not copied while the removal may be under way
        assert target.has(prefix) == [False] * 3
        target.node.core._barred._until.clear()
        check(client, prefix)
        assert target.has(prefix) == [True] * 3

    def test_a_replica_that_a_put_ordered_is_not_made_after_the_removal(
        self, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        cluster.start("one"), cluster.start("two")
        client, prefix = cluster.open(), prompt()
        held = hold(monkeypatch, Copier, "copy")
        assert client.put(prefix, payloads_of(prefix), replicas=2, sync=False).complete
        assert held.reached.wait(30)
        assert client.remove(prefix) == 3
        held.go.set()
        wait_until(
            lambda: all(order.done() for order in client._nodes._orders._ordered), "it has ended"
        )
        assert holders(cluster, prefix) == [[]] * 3


class TestWhoIsAsked:
    def test_a_node_that_the_directory_has_lost_is_asked_if_it_was_known(
        self, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        home, far = cluster.start("home"), cluster.start("far")
        prefix = far.put(prompt())
        client = cluster.open(home)
        assert len(client.nodes()) == 2
        monkeypatch.setattr(client._nodes.driver.members, "nodes", lambda **_: {})
        assert client.remove(prefix) == 3
        assert far.has(prefix) == [False] * 3

    @pytest.mark.parametrize("with_home", [True, False])
    def test_an_empty_directory_is_no_answer(
        self, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, with_home: bool
    ) -> None:
        home, far = cluster.start("home"), cluster.start("far")
        prefix = far.put(prompt())
        client = cluster.open(home if with_home else None)
        monkeypatch.setattr(client._nodes.driver.members, "nodes", lambda **_: {})
        with pytest.raises(NodeUnavailable, match="the directory lists none"):
            client.remove(prefix)

    @pytest.mark.parametrize("known", [True, False])
    def test_a_directory_that_does_not_answer_is_an_error_after_all_known_have_removed(
        self, cluster: Cluster, known: bool
    ) -> None:
        home, far = cluster.start("home"), cluster.start("far")
        prefix = far.put(home.put(prompt()))
        handle = cluster.flaky()
        client = cluster.open(home, members=handle)
        handle.away = not known
        if known:
            assert len(client.nodes()) == 2
            handle.away = True
        with pytest.raises(NodeUnavailable, match="the directory is away"):
            client.remove(prefix)
        assert home.has(prefix) == [False] * 3
        assert far.has(prefix) == [not known] * 3

    def test_a_node_that_comes_meanwhile_is_asked_too(
        self, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        home, far = cluster.start("home"), cluster.start("far")
        prefix = far.put(prompt())
        client = cluster.open()
        members = client._nodes.driver.members
        both = members.nodes()
        answers = [{home.number: both[home.number]}, both, both]
        monkeypatch.setattr(members, "nodes", lambda **_: answers.pop(0))
        assert client.remove(prefix) == 3
        assert answers == []

    def test_a_node_that_has_left_is_asked_once(self, cluster: Cluster) -> None:
        home, far = cluster.start("home"), cluster.start("far")
        client = cluster.open(home)
        assert len(client.nodes()) == 2
        far.stop()
        assert client.remove(prompt()) == 0
        assert [record.name for record in client._nodes.driver.seen().values()] == ["home"]

    def test_a_removal_that_took_too_long_is_no_success(
        self, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What bars copies may have ended at the first node before the last one was reached."""
        cluster.start("one")
        client = cluster.open()
        monkeypatch.setattr(removal, "OVERRUN_S", -100.0)
        with pytest.raises(DeadlineExceeded, match="a copy may have passed it by"):
            client.remove(prompt())


class TestNodesThatReturn:
    """A node with NVMe stops, blocks are removed, and it starts again."""

    def start(self, cluster: Cluster, folder: Path) -> Member:
        nbytes = 16 * LARGE.extent_bytes
        member = cluster.start("away", nvme_path=folder, nvme_bytes=nbytes, awaits_peers=True)
        wait_until(lambda: member.node.core.takes_copies, "it has heard of removals")
        return member

    def test_it_hears_of_what_was_removed_meanwhile(self, cluster: Cluster, tmp_path: Path) -> None:
        cluster.start("here")
        away = self.start(cluster, tmp_path)
        kept, gone = away.put(prompt()), away.put(prompt())
        away.stop()
        client = cluster.open()
        assert client.remove(gone) == 0
        back = self.start(cluster, tmp_path)
        assert (back.has(kept), back.has(gone)) == ([True] * 3, [False] * 3)
        cluster.settle()
        check(client, kept)
        back.node.check()
        with Client.attach(back.node) as at_once:  # and it is a block like any other
            assert at_once.put(gone, payloads_of(gone)).complete

    def test_nothing_is_served_before_the_others_have_told(
        self, cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        cluster.start("here")
        away = self.start(cluster, tmp_path)
        prefix = away.put(prompt())
        away.stop()
        held = hold(monkeypatch, Node, "catch_up")
        starting = Background(lambda: self.start(cluster, tmp_path))
        assert held.reached.wait(30)
        wait_until(lambda: cluster.members["away"] is not away, "it has started")
        back = cluster.members["away"].node
        assert back.match(prefix.key_bytes) == b""
        held.go.set()
        assert starting.result().has(prefix) == [True] * 3

    def test_what_was_put_since_the_start_stays(
        self, cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        cluster.start("here")
        away = self.start(cluster, tmp_path)
        prefix = away.put(prompt())
        away.stop()
        cluster.open().remove(prefix)
        held = hold(monkeypatch, Node, "catch_up")
        starting = Background(lambda: self.start(cluster, tmp_path))
        assert held.reached.wait(30)
        wait_until(lambda: cluster.members["away"] is not away, "it has started")
        with Client.attach(cluster.members["away"].node) as client:
            assert client.put(prefix[:2], payloads_of(prefix[:2])).complete
            assert client.remove(prefix[:1]) == 1
        held.go.set()
        back = starting.result()
        assert back.has(prefix) == [False, True, False]
        back.node.check()

    def test_a_pool_that_stops_as_a_whole_keeps_what_is_on_disk(
        self, cluster: Cluster, tmp_path: Path
    ) -> None:
        away = self.start(cluster, tmp_path)
        prefix = away.put(prompt())
        away.stop()
        assert self.start(cluster, tmp_path).has(prefix) == [True] * 3

    def test_who_missed_more_than_is_remembered_begins_empty(
        self, cluster: Cluster, tmp_path: Path
    ) -> None:
        here = cluster.start("here")
        away = self.start(cluster, tmp_path)
        prefix = away.put(prompt())
        away.stop()
        here.node.core.removal_log = RemovalLog(remembered_max=2)
        cluster.open().remove(prompt())
        assert self.start(cluster, tmp_path).has(prefix) == [False] * 3

    def test_a_node_that_the_directory_had_lost_hears_too(self, cluster: Cluster) -> None:
        """It runs on, and registers anew."""
        here, lost = cluster.start("here"), cluster.start("lost")
        wait_until(lambda: lost.node._caught_up, "it has heard of removals")
        prefix = lost.put(prompt())
        here.node.core.removal_log.note(prefix.keys)
        with cluster.directory._state.lock:
            cluster.directory._state.end(lost.number)
        wait_until(lambda: lost.has(prefix) == [False] * 3, "it is told")

    def test_a_copy_that_is_ordered_at_once_waits_until_it_has_heard(
        self, cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        here = cluster.start("here")
        prefix = here.put(prompt())
        cluster.settle()
        wait_until(lambda: here.node._caught_up, "it does not catch up any more")
        held = hold(monkeypatch, Node, "catch_up")
        starting = Background(lambda: self.start(cluster, tmp_path))
        assert held.reached.wait(30)
        wait_until(lambda: "away" in cluster.members, "it has started")
        client, number = cluster.open(), cluster.members["away"].number
        copying = Background(lambda: client.replicate(prefix, [number]))
        held.go.set()
        starting.result()
        assert copying.result() == {number: 3}
