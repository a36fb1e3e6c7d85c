"""Statistics and health of a path to a peer: latency, bandwidth, failures, back-off. No I/O here.

The duration of a transfer is modelled as latency + bytes / bandwidth. Small transfers measure the
latency, large ones the bandwidth, each as a moving average. An unused link starts with the best
numbers of its kind, so that each path is tried before it is judged.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .health import Health

if TYPE_CHECKING:
    from collections.abc import Sequence

# Weight of a new measurement: as TCP weighs a round-trip time (RFC 6298). The first few weigh more,
# as in a plain mean, so that the defaults soon lose their influence.
_WEIGHT = 1 / 8
# At 3 GB/s, 64 KiB take 20 us, of the order of the latency itself; above 1 MiB the latency is below
# a tenth of the duration.
_LATENCY_BYTES_MAX = 64 << 10
_BANDWIDTH_BYTES_MIN = 1 << 20
# Measurements beyond these limits are clamped: clocks have steps, and caches absorb small copies.
_LATENCY_S_MIN, _BANDWIDTH_BYTES_S_MAX = 1e-7, 1e12

# Latency and bandwidth, at their best (vendors' numbers and bench on one host): one-sided reads
# over a 200 Gb/s fabric; loopback sockets.
_DEFAULTS = {
    "nixl": (10e-6, 20e9),
    "tcp": (50e-6, 3e9),
}

# The rests of a path that failed: the first is shorter than a reconnect, the last as long as a
# node's restart.
_REST_S_MIN, _REST_S_MAX = 0.1, 10.0


class LinkStatistics:
    """Moving averages of one link, and counters since the start. Not thread-safe."""

    def __init__(self, name: str) -> None:
        """`name`: the kind of the link, as `Transport.name`."""
        self.latency_s, self.bandwidth_bytes_s = _DEFAULTS[name]
        self.transfers = 0
        self.bytes = 0
        self.errors = 0
        self._latencies = 0
        self._bandwidths = 0

    def observe(self, nbytes: int, seconds: float) -> None:
        """Count a transfer that succeeded. Zero bytes: an exchange of messages."""
        self.transfers += 1
        self.bytes += nbytes
        if nbytes <= _LATENCY_BYTES_MAX:
            latency_s = max(_LATENCY_S_MIN, seconds - nbytes / self.bandwidth_bytes_s)
            self._latencies += 1
            self.latency_s += _weight(self._latencies) * (latency_s - self.latency_s)
        elif nbytes >= _BANDWIDTH_BYTES_MIN:
            moving_s = max(seconds - self.latency_s, nbytes / _BANDWIDTH_BYTES_S_MAX)
            self._bandwidths += 1
            change = nbytes / moving_s - self.bandwidth_bytes_s
            self.bandwidth_bytes_s += _weight(self._bandwidths) * change

    def predicted_s(self, nbytes: int) -> float:
        """How long a transfer of `nbytes` will take."""
        return self.latency_s + nbytes / self.bandwidth_bytes_s

    def as_dict(self) -> dict[str, float]:
        """The statistics, for display and for the scheduler's estimate of transfer times."""
        return {
            "latency_s": self.latency_s,
            "bandwidth_bytes_s": self.bandwidth_bytes_s,
            "transfers": self.transfers,
            "bytes": self.bytes,
            "errors": self.errors,
        }


class LinkHealth:
    """One path's statistics and health. Not thread-safe."""

    __slots__ = ("health", "statistics")

    def __init__(self, name: str, health: Health | None = None) -> None:
        self.statistics = LinkStatistics(name)
        self.health = health or Health(_REST_S_MIN, _REST_S_MAX)

    def succeeded(self, nbytes: int, seconds: float) -> None:
        """Count a transfer that succeeded, and end the back-off."""
        self.health.answered()
        self.statistics.observe(nbytes, seconds)

    def failed(self, now: float, *, late: bool = False) -> None:
        """Count a transfer that failed. See `Health.failed`."""
        self.statistics.errors += 1
        self.health.failed(now, late=late)


def order_paths(links: Sequence[LinkHealth], nbytes: int, now: float) -> list[int]:
    """Indices of `links`, best first: healthy links by predicted seconds, then links in back-off
    after a failure, the earliest end of the back-off first. No link is left out: an unhealthy one
    may have recovered, and is the last resort."""

    def rank(index: int) -> tuple[bool, float]:
        link = links[index]
        if link.health.rests(now):
            return True, link.health.retry_at
        return False, link.statistics.predicted_s(nbytes)

    return sorted(range(len(links)), key=rank)


def _weight(count: int) -> float:
    return max(_WEIGHT, 1 / (count + 1))
