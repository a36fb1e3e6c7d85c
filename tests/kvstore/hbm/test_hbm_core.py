"""The decisions of an HBM tier: which blocks are dirty, saved, evicted and held."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from kvsupport import SCHEMA, fresh_prefix

from tiffin.kvstore.errors import InvalidInput, StaleLease
from tiffin.kvstore.hbm.core.hbm_core import Admission, HbmCore, HbmEntry, HbmOptions, runs_of
from tiffin.kvstore.memory.arena import Arena
from tiffin.kvstore.memory.eviction import POLICIES
from tiffin.kvstore.node.core.records import Kept, PinLevel, Reason

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tiffin.kvstore.format.keys import Prefix
    from tiffin.kvstore.node.core.node_core import Reservation
    from tiffin.kvstore.node.core.records import Replica, Session

BLOCK = -(-SCHEMA.block_bytes // 4096) * 4096  # the size of a block in an arena
SUMS = np.zeros(len(SCHEMA.segments), np.uint64)


def core_of(blocks: int, **options: object) -> HbmCore:
    return HbmCore(Arena(blocks * BLOCK), HbmOptions(**options))  # type: ignore[arg-type]


def entries_for(prefix: Prefix, made: Reservation, *, dirty: bool = True) -> list[HbmEntry | None]:
    """An entry for each granted block of a reservation."""
    return [HbmEntry(prefix, i, SUMS, dirty) for i, s in enumerate(made.statuses) if s == 1]


def fill(core: HbmCore, prefix: Prefix, *, dirty: bool = True) -> int:
    """Reserve and publish; returns how many blocks were stored."""
    use = core.open_use()
    made = core.reserve_blocks(use, prefix, 0.0)
    stored = 0
    if made.lease is not None:
        kept = core.publish(use, made.lease.id, entries_for(prefix, made, dirty=dirty), 0.0)
        stored = sum(flag == Kept.STORED for flag in kept)
    core.close_use(use, fenced=True)
    core.check()
    return stored


def keys_of(replicas: Sequence[Replica]) -> list[bytes]:
    return [replica.key for replica in replicas]


def test_options_are_checked() -> None:
    with pytest.raises(InvalidInput, match="watermarks"):
        core_of(4, high_watermark=0.3, low_watermark=0.5)
    with pytest.raises(InvalidInput, match="policy"):
        core_of(4, policy="first-come")


def test_a_block_is_visible_after_its_commit_and_not_before() -> None:
    core, prefix = core_of(4), fresh_prefix(2)
    use = core.open_use()
    made = core.reserve_blocks(use, prefix, 0.0)
    assert made.lease is not None
    assert core.resident(prefix.keys) == 0
    assert core.space.statistics().reserved_bytes == 2 * BLOCK
    assert core.hold(core.open_use(), prefix.keys) == (None, Reason.BUSY)
    core.publish(use, made.lease.id, entries_for(prefix, made), 0.0)
    assert core.resident(prefix.keys) == 2
    assert core.space.statistics().committed_bytes == 2 * BLOCK
    assert core.entries[prefix.keys[1]].index == 1


def test_an_abandoned_writer_keeps_its_extents_until_its_stream_has_passed() -> None:
    core, prefix = core_of(2), fresh_prefix(2)
    use = core.open_use()
    core.reserve_blocks(use, prefix, 0.0)
    assert not core.close_use(use, fenced=False)
    assert core.space.statistics().quarantined_bytes == 2 * BLOCK
    assert fill(core, fresh_prefix(1)) == 0  # no room: these bytes may still be written to
    core.fence(use)
    assert core.space.statistics().free_bytes == 2 * BLOCK
    assert fill(core, prefix) == 2


def test_an_expired_reservation_is_not_published() -> None:
    core, prefix = core_of(2, write_lease_s=1.0), fresh_prefix(1)
    use = core.open_use()
    made = core.reserve_blocks(use, prefix, 0.0)
    assert made.lease is not None
    with pytest.raises(StaleLease, match="expired"):
        core.publish(use, made.lease.id, entries_for(prefix, made), 2.0)
    assert core.resident(prefix.keys) == 0
    assert core.space.statistics().free_bytes == 2 * BLOCK
    core.check()


def test_a_leased_block_is_never_evicted_and_a_chain_leaves_from_its_tail() -> None:
    core, prefix, other = core_of(3), fresh_prefix(3), fresh_prefix(2)
    assert fill(core, prefix) == 3
    use = core.open_use()
    lease, _ = core.hold(use, prefix.keys[:1])
    assert lease is not None
    assert fill(core, other) == 2  # the tail left, block by block
    assert core.resident(prefix.keys) == 1
    assert fill(core, fresh_prefix(3)) == 2  # `other` left; the leased one stays
    assert core.resident(prefix.keys) == 1
    core.close_use(use, fenced=True)
    core.check()


def test_above_the_high_watermark_the_coldest_dirty_blocks_are_saved_heads_first() -> None:
    core = core_of(10, high_watermark=0.7, low_watermark=0.4)
    old, new = fresh_prefix(4), fresh_prefix(4)
    fill(core, old)
    assert core.saves_due(99) == []
    fill(core, new)  # 8 of 10: down to 4, the four coldest
    due = core.saves_due(99)
    assert keys_of(due) == list(old.keys)
    assert core.saves_due(99) == []  # they are being saved already
    for replica in due:
        core.saved(replica, saved=True)
    core.check()
    assert core.saves_due(99) == []  # the next victims are in the pool already
    assert [core.entries[key].dirty for key in (*old.keys, *new.keys)] == [False] * 4 + [True] * 4
    assert fill(core, fresh_prefix(6)) == 6
    assert core.resident(old.keys) == 0
    assert core.residency.lost_dirty == 0


def test_a_save_brings_the_ancestors_along() -> None:
    core, prefix = core_of(4), fresh_prefix(4)
    fill(core, prefix)
    due = core.saves_of([prefix.keys[2]])
    assert keys_of(due) == list(prefix.keys[:3])
    for replica in due:
        core.saved(replica, saved=False)
    assert [entry.dirty for entry in core.entries.values()] == [True] * 4
    assert len(core.saves_of(None)) == 4


def test_a_block_that_is_being_saved_neither_leaves_nor_becomes_younger() -> None:
    core, old, new = core_of(2), fresh_prefix(1), fresh_prefix(1)
    fill(core, old)
    fill(core, new)
    (saving,) = core.saves_of(old.keys)
    assert fill(core, fresh_prefix(1)) == 1
    assert core.resident(old.keys) == 1
    assert core.resident(new.keys) == 0
    core.saved(saving, saved=True)
    core.check()


def test_a_save_that_ends_leaves_the_eviction_order_as_it_was() -> None:
    core, old, new = core_of(2), fresh_prefix(1), fresh_prefix(1)
    fill(core, old)
    fill(core, new)
    (saving,) = core.saves_of(old.keys)
    core.saved(saving, saved=True)
    assert fill(core, fresh_prefix(1)) == 1
    assert (core.resident(old.keys), core.resident(new.keys)) == (0, 1)


def test_a_block_removed_while_it_is_saved_is_free_when_that_has_ended() -> None:
    core, prefix = core_of(1), fresh_prefix(1)
    fill(core, prefix)
    (saving,) = core.saves_of(None)
    assert core.remove(prefix.keys).blocks == 1
    assert core.space.statistics().quarantined_bytes == BLOCK
    core.saved(saving, saved=True)
    assert core.space.statistics().free_bytes == BLOCK
    core.check()


def test_a_dirty_block_that_must_leave_is_lost_and_counted() -> None:
    core = core_of(1)
    fill(core, fresh_prefix(1))
    fill(core, fresh_prefix(1), dirty=False)
    fill(core, fresh_prefix(1))
    assert core.residency.lost_dirty == 1
    assert core.residency.counters.evictions == 2


def test_a_reservation_stops_at_what_another_writes() -> None:
    core, prefix = core_of(8), fresh_prefix(4)
    core.reserve_blocks(core.open_use(), prefix[1:2], 0.0)
    made = core.reserve_blocks(core.open_use(), prefix, 0.0, stop_at_busy=True)
    assert len(made.statuses) == 1
    everything = core.reserve_blocks(core.open_use(), prefix, 0.0)
    assert list(everything.statuses) == [3, 3, 1, 1]


def test_runs_follow_prefix_objects() -> None:
    core, prefix, other = core_of(8), fresh_prefix(4), fresh_prefix(2)
    fill(core, prefix)
    fill(core, other)
    core.remove([prefix.keys[2]])
    replicas = core.saves_of(None)
    runs = runs_of(replicas, core.entries.__getitem__)
    found = sorted((part.start, len(part), len(members)) for part, members in runs)
    assert found == [(0, 2, 2), (0, 2, 2), (3, 1, 1)]
    for part, members in runs:
        assert list(part.keys) == keys_of(members)


def test_admission_on_second_use() -> None:
    keys = fresh_prefix(3).keys
    assert Admission(second_use=False).admits(keys) == 3
    careful = Admission(second_use=True)
    assert careful.admits(keys[:2]) == 0
    assert careful.admits(keys) == 2
    assert careful.admits(keys) == 3


CHAINS = [fresh_prefix(4) for _ in range(4)]


class HbmMachine(RuleBasedStateMachine):
    """The core against a dict: published blocks stay, with their generation, until they leave."""

    @initialize(policy=st.sampled_from(sorted(POLICIES)), blocks=st.integers(2, 9))
    def start(self, policy: str, blocks: int) -> None:
        self.core = core_of(blocks, policy=policy, write_lease_s=50.0)
        self.now = itertools.count()
        self.published: dict[bytes, int] = {}
        self.writers: list[tuple[Session, Prefix, Reservation]] = []
        self.readers: list[tuple[Session, list[Replica]]] = []
        self.abandoned: list[Session] = []
        self.saving: list[Replica] = []
        self.clean: set[int] = set()

    @rule(chain=st.sampled_from(CHAINS), cut=st.tuples(st.integers(0, 4), st.integers(0, 4)))
    def reserve(self, chain: Prefix, cut: tuple[int, int]) -> None:
        part = chain[min(cut) : max(cut)]
        use = self.core.open_use()
        made = self.core.reserve_blocks(use, part, next(self.now))
        for key, status in zip(part.keys, made.statuses, strict=False):
            assert (status == 2) == (key in self.core.index)
        if made.lease is None:
            assert self.core.close_use(use, fenced=True)
        else:
            self.writers.append((use, part, made))

    @rule(data=st.data(), dirty=st.booleans(), skipped=st.booleans())
    def publish(self, data: st.DataObject, dirty: bool, skipped: bool) -> None:
        if not self.writers:
            return
        use, part, made = self.writers.pop(data.draw(st.integers(0, len(self.writers) - 1)))
        assert made.lease is not None
        entries = entries_for(part, made, dirty=dirty)
        if skipped:
            entries[0] = None
        try:
            kept = self.core.publish(use, made.lease.id, entries, next(self.now))
        except StaleLease:
            kept = b""
        for replica, flag in zip(made.lease.replicas, kept, strict=False):
            if flag == Kept.STORED:
                self.published[replica.key] = replica.generation
        self.core.close_use(use, fenced=True)

    @rule(data=st.data())
    def abandon(self, data: st.DataObject) -> None:
        if self.writers:
            use, _, _ = self.writers.pop(data.draw(st.integers(0, len(self.writers) - 1)))
            assert not self.core.close_use(use, fenced=False)
            self.abandoned.append(use)

    @rule()
    def streams_pass(self) -> None:
        for use in self.abandoned:
            self.core.fence(use)
        self.abandoned.clear()

    @rule(chain=st.sampled_from(CHAINS), start=st.integers(0, 3))
    def lease(self, chain: Prefix, start: int) -> None:
        use, part = self.core.open_use(), chain[start:]
        lease, _ = self.core.hold(use, part.keys)
        held = lease.replicas if lease is not None else []
        assert len(held) == self.core.resident(part.keys)
        for replica in held:  # a lease always returns the last published generation
            assert self.published[replica.key] == replica.generation
        self.readers.append((use, list(held)))

    @rule(fenced=st.booleans())
    def release(self, fenced: bool) -> None:
        if self.readers:
            use, held = self.readers.pop()
            if not self.core.close_use(use, fenced=fenced) and held:
                self.abandoned.append(use)

    @rule(limit=st.integers(1, 4), watermark=st.booleans())
    def begin_saves(self, limit: int, watermark: bool) -> None:
        due = self.core.saves_due(limit) if watermark else self.core.saves_of(None)
        assert all(self.core.entries[replica.key].dirty for replica in due)
        self.saving += due

    @rule(ok=st.booleans())
    def end_save(self, ok: bool) -> None:
        if self.saving:
            replica = self.saving.pop()
            here = self.core.index.get(replica.key) is replica.block
            self.core.saved(replica, saved=ok)
            if here:
                assert self.core.entries[replica.key].dirty == (not ok)

    @rule(chain=st.sampled_from(CHAINS), index=st.integers(0, 3))
    def remove(self, chain: Prefix, index: int) -> None:
        self.core.remove(chain.keys[index : index + 1])
        assert chain.keys[index] not in self.core.index

    @rule(chain=st.sampled_from(CHAINS), index=st.integers(0, 3))
    def condemn(self, chain: Prefix, index: int) -> None:
        key = chain.keys[index]
        self.core.condemn(key, self.published.get(key, 0))
        assert key not in self.core.index

    @rule(chain=st.sampled_from(CHAINS), level=st.sampled_from(list(PinLevel)))
    def pin(self, chain: Prefix, level: PinLevel) -> None:
        self.core.pin(chain.keys, level, next(self.now) + 5.0)

    @rule(jump=st.sampled_from([0, 0, 60]))
    def tick(self, jump: int) -> None:
        for _ in range(jump):
            next(self.now)
        self.core.tick(next(self.now))

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "core"):
            return
        self.core.check()
        for _, held in self.readers:
            for replica in held:
                assert replica.holds > 0
        places = sorted(
            {(r.offset, r.length) for _, held in self.readers for r in held}
            | {(r.offset, r.length) for _, _, m in self.writers if m.lease
               for r in m.lease.replicas}
        )  # fmt: skip
        for (a, length), (b, _) in itertools.pairwise(places):
            assert a + length <= b, "two extents that are held overlap"

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        for use in [*self.abandoned, *(w[0] for w in self.writers), *(r[0] for r in self.readers)]:
            self.core.fence(use)
        for replica in self.saving:
            self.core.saved(replica, saved=False)
        self.core.check()
        space = self.core.space.statistics()
        assert space.reserved_bytes == space.quarantined_bytes == 0
        assert space.free_bytes + space.committed_bytes == space.capacity_bytes


TestHbmMachine = HbmMachine.TestCase
TestHbmMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
