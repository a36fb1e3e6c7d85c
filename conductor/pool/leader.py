"""Leader election among several conductors, and takeover of a dead conductor's role flips. Pure.

Every conductor plans from its own view. If all of them also sent orders, each order would be
carried out once per conductor, so only the leader sends them. The leader holds a lease that Redis
grants (`replicas/redis_link.py`: a key in Redis) and that it renews; when the leader dies, the
lease expires and another conductor gets it. A leader that can't renew stops leading when the lease
expires by its own clock, which is before it expires for the other conductors.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from ..records import Role


class LeaderLease:
    """The leader lease as the conductor `name` sees it; each of its exchanges asks for it."""

    def __init__(self, name: str, lead_s: float) -> None:
        self.name = name
        self.lead_s = lead_s
        self._leader, self._leads_until = "", -inf

    def answered(self, leader: str, asked_at: float) -> None:
        """Record the lease holder from the answer to the request that was sent at `asked_at`. The
        lease is counted from then and not from the answer's arrival, because Redis starts it at a
        moment between the two."""
        self._leader, self._leads_until = leader, asked_at + self.lead_s

    def resign(self) -> None:
        """Give the lease back: this conductor stops leading."""
        self._leader = ""

    def holds(self, now: float) -> bool:
        """Whether this conductor leads."""
        return self.leader(now) == self.name

    def leader(self, now: float) -> str:
        """The name of the conductor that leads; "" if no leader is known."""
        return self._leader if now < self._leads_until else ""


@dataclass(frozen=True, slots=True)
class _Flip:
    role: Role
    by: str
    heard_at: float


class FlipsElsewhere:
    """Role flips that other conductors report to have under way, by instance.

    `alive` is a live view of the names of the other conductors that are alive. A report of a flip
    may arrive before the first sign of life of its conductor, so a conductor outside `alive` counts
    as dead only `dead_s` after its flip was reported.
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
        """The new role of an instance in a flip, and the name of the conductor that flips it."""
        found = self._flips.get(instance)
        return None if found is None else (found.role, found.by)

    def put(self, instance: str, role: Role, by: str, now: float) -> None:
        """Record that the conductor `by` flips an instance to this role."""
        self._flips[instance] = _Flip(role, by, now)

    def pop(self, instance: str) -> bool:
        """Remove an instance's flip; returns whether another conductor had one under way."""
        return self._flips.pop(instance, None) is not None

    def orphans(self, now: float) -> list[tuple[str, Role]]:
        """Instances whose flipping conductor has died, with their new roles."""
        late = now - self._dead_s
        return [
            (instance, flip.role)
            for instance, flip in self._flips.items()
            if flip.by not in self._alive and flip.heard_at <= late
        ]
