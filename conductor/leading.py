"""Which of several conductors orders what all of them plan, and who goes on with whose flips. Pure.

All plan, each from what it sees; were all of them to order, everything would be done as often as
there are conductors. So one leads. It holds a lease that somebody else grants (`feeds/sharing.py`:
a key in Redis) and that it renews; when it dies, the lease ends and another one gets it. Who can't
renew stops leading when its time is over by its own clock, which is before it is over for others.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from .records import Role

# Per lease: an answer may be lost twice before the lease is.
_ASKS = 4


class Lease:
    """Whether the conductor `name` leads. `error` says why the last answer did not come."""

    def __init__(self, name: str, lead_s: float) -> None:
        self.name = name
        self.lead_s = lead_s
        self.error = ""
        self._asked_at = -inf
        self._leader, self._leads_until = "", -inf

    def due(self, now: float) -> bool:
        """Whether to ask for it, or to renew it, now: four times as often as it ends. If so, it is
        taken for asked now."""
        if now < self._asked_at + self.lead_s / _ASKS:
            return False
        self._asked_at = now
        return True

    def answered(self, leader: str, asked_at: float) -> None:
        """Who has it, by an answer to what was sent at `asked_at` (not when it came: whoever grants
        counts from a moment between the two)."""
        self._leader, self._leads_until = leader, asked_at + self.lead_s

    def resign(self) -> None:
        """It is given back: this conductor leads no more."""
        self._leader = ""

    def holds(self, now: float) -> bool:
        """Whether this conductor leads."""
        return self.leader(now) == self.name

    def leader(self, now: float) -> str:
        """The name of the conductor that leads; "" if nobody is known to."""
        return self._leader if now < self._leads_until else ""


@dataclass(frozen=True, slots=True)
class _Flip:
    role: Role
    by: str
    heard_at: float


class FlipsElsewhere:
    """Flips that other conductors have under way, as these say, by instance.

    `alive` names the others that live, always as it is now. Whose flip it is may not have been
    heard yet, so that it is taken for dead only `dead_s` after its flip was told.
    """

    def __init__(self, alive: Collection[str] = (), dead_s: float = 0.0) -> None:
        self._alive = alive
        self._dead_s = dead_s
        self._flips: dict[str, _Flip] = {}

    def __contains__(self, instance: object) -> bool:
        return instance in self._flips

    def __len__(self) -> int:
        return len(self._flips)

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._flips))

    def get(self, instance: str) -> tuple[Role, str] | None:
        """The role that an instance is given, and by whom."""
        found = self._flips.get(instance)
        return None if found is None else (found.role, found.by)

    def put(self, instance: str, role: Role, by: str, now: float) -> None:
        """`by` changes an instance's role to this one."""
        self._flips[instance] = _Flip(role, by, now)

    def pop(self, instance: str) -> bool:
        """Nobody else flips it any more; whether somebody did."""
        return self._flips.pop(instance, None) is not None

    def orphans(self, now: float) -> list[tuple[str, Role]]:
        """Flips whose conductor has died, with their new roles."""
        late = now - self._dead_s
        return [
            (instance, flip.role)
            for instance, flip in self._flips.items()
            if flip.by not in self._alive and flip.heard_at <= late
        ]
