"""Ports for servers of tests that have to know theirs before they start, or come back to it."""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path

_given: set[int] = set()


def free_port() -> int:
    """A port of loopback that nobody listens on now, and that is given to nobody meanwhile: the
    kernel takes those of outgoing connections from a range of its own, above these."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for port in random.SystemRandom().sample(range(10_000, lowest), 100):
        if port not in _given:
            with socket.socket() as probe, contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                _given.add(port)
                return port
    raise RuntimeError(f"no free port from 10000 to {lowest}")
