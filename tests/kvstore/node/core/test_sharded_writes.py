"""Blocks that several ranks write together: what the core and the united header allow."""

from __future__ import annotations

import numpy as np
import pytest

from tiffin.kvstore import KVSchema
from tiffin.kvstore.client.blocks.block_views import select_shard
from tiffin.kvstore.errors import InvalidInput, StaleLease
from tiffin.kvstore.format.header import BlockState, read_header
from tiffin.kvstore.format.header_writer import shard_header
from tiffin.kvstore.memory.arena import Arena
from tiffin.kvstore.memory.eviction import make_policy
from tiffin.kvstore.node.core.node_core import CoreOptions, NodeCore, ReserveStatus
from tiffin.kvstore.node.core.records import Kept, Replica
from tiffin.kvstore.node.core.sharded_writes import Share, SharedWrite, share_of
from tiffin.kvstore.node.core.tier_ledger import TierSpace
from tiffin.kvstore.tiers.base import TierName

BLOCK = 4096
ROOT = bytes(16)
LEASE_S = 60.0
KEYS = [f"k{i}".encode().ljust(16, b".") for i in range(4)]


def share(rank: int, ranks: int = 2) -> Share:
    """Rank i owns bit i."""
    return Share(rank, ranks, 1 << rank)


class Rig:
    def __init__(self, blocks: int = 8) -> None:
        space = TierSpace(TierName.DRAM, Arena(blocks * BLOCK), make_policy("lru"))
        self.core = NodeCore(space, None, CoreOptions(write_lease_s=LEASE_S))
        self.sessions = [self.core.connect(f"rank {i}", i) for i in range(4)]

    def reserve(self, rank: int, keys=KEYS[:1], ranks: int = 2, now: float = 0.0, owned=None):
        mine = Share(rank, ranks, 1 << rank if owned is None else owned)
        session = self.sessions[rank]
        made = self.core.reserve(session, keys, ROOT, 0, BLOCK, now, mine)
        self.core.check()
        return made

    def commit(self, made, good: bool = True) -> bytes:
        kept = self.core.commit(made.lease, [good] * len(made.lease.replicas))
        self.core.check()
        return kept

    def resident(self, keys=KEYS[:1]) -> int:
        return len(self.core.match(b"".join(keys)))

    @property
    def used_bytes(self) -> int:
        return self.core.residency.dram.arena.used_bytes


def test_every_rank_gets_the_same_extent_and_the_last_commit_makes_it_visible():
    rig = Rig()
    first, second = rig.reserve(0, KEYS), rig.reserve(1, KEYS)
    assert first.lease.replicas == second.lease.replicas
    assert rig.used_bytes == len(KEYS) * BLOCK
    assert rig.commit(second) == bytes([Kept.PENDING] * len(KEYS))
    assert rig.resident(KEYS) == 0, "half a block was visible"
    assert rig.commit(first) == bytes([Kept.STORED] * len(KEYS))
    assert rig.resident(KEYS) == len(KEYS)
    assert all(block.dram.holds == 0 for block in rig.core.index.values())


def test_a_rank_may_come_after_another_has_committed():
    rig = Rig()
    assert rig.commit(rig.reserve(0)) == bytes([Kept.PENDING])
    assert rig.commit(rig.reserve(1)) == bytes([Kept.STORED])


@pytest.mark.parametrize("again", ["before its commit", "after its commit"])
def test_a_repeated_rank_is_busy(again: str):
    rig = Rig()
    made = rig.reserve(0)
    if again == "after its commit":
        rig.commit(made)
    assert rig.reserve(0).statuses == bytes([ReserveStatus.BUSY])


def test_a_key_that_is_named_twice_in_one_call_is_granted_once():
    rig = Rig()
    assert rig.reserve(0, KEYS[:1] * 2).statuses == bytes(
        [ReserveStatus.GRANTED, ReserveStatus.BUSY]
    )


def test_another_number_of_ranks_is_busy():
    rig = Rig()
    rig.reserve(0, ranks=2)
    assert rig.reserve(1, ranks=4).statuses == bytes([ReserveStatus.BUSY])


def test_a_whole_block_writer_and_a_rank_are_busy_to_each_other():
    rig = Rig()
    whole = rig.core.reserve(rig.sessions[3], KEYS[:1], ROOT, 0, BLOCK, 0.0)
    assert rig.reserve(0, KEYS[:2]).statuses == bytes([ReserveStatus.BUSY, ReserveStatus.GRANTED])
    again = rig.core.reserve(rig.sessions[3], KEYS[:2], ROOT, 0, BLOCK, 0.0)
    assert again.statuses == bytes([ReserveStatus.BUSY, ReserveStatus.BUSY])
    assert rig.core.commit(whole.lease, [True]) == bytes([Kept.STORED])


def test_a_rank_that_claims_anothers_segment_is_refused_and_nothing_is_granted():
    rig = Rig()
    rig.reserve(0, KEYS[1:2])
    with pytest.raises(InvalidInput, match="claims segments of another rank"):
        rig.reserve(1, KEYS, owned=0b11)
    rig.core.check()
    assert rig.used_bytes == BLOCK, "the keys before the bad one were reserved"


def test_a_rank_with_another_block_size_is_refused():
    rig = Rig()
    rig.reserve(0)
    with pytest.raises(InvalidInput, match="another block size"):
        rig.core.reserve(rig.sessions[1], KEYS[:1], ROOT, 0, 2 * BLOCK, 0.0, share(1))


@pytest.mark.parametrize(
    ("rank", "ranks", "owned"), [(2, 2, b"\1"), (5, 4, b"\1"), (0, 2, b""), (0, 2, b"\0")]
)
def test_a_share_that_cannot_be_is_refused(rank: int, ranks: int, owned: bytes):
    with pytest.raises(InvalidInput, match="ranks count from 0"):
        share_of(rank, ranks, owned)


def test_a_lone_writer_has_no_share():
    assert share_of(0, 1, b"") is None


def test_one_rank_that_drops_a_block_drops_it_for_all():
    rig = Rig()
    first, second = rig.reserve(0), rig.reserve(1)
    assert rig.commit(first, good=False) == bytes([Kept.REFUSED])
    assert rig.used_bytes == BLOCK, "the extent is free while the other rank may write"
    assert rig.commit(second) == bytes([Kept.REFUSED])
    assert rig.used_bytes == 0
    assert rig.reserve(0).statuses == bytes([ReserveStatus.GRANTED])


def test_an_abort_after_anothers_commit_frees_everything():
    rig = Rig()
    rig.commit(rig.reserve(0))
    second = rig.reserve(1)
    rig.core.abort(rig.sessions[1], second.lease.id)
    rig.core.check()
    assert rig.used_bytes == 0
    assert rig.resident() == 0


def test_a_cancelled_block_can_be_written_elsewhere_while_its_old_ranks_are_not_fenced():
    rig = Rig()
    old = [rig.reserve(rank) for rank in range(2)]
    assert not rig.core.disconnect(rig.sessions[0], fenced=False)
    rig.core.check()
    new = rig.reserve(2, ranks=3)
    assert new.lease.replicas[0].offset != old[0].lease.replicas[0].offset
    assert rig.commit(old[1]) == bytes([Kept.REFUSED])
    assert old[0].lease.replicas[0].state is BlockState.QUARANTINED
    assert rig.used_bytes == 2 * BLOCK
    rig.core.fence(rig.sessions[0])
    rig.core.check()
    assert rig.used_bytes == BLOCK


def test_a_rank_that_expires_cancels_the_block_and_learns_it():
    rig = Rig()
    slow, quick = rig.reserve(0, now=0.0), rig.reserve(1, now=30.0)
    rig.core.tick(LEASE_S)
    rig.core.check()
    assert rig.commit(quick) == bytes([Kept.REFUSED])
    with pytest.raises(StaleLease, match="expired"):
        rig.core.write_lease(rig.sessions[0], slow.lease.id)
    rig.core.check()
    assert rig.used_bytes == 0


def test_a_block_that_a_rank_never_came_for_expires():
    rig = Rig()
    rig.commit(rig.reserve(0, now=0.0))
    assert rig.core.worth_waiting(), "a writer that waits for room would give up"
    rig.core.tick(LEASE_S - 1)
    assert rig.used_bytes == BLOCK
    rig.core.tick(LEASE_S)
    rig.core.check()
    assert rig.used_bytes == 0
    assert rig.core.residency.counters.expired == 1
    assert not rig.core.worth_waiting()


def test_a_rank_that_leaves_after_its_commit_takes_nothing_with_it():
    rig = Rig()
    rig.commit(rig.reserve(0))
    assert rig.core.disconnect(rig.sessions[0], fenced=True)
    rig.core.check()
    assert rig.commit(rig.reserve(1)) == bytes([Kept.STORED])


def test_a_remote_rank_that_expires_frees_nothing_under_its_transfer():
    rig = Rig()
    remote = rig.core.connect("far", 9, remote=True)
    made = rig.core.reserve(remote, KEYS[:1], ROOT, 0, BLOCK, 0.0, share(0))
    held = rig.core.begin_transfer(remote, made.lease.id, writes=True)
    other = rig.reserve(1)
    rig.core.tick(LEASE_S)
    rig.core.check()
    with pytest.raises(StaleLease):  # expired as well: this call acknowledges it
        rig.core.write_lease(rig.sessions[1], other.lease.id)
    assert rig.used_bytes == BLOCK
    rig.core.end_transfer(remote, made.lease.id, held)
    rig.core.check()
    assert rig.used_bytes == 0


# -- headers ---------------------------------------------------------------------------------------

SCHEMA = KVSchema.gqa(
    model="shared",
    layers=2,
    kv_heads=4,
    head_dim=8,
    dtype="float16",
    block_tokens=16,
    shards=4,
)
PREFIX = SCHEMA.prefix(range(16))
OFFSET = 3 * BLOCK


class FakeBlock:
    key = PREFIX.keys[0]


def replica(generation: int = 7) -> Replica:
    size = SCHEMA.extent_bytes
    return Replica(FakeBlock(), TierName.DRAM, OFFSET, size, generation)  # type: ignore[arg-type]


def sums_of(rank: int, ranks: int) -> np.ndarray:
    sums = np.zeros(len(SCHEMA.segments), np.uint64)
    mine = select_shard(SCHEMA, (rank, ranks)).segments
    sums[mine] = mine + 1000
    return sums


def header_of(rank: int, ranks: int = 2, sums=None, **place: int) -> bytes:
    place = {"generation": 7, "offset": OFFSET, **place}
    checksums = sums_of(rank, ranks) if sums is None else sums
    return shard_header(PREFIX, 0, checksums=checksums, **place)


def joined(ranks: int = 2) -> SharedWrite:
    shared = SharedWrite(ranks)
    for rank in range(ranks):
        bitmap = select_shard(SCHEMA, (rank, ranks)).bitmap()
        found = share_of(rank, ranks, bitmap)
        assert found is not None
        shared.join(found, 1.0)
    return shared


@pytest.mark.parametrize("ranks", [2, 4])
def test_headers_unite_to_the_one_that_a_lone_writer_would_have_written(ranks: int):
    shared = joined(ranks)
    for rank in reversed(range(ranks)):
        assert shared.header_pages() is None, "united before all were in"
        assert shared.unite(rank, header_of(rank, ranks), replica())
    pages = shared.header_pages()
    header = read_header(pages, offset_expected=OFFSET)
    assert header.checksums.tolist() == [1000 + i for i in range(len(SCHEMA.segments))]
    assert header.tokens == PREFIX.token_bytes(0)
    alone = shard_header(PREFIX, 0, generation=7, offset=OFFSET, checksums=header.checksums.copy())
    assert pages.tobytes().startswith(alone)


def test_a_rank_cannot_fill_anothers_segment_nor_leave_out_its_own():
    everything = sums_of(0, 2) + sums_of(1, 2)
    assert not joined().unite(0, header_of(0, sums=everything), replica())
    less = sums_of(0, 2)
    less[0] = 0
    assert not joined().unite(0, header_of(0, sums=less), replica())
    assert not joined().unite(0, header_of(1), replica())


def test_a_header_of_another_place_generation_or_prompt_is_refused():
    shared = joined()
    assert shared.unite(0, header_of(0), replica())
    assert not shared.unite(1, header_of(1, offset=OFFSET + BLOCK), replica())
    assert not shared.unite(1, header_of(1, generation=8), replica())
    other = SCHEMA.prefix(range(1, 17))
    wrong = shard_header(other, 0, generation=7, offset=OFFSET, checksums=sums_of(1, 2))
    assert not shared.unite(1, wrong, replica())
    assert shared.unite(1, header_of(1), replica()), "a refused header left a trace"


def test_headers_that_disagree_in_the_parent_are_refused():
    """The key is the same, so only a forged header can differ there; it names another chain."""
    shared = joined()
    assert shared.unite(0, header_of(0), replica())

    class Forged:
        schema, keys, parent = SCHEMA, PREFIX.keys, b"x" * 16
        schema_fingerprint = PREFIX.schema_fingerprint
        namespace_fingerprint = PREFIX.namespace_fingerprint
        token_bytes = PREFIX.token_bytes

    forged = shard_header(
        Forged(),  # type: ignore[arg-type]
        0,
        generation=7,
        offset=OFFSET,
        checksums=sums_of(1, 2),
    )
    assert not shared.unite(1, forged, replica())


@pytest.mark.parametrize("raw", [b"", b"x" * 100, bytes(8192)])
def test_bytes_that_are_no_header_are_refused(raw: bytes):
    assert not joined().unite(0, raw, replica())


def test_a_flipped_bit_in_a_header_is_refused():
    raw = bytearray(header_of(0))
    raw[130] ^= 1
    assert not joined().unite(0, bytes(raw), replica())


def test_a_segment_that_is_nobodys_keeps_the_block_invisible():
    shared = SharedWrite(2)
    for rank in range(2):
        found = share_of(rank, 2, select_shard(SCHEMA, (rank, 4)).bitmap())
        assert found is not None
        shared.join(found, 1.0)
        assert shared.unite(rank, header_of(rank, sums=sums_of(rank, 4)), replica())
    assert shared.completes(0) is False
    assert shared.header_pages() is None
