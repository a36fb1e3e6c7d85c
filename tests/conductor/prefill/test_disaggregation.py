"""When a prompt is prefilled on another instance: edge cases of the rule and of the score."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiffin.conductor.prefill.disaggregation import (
    VOTES_MAX,
    DisaggregationSettings,
    PredictedWays,
    Situation,
    Vote,
    delay_weight,
    layerwise,
    place,
    score,
)
from tiffin.conductor.records import Objectives

RULE = DisaggregationSettings(form="rule")
SCORE = DisaggregationSettings(form="score")


def situation(tokens: int, cached: int = 0, queue: int = 0, decodes: int = 0) -> Situation:
    return Situation(tokens, cached, queue, decodes)


@pytest.mark.parametrize(
    ("asked", "remote", "reason"),
    [
        (situation(256), True, "long"),
        (situation(255), False, "short"),
        (situation(10_000, cached=9_800), False, "short"),  # most of it is cached
        (situation(256, queue=9), True, "long"),
        (situation(256, queue=10), False, "queue"),
        (situation(64, decodes=8), True, "busy"),
        (situation(63, decodes=8), False, "short"),
        (situation(64, decodes=7), False, "short"),
        (situation(5_000, queue=50, decodes=8), True, "busy"),
        (situation(512, cached=512), False, "short"),  # its last token is computed anyway
    ],
)
def test_the_rule(asked: Situation, remote: bool, reason: str) -> None:
    placement = place(RULE, asked)
    assert (placement.remote, placement.reason, placement.score) == (remote, reason, None)


@given(st.integers(1, 2_000), st.integers(0, 2_000), st.integers(0, 20))
def test_dynamos_own_rule_is_a_setting(tokens: int, cached: int, queue: int) -> None:
    """Remote if and only if (prefill_len - prefix_hit) > max_local and queue < max_queue."""
    dynamo = DisaggregationSettings(remote_tokens_min=513, queue_max=2, busy_decodes=None)
    expected = tokens - cached > 512 and queue < 2
    assert place(dynamo, situation(tokens, cached, queue, decodes=99)).remote is expected


@pytest.mark.parametrize(
    ("asked", "value", "remote"),
    [
        (situation(257), 0.7, True),
        (situation(256), 0.0, False),  # a vote is cast above its threshold
        (situation(257, queue=11), 0.4, False),
        (situation(257, queue=10), 0.7, True),
        (situation(10, queue=11), -0.3, False),
    ],
)
def test_the_published_example_of_a_score(asked: Situation, value: float, remote: bool) -> None:
    placement = place(SCORE, asked)
    assert (placement.remote, placement.reason) == (remote, "score")
    assert placement.score == pytest.approx(value)


def test_a_score_of_exactly_the_least_stays_local() -> None:
    vote = Vote(metric="decode_load", threshold=3, action="prefer_remote", weight=0.5)
    options = DisaggregationSettings(form="score", votes=(vote,))
    assert not place(options, situation(9, decodes=4)).remote
    assert score((vote,), situation(9, decodes=3)) == 0


@pytest.mark.parametrize("form", ["remote", "local"])
def test_it_can_be_set(form: str) -> None:
    options = msgspec.convert({"form": form}, DisaggregationSettings)
    for asked in (situation(1), situation(100_000, queue=99, decodes=99)):
        assert place(options, asked).remote is (form == "remote")


@given(
    st.sampled_from([RULE, SCORE]),
    st.integers(1, 10_000),
    st.integers(0, 10_000),
    st.integers(0, 30),
    st.integers(0, 30),
    st.integers(0, 500),
)
def test_longer_never_means_local(
    options: DisaggregationSettings, tokens: int, cached: int, queue: int, decodes: int, more: int
) -> None:
    if place(options, situation(tokens, cached, queue, decodes)).remote:
        assert place(options, situation(tokens + more, cached, queue, decodes)).remote


def test_long_caches_move_layer_by_layer() -> None:
    assert [layerwise(RULE, tokens) for tokens in (0, 511, 512, 100_000)] == [0, 0, 1, 1]


@pytest.mark.parametrize(
    "wrong",
    [
        {"form": "sometimes"},
        {"queue_max": -1},
        {"remote_prefill_min_score": float("nan")},
        {"votes": [{"metric": "mood", "threshold": 1, "action": "prefer_local", "weight": 1}]},
        {"votes": [msgspec.to_builtins(RULE.votes[0])] * (VOTES_MAX + 1)},
        {"max_local_prefill_length": 512},
    ],
)
def test_nonsense_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(wrong, DisaggregationSettings)


@pytest.mark.parametrize(
    ("ways", "remote", "reason"),
    [
        (PredictedWays(local_s=1.0, remote_s=0.5), True, "predicted"),
        (PredictedWays(local_s=0.5, remote_s=1.0), False, "predicted"),
        (PredictedWays(local_s=1.0, remote_s=1.04), True, "long"),
        (PredictedWays(local_s=0.0, remote_s=0.0), True, "long"),
    ],
)
def test_predicted_seconds_decide_and_the_rule_between_equals(
    ways: PredictedWays, remote: bool, reason: str
) -> None:
    placement = place(DisaggregationSettings(), situation(256), ways)
    assert (placement.remote, placement.reason) == (remote, reason)
    assert (placement.local_s, placement.remote_s) == (ways.local_s, ways.remote_s)


def test_a_delay_counts_as_its_share_of_what_there_is_to_spare() -> None:
    """Of 100 tokens at 30 ms each, steps of 20 ms leave a second: as much as the first token has.
    With steps of 29 ms a delay is ten times as bad; with none to spare, as bad as it gets."""
    settings, objectives = DisaggregationSettings(), Objectives(ttft_s=1.0, tbt_s=0.03)

    def weight(step_s: float) -> float:
        return delay_weight(settings, objectives, step_s, 100)

    assert weight(0.02) == pytest.approx(1.0)
    assert weight(0.029) == pytest.approx(10.0)
    assert weight(0.03) == weight(0.2) * 0.2 / 0.03 == pytest.approx(1.0 / 0.03)
    assert delay_weight(settings, Objectives(tbt_s=0.03), 0.02, 100) == 1.0
    assert delay_weight(DisaggregationSettings(delay_weight=0.1), Objectives(), 0.02, 100) == 0.1
