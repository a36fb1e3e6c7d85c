"""What is simulated: the instances and settings that a recording has, and these with changes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec

from tiffin.conductor.core.settings import Settings, patched
from tiffin.conductor.cost import latency_profiles
from tiffin.conductor.cost.latency_profiles import Profile
from tiffin.kvstore.errors import InvalidInput

from ..sim.cluster.simulation import SimulationOptions

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tiffin.conductor.recording.lines import InstanceLine

    from ..traces.recordings import Recording

# Of a node's memory for blocks, which no conductor is told of.
MEMORY_TOKENS = SimulationOptions().cache_tokens


@dataclass(frozen=True, slots=True)
class Setup:
    """A cluster of `options` on hardware of `profile`, and the conductor's settings over time."""

    options: SimulationOptions
    profile: Profile
    settings: tuple[tuple[float, Settings], ...]


@dataclass(frozen=True, slots=True)
class Changes:
    """What is to be otherwise; None: as it was."""

    policy: str | None = None
    admission: str | None = None
    prefill: int | None = None
    decode: int | None = None
    profile: Profile | None = None
    bandwidth_bytes_s: float | None = None

    def __bool__(self) -> bool:
        return self != Changes()


def in_force(recording: Recording, memory_tokens: int = MEMORY_TOKENS, seed: int = 0) -> Setup:
    """What a recording has. Of instances that differ, all are as most are. Raises InvalidInput for
    instances that the simulator does not have, InvalidRequest for settings that ours does not."""
    prefills = [one for one in recording.instances if one.role == "prefill"]
    decodes = [one for one in recording.instances if one.role == "decode"]
    mixed = len(recording.instances) - len(prefills) - len(decodes)
    if mixed or not prefills or not decodes:
        raise InvalidInput(
            f"{recording.name}: {len(prefills)} instances prefill, {len(decodes)} decode, {mixed} "
            "do both; the simulator has those that prefill and those that decode, and needs both"
        )
    settings = tuple((at_s, patched(Settings(), tree)) for at_s, tree in recording.settings)
    usual, decode = _usual(prefills), _usual(decodes)
    profile = _profile(usual, decode)
    last = settings[-1][1]
    options = SimulationOptions(
        prefill=len(prefills),
        decode=len(decodes),
        policy=last.policy.name,
        admission=last.admission.mode,
        profile=profile.name,
        token_bytes=max(1, usual.block_bytes // usual.block_tokens),
        cache_tokens=memory_tokens,
        kv_capacity_tokens=decode.kv_capacity_tokens,
        batch_max=decode.batch_max,
        bandwidth_bytes_s=last.transfers.link_bandwidth_bytes_s,
        latency_s=last.transfers.link_latency_s,
        seed=seed,
    )
    return Setup(options, profile, settings)


def changed(setup: Setup, changes: Changes) -> Setup:
    """The setup with changes, which are in force from the start. Raises InvalidRequest for a policy
    or a mode of admission that does not exist."""
    options, profile = setup.options, changes.profile or setup.profile
    wanted: dict[str, dict[str, object]] = {}
    if changes.policy is not None:
        wanted["policy"] = {"name": changes.policy}
    if changes.admission is not None:
        wanted["admission"] = {"mode": changes.admission}
    if changes.bandwidth_bytes_s is not None:
        wanted["transfers"] = {"link_bandwidth_bytes_s": changes.bandwidth_bytes_s}
    options = replace(
        options,
        prefill=changes.prefill or options.prefill,
        decode=changes.decode or options.decode,
        policy=changes.policy or options.policy,
        admission=changes.admission or options.admission,
        profile=profile.name,
        bandwidth_bytes_s=changes.bandwidth_bytes_s or options.bandwidth_bytes_s,
    )
    settings = tuple((at_s, patched(one, wanted)) for at_s, one in setup.settings)
    return Setup(options, profile, settings)


def differences(instances: Iterable[InstanceLine]) -> bool:
    """Whether instances of one role differ in what the simulator takes for equal."""
    kinds = {(one.role, _kind(one)) for one in instances}
    return len(kinds) > len({role for role, _ in kinds})


def _kind(one: InstanceLine) -> tuple[object, ...]:
    return (one.latency, one.block_bytes, one.kv_capacity_tokens, one.batch_max)


def _usual(instances: list[InstanceLine]) -> InstanceLine:
    ((kind, _),) = Counter(_kind(one) for one in instances).most_common(1)
    return next(one for one in instances if _kind(one) == kind)


def _profile(prefill: InstanceLine, decode: InstanceLine) -> Profile:
    """Prefills as by the profile of those that prefill, steps by that of those that decode."""
    c0, c1, c2 = prefill.latency[:3]
    d0, d1, d2 = decode.latency[3:]
    made = Profile(
        name=prefill.profile,
        model=prefill.model,
        hardware="as recorded",
        source="a recording",
        licence="",
        prefill=(c0, c1, c2),
        decode=(d0, d1, d2),
        tokens_max=latency_profiles.load(latency_profiles.DEFAULT).tokens_max,
    )
    return latency_profiles.validate(msgspec.structs.replace(made))
