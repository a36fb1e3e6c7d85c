"""Circuit breakers: which instances get no requests for now, or fewer. Pure; `now` in seconds.

    closed   all requests
      | `failures` in a row, of requests or of health checks
    open     none, for `open_s`, twice as long each time, `open_max_s` at most
      | the time is over, and the last health check was good
    slow     a share of the requests that rises to all within `slow_start_s`; a failure opens again
      | `slow_start_s` without a failure
    closed

An instance that comes back has an empty cache and compiled nothing yet: hence its slow start, which
is the trial of the circuit as well (Nygard, "Release It!", 2007, has a single request for it). If
no instance of a model is left, breakers are ignored: a request that may fail is better than one
that is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

    from ..config import BreakerSettings

# The share at the begin of a slow start.
_FIRST_SHARE = 0.1


class _Circuit:
    __slots__ = ("back_at", "credit", "failures", "healthy", "open_s", "open_until")

    def __init__(self) -> None:
        self.failures = 0  # in a row
        self.healthy = True  # by the last health check
        self.open_until: float | None = None  # None: closed, or slow
        self.back_at: float | None = None  # since when it is slow
        self.open_s = 0.0  # how long it was open last
        self.credit = 0.0  # of its share: at 1 it gets a request


class CircuitBreakers:
    """See the module; instances are named by their ids. For one event loop."""

    def __init__(self, settings: BreakerSettings) -> None:
        self._settings = settings
        self._circuits: dict[str, _Circuit] = {}  # those that are not just closed

    def failed(self, name: str, now: float) -> None:
        """A request to this instance, or a health check of it, got no answer, or an answer that
        says that the instance is down."""
        circuit = self._circuits.setdefault(name, _Circuit())
        circuit.failures += 1
        slow = circuit.back_at is not None
        if circuit.open_until is None and (slow or circuit.failures >= self._settings.failures):
            longer_s = min(2 * circuit.open_s, self._settings.open_max_s)
            circuit.open_s = longer_s if slow else self._settings.open_s
            circuit.open_until, circuit.back_at = now + circuit.open_s, None

    def succeeded(self, name: str) -> None:
        """A request to this instance was answered."""
        circuit = self._circuits.get(name)
        if circuit is None:
            return
        circuit.failures = 0
        if circuit.open_until is None and circuit.back_at is None:
            del self._circuits[name]

    def checked(self, name: str, healthy: bool, now: float) -> None:
        """A health check of this instance has ended."""
        if not healthy:
            self.failed(name, now)
        circuit = self._circuits.get(name)
        if circuit is not None:
            circuit.healthy = healthy
            if healthy and circuit.open_until is None and circuit.back_at is None:
                self.succeeded(name)

    def keep(self, names: Collection[str]) -> None:
        """Forget all other instances."""
        self._circuits = {name: one for name, one in self._circuits.items() if name in names}

    def open(self, now: float) -> list[str]:
        """The instances that get no requests."""
        return [name for name, one in self._circuits.items() if self._share(one, now) == 0.0]

    def avoided(self, candidates: Collection[str], now: float) -> set[str]:
        """Which of these instances the next request should not go to; none if that were all of
        them. Each call counts as one request for those that are slow."""
        avoided = set[str]()
        for name in candidates:
            circuit = self._circuits.get(name)
            if circuit is None:
                continue
            share = self._share(circuit, now)
            circuit.credit = circuit.credit + share if share else 0.0
            if circuit.credit >= 1.0:
                circuit.credit -= 1.0
            elif share < 1.0:
                avoided.add(name)
        return set() if len(avoided) == len(candidates) else avoided

    def _share(self, circuit: _Circuit, now: float) -> float:
        """The share of its requests that an instance gets: 0 while open, 1 while closed."""
        if circuit.open_until is not None:
            if now < circuit.open_until or not circuit.healthy:
                return 0.0
            circuit.open_until, circuit.back_at, circuit.failures = None, now, 0
        if circuit.back_at is None:
            return 1.0
        passed = (now - circuit.back_at) / self._settings.slow_start_s
        if passed >= 1.0:
            circuit.back_at, circuit.open_s = None, 0.0
            return 1.0
        return max(_FIRST_SHARE, passed)
