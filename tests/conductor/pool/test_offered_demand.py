"""What counts as demand: every request that is offered, once."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from coresupport import BLOCK, conductor, prompt, spec, tell

from tiffin.conductor.pool.offered_demand import REFUSED_MAX, RETRY_S, OfferedDemand
from tiffin.conductor.records import Decision, Objectives, Rejection, Request, Role

if TYPE_CHECKING:
    from tiffin.conductor.core import Conductor
    from tiffin.conductor.pool.prompt_sums import PromptSums

IMPOSSIBLE = Objectives(ttft_s=1e-6)


NONE = Objectives()


def one(name: str, *, objectives: Objectives = NONE) -> Request:
    return replace(prompt(name), objectives=objectives)


def offered(made: Conductor, model: str = "m") -> PromptSums:
    """What the planner's meter has counted."""
    return made.steering._planned[model].meter.close(1e6).prompts


def two_instances() -> Conductor:
    return conductor(spec("p", Role.PREFILL), spec("d", Role.DECODE))


def test_who_is_refused_is_demand_too() -> None:
    """Of two hundred of whom one fits, two hundred count."""
    made = two_instances()
    for number in range(200):
        request = one(f"r{number}", objectives=IMPOSSIBLE if number else Objectives())
        outcome = made.schedule(request, number / 10)
        assert isinstance(outcome, Rejection if number else Decision)
    counted = offered(made, request.model)
    assert counted.requests == 200
    assert counted.prompt_tokens == counted.computed == 200 * (8 * BLOCK + 10)


@pytest.mark.parametrize("again", ["r", "another-id"])
@pytest.mark.parametrize("served", [True, False])
def test_who_comes_again_counts_once(again: str, served: bool) -> None:
    made = two_instances()
    assert isinstance(made.schedule(one("r", objectives=IMPOSSIBLE), 1.0), Rejection)
    last = replace(one("r", objectives=Objectives() if served else IMPOSSIBLE), id=again)
    for number in range(1, 5):
        made.schedule(last, 1.0 + number)
    assert offered(made, last.model).requests == 1


def test_who_comes_again_after_long_is_new() -> None:
    made = two_instances()
    made.schedule(one("r", objectives=IMPOSSIBLE), 1.0)
    made.schedule(one("r", objectives=IMPOSSIBLE), 2.0 + RETRY_S)
    assert offered(made, one("r").model).requests == 2


def test_the_same_prompt_after_an_answer_is_new() -> None:
    made = two_instances()
    for at in (1.0, 2.0):
        made.schedule(one("r"), at)
        tell(made, "r", "first_token", "finished", now=at + 0.5)
    assert offered(made, one("r").model).requests == 2


def test_who_is_placed_anew_counts_once() -> None:
    made = conductor(spec("a"), spec("b"))
    first = made.schedule(one("r"), 1.0)
    assert isinstance(first, Decision)
    made.remove(first.decode, 2.0)
    second = made.schedule(one("r"), 3.0)
    assert isinstance(second, Decision)
    assert second.decode != first.decode
    assert offered(made, one("r").model).requests == 1


def test_it_remembers_a_bounded_number() -> None:
    demand = OfferedDemand()
    for number in range(REFUSED_MAX + 1):
        demand.counted(Request(f"r{number}", "m", 10), 0.0)
    assert demand.is_new(Request("r0", "m", 10), 1.0)
    assert not demand.is_new(Request("r1", "m", 10), 1.0)


def test_it_forgets_who_comes_too_late_to_be_known() -> None:
    demand = OfferedDemand()
    for number in range(1000):
        demand.counted(Request(f"r{number}", "m", 10), float(number))
    assert len(demand) <= RETRY_S + 1
    assert not demand.is_new(Request("r999", "m", 10), 1000.0)
