"""DistServe's reproductions, small."""

from __future__ import annotations

import numpy as np
import pytest

from tiffin.bench.planning.attainment import (
    Goals,
    colocated_share,
    decode_share,
    goodput,
    pair_share,
    prefill_share,
)
from tiffin.bench.planning.workload import Fixed, poisson
from tiffin.bench.reproduce.papers.distserve.distserve_measured import _CHAT as CHAT
from tiffin.bench.reproduce.papers.distserve.distserve_measured import (
    DISTSERVE,
    VLLM,
    Run,
    apart,
    together,
)
from tiffin.bench.reproduce.setups.distserve_inputs import distserve, vllm

GOALS = Goals(0.4, 0.04, batch_tokens=0)
EXAMPLE = poisson("example", Fixed(512), Fixed(64), 1500, 3)


def test_roles_apart_serve_what_the_scarcer_one_serves() -> None:
    unit = vllm("opt-13b").units(1)[0]
    prefill = goodput(lambda w: prefill_share(w, unit, GOALS), EXAMPLE, GOALS)
    decode = goodput(lambda w: decode_share(w, unit, GOALS), EXAMPLE, GOALS)
    apart_rate = goodput(lambda w: pair_share(w, unit, unit, GOALS, (2, 1)), EXAMPLE, GOALS)
    both = goodput(lambda w: colocated_share(w, unit, GOALS), EXAMPLE, GOALS)
    assert apart_rate == pytest.approx(min(2 * prefill, decode), rel=0.15)
    assert both < min(prefill, decode)


@pytest.mark.parametrize(
    ("run", "simulate", "near"),
    [(VLLM[0], together, 0.1), (VLLM[1], together, 0.2), (DISTSERVE[0], apart, 0.25)],
)
def test_simulated_tpot_is_near_the_measured(run: Run, simulate: object, near: float) -> None:
    assert callable(simulate)
    found = []
    for seed in range(4):
        workload = CHAT.workload(run.requests, seed)
        found.append(np.median(simulate(workload.faster(run.rate / workload.rate))[1]))
    assert np.mean(found) == pytest.approx(run.tpot_s, rel=near)


def test_an_engine_s_room_is_that_of_its_gpus() -> None:
    rooms = [unit.kv_tokens for unit in distserve("opt-13b").units(4, (1,))]
    assert rooms == sorted(rooms)
    assert len(rooms) == 3
