"""Steps before a refusal: a smaller model, a cut of the answer, best effort, each said aloud."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean
from typing import TYPE_CHECKING

import pytest
from coresupport import conductor, nothing_is_promised, prompt, spec, tell

from tiffin.bench.sim.cluster.elastic_cluster import (
    MODEL,
    SMALLER_MODEL,
    ElasticOptions,
    simulate_elastic,
)
from tiffin.bench.traces.phases import Phase, RequestKind, in_phases
from tiffin.conductor.admission.degradation import Step, after
from tiffin.conductor.core.settings import Settings, patched
from tiffin.conductor.errors import Conflict, InvalidRequest
from tiffin.conductor.records import (
    Decision,
    InstanceSpec,
    Load,
    Objectives,
    Rejection,
    Request,
    Role,
)

if TYPE_CHECKING:
    from tiffin.bench.traces.trace import TraceRequest
    from tiffin.conductor.core import Conductor

SMALLER = "llama-3.1-8b.h100.tp1.vllm"


def overloaded(*steps: Step, **classes: tuple[Step, ...]) -> Conductor:
    """One instance with a minute of queue, and an idle one of a smaller model."""
    smaller = InstanceSpec("small", "s", Role.MIXED, SMALLER)
    made = conductor(
        spec("large"),
        smaller,
        admission={
            "degrade": steps,
            "degrade_classes": classes,
            "smaller_models": {"m": "s"},
            "output_tokens_cap": 64,
        },
    )
    made.heartbeat("large", Load(queued_prefill_tokens=400_000, queued=40), 1.0)
    made.heartbeat("small", Load(), 1.0)
    return made


def asked(name: str = "r", priority: str = "normal") -> Request:
    return prompt(name, 4, objectives=Objectives(ttft_s=2.0, tbt_s=0.2), priority=priority)


def test_without_steps_it_is_refused() -> None:
    outcome = overloaded().schedule(asked(), 1.0)
    assert isinstance(outcome, Rejection)
    assert outcome.reason == "ttft"


def test_a_smaller_model_answers_and_the_decision_says_so() -> None:
    made = overloaded("smaller_model")
    request = replace(asked(), part_keys=(b"p" * 16,))
    decision = made.schedule(request, 1.0)
    assert isinstance(decision, Decision)
    assert (decision.prefill, decision.decode, decision.model) == ("small", "small", "s")
    assert decision.degraded == ("smaller_model:s",)
    assert decision.predicted_ttft_s < 2.0
    assert made.schedule(request, 1.1) is decision, "asked again, it is the same request"
    with pytest.raises(Conflict):
        made.schedule(prompt("r", 5), 1.2)
    tell(made, "r", "prefill_done", "first_token", "finished", now=2.0)
    assert nothing_is_promised(made)
    found = made.match(request.keys, 2.0, request.part_keys).holders
    assert found == [], "blocks of one model are none of another"


def test_best_effort_has_no_objectives_and_waits_behind_all_others() -> None:
    made = overloaded("best_effort")
    decision = made.schedule(asked(), 1.0)
    assert isinstance(decision, Decision)
    assert (decision.prefill, decision.degraded, decision.model) == ("large", ("best_effort",), "")
    flight = made.ledger.get("r")
    assert flight is not None
    assert flight.request.priority == made.settings.queue.classes[-1].name
    assert flight.request.objectives == Objectives()
    assert flight.asked == asked()


def test_the_least_harmful_step_that_suffices_is_taken() -> None:
    """A shorter answer does not help against a queue for prefill; the next step does."""
    decision = overloaded("cap_output", "smaller_model", "best_effort").schedule(asked(), 1.0)
    assert isinstance(decision, Decision)
    assert decision.degraded == ("smaller_model:s",)


def test_each_class_may_have_steps_of_its_own() -> None:
    made = overloaded("smaller_model", high=("best_effort",), low=())
    names = {
        priority: getattr(made.schedule(asked(priority, priority), 1.0), "degraded", "refused")
        for priority in ("high", "normal", "low")
    }
    assert names == {
        "high": ("best_effort",),
        "normal": ("smaller_model:s",),
        "low": "refused",
    }


def test_a_model_without_a_smaller_one_is_refused_all_the_same() -> None:
    made = overloaded("smaller_model")
    made.patch({"admission": {"smaller_models": {"m": "nobody-serves-it"}}}, 1.0)
    assert isinstance(made.schedule(asked(), 1.0), Rejection)
    made.patch({"admission": {"smaller_models": {}}}, 1.0)
    assert isinstance(made.schedule(asked(), 1.0), Rejection)
    with pytest.raises(InvalidRequest, match="each step once"):
        patched(Settings(), {"admission": {"degrade_classes": {"low": ["relax", "relax"]}}})


def test_steps_change_what_is_asked() -> None:
    request = prompt("r", 4, output_tokens=900, objectives=Objectives(ttft_s=1.0))
    changed = after(
        ("cap_output", "smaller_model", "best_effort"),
        request,
        output_tokens_cap=64,
        smaller_models={"m": "s"},
        lowest_class="low",
    )
    assert (changed.output_tokens, changed.output_tokens_max) == (64, 64)
    assert (changed.model, changed.keys, changed.id) == ("s", (), "r")
    assert (changed.objectives, changed.priority) == (Objectives(), "low")


def test_in_an_overload_fewer_are_refused_and_those_in_full_are_still_in_time() -> None:
    """A simulated cluster that gets more than it can serve, by itself and with two instances of a
    smaller model beside it."""
    trace = in_phases((Phase(20.0, 14.0, (RequestKind((500, 3_000), (100, 400)),)),), 1)

    def outcome(*steps: Step) -> tuple[float, float, set[str]]:
        """Shares that were refused, and that were served in full and in time; the models."""
        options = ElasticOptions(
            {Role.PREFILL: 1, Role.DECODE: 1},
            {"admission": {
                "mode": "predictive", "degrade": steps, "smaller_models": {MODEL: SMALLER_MODEL},
            }},
            profile="llama-3.1-70b.h100.tp4.vllm",
            kv_capacity_tokens=440_000,
            ttft_s=1.0,
            tbt_s=0.03,
            smaller={Role.MIXED: 2},
            smaller_profile=SMALLER,
        )  # fmt: skip
        jobs = simulate_elastic(trace, options).jobs
        placed = [job.decision for job in jobs if job.decision is not None]
        in_time = [
            job for job in jobs
            if job.decision is not None and not job.decision.degraded and job.ttft_s is not None
            and job.ttft_s <= 1.0
        ]  # fmt: skip
        refused = sum(bool(job.rejected) for job in jobs) / len(jobs)
        return refused, len(in_time) / len(jobs), {one.model for one in placed}

    refused, in_time, models = outcome()
    assert refused > 0.2
    assert models == {""}
    fewer, still_in_time, models = outcome("smaller_model")
    assert fewer < 0.5 * refused
    assert still_in_time > 0.95 * in_time
    assert models == {"", SMALLER_MODEL}


# -- after admission -------------------------------------------------------------------------------


def running(made: Conductor, answered: dict[str, int], tbt_s: float | None = None) -> None:
    """Let these requests, whose names begin with their class, have answered so many tokens."""
    for name, tokens in answered.items():
        objectives = Objectives(tbt_s=tbt_s)
        request = prompt(name, 2, priority=name.split("-")[0], objectives=objectives)
        assert isinstance(made.schedule(request, 1.0), Decision)
        tell(made, name, "prefill_done", "first_token", now=1.0)
        tell(made, name, "tokens", now=1.0, tokens=tokens - 1)


def capped(*classes: str) -> Conductor:
    made = conductor(spec("i"), admission={"mode": "off", "cap_classes": classes})
    made.heartbeat("i", Load(), 1.0)
    return made


ANSWERED = {"high-0": 900, "low-0": 800, "low-1": 500, "low-2": 300, "low-3": 100, "normal-0": 50}


def step_s(made: Conductor, *, without: tuple[str, ...] = ()) -> float:
    """Of a decode step with all but some of them."""
    c, flights = made.cluster, [made.ledger.get(name) for name in ANSWERED if name not in without]
    context = sum(one.request.prompt_tokens + one.answered_tokens for one in flights if one)
    return float(c.d0[0] + c.d1[0] * len(flights) + c.d2[0] * context)


def test_as_few_of_the_longest_answers_end_as_suffice() -> None:
    probe = capped()
    running(probe, ANSWERED)
    all_of_them = step_s(probe)
    without_one, without_two = (
        step_s(probe, without=out) for out in (("low-0",), ("low-0", "low-1"))
    )
    for promised_s, cap in (
        (all_of_them * 1.001, None),
        ((all_of_them + without_one) / 2, 800),
        ((without_one + without_two) / 2, 500),
        (all_of_them / 2, 300),  # not enough: but answers shorter than 128 tokens are left alone
    ):
        made = capped("low")
        running(made, ANSWERED, promised_s)
        made.tick(1.0)
        assert made.instance("i", 1.0).output_caps == ({} if cap is None else {"low": cap})


def test_no_class_is_capped_unless_it_is_named() -> None:
    made = capped()
    running(made, ANSWERED, 0.001)
    made.tick(1.0)
    assert made.instance("i", 1.0).output_caps == {}


def test_a_cap_goes_as_the_load_does() -> None:
    made = capped("low")
    running(made, ANSWERED, 0.001)
    made.tick(1.0)
    caps = [made.instance("i", 1.0).output_caps["low"]]
    for name in ("high-0", "low-0", "low-1", "low-2", "normal-0"):
        tell(made, name, "finished", now=2.0)
    flight = made.ledger.get("low-3")
    assert flight is not None
    made.cluster.d0[:] = made.cluster.d1[:] = made.cluster.d2[:] = 0.0  # as if it were fast now
    for now in range(2, 20):
        made.tick(float(now))
        caps.append(made.instance("i", float(now)).output_caps.get("low", 0))
        tell(made, "low-3", "alive", now=float(now))
    assert caps[0] == 300
    relaxed = [cap for cap in caps if cap]
    assert relaxed == sorted(relaxed)
    assert caps[-1] == 0, "no answer there is near it"


@pytest.mark.slow
def test_caps_keep_promises_where_admission_did_not() -> None:
    """Everybody is admitted, and long answers of a low class would make all late. With caps hardly
    anyone is, for a tenth of what would have been answered."""
    kinds = (RequestKind((200, 800), (100, 200)), RequestKind((200, 800), (900, 3_000)))
    trace = in_phases((Phase(50.0, 10.0, kinds),), 0)
    asked_tokens = {one.arrival_s: one.output_tokens for one in trace.requests}

    def priority(request: TraceRequest) -> str:
        return "low" if asked_tokens[request.arrival_s] >= 900 else "high"

    def outcome(*classes: str) -> tuple[float, float]:
        """The share of the high class in time, and of all tokens that were answered."""
        options = ElasticOptions(
            {Role.PREFILL: 2, Role.DECODE: 1},
            {"admission": {"mode": "off", "cap_classes": classes}},
            profile="llama-3.1-70b.h100.tp4.vllm",
            kv_capacity_tokens=440_000,
            ttft_s=2.0,
            tbt_s=0.025,
            report_s=1.0,
            priority=priority,
        )
        jobs = simulate_elastic(trace, options).jobs
        high = [job for job in jobs if priority(job.trace) == "high"]
        # Caps aim at the objective itself: half of the time a step is a little longer.
        in_time = sum(fmean(job.gaps_s) <= 1.02 * 0.025 for job in high) / len(high)
        given = sum(job.trace.output_tokens for job in jobs)
        return in_time, given / sum(asked_tokens.values())

    late, whole = outcome()
    assert late < 0.8
    assert whole == 1.0
    in_time, given = outcome("low")
    assert in_time > 0.95
    assert given > 0.75
