"""Ports for tests' servers that need a known port before they start, or again after a restart."""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path

_given: set[int] = set()


def free_port() -> int:
    """A loopback port that no socket has, and that the kernel gives to no outgoing connection
    later: it takes the ports of those from a range of its own, above these."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for port in random.SystemRandom().sample(range(10_000, lowest), 100):
        if port not in _given:
            with socket.socket() as probe, contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                _given.add(port)
                return port
    raise RuntimeError(f"no free port from 10000 to {lowest}")
