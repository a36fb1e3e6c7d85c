"""A cluster with caches whose roles flip as the conductor's planner wants."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

import pytest

from tiffin.bench.sim.cluster.simulation import (
    SimulationOptions,
    SimulationOutcome,
    simulate,
)
from tiffin.bench.sim.results.outcomes import summarise
from tiffin.bench.traces.generator import generate
from tiffin.bench.traces.scaling import at_rate
from tiffin.conductor.core import Conductor
from tiffin.conductor.core.settings import patched
from tiffin.conductor.pool.role_flip import Step
from tiffin.conductor.records import Role

if TYPE_CHECKING:
    from tiffin.bench.sim.cluster.simulation import Profiles
    from tiffin.bench.sim.instances.sim_request import SimRequest
    from tiffin.bench.traces.trace import Trace

# One flip, soon.
QUICK = {"interval_s": 20.0, "confirm": 1, "cooldown_s": 1000.0}
# One of those that decode has to prefill, and one of those that prefill to decode.
SHORT_OF_PREFILL = SimulationOptions(prefill=1, decode=2, planner="act")
SHORT_OF_DECODE = SimulationOptions(prefill=3, decode=1, planner="act", kv_capacity_tokens=100_000)
FLIPS = ((SHORT_OF_PREFILL, Role.PREFILL), (SHORT_OF_DECODE, Role.DECODE))


def quick(options: SimulationOptions, profiles: Profiles) -> Conductor:
    settings = patched(options.settings(), {"planner": QUICK})
    return Conductor(settings, dice=random.Random(options.seed), profile=profiles)


def chats() -> Trace:
    """Of five minutes; one instance does not prefill them in time."""
    return at_rate(generate("multi-turn", 200, 0), 0.3)


@cache
def served(options: SimulationOptions) -> SimulationOutcome:
    return simulate(chats(), options, core=quick)


@pytest.mark.parametrize(("options", "new"), FLIPS)
def test_a_role_that_there_is_too_little_of_gets_an_instance(
    options: SimulationOptions, new: Role
) -> None:
    outcome = served(options)
    assert all(job.ended_s is not None for job in outcome.jobs), "no request is lost"
    assert [(flip.new, flip.step) for flip in outcome.flips] == [(new, Step.READY)]
    (flip,) = outcome.flips
    for job in outcome.jobs:
        flipped = job.trace.arrival_s > flip.until
        assert worker(job, flip.old if flipped else new) != flip.instance
    assert any(worker(job, new) == flip.instance for job in outcome.jobs)


def worker(job: SimRequest, role: Role) -> str:
    """Who does the work of a role for a request."""
    assert job.decision is not None
    return job.decision.prefill if role is Role.PREFILL else job.decision.decode


def test_first_tokens_come_sooner_for_it_and_roles_stay_without() -> None:
    acting, still = (served(replace(SHORT_OF_PREFILL, planner=mode)) for mode in ("act", "off"))
    assert not still.flips
    means_s = [summarise(chats(), outcome).ttft_s.mean for outcome in (acting, still)]
    assert means_s[0] < 0.5 * means_s[1]


@pytest.mark.parametrize(("options", "new"), FLIPS)
def test_bytes_keep_their_purpose_when_roles_flip(options: SimulationOptions, new: Role) -> None:
    used = summarise(chats(), served(options)).usage
    assert used.handed_over_bytes == chats().prompt_tokens * options.token_bytes
    assert used.copied_bytes == 0
    assert used.fetched_bytes > 0
