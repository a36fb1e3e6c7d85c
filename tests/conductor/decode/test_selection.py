"""The choice of a decode instance, against a reference of plain loops."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiffin.conductor.decode.selection import (
    DecodeChoice,
    DecodeQuestion,
    DecodeSettings,
    NoDecode,
    choose,
    choose_only,
)
from tiffin.conductor.records import InstanceSpec, Objectives, Request, Role
from tiffin.conductor.state.instance_table import Cluster

# LLaMA3-70B on eight A800, from Mooncake's figures; the last three: d0 s, d1 s per request, d2 s
# per token.
LATENCY = (0.0982, 1.0428e-4, 9.229e-10, 0.0262, 1.4e-4, 3.6e-8)


@dataclass(frozen=True)
class Instance:
    batch: int = 0
    context: int = 0
    used: int = 0
    capacity: int = 1_000_000
    batch_max: int = 256
    heavy: int = 0
    slower: float = 1.0


def cluster_of(instances: list[Instance]) -> Cluster:
    cluster = Cluster()
    for number, one in enumerate(instances):
        spec = InstanceSpec(
            id=f"decode-{number}",
            model="m",
            role=Role.DECODE,
            profile="p",
            kv_capacity_tokens=one.capacity,
            batch_max=one.batch_max,
        )
        latency = (*LATENCY[:3], *(one.slower * part for part in LATENCY[3:]))
        row = cluster.register(spec, latency, 0.0)
        cluster.batch[row], cluster.context_tokens[row] = one.batch, one.context
        cluster.kv_used_tokens[row], cluster.heavy[row] = one.used, one.heavy
    return cluster


def question_of(
    instances: list[Instance],
    *,
    prompt: int = 8000,
    answer: int = 200,
    tbt_s: float | None = None,
    settings: DecodeSettings | None = None,
    heavy: bool = False,
    seed: int = 1,
) -> DecodeQuestion:
    cluster = cluster_of(instances)
    request = Request(id="r", model="m", prompt_tokens=prompt, objectives=Objectives(tbt_s=tbt_s))
    return DecodeQuestion(
        request=request,
        cluster=cluster,
        rows=cluster.rows_for("m", prefill=False),
        output_tokens=answer,
        settings=settings or DecodeSettings(),
        dice=random.Random(seed),
        heavy=heavy,
    )


def chosen(question: DecodeQuestion) -> DecodeChoice:
    choice = choose(question)
    assert isinstance(choice, DecodeChoice)
    return choice


def refused(question: DecodeQuestion) -> NoDecode:
    refusal = choose(question)
    assert isinstance(refusal, NoDecode)
    return refusal


# -- the reference ---------------------------------------------------------------------------------


def plain_tbt_s(one: Instance, prompt: int, answer: int, settings: DecodeSettings) -> float:
    context = one.context + prompt + settings.growth_share * answer
    d0, d1, d2 = (one.slower * part for part in LATENCY[3:])
    return d0 + d1 * (one.batch + 1) + d2 * context


def plain_fits(one: Instance, prompt: int, answer: int, settings: DecodeSettings) -> bool:
    usable = one.capacity * (1 - settings.reserve_share)
    return one.used + prompt + answer <= usable and one.batch < one.batch_max


def plain_alike(one: Instance, heavy: bool) -> float:
    return (one.heavy if heavy else max(one.batch - one.heavy, 0)) / one.batch_max


instances = st.builds(
    Instance,
    batch=st.integers(0, 40),
    context=st.integers(0, 400_000),
    used=st.integers(0, 200_000),
    capacity=st.sampled_from([50_000, 100_000, 200_000, 400_000]),
    batch_max=st.sampled_from([20, 40, 256]),
    heavy=st.integers(0, 20),
    slower=st.sampled_from([0.5, 1.0, 2.0]),
)


@given(
    st.lists(instances, min_size=1, max_size=12),
    st.integers(1, 100_000),
    st.integers(1, 20_000),
    st.sampled_from([None, 0.03, 0.05, 0.1]),
    st.sampled_from([0.0, 0.05, 0.3]),
    st.booleans(),
)
def test_the_choice_is_the_one_of_plain_loops(
    all_of_them: list[Instance],
    prompt: int,
    answer: int,
    tbt_s: float | None,
    near: float,
    heavy: bool,
) -> None:
    settings = DecodeSettings(near_share=near)
    question = question_of(
        all_of_them, prompt=prompt, answer=answer, tbt_s=tbt_s, settings=settings, heavy=heavy
    )
    times = [plain_tbt_s(one, prompt, answer, settings) for one in all_of_them]
    fits = [plain_fits(one, prompt, answer, settings) for one in all_of_them]
    able = [at for at, fit in enumerate(fits) if fit and (tbt_s is None or times[at] <= tbt_s)]
    result = choose(question)
    np.testing.assert_allclose(result.tbt_s, times)
    if isinstance(result, NoDecode):
        assert not able
        assert result.reason == ("tbt" if any(fits) else "kv_room")
        assert result.best_tbt_s == pytest.approx(times[result.at])
        if any(fits):
            assert times[result.at] == pytest.approx(
                min(time for time, fit in zip(times, fits, strict=True) if fit)
            )
        return
    assert result.at in able
    best = min(times[at] for at in able)
    assert times[result.at] <= best * (1 + near) * (1 + 1e-12)
    clearly_near = [at for at in able if times[at] <= best * (1 + near) * (1 - 1e-12)]
    mine = plain_alike(all_of_them[result.at], heavy)
    assert all(mine <= plain_alike(all_of_them[at], heavy) for at in clearly_near)
    assert np.isinf(result.cost[[at for at in range(len(times)) if at not in able]]).all()


# -- time between tokens ---------------------------------------------------------------------------


def test_the_terms_explain_the_prediction() -> None:
    choice = chosen(question_of([Instance(batch=9, context=50_000), Instance(batch=3)]))
    terms = choice.terms
    np.testing.assert_allclose(
        terms["base_s"] + terms["batch_s"] + terms["context_s"], choice.tbt_s
    )
    assert terms["batch_s"][0] == pytest.approx(10 * 1.4e-4)
    assert terms["context_s"][0] == pytest.approx(3.6e-8 * (50_000 + 8000 + 100))
    assert {len(values) for values in terms.values()} == {2}


def test_a_faster_instance_may_carry_more() -> None:
    question = question_of([Instance(batch=10), Instance(batch=40, slower=0.5)])
    assert chosen(question).at == 1


def test_calibration_can_turn_the_choice() -> None:
    question = question_of([Instance(batch=10), Instance(batch=30)])
    assert chosen(question).at == 0
    question.factor = np.array([2.0, 1.0])
    choice = chosen(question)
    assert choice.at == 1
    assert choice.terms["base_s"].tolist() == pytest.approx([0.0524, 0.0262])


def test_bringing_the_context_there_counts_by_the_token_of_the_answer() -> None:
    """Half a second of transfer is negligible for a long answer, and not for a short one."""
    two = [Instance(batch=0), Instance(batch=20)]
    for answer, at in ((20, 1), (2000, 0)):
        question = question_of(two, answer=answer)
        question.move_s = np.array([0.5, 0.0])
        assert chosen(question).at == at


def test_what_will_run_counts_and_not_what_runs() -> None:
    """The caller may know the batch at the time when decode will begin."""
    question = question_of([Instance(batch=50), Instance(batch=5)])
    assert chosen(question).at == 1
    later = DecodeQuestion(
        question.request,
        question.cluster,
        question.rows,
        200,
        question.settings,
        question.dice,
        batch=np.array([2, 80]),
        context_tokens=np.array([0, 600_000]),
    )
    assert chosen(later).at == 0


def test_an_objective_that_nobody_meets() -> None:
    refusal = refused(question_of([Instance(batch=200), Instance(batch=100)], tbt_s=0.03))
    assert (refusal.reason, refusal.at) == ("tbt", 1)
    assert refusal.best_tbt_s == pytest.approx(0.0262 + 101 * 1.4e-4 + 3.6e-8 * 8100)


def test_a_margin_below_the_objective() -> None:
    one = [Instance()]
    assert chosen(question_of(one, tbt_s=0.03)).at == 0
    strict = DecodeSettings(tbt_share=0.8)
    assert refused(question_of(one, tbt_s=0.03, settings=strict)).reason == "tbt"


def test_without_admission_the_fastest_is_taken_all_the_same() -> None:
    question = question_of([Instance(batch=200), Instance(batch=100)], tbt_s=0.03)
    question.enforce = False
    assert chosen(question).at == 1


# -- room ------------------------------------------------------------------------------------------


def test_context_and_answer_must_fit_with_a_reserve() -> None:
    """Of 100,000 tokens 5 % are reserved: 95,000 may be used."""
    for used, fits in ((86_800, True), (86_801, False)):
        result = choose(question_of([Instance(used=used, capacity=100_000)]))
        assert isinstance(result, DecodeChoice) is fits


@given(instances, st.integers(1, 100_000), st.integers(1, 20_000), st.booleans())
def test_the_only_candidate_is_judged_as_among_many(
    one: Instance, prompt: int, answer: int, heavy: bool
) -> None:
    question = question_of([one], prompt=prompt, answer=answer, tbt_s=0.001, heavy=heavy)
    question.enforce = False
    among, alone = choose(question), choose_only(
        question.request, question.cluster, 0, answer, question.settings,
        batch=one.batch, context_tokens=one.context, kv_used_tokens=one.used, heavy=heavy,
    )  # fmt: skip
    assert type(alone) is type(among)
    assert alone.at == among.at == 0
    assert alone.tbt_s[0] == pytest.approx(among.tbt_s[0])
    assert {name: float(values[0]) for name, values in alone.terms.items()} == pytest.approx(
        {name: float(values[0]) for name, values in among.terms.items()}
    )
    if isinstance(alone, NoDecode) and isinstance(among, NoDecode):
        assert (alone.reason, alone.best_tbt_s) == (among.reason, pytest.approx(among.best_tbt_s))


def test_a_fast_instance_without_room_is_passed_over() -> None:
    full = Instance(used=990_000)
    choice = chosen(question_of([full, Instance(batch=100)]))
    assert choice.at == 1
    assert choice.terms["room_tokens"][0] < 0
    assert np.isinf(choice.cost[0])


def test_no_room_anywhere_names_who_has_the_most() -> None:
    refusal = refused(question_of([Instance(used=999_000), Instance(used=945_000)]))
    assert (refusal.reason, refusal.at) == ("kv_room", 1)


def test_a_full_batch_is_no_room() -> None:
    assert refused(question_of([Instance(batch=8, batch_max=8)])).reason == "kv_room"


def test_answers_still_growing_take_room() -> None:
    question = question_of([Instance(), Instance(batch=10)])
    question.growing_tokens = np.array([945_000, 0])
    assert chosen(question).at == 1


def test_without_candidates_there_is_no_decode() -> None:
    refusal = refused(question_of([]))
    assert (refusal.reason, refusal.at, refusal.best_tbt_s) == ("no_decode", -1, None)


# -- heavy and light -------------------------------------------------------------------------------


def test_among_near_equals_the_one_with_fewer_of_its_kind() -> None:
    two = [Instance(batch=20, heavy=15), Instance(batch=21, heavy=2)]
    assert chosen(question_of(two, heavy=True)).at == 1
    assert chosen(question_of(two, heavy=False)).at == 0
    exact = DecodeSettings(near_share=0.0)
    assert chosen(question_of(two, heavy=True, settings=exact)).at == 0


def test_a_slow_instance_is_not_taken_for_its_balance() -> None:
    two = [Instance(batch=20, heavy=15), Instance(batch=200)]
    assert chosen(question_of(two, heavy=True)).at == 0


def test_two_level_takes_the_lighter_of_two_and_does_not_always_meet_the_best() -> None:
    """The one light instance of ten is in a random pair with probability 1/5."""
    ten = [Instance(batch=10, heavy=5) for _ in range(9)] + [Instance(batch=10, heavy=0)]
    settings = DecodeSettings(policy="two-level")
    question = question_of(ten, settings=settings, heavy=True, seed=7)
    taken = Counter(chosen(question).at for _ in range(2000))
    assert 300 < taken[9] < 500
    assert all(taken[at] > 100 for at in range(9))


def test_two_level_with_one_candidate_left() -> None:
    question = question_of(
        [Instance(used=990_000), Instance()], settings=DecodeSettings(policy="two-level")
    )
    assert chosen(question).at == 1


@pytest.mark.parametrize("policy", ["two-level", "tbt"])
def test_heavy_and_light_decodes_are_evened_out(policy: Literal["two-level", "tbt"]) -> None:
    """A third of 900 requests is heavy. None of them ends, so any imbalance remains."""
    columns = {}
    for choices in (policy, "random"):
        cluster = cluster_of([Instance() for _ in range(10)])
        dice = random.Random(3)
        request = Request(id="r", model="m", prompt_tokens=100)
        rows = cluster.rows_for("m", prefill=False)
        for number in range(900):
            heavy = number % 3 == 0
            question = DecodeQuestion(
                request, cluster, rows, 10, DecodeSettings(policy=policy), dice, heavy=heavy
            )
            at = dice.randrange(10) if choices == "random" else chosen(question).at
            cluster.batch[rows[at]] += 1
            cluster.heavy[rows[at]] += heavy
        columns[choices] = cluster.heavy[rows].std(), cluster.batch[rows].std()
    assert columns[policy][0] < 0.5 * columns["random"][0]
    assert columns[policy][1] < 0.5 * columns["random"][1]


def test_equal_instances_are_taken_in_turn_by_the_dice() -> None:
    question = question_of([Instance() for _ in range(8)])
    taken = Counter(chosen(question).at for _ in range(800))
    assert len(taken) == 8
    assert max(taken.values()) < 200
