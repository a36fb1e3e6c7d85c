"""What the core allows readers of blocks before their commit. Pure: no clock, no bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tiffin.kvstore.errors import InvalidInput, StaleLease
from tiffin.kvstore.format.header import BlockState
from tiffin.kvstore.memory.arena import Arena
from tiffin.kvstore.memory.eviction import make_policy
from tiffin.kvstore.node.core import messages
from tiffin.kvstore.node.core.node_core import CoreOptions, NodeCore
from tiffin.kvstore.node.core.precommit_reads import Watch, follower, publish
from tiffin.kvstore.node.core.records import Reason, Replica
from tiffin.kvstore.node.core.sealed import SegmentPart
from tiffin.kvstore.node.core.sharded_writes import Share
from tiffin.kvstore.node.core.tier_ledger import TierSpace
from tiffin.kvstore.tiers.base import TierName

BLOCK = 8192
ROOT = bytes(16)
KEYS = [f"k{i}".encode().ljust(16, b".") for i in range(6)]
# Three segments of 1,024 bytes behind a header of a page.
SPANS = {0: (4096, 1024), 1: (5120, 1024), 2: (6144, 1024)}


def sum_of(block: int, segment: int) -> int:
    return 100 * (block + 1) + segment


class Header:
    """A committed block's header, with the values that `Sealed` needs."""

    def parts(self, segments: Any) -> list[SegmentPart]:
        return [SegmentPart(*SPANS[int(s)], 7) for s in segments]


class Rig:
    def __init__(self, blocks: int = 4, **options: float) -> None:
        space = TierSpace(TierName.DRAM, Arena(blocks * BLOCK), make_policy("lru"))
        self.core = NodeCore(space, None, CoreOptions(**options))  # type: ignore[arg-type]
        self.writer = self.core.connect("writer", 1)
        self.reader = self.core.connect("reader", 2)
        self.sealed: list[bytes] = []

    def reserve(self, keys=KEYS[:2], share: Share | None = None, session=None):
        session = session or self.writer
        return self.core.reserve(session, keys, ROOT, 0, BLOCK, 0.0, share).lease

    def publish(self, lease, *segments: int, slots=None) -> int:
        slots = list(range(len(lease.replicas))) if slots is None else slots
        spans = [n for s in segments for n in SPANS[s]]
        sums = np.array([sum_of(b, s) for b in slots for s in segments], "<u8").tobytes()
        request = messages.Publish(1, lease.id, slots, list(segments), spans, sums)
        count = publish(self.core, lease.session, request)
        self.core.check()
        return count

    def follow(self, keys=KEYS[:2], session=None):
        session = session or self.reader
        return self.core.settle(self.core.lease(session, keys, follows=True))

    def watch(self, lease, *segments: int, session=None) -> Watch:
        request = messages.Await(1, lease.id, list(segments), 1.0)
        return Watch(self.core, session or lease.session, request)

    def look(self, watch: Watch) -> Any:
        return watch.look(0.0, self._seal)  # type: ignore[arg-type]

    def _seal(self, replica: Replica) -> Header:
        self.sealed.append(replica.key)
        return Header()

    def commit(self, lease) -> None:
        self.core.commit(lease, [True] * len(lease.replicas))
        self.core.check()


def sums(answer: messages.Awaited) -> list[int]:
    return np.frombuffer(answer.checksums, "<u8").tolist()


def test_only_who_follows_is_given_blocks_that_are_being_written():
    rig = Rig()
    rig.reserve()
    assert rig.core.settle(rig.core.lease(rig.reader, KEYS[:2])) == (None, Reason.BUSY)
    lease, reason = rig.follow(KEYS[:3])
    assert (len(lease.replicas), reason) == (2, Reason.MISS)
    assert [replica.holds for replica in lease.replicas] == [2, 2]
    assert rig.core.match(b"".join(KEYS)) == b"", "being followed made a block visible"


def test_a_layer_is_there_when_every_block_has_it():
    rig = Rig()
    written = rig.reserve()
    lease, _ = rig.follow()
    watch = rig.watch(lease, 0, 1)
    assert rig.look(watch) is None
    assert rig.publish(written, 0, 1, slots=[0]) == 1
    assert rig.look(watch) is None
    assert rig.publish(written, 0, slots=[1]) == 1
    assert rig.look(watch) is None
    rig.publish(written, 1, slots=[1])
    assert sums(rig.look(watch)) == [sum_of(b, s) for b in (0, 1) for s in (0, 1)]
    exposed = follower(rig.reader, lease.id)[1].exposed
    assert [(e.offset, e.length) for e in exposed] == [(4096, 2048)] * 2, "neighbours are one run"


def test_segments_that_are_not_neighbours_are_exposed_apart():
    rig = Rig()
    written = rig.reserve(KEYS[:1])
    rig.publish(written, 0, 1, 2)
    lease, _ = rig.follow(KEYS[:1])
    assert rig.look(rig.watch(lease, 0, 2)).ready
    exposed = follower(rig.reader, lease.id)[1].exposed
    assert [(e.offset, e.length) for e in exposed] == [SPANS[0], SPANS[2]]


def test_nothing_is_exposed_before_an_await_and_while_one_waits():
    rig = Rig()
    written = rig.reserve()
    lease, _ = rig.follow()
    with pytest.raises(StaleLease, match="await"):
        rig.core.begin_transfer(rig.reader, lease.id, writes=False)
    rig.publish(written, 0)
    assert rig.look(rig.watch(lease, 0)).ready
    held = rig.core.begin_transfer(rig.reader, lease.id, writes=False)
    rig.core.end_transfer(rig.reader, lease.id, held)
    rig.watch(lease, 1)
    with pytest.raises(StaleLease, match="await"):
        rig.core.begin_transfer(rig.reader, lease.id, writes=False)


def test_committed_and_unfinished_blocks_are_answered_alike():
    rig = Rig()
    rig.commit(rig.reserve(KEYS[:1]))
    written = rig.reserve(KEYS[:2])
    lease, _ = rig.follow(KEYS[:2])
    rig.publish(written, 0, 1)
    for segment in (0, 1):
        assert sums(rig.look(rig.watch(lease, segment))) == [7, sum_of(0, segment)]
    assert rig.sealed == KEYS[:1], "a header is read once"


def test_the_commit_is_awaited_without_segments():
    rig = Rig()
    written = rig.reserve()
    lease, _ = rig.follow()
    rig.publish(written, 0, 1, 2)
    watch = rig.watch(lease)
    assert rig.look(watch) is None, "all is published, nothing is committed"
    rig.commit(written)
    assert sums(rig.look(watch)) == []
    exposed = follower(rig.reader, lease.id)[1].exposed
    assert [(e.offset, e.length) for e in exposed] == [(0, BLOCK)] * 2
    assert not rig.core.residency.published
    rig.core.release(rig.reader, lease.id)
    assert [replica.holds for replica in lease.replicas] == [0, 0]
    rig.core.check()


@pytest.mark.parametrize("how", ["abort", "death", "broken connection", "expiry", "removal"])
def test_blocks_that_are_given_up_end_the_watch_and_wait_for_their_followers(how: str):
    rig = Rig(write_lease_s=60.0)
    written = rig.reserve()
    lease, _ = rig.follow()
    rig.publish(written, 0)
    watch = rig.watch(lease, 1)
    assert rig.look(watch) is None
    match how:
        case "abort":
            rig.core.abort(rig.writer, written.id)
        case "death":
            rig.core.disconnect(rig.writer, fenced=True)
        case "broken connection":
            rig.core.disconnect(rig.writer, fenced=False)
        case "expiry":
            rig.core.tick(61.0)
        case "removal":
            rig.commit(written)
            rig.core.remove(KEYS[:2])
    with pytest.raises(StaleLease, match="given up by its writer, or removed"):
        rig.look(watch)
    assert {r.state for r in lease.replicas} == {BlockState.QUARANTINED}
    assert not rig.core.residency.published
    arena = rig.core.residency.dram.arena
    assert arena.used_bytes == 2 * BLOCK, "an extent was free under its follower"
    rig.core.fence(rig.reader)
    rig.core.fence(rig.writer)
    assert arena.used_bytes == 0
    rig.core.check()


def test_a_key_that_was_given_up_can_be_written_anew_beside_its_follower():
    rig = Rig()
    old = rig.reserve(KEYS[:1])
    lease, _ = rig.follow(KEYS[:1])
    rig.core.abort(rig.writer, old.id)
    new = rig.reserve(KEYS[:1])
    assert new.replicas[0].offset != lease.replicas[0].offset
    rig.publish(new, 0)
    with pytest.raises(StaleLease):
        rig.look(rig.watch(lease, 0))


def test_a_remote_follower_is_waited_for_as_long_as_it_waits():
    rig = Rig(remote_lease_s=10.0)
    far = rig.core.connect("far", 3, remote=True)
    rig.reserve()
    lease, _ = rig.follow(session=far)
    assert lease.expires_at == 10.0
    rig.core.renew(lease, 25.0)
    rig.core.tick(34.9)
    assert lease.id in far.leases
    rig.core.tick(35.0)
    assert lease.id not in far.leases
    with pytest.raises(StaleLease, match="want of an await"):
        rig.watch(lease, 0, session=far)
    rig.core.check()


def test_an_ordinary_lease_awaits_nothing():
    rig = Rig()
    rig.commit(rig.reserve())
    lease, _ = rig.core.settle(rig.core.lease(rig.reader, KEYS[:2]))
    with pytest.raises(StaleLease, match="does not follow"):
        rig.watch(lease, 0)


def test_a_rank_publishes_what_it_owns():
    rig = Rig()
    ranks = [rig.core.connect(f"rank {i}", i) for i in range(2)]
    first = rig.reserve(KEYS[:1], Share(0, 2, 0b01), ranks[0])
    second = rig.reserve(KEYS[:1], Share(1, 2, 0b10), ranks[1])
    lease, _ = rig.follow(KEYS[:1])
    watch = rig.watch(lease, 0, 1)
    rig.publish(first, 0)
    with pytest.raises(InvalidInput, match="another rank"):
        rig.publish(second, 2)
    with pytest.raises(InvalidInput, match="published before"):
        rig.publish(second, 0)
    assert rig.look(watch) is None
    rig.publish(second, 1)
    assert rig.look(watch).ready


def test_of_a_block_that_another_rank_gave_up_nothing_is_published():
    rig = Rig()
    ranks = [rig.core.connect(f"rank {i}", i) for i in range(2)]
    first = rig.reserve(KEYS[:1], Share(0, 2, 0b01), ranks[0])
    rig.reserve(KEYS[:1], Share(1, 2, 0b10), ranks[1])
    rig.core.disconnect(ranks[1], fenced=True)
    assert rig.publish(first, 0) == 0
    assert not rig.core.residency.published


def test_a_refused_publication_leaves_nothing_behind():
    rig = Rig()
    written = rig.reserve()
    rig.publish(written, 0, slots=[1])
    with pytest.raises(InvalidInput, match="published before"):
        rig.publish(written, 0)  # of both slots
    assert set(rig.core.residency.published) == {written.replicas[1]}
