"""Nodes' events and inventories: the cursor alone, and the feed with real nodes."""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from kvsupport import fresh_prefix, wait_until
from poolsupport import LARGE, Cluster

from tiffin.conductor.events import node_feed as nodes_feed
from tiffin.conductor.events.index_updates import (
    NODE_TIERS,
    Added,
    Announced,
    Cleared,
    Gone,
    Heard,
    HolderInventory,
    Removed,
)
from tiffin.conductor.events.node_cursor import (
    BACKOFF_S,
    HEARD_S,
    LOST_S,
    POLL_S,
    SPACES_S,
    NodeCursor,
)
from tiffin.conductor.events.node_feed import NodesFeed
from tiffin.conductor.events.routed_blocks import Holdings
from tiffin.conductor.events.update_inbox import InboxClosed, UpdateInbox
from tiffin.conductor.state.prefix_index import PrefixIndex
from tiffin.kvstore import Client
from tiffin.kvstore.client.pool.members import FixedMembers
from tiffin.kvstore.credentials import Credentials
from tiffin.kvstore.errors import ProtocolError
from tiffin.kvstore.format.key_space import KeySpace
from tiffin.kvstore.node.core import messages
from tiffin.kvstore.node.core.event_log import EventLog

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tiffin.kvstore import Prefix


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def cursor() -> NodeCursor:
    return NodeCursor("n", 0.0, random.Random(1))


def page(seq: int, *numbers: int, more: bool = False) -> messages.KeyPage:
    return messages.KeyPage(1, seq, b"".join(map(key, numbers)), more)


def events(first: int, *signed: int, gap: bool = False) -> messages.EventPage:
    """A page of events: a positive number was added, a negative one removed."""
    flags = bytes(number > 0 for number in signed)
    return messages.EventPage(1, first, flags, b"".join(key(abs(n)) for n in signed), gap)


def tiered(seq: int, tiers: dict[int, int], *, more: bool = False) -> messages.KeyPage:
    return messages.KeyPage(1, seq, b"".join(map(key, tiers)), more, bytes(tiers.values()))


# -- the cursor ------------------------------------------------------------------------------------


def test_an_inventory_comes_first_and_then_what_happened_since() -> None:
    follower = cursor()
    assert follower.request() == messages.Inventory(0, after=0)
    assert follower.answered(page(7, 1, 2, more=True), 0.0) == [
        HolderInventory("n", "dram", [key(1), key(2)], True, False, 7)
    ]
    assert follower.request() == messages.Inventory(0, after=2)
    assert not follower.synced
    assert follower.answered(page(7, 3), 0.0) == [
        HolderInventory("n", "dram", [key(3)], False, True, 7)
    ]
    assert follower.synced
    assert follower.request() == messages.Spaces(0, 0)
    assert follower.answered(messages.SpacesPage(1, 5, [b"space"]), 0.5) == [
        Announced("n", (b"space",))
    ]
    assert follower.request() == messages.Events(0, after=7)
    assert follower.answered(events(8, 4, 5, -4, 6), 1.0) == [
        Added("n", "dram", [key(4), key(5)], 9),
        Removed("n", "dram", [key(4)], 10),
        Added("n", "dram", [key(6)], 11),
    ]
    assert (follower.request(), follower.due_at) == (messages.Events(0, after=11), 1.0 + POLL_S)
    assert follower.answered(events(12), 1.1) == []
    assert follower.answered(events(12), 1.0 + HEARD_S) == [Heard("n", "dram", 11)]


def test_key_spaces_are_asked_for_every_second_and_told_when_they_change() -> None:
    follower = cursor()
    follower.answered(page(7), 0.0)
    told = messages.SpacesPage(1, 5, [b"space"])
    assert follower.answered(told, 0.0) == [Announced("n", (b"space",))]
    follower.answered(events(8), SPACES_S / 2)
    assert follower.request() == messages.Events(0, after=7)
    follower.answered(events(8), SPACES_S)
    assert follower.request() == messages.Spaces(0, 5)
    assert follower.answered(messages.SpacesPage(1, 5, []), SPACES_S) == []
    follower.answered(events(8), 2 * SPACES_S)
    assert follower.answered(messages.SpacesPage(1, 6, []), 2 * SPACES_S) == [Announced("n", ())]
    with pytest.raises(ProtocolError, match="nobody asked"):
        follower.answered(messages.SpacesPage(1, 7, []), 2 * SPACES_S)
    follower.connected()  # perhaps to another life of the node
    follower.answered(page(1), 3 * SPACES_S)
    assert follower.request() == messages.Spaces(0, 0)


def test_an_empty_node_has_an_empty_inventory() -> None:
    assert cursor().answered(page(0), 0.0) == [HolderInventory("n", "dram", [], True, True, 0)]


def test_a_node_says_which_tier_a_block_is_in() -> None:
    follower = cursor()
    assert follower.answered(tiered(7, {1: 1}, more=True), 0.0) == [
        HolderInventory("n", "dram", [key(1)], True, False, 7)
    ]
    assert follower.answered(tiered(7, {2: 2, 3: 1, 4: 2}), 0.0) == [
        HolderInventory("n", "dram", [key(3)], False, True, 7),
        HolderInventory("n", "nvme", [key(2), key(4)], True, True, 7),
    ]
    moves = messages.EventPage(1, 8, b"\1\1\0", key(1) + key(2) + key(3), tiers=b"\2\1\0")
    assert follower.answered(moves, 1.0) == [
        Added("n", "nvme", [key(1)], 8),
        Removed("n", "dram", [key(1)], 8),
        Added("n", "dram", [key(2)], 9),
        Removed("n", "nvme", [key(2)], 9),
        Removed("n", "dram", [key(3)], 10),
        Removed("n", "nvme", [key(3)], 10),
    ]
    assert follower.answered(events(11), 1.0 + HEARD_S) == [
        Heard("n", "dram", 10),
        Heard("n", "nvme", 10),
    ]


def test_a_disk_that_is_gone_has_nothing() -> None:
    """The node has restarted without one, or has an old version, which reports no tiers."""
    for later in (tiered(3, {5: 1}), page(3, 5)):
        follower, holdings = cursor(), Holdings(PrefixIndex())
        for update in follower.answered(tiered(7, {1: 1, 2: 2}), 0.0):
            holdings.apply(update, 0.0)
        follower.connected()
        for update in follower.answered(later, 1.0):
            holdings.apply(update, 1.0)
        index = holdings.index
        held = {index.label(number): index.blocks_of(number) for number in index.numbers()}
        assert held == {"n/dram": 1, "n/nvme": 0}


def test_pages_of_different_states_do_not_belong_together() -> None:
    follower = cursor()
    follower.answered(page(7, 1, more=True), 0.0)
    assert follower.answered(page(8, 2), 0.0) == []
    assert follower.request() == messages.Inventory(0, after=0)
    assert follower.answered(page(8, 1, 2), 0.0) == [
        HolderInventory("n", "dram", [key(1), key(2)], True, True, 8)
    ]


def test_gaps_and_new_connections_lead_back_to_the_inventory() -> None:
    follower = cursor()
    follower.answered(page(7), 0.0)
    assert follower.answered(events(100, gap=True), 0.0) == []
    assert follower.request() == messages.Inventory(0, after=0)
    follower.answered(page(99), 0.0)
    follower.connected()
    assert follower.request() == messages.Inventory(0, after=0)
    assert follower.resyncs == 2


def test_a_node_that_does_not_answer_is_asked_less_and_less_and_then_forgotten() -> None:
    follower = cursor()
    follower.answered(page(7, 1), 0.0)
    now, waits, told = 0.0, [], []
    for _ in range(12):
        told += [(now, update) for update in follower.failed(now)]
        waits.append(follower.due_at - now)
        now = follower.due_at
    first_s, last_s = BACKOFF_S
    assert all(
        min(last_s, first_s * 2**n) / 2 <= wait <= min(last_s, first_s * 2**n)
        for n, wait in enumerate(waits)
    )
    assert [update for _, update in told] == [Cleared("n", NODE_TIERS)]
    assert told[0][0] >= LOST_S
    assert follower.answered(page(3, 1), now)[0] == HolderInventory(
        "n", "dram", [key(1)], True, True, 3
    )
    assert follower.failures == 0


@pytest.mark.parametrize(
    ("synced", "reply"),
    [
        (False, messages.Done(1)),
        (False, messages.KeyPage(1, 7, b"short", False)),
        (False, messages.KeyPage(1, 7, b"", True)),
        (False, events(1, 1)),
        (True, page(7, 1)),
        (True, events(9, 1)),
        (True, messages.EventPage(1, 8, b"\1\1", key(1))),
        (True, messages.EventPage(1, 8, b"\1", key(1), tiers=b"\1\1")),
        (True, messages.EventPage(1, 8, b"\1", key(1), tiers=b"\3")),
        (False, tiered(7, {1: 0})),
        (False, tiered(7, {1: 3})),
    ],
)
def test_answers_that_cannot_be_are_refused(synced: bool, reply: Any) -> None:
    follower = cursor()
    if synced:
        follower.answered(page(7), 0.0)
    with pytest.raises(ProtocolError, match=r"^n "):
        follower.answered(reply, 0.0)


@pytest.mark.parametrize(
    "nonsense", [messages.Done(1), messages.KeyPage(1, 7, b"short", False), events(9, 1)]
)
def test_nonsense_is_no_answer(nonsense: Any) -> None:
    """A node that sends nothing else is asked less and less often, and its blocks are cleared."""
    follower = cursor()
    follower.answered(page(7, 1), 0.0)
    now, asked, told = 0.0, 0, []
    while now < 60.0:
        now, asked = max(now, follower.due_at), asked + 1
        with pytest.raises(ProtocolError):
            follower.answered(nonsense, now)
        told += follower.failed(now)
    assert asked < 25
    assert follower.failures == asked
    assert told == [Cleared("n", NODE_TIERS)]


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("tiers", [b"\1", b"\1\2"], ids=["memory", "memory and disk"])
def test_a_follower_ends_up_with_what_the_node_has(tiers: bytes, seed: int) -> None:
    """Against a node's own log, with changes, gaps and errors in between."""
    dice, log, has = random.Random(seed), EventLog(events_kept=20), dict[bytes, int]()
    follower, holdings = cursor(), Holdings(PrefixIndex())
    snapshot: tuple[int, list[bytes], bytes] = (0, [], b"")

    def answer(request: Any) -> Any:
        nonlocal snapshot
        if isinstance(request, messages.Spaces):
            return messages.SpacesPage(1, 0, [])
        if isinstance(request, messages.Events):
            return log.page(request)
        if request.after == 0:
            snapshot = log.seq, sorted(has), bytes(has[one] for one in sorted(has))
        of_page = slice(request.after, request.after + 5)
        more = of_page.stop < len(snapshot[1])
        keys = b"".join(snapshot[1][of_page])
        return messages.KeyPage(1, snapshot[0], keys, more, snapshot[2][of_page])

    def happens() -> None:
        one, tier = key(dice.randrange(40)), dice.choice(tiers)
        if one not in has:
            log.added(one, tier)
        elif has[one] == tier:
            log.removed(one)
            del has[one]
            return
        else:
            log.moved(one, tier)
        has[one] = tier

    for turn in range(200):
        for _ in range(dice.choice((0, 1, 5, 30)) if turn < 150 else 0):
            happens()
        if dice.random() < 0.05:
            follower.connected()
        for update in follower.answered(answer(follower.request()), float(turn)):
            holdings.apply(update, float(turn))
    everything = [key(n) for n in range(40)]
    for tier, name in ((1, "dram"), (2, "nvme")):
        number = holdings.index.find("n", name)
        assert number is not None or len(tiers) == 1
        here = {one for one, where in has.items() if where == tier}
        if number is not None:
            missing = set(holdings.index.missing(number, everything))
            assert set(everything) - missing == here


# -- the feed --------------------------------------------------------------------------------------


class World:
    """Nodes, a feed that follows them, and the index that it feeds."""

    def __init__(self, cluster: Cluster, members: Any, credentials: Credentials) -> None:
        self.cluster = cluster
        self.inbox = UpdateInbox()
        self.holdings = Holdings(PrefixIndex())
        self.feed = NodesFeed(members, credentials, self.inbox, threads=2, membership_s=0.05)
        self.announced: dict[str, tuple[bytes, ...]] = {}
        self._now = itertools.count(1)

    def hear(self) -> dict[str, tuple[bytes, ...]]:
        """Take all updates; returns the announced key spaces."""
        for update in self.inbox.take():
            if isinstance(update, Announced):
                self.announced[update.name] = update.spaces
            else:
                self.holdings.apply(update, float(next(self._now)))
        return self.announced

    def held(self, prefix: Prefix, name: str, tier: str = "dram") -> int:
        index = self.holdings.index
        self.hear()
        number = index.find(name, tier)
        if number is None:
            return -1
        return int(index.match(prefix.keys).lengths(index.width)[number])

    def await_held(self, prefix: Prefix, name: str, blocks: int, tier: str = "dram") -> None:
        wait_until(
            lambda: self.held(prefix, name, tier) == blocks,
            f"{name} holds {blocks} in {tier}",
            20.0,
        )

    def close(self) -> None:
        self.inbox.close()
        self.feed.close()


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    cluster = Cluster()
    yield cluster
    cluster.close()


@pytest.fixture
def world(cluster: Cluster) -> Iterator[World]:
    world = World(cluster, cluster.flaky(), cluster.credentials)
    yield world
    world.close()


def remove(member: Any, prefix: Prefix) -> None:
    with Client.attach(member.node) as client:
        client.remove(prefix)


def test_all_nodes_of_a_pool_are_followed_as_they_come_and_go(
    cluster: Cluster, world: World
) -> None:
    one = cluster.start("one")
    before = one.put(fresh_prefix(3, LARGE))
    world.await_held(before, "one", 3)
    two = cluster.start("two")
    after = one.put(fresh_prefix(2, LARGE))
    both = two.put(before)
    world.await_held(after, "one", 2)
    world.await_held(both, "two", 3)
    remove(one, before[2:])
    world.await_held(before, "one", 2)
    assert world.held(before, "two") == 3
    two.stop()
    world.await_held(both, "two", -1)
    assert world.held(before, "one") == 2
    told = world.feed.statistics()["nodes"]["one"]
    assert (told["synced"], told["error"], told["resyncs"]) == (True, "", 1)


def test_what_engines_announce_is_heard_while_they_are_connected(
    cluster: Cluster, world: World
) -> None:
    one, space = cluster.start("one"), KeySpace(schema="s", models=("m",), engine="e")
    with Client.attach(one.node) as client, cluster.open() as without_home:
        client.announce(space)
        client.announce(space)
        wait_until(lambda: world.hear().get("one") == (space.encoded(),), "it is heard, once")
        (shown,) = one.node.statistics()["key_spaces"]
        assert (shown["engine"], shown["models"]) == ("e", ["m"])
        again = msgspec.structs.replace(space, version="2")
        client.announce(again)
        without_home.announce(space)
        both = tuple(sorted((again.encoded(), space.encoded())))
        wait_until(lambda: world.hear()["one"] == both, "both are heard")
    wait_until(lambda: world.hear()["one"] == (), "they have gone")


def test_a_block_is_where_it_is_read_from(cluster: Cluster, world: World, tmp_path: Path) -> None:
    slab = {"nvme_path": tmp_path, "nvme_bytes": 16 * LARGE.extent_bytes}
    one = cluster.start("one", 3, **slab)
    old = one.put(fresh_prefix(2, LARGE))
    world.await_held(old, "one", 2)
    new = one.put(fresh_prefix(3, LARGE))
    world.await_held(old, "one", 2, "nvme")
    world.await_held(old, "one", 0)  # it was demoted, and added to its new tier first
    wait_until(lambda: world.held(new, "one") >= 1, "what took its place is")
    with Client.attach(one.node) as client, client.get(old):
        world.await_held(old, "one", 2)
    world.await_held(old, "one", 0, "nvme")
    with Client.attach(one.node) as client:
        client.remove(old)
    world.await_held(old, "one", 0)
    one.stop()
    world.await_held(new, "one", -1, "nvme")
    one = cluster.start("one", 3, **slab)
    left = wait_until(lambda: sum(one.has(new)), "the slab is read")
    world.await_held(new, "one", left, "nvme")


def test_a_node_that_was_restarted_is_followed_anew(cluster: Cluster, world: World) -> None:
    one = cluster.start("one")
    lost = one.put(fresh_prefix(3, LARGE))
    world.await_held(lost, "one", 3)
    one.stop()
    one = cluster.start("one")
    new = one.put(fresh_prefix(2, LARGE))
    world.await_held(new, "one", 2)
    assert world.held(lost, "one") == 0


def test_a_lost_connection_is_followed_by_an_inventory(cluster: Cluster, world: World) -> None:
    one = cluster.start("one", relayed=True)
    assert one.network is not None
    prefix = one.put(fresh_prefix(2, LARGE))
    world.await_held(prefix, "one", 2)
    one.network.cut()
    more = one.put(fresh_prefix(2, LARGE))
    world.await_held(more, "one", 2)
    assert world.held(prefix, "one") == 2
    wait_until(lambda: world.feed.statistics()["nodes"]["one"]["resyncs"] == 2, "it is in sync")


def test_without_the_directory_nodes_are_followed_all_the_same(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    directory = cluster.flaky()
    world = World(cluster, directory, cluster.credentials)
    with contextlib.closing(world):
        one = cluster.start("one")
        world.await_held(one.put(fresh_prefix(1, LARGE)), "one", 1)
        directory.away = True
        wait_until(lambda: world.feed.statistics()["directory_error"], "it is noticed")
        world.await_held(one.put(fresh_prefix(2, LARGE)), "one", 2)
        directory.away = False
        wait_until(lambda: not world.feed.statistics()["directory_error"], "it is back")
    said = [line.getMessage() for line in caplog.records if "the directory" in line.getMessage()]
    assert ["does not answer" in line for line in said] == [True, False], said
    assert said[1] == "the directory answers again"


def test_nodes_of_a_fixed_list_and_one_that_is_not_there(cluster: Cluster) -> None:
    one = cluster.start("one")
    host, _, port = one.address.rpartition(":")
    members = FixedMembers([(host, int(port)), ("127.0.0.1", 1)])
    world = World(cluster, members, cluster.credentials)
    with contextlib.closing(world):
        prefix = one.put(fresh_prefix(2, LARGE))
        world.await_held(prefix, one.address, 2)
        told = wait_until(
            lambda: world.feed.statistics()["nodes"]["127.0.0.1:1"],
            "the other one is tried",
        )
        wait_until(
            lambda: world.feed.statistics()["nodes"]["127.0.0.1:1"]["failures"] > 1,
            "it is tried again",
        )
        assert told["address"] == "127.0.0.1:1"
        assert "NodeUnavailable" in world.feed.statistics()["nodes"]["127.0.0.1:1"]["error"]


def test_a_feed_without_the_token_says_so(cluster: Cluster) -> None:
    with contextlib.ExitStack() as stack:
        guarded = Cluster(Credentials(token=b"t" * 32))
        stack.callback(guarded.close)
        guarded.start("one")
        world = World(guarded, guarded.flaky(), Credentials(token=b"u" * 32))
        stack.callback(world.close)

        def error() -> str:
            nodes = world.feed.statistics()["nodes"]
            return str(nodes["one"]["error"]) if "one" in nodes else ""

        assert "NotAuthenticated" in wait_until(error, "it is refused")


class Faulty:
    """Members whose directory, or one of its records, raises unexpected exceptions."""

    def __init__(self, members: Any) -> None:
        self._members = members
        self.faults: list[Exception] = []

    def nodes(self, *, fresh: bool = False) -> Any:
        if self.faults:
            raise self.faults.pop()
        return self._members.nodes()


@pytest.mark.slow
def test_what_nobody_foresaw_ends_no_thread(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """More faults than threads, in each of the places where a thread could end."""
    monkeypatch.setattr(nodes_feed, "FAULT_S", 0.01)
    members = Faulty(cluster.flaky())
    world = World(cluster, members, cluster.credentials)
    with contextlib.closing(world):
        one = cluster.start("one")
        world.await_held(one.put(fresh_prefix(1, LARGE)), "one", 1)
        members.faults += [RuntimeError("no such table") for _ in range(4)]
        wait_until(lambda: not members.faults, "the directory has failed")
        asks = [ValueError("an answer"), OSError("a socket"), KeyError("a key"), ValueError("four")]
        answered, update = NodeCursor.answered, NodesFeed._update
        updates = [ValueError("a record") for _ in range(4)]

        def faulty(self: NodeCursor, reply: object, now: float) -> Any:
            if asks:
                raise asks.pop()
            return answered(self, reply, now)

        def faulty_update(self: NodesFeed, records: Any) -> Any:
            if updates:
                raise updates.pop()
            return update(self, records)

        monkeypatch.setattr(NodeCursor, "answered", faulty)
        monkeypatch.setattr(NodesFeed, "_update", faulty_update)
        wait_until(lambda: not asks and not updates, "node and records have failed")
        two = cluster.start("two")
        world.await_held(two.put(fresh_prefix(1, LARGE)), "two", 1)
        world.await_held(one.put(fresh_prefix(2, LARGE)), "one", 2)
        assert world.feed.alive
        told = world.feed.statistics()
        assert (told["directory_error"], told["nodes"]["one"]["error"]) == ("", "")
    assert not world.feed.alive
    for text in ("the directory failed", "asking one failed", "following nodes failed"):
        assert text in caplog.text


def test_the_feed_speaks_of_what_nodes_have_only(cluster: Cluster, world: World) -> None:
    one = cluster.start("one")
    prefix = one.put(fresh_prefix(1, LARGE))
    world.holdings.apply(Added("one", "hbm", prefix.keys), 0.0)
    world.await_held(prefix, "one", 1)
    one.stop()
    world.await_held(prefix, "one", -1)
    number = world.holdings.index.find("one", "hbm")
    assert number is not None
    assert world.holdings.index.blocks_of(number) == 1


def test_a_node_that_left_is_let_go_of_though_nobody_takes_what_it_said(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node left during a request, and the feed ends before its update is taken."""
    one, closed = cluster.start("one"), list[str]()
    close = nodes_feed._Node.close
    monkeypatch.setattr(
        nodes_feed._Node, "close", lambda self: (closed.append(self.address), close(self))
    )
    speaks, ends = threading.Event(), threading.Event()

    def apply(update: Any) -> None:
        speaks.set()
        assert ends.wait(20.0)
        raise InboxClosed("nobody takes it")

    members = cluster.flaky()
    with NodesFeed(members, cluster.credentials, apply, threads=2, membership_s=0.01) as feed:
        assert speaks.wait(20.0)
        one.stop()
        wait_until(lambda: not feed.statistics()["nodes"], "it has left")
        ends.set()
    assert closed == [one.address]


def test_who_leaves_when_it_has_been_asked_is_said_to_be_gone_once(cluster: Cluster) -> None:
    """A second removal could come after the first events of a new node with the same name."""
    one, updates = cluster.start("one"), list[Any]()
    with NodesFeed(cluster.flaky(), cluster.credentials, updates.append, threads=0) as feed:
        feed._look_at_members()
        follow = feed._next_job()

        class Changed(threading.Condition):
            def __exit__(self, *error: Any) -> None:
                super().__exit__(*error)
                if feed._due:  # it waits for its next turn; another thread reads the members
                    one.stop()
                    feed._look_at_members()

        feed._changed = Changed()
        assert follow is not None
        follow()
    assert [type(update) for update in updates] == [HolderInventory, Gone]


def test_closing_lets_go_of_a_node_that_hangs(cluster: Cluster, world: World) -> None:
    one = cluster.start("one", relayed=True)
    assert one.network is not None
    world.await_held(one.put(fresh_prefix(1, LARGE)), "one", 1)
    one.network.pause()
    world.close()
    one.network.resume()
