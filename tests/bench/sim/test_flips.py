"""A role flip under load, by each choice: nothing is lost, and how long it takes."""

from __future__ import annotations

import random
from functools import cache, partial

import pytest

from tiffin.bench.sim.cluster.elastic_cluster import (
    ElasticOptions,
    ElasticOutcome,
    simulate_elastic,
)
from tiffin.bench.traces.trace import Trace, TraceRequest
from tiffin.conductor.core import Conductor
from tiffin.conductor.pool.role_flip import Step
from tiffin.conductor.records import Role

P, D = Role.PREFILL, Role.DECODE
FLIP_S, AT_S, TOKEN_BYTES = 5.0, 80.0, 327_680
# Of three that prefill and four that decode.
PREFILLS, DECODES = "instance-0", "instance-5"


def documents(seed: int) -> Trace:
    """Two requests/s about some of 200 documents of 12 blocks, with answers of 500 to 4,000
    tokens."""
    dice, now, found = random.Random(seed), 0.0, list[TraceRequest]()
    while (now := now + dice.expovariate(2.0)) < 150.0:
        document = min(int(dice.paretovariate(0.7)), 200)
        blocks = (*range(document * 100, document * 100 + 12), 10**6 + len(found))
        prompt, answer = 12 * 512 + dice.randint(50, 400), dice.randint(500, 4000)
        found.append(TraceRequest(now, prompt, answer, blocks))
    return Trace("documents", tuple(found))


class Flipping(Conductor):
    """One instance is flipped at a time, as an operator does."""

    def __init__(self, who: str, options: ElasticOptions) -> None:
        super().__init__(options.settings(), dice=random.Random(options.seed))
        self.who = who

    def tick(self, now: float) -> list[str]:
        """Begin it."""
        if self.who and now >= AT_S:
            self.flip(self.who, D if self.who == PREFILLS else P, now)
            self.who = ""
        return super().tick(now)


@cache
def flipped(who: str, requests: str, blocks: str, seed: int = 1) -> ElasticOutcome:
    changes = {"planner": {"mode": "off", "flips": {"requests": requests, "blocks": blocks}}}
    options = ElasticOptions(
        {P: 3, D: 4}, changes, orders="hand_over save", flip_s=FLIP_S,
        token_bytes=TOKEN_BYTES, hbm_cache_tokens=60_000, cache_tokens=400_000, seed=seed,
    )  # fmt: skip
    return simulate_elastic(documents(seed), options, core=partial(Flipping, who))


def took_s(outcome: ElasticOutcome) -> float:
    (flip,) = outcome.flips
    assert flip.step is Step.READY
    return flip.until - flip.began_at


def longest_pause_s(outcome: ElasticOutcome) -> float:
    return max(max(job.gaps_s) for job in outcome.jobs)


@pytest.mark.slow
@pytest.mark.parametrize("requests", ["wait", "hand_over"])
@pytest.mark.parametrize("blocks", ["leave", "save"])
@pytest.mark.parametrize("who", [PREFILLS, DECODES])
def test_no_request_is_lost_and_no_answer_is_shorter(who: str, requests: str, blocks: str) -> None:
    outcome = flipped(who, requests, blocks)
    assert len(outcome.jobs) == len(documents(1).requests)
    for job in outcome.jobs:
        assert job.ended_s is not None
        assert len(job.gaps_s) == job.trace.output_tokens - 1
        assert all(gap > 0 for gap in job.gaps_s)
        assert job.first_token_s is not None
        assert job.first_token_s + sum(job.gaps_s) == pytest.approx(job.ended_s)


def test_one_that_hands_over_its_requests_need_not_wait_for_their_ends() -> None:
    """Their KV is sent while they go on, so that nobody notices it."""
    waits, hands_over = (flipped(DECODES, way, "save") for way in ("wait", "hand_over"))
    assert took_s(waits) > 60.0
    assert took_s(hands_over) < FLIP_S + 15.0
    assert longest_pause_s(hands_over) < 1.5 * longest_pause_s(waits)

    def between_decodes(outcome: ElasticOutcome) -> int:
        others = {f"instance-{number}" for number in (3, 4, 6)}
        return sum(n for (a, b), n in outcome.moved_bytes.items() if a == DECODES and b in others)

    assert between_decodes(waits) == 0
    assert between_decodes(hands_over) > 20 * 6_000 * TOKEN_BYTES, "whole contexts of a batch"


@pytest.mark.slow
@pytest.mark.parametrize("seed", [2, 4])  # of others it has no block alone
def test_blocks_that_were_in_its_hbm_alone_are_saved(seed: int) -> None:
    """They are fetched from its node's memory then, and not computed again."""
    left, saved = (flipped(PREFILLS, "wait", way, seed) for way in ("leave", "save"))
    assert left.lost_blocks > 0
    assert saved.lost_blocks == 0

    def computed_tokens(outcome: ElasticOutcome) -> int:
        later = [job for job in outcome.jobs if job.trace.arrival_s > AT_S]
        return sum(job.trace.prompt_tokens - job.cached_tokens for job in later)

    assert computed_tokens(saved) < computed_tokens(left)
    assert took_s(saved) < took_s(left) + 1.0


@pytest.mark.slow
def test_one_whose_blocks_find_no_room_keeps_its_role() -> None:
    changes = {"planner": {"mode": "off"}}
    options = ElasticOptions(
        {P: 3, D: 4}, changes, orders="save", hbm_cache_tokens=60_000, cache_tokens=512, seed=1
    )
    outcome = simulate_elastic(documents(1), options, core=partial(Flipping, PREFILLS))
    (flip,) = outcome.flips
    assert flip.step is Step.RETURNED
    assert "are left" in flip.why
    assert outcome.lost_blocks == 0
    assert all(job.ended_s is not None for job in outcome.jobs)
