"""What was promised to the admitted is kept when others come."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from coresupport import conductor, prompt, spec, tell

from tiffin.conductor.records import Decision, Objectives, Rejection, Role

if TYPE_CHECKING:
    from tiffin.conductor.core import Conductor

TIGHT_S = 0.030


def fleet(decode: int) -> Conductor:
    decodes = [spec(f"d{number}", Role.DECODE) for number in range(decode)]
    return conductor(spec("p", Role.PREFILL), *decodes, disaggregation={"form": "local"})


def step_s(made: Conductor, name: str) -> float:
    """A decode step of all who were placed on an instance."""
    c, row = made.cluster, made.cluster.row(name)
    return float(c.d0[row] + c.d1[row] * c.batch[row] + c.d2[row] * c.context_tokens[row])


def placed(made: Conductor, name: str, now: float, **more: object) -> Decision | Rejection:
    outcome = made.schedule(prompt(name, **more), now)
    if isinstance(outcome, Decision):
        tell(made, name, "prefill_done", "first_token", now=now)
    return outcome


def test_who_asks_for_nothing_does_not_break_what_another_was_promised() -> None:
    """Sixty who have no objective, after one who has: without its promise the step would be of
    38 ms."""
    made = fleet(1)
    assert isinstance(placed(made, "tight", 0.0, objectives=Objectives(tbt_s=TIGHT_S)), Decision)
    outcomes = [placed(made, f"r{number}", 1.0, blocks=64) for number in range(60)]
    refused = [one for one in outcomes if isinstance(one, Rejection)]
    assert 0 < len(refused) < 60
    assert step_s(made, "d0") <= TIGHT_S
    last = refused[-1]
    assert last.reason == "tbt"
    assert "that promised to others of 0.03 s" in last.message
    assert last.terms["tbt_promised_s"] == TIGHT_S
    # Once it has ended, nobody is refused for it.
    tell(made, "tight", "finished", now=2.0)
    assert isinstance(placed(made, "after", 2.0, blocks=64), Decision)


def test_another_instance_is_preferred_to_one_with_a_tight_promise() -> None:
    made = fleet(2)
    tight = placed(made, "tight", 0.0, objectives=Objectives(tbt_s=TIGHT_S))
    assert isinstance(tight, Decision)
    outcomes = [placed(made, f"r{number}", 1.0, blocks=32) for number in range(50)]
    assert all(isinstance(one, Decision) for one in outcomes)
    assert step_s(made, tight.decode) <= TIGHT_S
    assert step_s(made, "d1" if tight.decode == "d0" else "d0") > TIGHT_S


@pytest.mark.parametrize(("priority", "promised_s"), [("high", 0.12), ("low", 0.08)])
def test_a_class_is_promised_what_it_was_admitted_by(priority: str, promised_s: float) -> None:
    made = conductor(spec("m"), admission={"class_scales": {"high": 1.2, "low": 0.8}})
    made.schedule(prompt("r", priority=priority, objectives=Objectives(tbt_s=0.1)), 0.0)
    assert made.horizon.promised.tightest_of(0) == pytest.approx(promised_s)


def test_a_request_that_is_given_up_leaves_no_promise() -> None:
    made = fleet(1)
    made.schedule(prompt("tight", objectives=Objectives(tbt_s=TIGHT_S)), 0.0)
    tell(made, "tight", "cancelled", now=1.0)
    assert isinstance(made.schedule(prompt("r", blocks=200), 1.0), Decision)
    made.schedule(prompt("lost", objectives=Objectives(tbt_s=TIGHT_S)), 2.0)
    made.tick(200.0)
    row = made.cluster.row("d0")
    assert made.horizon.promised.tightest_of(row) == float("inf")


def test_a_longer_prefill_earns_no_room() -> None:
    """There is none now, and there will be when the long prompt's prefill is done, for all: a short
    prompt that comes meanwhile would have to be refused for it."""
    made = conductor(spec("p", Role.PREFILL), spec("d", Role.DECODE, kv_capacity_tokens=140_000))
    ends_soon = made.schedule(prompt("r", blocks=128, output_tokens=100), 0.0)
    assert isinstance(ends_soon, Decision)
    tell(made, "r", "prefill_done", "handed_over", "first_token", now=20.0)
    refused = made.schedule(prompt("long", blocks=140), 20.0)
    assert isinstance(refused, Rejection)
    assert refused.reason == "kv_room"
    assert refused.predicted_ttft_s > 100 * step_s(made, "d")
    assert isinstance(made.schedule(prompt("short", blocks=64), 20.0), Decision)
    tell(made, "r", "finished", now=24.0)
    assert isinstance(made.schedule(prompt("later", blocks=140), 24.0), Decision)


@pytest.mark.parametrize("mode", ["off", "baseline", "early", "predictive"])
def test_the_margin_learns_from_those_that_were_admitted_by_it(mode: str) -> None:
    """Who is admitted whatever is predicted is late because nobody is refused: the prediction may
    be right."""
    made = conductor(spec("p", Role.PREFILL), spec("d", Role.DECODE), admission={"mode": mode})
    before = made.margins.ttft.factor
    late = prompt("late", objectives=Objectives(ttft_s=5.0))
    assert isinstance(made.schedule(late, 0.0), Decision)
    tell(made, "late", "prefill_done", "first_token", now=9.0)
    assert (made.margins.ttft.factor > before) == (mode == "predictive")
