"""The evacuation of a node: every block once, ancestors first, while clients go on."""

from __future__ import annotations

import contextlib
import random
from typing import TYPE_CHECKING

import pytest
from kvsupport import DRAM_BLOCKS, SCHEMA, Background, fresh_prefix, payloads_of
from poolsupport import LARGE, Cluster, Held

from tiffin.kvstore import Client
from tiffin.kvstore.client.pool.replication import evacuation_chains, replication_service
from tiffin.kvstore.client.pool.replication.evacuation_chains import (
    NO_PARENT,
    ORDER_BLOCKS,
    ChainMember,
    chains_of,
    members_of,
    resident_keys,
)
from tiffin.kvstore.node.core import messages
from tiffin.kvstore.node.core.node_core import split_keys
from tiffin.kvstore.node.node import Node, NodeOptions

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tiffin.kvstore import Prefix


@pytest.fixture
def node(nothing_left: None) -> Iterator[Node]:
    node = Node(NodeOptions(DRAM_BLOCKS * SCHEMA.extent_bytes, prefault=False))
    yield node
    node.check()
    node.close()


def put(node: Node, prefix: Prefix) -> Prefix:
    with Client.attach(node) as client:
        assert client.put(prefix, payloads_of(prefix)).complete
    return prefix


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def tree(dice: random.Random, blocks: int) -> list[ChainMember]:
    """Blocks whose parents are any earlier ones, some of them on other nodes."""
    members: list[ChainMember] = []
    for number in range(1, blocks + 1):
        above = dice.choice(members) if members and dice.random() < 0.95 else None
        parent = above.key if above is not None else dice.choice([NO_PARENT, key(1 << 100)])
        depth = above.depth + 1 if above is not None else dice.randrange(3)
        members.append(ChainMember(depth, key(number), parent, 100))
    return members


@pytest.mark.parametrize("seed", range(20))
def test_every_block_is_in_one_chain_behind_its_ancestors(seed: int) -> None:
    dice = random.Random(seed)
    members = tree(dice, 300)
    known = {member.key: member for member in members}
    dice.shuffle(members)
    done: set[bytes] = set()
    for chain in chains_of(members):
        assert 0 < len(chain) <= ORDER_BLOCKS
        assert chain.nbytes == 100 * len(chain)
        before, depth = chain.parent, chain.depth
        for at in range(0, len(chain.keys), 16):
            member = known[chain.keys[at : at + 16]]
            assert (member.parent, member.depth) == (before, depth)
            assert before in done or before not in known
            assert member.key not in done
            done.add(member.key)
            before, depth = member.key, depth + 1
    assert done == known.keys()


def test_a_long_chain_is_cut_into_orders() -> None:
    count = 2 * ORDER_BLOCKS + 5
    members = [ChainMember(i, key(i + 1), key(i), 7) for i in range(count)]
    found = chains_of(members)
    assert [len(chain) for chain in found] == [ORDER_BLOCKS, ORDER_BLOCKS, 5]
    assert [chain.parent for chain in found] == [key(i * ORDER_BLOCKS) for i in range(3)]


def test_blocks_that_come_and_go_between_two_pages(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks that are resident from begin to end are found, whenever their page is read."""
    monkeypatch.setattr(evacuation_chains, "PAGE_BLOCKS", 2)
    stays, goes = put(node, fresh_prefix(6)), put(node, fresh_prefix(3))
    keys = resident_keys(node)
    assert set(keys) == {*stays.keys, *goes.keys}
    pages = 0
    held = node.held

    @contextlib.contextmanager
    def looked_at() -> Iterator[None]:
        nonlocal pages
        pages += 1
        with held():
            yield
        if pages == 2:  # another client works between the pages
            with Client.attach(node) as client:
                client.remove(goes)
            put(node, fresh_prefix(2))

    monkeypatch.setattr(node, "held", looked_at)
    members = members_of(node, keys)
    found = {member.key for member in members}
    assert pages == 5
    assert set(stays.keys) <= found <= set(keys)
    for member in members:
        assert member.nbytes == SCHEMA.extent_bytes
    order = [k for chain in chains_of(members) for k in split_keys(chain.keys)]
    assert [k for k in order if k in stays.keys] == list(stays.keys)


def test_nobody_waits_while_chains_are_made(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = cluster.start("one")
    prefix = one.put(fresh_prefix(3, LARGE))
    cluster.start("two")
    cluster.settle()
    sorting = Held(chains_of)
    monkeypatch.setattr(replication_service, "chains_of", sorting)
    client = cluster.open()
    evacuation = Background(lambda: client.evacuate(one.number, timeout_s=20))
    assert sorting.reached.wait(20)
    reader = Background(lambda: client.get(prefix).release() or client.match(prefix).blocks)
    assert reader.result(20) == 3, "the node serves while its blocks are sorted"
    sorting.go.set()
    assert evacuation.result(20) == 3


def test_who_had_reserved_before_the_drain_is_not_forgotten(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks that were reserved before the drain and are committed during it are evacuated too."""
    leaving, other = cluster.start("leaving"), cluster.start("other")
    early, late = leaving.put(fresh_prefix(2, LARGE)), fresh_prefix(3, LARGE)
    cluster.settle()
    client = cluster.open()
    with Client.attach(leaving.node) as writer:
        slots = writer.reserve(late)
        order = Held(replication_service.Caretaker._order)
        monkeypatch.setattr(
            replication_service.Caretaker, "_order", lambda *arguments: order(*arguments)
        )
        evacuation = Background(lambda: client.evacuate(leaving.number, timeout_s=20))
        assert order.reached.wait(20)
        for slot, payload in zip(slots, payloads_of(late), strict=True):
            slot.bytes[:] = payload
        slots.commit()
        order.go.set()
        assert evacuation.result(20) == 5
    assert other.has(early) == [True] * 2
    assert other.has(late) == [True] * 3


def test_a_node_that_is_not_drained_is_looked_at_once(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise its writers would keep the evacuation busy until its deadline."""
    one, two = cluster.start("one"), cluster.start("two")
    one.put(fresh_prefix(2, LARGE))
    cluster.settle()
    handed: list[int] = []
    order = replication_service.Caretaker._order

    def busy(*arguments: object) -> int:
        handed.append(order(*arguments))  # type: ignore[arg-type]
        one.put(fresh_prefix(1, LARGE))
        return handed[-1]

    monkeypatch.setattr(replication_service.Caretaker, "_order", busy)
    asked = cluster.open()._nodes.driver.ask(one.number, messages.Evacuate(0, 20.0), 20.0)
    assert (asked.count, handed) == (2, [2])
    assert len(two.node.core.index) == 2
