"""What is asked, and what an instance has room for."""

from __future__ import annotations

import random

import numpy as np
import pytest
from planningsupport import profile, stream

from tiffin.bench.planning.families import family
from tiffin.bench.planning.memory import MODELS, kv_room
from tiffin.bench.planning.workload import Fixed, Quantiles, from_trace, poisson
from tiffin.bench.reproduce.setups.distserve_inputs import APPLICATIONS, TOKENS_MAX, USABLE_BYTES
from tiffin.bench.traces.trace import Trace, TraceRequest
from tiffin.conductor.cost import latency_profiles
from tiffin.conductor.errors import InvalidRequest


def test_quantiles_have_the_mean_of_their_straight_lines() -> None:
    length = Quantiles.deciles(*range(0, 1100, 100))
    assert length.mean == pytest.approx(500)
    dice = random.Random(1)
    assert np.mean([length.tokens(dice) for _ in range(4000)]) == pytest.approx(500, rel=0.03)


@pytest.mark.parametrize("app", APPLICATIONS, ids=lambda app: app.name)
def test_data_sets_have_the_published_means(app: object) -> None:
    """DistServe, OSDI '24, figure 7."""
    published = {"chat": (755.5, 200.3), "code": (171.3, 98.2), "summaries": (1738.3, 90.7)}
    assert app in APPLICATIONS
    app = APPLICATIONS[APPLICATIONS.index(app)]
    prompt, answer = published[app.name.partition(",")[0]]
    assert app.prompt.mean == pytest.approx(prompt, rel=0.01)
    assert app.answer.mean == pytest.approx(answer, rel=0.05)
    drawn = app.workload(3000, 1)
    assert (drawn.prompt_tokens + drawn.output_tokens).max() < TOKENS_MAX


def test_the_same_seed_draws_the_same() -> None:
    one, same, other = (poisson("x", Fixed(5), Fixed(2), 50, seed) for seed in (1, 1, 2))
    assert np.array_equal(one.arrivals_s, same.arrivals_s)
    assert not np.array_equal(one.arrivals_s, other.arrivals_s)


def test_faster_longer_and_a_share() -> None:
    one = stream(400)
    assert one.faster(3).rate == pytest.approx(3 * one.rate)
    assert one.longer(1.2).prompt_tokens.tolist() == [1200] * 400
    assert len(one.share_of(4)) == 100


def test_a_trace_s_prompts_are_cached_as_far_as_memory_goes() -> None:
    asked = [TraceRequest(float(at), 2048, 5, (0, 1, 2, 3)) for at in range(3)]
    trace = Trace("test", tuple(asked))
    assert from_trace(trace, 100_000).cached_tokens.tolist() == [0, 2047, 2047]
    assert from_trace(trace, 0).cached_tokens.tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("model", "gpus", "tokens"),
    [
        *(("opt-13b", 1, 66_144), ("opt-13b", 2, 163_008), ("opt-13b", 4, 356_752)),
        *(("opt-66b", 2, 11_600), ("opt-66b", 4, 78_512), ("opt-66b", 8, 212_320)),
    ],
)
def test_room_for_kv_is_what_distserve_counted(model: str, gpus: int, tokens: int) -> None:
    """`simdistserve/estimators/profile_data/max_num_tokens.csv`."""
    assert MODELS[model].kv_tokens(gpus, USABLE_BYTES) == pytest.approx(tokens, rel=0.03)


def test_what_does_not_fit_has_no_room() -> None:
    assert MODELS["opt-66b"].kv_tokens(1, USABLE_BYTES) == 0


def test_every_shipped_profile_s_size_is_known() -> None:
    rooms = {name: kv_room(latency_profiles.load(name)) for name in latency_profiles.names()}
    assert min(rooms.values()) > 0
    assert rooms["llama-3.1-70b.h100.tp8.vllm"] > rooms["llama-3.1-70b.h100.tp4.vllm"]


def test_an_unknown_size_is_said() -> None:
    with pytest.raises(InvalidRequest, match="no sizes are known of Test"):
        kv_room(profile())


@pytest.mark.parametrize(
    ("asked", "degrees"),
    [
        (["llama-3.1-70b.h100.vllm"], [2, 4, 8]),
        (["llama-3.1-70b.h100.tp4.vllm"], [4]),
        (["llama-3.1-70b.h100.tp8.vllm,llama-3.1-70b.h100.tp2.vllm"], [2, 8]),
        (["opt-66b.*"], [2, 3, 4, 8]),
    ],
)
def test_a_family_is_named_in_several_ways(asked: list[str], degrees: list[int]) -> None:
    assert [one.tensor_parallel for one in family(asked)] == degrees


@pytest.mark.parametrize(
    ("asked", "said"),
    [("gpt-5", "no profile 'gpt-5'"), ("llama-3.1-70b.*.tp8.vllm", "one kind of GPU")],
)
def test_a_family_is_one_model_on_one_kind_of_gpu(asked: str, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        family([asked])
