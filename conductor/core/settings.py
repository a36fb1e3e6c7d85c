"""All settings of the conductor in one tree, and how to change them at run time. Pure."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ..admission.admission import AdmissionSettings
from ..admission.counterfactual import ShadowSettings
from ..admission.hedging import RacingSettings
from ..cost.calibration import CalibrationSettings
from ..cost.transfer_model import TransferSettings
from ..decode import length_predictor
from ..decode.context_parallel import SpreadSettings
from ..decode.length_predictor import LengthSettings
from ..decode.selection import DecodeSettings
from ..errors import InvalidRequest
from ..pool.draining import DrainSettings
from ..pool.planner import PlannerSettings
from ..pool.popularity import PopularitySettings
from ..pool.replication import ReplicationSettings
from ..prefill import policy_registry
from ..prefill.disaggregation import DisaggregationSettings
from ..prefill.policies.policy_settings import PolicySettings
from ..prefill.queue import QueueSettings
from ..state.allowed_hosts import THIS_MACHINE, AllowedHosts


class CoreSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What belongs to no part alone."""

    decision_ttl_s: Annotated[float, Meta(gt=0, le=86_400)] = 120.0
    """A request that nobody has told anything of for so long is taken for lost, and what was
    reserved for it is free again. Four times the longest published TTFT objective."""

    heartbeat_timeout_s: Annotated[float, Meta(gt=0, le=3600)] = 10.0
    """An instance that was silent for so long gets nothing new. Three heartbeats of three seconds,
    as for nodes."""

    forget_s: Annotated[float, Meta(gt=0, le=2_592_000)] = 900.0
    """An instance that was silent for so long is taken off the list, as if it had been removed: one
    that comes back registers again. Longer than an engine needs to restart."""

    explained_max: Annotated[int, Meta(ge=1, le=16_384)] = 16
    """Candidates of which a decision keeps every term of the cost: the best ones."""

    log_max: Annotated[int, Meta(ge=1, le=1_000_000)] = 10_000
    """Decisions that are remembered, some 3 KB each with sixteen candidates."""


class InstanceSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What instances may say of themselves. Raises ValueError for a host that is none."""

    allowed_hosts: Annotated[
        tuple[Annotated[str, Meta(max_length=256)], ...], Meta(max_length=256)
    ] = THIS_MACHINE
    """Where instances may be, by `url` and the labels `role_url`, `orders_url`, `kv_events` and
    `kv_events_replay`: names, `*.DOMAIN`, addresses, networks, or `*`. Prompts and the engines' API
    key go there, so until somebody says more it is this machine."""

    def __post_init__(self) -> None:
        AllowedHosts(self.allowed_hosts)


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Every setting of the conductor. Raises ValueError for a policy, and for a predictor of
    lengths, that does not exist."""

    core: CoreSettings = CoreSettings()
    instances: InstanceSettings = InstanceSettings()
    policy: PolicySettings = PolicySettings()
    disaggregation: DisaggregationSettings = DisaggregationSettings()
    transfers: TransferSettings = TransferSettings()
    calibration: CalibrationSettings = CalibrationSettings()
    decode: DecodeSettings = DecodeSettings()
    lengths: LengthSettings = LengthSettings()
    spread: SpreadSettings = SpreadSettings()
    queue: QueueSettings = QueueSettings()
    racing: RacingSettings = RacingSettings()
    admission: AdmissionSettings = AdmissionSettings()
    shadow: ShadowSettings = ShadowSettings()
    popularity: PopularitySettings = PopularitySettings()
    replication: ReplicationSettings = ReplicationSettings()
    draining: DrainSettings = DrainSettings()
    planner: PlannerSettings = PlannerSettings()

    def __post_init__(self) -> None:
        if self.policy.name not in policy_registry.names():
            raise ValueError(f"policy.name: there are {', '.join(policy_registry.names())}")
        if self.lengths.predictor not in length_predictor.names():
            raise ValueError(f"lengths.predictor: there are {', '.join(length_predictor.names())}")


def patched(settings: Settings, changes: dict[str, Any]) -> Settings:
    """A copy of `settings` with the values of `changes`, a partial tree of the same shape.

    Raises InvalidRequest, naming the field, if any value does not validate.
    """
    whole = _merged(msgspec.to_builtins(settings), changes, "")
    try:
        return msgspec.convert(whole, Settings)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"settings: {error}") from error


# Replaced as a whole, not merged: their keys are names that callers choose, not settings.
_WHOLE = ("class_scales", "tenant_weights", "degrade_classes", "smaller_models")


def _merged(old: dict[str, Any], changes: dict[str, Any], where: str) -> dict[str, Any]:
    merged = dict(old)
    for name, value in changes.items():
        path = f"{where}{name}"
        if name not in old:
            raise InvalidRequest(f"settings: there is no {path}; there are {', '.join(old)}")
        if isinstance(old[name], dict) and name not in _WHOLE:
            if not isinstance(value, dict):
                raise InvalidRequest(f"settings: {path} is a group of settings: give an object")
            merged[name] = _merged(old[name], value, f"{path}.")
        else:
            merged[name] = value
    return merged
