"""What one instance serves of a kind of request, by the planner's own formulas."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tiffin.conductor.cost import latency_profiles
from tiffin.conductor.pool.capacity_model import Capacity, Goals, Workload, capacity
from tiffin.conductor.pool.role_flip import FleetMember
from tiffin.conductor.records import Role

if TYPE_CHECKING:
    from ...traces.phases import RequestKind


def serves(profile: str, kv_capacity_tokens: int, kind: RequestKind, goals: Goals) -> Capacity:
    """Its requests per second in either role; nothing of a prompt is cached."""
    latency = latency_profiles.load(profile).latency
    member = FleetMember(
        *("", Role.MIXED, True), latency=latency, kv_capacity_tokens=kv_capacity_tokens
    )
    prompt, output = float(np.mean(kind.prompt_tokens)), float(np.mean(kind.output_tokens))
    variation = float(np.ptp(kind.prompt_tokens)) / 12**0.5 / prompt  # of a uniform number
    return capacity(member, Workload(prompt, prompt, output, variation), goals)
