"""Socket timeouts and wake-ups: how long, and for how many bytes, a call on a socket waits."""

from __future__ import annotations

import math
import select
import socket
import struct
import time
from ipaddress import ip_address

# Limits of SO_RCVTIMEO and SO_SNDTIMEO, in seconds.
WAIT_S_MIN, WAIT_S_MAX = 2.0**-10, 2.0**10
_TIMEVAL = struct.Struct("@ll")
# A wake-up is an interrupt to another core: expensive in a virtual machine, and paid by the sender.
# On loopback, a receiver that was woken for a MiB instead of for each packet took 0.7 of the time
# and of the CPU time; anything from 128 KiB to 2 MiB was better than none.
GATHER_BYTES = 1 << 20
# With a smaller receive buffer the sender would have to stop before its receiver wakes, and where
# the buffer is below twice SO_RCVLOWAT, the kernel clamps the window to SO_RCVLOWAT: the first
# 32 MiB of a connection with a round trip of 10 ms came at 51 MB/s instead of 171. The kernel
# enlarges the buffer as the connection is used.
ROOM_BYTES = 4 * GATHER_BYTES


class Patience:
    """The kernel's timeout for a call on a socket: at most the allowed wait and at least half of
    it, in powers of two, so that `setsockopt` is seldom needed. The caller checks its deadline
    after each call and repeats it."""

    __slots__ = ("_high_s", "_low_s", "_option", "_socket")

    def __init__(self, sock: socket.socket, option: int) -> None:
        """`option`: SO_RCVTIMEO or SO_SNDTIMEO."""
        self._socket = sock
        self._option = option
        self._low_s = self._high_s = -1.0  # the option is not set yet

    def allow(self, wait_s: float) -> None:
        """The next call may wait for `wait_s`. Raises OSError."""
        if self._low_s <= wait_s <= self._high_s:
            return
        step_s = math.ldexp(1.0, math.frexp(min(max(wait_s, WAIT_S_MIN), WAIT_S_MAX))[1] - 1)
        seconds = int(step_s)
        timeval = _TIMEVAL.pack(seconds, int((step_s - seconds) * 1e6))
        self._socket.setsockopt(socket.SOL_SOCKET, self._option, timeval)
        self._low_s = 0.0 if step_s == WAIT_S_MIN else step_s
        self._high_s = math.inf if step_s == WAIT_S_MAX else 2 * step_s


class Readiness:
    """Whether a socket becomes readable or writable within a timeout, in spite of signals.

    Python repeats a call that has moved nothing when a signal arrives (PEP 475), and the kernel's
    timeout starts anew: under a profiler's signals no deadline would hold. Python repeats `poll`
    with only the rest of its timeout, and a call after it moves a byte at once.
    """

    __slots__ = ("_poll",)

    def __init__(self, sock: socket.socket, event: int) -> None:
        poller = select.poll()
        poller.register(sock, event)
        self._poll = poller.poll

    def within(self, wait_s: float) -> float:
        """Wait up to `wait_s` for the socket to be ready. Returns the rest of `wait_s`, or 0 if the
        socket is not ready. Ready means SO_RCVLOWAT bytes to read, or a third of the send buffer
        free to write."""
        began = time.monotonic()
        if not self._poll(min(wait_s, WAIT_S_MAX) * 1000):
            return 0.0
        return max(WAIT_S_MIN, wait_s - (time.monotonic() - began))


class Gathering:
    """Whether the kernel wakes a receiving call for every packet, or once GATHER_BYTES have
    arrived (SO_RCVLOWAT)."""

    __slots__ = ("_gathers", "_near", "_socket")

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._gathers = False
        self._near = _is_near(sock)

    def portion(self, left_bytes: int, most_bytes: int) -> int:
        """How many of the `left_bytes` to come the next call should receive, `most_bytes` at most.
        Sets SO_RCVLOWAT for it. Raises OSError.

        A receiver that waits for more bytes than are still to come is never woken; so the last
        calls of a transfer are woken for every packet.
        """
        portion = min(most_bytes, max(left_bytes - GATHER_BYTES, GATHER_BYTES))
        enough = left_bytes - portion >= GATHER_BYTES
        gathers = enough and (self._gathers or self._has_room())
        if gathers != self._gathers:
            low_water = GATHER_BYTES if gathers else 1
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, low_water)
            self._gathers = gathers
        return portion

    def _has_room(self) -> bool:
        if self._near:  # the round trip is negligible
            return True
        return self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) >= ROOM_BYTES


def _is_near(sock: socket.socket) -> bool:
    """Whether the peer is on this machine."""
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return True
    try:
        return ip_address(sock.getpeername()[0]).is_loopback
    except (OSError, ValueError):  # the peer has disconnected already, or its address has a zone
        return False
