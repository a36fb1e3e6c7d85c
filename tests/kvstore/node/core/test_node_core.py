"""The decisions of the node's core, one per test, without bytes, threads or a clock."""

import random
import sys

import pytest

from tiffin.kvstore.errors import InvalidInput, StaleLease
from tiffin.kvstore.format.header import BlockState
from tiffin.kvstore.memory.arena import Arena
from tiffin.kvstore.memory.eviction import make_policy
from tiffin.kvstore.node.core import placement as residency_module
from tiffin.kvstore.node.core.node_core import CoreOptions, NodeCore, ReserveStatus, split_keys
from tiffin.kvstore.node.core.placement import Erase
from tiffin.kvstore.node.core.records import Move, MoveOutcome, MovePriority, PinLevel, Reason, Wipe
from tiffin.kvstore.node.core.tier_ledger import TierSpace
from tiffin.kvstore.tiers.base import TierName

BLOCK = 4096
ROOT = bytes(16)


def key(chain: str, index: int) -> bytes:
    return f"{chain}{index}".encode().ljust(16, b".")


def chain(name: str, length: int) -> list[bytes]:
    return [key(name, i) for i in range(length)]


class Rig:
    """A core with `dram` and `nvme` blocks of room; a test does the shell's work step by step."""

    def __init__(self, dram: int = 8, nvme: int = 0, **options: object) -> None:
        spaces = [
            TierSpace(tier, Arena(count * BLOCK), make_policy("lru"))
            for tier, count in ((TierName.DRAM, dram), (TierName.NVME, nvme))
            if count
        ]
        self.core = NodeCore(spaces[0], spaces[1] if nvme else None, CoreOptions(**options))
        self.session = self.core.connect("test", 1)
        self.write_backs: list[Move] = []
        self.wipes: list[Wipe] = []

    def reserve(self, keys, parent=ROOT, depth=0, session=None, now=0.0, length=BLOCK):
        return self.core.reserve(session or self.session, keys, parent, depth, length, now)

    def put(self, keys, parent=ROOT, depth=0, length=BLOCK):
        made = self.reserve(keys, parent, depth, length=length)
        if made.lease is not None:
            self.core.commit(made.lease, [True] * len(made.lease.replicas))
        self.core.check()
        return made

    def lease(self, keys):
        return self.core.settle(self.core.lease(self.session, keys))

    def moves(self) -> list[Move]:
        """The demotions and promotions that were ordered; write-backs wait in `write_backs`."""
        actions = self.core.residency.actions
        moves = list(dict.fromkeys(action for action in actions if isinstance(action, Move)))
        self.wipes += [action for action in actions if isinstance(action, Wipe)]
        actions.clear()
        self.write_backs += [m for m in moves if m.priority is MovePriority.WRITE_BACK]
        return [m for m in moves if m.priority is not MovePriority.WRITE_BACK]

    def finish(self, outcome: MoveOutcome = MoveOutcome.DONE) -> int:
        """End every ordered move, and the moves that follow from it; returns how many demotions and
        promotions there were."""
        count = 0
        while moves := self.moves():
            for move in moves:
                self.core.moved(move, outcome)
                self.core.check()
                count += 1
        self.finish_write_backs(outcome)
        return count

    def finish_write_backs(self, outcome: MoveOutcome = MoveOutcome.DONE) -> None:
        while self.write_backs:
            self.core.moved(self.write_backs.pop(), outcome)
            self.core.check()

    def wipe(self, *, failed: bool = False) -> int:
        """End every ordered wipe; returns how many extents were wiped."""
        self.moves()
        wipes, self.wipes = self.wipes, []
        self.core.residency.wiped(wipes, failed=failed)
        self.core.check()
        return sum(wipe.replica is not None for wipe in wipes)

    def resident(self, keys) -> int:
        return len(self.core.match(b"".join(keys)))


def test_a_committed_chain_is_matched_and_a_gap_ends_the_match():
    rig = Rig()
    keys = chain("a", 4)
    rig.put(keys)
    assert rig.resident(keys) == 4
    rig.core.remove([keys[2]])
    assert rig.resident(keys) == 2
    assert rig.core.exists(b"".join(keys)) == bytes([1, 1, 0, 1])


def test_nothing_is_visible_before_its_commit():
    rig = Rig()
    made = rig.reserve(chain("a", 2))
    assert made.statuses == bytes([ReserveStatus.GRANTED] * 2)
    assert rig.resident(chain("a", 2)) == 0
    assert rig.lease(chain("a", 2)) == (None, Reason.BUSY)


def test_a_second_writer_of_the_same_key_is_told_busy_and_the_third_finds_it_resident():
    rig = Rig()
    first = rig.reserve(chain("a", 1))
    assert rig.reserve(chain("a", 2)).statuses == bytes([ReserveStatus.BUSY, ReserveStatus.GRANTED])
    rig.core.commit(first.lease, [True])
    assert rig.reserve(chain("a", 2)).statuses == bytes(
        [ReserveStatus.RESIDENT, ReserveStatus.BUSY]
    )


def test_a_slot_that_fails_its_checks_is_freed_and_its_neighbour_is_kept():
    rig = Rig()
    made = rig.reserve(chain("a", 2))
    rig.core.commit(made.lease, [True, False])
    rig.core.check()
    assert rig.resident(chain("a", 2)) == 1
    assert rig.core.residency.dram.arena.used_bytes == BLOCK


def test_chains_leave_from_the_tail():
    rig = Rig(dram=4)
    rig.put(chain("a", 4))
    rig.put(chain("b", 2))
    assert rig.resident(chain("a", 4)) == 2
    assert rig.resident(chain("b", 2)) == 2


def test_a_prefix_longer_than_the_pool_never_evicts_its_own_ancestors():
    rig = Rig(dram=4)
    keys = chain("a", 6)
    first = rig.put(keys[:4])
    assert first.reason is Reason.NONE
    second = rig.put(keys[4:], parent=keys[3], depth=4)
    assert second.statuses == b""
    assert second.reason is Reason.NO_ROOM
    assert rig.resident(keys) == 4
    assert not rig.core.worth_waiting()


def test_a_leased_block_stays_and_a_released_one_may_leave():
    rig = Rig(dram=2)
    rig.put(chain("a", 2))
    lease, reason = rig.lease(chain("a", 2))
    assert reason is Reason.NONE
    assert rig.put(chain("b", 1)).reason is Reason.NO_ROOM
    assert rig.core.worth_waiting()
    rig.core.release(rig.session, lease.id)
    assert rig.put(chain("b", 1)).reason is Reason.NONE


def test_removed_while_leased_is_quarantined_until_the_release():
    rig = Rig(dram=2)
    rig.put(chain("a", 1))
    lease, _ = rig.lease(chain("a", 1))
    assert rig.core.remove(chain("a", 1)).blocks == 1
    rig.core.check()
    assert rig.resident(chain("a", 1)) == 0
    assert rig.core.residency.dram.statistics().quarantined_bytes == BLOCK
    rig.put(chain("a", 1))  # the same key again: another extent, another generation
    assert rig.core.residency.dram.arena.used_bytes == 2 * BLOCK
    rig.core.release(rig.session, lease.id)
    rig.core.check()
    assert rig.core.residency.dram.arena.used_bytes == BLOCK


def test_a_lease_is_released_once_and_only_by_its_session():
    rig = Rig()
    rig.put(chain("a", 1))
    lease, _ = rig.lease(chain("a", 1))
    with pytest.raises(StaleLease):
        rig.core.release(rig.core.connect("other", 2), lease.id)
    rig.core.release(rig.session, lease.id)
    with pytest.raises(StaleLease):
        rig.core.release(rig.session, lease.id)


def test_read_and_write_leases_are_not_mistaken_for_each_other():
    rig = Rig()
    made = rig.put(chain("a", 1))
    lease, _ = rig.lease(chain("a", 1))
    with pytest.raises(StaleLease):
        rig.core.write_lease(rig.session, lease.id)
    made = rig.reserve(chain("b", 1))
    with pytest.raises(StaleLease):
        rig.core.release(rig.session, made.lease.id)


def test_an_expired_reservation_frees_its_keys_at_once_and_its_bytes_after_the_writers_word():
    rig = Rig(write_lease_s=10.0)
    made = rig.reserve(chain("a", 1), now=0.0)
    rig.core.tick(9.9)
    assert rig.reserve(chain("a", 1)).statuses == bytes([ReserveStatus.BUSY])
    rig.core.tick(10.0)
    rig.core.check()
    assert rig.core.residency.dram.statistics().quarantined_bytes == BLOCK
    other = rig.core.connect("other", 2)
    again = rig.reserve(chain("a", 1), session=other)
    assert again.statuses == bytes([ReserveStatus.GRANTED])
    assert again.lease.replicas[0].offset != made.lease.replicas[0].offset
    with pytest.raises(StaleLease, match="expired"):
        rig.core.write_lease(rig.session, made.lease.id)
    assert rig.core.residency.dram.statistics().quarantined_bytes == 0
    rig.core.check()


def test_a_broken_connection_quarantines_and_the_processs_death_frees():
    rig = Rig()
    rig.put(chain("b", 1))
    rig.reserve(chain("a", 2))
    rig.lease(chain("b", 1))
    rig.core.disconnect(rig.session, fenced=False)
    rig.core.check()
    numbers = rig.core.residency.dram.statistics()
    assert (numbers.reserved_bytes, numbers.quarantined_bytes) == (0, 2 * BLOCK)
    assert rig.session.gone
    rig.core.fence(rig.session)
    rig.core.check()
    assert rig.core.residency.dram.statistics().quarantined_bytes == 0
    assert rig.core.sessions == {}


def test_a_goodbye_frees_everything_at_once():
    rig = Rig()
    rig.put(chain("b", 1))
    rig.reserve(chain("a", 2))
    rig.lease(chain("b", 1))
    rig.core.disconnect(rig.session, fenced=True)
    rig.core.check()
    assert rig.core.residency.dram.arena.used_bytes == BLOCK
    assert not rig.core.worth_waiting()


def test_abort_frees_and_ends_the_reservation():
    rig = Rig()
    made = rig.reserve(chain("a", 2))
    rig.core.abort(rig.session, made.lease.id)
    rig.core.check()
    assert rig.core.residency.dram.arena.used_bytes == 0
    with pytest.raises(StaleLease):
        rig.core.abort(rig.session, made.lease.id)


def test_soft_pins_leave_last_and_hard_pins_never():
    rig = Rig(dram=3)
    for name in "abc":
        rig.put(chain(name, 1))
    rig.core.pin(chain("a", 1), PinLevel.SOFT, until=100.0)
    rig.core.pin(chain("b", 1), PinLevel.HARD, until=100.0)
    rig.put(chain("d", 1))
    assert [rig.resident(chain(name, 1)) for name in "abcd"] == [1, 1, 0, 1]
    rig.core.pin(chain("d", 1), PinLevel.HARD, until=100.0)
    rig.put(chain("e", 1))
    assert [rig.resident(chain(name, 1)) for name in "abde"] == [0, 1, 1, 1]
    rig.core.pin(chain("e", 1), PinLevel.HARD, until=50.0)
    assert rig.put(chain("f", 1)).reason is Reason.NO_ROOM
    assert rig.core.worth_waiting()  # pins end
    rig.core.tick(50.0)
    assert rig.put(chain("f", 1)).reason is Reason.NONE
    assert rig.resident(chain("e", 1)) == 0


def test_a_lease_over_pinned_and_unpinned_blocks_gives_each_back_to_its_own_order():
    rig = Rig(dram=4)
    keys = chain("a", 4)
    rig.put(keys)
    rig.core.pin([keys[1]], PinLevel.SOFT, until=10.0)
    rig.core.pin([keys[2]], PinLevel.HARD, until=10.0)
    dram = rig.core.residency.dram
    lease, _ = rig.lease(keys)
    assert list(dram.candidates()) == []
    rig.core.check()
    rig.core.release(rig.session, lease.id)
    rig.core.check()
    assert [replica.key for replica in dram.candidates()] == [keys[3], keys[0], keys[1]]


def test_a_key_that_is_asked_for_twice_is_held_twice():
    rig = Rig(dram=4)
    keys = chain("a", 2)
    rig.put(keys)
    lease, _ = rig.lease([keys[0], keys[0], keys[1]])
    assert [replica.holds for replica in lease.replicas] == [2, 2, 1]
    rig.core.release(rig.session, lease.id)
    rig.core.check()
    assert {replica.holds for replica in lease.replicas} == {0}
    assert len(rig.core.residency.dram.policy) == 2


def test_unpinning_makes_a_candidate_again_and_pinning_nothing_counts_nothing():
    rig = Rig(dram=1)
    rig.put(chain("a", 1))
    assert rig.core.pin(chain("a", 2), PinLevel.HARD, until=9.0) == 1
    assert rig.put(chain("b", 1)).reason is Reason.NO_ROOM
    assert rig.core.pin(chain("a", 1), PinLevel.NONE, until=0.0) == 1
    rig.core.check()
    assert rig.put(chain("b", 1)).reason is Reason.NONE


def test_a_pin_leaves_with_its_block():
    rig = Rig()
    rig.put(chain("a", 1))
    rig.core.pin(chain("a", 1), PinLevel.HARD, until=9.0)
    rig.core.remove(chain("a", 1))
    assert rig.core.residency.pins == {}
    rig.core.tick(10.0)


def test_soft_pins_survive_being_spared_and_released():
    rig = Rig(dram=2)
    rig.put(chain("a", 2))
    rig.core.pin(chain("a", 2), PinLevel.SOFT, until=100.0)
    lease, _ = rig.lease(chain("a", 2))
    rig.core.release(rig.session, lease.id)
    rig.core.check()
    rig.put(chain("b", 1))
    assert rig.resident(chain("a", 2)) == 1


# -- two tiers -------------------------------------------------------------------------------------


def test_a_full_dram_demotes_and_grants_when_the_write_has_ended():
    rig = Rig(dram=2, nvme=4)
    rig.put(chain("a", 2))
    assert rig.put(chain("b", 1)).reason is Reason.NO_ROOM
    assert rig.core.worth_waiting()
    assert rig.core.residency.dram.statistics().evicting_bytes == BLOCK
    assert rig.finish() == 1
    assert rig.put(chain("b", 1)).reason is Reason.NONE
    assert rig.resident(chain("a", 2)) == 2
    assert rig.core.match(key("a", 1)) == bytes([2])  # NVMe only: the tail went first


def test_waiting_writers_do_not_order_more_demotions_than_they_need():
    rig = Rig(dram=4, nvme=8)
    rig.put(chain("a", 4))
    rig.reserve(chain("b", 1))
    rig.reserve(chain("b", 1))
    assert len(rig.moves()) == 1


def test_a_hit_in_nvme_is_promoted_and_readers_share_the_move():
    rig = Rig(dram=2, nvme=4)
    rig.put(chain("a", 2))
    rig.reserve(chain("b", 1))
    rig.finish()
    first = rig.core.lease(rig.session, chain("a", 2))
    second = rig.core.lease(rig.session, chain("a", 2))
    assert (first.pending, second.pending) == (1, 1)
    (move,) = rig.moves()
    assert move.priority is MovePriority.PROMOTE
    assert rig.core.moved(move, MoveOutcome.DONE) == [first, second]
    rig.core.check()
    for ticket in (first, second):
        lease, reason = rig.core.settle(ticket)
        assert (len(lease.replicas), reason) == (2, Reason.NONE)
    assert rig.core.match(key("a", 1)) == bytes([3])


def test_a_clean_copy_is_dropped_at_once():
    rig = Rig(dram=2, nvme=4)
    test_chain = chain("a", 2)
    rig.put(test_chain)
    rig.reserve(chain("b", 1))
    rig.finish()
    ticket = rig.core.lease(rig.session, test_chain)
    rig.finish()
    lease, _ = rig.core.settle(ticket)
    rig.core.release(rig.session, lease.id)
    assert rig.put(chain("c", 1)).reason is Reason.NONE
    assert rig.moves() == []


def test_a_reader_during_demotion_keeps_the_dram_copy():
    rig = Rig(dram=2, nvme=4)
    rig.put(chain("a", 2))
    rig.reserve(chain("b", 1))
    (move,) = rig.moves()
    lease, _ = rig.lease(chain("a", 2))
    rig.core.moved(move, MoveOutcome.DONE)
    rig.core.check()
    assert rig.core.match(key("a", 1)) == bytes([3])
    rig.core.release(rig.session, lease.id)
    rig.core.check()


def test_a_deadline_settles_with_what_is_there_and_the_move_goes_on():
    rig = Rig(dram=3, nvme=4)
    rig.put(chain("a", 3))
    rig.reserve(chain("b", 1))
    rig.finish()
    ticket = rig.core.lease(rig.session, chain("a", 3))
    assert not ticket.ready
    lease, reason = rig.core.settle(ticket)
    assert (len(lease.replicas), reason) == (2, Reason.DEADLINE)
    (move,) = rig.moves()
    assert rig.core.moved(move, MoveOutcome.DONE) == []
    rig.core.check()
    assert rig.core.match(key("a", 2)) == bytes([3])


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [(MoveOutcome.CORRUPT, Reason.CORRUPT), (MoveOutcome.READ_FAILED, Reason.MEDIUM)],
)
def test_a_block_that_fails_its_promotion_is_dropped_and_the_reader_told(outcome, reason):
    rig = Rig(dram=3, nvme=4)
    rig.put(chain("a", 3))
    rig.reserve(chain("b", 1))
    rig.finish()
    ticket = rig.core.lease(rig.session, chain("a", 3))
    (move,) = rig.moves()
    assert rig.core.moved(move, outcome) == [ticket]
    lease, why = rig.core.settle(ticket)
    assert (len(lease.replicas), why) == (2, reason)
    rig.core.check()
    assert rig.resident(chain("a", 3)) == 2
    assert any(isinstance(action, Erase) for action in rig.core.residency.actions)


def test_dram_damage_found_while_demoting_drops_the_block():
    rig = Rig(dram=2, nvme=4)
    rig.put(chain("a", 2))
    rig.reserve(chain("b", 1))
    (move,) = rig.moves()
    rig.core.moved(move, MoveOutcome.CORRUPT)
    rig.finish_write_backs()
    assert rig.resident(chain("a", 2)) == 1
    assert rig.core.residency.counters.corrupt == 1
    assert rig.core.residency.nvme.arena.used_bytes == BLOCK  # the head's


def test_a_failing_disk_disables_the_tier_and_dram_goes_on():
    rig = Rig(dram=2, nvme=4)
    rig.put(chain("a", 2))
    rig.reserve(chain("b", 1))
    rig.finish(MoveOutcome.WRITE_FAILED)
    assert not rig.core.residency.nvme.writable
    assert rig.resident(chain("a", 2)) == 2
    assert rig.put(chain("b", 1)).reason is Reason.NONE  # by dropping a leaf, without the disk
    assert rig.resident(chain("a", 2)) == 1
    assert rig.moves() == []


def test_removed_during_a_demotion_is_gone_from_both_tiers():
    rig = Rig(dram=2, nvme=4)
    rig.put(chain("a", 2))
    rig.reserve(chain("b", 1))
    (move,) = rig.moves()
    rig.finish_write_backs()
    removal = rig.core.remove([key("a", 1)])
    assert move.cancelled
    assert rig.wipe() == 0  # it is still being written
    assert not rig.core.residency.has_ended(removal)
    rig.core.moved(move, MoveOutcome.DONE)
    rig.core.check()
    assert rig.wipe() == 1
    assert rig.core.residency.has_ended(removal)
    assert rig.resident(chain("a", 2)) == 1
    assert rig.core.residency.nvme.arena.used_bytes == BLOCK  # the head's


def test_what_goes_to_nvme_takes_its_ancestors_along_and_they_stay_in_dram():
    rig = Rig(dram=4, nvme=8)
    rig.put(chain("a", 4))
    rig.reserve(chain("b", 1))
    (demotion,) = rig.moves()
    rig.core.check()
    assert demotion.block.key == key("a", 3)
    assert [move.block.key for move in rig.write_backs] == [key("a", i) for i in (2, 1, 0)]
    rig.core.moved(demotion, MoveOutcome.DONE)
    rig.finish_write_backs()
    assert rig.core.match(b"".join(chain("a", 4))) == bytes([3, 3, 3, 2])
    rig.put(chain("b", 1))
    rig.reserve(chain("c", 1))
    assert rig.moves() == []  # a clean copy leaves without a write
    assert rig.write_backs == []


def test_a_flush_writes_back_heads_first_and_only_what_is_not_there():
    rig = Rig(dram=4, nvme=8)
    rig.put(chain("a", 2))
    rig.put(chain("b", 1))
    rig.core.remove(chain("b", 1))
    assert rig.core.flush() == 2
    assert rig.core.flush() == 0  # under way
    assert rig.moves() == []
    assert [move.block.key for move in rig.write_backs] == chain("a", 2)
    rig.finish_write_backs()
    assert rig.core.flush() == 0
    assert rig.core.residency.counters.write_backs == 2
    assert Rig(dram=2).core.flush() == 0


def test_a_flush_into_a_full_nvme_writes_what_fits():
    rig = Rig(dram=4, nvme=2)
    rig.put(chain("a", 4))
    rig.core.flush()
    rig.moves()
    rig.finish_write_backs()
    assert rig.core.match(b"".join(chain("a", 4))) == bytes([3, 3, 1, 1])


def test_removed_during_a_promotion_is_a_miss():
    rig = Rig(dram=2, nvme=4)
    rig.put(chain("a", 2))
    rig.reserve(chain("b", 1))
    rig.finish()
    ticket = rig.core.lease(rig.session, [key("a", 1)])
    (move,) = rig.moves()
    removal = rig.core.remove([key("a", 1)])
    assert rig.core.worth_waiting()
    assert rig.core.moved(move, MoveOutcome.DONE) == [ticket]
    assert not rig.core.residency.has_ended(removal)
    assert rig.wipe() == 1
    assert rig.core.residency.has_ended(removal)
    assert rig.core.settle(ticket) == (None, Reason.MISS)
    rig.core.check()


def test_what_was_removed_is_not_used_again_before_it_is_wiped():
    rig = Rig(dram=4, nvme=2)
    rig.put(chain("a", 2))
    rig.core.flush()
    rig.finish()
    removal = rig.core.remove(chain("a", 2))
    nvme = rig.core.residency.nvme
    assert nvme.statistics().quarantined_bytes == 2 * BLOCK
    rig.core.check()
    assert rig.wipe() == 2
    assert nvme.statistics().free_bytes == 2 * BLOCK
    assert rig.core.residency.has_ended(removal)


def test_a_removal_ends_behind_those_before_it():
    """A second removal of the same blocks ends only when the first one has ended."""
    rig = Rig(dram=2, nvme=4)
    rig.put(chain("a", 2))
    rig.reserve(chain("b", 1))
    (move,) = rig.moves()
    first, second = (rig.core.remove([key("a", 1)]) for _ in range(2))
    assert (first.blocks, second.blocks) == (1, 0)
    rig.wipe()
    assert not rig.core.residency.has_ended(second)
    rig.core.moved(move, MoveOutcome.DONE)
    rig.wipe()
    assert rig.core.residency.has_ended(first)
    assert rig.core.residency.has_ended(second)


def test_a_wipe_that_failed_is_not_made_good_by_the_next():
    rig = Rig(dram=2, nvme=4)
    rig.put(chain("a", 1))
    rig.core.flush()
    rig.finish()
    failed = rig.core.remove(chain("a", 1))
    rig.wipe(failed=True)
    again = rig.core.remove(chain("a", 1))
    rig.wipe()
    assert failed.failed
    assert again.failed
    assert not rig.core.residency.nvme.writable


def test_a_full_nvme_drops_leaves_and_never_a_parent_of_what_stays():
    rig = Rig(dram=2, nvme=2)
    for name in "abcdef":
        while rig.put(chain(name, 2)).reason is Reason.NO_ROOM:
            assert rig.finish()
    rig.core.check()
    for name in "abcdef":
        present = list(rig.core.exists(b"".join(chain(name, 2))))
        assert present in ([0, 0], [1, 0], [1, 1]), name


def test_second_use_admission_drops_what_was_read_once():
    rig = Rig(dram=1, nvme=4, demote_on_second_use=True)
    rig.put(chain("a", 1))
    rig.put(chain("b", 1))
    assert rig.moves() == []
    assert rig.resident(chain("a", 1)) == 0
    for _ in range(2):
        lease, _ = rig.lease(chain("b", 1))
        rig.core.release(rig.session, lease.id)
    assert rig.put(chain("c", 1)).reason is Reason.NO_ROOM
    assert len(rig.moves()) == 1


def test_the_watermark_demotes_ahead_down_to_the_low_one():
    rig = Rig(dram=10, nvme=20, high_watermark=0.8, low_watermark=0.5)
    for name in "abcdefgh":
        rig.put(chain(name, 1))
    rig.core.tick(0.0)
    assert rig.moves() == []
    rig.put(chain("i", 1))
    rig.core.tick(0.0)
    moves = rig.moves()
    assert [move.block.key for move in moves] == [key(name, 0) for name in "abcd"]
    assert {move.priority for move in moves} == {MovePriority.DEMOTE_AHEAD}
    rig.core.tick(0.0)
    assert rig.moves() == []  # what is on its way counts
    for move in moves:
        rig.core.moved(move, MoveOutcome.DONE)
    rig.core.check()
    assert rig.core.residency.dram.arena.used_bytes == 5 * BLOCK


def test_a_long_chain_leaves_from_its_tail_and_its_head_is_written_back():
    rig = Rig(dram=10, nvme=20, high_watermark=0.8, low_watermark=0.5)
    rig.put(chain("a", 9))
    rig.core.tick(0.0)
    demotions = rig.moves()
    assert [move.block.key for move in demotions] == [key("a", i) for i in (8, 7, 6, 5)]
    assert [move.block.key for move in rig.write_backs] == [key("a", i) for i in (4, 3, 2, 1, 0)]
    for move in demotions:
        rig.core.moved(move, MoveOutcome.DONE)
    rig.finish_write_backs()
    assert rig.core.match(b"".join(chain("a", 9))) == bytes([3] * 5 + [2] * 4)
    rig.put(chain("b", 6))
    assert rig.moves() == []  # clean copies leave without a write
    assert rig.core.match(b"".join(chain("a", 9))) == bytes([3] * 4 + [2] * 5)


def test_without_nvme_the_watermark_drops_nothing():
    rig = Rig(dram=4, high_watermark=0.5, low_watermark=0.5)
    rig.put(chain("a", 4))
    rig.core.tick(0.0)
    assert rig.resident(chain("a", 4)) == 4


def test_a_reader_waits_for_room_to_promote_into():
    rig = Rig(dram=2, nvme=4)
    rig.put(chain("a", 2))
    rig.reserve(chain("b", 1))
    rig.finish()
    rig.reserve(chain("b", 1))
    kept, _ = rig.lease([key("a", 0)])
    assert rig.lease([key("a", 1)]) == (None, Reason.NO_ROOM)
    rig.core.release(rig.session, kept.id)
    assert rig.core.worth_waiting()


def test_fragmented_space_is_opened_by_a_window_of_neighbours():
    rig = Rig(dram=8)
    for name in "abcdefgh":
        rig.put(chain(name, 1))
    for name in "bdfh":  # every other block becomes the newest
        lease, _ = rig.lease(chain(name, 1))
        rig.core.release(rig.session, lease.id)
    assert rig.put(chain("z", 1), length=3 * BLOCK).reason is Reason.NONE
    assert rig.core.residency.counters.window_evictions == 1
    rig.core.check()


def test_a_block_larger_than_the_tier_finds_no_room_and_evicts_nobody():
    rig = Rig(dram=2)
    rig.put(chain("a", 2))
    assert rig.reserve(chain("b", 1), length=3 * BLOCK).reason is Reason.NO_ROOM
    assert rig.resident(chain("a", 2)) == 2


def test_condemn_spares_a_newer_generation():
    rig = Rig()
    rig.put(chain("a", 1))
    generation = rig.core.index[key("a", 0)].dram.generation
    rig.core.condemn(key("a", 0), generation + 1)
    assert rig.resident(chain("a", 1)) == 1
    rig.core.condemn(key("a", 0), generation)
    assert rig.resident(chain("a", 1)) == 0
    rig.core.condemn(key("a", 0), generation)


def test_a_restart_rebuilds_the_chains():
    rig = Rig(dram=2, nvme=8)
    keys = chain("a", 3)
    residency = rig.core.residency
    for position, offset in ((2, 0), (0, BLOCK), (1, 2 * BLOCK)):
        residency.adopt(keys[position], offset, BLOCK, generation=5)
    residency.link({keys[0]: ROOT, keys[1]: keys[0], keys[2]: keys[1]})
    rig.core.check()
    assert [rig.core.index[k].depth for k in keys] == [0, 1, 2]
    assert rig.resident(keys) == 3
    assert residency.nvme.policy.pop().key == keys[2]


def test_a_forged_cycle_of_parents_is_broken():
    rig = Rig(dram=2, nvme=8)
    keys = chain("a", 3)
    for offset, k in enumerate(keys):
        rig.core.residency.adopt(k, offset * BLOCK, BLOCK, generation=1)
    rig.core.residency.link({keys[0]: keys[2], keys[1]: keys[0], keys[2]: keys[1]})
    rig.core.check()
    assert sum(rig.core.index[k].parent is None for k in keys) >= 1
    rig.put(chain("b", 1), parent=keys[1])  # walks up to the root, and ends


def test_the_states_of_a_block_are_the_documented_ones():
    rig = Rig(dram=2, nvme=2)
    made = rig.reserve(chain("a", 2))
    replica = made.lease.replicas[1]
    assert replica.state is BlockState.RESERVED
    rig.core.commit(made.lease, [True, True])
    assert replica.state is BlockState.COMMITTED
    rig.reserve(chain("b", 1))
    assert replica.state is BlockState.EVICTING
    rig.finish()
    assert replica.state is BlockState.QUARANTINED
    assert "quarantined" in repr(replica)
    assert "depth=1" in repr(replica.block)


@pytest.mark.parametrize(
    "options",
    [
        {"high_watermark": 0.5, "low_watermark": 0.6},
        {"low_watermark": 0.0},
        {"high_watermark": 1.1},
        {"write_lease_s": 0.0},
    ],
)
def test_options_that_cannot_work_are_refused(options):
    with pytest.raises(InvalidInput):
        CoreOptions(**options)


def test_keys_are_whole():
    assert split_keys(ROOT + key("a", 1)) == (ROOT, key("a", 1))
    with pytest.raises(InvalidInput):
        split_keys(b"short")


# -- scarce room -----------------------------------------------------------------------------------


@pytest.mark.parametrize("nvme", [0, 60])
@pytest.mark.parametrize("seed", range(20))
def test_mixed_sizes_and_chains_keep_the_books_right(seed, nvme):
    """Windows are opened next to victims that were spared for their descendants."""
    rig, dice = Rig(dram=40, nvme=nvme), random.Random(seed)
    for _ in range(120):
        name = dice.choice("abcdefghij")
        pages = "abcdefghij".index(name) % 5 + 1
        keys = chain(name, dice.randint(1, 4))
        for _ in range(4):
            made = rig.put(keys, length=pages * BLOCK)
            if made.reason is Reason.NONE:
                break
            rig.finish()
        if dice.random() < 0.3:
            lease, _ = rig.lease(keys)
            rig.finish()
            if lease is not None:
                rig.core.release(rig.session, lease.id)
        rig.core.check()


@pytest.mark.parametrize("nvme", [0, 2000])
def test_a_hole_in_a_fragmented_tier_costs_little_more_than_its_size(nvme):
    rig, dice = Rig(dram=400, nvme=nvme, high_watermark=1.0, low_watermark=1.0), random.Random(1)
    keys = [key("a", i) for i in range(400)]
    for one in keys:
        rig.put([one])
    for one in dice.sample(keys, len(keys)):  # the order of use is not the order of addresses
        lease, _ = rig.lease([one])
        rig.core.release(rig.session, lease.id)
    for _ in range(6):
        if rig.put(chain("z", 1), length=16 * BLOCK).reason is Reason.NONE:
            break
        rig.finish()
    assert rig.resident(chain("z", 1)) == 1
    in_dram = sum(bool(block.where & 1) for block in rig.core.index.values())
    assert in_dram > 350


def test_a_run_that_cannot_exist_does_not_cost_the_cache():
    rig = Rig(dram=300)
    keys = [key("a", i) for i in range(300)]
    for one in keys:
        rig.put([one])
    for one in keys[::15]:
        rig.lease([one])  # held for good: no 16 pages in a row are ever free
    for _ in range(5):
        assert rig.put(chain("z", 1), length=16 * BLOCK).reason is Reason.NO_ROOM
    assert len(rig.core.index) >= 300 - 16


def test_a_head_that_was_put_again_is_the_head_of_its_old_chain():
    rig = Rig(dram=5)
    keys = chain("a", 3)
    rig.put(keys)
    rig.core.remove(keys[:1])
    assert rig.resident(keys) == 0
    rig.put(keys)
    assert rig.core.index[keys[0]].children == 1
    rig.put(chain("b", 4))
    assert rig.resident(keys) == 1  # it left from its tail again


def test_a_child_that_came_before_its_parent_is_linked_when_both_are_put():
    rig = Rig()
    keys = chain("a", 3)
    rig.put(keys[1:], parent=keys[0], depth=1)
    rig.put(keys)
    assert [rig.core.index[k].children for k in keys] == [1, 1, 0]


def test_a_client_cannot_make_a_cycle_of_parents():
    rig = Rig()
    first, second = key("a", 0), key("b", 0)
    rig.put([first], parent=second, depth=0)
    rig.put([second], parent=first, depth=0)
    rig.put([first], parent=second, depth=0)
    rig.core.check()
    lease, _ = rig.lease([first])
    rig.core.release(rig.session, lease.id)  # walks up the chain, and ends


def test_the_watermark_never_drops_a_block():
    rig = Rig(dram=10, nvme=4, high_watermark=0.5, low_watermark=0.3, demote_on_second_use=True)
    for name in "abcdefghi":
        rig.put(chain(name, 1))
    rig.core.tick(0.0)
    rig.finish()
    assert len(rig.core.index) == 9


def test_a_write_back_that_a_writer_waits_for_is_ordered_again():
    rig = Rig(dram=4, nvme=8)
    rig.put(chain("a", 3))
    rig.core.flush()
    rig.core.residency.actions.clear()
    assert rig.reserve(chain("b", 1), length=2 * BLOCK).reason is Reason.NO_ROOM
    ordered = [action.priority for action in rig.core.residency.actions]
    assert ordered == [MovePriority.DEMOTE_NOW]


def test_pins_end_in_their_order():
    rig = Rig()
    rig.put(chain("a", 3))
    for position, until in enumerate((30.0, 10.0, 20.0)):
        rig.core.pin([key("a", position)], PinLevel.SOFT, until)
    for now, left in ((9.9, 3), (10.0, 2), (25.0, 1), (30.0, 0)):
        rig.core.tick(now)
        assert len(rig.core.residency.pins) == left


def test_tables_of_a_larger_past_are_given_back(monkeypatch):
    monkeypatch.setattr(residency_module, "COMPACT_BLOCKS_MIN", 100)
    rig = Rig(dram=200, nvme=400)
    rig.put(chain("a", 99))
    rig.put(chain("b", 99))
    rig.core.tick(0.0)
    table_bytes = sys.getsizeof(rig.core.index)
    rig.core.remove(chain("a", 99) + chain("b", 90))
    rig.core.tick(0.0)
    assert sys.getsizeof(rig.core.index) < table_bytes
    assert len(rig.core.index) == 9
    rig.core.check()
