"""How many requests meet their objectives, and up to which rate enough do. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ..sim.results.goodput import TARGET_SHARE, highest_rate
from .batching_role import Engine, colocated_s, decode_tbt_s, mean_gap_s
from .prefill_role import first_tokens_s

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from tiffin.conductor.cost.latency_profiles import Profile

    from .batching_role import TbtOf
    from .workload import Workload

# To within which share goodput is found.
PRECISION = 0.03

# A rate at which all requests come within less is not tried: it would measure how many fit in
# memory at once, not how many can be served.
SPAN_MIN_S = 30.0


@dataclass(frozen=True, slots=True)
class Unit:
    """How an instance is built: a profile, whose tensor parallelism is that of one stage, and so
    many pipeline stages. `kv_tokens` is the room of all of it."""

    profile: Profile
    kv_tokens: int
    stages: int = 1
    batch_max: int = 1024

    @property
    def gpus(self) -> int:
        """Of one instance."""
        return self.profile.tensor_parallel * self.stages

    @property
    def label(self) -> str:
        """For people."""
        stages = f" PP{self.stages}" if self.stages > 1 else ""
        return f"TP{self.profile.tensor_parallel}{stages}"

    def engine(self) -> Engine:
        """One of `stages` groups of requests that decode in turn. Each has its share of the room,
        and takes as long for a step as without a pipeline, since it passes all stages."""
        room = self.kv_tokens // self.stages
        return Engine(self.profile.prefill, self.profile.decode, room, self.batch_max)


@dataclass(frozen=True, slots=True)
class Goals:
    """Objectives in seconds, the share of requests that have to meet both, and what TBT is.

    `batch_tokens`: prompts are batched up to so many tokens, where a GPU is full (DistServe's L_m).
    `transfer_token_s`: seconds that the KV of a token is on its way from prefill to decode.
    """

    ttft_s: float
    tbt_s: float
    share: float = TARGET_SHARE
    tbt_of: TbtOf = mean_gap_s
    batch_tokens: int = 512
    transfer_token_s: float = 0.0

    def tighter(self, factor: float) -> Goals:
        """Both objectives, `factor` times as long."""
        return replace(self, ttft_s=self.ttft_s * factor, tbt_s=self.tbt_s * factor)


def ttft_s(workload: Workload, unit: Unit, goals: Goals, instances: int = 1) -> NDArray[np.float64]:
    """TTFT of each request, on instances that only prefill."""
    first_s = first_tokens_s(
        workload,
        unit.profile.prefill,
        instances=instances,
        stages=unit.stages,
        batch_tokens=goals.batch_tokens,
    )
    return first_s - workload.arrivals_s


def tbt_s(
    workload: Workload, first_s: NDArray[np.float64], unit: Unit, goals: Goals, instances: int = 1
) -> NDArray[np.float64]:
    """TBT of each request, on instances that only decode and take turns in getting requests."""
    groups = instances * unit.stages
    joins_s = first_s + goals.transfer_token_s * workload.prompt_tokens
    found_s = np.empty(len(workload))
    for group in range(groups):
        which = slice(group, None, groups)
        parts = (workload.pick(which), first_s[which], joins_s[which])
        found_s[which] = decode_tbt_s(*parts, unit.engine(), goals.tbt_of)
    return found_s


def prefill_share(workload: Workload, unit: Unit, goals: Goals, instances: int = 1) -> float:
    """Share of requests that meet the TTFT objective."""
    return float(np.mean(ttft_s(workload, unit, goals, instances) <= goals.ttft_s))


def decode_share(workload: Workload, unit: Unit, goals: Goals) -> float:
    """Share of requests that meet the TBT objective on one instance, if prompts took no time."""
    found_s = tbt_s(workload, workload.arrivals_s, unit, goals)
    return float(np.mean(found_s <= goals.tbt_s))


def pair_share(
    workload: Workload, prefill: Unit, decode: Unit, goals: Goals, counts: tuple[int, int] = (1, 1)
) -> float:
    """Share of requests that meet both objectives, on so many instances of each role."""
    waited_s = ttft_s(workload, prefill, goals, counts[0])
    gaps_s = tbt_s(workload, workload.arrivals_s + waited_s, decode, goals, counts[1])
    return float(np.mean((waited_s <= goals.ttft_s) & (gaps_s <= goals.tbt_s)))


def colocated_share(workload: Workload, unit: Unit, goals: Goals) -> float:
    """The same, on one instance that does both; see `colocated_s`."""
    first_s, gaps_s = colocated_s(workload, unit.engine(), goals.tbt_of)
    in_time = first_s - workload.arrivals_s <= goals.ttft_s
    return float(np.mean(in_time & (gaps_s <= goals.tbt_s)))


def goodput(
    share_of: Callable[[Workload], float],
    workload: Workload,
    goals: Goals,
    *,
    start: float = 1.0,
    precision: float = PRECISION,
) -> float:
    """Requests per second up to which enough requests meet their objectives. The workload's own
    rate may be any; `start` is where the search begins."""
    own_rate = workload.rate

    def attained_at(rate: float) -> float:
        return share_of(workload.faster(rate / own_rate))

    return highest_rate(
        attained_at,
        target_share=goals.share,
        start=min(start, len(workload) / SPAN_MIN_S),
        precision=precision,
        rate_max=len(workload) / SPAN_MIN_S,
    )
