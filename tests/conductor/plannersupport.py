"""A planner for tests, and observed demand for it."""

from __future__ import annotations

from tiffin.conductor.pool.planner import ObservedDemand, Planner, PlannerSettings
from tiffin.conductor.pool.prompt_sums import PromptSums
from tiffin.conductor.pool.role_flip import FleetMember
from tiffin.conductor.records import Role

P, D, M = Role.PREFILL, Role.DECODE, Role.MIXED


# One prompt of 1,000 computed tokens takes 1 s; a batch of b is b x 10 ms per step.
LATENCY = (0.0, 1e-3, 0.0, 0.0, 0.01, 0.0)


INTERVAL_S = 60.0


def fleet(prefills: int, decodes: int, mixed: int = 0) -> list[FleetMember]:
    roles = [P] * prefills + [D] * decodes + [M] * mixed
    return [
        FleetMember(f"i{i:02}", role, True, latency=LATENCY, batch_max=64)
        for i, role in enumerate(roles)
    ]


def interval(rate: float, *, output: float = 10.0, prompt: float = 1000.0) -> ObservedDemand:
    """The observed demand of an interval of equal prompts."""
    count = round(rate * INTERVAL_S)
    each = PromptSums.of(round(prompt), round(prompt))
    prompts = PromptSums(*(count * one for one in each))
    return ObservedDemand(
        count / rate if count else INTERVAL_S, prompts, output * count, count
    )  # fmt: skip


def planner(**options: object) -> Planner:
    """A planner; prefill serves 0.9 requests/s per instance, decode 10 for answers of 10 tokens."""
    defaults: dict[str, object] = {
        "mode": "act",
        "ttft_s": 100.0,
        "confirm": 3,
        "cooldown_s": 300.0,
    }
    return Planner(PlannerSettings(**{**defaults, **options}))  # type: ignore[arg-type]
