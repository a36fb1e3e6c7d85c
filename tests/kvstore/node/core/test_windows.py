"""Making room among blocks of several sizes: who leaves is old, and room that can be made is made.

Each property is a seeded random run, so that it's the same every time; a failure names its seed.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from typing import TYPE_CHECKING

import pytest

from tiffin.kvstore.memory.arena import Arena
from tiffin.kvstore.memory.eviction import POLICIES, make_policy
from tiffin.kvstore.node.core import placement, windows
from tiffin.kvstore.node.core.node_core import CoreOptions, NodeCore
from tiffin.kvstore.node.core.records import Move, MoveOutcome, PinLevel, Reason, Replica
from tiffin.kvstore.node.core.tier_ledger import TierSpace
from tiffin.kvstore.node.core.windows import SHARE
from tiffin.kvstore.tiers.base import TierName

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tiffin.kvstore.node.core.records import LeaseRecord

PAGE = 4096
ROOT = bytes(16)

each_policy = pytest.mark.parametrize("policy", sorted(POLICIES))


def chain(name: int, length: int) -> list[bytes]:
    return [bytes([*name.to_bytes(4, "big"), index]).ljust(16, b"\0") for index in range(length)]


class Pool:
    """A core with so many pages of DRAM, and of NVMe whose moves end at once."""

    def __init__(self, pages: int, policy: str = "lru", nvme_pages: int = 0) -> None:
        tiers = ((TierName.DRAM, pages), (TierName.NVME, nvme_pages))
        spaces = [TierSpace(t, Arena(n * PAGE), make_policy(policy)) for t, n in tiers if n]
        options = CoreOptions(high_watermark=1.0, low_watermark=1.0)
        self.core = NodeCore(spaces[0], spaces[1] if nvme_pages else None, options)
        self.dram = spaces[0]
        self.session = self.core.connect("test", 1)

    def put(self, keys: Sequence[bytes], pages: int, parent: bytes = ROOT, depth: int = 0) -> bool:
        """Store these blocks; whether all of them are here now."""
        made = self.core.reserve(self.session, keys, parent, depth, pages * PAGE, 0.0)
        if made.lease is not None:
            self.core.commit(made.lease, [True] * len(made.lease.replicas))
        self.core.check()
        return made.reason is Reason.NONE

    def lease(self, keys: Sequence[bytes]) -> LeaseRecord | None:
        return self.core.settle(self.core.lease(self.session, keys))[0]

    def read(self, keys: Sequence[bytes]) -> None:
        if (lease := self.lease(keys)) is not None:
            self.core.release(self.session, lease.id)

    def settle(self) -> None:
        while actions := self.core.residency.actions:
            moves = dict.fromkeys(action for action in actions if isinstance(action, Move))
            actions.clear()
            for move in moves:
                self.core.moved(move, MoveOutcome.DONE)
            self.core.check()

    def opens(self, leaving: Iterable[Replica]) -> int:
        """The longest run in bytes if these left."""
        pieces = [*self.dram.arena.free_runs, *((r.offset, r.length) for r in leaving)]
        longest = length = end = 0
        for offset, nbytes in sorted(pieces):
            length = nbytes + (length if offset == end else 0)
            end = offset + nbytes
            longest = max(longest, length)
        return longest

    def in_order(self, need_bytes: int) -> int:
        """How many would leave in eviction order alone before a run of this length appears."""
        order = list(self.dram.candidates())
        return next(n for n in range(len(order) + 1) if self.opens(order[:n]) >= need_bytes)

    def could_leave(self) -> list[Replica]:
        """All that can leave DRAM together, each after its descendants."""
        leaving: dict[bytes, Replica] = {}
        candidates = sorted(self.dram.candidates(), key=lambda r: -r.depth)
        for replica in candidates:
            blocks = [r.block for r in leaving.values()]
            if replica.block.children == sum(b.parent is replica.block for b in blocks):
                leaving[replica.key] = replica
        return list(leaving.values())


# -- age -------------------------------------------------------------------------------------------


def test_a_full_node_keeps_what_was_just_stored_in_another_size() -> None:
    """Blocks of 256 pages, then of half that size, each with a page for its header."""
    pool = Pool(64 * 256)
    for name in range(21):
        assert pool.put(chain(name, 3), 257)
        pool.read(chain(name, 3))
    for one_round in range(1, 7):
        new = [chain(100 * one_round + length, length) for length in (2, 3, 1)]
        for keys in new:
            assert pool.put(keys, 129)
        assert all(all(pool.core.exists(b"".join(keys))) for keys in new)
        old_blocks = [key for name in range(21) for key in chain(name, 3)]
        resident = sum(pool.core.exists(b"".join(old_blocks)))
        assert 63 - 8 * one_round < resident < 63 - 2 * one_round
    assert list(pool.core.exists(b"".join(chain(0, 3) + chain(20, 3)))) == [0, 0, 0, 1, 1, 1]


@each_policy
@pytest.mark.parametrize("seed", range(3))
def test_nothing_leaves_that_is_younger_than_an_eighth_of_what_stays(
    policy: str, seed: int
) -> None:
    """Except where no run can be opened otherwise: then it's among the oldest quarter, half or all,
    that is at most twice as far in the eviction order as eviction in this order alone would go."""
    dice = random.Random(seed)
    pool = Pool(400, policy)
    sizes = dice.choices(range(1, 14), k=3)
    held: list[int] = []
    evicted = 0
    for number in range(300):
        if number % 60 == 0:
            sizes = dice.choices(range(1, 14), k=3)
        if dice.random() < 0.5:
            pool.read(chain(dice.randrange(number + 1), 1))
        if dice.random() < 0.1 and (lease := pool.lease(chain(dice.randrange(number + 1), 1))):
            held.append(lease.id)
        if len(held) > 3:
            pool.core.release(pool.session, held.pop(0))
        pages = dice.choice(sizes)
        before = list(pool.dram.candidates())
        in_order = pool.in_order(pages * PAGE)
        assert pool.put(chain(number, 1), pages)
        resident = set(pool.dram.candidates())
        left = [place for place, replica in enumerate(before) if replica not in resident]
        evicted += len(left)
        if left:
            older = left[-1] + 1 - len(left)  # that stay
            assert older <= max(len(before) // SHARE, 2 * in_order), (policy, seed, number)
    assert evicted > 100
    assert pool.core.residency.counters.window_evictions > 20


def hits_of_conversations(
    pool: Pool, requests: int, *, drifting: bool, seed: int
) -> tuple[float, float]:
    """The share of blocks that conversations of two models, with blocks of 257 and 129 pages, find
    in the pool, and in an ideal store of as many pages without fragmentation, by LRU. `drifting`:
    from one model to the other."""
    dice = random.Random(seed)
    conversations: list[tuple[int, int, int]] = []
    ideal: OrderedDict[bytes, int] = OrderedDict()
    room_pages = pool.dram.arena.capacity_bytes // PAGE
    asked = hits = ideal_hits = 0
    for number in range(requests):
        if conversations and dice.random() < 0.8:
            place = max(0, len(conversations) - 1 - int(dice.expovariate(1 / 30)))
            name, length, pages = conversations[place]
            conversations[place] = name, length + dice.randint(0, 2), pages
        else:
            small = dice.random() < (number / requests if drifting else 0.5)
            place = len(conversations)
            conversations.append((number, dice.randint(1, 4), 129 if small else 257))
        name, length, pages = conversations[place]
        keys = chain(name, length)
        asked += length
        found = len(pool.core.match(b"".join(keys)))
        hits += found
        pool.read(keys)
        made = pool.core.reserve(pool.session, keys, ROOT, 0, pages * PAGE, 0.0)
        if made.lease is not None:
            pool.core.commit(made.lease, [True] * len(made.lease.replicas))
        ideal_hits += next((n for n, key in enumerate(keys) if key not in ideal), length)
        for key in reversed(keys):
            room_pages -= 0 if key in ideal else pages
            ideal[key] = pages
            ideal.move_to_end(key)
        while room_pages < 0:
            room_pages += ideal.popitem(last=False)[1]
    return hits / asked, ideal_hits / asked


@pytest.mark.slow
@pytest.mark.parametrize("drifting", [False, True])
def test_two_sizes_cost_few_hits(drifting: bool) -> None:
    pool = Pool(300 * 257)
    found, ideal = hits_of_conversations(pool, 4000, drifting=drifting, seed=5)
    assert ideal > 0.4
    assert found > 0.9 * ideal
    assert pool.core.residency.counters.window_evictions > 100


# -- room that can be made is made -----------------------------------------------------------------


@each_policy
@pytest.mark.parametrize("seed", range(3))
def test_a_reservation_finds_room_exactly_if_evicting_can_make_it(policy: str, seed: int) -> None:
    """With chains, of which only the tail may leave alone, with leases and with pins."""
    dice = random.Random(seed)
    pool = Pool(120, policy)
    held: list[int] = []
    outcomes = {True: 0, False: 0}
    for number in range(250):
        keys = chain(dice.randrange(max(0, number - 6), number + 1), dice.randint(1, 4))
        if dice.random() < 0.5 and (lease := pool.lease(keys)):
            held.append(lease.id)
        if len(held) > 8 or (held and dice.random() < 0.1):
            pool.core.release(pool.session, held.pop(0))
        if dice.random() < 0.1:
            pool.core.pin(keys[:1], dice.choice([PinLevel.SOFT, PinLevel.HARD]), number + 20.0)
        pool.core.tick(float(number))
        pages = dice.randint(1, 110)
        possible = pool.opens(pool.could_leave()) >= pages * PAGE
        assert pool.put(chain(number, 1), pages) is possible, (policy, seed, number)
        outcomes[possible] += 1
        for depth in range(1, dice.randint(1, 5)):
            one = chain(number, depth + 1)
            pool.put(one[-1:], dice.randint(1, 6), parent=one[-2], depth=depth)
    assert min(outcomes.values()) > 10


def test_a_tier_full_of_chains_is_opened_and_tails_leave_with_their_heads() -> None:
    """The pieces of each chain lie apart: no two neighbours are tails."""
    pool = Pool(40)
    for index in range(4):  # address order: all heads, then all second blocks, ...
        for name in random.Random(index).sample(range(10), 10):
            keys = chain(name, index + 1)
            assert pool.put(keys[-1:], 1, parent=keys[-2] if index else ROOT, depth=index)
    for name in range(10):
        pool.read(chain(name, 4))
    assert pool.put(chain(77, 1), 6)
    kept = [list(pool.core.exists(b"".join(chain(name, 4)))) for name in range(10)]
    assert all(sorted(flags, reverse=True) == flags for flags in kept)
    assert sum(map(sum, kept)) >= 16


def test_what_nvme_has_no_room_for_is_dropped_with_its_descendants() -> None:
    pool = Pool(12, nvme_pages=2)
    for name in (1, 2):
        pool.put(chain(name, 1), 1)
    pool.core.flush()
    pool.settle()
    pool.core.pin([*chain(1, 1), *chain(2, 1)], PinLevel.HARD, 1e9)  # NVMe is full of these
    for index in range(2):
        for name in (11, 12, 13, 14, 15):
            keys = chain(name, index + 1)
            assert pool.put(keys[-1:], 1, parent=keys[-2] if index else ROOT, depth=index)
    assert pool.dram.arena.free_bytes == 0
    assert pool.put(chain(20, 1), 4)
    assert pool.core.residency.counters.demotions == 0


def test_beyond_the_first_looks_eviction_goes_on_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """A neighbour in two is held, except for the youngest blocks, which are not looked at."""
    for module in (placement, windows):
        monkeypatch.setattr(module, "LOOKS_MAX", 16)
    pool = Pool(100)
    for name in range(100):
        pool.put(chain(name, 1), 1)
    for name in range(0, 80, 2):
        pool.lease(chain(name, 1))
    tries = 1
    while not pool.put(chain(200, 1), 5):
        assert pool.core.worth_waiting()
        assert tries < 20
        tries += 1
    assert tries > 3
    assert (
        sum(pool.core.exists(b"".join(key for name in range(100) for key in chain(name, 1)))) > 50
    )


def test_beyond_the_first_looks_a_hopeless_request_takes_no_more_than_it_asks_for_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (placement, windows):
        monkeypatch.setattr(module, "LOOKS_MAX", 16)
    pool = Pool(100)
    for name in range(100):
        pool.put(chain(name, 1), 1)
    for name in range(0, 100, 4):
        pool.lease(chain(name, 1))
    for tries in range(1, 4):
        assert not pool.put(chain(200, 1), 5)
        assert pool.dram.arena.free_bytes <= (tries + 1) * 5 * PAGE
