"""A small conductor for the service's tests: it does what it is told to, and remembers it.

It has the methods of `core.Conductor` and real instances, and decides by round-robin.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from tiffin.conductor.cluster import Cluster
from tiffin.conductor.errors import Conflict, InvalidRequest, UnknownModel, UnknownRequest
from tiffin.conductor.popularity import HotPrefix
from tiffin.conductor.records import (
    Candidate,
    Decision,
    Fetch,
    InstanceSpec,
    Load,
    Rejection,
    Request,
    RequestEvent,
    Role,
    Status,
)

KEY = bytes(range(16))
MODEL = "llama-3-8b"
LATENCY = (0.01, 1e-4, 1e-9, 0.01, 1e-4, 1e-8)


class DoubleSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Settings of the double."""

    policy: str = "round-robin"
    weight: float = 1.0


@dataclass
class View:
    spec: InstanceSpec
    role: Role
    status: Status
    heard_s: float
    load: dict[str, float]


@dataclass
class Matched:
    blocks: int
    holders: list[tuple[str, int, float]]


@dataclass
class Double:
    """`reject`: what the next requests are answered with."""

    settings: DoubleSettings = field(default_factory=DoubleSettings)
    cluster: Cluster = field(default_factory=Cluster)
    reject: Rejection | None = None
    log: deque[Decision | Rejection] = field(default_factory=lambda: deque(maxlen=100))
    flights: dict[str, tuple[Request, Decision]] = field(default_factory=dict)
    events: list[RequestEvent] = field(default_factory=list)
    loads: dict[str, Load] = field(default_factory=dict)
    registrations: list[InstanceSpec] = field(default_factory=list)
    ticks: int = 0
    turn: int = 0

    def schedule(self, request: Request, now: float) -> Decision | Rejection:
        known = self.flights.get(request.id)
        if known is not None:
            if known[0] != request:
                raise Conflict(f"another prompt is in flight as {request.id!r}")
            return known[1]
        if self.cluster.model_number(request.model) is None:
            raise UnknownModel(f"no instance has registered {request.model!r}")
        if self.reject is not None:
            outcome = replace(self.reject, request_id=request.id, decided_at=now)
            self.log.append(outcome)
            return outcome
        rows = self.cluster.rows_for(request.model, prefill=True)
        if not len(rows):
            rejection = Rejection(request.id, "no_prefill", "no instance prefills", decided_at=now)
            self.log.append(rejection)
            return rejection
        self.turn += 1
        names = [self.cluster.name(int(row)) for row in rows]
        chosen = names[self.turn % len(names)]
        decision = Decision(
            request.id,
            chosen,
            chosen,
            self.settings.policy,
            0.5,
            0.02,
            cached_tokens=512,
            available_tokens=1024,
            fetches=(Fetch(0, 1, "node-a/dram", 1 << 20, 0.01),),
            candidates=tuple(
                Candidate(name, float("inf") if name != chosen else 1.0, {"queue_s": float(i)})
                for i, name in enumerate(names)
            ),
            decided_at=now,
            expires_at=now + 60,
        )
        self.flights[request.id] = (request, decision)
        self.log.append(decision)
        return decision

    def observe(self, event: RequestEvent, now: float) -> None:
        if event.request_id not in self.flights:
            raise UnknownRequest(f"no request {event.request_id!r} is in flight")
        self.events.append(event)
        if event.kind in ("finished", "cancelled"):
            del self.flights[event.request_id]

    def tick(self, now: float) -> None:
        self.ticks += 1

    def register(self, spec: InstanceSpec, now: float) -> None:
        if spec.profile == "unknown":
            raise InvalidRequest("no profile 'unknown'")
        self.registrations.append(spec)
        self.cluster.register(spec, LATENCY, now)

    def heartbeat(self, instance: str, load: Load, now: float) -> None:
        self.cluster.heard(instance, load, now)
        self.loads[instance] = load

    def remove(self, instance: str) -> None:
        self.cluster.remove(instance)

    def drain(self, instance: str, now: float) -> None:
        self.cluster.set_status(instance, Status.DRAINING)

    def flip(self, instance: str, role: Role, now: float) -> None:
        self.cluster.set_role(self.cluster.row(instance), role)

    def instances(self, now: float) -> list[View]:
        found = []
        for name in self.cluster.names:
            row = self.cluster.row(name)
            prefills, decodes = bool(self.cluster.prefills[row]), bool(self.cluster.decodes[row])
            role = Role.MIXED if prefills and decodes else Role.PREFILL if prefills else Role.DECODE
            heard_s = now - float(self.cluster.heard_at[row])
            load = {"running": float(self.cluster.batch[row])}
            spec = self.cluster.spec(name)
            found.append(View(spec, role, self.cluster.status[row], heard_s, load))
        return found

    def match(self, keys: Any) -> Matched:
        have = 1 if keys and keys[0] == KEY else 0
        return Matched(have, [("node-b/nvme", 0, 2.0), ("node-a/dram", have, 0.5)])

    def hot(self, n: int) -> list[HotPrefix]:
        return [HotPrefix((KEY, KEY[::-1]), 3.0, 0.5, 0.1, 64, MODEL)][:n]

    def decision(self, request_id: str) -> Decision | Rejection | None:
        return next((one for one in reversed(self.log) if one.request_id == request_id), None)

    def decisions(self, limit: int) -> list[Decision | Rejection]:
        return list(reversed(self.log))[:limit]

    def patch(self, changes: dict[str, Any]) -> DoubleSettings:
        merged = {**msgspec.to_builtins(self.settings), **changes}
        try:
            self.settings = msgspec.convert(merged, DoubleSettings)
        except msgspec.ValidationError as error:
            raise InvalidRequest(f"settings: {error}") from error
        return self.settings

    def statistics(self) -> dict[str, Any]:
        return {}


def spec_body(**changes: Any) -> dict[str, Any]:
    """What an instance registers with."""
    return {"model": MODEL, "role": "mixed", "profile": "test", **changes}
