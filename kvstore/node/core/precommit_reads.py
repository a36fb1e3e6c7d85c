"""Reading blocks before their commit: published segments, and readers that follow writers.

A writer publishes segments that it has finished. A follower is a reader whose lease holds the
blocks of a prefix, committed or not; it awaits segments of all of them. Only awaited segments are
exposed to its reads: it cannot address other bytes of an uncommitted block. A publication does not
make a block visible; only the commit does. The writer alone vouches for the bytes and checksums
that a follower reads before the commit.

Pure: no I/O and no clock; the caller of `Watch.look` reads the headers of committed blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ...errors import InvalidInput, StaleLease
from ...format.header import CHECKSUM_BYTES, PAGE_BYTES, BlockState
from . import messages
from .records import Exposed
from .sealed import SegmentPart

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .node_core import NodeCore
    from .records import Followed, LeaseRecord, Replica, Session
    from .sealed import Sealed

_READABLE = (BlockState.COMMITTED, BlockState.EVICTING)


def publish(core: NodeCore, session: Session, request: messages.Publish) -> int:
    """Record segments that a writer has finished; returns in how many blocks. Raises StaleLease for
    a reservation that has ended, InvalidInput for segments that this writer cannot publish."""
    lease = session.leases.get(request.lease)
    if lease is None or not lease.writes:
        raise StaleLease(f"reservation {request.lease} has ended: nothing of it can be published")
    spans = _spans(request)
    if any(slot >= len(lease.replicas) for slot in request.slots):
        raise InvalidInput(f"a slot beyond the {len(lease.replicas)} of reservation {lease.id}")
    # Blocks that another rank has cancelled are skipped.
    wanted = [(at, lease.replicas[slot]) for at, slot in enumerate(request.slots)]
    live = [(at, replica) for at, replica in wanted if replica.state is BlockState.RESERVED]
    checksums = np.frombuffer(request.checksums, "<u8").reshape(len(request.slots), len(spans))
    for _, replica in live:
        _check_part(core, lease, replica, request.segments, spans)
    parts = [
        {
            segment: SegmentPart(*span, checksum)
            for segment, span, checksum in zip(
                request.segments, spans, checksums[at].tolist(), strict=True
            )
        }
        for at, _ in live
    ]
    core.residency.published.add([replica for _, replica in live], parts)
    return len(live)


def _spans(request: messages.Publish) -> list[tuple[int, int]]:
    """(offset, length) of each segment of a message. Raises InvalidInput."""
    spans = list(zip(request.spans[::2], request.spans[1::2], strict=False))
    sums_bytes = CHECKSUM_BYTES * len(request.slots) * len(request.segments)
    if len(request.spans) != 2 * len(request.segments) or len(request.checksums) != sums_bytes:
        raise InvalidInput(
            f"{len(request.segments)} segments of {len(request.slots)} slots need an offset and a "
            f"length each and {sums_bytes} bytes of checksums"
        )
    if len(set(request.segments)) < len(request.segments):
        raise InvalidInput("a segment is published twice in one message")
    if len(set(request.slots)) < len(request.slots):
        raise InvalidInput("a slot is published twice in one message")
    return spans


def _check_part(
    core: NodeCore,
    lease: LeaseRecord,
    replica: Replica,
    segments: Sequence[int],
    spans: Sequence[tuple[int, int]],
) -> None:
    """Raises InvalidInput unless this lease's writer may publish these segments."""
    if any(at < PAGE_BYTES or not length or at + length > replica.length for at, length in spans):
        raise InvalidInput(
            f"a segment outside the payload of an extent of {replica.length} bytes, or an empty one"
        )
    known = core.residency.published.get(replica, {})
    if any(segment in known for segment in segments):
        raise InvalidInput("published before: what is published must not change any more")
    if lease.rank is not None:
        owned = core.residency.shared[replica].joined[lease.rank]
        if not all(owned >> segment & 1 for segment in segments):
            raise InvalidInput(f"rank {lease.rank} publishes a segment that another rank writes")


def follower(session: Session, lease_id: int) -> tuple[LeaseRecord, Followed]:
    """The session's lease of this id, which must follow writers. Raises StaleLease."""
    lease = session.leases.get(lease_id)
    if lease is None or lease.followed is None:
        raise StaleLease(
            f"lease {lease_id} does not follow writers, or has ended (over the network also for "
            "want of an await)"
        )
    return lease, lease.followed


class Watch:
    """One in-flight `Await` request. Raises StaleLease if the session has no such lease, and
    InvalidInput for an answer that would be too large."""

    def __init__(self, core: NodeCore, session: Session, request: messages.Await) -> None:
        self._core = core
        self._session = session
        self._request = request
        self._segments = np.array(request.segments, np.intp)
        self._seen: tuple[int, int, int] | None = None
        lease, followed = follower(session, request.lease)
        followed.exposed = []  # a read that arrives before the answer fails
        nbytes = CHECKSUM_BYTES * len(lease.replicas) * len(request.segments)
        if nbytes > messages.AWAITED_BYTES_MAX:
            raise InvalidInput(
                f"an answer with {nbytes} bytes of checksums; the limit is "
                f"{messages.AWAITED_BYTES_MAX}: await fewer segments at a time, or follow a slice "
                "of the prefix"
            )

    def look(
        self, now: float, seal: Callable[[Replica], Sealed], *, final: bool = False
    ) -> messages.Awaited | None:
        """The answer, or None while a block lacks awaited segments; never None with `final`.

        `seal` reads the header of a committed block. Raises StaleLease if the lease has ended, or
        if a followed block was cancelled or removed.
        """
        lease, followed = follower(self._session, self._request.lease)
        seen = self._changes()
        if seen != self._seen:
            self._seen = seen
            parts = self._parts(lease, followed, seal)
            if parts is not None:
                self._core.renew(lease, now)
                return self._answer(lease, followed, parts)
        return messages.Awaited(self._request.id, False) if final else None

    def _changes(self) -> tuple[int, int, int]:
        """Counters of the events that can make an answer possible: publications, commits and
        removals, aborts."""
        residency = self._core.residency
        return residency.published.version, residency.events.seq, residency.counters.aborts

    def _parts(
        self, lease: LeaseRecord, followed: Followed, seal: Callable[[Replica], Sealed]
    ) -> list[list[SegmentPart]] | None:
        """The awaited segments of every block; None if one is not published yet."""
        found = []
        complete = True
        for replica in lease.replicas:
            if replica.state in _READABLE:
                sealed = followed.sealed.get(replica)
                if sealed is None:
                    sealed = followed.sealed[replica] = seal(replica)
                found.append(sealed.parts(self._segments))
                continue
            if replica.state is not BlockState.RESERVED:
                raise StaleLease(
                    f"block {replica.key.hex()} was given up by its writer, or removed, while it "
                    "was followed: what was read of it is not to be used"
                )
            known = self._core.residency.published.get(replica, {})
            complete &= bool(self._request.segments) and all(
                segment in known for segment in self._request.segments
            )
            if complete:
                found.append([known[segment] for segment in self._request.segments])
        return found if complete else None

    def _answer(
        self, lease: LeaseRecord, followed: Followed, parts: list[list[SegmentPart]]
    ) -> messages.Awaited:
        if self._request.segments:
            followed.exposed = [
                Exposed(replica, *run)
                for replica, some in zip(lease.replicas, parts, strict=True)
                for run in _runs(some)
            ]
        else:  # all blocks are committed
            followed.exposed = [Exposed(r, 0, r.length) for r in lease.replicas]
        sums = np.array([part.checksum for some in parts for part in some], "<u8")
        return messages.Awaited(self._request.id, True, sums.tobytes())


def _runs(parts: list[SegmentPart]) -> list[tuple[int, int]]:
    """(offset, length) of the parts in their order, adjacent ones merged."""
    runs: list[tuple[int, int]] = []
    for offset, length, _ in parts:
        if runs and sum(runs[-1]) == offset:
            runs[-1] = runs[-1][0], runs[-1][1] + length
        else:
            runs.append((offset, length))
    return runs
