"""Role flip: an instance changes its role, with no request lost and no role left empty. Pure.

    DRAINING    the conductor assigns no new request to the instance, in either role; its in-flight
                requests end, or go on elsewhere (`core/decode_moves.py`)
    SAVING      the instance writes the blocks that are in its HBM alone to the pool
    COMMITTING  the instance receives its new role (by a call or by a restart: the service decides)
    VERIFYING   the instance has confirmed; a probe has to show that it does the new work
    READY       the conductor assigns requests to the instance in its new role

    RETURNED    the instance was not drained in time, did not save its blocks, or its old role needs
                it: it keeps that role
    FAILED      the instance did not take the new role, or the probe failed: no request is assigned
                to it, and an operator has to look, because its role is unknown
    LOST        the instance left or stopped sending heartbeats, or another conductor took the flip
                over

The order of the steps is the one that operators of vLLM's and SGLang's role switches advise: take
the instance out of both roles, drain, switch, verify, and only then assign requests. A flip never
aborts an in-flight request, and never begins if it would leave fewer than the minimum in the old
role. If other instances fail during the drain, so that the minimum is broken, the flip returns.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from msgspec import Meta

from ..errors import Conflict
from ..records import Role
from .instance_orders import SaveBlocks

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

# Ended flips that are kept, to report what happened.
ENDED_MAX = 64


class FlipSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How long each step of a flip may take, and how many instances each role keeps."""

    requests: Literal["wait", "hand_over"] = "wait"
    """What becomes of the requests that an instance decodes: it waits for their ends, or they go on
    elsewhere, if it can hand them over."""

    blocks: Literal["save", "leave"] = "save"
    """What becomes of the blocks in its HBM: those that are nowhere else are written to the pool
    first, if it can, or are lost."""

    drain_s: Annotated[float, Meta(gt=0, le=86_400)] = 120.0
    """For its requests to end; the longest answers take longer, and then it returns."""

    save_s: Annotated[float, Meta(gt=0, le=3600)] = 60.0
    """For its blocks to be written to the pool; else it keeps its role."""

    commit_s: Annotated[float, Meta(gt=0, le=3600)] = 60.0
    """For it to take its new role. Longer where that means to load weights anew."""

    verify_s: Annotated[float, Meta(gt=0, le=3600)] = 30.0
    """For the probe."""

    prefill_min: Annotated[int, Meta(ge=0, le=16_384)] = 1
    """Instances that can prefill, always."""

    decode_min: Annotated[int, Meta(ge=0, le=16_384)] = 1
    """Instances that can decode, always."""

    at_once: Annotated[int, Meta(ge=1, le=64)] = 1
    """Flips under way."""


class Step(StrEnum):
    """The step of a flip; see the module's text."""

    DRAINING = "draining"
    SAVING = "saving"
    COMMITTING = "committing"
    VERIFYING = "verifying"
    READY = "ready"
    RETURNED = "returned"
    FAILED = "failed"
    LOST = "lost"


# It was not told of its new role yet, and can keep the old one.
_UNTOLD = (Step.DRAINING, Step.SAVING)
ENDED = (Step.READY, Step.RETURNED, Step.FAILED, Step.LOST)


@dataclass(frozen=True, slots=True)
class FleetMember:
    """State of an instance. `requests` counts its in-flight requests; `latency` is (c0, c1, c2, d0,
    d1, d2) of its profile. `lost`: it sends no heartbeats. `saves`: it can write the blocks that
    are in its HBM alone to the pool."""

    id: str
    role: Role
    ready: bool
    requests: int = 0
    latency: tuple[float, ...] = (0.0,) * 6
    kv_capacity_tokens: int = 1_000_000
    batch_max: int = 256
    lost: bool = False
    saves: bool = False


@dataclass(frozen=True, slots=True)
class Assign:
    """Start (`on`) or stop assigning new requests to an instance."""

    instance: str
    on: bool


@dataclass(frozen=True, slots=True)
class SetRole:
    """Set an instance's role; the service reports the outcome by `Flips.committed`."""

    instance: str
    role: Role


@dataclass(frozen=True, slots=True)
class Verify:
    """Probe an instance in its new role; the service reports the outcome by `Flips.verified`."""

    instance: str
    role: Role


Action = Assign | SetRole | Verify | SaveBlocks


@dataclass(slots=True)
class Flip:
    """One instance's flip from role to role. `why` is the reason for the flip, or for its end."""

    instance: str
    old: Role
    new: Role
    step: Step
    began_at: float
    until: float  # the deadline of this step; for an ended flip, the time of its end
    why: str = ""

    def __str__(self) -> str:
        return f"{self.instance}: {self.old} -> {self.new}, {self.step} ({self.why})"


class Flips:
    """The flips of this conductor; `elsewhere` names instances that other conductors flip. Not
    thread-safe."""

    def __init__(
        self, settings: FlipSettings | None = None, elsewhere: Collection[str] = ()
    ) -> None:
        self.settings = settings or FlipSettings()
        self._elsewhere = elsewhere
        self._under_way: dict[str, Flip] = {}
        self._ended: list[Flip] = []

    @property
    def under_way(self) -> list[Flip]:
        """Flips that have not ended, oldest first."""
        return list(self._under_way.values())

    @property
    def ended(self) -> list[Flip]:
        """Flips that have ended, oldest first; the last ENDED_MAX of them."""
        return list(self._ended)

    def may_begin(self, instance: str, new: Role, fleet: Sequence[FleetMember]) -> str:
        """Why an instance can't change its role now; "" if it can."""
        member = next((m for m in fleet if m.id == instance), None)
        if member is None or not member.ready:
            return f"{instance} is not ready"
        if member.role is new:
            return f"{instance} has this role already"
        if instance in self._under_way or instance in self._elsewhere:
            return f"{instance} is changing its role already"
        going = len(self._under_way)
        if self._elsewhere:
            going += sum(member.id in self._elsewhere for member in fleet)
        if going >= self.settings.at_once:
            return f"{going} are changing their roles already"
        return self._breaks_minimum(instance, member.role, fleet)

    def begin(
        self, instance: str, new: Role, fleet: Sequence[FleetMember], now: float, why: str = ""
    ) -> list[Action]:
        """Begin a flip: take an instance out of its role. Raises Conflict if it can't begin now."""
        obstacle = self.may_begin(instance, new, fleet)
        if obstacle:
            raise Conflict(f"no flip: {obstacle}")
        old = next(m.role for m in fleet if m.id == instance)
        until = now + self.settings.drain_s
        self._under_way[instance] = Flip(instance, old, new, Step.DRAINING, now, until, why)
        return [Assign(instance, on=False)]

    def resume(
        self, instance: str, new: Role, fleet: Sequence[FleetMember], now: float, why: str = ""
    ) -> list[Action]:
        """Take over the flip of a conductor that has died: its instance is assigned no requests. An
        instance that may have received its new role receives it again, which is idempotent."""
        member = next((m for m in fleet if m.id == instance), None)
        if member is None or instance in self._under_way:
            return []
        flip = Flip(
            instance, member.role, new, Step.DRAINING, now, now + self.settings.drain_s, why
        )
        self._under_way[instance] = flip
        return self._commit(flip, now) if member.role is new else []

    def forget(self, instance: str, now: float, why: str) -> None:
        """End a flip here as LOST, at any step, because another conductor continues it; no-op if
        there is none."""
        flip = self._under_way.get(instance)
        if flip is not None:
            self._end(flip, Step.LOST, why, now)

    def cancel(self, instance: str, now: float, why: str) -> bool:
        """Cancel a flip whose instance was not told of its new role; the caller decides whether it
        is assigned requests again. False if there is no flip, or it was told: then it goes on, so
        that its outcome becomes known."""
        flip = self._under_way.get(instance)
        if flip is None or flip.step not in _UNTOLD:
            return False
        self._end(flip, Step.RETURNED, why, now)
        return True

    def tick(self, fleet: Sequence[FleetMember], now: float) -> list[Action]:
        """Advance all flips. Call it every second or so, with the current state of the fleet."""
        members = {member.id: member for member in fleet}
        actions: list[Action] = []
        for flip in self.under_way:
            member = members.get(flip.instance)
            if member is None:
                self._end(flip, Step.LOST, "it went away", now)
            elif flip.step in _UNTOLD and member.lost:
                # It has not received its new role. An instance that has may be silent meanwhile.
                self._end(flip, Step.LOST, "it fell silent", now)
                actions.append(Assign(flip.instance, on=True))  # for when its heartbeats resume
            elif flip.step in _UNTOLD:
                actions += self._drain(flip, member, fleet, now)
            elif now >= flip.until:
                self._end(flip, Step.FAILED, f"{flip.step} took too long; look at it", now)
        return actions

    def saved(self, instance: str, now: float, error: str = "") -> list[Action]:
        """Record the outcome of a SaveBlocks; `error` says why blocks would be lost."""
        flip = self._under_way.get(instance)
        if flip is None or flip.step is not Step.SAVING:
            return []
        return self._return(flip, f"its blocks: {error}", now) if error else self._commit(flip, now)

    def committed(self, instance: str, now: float, error: str = "") -> list[Action]:
        """Record the outcome of a SetRole; `error` says why it failed."""
        flip = self._under_way.get(instance)
        if flip is None or flip.step is not Step.COMMITTING:
            return []
        if error:
            self._end(flip, Step.FAILED, f"it did not take its new role: {error}", now)
            return []
        flip.step, flip.until = Step.VERIFYING, now + self.settings.verify_s
        return [Verify(instance, flip.new)]

    def verified(self, instance: str, now: float, error: str = "") -> list[Action]:
        """Record the outcome of a Verify; `error` says why it failed."""
        flip = self._under_way.get(instance)
        if flip is None or flip.step is not Step.VERIFYING:
            return []
        if error:
            self._end(flip, Step.FAILED, f"it does not do its new work: {error}", now)
            return []
        self._end(flip, Step.READY, flip.why, now)
        return [Assign(instance, on=True)]

    def _drain(
        self, flip: Flip, member: FleetMember, fleet: Sequence[FleetMember], now: float
    ) -> list[Action]:
        broken = self._breaks_minimum(flip.instance, flip.old, fleet)
        if broken:
            return self._return(flip, broken, now)
        if flip.step is Step.SAVING:
            late = now >= flip.until
            return self._return(flip, "its blocks were not saved in time", now) if late else []
        if not member.requests:
            return self._empty(flip, member, now)
        if now >= flip.until:
            return self._return(flip, f"{member.requests} requests had not ended", now)
        return []

    def _empty(self, flip: Flip, member: FleetMember, now: float) -> list[Action]:
        """Its last request has ended."""
        if self.settings.blocks == "leave" or not member.saves:
            return self._commit(flip, now)
        flip.step, flip.until = Step.SAVING, now + self.settings.save_s
        return [SaveBlocks(flip.instance)]

    def _return(self, flip: Flip, why: str, now: float) -> list[Action]:
        self._end(flip, Step.RETURNED, why, now)
        return [Assign(flip.instance, on=True)]

    def _commit(self, flip: Flip, now: float) -> list[Action]:
        flip.step, flip.until = Step.COMMITTING, now + self.settings.commit_s
        return [SetRole(flip.instance, flip.new)]

    def _breaks_minimum(self, instance: str, role: Role, fleet: Sequence[FleetMember]) -> str:
        """Why the role would fall below its minimum without this instance; "" if it would not."""
        others = [
            m.role for m in fleet if m.ready and m.id != instance and m.id not in self._under_way
        ]
        prefills = sum(other is not Role.DECODE for other in others)
        decodes = sum(other is not Role.PREFILL for other in others)
        own = self.settings
        if role is not Role.DECODE and prefills < own.prefill_min:
            return f"{prefills} could prefill without it, {own.prefill_min} have to"
        if role is not Role.PREFILL and decodes < own.decode_min:
            return f"{decodes} could decode without it, {own.decode_min} have to"
        return ""

    def _end(self, flip: Flip, step: Step, why: str, now: float) -> None:
        del self._under_way[flip.instance]
        flip.step, flip.why, flip.until = step, why, now
        self._ended = [*self._ended, flip][-ENDED_MAX:]
