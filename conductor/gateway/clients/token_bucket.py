"""A token bucket (Turner, "New directions in communications", 1986) that may be overdrawn. Pure."""

from __future__ import annotations

# Whoever comes back when told to finds the token, but for rounding.
_ROUNDING = 1e-9


class TokenBucket:
    """Fills at `rate_s` per second up to `size`. Who finds one token in it, or finds it full, may
    take any amount: what is overdrawn is waited for by those who come next. So a large request is
    never locked out by a small bucket, and no more than `size` + rate x time + one request is taken
    in any time."""

    __slots__ = ("_at", "level", "rate_s", "size")

    def __init__(self, rate_s: float, size: float, now: float) -> None:
        self.rate_s, self.size = rate_s, size
        self.level, self._at = size, now

    def wait_s(self, now: float) -> float:
        """Seconds until something may be taken; 0.0 if it may be now."""
        self._fill(now)
        missing = min(1.0, self.size) - self.level
        return missing / self.rate_s if missing > _ROUNDING else 0.0

    def take(self, amount: float, now: float) -> None:
        """Take this much, also beyond what is there."""
        self._fill(now)
        self.level -= amount

    def resize(self, rate_s: float, size: float, now: float) -> None:
        """Go on with another rate and size; what was taken stays taken."""
        self._fill(now)
        self.level += size - self.size
        self.rate_s, self.size = rate_s, size

    def _fill(self, now: float) -> None:
        self.level = min(self.size, self.level + self.rate_s * max(0.0, now - self._at))
        self._at = max(self._at, now)
