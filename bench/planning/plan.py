"""A plan: the best fleet, the runner-up, and what would change if the world did."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING

from tiffin.conductor.errors import InvalidRequest

from ..sim.cluster.simulation import SimulationOptions
from .attainment import Goals, Unit
from .batching_role import longest_gaps_s
from .confirm import Confirmed, confirm
from .memory import kv_room, token_bytes
from .ratio import Fleet, Search, fleet_share
from .workload import from_trace

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tiffin.conductor.cost.latency_profiles import Profile

    from ..traces.trace import Trace
    from .ratio import Estimate, WorkloadOf
    from .workload import Workload

    Tell = Callable[[str, float | None], None]

_TIGHTER, _MORE = 0.8, 1.2


@dataclass(frozen=True, slots=True)
class Question:
    """What is planned for. `gpus` is the most there are; `tried` fleets are confirmed in the whole
    simulation, 0 for none. `kv_tokens` is an instance's room; None: what its GPUs' memory leaves.
    """

    trace: Trace
    profiles: tuple[Profile, ...]
    gpus: int
    ttft_s: float
    tbt_s: float
    target_share: float = 0.9
    tried: int = 3
    kv_tokens: int | None = None
    like: SimulationOptions = field(default_factory=SimulationOptions)


@dataclass(frozen=True, slots=True)
class WhatIf:
    """A change, what the planned fleet then serves, and the fleet that would then be the best.
    Shares of requests that meet the objectives are at the trace's rate."""

    change: str
    goodput: float | None
    attained: float | None
    best: Fleet | None


@dataclass(frozen=True, slots=True)
class Plan:
    """`ranked`: the best fleet first, then the runner-up. Goodput is in requests per second.
    `what_ifs` are computed by the fast search, the first one with nothing changed."""

    question: Question
    ranked: tuple[Confirmed, ...]
    what_ifs: tuple[WhatIf, ...]


def plan(question: Question, tell: Tell = lambda text, share: None) -> Plan:
    """The plan. `tell` is told what is tried, and the share of it that is done. Raises
    InvalidRequest if no two instances fit, or no fleet meets the objectives."""
    units = _units(question)
    workload_of = _workloads(question)
    goals = _goals(question)
    search = Search(workload_of, goals, lambda text: tell(text, None))
    estimates = [one for one in search.best(units, question.gpus) if one.goodput]
    if not estimates:
        raise InvalidRequest(_impossible(question, units))
    ranked = _ranked(question, estimates, tell)
    best = ranked[0].fleet
    return Plan(question, tuple(ranked), tuple(_what_ifs(question, search, goals, best, tell)))


def _ranked(question: Question, estimates: Sequence[Estimate], tell: Tell) -> list[Confirmed]:
    if not question.tried:
        return [Confirmed(one.fleet, one.goodput, None, None) for one in estimates[:2]]
    like = replace(
        question.like,
        ttft_s=question.ttft_s,
        tbt_s=question.tbt_s,
        token_bytes=int(token_bytes(question.profiles[0]) or question.like.token_bytes),
    )
    few = estimates[: question.tried]
    return confirm(question.trace, few, like, target_share=question.target_share, tell=tell)


def _units(question: Question) -> list[Unit]:
    """What instances may be: those with room for the longest request."""
    batch_max = question.like.batch_max
    longest = max(one.prompt_tokens + one.output_tokens for one in question.trace.requests)
    units = [
        Unit(one, question.kv_tokens or kv_room(one), batch_max=batch_max)
        for one in question.profiles
    ]
    found = [unit for unit in units if unit.kv_tokens >= longest]
    if not found:
        room = max(unit.kv_tokens for unit in units)
        raise InvalidRequest(
            f"a request of the trace has {longest:,} tokens, and no instance has room for more "
            f"than {room:,}"
        )
    return found


def _workloads(question: Question) -> WorkloadOf:
    """What so many prefill instances' memory holds of it is cached."""
    return cache(lambda prefills: from_trace(question.trace, prefills * question.like.cache_tokens))


def _goals(question: Question) -> Goals:
    each_bytes = token_bytes(question.profiles[0]) or question.like.token_bytes
    return Goals(
        question.ttft_s,
        question.tbt_s,
        question.target_share,
        tbt_of=longest_gaps_s,
        batch_tokens=0,
        transfer_token_s=each_bytes / question.like.bandwidth_bytes_s,
    )


def _what_ifs(
    question: Question, search: Search, goals: Goals, fleet: Fleet, tell: Tell
) -> list[WhatIf]:
    workload_of, gpus = _workloads(question), question.gpus

    def longer(prefills: int) -> Workload:
        return workload_of(prefills).longer(_MORE)

    def attained(factor: float) -> float:
        return fleet_share(workload_of(fleet.prefills).faster(factor), fleet, goals)

    tighter = Search(workload_of, goals.tighter(_TIGHTER), lambda text: tell(text, None))
    longer_prompts = Search(longer, goals, lambda text: tell(text, None))
    found = [
        WhatIf("as it is", search.estimate(fleet).goodput, attained(1.0), None),
        _elsewhere("objectives 20% tighter", tighter, fleet, gpus),
        _elsewhere("prompts 20% longer", longer_prompts, fleet, gpus),
        WhatIf("20% more requests", None, attained(_MORE), None),
    ]
    for role in ("prefill", "decode"):
        count = getattr(fleet, f"{role}s") - 1
        if count:
            fewer = replace(fleet, **{f"{role}s": count})
            served = search.estimate(fewer).goodput
            found.append(WhatIf(f"one instance less that {role}s", served, None, None))
    return found


def _elsewhere(change: str, search: Search, fleet: Fleet, gpus: int) -> WhatIf:
    served = search.estimate(fleet).goodput
    best = search.climb(fleet, gpus).fleet
    return WhatIf(change, served, None, None if best == fleet else best)


def _impossible(question: Question, units: Sequence[Unit]) -> str:
    least = 2 * min(unit.gpus for unit in units)
    if question.gpus < least:
        return f"two instances need {least} GPUs, and there are {question.gpus}"
    return (
        f"on {question.gpus} GPUs, no fleet serves {question.target_share:.0%} of requests within "
        f"TTFT {question.ttft_s:g} s and TBT {question.tbt_s:g} s, however few there are"
    )
