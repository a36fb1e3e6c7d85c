"""What an answer takes of the KV room while it runs: all that is predicted, or what there is."""

from __future__ import annotations

import random

import numpy as np
import pytest
from coresupport import conductor, nothing_is_promised, prompt, spec, tell

from tiffin.bench.sim.cluster.elastic_cluster import ElasticOptions, simulate_elastic
from tiffin.bench.sim.cluster.length_oracle import TETRIINFER_ACCURACY, LengthOracle
from tiffin.bench.traces.phases import Phase, RequestKind, in_phases
from tiffin.conductor.records import Decision, Rejection, Role

LIGHT, HEAVY = (2, 128), (129, 1024)


@pytest.mark.parametrize(("reserve", "before", "after"), [("static", 900, 900), ("dynamic", 0, 40)])
def test_room_is_taken_at_once_or_as_answers_grow(reserve: str, before: int, after: int) -> None:
    made = conductor(spec("i"), decode={"reserve": reserve})
    request = prompt("a", 2, output_tokens=900)
    made.schedule(request, 1.0)
    used = made.cluster.kv_used_tokens
    assert used[0] == request.prompt_tokens + before
    tell(made, "a", "prefill_done", "first_token", now=1.0)
    tell(made, "a", "tokens", now=2.0, tokens=40)
    assert used[0] == request.prompt_tokens + after
    tell(made, "a", "finished", now=3.0)
    assert nothing_is_promised(made)


def test_whatever_happens_nothing_stays_reserved() -> None:
    dice = random.Random(5)
    made = conductor(spec("i"), spec("j"), decode={"reserve": "dynamic"})
    for number in range(200):
        made.schedule(prompt(f"{number}", dice.randrange(1, 4)), number)
        for _ in range(3):
            name = f"{dice.randrange(number + 1)}"
            kind = dice.choice(["prefill_done", "first_token", "tokens", "finished", "cancelled"])
            if made.ledger.get(name) is not None:
                tell(made, name, kind, now=float(number), tokens=dice.randrange(300))
        if number == 100:
            made.patch({"decode": {"reserve": "static"}}, number)
        if number == 150:
            made.remove("j", number)
    for flight in made.ledger:
        tell(made, flight.request.id, "finished", now=300.0)
    assert nothing_is_promised(made)


def test_as_many_run_as_there_is_room_for_and_one_answer_more() -> None:
    """Room for six prompts with whole answers; as they have only begun, for ten."""
    capacity = 6 * (522 + 400) + 100

    def admitted(reserve: str) -> int:
        made = conductor(
            spec("i", kv_capacity_tokens=capacity),
            decode={"reserve": reserve, "reserve_share": 0.0},
        )
        outcomes = [made.schedule(prompt(f"{n}", 1, output_tokens=400), 1.0) for n in range(12)]
        assert all(isinstance(one, Decision | Rejection) for one in outcomes)
        return sum(isinstance(one, Decision) for one in outcomes)

    assert admitted("static") == 6
    assert admitted("dynamic") == (capacity - 400) // 522 == 10


@pytest.mark.slow
def test_dynamic_takes_more_and_seldom_too_much() -> None:
    """Decode instances with little room, and engines that do not know how long answers will be:
    whose context does not fit any more leaves, and is computed again. Lengths are predicted as well
    as TetriInfer's classifier does."""
    kinds = tuple(
        RequestKind(prompt_tokens, output)
        for prompt_tokens in ((18, 512), (513, 1024))
        for output in (LIGHT, HEAVY)
    )
    trace = in_phases((Phase(25.0, 10.0, kinds),), 1)

    def outcome(mode: str, reserve: str) -> tuple[float, int, float]:
        """The share refused, how many had to leave, and the mean seconds of those served."""
        options = ElasticOptions(
            {Role.PREFILL: 6, Role.DECODE: 4},
            {"admission": {"mode": mode}, "decode": {"reserve": reserve}},
            profile="opt-13b.a100.tp1.distserve",
            token_bytes=2 * 5120 * 40 * 2,
            kv_capacity_tokens=16_000,
            preemption=True,
            report_s=1.0,
            lengths=lambda trace: LengthOracle(
                lambda request: trace.requests[int(request.id[1:])].output_tokens,
                seed=0,
                bucket_tokens=200,
                accuracy=TETRIINFER_ACCURACY,
            ),
        )
        found = simulate_elastic(trace, options)
        ends_s = [one.ended_s - one.trace.arrival_s for one in found.jobs if one.ended_s]
        return 1 - len(ends_s) / len(found.jobs), found.preempted, float(np.mean(ends_s))

    everybody, careful, ours = (
        outcome(*way)
        for way in (("off", "static"), ("predictive", "static"), ("predictive", "dynamic"))
    )
    assert everybody[1] > 20
    assert careful[1] == 0
    assert 2 * ours[0] < careful[0]
    assert 5 * ours[1] < everybody[1]
    assert ours[2] < everybody[2]
