"""One contract that every policy passes, then the purpose of each of them."""

import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest

from tiffin.kvstore.errors import InvalidInput
from tiffin.kvstore.memory.eviction import (
    LFU,
    LRU,
    POLICIES,
    S3FIFO,
    SIEVE,
    VISITS_MAX,
    EvictionPolicy,
    LengthAware,
    make_policy,
)


@dataclass(eq=False, slots=True)
class Entry:
    number: int
    depth: int = 0
    visits: int = 0

    @property
    def key(self) -> bytes:
        return self.number.to_bytes(16, "little")


def entries(count: int, first: int = 0) -> list[Entry]:
    return [Entry(first + number) for number in range(count)]


def filled(policy: EvictionPolicy[Entry], items: Iterable[Entry]) -> EvictionPolicy[Entry]:
    for item in items:
        policy.add(item)
    return policy


def evict(policy: EvictionPolicy[Entry]) -> Entry | None:
    """Evict and return the policy's victim."""
    entry = policy.pop()
    if entry is not None:
        policy.left(entry)
    return entry


def drain(policy: EvictionPolicy[Entry]) -> list[int]:
    numbers = []
    while (entry := evict(policy)) is not None:
        numbers.append(entry.number)
    return numbers


class PolicyContract:
    """What the node core relies on. Mixed into one class per policy."""

    policy_type: type[EvictionPolicy[Any]]

    @pytest.fixture
    def policy(self) -> EvictionPolicy[Entry]:
        return self.policy_type()

    def test_an_empty_policy_has_no_victim(self, policy: EvictionPolicy[Entry]) -> None:
        assert policy.pop() is None
        assert len(policy) == 0

    def test_everything_leaves_exactly_once(self, policy: EvictionPolicy[Entry]) -> None:
        filled(policy, entries(300))
        assert len(policy) == 300
        assert sorted(drain(policy)) == list(range(300))
        assert len(policy) == 0

    def test_what_was_never_used_leaves_in_order_of_arrival(
        self, policy: EvictionPolicy[Entry]
    ) -> None:
        assert drain(filled(policy, entries(50))) == list(range(50))

    def test_adding_twice_is_a_touch(self, policy: EvictionPolicy[Entry]) -> None:
        items = entries(3)
        filled(policy, [*items, items[0]])
        assert len(policy) == 3
        assert len(drain(policy)) == 3

    def test_a_discarded_entry_does_not_leave(self, policy: EvictionPolicy[Entry]) -> None:
        items = entries(5)
        filled(policy, items)
        policy.discard(items[2])
        policy.discard(items[2])
        policy.discard(Entry(99))
        assert items[2] not in policy
        assert drain(policy) == [0, 1, 3, 4]

    def test_touching_a_leased_entry_does_not_bring_it_back(
        self, policy: EvictionPolicy[Entry]
    ) -> None:
        entry = Entry(0)
        policy.add(entry)
        policy.discard(entry)
        policy.touch(entry)
        assert entry not in policy
        assert policy.pop() is None
        policy.add(entry)
        assert policy.pop() is entry

    @pytest.mark.parametrize("seed", range(20))
    def test_iterating_shows_the_order_in_which_all_would_leave(self, seed: int) -> None:
        dice, policy, items = random.Random(seed), self.policy_type(), entries(60)
        for _ in range(200):
            item = dice.choice(items)
            dice.choice([policy.add, policy.add, policy.touch, policy.discard])(item)
            if dice.random() < 0.2:
                evict(policy)
        shown = [entry.number for entry in policy]
        assert shown == drain(policy)

    def test_spared_entries_are_offered_once_per_sweep(self, policy: EvictionPolicy[Entry]) -> None:
        items = entries(40)
        filled(policy, items)
        for item in items[::3]:
            policy.touch(item)
        offered = []
        while (entry := policy.pop()) is not None:
            policy.spare(entry)
            assert entry in policy
            offered.append(entry.number)
        assert sorted(offered) == list(range(40))
        assert len(policy) == 40

    def test_a_recalled_entry_is_the_next_victim(self, policy: EvictionPolicy[Entry]) -> None:
        filled(policy, entries(20))
        first, second = policy.pop(), policy.pop()
        assert first is not None
        assert second is not None
        policy.spare(first)
        policy.spare(second)
        victim = policy.pop()
        assert victim is not None
        assert victim.number == 2
        policy.recall(second)
        assert policy.pop() is second
        policy.recall(second)  # it is no candidate any more
        policy.recall_oldest()
        assert policy.pop() is first
        policy.recall_oldest()  # there is none
        assert drain(policy) == list(range(3, 20))

    def test_a_use_of_a_spared_entry_makes_it_the_newest(
        self, policy: EvictionPolicy[Entry]
    ) -> None:
        filled(policy, entries(4))
        for use in (policy.touch, policy.add):
            entry = policy.pop()
            assert entry is not None
            policy.spare(entry)
            use(entry)
        assert len(policy) == 4
        assert sorted(drain(policy)[-2:]) == [0, 1]

    @pytest.mark.parametrize("looks", [1, 7, 30])
    def test_looking_in_vain_changes_nothing(
        self, policy: EvictionPolicy[Entry], looks: int
    ) -> None:
        """A sweep that frees nothing does not change which victims leave next."""
        other = self.policy_type()
        for policy_ in (policy, other):
            items = [Entry(number, depth=number % 5) for number in range(30)]
            filled(policy_, [*items, *items[::4]])
        for _ in range(3):
            popped: list[Entry] = []
            for _ in range(looks):
                if (popped_now := policy.pop(again=not popped)) is not None:
                    popped.append(popped_now)
            for entry in reversed(popped):
                policy.put_back(entry)
            assert len(policy) == 30
        filled(policy, entries(5, first=50))
        filled(other, entries(5, first=50))
        assert drain(policy) == drain(other)

    def test_sparing_costs_one_pop_per_victim(self, policy: EvictionPolicy[Entry]) -> None:
        """Half of the blocks can never leave, and eviction still takes constant time."""
        filled(policy, entries(200))
        pops = victims = 0
        while victims < 90:
            entry = policy.pop()
            assert entry is not None
            pops += 1
            if entry.number % 2:
                policy.spare(entry)
            else:
                victims += 1
        assert pops <= 2 * victims + 100

    def test_sparing_a_candidate_changes_nothing(self, policy: EvictionPolicy[Entry]) -> None:
        items = entries(3)
        filled(policy, items)
        policy.spare(items[0])
        assert len(policy) == 3
        assert drain(policy) == [0, 1, 2]

    def test_a_spared_entry_can_be_leased(self, policy: EvictionPolicy[Entry]) -> None:
        entry = Entry(0)
        policy.add(entry)
        assert policy.pop() is entry
        policy.spare(entry)
        policy.touch(entry)
        policy.discard(entry)
        assert entry not in policy
        assert len(policy) == 0

    @pytest.mark.parametrize("seed", range(5))
    def test_random_calls_agree_with_a_set(self, policy: EvictionPolicy[Entry], seed: int) -> None:
        choose = random.Random(seed)
        items = [Entry(number, depth=choose.randrange(8)) for number in range(40)]
        model: set[Entry] = set()
        spared: set[Entry] = set()
        for _ in range(3000):
            item = choose.choice(items)
            verbs = ("add", "add", "touch", "discard", "pop", "spare", "recall", "put_back")
            match choose.choice(verbs):
                case "add":
                    policy.add(item)
                    model.add(item)
                    spared.discard(item)
                case "touch":
                    policy.touch(item)
                    model |= {item} & spared
                    spared.discard(item)
                case "discard":
                    policy.discard(item)
                    model.discard(item)
                    spared.discard(item)
                case "pop":
                    victim = self.pop_one(policy, model)
                    if victim is not None:
                        policy.left(victim)
                case "spare":
                    victim = self.pop_one(policy, model)
                    if victim is not None:
                        policy.spare(victim)
                        spared.add(victim)
                case "recall":
                    policy.recall(item)
                    model |= {item} & spared
                    spared.discard(item)
                case "put_back":
                    victim = self.pop_one(policy, model)
                    if victim is not None:
                        policy.put_back(victim)
                        model.add(victim)
            assert len(policy) == len(model) + len(spared)
            assert (item in policy) == (item in model or item in spared)
        assert len(drain(policy)) == len(model)

    def pop_one(self, policy: EvictionPolicy[Entry], model: set[Entry]) -> Entry | None:
        victim = policy.pop()
        assert (victim is None) == (not model)
        if victim is not None:
            assert victim in model
            assert victim not in policy
            model.remove(victim)
        return victim

    @pytest.mark.parametrize("spared", [0, 7])
    def test_many_at_once_are_the_same_as_one_by_one(
        self, policy: EvictionPolicy[Entry], spared: int
    ) -> None:
        other = self.policy_type()
        left, right = entries(40), entries(40)
        for policy_, items, at_once in ((policy, left, True), (other, right, False)):
            filled(policy_, items)
            for entry in [policy_.pop() for _ in range(spared)]:
                assert entry is not None
                policy_.spare(entry)
            leased = items[2:20]
            again = [*reversed(leased), *items[30:35]]  # some of them candidates still
            if at_once:
                policy_.discard_all(leased)
                assert not any(entry in policy_ for entry in leased)
                policy_.add_all(again)
            else:
                for entry in leased:
                    policy_.discard(entry)
                for entry in again:
                    policy_.add(entry)
            assert len(policy_) == 40
        assert [e.visits for e in left] == [e.visits for e in right]
        assert drain(policy) == drain(other)

    def test_repr_tells_the_state(self, policy: EvictionPolicy[Entry]) -> None:
        filled(policy, entries(2))
        assert repr(policy) == f"<{self.policy_type.__name__} 2 candidates, 0 spared>"


class TestLRU(PolicyContract):
    policy_type = LRU

    def test_the_least_recently_used_leaves_first(self) -> None:
        items = entries(4)
        policy = filled(LRU(), items)
        policy.touch(items[0])
        policy.discard(items[2])  # leased and released
        policy.add(items[2])
        assert drain(policy) == [1, 3, 0, 2]

    def test_a_chain_added_from_its_tail_leaves_from_its_tail(self) -> None:
        chain = [Entry(depth, depth) for depth in range(5)]
        assert drain(filled(LRU(), reversed(chain))) == [4, 3, 2, 1, 0]


class TestLFU(PolicyContract):
    policy_type = LFU

    def test_the_least_frequently_used_leaves_first(self) -> None:
        items = entries(3)
        policy = filled(LFU(), items)
        for count, item in zip((5, 1, 3), items, strict=True):
            for _ in range(count):
                policy.touch(item)
        assert drain(policy) == [1, 2, 0]

    def test_a_count_survives_a_lease(self) -> None:
        first, second = entries(2)
        policy = filled(LFU(), [first, second])
        for _ in range(3):
            policy.discard(first)
            policy.add(first)
        policy.touch(second)
        assert drain(policy) == [1, 0]

    def test_a_favourite_of_yesterday_ages_out(self) -> None:
        favourite = Entry(0)
        policy = filled(LFU(), [favourite] * 20)
        for number in range(1, 200):
            item = Entry(number)
            filled(policy, [item] * 2)
            if evict(policy) is favourite:
                return
        pytest.fail("never left")

    def test_what_is_used_all_the_time_stays(self) -> None:
        favourite = Entry(0)
        policy = filled(LFU(), [favourite])
        for number in range(1, 5000):
            policy.touch(favourite)
            policy.add(Entry(number))
            if number > 10:
                assert evict(policy) is not favourite
        assert len(policy._ranks) <= VISITS_MAX + 1


class TestLengthAware(PolicyContract):
    policy_type = LengthAware

    def test_the_deepest_leaves_first_the_oldest_among_equals(self) -> None:
        items = [Entry(number, depth) for number, depth in enumerate((0, 2, 1, 2, 0))]
        policy = filled(LengthAware(), items)
        policy.touch(items[1])
        assert drain(policy) == [3, 1, 2, 0, 4]


def hits_of_a_working_set_during_a_scan(policy: EvictionPolicy[Entry]) -> int:
    """A set of 50 that is used every round, in a cache of 100, beside blocks seen only once."""
    hot = entries(50)
    filled(policy, [*hot, *hot, *hot])
    hits = 0
    for number in range(1000, 9000):
        if len(policy) >= 100:
            evict(policy)
        policy.add(Entry(number))
        if number % 150 == 0:  # rarer than LRU's 100 blocks of patience
            for item in hot:
                if item in policy:
                    hits += 1
                    policy.touch(item)
    return hits


class TestSIEVE(PolicyContract):
    policy_type = SIEVE

    def test_a_visited_block_survives_one_pass_of_the_hand(self) -> None:
        items = entries(4)
        policy = filled(SIEVE(), items)
        policy.touch(items[0])
        policy.touch(items[1])
        assert [entry.number for entry in (policy.pop(), policy.pop()) if entry] == [2, 3]
        policy.add(Entry(4))  # enters in front of the hand; the survivors are behind it
        assert drain(policy) == [4, 0, 1]

    def test_a_scan_does_not_flush_the_working_set(self) -> None:
        assert hits_of_a_working_set_during_a_scan(LRU()) < 100
        assert hits_of_a_working_set_during_a_scan(SIEVE()) > 2500  # of 53 rounds times 50


class TestS3FIFO(PolicyContract):
    policy_type = S3FIFO

    def test_a_scan_does_not_flush_the_working_set(self) -> None:
        assert hits_of_a_working_set_during_a_scan(S3FIFO()) > 2500

    def test_a_key_that_comes_back_soon_goes_to_main(self) -> None:
        policy = filled(S3FIFO(), entries(10))
        assert evict(policy) is not None
        policy.add(Entry(0))  # the same key, a new block
        filled(policy, entries(5, first=20))
        assert drain(policy)[-1] == 0

    def test_the_ghost_is_bounded(self) -> None:
        policy: S3FIFO[Entry] = S3FIFO()
        for number in range(3000):
            policy.add(Entry(number))
            if number >= 200:
                evict(policy)
        assert len(policy._ghost) <= 201

    def test_two_uses_move_a_block_to_main(self) -> None:
        policy: S3FIFO[Entry] = S3FIFO()
        once, twice = entries(2)
        filled(policy, [once, twice, once, twice, twice, *entries(10, first=10)])
        assert drain(policy)[-1] == 1
        assert once.visits == 2


def test_names() -> None:
    assert list(POLICIES) == ["lru", "lfu", "length-aware", "sieve", "s3fifo"]
    for name, policy_type in POLICIES.items():
        assert type(make_policy(name)) is policy_type
    with pytest.raises(InvalidInput, match="lru, lfu, length-aware, sieve, s3fifo"):
        make_policy("mru")
