"""The NIXL transport: ranges of a peer's grant by RDMA, GPUDirect, NVLink. Optional; docs/nixl.md
lists its limits.

The peer's processor takes no part in a transfer, so the client does two things that a server would
do. It checks ranges against the places of the grant, as resolved, and computes addresses from them.
And since the peer cannot keep a grant from ending during a read, the bytes of a read count only
once the peer has confirmed, after they arrived, that the grant is still held (`confirm`).

The bytes go through staging pieces, two per call at a time: while one piece is copied out, and its
grant confirmed, the next is in flight. A read into registered memory can be in place (zero-copy).
"""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from ..errors import GrantError, PeerLost, RangeError, Stalled, TransferTimeout
from ..usage_gate import UsageGate
from ..wire.ranges import lay_out, pack_ranges, unpack_ranges, views_of
from .agent import (
    LOOKS,
    NAP_S_MAX,
    NAP_S_MIN,
    Description,
    NixlAgent,
    Quarantined,
    Registered,
    StillMoving,
)
from .bindings import NixlUnavailable
from .chunked_call import ChunkCursor, NixlCall
from .descriptors import runs_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from ..shm.host_copy import ByteArray
    from ..shm.transports import Resolve
    from ..transport import Arrived, Range, Served
    from .agent import NixlTransfer, Remote
    from .descriptors import Runs
    from .staging import Staging

__all__ = [
    "ConfirmRead",
    "Description",
    "NixlAgent",
    "NixlTransport",
    "NixlUnavailable",
    "Quarantined",
    "Registered",
    "StillMoving",
]


class ConfirmRead(Protocol):
    """Callback: asks the peer whether a grant is still held, over the channel that granted it."""

    def __call__(self, grant: int, *, deadline: float) -> bool:
        """Whether the grant is still held. Raises PeerLost, TransferTimeout."""


class NixlTransport:
    """Ranges of one peer's grants by one-sided transfers. See `Transport`.

    `description` describes the memory that contains all grants, as its owner sent it; `resolve`
    returns where a grant lies in it, and `confirm` whether the grant is still held. A call raises
    Stalled after `stall_s` without progress; a transfer with a peer that hangs goes into quarantine
    until it ends.

    A write that fails may reach the peer's memory later, and the client cannot prevent it: the
    write raises StillMoving, and the peer must not reuse that memory before the connection is gone.
    With `in_place`, the transport reads directly into targets inside one registration of the agent,
    which is faster and outside the contract: such a read, too, raises StillMoving where a deadline
    or a stall ends it. `notify`: the last bytes of a write send a notification with the grant's
    number, to an agent that must fetch its notifications.
    """

    name = "nixl"

    def __init__(
        self,
        agent: NixlAgent,
        description: Description,
        resolve: Resolve,
        confirm: ConfirmRead,
        *,
        stall_s: float = 10.0,
        in_place: bool = False,
        notify: bool = False,
    ) -> None:
        """Raises FrameError for an invalid description."""
        description.check()
        self._agent = agent
        self._description = description
        self._resolve = resolve
        self._confirm = confirm
        self._stall_s = stall_s
        self._in_place = in_place
        self._notify = notify
        self._gate = UsageGate(lambda: PeerLost("this transport is closed"))
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
        """See `Transport.read`. A range has arrived once the peer has confirmed the grant after its
        bytes came: with `arrived` the call confirms the grant once per piece, else once."""
        views_of(ranges, targets, writable=True)
        with self._call(deadline):
            whole, far = self._far(grant, ranges, writes=False)
            mine = list(targets[: whole.ranges])
            call = NixlCall(self, grant, ranges, whole, deadline, arrived)
            memory = self._memory_of(mine) if self._in_place else None
            if memory is not None:
                places = [(one.ctypes.data, len(one)) for one in mine]
                return call.move_in_place(memory, runs_of(places), far, write=False)
            return call.read_staged(ChunkCursor(mine), far)

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
            call = NixlCall(self, grant, ranges, whole, deadline, None)
            memory = self._memory_of(mine) if self._in_place else None
            if memory is not None:
                places = [(one.ctypes.data, len(one)) for one in mine]
                return call.move_in_place(memory, runs_of(places), far, write=True)
            return call.write_staged(ChunkCursor(mine), far)

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
            call = NixlCall(self, grant, ranges, whole, deadline, arrived)
            return call.move_in_place(memory, runs_of(places), far, write=False)

    def close(self) -> None:
        """Disconnect from the peer. Transfers that hang stay in the agent's quarantine."""
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
        """The leading ranges inside the grant, and their addresses at the peer."""
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
        """The registration in host memory that contains all these arrays, or None."""
        filled = [array for array in arrays if len(array)]
        if not filled:
            return None
        memory = self._agent.find(filled[0].ctypes.data, len(filled[0]))
        if memory is None or memory.memory != "DRAM":
            return None
        inside = all(memory.holds(one.ctypes.data, len(one)) for one in filled)
        return memory if inside else None

    def prepare(self, memory: Registered, rows: NDArray[np.int64], *, write: bool) -> NixlTransfer:
        """Prepare one transfer, over the existing connection or a new one."""
        remote = self._connected()
        return self._agent.prepare(remote, self._description, memory, rows, write=write)

    def notification(self, grant: int) -> bytes:
        """The notification for the peer at the end of a write; empty without `notify`."""
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
        """The agent's staging. Raises PeerLost while too many transfers with this peer hang."""
        staging, memory = self._agent.staging()
        staging.check(self, time.monotonic())
        return staging, memory

    def confirmed(self, grant: int, deadline: float) -> None:
        """Ask the peer for confirmation. Raises GrantError unless the grant is still held."""
        if not self._confirm(grant, deadline=deadline):
            raise GrantError(f"grant {grant} ended before all its bytes had come; ask for another")

    def check(self) -> None:
        """Raise PeerLost once this transport or its agent is closed."""
        self._gate.check()
        self._agent.check()

    def wait(self, flight: NixlTransfer, since: float, deadline: float) -> None:
        """Wait until a transfer has ended. Raises PeerLost, Stalled, TransferTimeout."""
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

    def keep(self, flights: Sequence[NixlTransfer]) -> None:
        """Let the agent keep abandoned transfers that are in no staging piece's quarantine."""
        self._agent.keep(flights)

    def quarantined(self, memory: Registered, flights: Sequence[NixlTransfer]) -> Quarantined:
        """The quarantine of these transfers, for StillMoving."""
        return Quarantined(self._agent, memory, flights)
