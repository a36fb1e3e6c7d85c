"""The source of an answer's predicted length, and exact quantiles."""

from __future__ import annotations

import random
from collections import deque

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiffin.bench.sim.cluster.length_oracle import TETRIINFER_ACCURACY, LengthOracle
from tiffin.conductor.core.settings import Settings, patched
from tiffin.conductor.decode.length_predictor import LengthSettings
from tiffin.conductor.decode.output_length import Lengths
from tiffin.conductor.errors import InvalidRequest
from tiffin.conductor.records import TOKENS_MAX, Request


def request(
    output_class: str = "chat",
    *,
    model: str = "m",
    prompt_tokens: int = 10,
    says: int | None = None,
    limit: int | None = None,
) -> Request:
    return Request(
        id="r",
        model=model,
        prompt_tokens=prompt_tokens,
        output_class=output_class,
        output_tokens=says,
        output_tokens_max=limit,
    )


def taught(lengths: Lengths, tokens: list[int], of: Request) -> Lengths:
    for count in tokens:
        lengths.observe(of, count)
    return lengths


def test_who_is_believed() -> None:
    """The caller, else the class, else all answers of the model, else the default."""
    settings = LengthSettings(observations_min=4, quantile=0.5, default_tokens=77)
    lengths = Lengths(settings)
    assert lengths.predict(request()) == (77, "default")
    taught(lengths, [10, 10, 10], request("chat"))
    assert lengths.predict(request()) == (77, "default"), "three answers are not enough"
    taught(lengths, [900, 900], request("report"))
    assert lengths.predict(request("chat")) == (10, "model")
    taught(lengths, [12], request("chat"))
    assert lengths.predict(request("chat")) == (10, "class")
    assert lengths.predict(request("")) == (10, "model")
    assert lengths.predict(request("chat", model="another")) == (77, "default")
    assert lengths.predict(request("chat", says=500)) == (500, "caller")


def test_nothing_is_predicted_beyond_the_limit_of_the_request() -> None:
    lengths = Lengths(LengthSettings(default_tokens=300))
    assert lengths.predict(request(limit=100)).tokens == 100
    assert lengths.predict(request(says=500, limit=100)).tokens == 100
    assert lengths.predict(request(says=0)).tokens == 1
    assert lengths.predict(request(says=2 * TOKENS_MAX)).tokens == TOKENS_MAX


def test_heavy_is_more_than_the_threshold() -> None:
    lengths = Lengths()
    assert not lengths.heavy(128)
    assert lengths.heavy(129)


def test_cancelled_requests_teach_nothing() -> None:
    lengths = taught(Lengths(), [0] * 100, request())
    assert len(lengths) == 0
    assert lengths.predict(request()).source == "default"


@pytest.mark.parametrize("predictor", ["quantile", "buckets"])
@given(
    st.lists(st.integers(1, 5000), min_size=1, max_size=60),
    st.sampled_from([0.0, 0.1, 0.5, 0.7, 0.95, 1.0]),
    st.integers(1, 40),
)
def test_a_class_is_the_quantile_of_its_latest_answers(
    predictor: str, tokens: list[int], quantile: float, window: int
) -> None:
    settings = LengthSettings(
        predictor=predictor, quantile=quantile, window=window, observations_min=1
    )
    lengths = taught(Lengths(settings), tokens, request())
    latest = deque(tokens, maxlen=window)
    expected = int(np.quantile(latest, quantile, method="inverted_cdf"))
    assert lengths.predict(request()) == (expected, "class")


def test_callers_can_not_fill_the_memory_with_names() -> None:
    lengths = Lengths(LengthSettings(predictor="quantile", classes_max=10, observations_min=1))
    for number in range(1000):
        lengths.observe(request(f"class-{number}"), 5)
    assert len(lengths) == 10
    assert lengths.predict(request("class-999")).source == "class"
    assert lengths.predict(request("class-0")).source == "model"


def test_settings_can_change_at_any_time() -> None:
    lengths = Lengths(LengthSettings(window=100, observations_min=1, quantile=1.0))
    dice = random.Random(1)
    taught(lengths, [dice.randrange(500, 1000) for _ in range(100)], request())
    taught(lengths, [3, 4, 5], request())
    assert lengths.predict(request()).tokens >= 500
    lengths.configure(LengthSettings(window=3, observations_min=1, quantile=1.0))
    assert lengths.predict(request()) == (5, "class")
    lengths.configure(LengthSettings(classes_max=1))
    assert len(lengths) == 1


def test_bounds_are_checked_where_settings_come_in() -> None:
    with pytest.raises(msgspec.ValidationError, match="quantile"):
        msgspec.json.decode(b'{"quantile": 1.5}', type=LengthSettings)
    with pytest.raises(msgspec.ValidationError, match="unknown field"):
        msgspec.json.decode(b'{"quantil": 0.5}', type=LengthSettings)


def test_buckets_tell_applications_apart_that_name_no_class() -> None:
    """Chats with short prompts and long answers, and searches the other way round."""
    lengths = {name: Lengths(LengthSettings(predictor=name)) for name in ("quantile", "buckets")}
    dice = random.Random(1)
    for _ in range(200):
        chat = dice.random() < 0.5
        prompt_tokens = dice.randrange(100, 120) if chat else dice.randrange(9_000, 10_000)
        answer = dice.randrange(500, 600) if chat else dice.randrange(20, 30)
        for one in lengths.values():
            one.observe(request("", prompt_tokens=prompt_tokens), answer)
    search = request("", prompt_tokens=9_500)
    assert lengths["quantile"].predict(search).tokens >= 500
    assert lengths["buckets"].predict(search).tokens < 30
    unseen = request("", prompt_tokens=100_000)
    assert lengths["buckets"].predict(unseen) == lengths["quantile"].predict(unseen)


def test_a_predictor_is_chosen_by_name_and_another_may_be_given() -> None:
    with pytest.raises(InvalidRequest, match=r"guess.*buckets, quantile"):
        Lengths(LengthSettings(predictor="guess"))
    with pytest.raises(InvalidRequest, match="predictor"):
        patched(Settings(), {"lengths": {"predictor": "guess"}})
    lengths = Lengths()
    lengths.use(LengthOracle(lambda request: 123, seed=0))
    assert lengths.predict(request()) == (123, "oracle")
    assert lengths.predict(request(says=5)) == (5, "caller")
    assert lengths.predict(request(limit=50)) == (50, "oracle")


def test_an_oracle_may_be_wrong_as_often_as_a_model() -> None:
    """By one bucket of 200 tokens, and always in the same way for the same request."""
    oracle = LengthOracle(
        lambda request: request.prompt_tokens, 0, bucket_tokens=200, accuracy=TETRIINFER_ACCURACY
    )
    asked = [Request(f"r{number}", "m", 1 + 7 * number) for number in range(2000)]
    off = [oracle.predict(one).tokens // 200 - -(-one.prompt_tokens // 200) for one in asked]
    assert {abs(buckets) for buckets in off} == {0, 1}
    assert off.count(0) / len(off) == pytest.approx(TETRIINFER_ACCURACY, abs=0.02)
    assert [oracle.predict(one) for one in asked] == [oracle.predict(one) for one in asked]
