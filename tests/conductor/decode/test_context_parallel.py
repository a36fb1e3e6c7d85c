"""WaterFill against every possible split, and context parallelism, which uses it."""

from __future__ import annotations

import itertools
import random

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiffin.conductor.decode.context_parallel import (
    ContextSpread,
    SpreadSettings,
    members_wanted,
    spread,
    waterfill,
)
from tiffin.conductor.decode.selection import DecodeQuestion, DecodeSettings, NoDecode
from tiffin.conductor.records import InstanceSpec, Objectives, Request, Role
from tiffin.conductor.state.instance_table import Cluster

ON = SpreadSettings(enabled=True)


def splits(units: int, vessels: int) -> list[tuple[int, ...]]:
    """Every way to put `units` units into `vessels` vessels."""
    return [
        parts
        for parts in itertools.product(range(units + 1), repeat=vessels)
        if sum(parts) == units
    ]


# -- WaterFill -------------------------------------------------------------------------------------


def test_the_drawing() -> None:
    """Vessels at 1, 2, 1, 3, 2 and three tokens: the two lowest rise to 2, one at 2 to 3."""
    poured = waterfill([1, 2, 1, 3, 2], 3)
    assert poured is not None
    assert int((np.array([1, 2, 1, 3, 2]) + poured).max()) == 3
    assert poured.tolist() == [2, 0, 1, 0, 0]


def test_who_stands_above_the_water_gets_none() -> None:
    poured = waterfill([0, 100, 0], 60)
    assert poured is not None
    assert poured.tolist() == [30, 0, 30]


def test_a_lid_sends_the_rest_elsewhere() -> None:
    poured = waterfill([0, 50], 60, [20, 100])
    assert poured is not None
    assert poured.tolist() == [20, 40]


def test_what_does_not_fit_is_refused_whole() -> None:
    assert waterfill([0, 0], 41, [20, 20]) is None
    assert waterfill([0, 0], 40, [25, 25], block_tokens=10) is not None
    assert waterfill([0, 0], 41, [25, 25], block_tokens=10) is None, "blocks are not cut"


@given(
    st.lists(st.tuples(st.integers(0, 12), st.integers(0, 8)), min_size=1, max_size=4),
    st.integers(1, 9),
)
def test_no_split_of_tokens_has_a_lower_level(vessels: list[tuple[int, int]], tokens: int) -> None:
    held, room = [list(column) for column in zip(*vessels, strict=True)]
    possible = [
        parts
        for parts in splits(tokens, len(vessels))
        if all(part <= lid for part, lid in zip(parts, room, strict=True))
    ]
    poured = waterfill(held, tokens, room)
    if poured is None:
        assert not possible
        return
    assert tuple(poured.tolist()) in possible
    # A vessel that gets nothing does not count: this request does not change its height.
    best = min(
        max(h + part for h, part in zip(held, parts, strict=True) if part) for parts in possible
    )
    assert max(h + part for h, part in zip(held, poured.tolist(), strict=True) if part) == best


@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 70)), min_size=1, max_size=4),
    st.integers(1, 70),
    st.sampled_from([3, 8, 16]),
)
def test_no_split_into_blocks_has_a_lower_level(
    vessels: list[tuple[int, int]], tokens: int, block: int
) -> None:
    held, room = [list(column) for column in zip(*vessels, strict=True)]
    blocks = -(-tokens // block)
    if blocks > 8:
        tokens, blocks = 8 * block, 8
    possible = [
        parts
        for parts in splits(blocks, len(vessels))
        if all(part * block <= lid for part, lid in zip(parts, room, strict=True))
    ]
    poured = waterfill(held, tokens, room, block)
    if poured is None:
        assert not possible
        return
    assert int(poured.sum()) == tokens
    assert sum(part % block != 0 for part in poured.tolist()) <= 1, "one block may not be full"
    whole = [-(-part // block) for part in poured.tolist()]
    assert tuple(whole) in possible
    best = min(
        max(h + part * block for h, part in zip(held, parts, strict=True) if part)
        for parts in possible
    )
    assert max(h + part * block for h, part in zip(held, whole, strict=True) if part) == best


def test_a_million_tokens_in_blocks() -> None:
    dice = random.Random(2)
    held = [dice.randrange(500_000) for _ in range(32)]
    poured = waterfill(held, 1_000_001, None, 512)
    assert poured is not None
    assert int(poured.sum()) == 1_000_001
    heights = (np.array(held) + poured)[poured > 0]
    assert heights.max() - heights.min() < 2 * 512


# -- how many --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "members"),
    [(1, 1), (65_536, 1), (65_537, 2), (262_144, 4), (262_145, 8), (5_000_000, 8)],
)
def test_members_by_length(tokens: int, members: int) -> None:
    assert members_wanted(tokens, 1e9, ON) == members


def test_no_instance_gives_more_than_its_share() -> None:
    """By the buckets 60,000 tokens are for one instance, but it only has 50,000 to give."""
    assert members_wanted(60_000, 100_000, ON) == 2
    assert members_wanted(60_000, 10_000, ON) == 8, "and never more than members_max"


def test_nothing_is_spread_unless_engines_can() -> None:
    assert members_wanted(10_000_000, 1000, SpreadSettings()) == 1


def test_buckets_are_in_order() -> None:
    with pytest.raises(msgspec.ValidationError, match="ascending"):
        msgspec.json.decode(b'{"buckets": [[100, 2], [50, 3]]}', type=SpreadSettings)
    with pytest.raises(ValueError, match="ascending"):
        SpreadSettings(buckets=((100, 2), (200, 1)))


# -- spreading a request ---------------------------------------------------------------------------


def question_of(
    held: list[int],
    *,
    prompt: int,
    answer: int = 1000,
    capacity: int = 1_000_000,
    batch: list[int] | None = None,
    tbt_s: float | None = None,
) -> DecodeQuestion:
    cluster = Cluster()
    for number, tokens in enumerate(held):
        spec = InstanceSpec(
            id=f"d{number}",
            model="m",
            role=Role.DECODE,
            profile="p",
            kv_capacity_tokens=capacity,
        )
        row = cluster.register(spec, (0.1, 1e-4, 1e-9, 0.02, 1e-4, 5e-8), 0.0)
        cluster.context_tokens[row] = cluster.kv_used_tokens[row] = tokens
        cluster.batch[row] = batch[number] if batch else tokens // 10_000
    request = Request(id="r", model="m", prompt_tokens=prompt, objectives=Objectives(tbt_s=tbt_s))
    rows = cluster.rows_for("m", prefill=False)
    settings = DecodeSettings(reserve_share=0.0)
    return DecodeQuestion(request, cluster, rows, answer, settings, random.Random(1))


def spread_of(question: DecodeQuestion, settings: SpreadSettings = ON) -> ContextSpread:
    result = spread(question, settings)
    assert isinstance(result, ContextSpread)
    return result


def test_a_long_context_goes_to_the_least_loaded() -> None:
    held = [400_000, 10_000, 500_000, 30_000, 20_000, 600_000, 0, 300_000]
    result = spread_of(question_of(held, prompt=200_000))
    assert set(result.members) == {1, 3, 4, 6}
    assert sum(result.tokens) == 201_000
    heights = [held[at] + part for at, part in zip(result.members, result.tokens, strict=True)]
    assert max(heights) - min(heights) < 2 * 512


@given(st.lists(st.integers(0, 40), min_size=2, max_size=6), st.integers(1, 60))
def test_no_other_set_of_members_has_a_lower_level(thousands: list[int], prompt: int) -> None:
    held = [1000 * value for value in thousands]
    tokens = 1000 * prompt
    fixed = SpreadSettings(enabled=True, buckets=((10_000_000, 2),), members_max=2)
    result = spread_of(question_of(held, prompt=tokens), fixed)
    best = min(
        max(h + part for h, part in zip(pair, poured.tolist(), strict=True) if part)
        for pair in itertools.combinations(held, 2)
        if (poured := waterfill(pair, tokens + 1000, None, 512)) is not None
    )
    level = max(held[at] + part for at, part in zip(result.members, result.tokens, strict=True))
    assert level == best


def test_members_without_anything_are_none() -> None:
    """Two members are wanted, but one has so much load that the other takes all."""
    fixed = SpreadSettings(enabled=True, buckets=((10_000_000, 2),), instance_share=1.0)
    result = spread_of(question_of([0, 900_000], prompt=50_000), fixed)
    assert result.members == (0,)
    assert result.tokens == (51_000,)


def test_more_members_when_these_have_no_room() -> None:
    held = [60_000] * 8
    result = spread_of(question_of(held, prompt=199_000, capacity=100_000))
    assert len(result.members) == 6  # 40,000 free each, in blocks of 512: 39,936
    assert max(result.tokens) <= 40_000


def test_who_has_room_serves_when_the_least_loaded_have_not() -> None:
    """The load of attention and the room for KV differ: cached prefixes take only room."""
    question = question_of([0, 0, 500_000, 500_000], prompt=99_000)
    question.cluster.kv_used_tokens[question.rows] = [999_000, 999_000, 500_000, 500_000]
    fixed = SpreadSettings(enabled=True, buckets=((10_000_000, 2),), members_max=2)
    assert spread_of(question, fixed).members == (2, 3)


def test_no_room_at_all() -> None:
    result = spread(question_of([90_000, 80_000], prompt=50_000, capacity=100_000), ON)
    assert isinstance(result, NoDecode)
    assert (result.reason, result.at) == ("kv_room", 1)


def test_more_members_when_these_are_too_slow() -> None:
    """A step takes 0.02 s, and 5 ms per 100,000 tokens of a shard."""
    for tbt_s, members in ((0.031, 1), (0.026, 2), (0.0234, 4)):
        settings = SpreadSettings(
            enabled=True, buckets=((10_000_000, 1),), instance_share=1.0, exchange_s=0.0
        )
        question = question_of([0] * 8, prompt=199_000, tbt_s=tbt_s, batch=[0] * 8)
        result = spread_of(question, settings)
        assert len(result.members) == members
        assert result.tbt_s <= tbt_s


def test_too_slow_however_it_is_spread() -> None:
    result = spread(question_of([0] * 4, prompt=100_000, tbt_s=0.001), ON)
    assert isinstance(result, NoDecode)
    assert result.reason == "tbt"
    assert result.best_tbt_s == pytest.approx(0.02, rel=0.2)


def test_without_candidates_there_is_no_decode() -> None:
    result = spread(question_of([], prompt=100_000), ON)
    assert isinstance(result, NoDecode)
    assert result.reason == "no_decode"


def test_the_slowest_member_sets_the_pace_and_only_the_binding_has_one_more() -> None:
    question = question_of([0, 0], prompt=99_000, batch=[50, 10])
    result = spread_of(question)
    assert result.binding == 1
    shard = dict(zip(result.members, result.tokens, strict=True))
    steps = [0.02 + 1e-4 * 50 + 5e-8 * shard[0], 0.02 + 1e-4 * 11 + 5e-8 * shard[1]]
    assert result.tbt_s == pytest.approx(max(steps) + ON.exchange_s)
