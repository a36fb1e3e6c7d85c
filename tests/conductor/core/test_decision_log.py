"""The decision log: what became of requests, and what is kept for longer than the latest."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from coresupport import conductor, prompt, spec, tell

from tiffin.conductor.core.decision_log import BURST, KEPT_MAX, KEPT_S
from tiffin.conductor.records import Decision, Objectives, Rejection, Role

if TYPE_CHECKING:
    from tiffin.conductor.core import Conductor

IMPOSSIBLE = Objectives(ttft_s=1e-6)


def busy(log_max: int = 1) -> Conductor:
    """A conductor whose log has room for one decision, as a busy fleet's for some seconds."""
    two = spec("p", Role.PREFILL), spec("d", Role.DECODE)
    return conductor(*two, core={"log_max": log_max})


def run(made: Conductor, name: str, at: float, *, late_s: float = 0.0, **more: object) -> Decision:
    """Place a request and answer it with eleven tokens, as predicted or `late_s` late."""
    decision = made.schedule(prompt(name, **more), at)
    assert isinstance(decision, Decision)
    first = at + decision.predicted_ttft_s + late_s
    tell(made, name, "first_token", now=first)
    last = first + 10 * decision.predicted_tbt_s
    tell(made, name, "tokens", now=last, tokens=10)
    tell(made, name, "finished", now=last)
    return decision


def test_what_became_of_it_is_told_beside_what_was_predicted() -> None:
    made = busy()
    decision = made.schedule(prompt("r"), 1.0)
    assert isinstance(decision, Decision)
    seen = made.log.became(decision)
    assert seen is not None
    assert (seen.end, seen.ttft_s, seen.output_tokens) == ("", None, 0)
    tell(made, "r", "first_token", now=1.5)
    tell(made, "r", "tokens", now=2.5, tokens=10)
    seen = made.log.became(decision)
    assert seen is not None
    assert (seen.end, seen.ttft_s, seen.tbt_s, seen.output_tokens) == ("", 0.5, 0.1, 11)
    tell(made, "r", "finished", now=2.6)
    seen = made.log.became(decision)
    assert seen is not None
    assert (seen.end, seen.ended_at, seen.output_tokens) == ("finished", 2.6, 11)


@pytest.mark.parametrize(
    ("kind", "late_s", "objectives"),
    [
        ("missed", 1.0, Objectives(ttft_s=100.0, tbt_s=1e-3)),
        ("mispredicted", 60.0, Objectives()),
        ("", 0.0, Objectives()),
    ],
)
def test_what_somebody_will_ask_about_outlives_the_latest(
    kind: str, late_s: float, objectives: Objectives
) -> None:
    made = conductor(
        spec("p", Role.PREFILL), spec("d", Role.DECODE),
        core={"log_max": 1}, admission={"mode": "off"},
    )  # fmt: skip
    first = run(made, "r", 1.0, late_s=late_s, objectives=objectives)
    for number in range(5):
        run(made, f"other-{number}", 100.0 + number * 50)
    assert made.decision("r") == (first if kind else None)
    if kind:
        assert made.log.kept(kind, 10) == [first]
        seen = made.log.became(first)
        assert seen is not None
        assert seen.ttft_s == pytest.approx(first.predicted_ttft_s + late_s)


def test_who_was_asked_about_can_be_asked_about_again() -> None:
    made = busy()
    decision = made.schedule(prompt("r"), 1.0)
    assert made.log.asked("r", 1.1) is decision
    for number in range(5):
        run(made, f"other-{number}", 10.0 + number)
    tell(made, "r", "first_token", "finished", now=30.0)
    assert made.log.asked("r", 40.0) is decision
    assert isinstance(decision, Decision)
    seen = made.log.became(decision)
    assert seen is not None
    assert seen.end == "finished"
    assert made.log.asked("nobody", 40.0) is None


@pytest.mark.slow
def test_of_an_hour_of_rejections_a_sample_of_all_of_it_is_kept() -> None:
    made = busy(log_max=100)
    for second in range(round(KEPT_S)):
        for number in range(2):
            asked = prompt(f"r-{second}-{number}", objectives=IMPOSSIBLE)
            assert isinstance(made.schedule(asked, float(second)), Rejection)
    kept = [one.decided_at for one in reversed(made.log.kept("ttft", KEPT_MAX))]
    assert BURST < len(kept) <= KEPT_MAX
    assert kept[0] < 0.25 * KEPT_S
    gaps = [b - a for a, b in itertools.pairwise(kept)]
    assert max(gaps) < 0.01 * KEPT_S, "no part of the hour is missing"


def test_a_few_are_kept_all() -> None:
    made = busy()
    for number in range(BURST):
        made.schedule(prompt(f"r{number}", objectives=IMPOSSIBLE), 1.0)
    assert len(made.log.kept("ttft", KEPT_MAX)) == BURST


def test_the_log_is_bounded() -> None:
    made = busy(log_max=10)
    for number in range(3 * KEPT_MAX):
        made.schedule(prompt(f"r{number}", objectives=IMPOSSIBLE), 10.0 * number)
    log = made.log
    assert len(log.kept("ttft", 1 << 30)) == KEPT_MAX
    assert len(log._by_id._names) <= KEPT_MAX + 10
    assert made.decision("r0") is None
    assert made.decision(f"r{2 * KEPT_MAX + 5}") is not None


def test_of_one_request_the_last_outcome_counts() -> None:
    """Also at the same time, and once both have left the latest."""
    made = busy()
    assert isinstance(made.schedule(prompt("r", objectives=IMPOSSIBLE), 1.0), Rejection)
    decision = made.schedule(prompt("r"), 1.0)
    assert made.decision("r") is decision
    made.log.asked("r", 1.0)
    run(made, "other", 5.0)
    assert made.decision("r") is decision


class TestWhatIsLeftOut:
    def test_is_counted_by_why(self) -> None:
        names = [f"p{number}" for number in range(6)]
        made = conductor(
            *(spec(name, Role.PREFILL) for name in names), spec("d", Role.DECODE),
            core={"explained_max": 2},
        )  # fmt: skip
        made.drain("p5", 0.0)
        decision = made.schedule(replace(prompt("r"), exclude=("p4",)), 1.0)
        assert isinstance(decision, Decision)
        assert len(decision.candidates) == 2
        assert decision.left_out == {"draining": 1, "other_role": 1, "excluded": 1, "dearer": 2}
        assert decision.decode_left_out == {"draining": 1, "other_role": 5}
        made.cluster.assign("p5", on=True)
        decision = made.schedule(prompt("q"), 2.0)
        assert isinstance(decision, Decision)
        assert decision.left_out == {"other_role": 1, "dearer": 4}

    def test_a_rejection_shows_its_decode_candidates(self) -> None:
        made = busy()
        rejection = made.schedule(prompt("r", objectives=Objectives(tbt_s=1e-6)), 1.0)
        assert isinstance(rejection, Rejection)
        assert [one.instance for one in rejection.decode_candidates] == ["d"]
        assert [one.instance for one in rejection.candidates] == ["p"]
        assert rejection.decode_left_out == {"other_role": 1}
        assert rejection.output_source == "default"
