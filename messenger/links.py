"""What is known about the way to a peer: how fast it is, and whether it works. No I/O happens here.

Seconds of a transfer are modelled as latency + bytes / bandwidth. Small transfers teach the first,
large ones the second, each as a moving average. The numbers of a link that nobody has used yet are
those of its kind at its best, so that each path is tried before it is judged.
"""

from __future__ import annotations

from typing import Any

# Weight of a new measurement: what TCP gives a round-trip time (RFC 6298). The first few count
# more, as parts of a plain mean, so that the defaults are soon forgotten.
_WEIGHT = 1 / 8
# At 3 GB/s, 64 KiB take 20 us, of the order of the latency itself; above 1 MiB it is below a tenth.
_LATENCY_BYTES_MAX = 64 << 10
_BANDWIDTH_BYTES_MIN = 1 << 20
# No measurement is believed beyond these: clocks have steps, and caches swallow small copies.
_LATENCY_S_MIN, _BANDWIDTH_BYTES_S_MAX = 1e-7, 1e12

# Latency and bandwidth, at their best (bench on one host and vendors' numbers): a copy within one
# process; a copy from shared memory; one-sided reads over a 200 Gb/s fabric; loopback sockets.
_DEFAULTS = {
    "local": (1e-6, 12e9),
    "shm": (2e-6, 10e9),
    "nixl": (10e-6, 20e9),
    "tcp": (50e-6, 3e9),
}
_UNKNOWN = (50e-6, 3e9)

# A path that failed is left alone for this long, doubled with each failure in a row: the first is
# shorter than a reconnect, the last as long as a node's restart.
_REST_S_MIN, _REST_S_MAX = 0.1, 10.0


class LinkStatistics:
    """Moving averages of one link, and counts since the start. Not thread-safe."""

    def __init__(self, name: str = "") -> None:
        self.latency_s, self.bandwidth_bytes_s = _DEFAULTS.get(name, _UNKNOWN)
        self.transfers = 0
        self.bytes = 0
        self.errors = 0
        self._latencies = 0
        self._bandwidths = 0

    def observe(self, nbytes: int, seconds: float) -> None:
        """A transfer that succeeded. Of no bytes: an exchange of messages."""
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
        """For people, and for the scheduler's estimate of transfers."""
        return {
            "latency_s": self.latency_s,
            "bandwidth_bytes_s": self.bandwidth_bytes_s,
            "transfers": self.transfers,
            "bytes": self.bytes,
            "errors": self.errors,
        }


class Link:
    """One path's statistics and health. Not thread-safe."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.statistics = LinkStatistics(name)
        self.rests_until = float("-inf")
        self._failures = 0  # in a row

    def succeeded(self, nbytes: int, seconds: float) -> None:
        """A transfer ended well."""
        self._failures = 0
        self.rests_until = float("-inf")
        self.statistics.observe(nbytes, seconds)

    def failed(self, now: float) -> None:
        """A transfer failed: the link rests for a while, longer with each failure in a row."""
        self.statistics.errors += 1
        self.rests_until = now + min(_REST_S_MAX, _REST_S_MIN * 2.0 ** min(self._failures, 30))
        self._failures += 1

    def resting(self, now: float) -> bool:
        """Whether it failed not long ago."""
        return now < self.rests_until

    def as_dict(self, now: float) -> dict[str, Any]:
        """See `LinkStatistics.as_dict`."""
        return {**self.statistics.as_dict(), "healthy": not self.resting(now)}


def _weight(count: int) -> float:
    return max(_WEIGHT, 1 / (count + 1))
