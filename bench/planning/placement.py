"""DistServe's two searches for a placement (OSDI '24, algorithms 1 and 2). Pure.

Where any two GPUs have a fast network between them, each role is searched for alone, and gets as
many instances as the rate takes. Where only the GPUs of a node have one, both roles' share of a
pipeline stage has to be on one node, and pairs are simulated together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import TYPE_CHECKING

from .attainment import PRECISION, Unit, decode_share, goodput, pair_share, prefill_share

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from tiffin.conductor.cost.latency_profiles import Profile

    from .attainment import Goals
    from .memory import ModelSize
    from .workload import Workload

    Share = Callable[[Workload, Unit, Goals], float]


# Pipeline stages that are tried on one node.
STAGES = (1, 2, 4)


@dataclass(frozen=True, slots=True)
class Hardware:
    """What instances may be built of: profiles of one model on one kind of GPU at several degrees
    of tensor parallelism, the model's size, and the memory of a GPU that an engine may use."""

    profiles: tuple[Profile, ...]
    size: ModelSize
    usable_bytes: float

    def units(self, gpus_max: int, stages: Sequence[int] = STAGES) -> list[Unit]:
        """All instances of at most so many GPUs into which the model fits."""
        made = [self.unit(profile, count) for profile in self.profiles for count in stages]
        return [unit for unit in made if unit.gpus <= gpus_max and unit.kv_tokens]

    def unit(self, profile: Profile, stages: int) -> Unit:
        """An instance; it may have no room."""
        gpus = profile.tensor_parallel * stages
        return Unit(profile, self.size.kv_tokens(gpus, self.usable_bytes), stages)


@dataclass(frozen=True, slots=True)
class Choice:
    """An instance of one role, and the requests per second it serves within its objective."""

    unit: Unit
    goodput: float

    @property
    def per_gpu(self) -> float:
        """Requests per second and GPU."""
        return self.goodput / self.unit.gpus


@dataclass(frozen=True, slots=True)
class Placement:
    """Instances of both roles. `per_gpu`: goodput over GPUs, if nothing is rounded up."""

    prefill: Unit
    decode: Unit
    prefills: int
    decodes: int
    per_gpu: float

    @property
    def gpus(self) -> int:
        """Of all instances."""
        return self.prefill.gpus * self.prefills + self.decode.gpus * self.decodes

    @property
    def label(self) -> str:
        """For people."""
        return f"{self.prefill.label} / {self.decode.label}"


def high_affinity(
    hardware: Hardware, workload: Workload, goals: Goals, rate: float, *, gpus_max: int = 8
) -> Placement | None:
    """Algorithm 1: the best of each role, and as many as `rate` requests per second take. None if
    no instance of at most `gpus_max` GPUs meets an objective."""
    prefills, decodes = roles(hardware.units(gpus_max), workload, goals)
    prefill, decode = best(prefills), best(decodes)
    if not prefill.goodput or not decode.goodput:
        return None
    return Placement(
        prefill.unit,
        decode.unit,
        math.ceil(rate / prefill.goodput),
        math.ceil(rate / decode.goodput),
        1 / (1 / prefill.per_gpu + 1 / decode.per_gpu),
    )


def roles(
    units: Iterable[Unit], workload: Workload, goals: Goals
) -> tuple[list[Choice], list[Choice]]:
    """Each unit's goodput as one role, and as the other."""
    both: tuple[list[Choice], list[Choice]] = ([], [])
    for unit in units:
        for share, found in zip((prefill_share, decode_share), both, strict=True):
            served = goodput(partial(_alone, share, unit, goals), workload, goals)
            found.append(Choice(unit, served))
    return both


def _alone(share: Share, unit: Unit, goals: Goals, workload: Workload) -> float:
    return share(workload, unit, goals)


def best(choices: Sequence[Choice]) -> Choice:
    """The most goodput per GPU. A larger instance has to be better by more than the precision."""
    by_size = sorted(choices, key=lambda choice: choice.unit.gpus)
    found = by_size[0]
    for one in by_size[1:]:
        if one.per_gpu > found.per_gpu * (1 + PRECISION):
            found = one
    return found


def low_affinity(
    hardware: Hardware,
    workload: Workload,
    goals: Goals,
    rate: float,
    *,
    node_gpus: int = 8,
    nodes: int = 1,
) -> Placement | None:
    """Algorithm 2: the best pair of instances whose parts of one segment fit on a node together.
    Over `n` nodes, both have `n` segments. None if no pair meets the objectives.

    A pair is no better than the worse of its roles alone; pairs are simulated in the order of that
    bound, until no other one can be the best.
    """
    found: Placement | None = None
    for bound, prefill, decode in _pairs(hardware, workload, goals, node_gpus, nodes):
        if found is not None and bound <= found.per_gpu * (1 + PRECISION):
            break
        gpus = prefill.gpus + decode.gpus
        share = partial(_together, prefill, decode, goals)
        served = goodput(share, workload, goals, start=bound * gpus)
        if served and (found is None or served / gpus > found.per_gpu * (1 + PRECISION)):
            count = math.ceil(rate / served)
            found = Placement(prefill, decode, count, count, served / gpus)
    return found


def _together(prefill: Unit, decode: Unit, goals: Goals, workload: Workload) -> float:
    return pair_share(workload, prefill, decode, goals)


def _pairs(
    hardware: Hardware, workload: Workload, goals: Goals, node_gpus: int, nodes: int
) -> list[tuple[float, Unit, Unit]]:
    """(bound of the goodput per GPU, prefill, decode), the best bound first, small ones before."""
    found: dict[tuple[str, str], tuple[float, Unit, Unit]] = {}
    for segments in range(1, nodes + 1):
        stages = [count * segments for count in STAGES]
        units = hardware.units((node_gpus - 1) * segments, stages)
        prefills, decodes = roles(units, workload, goals)
        for prefill, decode in product(prefills, decodes):
            gpus = prefill.unit.gpus + decode.unit.gpus
            served = min(prefill.goodput, decode.goodput)
            if served and gpus <= node_gpus * segments:
                key = (prefill.unit.label, decode.unit.label)
                found.setdefault(key, (served / gpus, prefill.unit, decode.unit))
    return sorted(found.values(), key=lambda pair: (-pair[0], pair[1].gpus + pair[2].gpus))
