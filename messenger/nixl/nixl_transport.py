"""The NIXL transport: ranges of a peer's grant by RDMA. Optional; docs/nixl.md lists its limits.

The peer's processor takes no part in a transfer, so the client does two things that a server would
do. It checks ranges against the places of the grant, as resolved, and computes addresses from them.
And since the peer cannot keep a grant from ending during a read, the bytes of a read count only
once the peer has confirmed, after they arrived, that the grant is still held (`confirm`).

The bytes go through staging pieces, two per call at a time: while one piece is copied out, and its
grant confirmed, the next is in flight.
"""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from ..errors import GrantError, PeerLost, Stalled, TransferTimeout
from ..usage_gate import UsageGate
from ..wire.ranges import lay_out, pack_ranges, unpack_ranges, views_of
from .agent import LOOKS, NAP_S_MAX, NAP_S_MIN
from .chunked_call import ChunkCursor, NixlCall
from .descriptors import runs_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from ..shm.host_copy import ByteArray
    from ..transport import Arrived, Range, Served
    from .agent import Description, NixlAgent, NixlTransfer, Remote
    from .descriptors import Runs
    from .staging import Staging


class Resolve(Protocol):
    """Callback: where the bytes of a grant lie, as ranges of the described memory, in order."""

    def __call__(self, grant: int) -> Sequence[Range]:
        """Resolve a grant. Raises GrantError."""


class ConfirmRead(Protocol):
    """Callback: asks the peer whether a grant is still held, over the channel that granted it."""

    def __call__(self, grant: int, *, deadline: float) -> bool:
        """Whether the grant is still held. Raises PeerLost, TransferTimeout."""


class NixlTransport:
    """Ranges of one peer's grants by one-sided reads. See `Transport`.

    `description` describes the memory that contains all grants, as its owner sent it; `resolve`
    returns where a grant lies in it, and `confirm` whether the grant is still held. A call raises
    Stalled after `stall_s` without progress; a transfer with a peer that hangs goes into quarantine
    until it ends.
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
    ) -> None:
        """Raises FrameError for an invalid description."""
        description.check()
        self._agent = agent
        self._description = description
        self._resolve = resolve
        self._confirm = confirm
        self._stall_s = stall_s
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
            whole, far = self._far(grant, ranges)
            call = NixlCall(self, grant, ranges, whole, deadline, arrived)
            return call.read(ChunkCursor(targets[: whole.ranges]), far)

    def close(self) -> None:
        """Disconnect from the peer. Transfers that hang stay in the staging's quarantine."""
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
            yield

    def _far(self, grant: int, ranges: Sequence[Range]) -> tuple[Served, Runs]:
        """The leading ranges inside the grant, and their addresses at the peer."""
        places = self._resolve(grant)
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

    def prepare(self, rows: NDArray[np.int64]) -> NixlTransfer:
        """Prepare one transfer, over the existing connection or a new one."""
        return self._agent.prepare(self._connected(), rows)

    def _connected(self) -> Remote:
        with self._lock:
            if self._remote is not None and self._remote.lost:
                lost, self._remote = self._remote, None
                self._agent.leave(lost)
            if self._remote is None:
                self._remote = self._agent.connect(self._description)
            return self._remote

    def staging(self) -> Staging:
        """The agent's staging. Raises PeerLost while too many transfers with this peer hang."""
        staging = self._agent.staging()
        staging.check(self, time.monotonic())
        return staging

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
