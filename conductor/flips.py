"""An instance changes its role, without losing a request and without leaving a role empty. Pure.

    DRAINING    nothing new is assigned to it, in either role; its requests end
    COMMITTING  it is told its new role (what it takes: a call, or a restart; the shell knows)
    VERIFYING   it has said yes; a probe has to show that it does the new work
    READY       it is assigned work in its new role

    RETURNED    it was not drained in time, or is needed where it was: it goes on as before
    FAILED      it did not take the new role, or the probe failed: it is assigned nothing, and
                somebody has to look, for nobody knows what it is now
    LOST        it went away or fell silent meanwhile, or another conductor goes on with it

The order is the one that operators of vLLM's and SGLang's role switches advise: belong to neither
role first, drain, switch, verify, and only then be assigned to. A request is never cut for a flip,
and a flip never begins that would leave fewer than the minimum in the old role. If others fail
while it drains, so that the minimum is broken, it returns.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from .errors import Conflict
from .records import Role

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

# Flips that have ended and are remembered, for whoever asks what happened.
ENDED_MAX = 64


class FlipSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How long each step of a flip may take, and how many instances each role keeps."""

    drain_s: Annotated[float, Meta(gt=0, le=86_400)] = 120.0
    """For its requests to end; the longest answers take longer, and then it returns."""

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
    """Where a flip is."""

    DRAINING = "draining"
    COMMITTING = "committing"
    VERIFYING = "verifying"
    READY = "ready"
    RETURNED = "returned"
    FAILED = "failed"
    LOST = "lost"


ENDED = (Step.READY, Step.RETURNED, Step.FAILED, Step.LOST)


@dataclass(frozen=True, slots=True)
class Member:
    """What is known of an instance. `requests` are in flight there; `latency` is (c0, c1, c2, d0,
    d1, d2) of its profile. `lost`: it is silent."""

    id: str
    role: Role
    ready: bool
    requests: int = 0
    latency: tuple[float, ...] = (0.0,) * 6
    kv_capacity_tokens: int = 1_000_000
    batch_max: int = 256
    lost: bool = False


@dataclass(frozen=True, slots=True)
class Assign:
    """Give an instance new work (`on`), or none."""

    instance: str
    on: bool


@dataclass(frozen=True, slots=True)
class SetRole:
    """Tell an instance its role; report by `Flips.committed`."""

    instance: str
    role: Role


@dataclass(frozen=True, slots=True)
class Verify:
    """Have an instance do a little of the new role's work; report by `Flips.verified`."""

    instance: str
    role: Role


Action = Assign | SetRole | Verify


@dataclass(slots=True)
class Flip:
    """One instance's way from role to role. `why` is of the one who began it, or of the end."""

    instance: str
    old: Role
    new: Role
    step: Step
    began_at: float
    until: float  # of this step; of one that has ended, when it did
    why: str = ""

    def __str__(self) -> str:
        return f"{self.instance}: {self.old} -> {self.new}, {self.step} ({self.why})"


class Flips:
    """All flips under way here; `elsewhere` names instances that others flip. Not thread-safe."""

    def __init__(
        self, settings: FlipSettings | None = None, elsewhere: Collection[str] = ()
    ) -> None:
        self.settings = settings or FlipSettings()
        self._elsewhere = elsewhere
        self._under_way: dict[str, Flip] = {}
        self._ended: list[Flip] = []

    @property
    def under_way(self) -> list[Flip]:
        """Those that have not ended, oldest first."""
        return list(self._under_way.values())

    @property
    def ended(self) -> list[Flip]:
        """Those that have, oldest first; the last ENDED_MAX of them."""
        return list(self._ended)

    def may_begin(self, instance: str, new: Role, fleet: Sequence[Member]) -> str:
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
        self, instance: str, new: Role, fleet: Sequence[Member], now: float, why: str = ""
    ) -> list[Action]:
        """Take an instance out of its role. Raises Conflict if that can't be now."""
        obstacle = self.may_begin(instance, new, fleet)
        if obstacle:
            raise Conflict(f"no flip: {obstacle}")
        old = next(m.role for m in fleet if m.id == instance)
        until = now + self.settings.drain_s
        self._under_way[instance] = Flip(instance, old, new, Step.DRAINING, now, until, why)
        return [Assign(instance, on=False)]

    def resume(
        self, instance: str, new: Role, fleet: Sequence[Member], now: float, why: str = ""
    ) -> list[Action]:
        """Go on with a flip of somebody who is no more: its instance is given no work. One that may
        have been told its role is told again, which changes nothing if it was."""
        member = next((m for m in fleet if m.id == instance), None)
        if member is None or instance in self._under_way:
            return []
        flip = Flip(
            instance, member.role, new, Step.DRAINING, now, now + self.settings.drain_s, why
        )
        self._under_way[instance] = flip
        return self._commit(flip, now) if member.role is new else []

    def forget(self, instance: str, now: float, why: str) -> None:
        """Somebody else goes on with it, wherever it is; nothing if there is none."""
        flip = self._under_way.get(instance)
        if flip is not None:
            self._end(flip, Step.LOST, why, now)

    def cancel(self, instance: str, now: float, why: str) -> bool:
        """Give up a flip whose instance was not told yet; who cancels says whether it is assigned
        work. False if there is none, or it was told: then it goes on, to know what became of it."""
        flip = self._under_way.get(instance)
        if flip is None or flip.step is not Step.DRAINING:
            return False
        self._end(flip, Step.RETURNED, why, now)
        return True

    def tick(self, fleet: Sequence[Member], now: float) -> list[Action]:
        """Go on with all flips. Every second or so, with the instances as they are now."""
        members = {member.id: member for member in fleet}
        actions: list[Action] = []
        for flip in self.under_way:
            member = members.get(flip.instance)
            if member is None:
                self._end(flip, Step.LOST, "it went away", now)
            elif flip.step is Step.DRAINING and member.lost:
                # It was told nothing. Who was may be silent while it takes its role.
                self._end(flip, Step.LOST, "it fell silent", now)
                actions.append(Assign(flip.instance, on=True))  # when it is heard of again
            elif flip.step is Step.DRAINING:
                actions += self._drain(flip, member, fleet, now)
            elif now >= flip.until:
                self._end(flip, Step.FAILED, f"{flip.step} took too long; look at it", now)
        return actions

    def committed(self, instance: str, now: float, error: str = "") -> list[Action]:
        """What came of a SetRole; `error` says why it failed."""
        flip = self._under_way.get(instance)
        if flip is None or flip.step is not Step.COMMITTING:
            return []
        if error:
            self._end(flip, Step.FAILED, f"it did not take its new role: {error}", now)
            return []
        flip.step, flip.until = Step.VERIFYING, now + self.settings.verify_s
        return [Verify(instance, flip.new)]

    def verified(self, instance: str, now: float, error: str = "") -> list[Action]:
        """What came of a Verify."""
        flip = self._under_way.get(instance)
        if flip is None or flip.step is not Step.VERIFYING:
            return []
        if error:
            self._end(flip, Step.FAILED, f"it does not do its new work: {error}", now)
            return []
        self._end(flip, Step.READY, flip.why, now)
        return [Assign(instance, on=True)]

    def _drain(
        self, flip: Flip, member: Member, fleet: Sequence[Member], now: float
    ) -> list[Action]:
        broken = self._breaks_minimum(flip.instance, flip.old, fleet)
        if broken or (member.requests and now >= flip.until):
            late = f"{member.requests} requests had not ended"
            self._end(flip, Step.RETURNED, broken or late, now)
            return [Assign(flip.instance, on=True)]
        return [] if member.requests else self._commit(flip, now)

    def _commit(self, flip: Flip, now: float) -> list[Action]:
        flip.step, flip.until = Step.COMMITTING, now + self.settings.commit_s
        return [SetRole(flip.instance, flip.new)]

    def _breaks_minimum(self, instance: str, role: Role, fleet: Sequence[Member]) -> str:
        """Why a role that an instance has can't do without it; "" if it can."""
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
