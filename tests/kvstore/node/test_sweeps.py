"""Making room: sweeps in vain do not change which blocks leave, and sweeps are cheap.

Costs are counted, in calls, and never timed.
"""

from __future__ import annotations

import sys
import tracemalloc
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from kvsupport import EXTENT, SCHEMA, fresh_prefix, payloads_of, wait_until

from tiffin.kvstore import Client
from tiffin.kvstore.hbm.core.hbm_core import HbmCore, HbmEntry, HbmOptions
from tiffin.kvstore.memory.arena import Arena
from tiffin.kvstore.memory.eviction import POLICIES, make_policy
from tiffin.kvstore.node.core import messages
from tiffin.kvstore.node.core.node_core import CoreOptions, NodeCore
from tiffin.kvstore.node.core.records import Move, MoveOutcome, PinLevel, Reason
from tiffin.kvstore.node.core.tier_ledger import TierSpace
from tiffin.kvstore.node.node import Node, NodeOptions
from tiffin.kvstore.tiers.base import TierName

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path
    from types import FrameType

    from tiffin.kvstore.node.core.node_core import Reservation
    from tiffin.kvstore.node.core.records import LeaseRecord

BLOCK = 4096
ROOT = bytes(16)

each_policy = pytest.mark.parametrize("policy", sorted(POLICIES))


def key(chain: str, index: int) -> bytes:
    return f"{chain}{index}".encode().ljust(16, b".")


def chain(name: str, length: int) -> list[bytes]:
    return [key(name, i) for i in range(length)]


class Pool:
    """A core with so many blocks of room, whose moves end when `settle` is called."""

    def __init__(self, dram: int, nvme: int = 0, policy: str = "lru", **options: float) -> None:
        spaces = [
            TierSpace(tier, Arena(blocks * BLOCK), make_policy(policy))
            for tier, blocks in ((TierName.DRAM, dram), (TierName.NVME, nvme))
            if blocks
        ]
        self.core = NodeCore(spaces[0], spaces[1] if nvme else None, CoreOptions(**options))  # type: ignore[arg-type]
        self.session = self.core.connect("test", 1)

    def reserve(
        self, keys: Sequence[bytes], parent: bytes = ROOT, depth: int = 0, blocks: int = 1
    ) -> Reservation:
        return self.core.reserve(self.session, keys, parent, depth, blocks * BLOCK, 0.0)

    def put(self, keys: Sequence[bytes], parent: bytes = ROOT, depth: int = 0) -> bool:
        """Whether all of them are here now."""
        made = self.reserve(keys, parent, depth)
        if made.lease is not None:
            self.core.commit(made.lease, [True] * len(made.lease.replicas))
        return len(made.statuses) == len(keys)

    def put_patiently(self, keys: Sequence[bytes]) -> None:
        for _ in range(100):
            if self.put(keys):
                return
            self.settle()
        raise AssertionError("no room")

    def lease(self, keys: Sequence[bytes]) -> LeaseRecord:
        lease, _ = self.core.settle(self.core.lease(self.session, keys))
        assert lease is not None
        return lease

    def read(self, keys: Sequence[bytes]) -> None:
        self.core.release(self.session, self.lease(keys).id)

    def settle(self) -> int:
        """End all moves; returns how many there were."""
        moves = 0
        while actions := self.core.residency.actions:
            ordered = [action for action in actions if isinstance(action, Move)]
            actions.clear()
            for move in dict.fromkeys(ordered):
                self.core.moved(move, MoveOutcome.DONE)
                moves += 1
        self.core.check()
        return moves

    def resident(self, keys: Sequence[bytes]) -> list[int]:
        return [i for i, here in enumerate(self.core.exists(b"".join(keys))) if here]


def calls_of(action: Callable[[], object]) -> int:
    """How many functions were called, Python's own included."""
    calls = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        action()
    finally:
        sys.setprofile(None)
    return calls


def steps_of(action: Callable[[], object]) -> int:
    """How many of Python's instructions were executed, those of loops without calls included."""
    steps = 0

    def trace(frame: FrameType, event: str, _argument: object) -> Any:
        nonlocal steps
        frame.f_trace_opcodes = True
        steps += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(before)
    return steps


# -- which blocks leave ----------------------------------------------------------------------------


def test_with_admission_on_second_use_the_least_recently_used_leave(tmp_path: Path) -> None:
    node = Node(
        NodeOptions(
            dram_bytes=10 * EXTENT,
            nvme_path=tmp_path,
            nvme_bytes=40 * EXTENT,
            core=CoreOptions(demote_on_second_use=True),
        )
    )
    with Client.attach(node) as client:
        old, new = ([fresh_prefix(1) for _ in range(count)] for count in (10, 3))
        for prefix in old:
            client.put(prefix, payloads_of(prefix))
        with client.get(old[3]) as blocks:
            assert blocks.complete
        for prefix in new:
            assert client.put(prefix, payloads_of(prefix)).complete
        kept = [client.match(prefix).blocks for prefix in old + new]
        assert kept == [0, 0, 0] + [1] * 10
        assert node.statistics()["tiers"]["nvme"]["written_bytes"] == 0
    node.check()
    node.close()


@each_policy
def test_demotion_ahead_that_finds_nothing_to_demote_changes_nothing(policy: str) -> None:
    """Two pools that differ only in their watermarks evict the same blocks."""
    pools = [
        Pool(20, 40, policy, demote_on_second_use=True, high_watermark=mark, low_watermark=mark)
        for mark in (0.2, 1.0)
    ]
    dice = np.random.default_rng(7)
    keys = [key("a", i) for i in range(200)]
    unread = set(range(200))
    for number in range(200):
        again = int(dice.integers(max(0, number - 15), number + 1))
        for pool in pools:
            pool.put([keys[number]])
            for _ in range(3):
                pool.core.tick(0.0)
            if again in unread and pool.resident([keys[again]]):
                pool.read([keys[again]])
            assert pool.settle() == 0
        unread.discard(again)  # a second use would admit it
        first, second = (pool.resident(keys) for pool in pools)
        assert first == second


@each_policy
def test_a_tick_does_not_write_to_disk_what_was_used_once(policy: str) -> None:
    """Neither a tail nor what it descends from: the tail would be dropped first."""
    pool = Pool(20, 40, policy, demote_on_second_use=True, high_watermark=0.3, low_watermark=0.2)
    for name in "abc":
        pool.put(chain(name, 5))
        pool.read(chain(name, 5))
    pool.core.tick(0.0)
    assert pool.settle() == 0


@each_policy
def test_what_was_used_twice_is_demoted_ahead_and_found_again(policy: str) -> None:
    pool = Pool(20, 40, policy, demote_on_second_use=True, high_watermark=0.5, low_watermark=0.4)
    keys = [key("a", i) for i in range(20)]
    for one in keys:
        pool.put([one])
    for one in keys[:15]:
        pool.read([one])
        pool.read([one])
    for _ in range(5):
        pool.core.tick(0.0)
        pool.settle()
    if policy != "sieve":  # its hand rests at those that were used once
        assert pool.core.residency.dram.arena.used_bytes <= 8 * BLOCK
    for number in range(10):
        pool.put_patiently([key("b", number)])
    assert pool.resident(keys[:15]) == list(range(15))


@each_policy
def test_a_parent_leaves_soon_after_its_last_child(policy: str) -> None:
    """It was set aside while the child was read, and has not been used since."""
    pool = Pool(4, policy=policy)
    pool.put(chain("a", 2))
    held = pool.lease([key("a", 1)])
    for name in "bcd":
        pool.put([key(name, 0)])
    assert pool.resident(chain("a", 2)) == [0, 1]
    pool.core.remove([key("a", 1)])
    pool.core.release(pool.session, held.id)
    for number in range(3):
        assert pool.put([key("e", number)])
        pool.core.check()
    assert pool.resident(chain("a", 1)) == []


def test_a_window_that_cannot_be_opened_leaves_the_order_as_it_is() -> None:
    pool = Pool(6, 2, high_watermark=1.0, low_watermark=1.0)
    for name in "ab":  # NVMe is full of parents of what is read
        pool.put([key(name, 0)])
    pool.core.flush()
    pool.settle()
    held = []
    for name in "ab":
        pool.put([key(name, 1)], parent=key(name, 0), depth=1)
        held.append(pool.lease([key(name, 1)]))
    pool.put([key("c", 0)])
    pool.put([key("d", 0)])
    pool.read([key("c", 0)])
    assert pool.reserve([key("z", 0)], blocks=3).reason is Reason.NO_ROOM
    pool.core.check()
    assert pool.put([key("e", 0)])
    assert pool.resident([key(name, 0) for name in "abcde"])[-1] == 4
    for lease in held:
        pool.core.release(pool.session, lease.id)
    pool.core.check()


# -- what it costs ---------------------------------------------------------------------------------


@each_policy
@pytest.mark.parametrize("second_use", [True, False])
def test_a_tick_costs_the_same_however_many_blocks_there_are(policy: str, second_use: bool) -> None:
    """Above the watermark, with nothing that can be demoted: DRAM is full of blocks that were used
    once, or the disk is full of blocks that can't leave."""
    costs = []
    for blocks in (500, 4000):
        pool = Pool(blocks, 1, policy, demote_on_second_use=second_use)
        if not second_use:
            pool.put([key("head", 0)])
            pool.core.flush()
            pool.settle()
            pool.core.pin([key("head", 0)], PinLevel.HARD, 1e9)  # NVMe is full of it
        for number in range(blocks - 2):
            made = pool.reserve([key("a", number)])
            assert made.lease is not None
            pool.core.commit(made.lease, [True])
        pool.core.tick(0.0)
        assert pool.settle() == 0
        costs.append(calls_of(partial(pool.core.tick, 0.0)))
    assert costs[1] <= costs[0] + 50
    assert costs[1] < 3000


def test_the_end_of_one_pin_costs_the_same_however_many_there_are() -> None:
    costs = []
    for blocks in (300, 3000):
        pool = Pool(blocks)
        pool.put(keys := chain("a", blocks))
        for number, one in enumerate(keys):
            pool.core.pin([one], PinLevel.SOFT, until=float(number + 1))
        pool.core.pin(keys[5:6], PinLevel.SOFT, until=9.5)  # renewed
        pool.core.pin(keys[6:7], PinLevel.NONE, until=0.0)
        costs.append(steps_of(partial(pool.core.tick, 1.0)))
        pool.core.tick(8.0)
        assert set(keys[:9]) & pool.core.residency.pins.keys() == {keys[5], keys[8]}
        pool.core.tick(9.5)
        assert keys[5] not in pool.core.residency.pins
        pool.core.check()
    assert costs[1] <= costs[0] + 100


@pytest.mark.slow
def test_a_pin_that_is_renewed_for_ever_takes_no_more_memory() -> None:
    pool = Pool(4)
    pool.put(keys := chain("a", 4))
    tracemalloc.start()
    for renewal in range(20_000):
        pool.core.pin(keys, PinLevel.SOFT, until=1e6 + renewal)
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert taken < 1 << 20
    pool.core.tick(1e6 + 19_998)
    assert pool.core.residency.pins.keys() == set(keys)
    pool.core.tick(1e6 + 19_999)
    assert not pool.core.residency.pins


def full_of_what_cannot_leave(blocks: int, policy: str) -> Pool:
    """Both tiers are full, with so many candidates each, all with children that are being read."""
    pool = Pool(3 * blocks, blocks, policy, high_watermark=1.0, low_watermark=1.0)
    for number in range(blocks):
        pool.put([key("p", number)])
    pool.core.flush()
    assert pool.settle() == blocks
    for number in range(blocks):
        pool.lease([key("p", number)])  # in both tiers: its replica in NVMe leaves with ease
    for lease in list(pool.session.leases.values()):
        pool.core.release(pool.session, lease.id)
    for name in "qp":
        for number in range(blocks):
            parent = key(name, number)
            if name == "q":
                assert pool.put([parent])
            assert pool.put([key(f"child of {name}", number)], parent=parent, depth=1)
            pool.lease([key(f"child of {name}", number)])
    pool.core.check()
    return pool


@each_policy
def test_a_reservation_that_finds_no_room_costs_a_few_looks(policy: str) -> None:
    """Two hundred candidates in DRAM and as many in NVMe, of which none can leave."""
    pool = full_of_what_cannot_leave(200, policy)
    candidates = sum(len(list(s.candidates())) for s in (pool.core.residency.dram,
                                                         pool.core.residency.nvme))  # fmt: skip
    assert candidates >= 400

    def fail() -> None:
        assert pool.reserve([key("z", 0)]).reason is Reason.NO_ROOM

    first = calls_of(fail)
    assert first < 100 * candidates  # it looks at each of them, once
    assert calls_of(fail) < 400
    assert calls_of(fail) < 400
    pool.core.check()


@each_policy
def test_room_is_found_behind_what_cannot_leave(policy: str) -> None:
    pool = full_of_what_cannot_leave(200, policy)
    assert pool.reserve([key("z", 0)]).reason is Reason.NO_ROOM
    children = list(pool.session.leases.values())
    pool.core.release(pool.session, children[7].id)
    assert pool.put([key("z", 0)])
    pool.core.check()
    assert pool.reserve([key("z", 1)]).reason is Reason.NONE  # by its parent, which has none now


@each_policy
def test_a_long_sweep_is_cut_and_goes_on(policy: str) -> None:
    """5,000 blocks of one chain whose tail is read, and then one that may leave."""
    pool = Pool(5001, policy=policy)
    keys = chain("a", 5000)
    pool.put(keys)
    pool.lease(keys[-1:])
    pool.put([key("b", 0)])
    made: list[Reservation] = []
    costs = []
    while not made or made[-1].lease is None:
        costs.append(calls_of(lambda: made.append(pool.reserve([key("c", 0)]))))
        assert len(costs) < 10
    assert pool.resident(keys) == list(range(5000))
    assert pool.resident([key("b", 0)]) == []
    assert max(costs) < 40_000
    pool.core.check()


def test_a_sweep_that_was_cut_is_worth_another_one() -> None:
    pool = Pool(3000)
    pool.put(chain("a", 3000))
    pool.core.pin([key("a", 2999)], PinLevel.HARD, 1e9)
    pool.core.residency.pins.clear()  # else a caller could wait for the end of the pin
    for _ in range(2):
        assert pool.reserve([key("b", 0)]).reason is Reason.NO_ROOM
        assert pool.core.worth_waiting()
    for _ in range(2):
        assert pool.reserve([key("b", 0)]).reason is Reason.NO_ROOM
    assert not pool.core.worth_waiting()  # it has seen all there is


def test_a_writer_that_waits_is_served_after_a_long_sweep() -> None:
    node = Node(NodeOptions(dram_bytes=3001 * EXTENT, prefault=False))
    with Client.attach(node) as client:
        prefix, other, last = fresh_prefix(3000), fresh_prefix(1), fresh_prefix(1)
        for first in range(0, 3000, 1000):
            part = prefix[first : first + 1000]
            empty = np.zeros(SCHEMA.block_bytes, np.uint8)
            assert client.put(part, [empty] * len(part)).complete
        client.put(other, payloads_of(other))
        with client.get(prefix[2999:]) as tail:
            assert tail.complete
            assert client.put(last, payloads_of(last), timeout_s=30.0).complete
        assert client.match(other).blocks == 0
        wait_until(lambda: not node.statistics()["waiting_requests"], "nobody to wait")
    node.check()
    node.close()


@pytest.mark.slow
def test_who_waits_for_something_else_does_not_keep_the_node_busy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A sweep was cut for a call that did not wait; a follower that waits for a writer does not
    continue it."""
    node = Node(NodeOptions(dram_bytes=2001 * EXTENT, prefault=False))
    with Client.attach(node) as client:
        prefix, other = fresh_prefix(2000), fresh_prefix(1)
        empty = np.zeros(SCHEMA.block_bytes, np.uint8)
        for first in (0, 1000):
            client.put(prefix[first : first + 1000], [empty] * 1000)
        replies: list[Any] = []
        session = node.connect("follower", 1)
        with client.get(prefix[1999:]), client.reserve(other) as slots:
            node.submit(session, messages.Lease(1, other.key_bytes, 1.0, True), replies.append)
            wanted = messages.Await(2, replies[0].lease, [0], 30.0)
            node.submit(session, wanted, replies.append)
            assert client.put(fresh_prefix(1), [empty], timeout_s=0.0).stored == ()
            ticks, tick = [], node.core.tick
            monkeypatch.setattr(node.core, "tick", lambda now: (ticks.append(now), tick(now)))
            wait_until(lambda: len(ticks) >= 4, "some ticks")
            assert ticks[-1] - ticks[0] > 0.5  # of 0.25 s each
            slots.abort()
        node.disconnect(session, fenced=True)
    node.check()
    node.close()


def test_a_window_that_cannot_be_opened_is_looked_for_once() -> None:
    pool = Pool(300)
    keys = [key("a", i) for i in range(300)]
    for one in keys:
        pool.put([one])
    for one in keys[::15]:
        pool.lease([one])  # for good: no 16 blocks in a row are ever free
    for _ in range(3):
        assert pool.reserve([key("z", 0)], blocks=16).reason is Reason.NO_ROOM
    cost = calls_of(lambda: pool.reserve([key("z", 0)], blocks=16))
    assert cost < 100
    pool.core.remove(keys[1:30])  # and again when something has changed
    assert pool.reserve([key("y", 0)], blocks=14).reason is Reason.NONE


# -- the same core in front of a GPU ---------------------------------------------------------------


def hbm_of(blocks: int, policy: str, **options: float) -> HbmCore:
    block_bytes = -(-SCHEMA.block_bytes // BLOCK) * BLOCK
    return HbmCore(Arena(blocks * block_bytes), HbmOptions(policy=policy, **options))  # type: ignore[arg-type]


def publish(core: HbmCore, blocks: int, *, dirty: bool) -> Sequence[bytes]:
    """Reserve and publish a chain of blocks; its keys."""
    prefix, sums = fresh_prefix(blocks), np.zeros(len(SCHEMA.segments), np.uint64)
    use = core.open_use()
    made = core.reserve_blocks(use, prefix, 0.0)
    assert made.lease is not None
    core.publish(use, made.lease.id, [HbmEntry(prefix, i, sums, dirty) for i in range(blocks)], 0.0)
    core.close_use(use, fenced=True)
    return prefix.keys


@each_policy
def test_in_hbm_a_reservation_that_finds_no_room_costs_a_few_looks(policy: str) -> None:
    core = hbm_of(400, policy)
    keys = publish(core, 400, dirty=False)
    core.hold(core.open_use(), keys[-1:])

    def fail() -> None:
        core.reserve_blocks(core.open_use(), fresh_prefix(1), 0.0)

    fail()
    assert calls_of(fail) < 400
    core.check()


@each_policy
def test_in_hbm_looking_for_what_is_to_be_saved_costs_the_same_however_full_it_is(
    policy: str,
) -> None:
    costs = []
    for blocks in (1500, 3000):
        core = hbm_of(blocks, policy, high_watermark=0.3, low_watermark=0.1)
        publish(core, blocks, dirty=False)
        costs.append(calls_of(partial(core.saves_due, 16)))
    assert costs[1] <= costs[0] + 50
