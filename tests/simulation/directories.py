"""The directory as its users see it: with delays, outages and false entries."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tiffin.kvstore.directory.base import TIMEOUT_S, Directory
from tiffin.kvstore.directory.embedded import EmbeddedDirectory
from tiffin.kvstore.errors import DirectoryUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tiffin.kvstore.directory.base import DirectoryEvent, NodeRecord

    from .world import World

ANSWER_S = (0.0001, 0.003)
REGISTRATION_TTL_S = 2.0


class DirectoryService:
    """One directory and its faults. No part of the pool relies on its entries being right."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.truth = EmbeddedDirectory(registration_ttl_s=REGISTRATION_TTL_S, clock=world.monotonic)
        self.down = False
        # The share of calls without an answer; half of them are carried out nevertheless.
        self.unanswered = 0.0
        self.cut_off: set[str] = set()
        self._snapshot: dict[int, set[bytes]] = {}

    def locations(self) -> dict[int, set[bytes]]:
        """The keys that it lists for each node number now."""
        state = self.truth._state
        state.expire()
        return {number: set(r.keys) for number, r in state.registrations.items()}

    def flush(self) -> None:
        """Lose all data, as after a restart."""
        state = self.truth._state
        for number in list(state.registrations):
            state.end(number)

    def remember(self) -> None:
        """Take the snapshot that a later `roll_back` restores."""
        self._snapshot = self.locations()

    def roll_back(self) -> None:
        """A failover to a lagging replica: changes after the snapshot are lost."""
        state = self.truth._state
        for number, registration in list(state.registrations.items()):
            if number not in self._snapshot:
                state.end(number)
                continue
            before = self._snapshot[number]
            state.remove(number, registration, sorted(registration.keys - before))
            state.add(number, registration, sorted(before - registration.keys))

    def forge(self, keys: Sequence[bytes]) -> None:
        """Forged entries: every node is listed with all of these keys."""
        state = self.truth._state
        for number, registration in state.registrations.items():
            state.add(number, registration, keys)

    def lose(self, keys: Sequence[bytes]) -> None:
        """Delete the entries of these keys."""
        state = self.truth._state
        for number, registration in state.registrations.items():
            state.remove(number, registration, keys)


class SimulatedDirectory(Directory):
    """A process's handle on the directory."""

    patience_s = TIMEOUT_S + 2 * ANSWER_S[1]

    def __init__(self, service: DirectoryService, user: str) -> None:
        self._service = service
        self._user = user

    def register(self, record: NodeRecord) -> int:
        """See `Directory.register`."""
        return self._far(lambda d: d.register(record))

    def heartbeat(self, record: NodeRecord) -> bool:
        """See `Directory.heartbeat`."""
        return self._far(lambda d: d.heartbeat(record))

    def withdraw(self, number: int) -> None:
        """See `Directory.withdraw`."""
        self._far(lambda d: d.withdraw(number))

    def publish(
        self, number: int, added: Sequence[bytes], removed: Sequence[bytes], first_seq: int
    ) -> None:
        """See `Directory.publish`."""
        self._far(lambda d: d.publish(number, added, removed, first_seq))

    def nodes(self, *, fresh: bool = False) -> dict[int, NodeRecord]:
        """See `Directory.nodes`. A client has a copy, of MEMBERSHIP_AGE_S at most."""
        if fresh:
            return self._far(lambda d: d.nodes())
        return self._service.truth.nodes()

    def locate(self, keys: Sequence[bytes]) -> list[tuple[int, ...]]:
        """See `Directory.locate`."""
        return self._far(lambda d: d.locate(keys))

    def events(self, after: str) -> tuple[str, list[DirectoryEvent]]:
        """See `Directory.events`."""
        return self._far(lambda d: d.events(after))

    def statistics(self) -> dict[str, Any]:
        """See `Directory.statistics`."""
        return self._service.truth.statistics()

    def close(self) -> None:
        """See `Directory.close`."""

    def _far(self, action: Callable[[EmbeddedDirectory], Any]) -> Any:
        service, world = self._service, self._service.world
        world.sleep(world.random.uniform(*ANSWER_S))
        if service.down or self._user in service.cut_off:
            world.sleep(TIMEOUT_S)
            raise DirectoryUnavailable("the simulated directory does not answer")
        lost = world.random.random()
        if lost < service.unanswered / 2:
            world.sleep(TIMEOUT_S)
            raise DirectoryUnavailable("the question to the simulated directory was lost")
        result = action(service.truth)
        world.sleep(world.random.uniform(*ANSWER_S))
        if lost < service.unanswered:
            world.sleep(TIMEOUT_S)
            raise DirectoryUnavailable("the simulated directory's answer was lost")
        return result
