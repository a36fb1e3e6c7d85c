"""Conductors that share over a board in place of Redis, for the tests of sharing."""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from tiffin.conductor.core.settings import Settings, patched
from tiffin.conductor.records import InstanceSpec, Request, Role
from tiffin.conductor.replicas.replica import SharedConductor, SharingSettings
from tiffin.conductor.replicas.states import State, pack, unpack

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
    return SharedConductor(
        name,
        settings,
        address=f"http://{name}",
        dice=random.Random(f"{name}{seed}"),
        sharing=sharing,
    )


@dataclass
class Board:
    """The data that conductors write to Redis."""

    states: dict[str, tuple[bytes, float]] = field(default_factory=dict)  # (state, its expiry)
    records: dict[str, bytes] = field(default_factory=dict)
    leader: str = ""
    leads_until: float = 0.0

    def write(self, core: SharedConductor, now: float) -> None:
        self.states[core.name] = pack(core.state(now)), now + core.sharing.dead_s
        for instance, read, new in core.changes(now):
            if self.records.get(instance, b"") == read:
                self.records[instance] = new
                if not new:
                    del self.records[instance]
        if now >= self.leads_until or self.leader == core.name:
            self.leader, self.leads_until = core.name, now + core.lease.lead_s
        core.lease.answered(self.leader, now)

    def read(self, core: SharedConductor, now: float) -> None:
        alive = [raw for raw, until in self.states.values() if until > now]
        states = [state for raw in alive if (state := unpack(raw, State))]
        for state in states:
            core.hear(state, now)
        core.settle([state.name for state in states], now)
        core.merge(dict(self.records), now)


@dataclass
class Town:
    """Conductors with one clock. `exchange` lets all live conductors that are not `deaf` write and
    read all states; `pass_s` advances the clock."""

    conductors: list[SharedConductor]
    now: float = 100.0
    deaf: set[str] = field(default_factory=set)
    board: Board = field(default_factory=Board)

    @classmethod
    def of(cls, *names: str, **changes: Any) -> Town:
        town = cls([conductor(name, **changes) for name in names])
        town.exchange()
        return town

    def __getitem__(self, name: str) -> SharedConductor:
        return next(one for one in self.conductors if one.name == name)

    def register(self, *specs: InstanceSpec) -> None:
        for one in specs:
            self.conductors[0].register(one, self.now)
        self.exchange()

    def exchange(self) -> None:
        for one in self.conductors:
            if one.name not in self.deaf:
                self.board.write(one, self.now)
        for one in self.conductors:
            if one.name in self.deaf:
                one.settle(None, self.now)
            else:
                self.board.read(one, self.now)

    def pass_s(self, seconds: float) -> None:
        """Advance the clock, with an exchange at every interval."""
        for _ in range(max(1, round(seconds / INTERVAL_S))):
            self.now += INTERVAL_S
            self.exchange()
            for one in self.conductors:
                one.tick(self.now)

    def kill(self, name: str) -> None:
        self.conductors = [one for one in self.conductors if one.name != name]

    @property
    def leaders(self) -> list[str]:
        return [core.name for core in self.conductors if core.steering.leads(self.now)]


def column(core: SharedConductor, name: str) -> dict[str, int]:
    """The values of a column by instance, except zeros."""
    values = getattr(core.cluster, name)
    return {one: int(values[core.cluster.row(one)]) for one in core.cluster.names
            if values[core.cluster.row(one)]}  # fmt: skip


def loads(core: SharedConductor) -> dict[str, dict[str, int]]:
    return {name: column(core, name) for name in OWN}


def own_is_zero(cores: Iterable[SharedConductor]) -> bool:
    return all(not np.any(getattr(core.cluster, f"own_{name}")) for core in cores for name in OWN)
