"""A circuit breaker with back-off for a server that does not answer. Pure."""

from __future__ import annotations

# The back-off after the first failure is short: it may have been one broken connection. Its maximum
# bounds how late a recovered server is used again.
FIRST_S = 0.1
MAX_S = 2.0


class Breaker:
    """A circuit breaker: admits all calls while the server answers, after a failure one call from
    time to time as a probe.

    It refuses all other calls at once: a prompt must not wait `TIMEOUT_S` for a server that has
    been down for an hour. Not thread-safe.
    """

    def __init__(self) -> None:
        self._failures = 0
        self._probe_at = 0.0

    @property
    def closed(self) -> bool:
        """Whether the breaker is closed: the server answered the last call."""
        return not self._failures

    def admits(self, now: float) -> bool:
        """Whether to call the server now. If it is down, True makes the caller the probe."""
        if not self._failures:
            return True
        if now < self._probe_at:
            return False
        self._probe_at = now + self._delay_s()
        return True

    def failed(self, now: float) -> None:
        """Record that the server did not answer; backs off."""
        self._failures += 1
        self._probe_at = now + self._delay_s()

    def succeeded(self) -> None:
        """Record that the server answered; closes the breaker."""
        self._failures = 0

    def _delay_s(self) -> float:
        return min(FIRST_S * 2.0 ** min(self._failures - 1, 16), MAX_S)
