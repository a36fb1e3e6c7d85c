"""DistServe's searches, where the answer can be seen."""

from __future__ import annotations

import numpy as np
import pytest
from planningsupport import profile, stream

from tiffin.bench.planning.attainment import Goals, Unit, goodput, pair_share, prefill_share
from tiffin.bench.planning.memory import ModelSize
from tiffin.bench.planning.placement import Hardware, best, high_affinity, low_affinity, roles
from tiffin.bench.reproduce.papers.distserve.distserve_queueing import (
    crossing,
    inter_op_s,
    intra_op_s,
    one_instance_s,
    simulated_s,
)

SMALL = ModelSize(weights_bytes=10e9, token_bytes=1e5)

# Two GPUs are 1.6 times as fast as one.
HARDWARE = Hardware(
    (profile(1), profile(2, prefill_s=0.1 / 1.6, step_s=0.02 / 1.6)), SMALL, usable_bytes=20e9
)
WORKLOAD = stream(1500)


def test_loose_objectives_take_small_instances() -> None:
    found = high_affinity(HARDWARE, WORKLOAD, Goals(5.0, 0.1), 20, gpus_max=2)
    assert found is not None
    assert found.prefill.profile.tensor_parallel == 1, "two GPUs are not twice as fast"
    assert found.prefills * found.prefill.stages >= 2, "a prompt takes a tenth of a second"
    assert found.gpus >= 20 / found.per_gpu - 1e-9


def test_an_objective_below_one_gpu_s_time_takes_tensor_parallelism() -> None:
    tight = high_affinity(HARDWARE, WORKLOAD, Goals(0.09, 0.1), 20, gpus_max=2)
    assert tight is not None
    assert tight.prefill.profile.tensor_parallel == 2


def test_an_objective_that_no_instance_meets_has_no_placement() -> None:
    assert high_affinity(HARDWARE, WORKLOAD, Goals(0.01, 0.1), 20, gpus_max=2) is None
    assert low_affinity(HARDWARE, WORKLOAD, Goals(0.01, 0.1), 20, node_gpus=4) is None


@pytest.mark.slow
def test_the_pair_on_one_node_fits_and_serves_no_more_than_free_roles() -> None:
    goals = Goals(0.4, 0.03)
    pair = low_affinity(HARDWARE, WORKLOAD, goals, 20, node_gpus=4)
    free = high_affinity(HARDWARE, WORKLOAD, goals, 20, gpus_max=4)
    assert pair is not None
    assert free is not None
    assert pair.prefill.gpus + pair.decode.gpus <= 4
    assert pair.per_gpu <= free.per_gpu * 1.05


@pytest.mark.slow
def test_the_search_by_bounds_finds_what_trying_all_pairs_finds() -> None:
    goals = Goals(0.4, 0.03)
    units = HARDWARE.units(3)
    rates = [
        goodput(lambda w, p=p, d=d: pair_share(w, p, d, goals), WORKLOAD, goals) / (p.gpus + d.gpus)
        for p in units
        for d in units
        if p.gpus + d.gpus <= 4
    ]
    found = low_affinity(HARDWARE, WORKLOAD, goals, 20, node_gpus=4)
    assert found is not None
    assert found.per_gpu == pytest.approx(max(rates), rel=0.07)


def test_a_model_that_does_not_fit_on_one_gpu_is_not_tried_there() -> None:
    large = Hardware(HARDWARE.profiles, ModelSize(25e9, 1e5), usable_bytes=20e9)
    assert {unit.gpus for unit in large.units(4)} == {2, 4}


def test_of_equals_the_smaller_is_chosen() -> None:
    prefills, _ = roles([Unit(profile(2), 10**6), Unit(profile(1), 10**6)], WORKLOAD, Goals(9, 9))
    assert best(prefills).unit.gpus == 1


def test_goodput_falls_with_tighter_objectives() -> None:
    unit = Unit(profile(), 10**6)
    rates = [
        goodput(lambda w, g=g: prefill_share(w, unit, g), WORKLOAD, g)
        for g in (Goals(2.0, 1), Goals(0.4, 1), Goals(0.15, 1), Goals(0.05, 1))
    ]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] < 10 * 1.1, "a prompt takes a tenth of a second"
    assert rates[-1] == 0


# -- the paper's formulas --------------------------------------------------------------------------


def test_without_load_ttft_is_the_service_time() -> None:
    assert one_instance_s(0, 0.1) == inter_op_s(0, 0.1) == 0.1
    assert intra_op_s(0, 0.1, 1.6) == pytest.approx(0.1 / 1.6)


def test_the_simulated_pipeline_is_the_formula_s() -> None:
    for rate in (3.0, 8.0):
        found = np.mean([simulated_s(rate, (0.05, 0.05), seed, 5000) for seed in (1, 2, 3)])
        assert found == pytest.approx(inter_op_s(rate, 0.1), rel=0.03)


def test_curves_cross_once() -> None:
    rate = crossing(lambda r: intra_op_s(r, 0.1, 1.5) - inter_op_s(r, 0.1), 1.0, 14.0)
    assert intra_op_s(0.9 * rate, 0.1, 1.5) < inter_op_s(0.9 * rate, 0.1)
    assert intra_op_s(1.1 * rate, 0.1, 1.5) > inter_op_s(1.1 * rate, 0.1)
