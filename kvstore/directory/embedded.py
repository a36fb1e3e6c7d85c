"""A directory in this process: a pool of one process needs no service.

It passes the same contract suite as Redis: registrations expire, numbers are never reused, the
event stream is bounded. Locations need no expiry here, because the end of a registration deletes
its locations.
"""

from __future__ import annotations

import re
import threading
import time
from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from ..errors import ClientClosed, DirectoryUnavailable, InvalidInput
from .base import (
    EVENTS_MAX,
    LOCATE_KEYS_MAX,
    NODES_MAX,
    REGISTRATION_TTL_S,
    Directory,
    DirectoryEvent,
    NodeRecord,
    check_batch,
    check_keys,
    check_number,
    check_record,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# Batches of 2,000 keys of 49 bytes each (a Python bytes object of 16): 100 MiB at the very most.
EVENTS_KEPT = 1024

# A position is the number of the last event that the reader has read, from 0 on.
_POSITION = re.compile(r"[0-9]{1,18}")


class _Registration:
    """One node's registration: its record, expiry and keys."""

    __slots__ = ("expires_at", "keys", "record")

    def __init__(self, record: NodeRecord, expires_at: float) -> None:
        self.record = record
        self.expires_at = expires_at
        self.keys: set[bytes] = set()


class _State:
    """The state that all handles of one directory share; `lock` protects all of it."""

    def __init__(self, registration_ttl_s: float, clock: Callable[[], float]) -> None:
        self.lock = threading.Lock()
        self.ttl_s = registration_ttl_s
        self.clock = clock
        self.handles = 0
        self.last_number = 0
        self.registrations: dict[int, _Registration] = {}
        # The numbers of a key, oldest first. Tuples, so that `locate` can return them uncopied.
        self.holders: dict[bytes, tuple[int, ...]] = {}
        self.events: deque[DirectoryEvent] = deque(maxlen=EVENTS_KEPT)
        self.last_event = 0

    def expire(self) -> None:
        """End the registrations that have expired."""
        now = self.clock()
        for number in [n for n, r in self.registrations.items() if r.expires_at <= now]:
            self.end(number)

    def end(self, number: int) -> None:
        registration = self.registrations.pop(number, None)
        for key in registration.keys if registration is not None else ():
            self._without(key, number)

    def _without(self, key: bytes, number: int) -> None:
        left = tuple(holder for holder in self.holders[key] if holder != number)
        if left:
            self.holders[key] = left
        else:
            del self.holders[key]

    def add(self, number: int, registration: _Registration, keys: Sequence[bytes]) -> None:
        for key in keys:
            if key not in registration.keys:
                registration.keys.add(key)
                self.holders[key] = (*self.holders.get(key, ()), number)

    def remove(self, number: int, registration: _Registration, keys: Sequence[bytes]) -> None:
        for key in keys:
            if key in registration.keys:
                registration.keys.remove(key)
                self._without(key, number)


class EmbeddedDirectory(Directory):
    """A handle of a directory in this process; `EmbeddedDirectory()` makes a private directory.

    `EmbeddedDirectory.named` gives all callers of one name the same directory, which is deleted
    when its last handle is closed. `clock` returns monotonic seconds.
    """

    def __init__(
        self,
        *,
        registration_ttl_s: float = REGISTRATION_TTL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._open(_State(registration_ttl_s, clock))

    def _open(self, state: _State) -> None:
        self._state = state
        self._closed = False
        state.handles += 1

    @classmethod
    def named(
        cls, name: str, *, registration_ttl_s: float = REGISTRATION_TTL_S
    ) -> EmbeddedDirectory:
        """A new handle of this process's directory `name`; the first caller sets the TTL."""
        with _states_lock:
            state = _states.get(name)
            if state is None:
                state = _states[name] = _State(registration_ttl_s, time.monotonic)
            directory = cls.__new__(cls)
            directory._open(state)
            return directory

    def register(self, record: NodeRecord) -> int:
        """See `Directory.register`."""
        check_record(record)
        with self._locked() as state:
            if len(state.registrations) >= NODES_MAX:
                raise DirectoryUnavailable(f"{NODES_MAX} nodes are registered; withdraw some first")
            state.last_number += 1
            number = state.last_number
            state.registrations[number] = _Registration(
                replace(record, number=number), state.clock() + state.ttl_s
            )
            return number

    def heartbeat(self, record: NodeRecord) -> bool:
        """See `Directory.heartbeat`."""
        check_record(record)
        with self._locked() as state:
            registration = state.registrations.get(record.number)
            if registration is None:
                return False
            registration.record = record
            registration.expires_at = state.clock() + state.ttl_s
            return True

    def withdraw(self, number: int) -> None:
        """See `Directory.withdraw`."""
        check_number(number)
        with self._locked() as state:
            state.end(number)

    def publish(
        self, number: int, added: Sequence[bytes], removed: Sequence[bytes], first_seq: int
    ) -> None:
        """See `Directory.publish`. Ignores a number without a registration."""
        check_batch(number, added, removed, first_seq)
        with self._locked() as state:
            registration = state.registrations.get(number)
            if registration is None:
                return
            state.add(number, registration, added)
            state.remove(number, registration, removed)
            state.last_event += 1
            state.events.append(DirectoryEvent(number, first_seq, list(added), list(removed)))

    def nodes(self, *, fresh: bool = False) -> dict[int, NodeRecord]:
        """See `Directory.nodes`."""
        with self._locked() as state:
            return {number: found.record for number, found in state.registrations.items()}

    def locate(self, keys: Sequence[bytes]) -> list[tuple[int, ...]]:
        """See `Directory.locate`; the membership is always current here."""
        check_keys(keys, LOCATE_KEYS_MAX)
        with self._locked() as state:
            holders = state.holders
            return [holders.get(key, ()) for key in keys]

    def events(self, after: str) -> tuple[str, list[DirectoryEvent]]:
        """See `Directory.events`."""
        if not _POSITION.fullmatch(after):
            raise InvalidInput(f"{after!r} is no position of an event stream; begin with '0'")
        with self._locked() as state:
            forgotten = state.last_event - len(state.events)
            skip = max(0, int(after) - forgotten)
            found = list(islice(state.events, skip, skip + EVENTS_MAX))
            return (str(forgotten + skip + len(found)) if found else after), found

    def statistics(self) -> dict[str, Any]:
        """See `Directory.statistics`."""
        with self._locked() as state:
            return {
                "kind": "embedded",
                "healthy": True,
                "nodes": len(state.registrations),
                "keys": len(state.holders),
                "events": state.last_event,
            }

    def close(self) -> None:
        """See `Directory.close`."""
        with _states_lock:
            if self._closed:
                return
            self._closed = True
            self._state.handles -= 1
            if not self._state.handles:
                for name in [n for n, state in _states.items() if state is self._state]:
                    del _states[name]

    def _locked(self) -> _Locked:
        if self._closed:
            raise ClientClosed("this directory is closed")
        return _Locked(self._state)


class _Locked:
    """A context manager: locks the state and ends expired registrations."""

    __slots__ = ("_state",)

    def __init__(self, state: _State) -> None:
        self._state = state

    def __enter__(self) -> _State:
        self._state.lock.acquire()
        self._state.expire()
        return self._state

    def __exit__(self, *_: object) -> None:
        self._state.lock.release()


_states: dict[str, _State] = {}
_states_lock = threading.Lock()
