"""Counts of popularity, which decay: never too low, tails never above heads, bounded memory."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replicationsupport import hot_prefixes

from tiffin.conductor.pool.arrival_buffer import COUNTED_MAX, ArrivalBuffer
from tiffin.conductor.pool.popularity import (
    GROUPS_MAX,
    Group,
    Popularity,
    PopularitySettings,
    Sketch,
)
from tiffin.conductor.records import InstanceSpec, Request, Role

if TYPE_CHECKING:
    from collections.abc import Sequence

HALF_LIFE_S = 100.0
SETTINGS = PopularitySettings(half_life_s=HALF_LIFE_S)


def popularity(tracked_max: int = 1024, columns_log2: int = 16) -> Popularity:
    return Popularity(
        random.Random(1), SETTINGS, tracked_max=tracked_max, columns_log2=columns_log2
    )


def chain(path: Sequence[int]) -> tuple[bytes, ...]:
    """The keys of a prompt: each contains the path so far, like chained keys."""
    return tuple(_key(tuple(path[: i + 1])) for i in range(len(path)))


def _key(path: tuple[int, ...]) -> bytes:
    return random.Random(repr(path)).randbytes(16)


def words(keys: Sequence[bytes]) -> np.ndarray[tuple[int, int], np.dtype[np.uint64]]:
    return np.frombuffer(b"".join(keys), np.uint64).reshape(-1, 2)


paths = st.lists(st.integers(0, 2), min_size=1, max_size=6)
# Seconds since the last prompt, the prompt, and the node it goes to.
prompts = st.lists(st.tuples(st.floats(0, 60), paths, st.sampled_from("ab")), max_size=40)


class TestAgainstCountingAll:
    @given(came=prompts, columns_log2=st.sampled_from([3, 5, 16]))
    @settings(max_examples=60)
    def test_never_too_low(
        self, came: list[tuple[float, list[int], str]], columns_log2: int
    ) -> None:
        """With 8 columns nearly all keys collide; with 65,536 none do."""
        counted = popularity(columns_log2=columns_log2)
        now, seen, on = 0.0, defaultdict[bytes, list[float]](list), defaultdict(list)
        for pause_s, path, node in came:
            now += pause_s
            keys = chain(path)
            shared = counted.seen(keys, now, block_bytes=1)
            counted.wanted(keys, node, now)
            assert 0 <= shared <= len(keys)
            for key in keys:
                seen[key].append(now)
                on[key, node].append(now)
        exact = columns_log2 == 16
        for _, path, node in came:
            keys = chain(path)
            true = np.array([_faded(seen[key], now) for key in keys])
            there = np.array([_faded(on[key, node], now) for key in keys])
            found = counted.of_each(keys, now)
            demand = counted.demand_each(keys, [node] * len(keys), now)
            assert (found >= true * (1 - 1e-9)).all()
            assert (demand >= there * (1 - 1e-9)).all()
            if exact:
                assert found == pytest.approx(true)
                assert demand == pytest.approx(there)
        counted.check()

    @given(came=prompts)
    @settings(max_examples=40)
    def test_hot_prefixes_are_the_most_popular_blocks(
        self, came: list[tuple[float, list[int], str]]
    ) -> None:
        """Every block that was seen often enough is in a listed prefix whose popularity is within a
        factor of two."""
        counted = popularity()
        now, seen = 0.0, defaultdict[bytes, list[float]](list)
        for pause_s, path, _ in came:
            now += pause_s
            for key in chain(path):
                seen[key].append(now)
            counted.seen(chain(path), now, block_bytes=7)
        hot = hot_prefixes(counted, 1000, now)
        assert [h.popularity for h in hot] == sorted((h.popularity for h in hot), reverse=True)
        covered: dict[bytes, float] = {}
        for one in hot:
            assert one.popularity == pytest.approx(_faded(seen[one.keys[-1]], now))
            assert one.block_bytes == 7
            assert 0 < one.share <= 1
            for key in one.keys:
                covered[key] = max(covered.get(key, 0.0), one.popularity)
        for key, times in seen.items():
            true = _faded(times, now)
            if len(times) >= 2 and times[-1] - times[-2] <= 1 and true > 0:
                assert covered[key] > true / 2 * (1 - 1e-9)


def _faded(times: list[float], now: float) -> float:
    return sum(2 ** ((at - now) / HALF_LIFE_S) for at in times)


class TestFading:
    def test_a_prompt_of_a_half_life_ago_counts_half(self) -> None:
        counted, keys = popularity(), chain([1, 2])
        for _ in range(8):
            counted.seen(keys, 0.0)
        assert counted.of_each(keys, HALF_LIFE_S) == pytest.approx([4.0, 4.0])
        assert counted.prompts(HALF_LIFE_S) == pytest.approx(4.0)

    def test_years_do_not_overflow(self) -> None:
        counted, keys = popularity(), chain([1])
        for year in range(5):
            now = year * 365 * 86_400.0
            for _ in range(3):
                counted.seen(keys, now)
            assert counted.of_each(keys, now) == pytest.approx([3.0], rel=1e-6)

    def test_another_half_life_changes_no_count(self) -> None:
        counted, keys = popularity(), chain([1])
        counted.seen(keys, 0.0)
        counted.configure(PopularitySettings(half_life_s=10.0), HALF_LIFE_S)
        assert counted.of_each(keys, HALF_LIFE_S) == pytest.approx([0.5])
        assert counted.prompts(HALF_LIFE_S) == pytest.approx(0.5)
        assert counted.of_each(keys, HALF_LIFE_S + 10.0) == pytest.approx([0.25])

    def test_a_clock_that_stands_still_or_steps_back_is_survived(self) -> None:
        counted, keys = popularity(), chain([1])
        counted.seen(keys, 50.0)
        counted.seen(keys, 49.0)
        assert math.isfinite(counted.of_each(keys, 50.0)[0])
        assert 1.9 < counted.of_each(keys, 50.0)[0] <= 2.1


class TestHotPrefixes:
    def test_where_prompts_part_the_common_prefix_ends(self) -> None:
        """A system prompt of 3 blocks; after it 16 prompts differ, 10 others continue alike."""
        counted = popularity()
        for i in range(16):
            counted.seen(chain([0, 0, 0, 10 + i]), 0.0, group=Group("m"))
        for _ in range(10):
            counted.seen(chain([0, 0, 0, 1, 1]), 0.0, group=Group("m"))
        counted.seen(chain([7]), 0.0, group=Group("other"))
        hot = hot_prefixes(counted, 10, 0.0)
        assert [(len(one.keys), one.popularity) for one in hot] == [(3, 26.0), (5, 10.0)]
        assert hot[0].keys == chain([0, 0, 0])
        assert hot[1].share == pytest.approx(10 / 26)
        assert {one.group for one in hot} == {Group("m")}
        assert hot_prefixes(counted, 1, 0.0) == hot[:1]
        assert hot_prefixes(counted, 0, 0.0) == []

    def test_what_is_seen_once_has_no_name(self) -> None:
        counted = popularity()
        for i in range(50):
            assert counted.seen(chain([i, i]), 0.0) == 0
        assert len(counted) == 0
        assert hot_prefixes(counted, 10, 0.0) == []
        assert counted.seen(chain([3, 3, 4]), 0.0) == 2
        assert len(counted) == 2

    def test_the_table_keeps_the_popular_with_their_parents(self) -> None:
        counted = popularity(tracked_max=64)
        for i in range(40):
            for _ in range(2):
                counted.seen(chain([0, 0, i, i, i]), float(i))
            counted.check()
            assert len(counted) <= 64
        assert hot_prefixes(counted, 1, 40.0)[0].keys == chain([0, 0])

    def test_equals_do_not_evict_each_other_from_a_full_table(self) -> None:
        """A hundred prompts that return at random, in a table for sixteen of them: it was pruned
        with every fourth, as all of them returned to the table."""
        counted, dice, pruned = popularity(tracked_max=64), random.Random(3), 0
        prompts = [chain([i, 0, 0, 0]) for i in range(100)]
        for number in range(1500):
            keys = prompts[dice.randrange(100)]
            pruned += bool(list(counted.making_room(len(keys), number / 150)))
            counted.seen(keys, number / 150)
        assert 4 < pruned < 1500 / 4 / 4
        for _ in range(3):
            counted.seen(chain([100, 0]), 10.0)
            counted.check()
        assert not self.listed(counted, chain([100, 0])), "rarer than those that are kept"
        for _ in range(20):
            counted.seen(chain([100, 0]), 10.0)
        assert self.listed(counted, chain([100, 0]))

    def test_who_has_faded_is_no_bar(self) -> None:
        counted = popularity(tracked_max=16)
        for i in [*range(20)] * 5:
            counted.seen(chain([i, 0]), 0.0)
        for _ in range(2):
            counted.seen(chain([20, 0]), 4 * HALF_LIFE_S)
        assert self.listed(counted, chain([20, 0]))

    @staticmethod
    def listed(counted: Popularity, keys: tuple[bytes, ...]) -> bool:
        return keys in {one.keys for one in hot_prefixes(counted, 100, 4 * HALF_LIFE_S)}

    def test_a_prompt_longer_than_the_table(self) -> None:
        counted = popularity(tracked_max=16)
        for _ in range(3):
            counted.seen(chain(range(40)), 0.0)
            counted.check()
        assert len(counted) == 16
        assert hot_prefixes(counted, 1, 0.0)[0].keys == chain(range(16))

    def test_prompts_without_keys_count_for_shares(self) -> None:
        counted = popularity()
        for _ in range(3):
            counted.seen((), 0.0)
            counted.seen(chain([1]), 0.0)
        assert hot_prefixes(counted, 1, 0.0)[0].share == pytest.approx(0.5)
        assert counted.of_each((), 0.0).shape == (0,)
        assert counted.demand_each((), (), 0.0).shape == (0,)

    def test_models_are_bounded(self) -> None:
        counted = popularity()
        for i in range(GROUPS_MAX + 10):
            counted.seen((), 0.0, group=Group(f"m{i}"))
        assert counted.prompts(0.0, Group("m0")) == 0.0
        assert counted.prompts(0.0, Group(f"m{GROUPS_MAX + 9}")) == 1.0


class TestTheSketch:
    def test_a_zipf_stream_is_counted_closely(self) -> None:
        """200,000 blocks in 4 x 65,536 cells: the popular ones are right within a few counts."""
        dice = random.Random(3)
        sketch = Sketch(1e6, dice, 16)
        keys = [dice.randbytes(16) for _ in range(50_000)]
        counts: dict[int, int] = defaultdict(int)
        for _ in range(400):
            chosen = sorted({int(dice.paretovariate(0.6)) % len(keys) for _ in range(500)})
            for i in chosen:
                counts[i] += 1
            # One at a time: they do not form chains.
            for i in chosen[:20]:
                sketch.add(sketch.places(words([keys[i]])), 0.0)
        popular = sorted(counts, key=lambda i: -counts[i])[:15]
        found = sketch.estimate(sketch.places(words([keys[i] for i in popular])), 0.0)
        for i, estimate in zip(popular, found.tolist(), strict=True):
            assert counts[i] >= estimate > 0.9 * counts[i] - 5

    def test_keys_can_not_be_made_to_collide_without_the_secret(self) -> None:
        keys = [bytes(8) + bytes([i]) + bytes(7) for i in range(64)]
        places = [Sketch(1.0, random.Random(seed), 16).places(words(keys)) for seed in (1, 2)]
        assert not (places[0] == places[1]).all(axis=0).any()
        assert len({tuple(column) for column in places[0].T.tolist()}) == 64

    def test_a_chain_corrects_itself(self) -> None:
        """Eight columns, sixty other prompts: a tail that shares all its cells still does not count
        more than its head."""
        dice = random.Random(5)
        sketch = Sketch(1e6, dice, 3)
        for _ in range(60):
            found = sketch.add(sketch.places(words([dice.randbytes(16) for _ in range(6)])), 0.0)
            assert (np.diff(found) <= 0).all()


class TestArrivals:
    def test_few_are_counted_each(self) -> None:
        counted, arrivals, spec = self.made()
        for prompt in range(COUNTED_MAX):
            arrivals.came(self.asked(0, prompt), spec)
        arrivals.count(0.0)
        assert counted.prompts(0.0, Group("m")) == COUNTED_MAX
        assert counted.of_each(chain([0]), 0.0).tolist() == [COUNTED_MAX]
        assert counted.demand_each(chain([0]), ["n"], 0.0).tolist() == [COUNTED_MAX - 1]

    def test_another_one_meanwhile_leaves_the_rest_for_the_next_time(self) -> None:
        counted, dice = popularity(), random.Random(0)
        arrivals, spec = ArrivalBuffer(counted, dice), InstanceSpec("i", "m", Role.MIXED, "p")
        for number in range(3):
            arrivals.came(Request(f"r{number}", "m", 100, chain([number])), spec)
        first = arrivals.counting(0.0)
        next(first)
        arrivals.came(Request("late", "m", 100, chain([9])), spec)
        assert list(arrivals.counting(0.0)) == []
        assert counted.of_each(chain([9]), 0.0) == 0.0
        list(first)
        arrivals.count(0.0)
        assert counted.of_each([chain([n])[0] for n in (0, 1, 2, 9)], 0.0).tolist() == [1.0] * 4
        abandoned = arrivals.counting(0.0)
        next(abandoned, None)
        abandoned.close()
        arrivals.came(Request("later", "m", 100, chain([9])), spec)
        arrivals.count(0.0)
        assert counted.of_each(chain([9]), 0.0) == 2.0

    def test_room_is_made_in_pieces_before_a_prompt_is_counted(self) -> None:
        counted, pieces = popularity(tracked_max=40), 0
        for number in range(40):
            keys = chain([number % 13, 0, 0, 0])
            pieces += len(list(counted.making_room(len(keys), float(number))))
            assert len(counted) + len(keys) <= 40, "else `seen` makes room by itself, in one piece"
            counted.seen(keys, float(number))
            counted.check()
        assert pieces > 2
        assert len(counted) > 20, "not all of them leave"

    def test_of_many_some_stand_for_all(self) -> None:
        """A third of 1,200 prompts begins with the same block. The others share nothing, and are
        not listed, although each of them that is counted represents many."""
        counted, arrivals, spec = self.made()
        for tick in range(30):
            for prompt in range(40):
                head = 0 if prompt % 3 == 0 else 1 + 40 * tick + prompt
                arrivals.came(self.asked(head, 1 + 40 * tick + prompt), spec)
            arrivals.count(float(tick) / 10)
        assert counted.prompts(3.0, Group("m")) == pytest.approx(1200, rel=0.02)
        assert counted.of_each(chain([0]), 3.0)[0] == pytest.approx(420, rel=0.3)
        assert [one.keys for one in hot_prefixes(counted, 9, 3.0)] == [chain([0])]
        arrivals.count(4.0)
        assert counted.prompts(3.0, Group("m")) == pytest.approx(1200, rel=0.02)

    def test_what_one_stands_for_is_told_and_fades(self) -> None:
        counted, arrivals, spec = self.made()
        assert counted.grain(0.0) == 1.0
        for prompt in range(8 * COUNTED_MAX):
            arrivals.came(self.asked(prompt), spec)
        arrivals.count(0.0)
        assert counted.grain(0.0) == 8.0
        arrivals.came(self.asked(0), spec)
        arrivals.count(HALF_LIFE_S)
        assert counted.grain(HALF_LIFE_S) == pytest.approx(4.0)
        counted.configure(PopularitySettings(half_life_s=2 * HALF_LIFE_S), HALF_LIFE_S)
        assert counted.grain(3 * HALF_LIFE_S) == pytest.approx(2.0)
        assert counted.grain(1e6) == 1.0

    def made(self) -> tuple[Popularity, ArrivalBuffer, InstanceSpec]:
        counted = popularity()
        spec = InstanceSpec("i", "m", Role.MIXED, "p", node="n")
        return counted, ArrivalBuffer(counted, random.Random(3)), spec

    def asked(self, *path: int) -> Request:
        return Request("r", "m", 2000, chain(path))
