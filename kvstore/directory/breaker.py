"""Whether it is worth asking a server that did not answer. Pure."""

from __future__ import annotations

# After a first failure, a moment: it may have been a restart of a connection. At most as long as
# nobody minds waiting when the server is back.
FIRST_S = 0.1
MAX_S = 2.0


class Breaker:
    """Lets calls through while a server answers; afterwards one from time to time, as a probe.

    All others are refused at once: a prompt must not wait `TIMEOUT_S` for a server that has been
    down for an hour. Not thread-safe.
    """

    def __init__(self) -> None:
        self._failures = 0
        self._probe_at = 0.0

    @property
    def closed(self) -> bool:
        """Whether the server answered the last time."""
        return not self._failures

    def admits(self, now: float) -> bool:
        """Whether to ask the server now. If it is down, True makes the caller the probe."""
        if not self._failures:
            return True
        if now < self._probe_at:
            return False
        self._probe_at = now + self._delay_s()
        return True

    def failed(self, now: float) -> None:
        """It did not answer."""
        self._failures += 1
        self._probe_at = now + self._delay_s()

    def succeeded(self) -> None:
        """It answered."""
        self._failures = 0

    def _delay_s(self) -> float:
        return min(FIRST_S * 2.0 ** min(self._failures - 1, 16), MAX_S)
