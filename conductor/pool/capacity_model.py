"""How much one instance, and a fleet of them, can serve within its objectives. Pure formulas.

Prefill is a queue: prompts arrive at random and are served one at a time, D seconds each. For M/G/1
the mean wait is R E[D²] / (2 (1 - R E[D])) (Pollaczek and Khinchine); with D always the same
it is the M/D/1 of DistServe (OSDI '24): TTFT = D + R D² / (2 (1 - R D)). Solved for the rate R at
which the mean TTFT is the objective, with W = TTFT - D and cv the variation of D:

    R = 2 W / (D² (1 + cv²) + 2 W D)

Decode is a batch: a step of b requests of L tokens of context takes d0 + d1 b + d2 b L, and each
gets one token of it. The largest b whose step is within the objective gives b / step tokens per
second, as in Dynamo's planner, with L = prompt + answer / 2 (an answer's context grows while it is
written). `latency` is (c0, c1, c2, d0, d1, d2) everywhere, in seconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Self

from ..records import Role

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from .prompt_sums import PromptMoments
    from .role_flip import FleetMember


@dataclass(frozen=True, slots=True)
class Workload:
    """The average request. `computed_tokens` of the prompt are not cached; `variation` is the
    coefficient of variation of the prefill time of prompts. With `moments` of the prompts, mean and
    variation of their prefill time follow from those instead. The factors are by how much instances
    are slower than their profiles (1: not at all)."""

    prompt_tokens: float
    computed_tokens: float
    output_tokens: float
    variation: float = 1.0
    prefill_factor: float = 1.0
    decode_factor: float = 1.0
    moments: PromptMoments | None = None

    @property
    def context_tokens(self) -> float:
        """Context length of a request during decode, averaged over its answer."""
        return self.prompt_tokens + self.output_tokens / 2


@dataclass(frozen=True, slots=True)
class Goals:
    """Latency objectives (mean TTFT, time between tokens) and the maximum utilisation of a prefill
    instance."""

    ttft_s: float
    tbt_s: float
    utilisation_max: float = 0.9


@dataclass(frozen=True, slots=True)
class Capacity:
    """Requests per second that one instance serves in either role. `unattainable` names objectives
    that it misses even when idle; its rate is then what it reaches without the objective."""

    prefill_rate: float
    decode_rate: float
    prefill_s: float
    batch: int
    step_s: float
    unattainable: tuple[str, ...] = ()


def service_s(latency: Sequence[float], work: Workload) -> float:
    """Mean prefill time: c0 + c1 (n - p) + c2 (n² - p²), n - p tokens computed, of each prompt; or
    without `moments`, of the average prompt."""
    if work.moments is not None:
        return work.prefill_factor * work.moments.mean_s(latency)
    c0, c1, c2 = latency[:3]
    n, computed = work.prompt_tokens, min(work.computed_tokens, work.prompt_tokens)
    cached = n - computed
    return work.prefill_factor * (c0 + c1 * computed + c2 * (n * n - cached * cached))


def prefill_rate(service_s: float, variation: float, goals: Goals) -> float:
    """Prompts per second at which the mean TTFT is the objective; 0 if one alone misses it."""
    if service_s <= 0:
        return math.inf
    wait_s = goals.ttft_s - service_s
    if wait_s <= 0:
        return 0.0
    queueing = service_s * service_s * (1 + variation * variation)
    return min(2 * wait_s / (queueing + 2 * wait_s * service_s), goals.utilisation_max / service_s)


def decode_batch(member: FleetMember, work: Workload, goals: Goals) -> int:
    """The largest decode batch of an instance within the objective for time between tokens and
    within its KV capacity; 0 if a batch of one request misses the objective."""
    d0, d1, d2 = member.latency[3:]
    step_max_s = goals.tbt_s / work.decode_factor
    each_s = d1 + d2 * work.context_tokens
    room = int(member.kv_capacity_tokens / max(work.prompt_tokens + work.output_tokens, 1.0))
    most = max(0, min(member.batch_max, room))
    if step_max_s < d0 + each_s:
        return 0
    return most if each_s <= 0 else min(most, int((step_max_s - d0) / each_s * (1 + 1e-12)))


def capacity(member: FleetMember, work: Workload, goals: Goals) -> Capacity:
    """The capacity of an instance in either role."""
    unattainable = []
    one_s = service_s(member.latency, work)
    moments = work.moments
    variation = work.variation if moments is None else moments.variation(member.latency)
    rate = prefill_rate(one_s, variation, goals)
    if rate <= 0:
        unattainable.append("ttft")
        rate = goals.utilisation_max / one_s
    batch = decode_batch(member, work, goals)
    if batch <= 0:
        unattainable.append("tbt")
        batch = 1
    d0, d1, d2 = member.latency[3:]
    step_s = work.decode_factor * (d0 + batch * (d1 + d2 * work.context_tokens))
    tokens_s = batch / step_s if step_s > 0 else math.inf
    decode_rate = tokens_s / max(work.output_tokens, 1.0)
    return Capacity(rate, decode_rate, one_s, batch, step_s, tuple(unattainable))


def fleet_rate(roles: Iterable[tuple[Role, Capacity]]) -> float:
    """Requests per second that instances serve together, each in its role."""
    return RoleRates.of(roles).served()


class RoleRates(NamedTuple):
    """Requests per second that the instances of each role serve: mixed ones either the one or the
    other."""

    prefill: float = 0.0
    decode: float = 0.0
    mixed_prefill: float = 0.0
    mixed_decode: float = 0.0

    @classmethod
    def of(cls, roles: Iterable[tuple[Role, Capacity]]) -> Self:
        """The sums over instances."""
        prefill = decode = mixed_prefill = mixed_decode = 0.0
        for role, one in roles:
            if role is Role.PREFILL:
                prefill += one.prefill_rate
            elif role is Role.DECODE:
                decode += one.decode_rate
            else:
                mixed_prefill += one.prefill_rate
                mixed_decode += one.decode_rate
        return cls(prefill, decode, mixed_prefill, mixed_decode)

    def flipped(self, one: Capacity, new: Role) -> Self:
        """The sums after an instance that prefills decodes, or the reverse."""
        sign = 1.0 if new is Role.PREFILL else -1.0
        return self._replace(
            prefill=max(0.0, self.prefill + sign * one.prefill_rate),
            decode=max(0.0, self.decode - sign * one.decode_rate),
        )

    def served(self) -> float:
        """Requests per second that all serve together. Every request needs a prefill and a decode,
        so the scarcer of both is the limit. Mixed instances split their time between both and serve
        whichever is scarcer."""
        return _served(*self)


def _served(prefill: float, decode: float, mixed_prefill: float, mixed_decode: float) -> float:
    if not mixed_prefill or not mixed_decode:
        return min(prefill, decode)
    if math.isinf(prefill + mixed_prefill + decode + mixed_decode):
        return min(prefill + mixed_prefill, decode + mixed_decode)
    # The rate y at which both shares of the mixed instances' time, (y - own) / mixed, sum to 1.
    both = (1 + prefill / mixed_prefill + decode / mixed_decode) / (
        1 / mixed_prefill + 1 / mixed_decode
    )
    if both >= max(prefill, decode):
        return both
    # One role has capacity enough of its own: mixed instances only serve the other.
    return decode + mixed_decode if prefill > decode else prefill + mixed_prefill


def best_split(total: int, prefills: float, decodes: float, least: tuple[int, int]) -> int:
    """How many of `total` equal instances should prefill, where `prefills` and `decodes` of them
    are needed: the split with the lowest load on the more loaded role. `least` is the minimum
    number of instances of (prefill, decode)."""
    choices = range(least[0], total - least[1] + 1)
    if not choices:
        return min(max(least[0], 0), total)

    def fullest(count: int) -> tuple[float, int]:
        full = max(_per(prefills, count), _per(decodes, total - count))
        return full, count

    return min(choices, key=fullest)


def _per(needed: float, count: int) -> float:
    if not needed:
        return 0.0
    return needed / count if count else math.inf
