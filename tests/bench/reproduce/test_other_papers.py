"""The cores of the reproductions of Splitwise, TetriInfer, MemServe, NanoCP and Dynamo, on small
inputs."""

from __future__ import annotations

import pytest

from tiffin.bench.reproduce.papers import memserve_fetch, nanocp_waterfill, splitwise_transfer
from tiffin.bench.reproduce.papers.dynamo import (
    dynamo_disaggregation,
    dynamo_planner,
    dynamo_router,
)
from tiffin.bench.reproduce.papers.mooncake import mooncake_break_even
from tiffin.bench.reproduce.papers.tetriinfer import tetriinfer_flips, tetriinfer_scheduling
from tiffin.bench.reproduce.setups.fetch_or_compute import Cell, fetched_blocks, ttft_s
from tiffin.conductor.cost import latency_profiles

PROFILE = latency_profiles.load(latency_profiles.DEFAULT)


@pytest.mark.parametrize("gpu", ["a100", "h100"])
def test_the_conductor_hands_over_as_the_better_way_far_from_the_break_even(gpu: str) -> None:
    for tokens, better in ((128, "serialized"), (4096, "layer-wise")):
        times = {
            way: splitwise_transfer.served(gpu, tokens, 2, way).second_token_s
            for way in splitwise_transfer.WAYS
        }
        assert times["conductor"] == times[better] == min(times.values())


def test_a_serialized_transfer_is_in_the_second_token() -> None:
    seconds = [
        splitwise_transfer.served("h100", 2000, 2, way).second_token_s
        for way in ("serialized", "none")
    ]
    moved_s = 2000 * splitwise_transfer.TOKEN_BYTES / splitwise_transfer.BANDWIDTH_BYTES_S
    assert seconds[0] - seconds[1] == pytest.approx(moved_s, rel=1e-3)


def test_fetching_is_decided_by_the_sign_of_what_it_saves() -> None:
    for bandwidth in (1e9, 2.9e9, 3e9, 20e9):
        cell = Cell(8192 + 512, 16, bandwidth)
        saves = ttft_s(cell, PROFILE, 0.0, 16) < ttft_s(cell, PROFILE, 0.0, 0)
        assert bool(fetched_blocks(cell, PROFILE, "kvcache_centric", 0.0)) is saves


def test_rivals_share_the_senders_card() -> None:
    """Four transfers of the same size end together, after four times as long."""
    alone, shared = (Cell(65_536, 127, 4e9, rivals=rivals) for rivals in (0, 3))
    computing_s = ttft_s(Cell(65_536, 127, 1e15), PROFILE, 0.0, 127)
    waits = [ttft_s(cell, PROFILE, 0.0, 127) - computing_s for cell in (alone, shared)]
    assert waits[1] == pytest.approx(4 * waits[0], rel=1e-3)


def test_a_way_is_right_where_it_is_the_better_one() -> None:
    slow, fast = (memserve_fetch.judge(Cell(16_384, 24, rate)) for rate in (1e9, 32e9))
    assert memserve_fetch.right_share([slow, fast], "always") == 0.5
    assert memserve_fetch.right_share([slow, fast], "kvcache_centric") == 1.0
    assert memserve_fetch.mean_excess([fast], "always") == 0.0 < fast.excess("never")


def test_the_break_even_is_the_equations() -> None:
    """B = KV bytes · G / flops, here for 4,096 tokens."""
    layers, dimensions, tokens, peak = 80, 8192, 4096, 8 * 312e12
    flops = layers * (4 * tokens**2 * dimensions + 22 * tokens * dimensions**2)
    found = mooncake_break_even.least_bandwidth(mooncake_break_even.at_peak(peak), tokens)
    # The prompt is a block longer, which the prefix's tokens do not attend to.
    assert found == pytest.approx(327_680 * tokens * peak / flops, rel=2e-3)


@pytest.mark.slow
def test_decodes_are_spread_better_by_prediction_than_by_chance() -> None:
    rate, count = 24.0, 500
    chance = tetriinfer_scheduling.decoded("random", rate, 0, count)
    two = tetriinfer_scheduling.decoded("two-level", rate, 0, count)
    assert two[1] < chance[1]


def test_the_turning_load_is_more_than_an_even_fleet_serves() -> None:
    prompts, answers = tetriinfer_flips.phases()
    assert prompts.rate > answers.rate > 1.0


def test_fixed_fleets_go_from_the_mean_load_to_the_peak() -> None:
    fleets = dynamo_planner.fixed_fleets()
    assert len(fleets) > 2
    assert [prefill for prefill, _ in fleets] == sorted(prefill for prefill, _ in fleets)


@pytest.mark.parametrize("way", ["rule", "remote", "local"])
def test_prompts_are_prefilled_where_the_form_says(way: str) -> None:
    found = dynamo_disaggregation.served(way, 4.0, 1, requests=60)
    expected = {"rule": (1.0, 0.0), "remote": (0.0, 0.0), "local": (1.0, 1.0)}[way]
    assert found.local == expected


@pytest.mark.slow
def test_a_router_by_prefix_finds_more_and_answers_sooner() -> None:
    ours, turns = (
        dynamo_router.served(policy, "long-document", 2.0, 0, requests=200)
        for policy in ("kv_cost", "round_robin")
    )
    assert ours.hit_share > turns.hit_share
    assert ours.ttft_s < turns.ttft_s


@pytest.mark.slow
def test_only_very_long_contexts_are_spread() -> None:
    found = nanocp_waterfill.decoded("waterfill", "step", 32.0, 0)
    whole = nanocp_waterfill.decoded("whole", "step", 32.0, 0)
    assert found.spread == found.long == whole.long > 0
    assert whole.spread == 0
    assert max(found.tbt_s) < max(whole.tbt_s)
