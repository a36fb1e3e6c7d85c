"""Followers that read a node's inventory page by page, while it changes, and several at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from kvsupport import EXTENT, fresh_prefix, payloads_of

from tiffin.kvstore import Client
from tiffin.kvstore.node.core import messages
from tiffin.kvstore.node.core.inventory_pages import Inventories, State
from tiffin.kvstore.node.core.records import Session
from tiffin.kvstore.node.node import Node, NodeOptions

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE = 4
BLOCKS = 30


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    monkeypatch.setattr(messages, "INVENTORY_KEYS", PAGE)
    node = Node(NodeOptions(dram_bytes=4 * BLOCKS * EXTENT))
    yield node
    node.check()
    node.close()


@pytest.fixture
def client(node: Node) -> Iterator[Client]:
    with Client.attach(node) as client:
        prefix = fresh_prefix(BLOCKS)
        client.put(prefix, payloads_of(prefix))
        yield client


class Follower:
    """Reads pages by the protocol: a page of another state restarts it."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.session = node.connect("follower", 1)
        self.keys: list[bytes] = []
        self.seq = 0
        self.done = False
        self.begun = 0

    def ask(self, request: messages.Request) -> Any:
        replies: list[Any] = []
        self.node.submit(self.session, request, replies.append)
        return replies[0]

    def step(self) -> None:
        self.begun += not self.keys
        page = self.ask(messages.Inventory(1, after=len(self.keys)))
        if self.keys and page.seq != self.seq:
            self.keys = []
            return
        assert len(page.keys) == 16 * len(page.tiers) <= 16 * PAGE
        self.keys += [page.keys[at : at + 16] for at in range(0, len(page.keys), 16)]
        self.seq, self.done = page.seq, not page.more

    def catch_up(self) -> set[bytes]:
        """The resident keys, by the inventory and the events after it."""
        here = set(self.keys)
        page = self.ask(messages.Events(2, after=self.seq))
        for at, added in enumerate(page.added):
            one = page.keys[16 * at : 16 * at + 16]
            (here.add if added else here.discard)(one)
        return here


def put_one(client: Client) -> None:
    prefix = fresh_prefix(1)
    client.put(prefix, payloads_of(prefix))


@pytest.mark.parametrize("followers", [2, 3, 12])
def test_followers_at_the_same_time_do_not_make_each_other_begin_again(
    node: Node, client: Client, followers: int
) -> None:
    """Followers begin one after the other, while blocks come and go."""
    waiting = [Follower(node) for _ in range(followers)]
    reading: list[Follower] = []
    for _ in range(200):
        if waiting:
            reading.append(waiting.pop())
        for follower in reading:
            if not follower.done:
                follower.step()
            put_one(client)
    assert not waiting
    for follower in reading:
        assert follower.done
        assert follower.begun == 1
        assert follower.catch_up() == set(node.core.index)


def test_who_begins_later_sees_what_came_meanwhile(node: Node, client: Client) -> None:
    first, second = Follower(node), Follower(node)
    first.step()
    put_one(client)
    second.step()
    assert second.seq > first.seq


def test_inventories_that_nobody_goes_on_with_cost_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty readers take only the first page, while the node changes: few inventories are kept."""
    monkeypatch.setattr(messages, "INVENTORY_KEYS", PAGE)
    seq, keys = 0, bytes(16 * BLOCKS)
    inventories = Inventories(lambda: State(seq, keys, bytes(BLOCKS)), lambda: seq)
    idle = [Session(number, "status", 1) for number in range(20)]
    kept = set()
    for session in idle:
        seq += 1
        kept.add(inventories.page(session, messages.Inventory(1), now=0.0).seq)
    assert len(kept) <= 4
    late = Session(99, "late", 1)
    assert inventories.page(late, messages.Inventory(1), now=31.0).seq == seq
    page = inventories.page(idle[0], messages.Inventory(1, after=PAGE), now=31.0)
    assert (page.seq, page.keys, page.more) == (0, b"", False)  # it begins again


def test_one_who_leaves_makes_room_for_others(node: Node, client: Client) -> None:
    for _ in range(20):
        put_one(client)
        follower = Follower(node)
        follower.step()
        assert follower.seq == node.inventory()[0]
        node.disconnect(follower.session, fenced=True)
