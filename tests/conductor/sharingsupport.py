"""Conductors whose bulletins are carried by hand, and engines that count what they have, for the
tests of sharing."""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from tiffin.conductor.core.settings import Settings, patched
from tiffin.conductor.records import InstanceSpec, Request, Role
from tiffin.conductor.replicas.remote_load import SharingSettings
from tiffin.conductor.replicas.replica import SharedConductor

if TYPE_CHECKING:
    from collections.abc import Iterable

PROFILE = "llama-3-70b.a800.tp8.mooncake"
BLOCK = 512
OWN = ("queued", "queued_tokens", "batch", "context_tokens", "kv_used_tokens")
INTERVAL_S = 0.05
DEAD_S = 2.0


def keys(name: str, count: int) -> tuple[bytes, ...]:
    """The chained keys of a prompt."""
    return tuple(
        hashlib.blake2b(f"{name}/{at}".encode(), digest_size=16).digest() for at in range(count)
    )


def spec(name: str, role: Role = Role.MIXED, **more: Any) -> InstanceSpec:
    return InstanceSpec(name, "m", role, PROFILE, **{"block_bytes": 160 << 20, **more})


def request(name: str, tokens: int = 4000, **more: Any) -> Request:
    given = {"output_tokens": 100, "keys": keys(name, tokens // BLOCK), **more}
    return Request(name, "m", tokens, **given)


def conductor(name: str, seed: int = 0, **changes: Any) -> SharedConductor:
    sharing = SharingSettings(interval_s=INTERVAL_S, dead_s=DEAD_S)
    settings = patched(Settings(), {"admission": {"mode": "off"}, **changes})
    return SharedConductor(name, settings, dice=random.Random(f"{name}{seed}"), sharing=sharing)


@dataclass
class Town:
    """Conductors with one clock. `exchange` lets everybody who lives, and is not `deaf`, say and
    hear everything; time passes in `pass_s`."""

    conductors: list[SharedConductor]
    now: float = 100.0
    deaf: set[str] = field(default_factory=set)
    log: list[bytes] = field(default_factory=list)
    read: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, *names: str, **changes: Any) -> Town:
        town = cls([conductor(name, **changes) for name in names])
        town.exchange()
        town.pass_s(1.1)  # everybody has heard that the others ask, and has told
        return town

    def __getitem__(self, name: str) -> SharedConductor:
        return next(one for one in self.conductors if one.name == name)

    def register(self, *specs: InstanceSpec) -> None:
        for one in specs:
            self.conductors[0].register(one, self.now)
        self.exchange()

    def exchange(self) -> None:
        for one in self.conductors:
            told = one.bulletins(self.now)
            if one.name in self.deaf:
                one.interrupted()
            else:
                self.log += told
        for one in self.conductors:
            if one.name not in self.deaf:
                for raw in self.log[self.read.get(one.name, 0) :]:
                    one.hear(raw, self.now)
                self.read[one.name] = len(self.log)
            one.settle(self.now)

    def pass_s(self, seconds: float) -> None:
        """Exchanges at every interval."""
        for _ in range(max(1, round(seconds / INTERVAL_S))):
            self.now += INTERVAL_S
            self.exchange()
            for one in self.conductors:
                one.tick(self.now)

    def kill(self, name: str) -> None:
        self.conductors = [one for one in self.conductors if one.name != name]


def column(core: SharedConductor, name: str) -> dict[str, int]:
    """A column by instance, those that are not zero."""
    values = getattr(core.cluster, name)
    return {one: int(values[core.cluster.row(one)]) for one in core.cluster.names
            if values[core.cluster.row(one)]}  # fmt: skip


def loads(core: SharedConductor) -> dict[str, dict[str, int]]:
    return {name: column(core, name) for name in OWN}


def own_is_zero(cores: Iterable[SharedConductor]) -> bool:
    return all(not np.any(getattr(core.cluster, f"own_{name}")) for core in cores for name in OWN)
