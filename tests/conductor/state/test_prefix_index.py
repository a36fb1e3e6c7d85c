"""The index against a simple reference: a set of keys per holder."""

from __future__ import annotations

import random
from hashlib import blake2b
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tiffin.conductor.errors import InvalidRequest
from tiffin.conductor.state.prefix_index import HOLDERS_MAX, HolderRun, PrefixIndex, PrefixMatch

if TYPE_CHECKING:
    from collections.abc import Sequence


def key(name: object) -> bytes:
    return blake2b(repr(name).encode(), digest_size=16).digest()


def keys(count: int, prompt: object = "") -> list[bytes]:
    return [key((prompt, number)) for number in range(count)]


def leading(prompt: list[bytes], held: set[bytes]) -> int:
    """How many leading blocks of a prompt are in a set: the reference of all tests here."""
    for count, one in enumerate(prompt):
        if one not in held:
            return count
    return len(prompt)


def test_a_prompt_is_told_by_runs_of_blocks_with_the_same_holders() -> None:
    index, prompt = PrefixIndex(), keys(10)
    a, b, c = (index.holder(name, "hbm") for name in "abc")
    index.add(a, prompt[:8], 0.0)
    index.add(b, prompt[:3], 0.0)
    index.add(c, prompt[5:], 0.0)
    match = index.match(prompt)
    assert match.runs == (
        HolderRun(0, 3, 1 << a | 1 << b),
        HolderRun(3, 5, 1 << a),
        HolderRun(5, 8, 1 << a | 1 << c),
        HolderRun(8, 10, 1 << c),
    )
    assert match.blocks == 10
    # c has more blocks of this prompt than b, but none of its beginning.
    assert match.lengths(index.width).tolist() == [8, 3, 0]
    # Together a and c have all of it.
    assert match.leading(np.array([[a, b, c], [c, -1, -1]])).tolist() == [10, 3, 0]


def test_the_walk_ends_at_the_first_block_that_nobody_has() -> None:
    index, prompt = PrefixIndex(), keys(6)
    a = index.holder("a", "hbm")
    index.add(a, [*prompt[:2], *prompt[3:]], 0.0)
    assert index.match(prompt).runs == (HolderRun(0, 2, 1 << a),)
    assert index.match(prompt[2:]) == PrefixMatch()
    assert index.match([]).blocks == 0
    assert index.match(prompt[2:]).lengths(3).tolist() == [0, 0, 0]
    assert index.match([]).leading(np.array([[a, -1]])).tolist() == [0, 0]


def test_numbers_are_given_once_and_again_after_a_departure() -> None:
    index, prompt = PrefixIndex(), keys(4)
    a, a_dram, b = index.holder("a", "hbm"), index.holder("a", "dram"), index.holder("b", "hbm")
    assert index.holder("a", "hbm") == a == index.find("a", "hbm")
    assert index.label(a_dram) == "a/dram"
    for number in (a, a_dram, b):
        index.add(number, prompt, 0.0)
    index.drop("a")
    assert index.find("a", "hbm") is index.find("a", "dram") is None
    assert index.holders_of(prompt[0]) == [b]
    # The next owner of the number has no blocks of its predecessor.
    c = index.holder("c", "nvme")
    assert c in (a, a_dram)
    assert index.width == 3
    assert index.blocks_of(c) == 0
    assert index.match(prompt).runs == (HolderRun(0, 4, 1 << b),)
    with pytest.raises(InvalidRequest, match="no holder has number"):
        index.label(a + a_dram - c)
    with pytest.raises(InvalidRequest, match="no tier 'tape'"):
        index.holder("a", "tape")
    index.drop("nobody")


def test_what_is_cleared_is_found_no_more_and_can_come_back() -> None:
    index, prompt = PrefixIndex(), keys(5)
    a, b = index.holder("a", "hbm"), index.holder("b", "hbm")
    index.add(a, prompt, 1.0)
    index.add(b, prompt[:2], 1.0)
    index.clear(a, 2.0)
    assert (len(index), index.blocks_of(a)) == (2, 0)
    assert index.match(prompt).runs == (HolderRun(0, 2, 1 << b),)
    index.add(a, prompt[1:4], 3.0)
    assert len(index) == 4
    assert index.match(prompt).lengths(index.width).tolist() == [0, 2]
    index.clear(b, 4.0)
    index.remove(a, prompt, 5.0)
    assert len(index) == 0


def test_age_is_since_a_holder_was_last_heard_of() -> None:
    index = PrefixIndex()
    a = index.holder("a", "hbm")
    assert index.age_s(a, 5.0) == float("inf")
    index.add(a, keys(1), 5.0)
    index.heard(a, 4.0)  # a late report does not set the time back
    assert index.age_s(a, 7.5) == 2.5
    assert index.age_s(a, 1.0) == 0.0


def test_an_inventory_replaces_all_at_once() -> None:
    """Until its end decisions see the blocks known before, and none of them twice."""
    index, prompt = PrefixIndex(), keys(8)
    a, b = index.holder("a", "dram"), index.holder("b", "dram")
    index.add(a, prompt[:4], 0.0)
    index.add(b, prompt, 0.0)
    index.begin_inventory(a)
    index.inventory(a, prompt[2:4])
    assert index.match(prompt).lengths(index.width).tolist()[:2] == [4, 8]
    assert index.holders_of(prompt[3]) == [a, b]
    index.begin_inventory(a)  # the first attempt is forgotten
    index.inventory(a, prompt[:2])
    index.inventory(a, [*prompt[1:3], key("new")])
    assert index.match([key("new")]).blocks == 0
    index.end_inventory(a, 9.0)
    assert index.match(prompt).lengths(index.width).tolist()[:2] == [3, 8]
    assert index.holders_of(key("new")) == [a]
    assert (index.blocks_of(a), index.blocks_of(b), index.age_s(a, 9.0)) == (4, 8, 0.0)
    with pytest.raises(InvalidRequest, match="no inventory of a/dram"):
        index.inventory(a, prompt)


def test_a_holder_may_leave_during_its_inventory() -> None:
    index = PrefixIndex()
    a = index.holder("a", "dram")
    index.begin_inventory(a)
    index.inventory(a, keys(3))
    index.drop("a")
    assert (len(index), index.numbers()) == (0, [])
    b, c = index.holder("b", "dram"), index.holder("c", "dram")
    index.add(b, keys(3), 0.0)
    index.add(c, keys(2), 0.0)
    assert index.match(keys(3)).blocks == 3  # the hidden number is visible again


def test_too_many_holders_are_refused() -> None:
    index = PrefixIndex()
    for number in range(HOLDERS_MAX):
        index.holder(str(number), "hbm")
    with pytest.raises(InvalidRequest, match="limit"):
        index.holder("one more", "hbm")
    with pytest.raises(InvalidRequest, match="at least one"):
        PrefixIndex(0)


def test_a_full_index_forgets_the_oldest_that_nobody_asked_for() -> None:
    index = PrefixIndex(max_blocks=1000)
    a = index.holder("a", "hbm")
    system = keys(20, "system")
    index.add(a, system, 0.0)
    for turn in range(200):
        assert index.match(system).blocks == 20, turn
        index.add(a, keys(20, turn), 0.0)
        assert len(index) <= 1000
        assert index.blocks_of(a) == len(index)
    assert index.match(keys(20, 199)).blocks == 20
    assert index.match(keys(20, 0)).blocks == 0
    assert index.evicted_blocks == 201 * 20 - len(index)


def test_it_stays_bounded_when_everything_in_it_is_asked_for() -> None:
    index = PrefixIndex(max_blocks=64)
    a = index.holder("a", "hbm")
    for turn in range(10):
        index.add(a, keys(60, turn), 0.0)
        index.match(keys(60, turn))
        assert len(index) <= 64
    index.add(a, keys(500, "more at once than there is room for"), 0.0)
    assert len(index) == index.blocks_of(a) <= 64


def test_cleared_blocks_do_not_pile_up() -> None:
    """An engine that resets its cache after every step leaves nothing behind."""
    index = PrefixIndex(max_blocks=100_000)
    a = index.holder("a", "hbm")
    for turn in range(20):
        index.add(a, keys(5000, turn), 0.0)
        index.clear(a, 0.0)
        assert len(index._blocks) <= 10_001
        assert len(index._groups) <= 2
    assert len(index) == 0


def test_a_few_cleared_blocks_are_not_worth_a_pass_over_a_full_index(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are evicted in their turn, and not counted as evictions of a holder's blocks."""
    index = PrefixIndex(max_blocks=800)
    a, b, c = (index.holder(name, "hbm") for name in "abc")
    index.add(b, keys(10, "dead"), 0.0)
    index.match(keys(10, "dead"))  # matched while b had them
    index.add(a, keys(780), 0.0)
    index.match(keys(780))
    passes, bury = [], index._bury
    monkeypatch.setattr(index, "_bury", lambda: (passes.append(index._dead), bury()))
    index.clear(b, 0.0)
    index.add(a, keys(50, "more"), 0.0)
    assert passes == []
    assert index._dead == 0
    assert len(index._blocks) <= 800
    assert index.blocks_of(a) == len(index) == 830 - index.evicted_blocks
    # An eighth of the index is worth a pass, and then no held block has to be evicted.
    index.add(c, keys(800 - len(index), "c"), 0.0)
    index.add(c, keys(200, "d"), 0.0)
    evicted, dead = index.evicted_blocks, index.blocks_of(c)
    index.clear(c, 0.0)
    index.add(a, keys(100, "e"), 0.0)
    assert passes == [dead]
    assert index.evicted_blocks == evicted
    assert index.match(keys(100, "e")).blocks == 100


def test_a_thousand_holders_of_different_lengths() -> None:
    """More runs than fit in a byte, more holders than in a machine word."""
    index, prompt, dice = PrefixIndex(), keys(256), random.Random(1)
    held = {}
    for number in range(1000):
        assert index.holder(f"i{number}", "hbm") == number
        held[number] = dice.choice((0, 1, 8, 16, 255, 256, dice.randrange(257)))
        index.add(number, prompt[: held[number]], 0.0)
    match = index.match(prompt)
    assert match.lengths(1000).tolist() == [held[number] for number in range(1000)]
    assert match.lengths(1003).tolist()[1000:] == [0, 0, 0]
    assert match.lengths(10).tolist() == [held[number] for number in range(10)]
    columns = np.array([dice.choices(range(-1, 1200), k=300) for _ in range(3)])
    expected = [max(held.get(int(n), 0) for n in row) for row in columns.T]
    assert match.leading(columns).tolist() == expected


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 2**70 - 1)), max_size=20))
def test_lengths_are_what_counting_says(parts: list[tuple[int, int]]) -> None:
    runs, start = [], 0
    for blocks, holders in parts:
        runs.append(HolderRun(start, start + blocks, holders | 1 << 70))
        start += blocks
    match = PrefixMatch(tuple(runs))
    per_block = [run.holders for run in runs for _ in range(run.stop - run.start)]

    def count(mask: int) -> int:
        return next((n for n, holders in enumerate(per_block) if not holders & mask), start)

    assert match.lengths(71).tolist() == [count(1 << number) for number in range(71)]
    columns = np.array([[0, 3, 69, -1], [1, -1, 64, -1]])
    assert match.leading(columns).tolist() == [count(3), count(8), count(1 << 69 | 1 << 64), 0]


def test_prompts_that_part_ways_are_remembered_up_to_there() -> None:
    """The walk follows rows that were matched before; a removed block splits its row."""
    index, prompt = PrefixIndex(), keys(100)
    a, b = index.holder("a", "hbm"), index.holder("b", "dram")
    index.add(a, prompt, 0.0)

    def rows() -> list[int]:
        return sorted({strand.count for strand in index._blocks.values() if strand.count > 0})

    assert index.match(prompt).runs == (HolderRun(0, 100, 1 << a),)
    assert rows() == [100]
    assert index.match([*prompt[:40], *keys(9, "other")]).runs == (HolderRun(0, 40, 1 << a),)
    assert rows() == [40]
    assert index.match(prompt).runs == (HolderRun(0, 100, 1 << a),)
    assert rows() == [40, 60]
    index.remove(a, prompt[70:71], 1.0)
    assert index.match(prompt).runs == (HolderRun(0, 70, 1 << a),)
    index.add(b, prompt[:20], 1.0)
    assert index.match(prompt).runs == (
        HolderRun(0, 20, 1 << a | 1 << b),
        HolderRun(20, 70, 1 << a),
    )
    # A row with another block in the middle, or in another order, does not match.
    other = [*prompt[:5], key("other"), *prompt[6:20]]
    assert index.match(other).runs == (HolderRun(0, 5, 1 << a | 1 << b),)
    assert index.match(prompt[:5][::-1]).blocks == 5


def test_keys_of_rows_are_kept_once() -> None:
    """Wherever prompts diverge: each block could be the last of a row as long as the prompt."""
    index, prompt = PrefixIndex(), keys(400)
    holders = [index.holder(f"i{number}", "hbm") for number in range(100)]
    for at, holder in enumerate(holders):
        index.add(holder, prompt[: 400 - at], 0.0)
    for blocks in range(400, 0, -1):
        assert index.match(prompt[:blocks]).blocks == blocks
        kept = sum(len(strand.keys) for strand in set(index._blocks.values()))
        assert kept <= 16 * len(index)


class IndexMachine(RuleBasedStateMachine):
    """After any order of calls the index has the same blocks as a set per holder."""

    universe = keys(48)
    some = st.lists(st.integers(0, 47), max_size=12) | st.builds(
        range, st.integers(0, 8), st.integers(16, 48)
    )
    names = st.sampled_from("abcd")

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.held: dict[str, set[bytes]] = {}
        self.staged: dict[str, set[bytes]] = {}

    def number(self, name: str) -> int:
        self.held.setdefault(name, set())
        return self.index.holder(name, "hbm")

    @rule(name=names, which=some)
    def add(self, name: str, which: Sequence[int]) -> None:
        self.index.add(self.number(name), [self.universe[n] for n in which], 0.0)
        self.held[name].update(self.universe[n] for n in which)

    @rule(name=names, which=some)
    def remove(self, name: str, which: Sequence[int]) -> None:
        self.index.remove(self.number(name), [self.universe[n] for n in which], 0.0)
        self.held[name].difference_update(self.universe[n] for n in which)

    @rule(stop=st.integers(16, 48), other=st.booleans())
    def ask(self, stop: int, other: bool) -> None:
        """Earlier matches, by prompts that diverge anywhere, change no answer."""
        prompt = self.universe[:stop] + keys(3, "other") * other
        runs = self.index.match(prompt).runs
        holders = [set(self.index.holders_of(one)) for one in prompt]
        count = next((at for at, having in enumerate(holders) if not having), len(prompt))
        assert (runs[-1].stop if runs else 0) == count
        for start, end, mask in runs:
            assert all(sum(1 << n for n in having) == mask for having in holders[start:end])
        assert all(one.holders != two.holders for one, two in pairwise(runs))

    @rule(name=names)
    def clear(self, name: str) -> None:
        self.index.clear(self.number(name), 0.0)
        self.held[name].clear()

    @rule(name=names)
    def drop(self, name: str) -> None:
        self.index.drop(name)
        self.held.pop(name, None)
        self.staged.pop(name, None)

    @rule(name=names)
    def begin_inventory(self, name: str) -> None:
        self.index.begin_inventory(self.number(name))
        self.staged[name] = set()

    @precondition(lambda self: self.staged)
    @rule(which=some, pick=st.randoms(use_true_random=False))
    def inventory(self, which: Sequence[int], pick: random.Random) -> None:
        name = pick.choice(sorted(self.staged))
        self.index.inventory(self.number(name), [self.universe[n] for n in which])
        self.staged[name].update(self.universe[n] for n in which)

    @precondition(lambda self: self.staged)
    @rule(pick=st.randoms(use_true_random=False))
    def end_inventory(self, pick: random.Random) -> None:
        name = pick.choice(sorted(self.staged))
        self.index.end_inventory(self.number(name), 0.0)
        self.held[name] = self.staged.pop(name)

    @rule()
    def bury(self) -> None:
        self.index._bury()

    @invariant()
    def blocks_and_holders_are_right(self) -> None:
        index = self.index
        staged = set().union(*self.staged.values()) if self.staged else set()
        assert len(index) == len(set().union(staged, *self.held.values()))
        for name, held in self.held.items():
            number = self.number(name)
            assert index.blocks_of(number) == len(held)
            assert index.missing(number, self.universe) == [
                one for one in self.universe if one not in held
            ]
        for one in self.universe:
            holders = {self.number(name) for name, held in self.held.items() if one in held}
            assert set(index.holders_of(one)) == holders
        lengths = index.match(self.universe).lengths(index.width)
        for name, held in self.held.items():
            assert lengths[self.number(name)] == leading(self.universe, held)

    @invariant()
    def groups_are_counted(self) -> None:
        index = self.index
        led: dict[int, int] = {}
        for strand in index._blocks.values():
            led[id(strand.group)] = led.get(id(strand.group), 0) + 1
        assert {id(group): group.blocks for group in index._groups} == led
        assert index._dead == sum(not one.group.holders for one in index._blocks.values())
        assert all(group.holders == mask for mask, group in index._by_holders.items())
        for strand in set(index._blocks.values()):
            its = [key for key, one in index._blocks.items() if one is strand]
            assert strand.count in (-1, len(its))
            assert bool(strand.keys) == (strand.count >= 0)
            assert strand.count < 0 or set(its) == {
                strand.keys[at : at + 16] for at in range(0, len(strand.keys), 16)
            }
        assert all(group in index._groups for group in index._by_holders.values())


TestIndexMachine = IndexMachine.TestCase
