"""What a simulated trace used: bytes by purpose, hits by tier, how even the work was."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ...traces.trace import Trace
    from ..cluster.simulation import SimulationOutcome
    from ..instances.sim_request import SimRequest


@dataclass(frozen=True, slots=True)
class Usage:
    """`fetched_bytes`: blocks for prompts that needed them; `handed_over_bytes`: KV to instances
    that decode; `copied_bytes`: the rest, which the conductor ordered ahead of need.

    `hit_share_by_tier`: of the tokens of all prompts, those that were loaded, by the tier that they
    were in: "hbm", "dram", "nvme" of the own node, or "fetched". `evenness`: Jain's index over the
    GPU seconds of the instances that prefill; 1 if all did the same, 1/n if one did all.
    `fairness`: the same over the tenants' mean TTFT; None if there is one tenant. `wasted_s`: GPU
    seconds of prefills whose requests were refused afterwards. `refused_in_time`: refused requests
    that would have met their objectives, by the conductor's own estimate.
    """

    fetched_bytes: int
    handed_over_bytes: int
    copied_bytes: int
    hit_share_by_tier: dict[str, float]
    evenness: float
    fairness: float | None = None
    wasted_s: float = 0.0
    refused_in_time: int = 0


def usage(trace: Trace, outcome: SimulationOutcome) -> Usage:
    """Of a simulation of the trace."""
    block_bytes = trace.block_tokens * outcome.options.token_bytes
    handed_over = outcome.handed_over_bytes
    fetched = sum(job.fetched_blocks for job in outcome.jobs) * block_bytes
    served = [job for job in outcome.jobs if job.ended_s is not None]
    tokens = sum(job.trace.prompt_tokens for job in served)
    hits = Counter[str]()
    busy_s = {f"prefill-{number}": 0.0 for number in range(outcome.options.prefill)}
    for job in served:
        hits.update(job.by_tier)
        if job.decision is not None:
            name = job.decision.prefill
            busy_s[name] = busy_s.get(name, 0.0) + job.compute_s
    return Usage(
        fetched_bytes=fetched,
        handed_over_bytes=handed_over,
        copied_bytes=sum(outcome.moved_bytes.values()) - handed_over - fetched,
        hit_share_by_tier={tier: count / tokens for tier, count in sorted(hits.items()) if count},
        evenness=jain(busy_s.values()),
        fairness=_fairness(served),
        wasted_s=sum(job.compute_s for job in outcome.jobs if job.rejected),
        refused_in_time=outcome.shadow.rejected_would_have_met,
    )


def _fairness(served: Iterable[SimRequest]) -> float | None:
    waits_s: dict[str, list[float]] = {}
    for job in served:
        waits_s.setdefault(job.trace.tenant, []).append(job.ttft_s or 0.0)
    if len(waits_s) < 2:
        return None
    return jain(sum(waits) / len(waits) for waits in waits_s.values())


def jain(values: Iterable[float]) -> float:
    """Jain's index of fairness, (Σx)² / (n Σx²) (Jain, Chiu and Hawe, 1984); 1 for all zeros."""
    values = list(values)
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 1.0
