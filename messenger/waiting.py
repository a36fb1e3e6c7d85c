"""How long, and for how many bytes, the kernel lets a call on a socket wait."""

from __future__ import annotations

import math
import select
import socket
import struct
import time
from ipaddress import ip_address

# Of SO_RCVTIMEO and SO_SNDTIMEO.
WAIT_S_MIN, WAIT_S_MAX = 2.0**-10, 2.0**10
_TIMEVAL = struct.Struct("@ll")
# A wake-up is an interrupt to another core: expensive in a virtual machine, and paid by the sender.
# On loopback, a receiver that was woken for a MiB instead of for each packet took 0.7 of the time
# and of the CPU time; anything from 128 KiB to 2 MiB was better than none.
GATHER_BYTES = 1 << 20
# With a smaller receive buffer the sender would have to stop before its receiver wakes, and where
# the buffer is below twice the mark, the kernel clamps the window to the mark: the first 32 MiB of
# a connection with a round trip of 10 ms came at 51 MB/s instead of 171. It grows as it is used.
ROOM_BYTES = 4 * GATHER_BYTES


class Patience:
    """How long the kernel lets a call wait: at most what is allowed, at least half of it, in powers
    of two, so that it seldom has to be told. The caller looks at the clock and comes again."""

    __slots__ = ("_high_s", "_low_s", "_option", "_socket")

    def __init__(self, sock: socket.socket, option: int) -> None:
        """`option`: SO_RCVTIMEO or SO_SNDTIMEO."""
        self._socket = sock
        self._option = option
        self._low_s = self._high_s = -1.0  # not told yet

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
    """Whether a socket can move a byte, now or in time, however many signals come.

    A call that has moved nothing when a signal comes is repeated by Python (PEP 475), and the
    kernel's timeout begins anew: under a profiler's signals no deadline would hold. `poll` goes on
    with what is left of its time, and a call after it moves a byte at once.
    """

    __slots__ = ("_poll",)

    def __init__(self, sock: socket.socket, event: int) -> None:
        poller = select.poll()
        poller.register(sock, event)
        self._poll = poller.poll

    def within(self, wait_s: float) -> float:
        """Wait until it can, or `wait_s`; what is left of that, or 0 if it can not. A reader needs
        SO_RCVLOWAT bytes, a writer a third of its buffer."""
        began = time.monotonic()
        if not self._poll(min(wait_s, WAIT_S_MAX) * 1000):
            return 0.0
        return max(WAIT_S_MIN, wait_s - (time.monotonic() - began))


class Gathering:
    """Whether a call that receives is woken for every packet, or once GATHER_BYTES are there."""

    __slots__ = ("_gathers", "_near", "_socket")

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._gathers = False
        self._near = _is_near(sock)

    def portion(self, left_bytes: int, most_bytes: int) -> int:
        """How many of the `left_bytes` that come the next call should receive, `most_bytes` at
        most; it may be woken for many at once. Raises OSError.

        Who waits for more than comes is never woken; so the last calls of a transfer are woken for
        everything.
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
        if self._near:  # a round trip is over at once
            return True
        return self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) >= ROOM_BYTES


def _is_near(sock: socket.socket) -> bool:
    """Whether the peer is on this machine."""
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return True
    try:
        return ip_address(sock.getpeername()[0]).is_loopback
    except (OSError, ValueError):  # it has gone already, or its address has a zone
        return False
