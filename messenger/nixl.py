"""Ranges of a peer's grant by NIXL: RDMA, GPUDirect, NVLink. An extra; docs/nixl.md has its limits.

The peer's processor takes no part, so two things that a server would do are done here. Ranges are
checked against what the grant is known to be, and addresses are computed from that. And since
nobody at the peer can keep a grant from ending under a reader, its bytes count only once the peer
has said, after they came, that the grant is still held (`confirm`).

The bytes go through staging pieces, two of a call at a time: while one is copied out, and its grant
confirmed, the next is on its way. Memory that is registered can be read into in place.
"""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from .errors import GrantError, PeerLost, RangeError, Stalled, TransferTimeout
from .gate import Gate
from .nixl_agent import (
    LOOKS,
    NAP_S_MAX,
    NAP_S_MIN,
    Description,
    NixlAgent,
    Quarantined,
    Registered,
    StillMoving,
)
from .nixl_call import Call, Cursor
from .nixl_load import NixlUnavailable
from .nixl_rows import runs_of
from .ranges import lay_out, pack_ranges, unpack_ranges
from .stream import views_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from .local import ByteArray
    from .nixl_agent import Flight, Remote
    from .nixl_rows import Runs
    from .nixl_staging import Staging
    from .onhost import Resolve
    from .transport import Arrived, Range, Served

__all__ = [
    "Confirm",
    "Description",
    "NixlAgent",
    "NixlTransport",
    "NixlUnavailable",
    "Quarantined",
    "Registered",
    "StillMoving",
]


class Confirm(Protocol):
    """Asks the peer whether a grant is still held, over the channel that granted it."""

    def __call__(self, grant: int, *, deadline: float) -> bool:
        """Raises PeerLost, TransferTimeout."""


class NixlTransport:
    """Ranges of one peer's grants by one-sided transfers. See `Transport`.

    `description` is of the memory that holds all grants, as its owner gave it; `resolve` says where
    a grant lies in it, and `confirm` whether it is still held. Nothing that moved for `stall_s`
    raises Stalled; a transfer to a peer that hangs is put aside until it ends.

    A write that fails may reach the peer's memory later, and nothing here can prevent it: it raises
    StillMoving, and the peer must not give that memory to anybody before the connection is gone.
    With `in_place`, targets inside one registration of the agent are read into directly, which is
    faster and outside the contract: such a read, too, raises StillMoving where a deadline or a
    stall ends it. `notify`: the last bytes of a write are announced with the grant's number, to an
    agent that must fetch its notifications.
    """

    name = "nixl"

    def __init__(
        self,
        agent: NixlAgent,
        description: Description,
        resolve: Resolve,
        confirm: Confirm,
        *,
        stall_s: float = 10.0,
        in_place: bool = False,
        notify: bool = False,
    ) -> None:
        """Raises FrameError for a description that can't be one."""
        description.check()
        self._agent = agent
        self._description = description
        self._resolve = resolve
        self._confirm = confirm
        self._stall_s = stall_s
        self._in_place = in_place
        self._notify = notify
        self._gate = Gate(lambda: PeerLost("this transport is closed"))
        self._lock = threading.Lock()
        self._remote: Remote | None = None  # protected by `_lock`

    def read(
        self,
        grant: int,
        ranges: Sequence[Range],
        targets: Sequence[ByteArray],
        *,
        deadline: float,
        arrived: Arrived | None = None,
    ) -> Served:
        """See `Transport.read`. A range arrives when the grant was confirmed after its bytes came:
        once per piece with `arrived`, else once."""
        views_of(ranges, targets, writable=True)
        with self._call(deadline):
            whole, far = self._far(grant, ranges, writes=False)
            mine = list(targets[: whole.ranges])
            call = Call(self, grant, ranges, whole, deadline, arrived)
            memory = self._memory_of(mine) if self._in_place else None
            if memory is not None:
                places = [(one.ctypes.data, len(one)) for one in mine]
                return call.move_in_place(memory, runs_of(places), far, write=False)
            return call.read_staged(Cursor(mine), far)

    def write(
        self,
        grant: int,
        ranges: Sequence[Range],
        sources: Sequence[ByteArray],
        *,
        deadline: float,
    ) -> Served:
        """See `Transport.write`. Raises StillMoving where another transport would time out."""
        views_of(ranges, sources, writable=False)
        with self._call(deadline):
            whole, far = self._far(grant, ranges, writes=True)
            mine = list(sources[: whole.ranges])
            call = Call(self, grant, ranges, whole, deadline, None)
            memory = self._memory_of(mine) if self._in_place else None
            if memory is not None:
                places = [(one.ctypes.data, len(one)) for one in mine]
                return call.move_in_place(memory, runs_of(places), far, write=True)
            return call.write_staged(Cursor(mine), far)

    def read_into(
        self,
        grant: int,
        ranges: Sequence[Range],
        memory: Registered,
        offsets: Sequence[int],
        *,
        deadline: float,
        arrived: Arrived | None = None,
    ) -> Served:
        """As `read`, to these offsets of registered memory, which may be a GPU's. In place, so it
        may raise StillMoving. Raises RangeError for a place outside the memory."""
        if len(ranges) != len(offsets):
            raise RangeError(f"{len(ranges)} ranges for {len(offsets)} offsets")
        for (offset, length), at in zip(ranges, offsets, strict=True):
            if offset < 0 or offset >> 64 or length < 0:
                raise RangeError(f"a range of {length} bytes at {offset}")
            if not 0 <= at <= at + length <= memory.nbytes:
                raise RangeError(f"[{at}, {at + length}) is not in {memory.nbytes} bytes")
        with self._call(deadline):
            whole, far = self._far(grant, ranges, writes=False)
            places = [
                (memory.address + at, length)
                for (_, length), at in zip(ranges[: whole.ranges], offsets, strict=False)
            ]
            call = Call(self, grant, ranges, whole, deadline, arrived)
            return call.move_in_place(memory, runs_of(places), far, write=False)

    def close(self) -> None:
        """Let the peer go. What hangs stays in the agent's quarantine."""
        self._gate.close()
        with self._lock:
            remote, self._remote = self._remote, None
        if remote is not None:
            self._agent.leave(remote)

    # -- for the calls ---------------------------------------------------------------------------

    @contextmanager
    def _call(self, deadline: float) -> Iterator[None]:
        with self._gate, self._agent.use():
            if time.monotonic() >= deadline:
                raise TransferTimeout("the deadline had passed: allow more time")
            self._agent.reap()
            yield

    def _far(self, grant: int, ranges: Sequence[Range], *, writes: bool) -> tuple[Served, Runs]:
        """How much of the ranges the grant holds, and where that is at the peer."""
        places = self._resolve(grant, writes=writes)
        nbytes = self._description.nbytes
        for offset, length in places:
            if not 0 <= offset <= offset + length <= nbytes:
                raise GrantError(f"bytes {offset} to {offset + length} are not in the region")
        packed = unpack_ranges(pack_ranges(ranges), 0, len(ranges))
        whole, pieces = lay_out(packed, [length for _, length in places])
        base = self._description.base_address
        return whole, runs_of(
            [(base + places[array].offset + start, stop - start) for array, start, stop in pieces]
        )

    def _memory_of(self, arrays: Sequence[ByteArray]) -> Registered | None:
        """The one registration that holds them all."""
        filled = [array for array in arrays if len(array)]
        if not filled:
            return None
        memory = self._agent.find(filled[0].ctypes.data, len(filled[0]))
        if memory is None or memory.memory != "DRAM":
            return None
        inside = all(memory.holds(one.ctypes.data, len(one)) for one in filled)
        return memory if inside else None

    def prepare(self, memory: Registered, rows: NDArray[np.int64], *, write: bool) -> Flight:
        """One transfer, over the connection there is or a new one."""
        remote = self._connected()
        return self._agent.prepare(remote, self._description, memory, rows, write=write)

    def notification(self, grant: int) -> bytes:
        """What the peer is told at the end of a write."""
        return grant.to_bytes(8, "little") if self._notify else b""

    def _connected(self) -> Remote:
        with self._lock:
            if self._remote is not None and self._remote.lost:
                lost, self._remote = self._remote, None
                self._agent.leave(lost)
            if self._remote is None:
                self._remote = self._agent.connect(self._description)
            return self._remote

    def staging(self) -> tuple[Staging, Registered]:
        """The agent's. Raises PeerLost while too many transfers with this peer hang."""
        staging, memory = self._agent.staging()
        staging.check(self, time.monotonic())
        return staging, memory

    def confirmed(self, grant: int, deadline: float) -> None:
        """Raises GrantError unless the peer still holds the grant."""
        if not self._confirm(grant, deadline=deadline):
            raise GrantError(f"grant {grant} ended before all its bytes had come; ask for another")

    def check(self) -> None:
        """Raises PeerLost once this transport or its agent is closed."""
        self._gate.check()
        self._agent.check()

    def wait(self, flight: Flight, since: float, deadline: float) -> None:
        """Until a transfer has ended. Raises PeerLost, Stalled, TransferTimeout."""
        looks, nap_s = 0, NAP_S_MIN
        while not flight.poll():
            now = time.monotonic()
            self.check()
            if now >= deadline:
                raise TransferTimeout("not all bytes came by the deadline: allow more time")
            if now >= since + self._stall_s:
                raise Stalled(f"nothing moved for {self._stall_s:.1f} s: the peer hangs")
            looks += 1
            if looks <= LOOKS:
                time.sleep(0)
            else:
                time.sleep(min(nap_s, max(0.0, deadline - now)))
                nap_s = min(2 * nap_s, NAP_S_MAX)

    def keep(self, flights: Sequence[Flight]) -> None:
        """Of transfers that are given up, and in no staging piece's quarantine."""
        self._agent.keep(flights)

    def quarantined(self, memory: Registered, flights: Sequence[Flight]) -> Quarantined:
        """For StillMoving."""
        return Quarantined(self._agent, memory, flights)
