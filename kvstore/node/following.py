"""Reading blocks while they are being written: what is published, and who waits for it.

A writer publishes segments that it has finished; a follower holds the blocks of a prefix, finished
or not, and awaits segments of all of them. Only what it awaited is exposed to its reads: the bytes
of an unfinished block beyond that can't be named. Nothing of this makes a block visible: that is
its commit's doing alone, and what a follower reads before is the writer's word.

Pure: no I/O and no clock; headers of committed blocks are read by whoever calls `Watch.look`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..block import CHECKSUM_BYTES, PAGE_BYTES, BlockState
from ..errors import InvalidInput, StaleLease
from . import messages

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from ..block import Header
    from .core import NodeCore
    from .records import Lease, Replica, Session

_READABLE = (BlockState.COMMITTED, BlockState.EVICTING)


class Part(NamedTuple):
    """One segment, as bytes of its block's extent, and the checksum that its writer gave it."""

    offset: int
    length: int
    checksum: int


class Published(dict["Replica", dict[int, Part]]):
    """The segments that writers have published of blocks that are not committed yet, by index.

    `version` grows with every change, so that who waits looks only when there is something to see.
    """

    version = 0

    def add(self, replicas: Sequence[Replica], parts: Sequence[dict[int, Part]]) -> None:
        """These segments of these replicas are complete."""
        for replica, more in zip(replicas, parts, strict=True):
            self.setdefault(replica, {}).update(more)
        self.version += 1


class Sealed:
    """Where the segments of a committed block lie in its extent, and their checksums, by index."""

    __slots__ = ("_checksums", "_lengths", "_offsets")

    def __init__(self, header: Header) -> None:
        self._lengths = header.segment_bytes.astype(np.int64)
        self._offsets = header.header_bytes + np.cumsum(self._lengths) - self._lengths
        self._checksums = header.checksums

    def parts(self, segments: NDArray[np.intp]) -> list[Part]:
        """These segments. Raises InvalidInput for one that the block has not."""
        if len(segments) and int(segments.max()) >= len(self._lengths):
            raise InvalidInput(
                f"segment {int(segments.max())} of a block of {len(self._lengths)} segments: "
                "followers and writers use one schema"
            )
        chosen = (self._offsets[segments], self._lengths[segments], self._checksums[segments])
        return [Part(*part) for part in zip(*(array.tolist() for array in chosen), strict=True)]


class Exposed(NamedTuple):
    """Bytes of one extent that a follower may read now."""

    replica: Replica
    offset: int
    length: int


class Followed:
    """What a follower's lease has besides an ordinary one: the bytes that its last await exposed,
    which are all that it may read, and its committed blocks' segments, looked up once."""

    __slots__ = ("exposed", "sealed")

    def __init__(self) -> None:
        self.exposed: list[Exposed] = []
        self.sealed: dict[Replica, Sealed] = {}


def publish(core: NodeCore, session: Session, request: messages.Publish) -> int:
    """Note what a writer has finished; in how many blocks. Raises StaleLease for a reservation that
    has ended, InvalidInput for what can't be so."""
    lease = session.leases.get(request.lease)
    if lease is None or not lease.writes:
        raise StaleLease(f"reservation {request.lease} has ended: nothing of it can be published")
    spans = _spans(request)
    if any(slot >= len(lease.replicas) for slot in request.slots):
        raise InvalidInput(f"a slot beyond the {len(lease.replicas)} of reservation {lease.id}")
    # Of those that another rank gave up there is nothing to publish.
    wanted = [(at, lease.replicas[slot]) for at, slot in enumerate(request.slots)]
    live = [(at, replica) for at, replica in wanted if replica.state is BlockState.RESERVED]
    checksums = np.frombuffer(request.checksums, "<u8").reshape(len(request.slots), len(spans))
    for _, replica in live:
        _check_part(core, lease, replica, request.segments, spans)
    parts = [
        {
            segment: Part(*span, checksum)
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
    lease: Lease,
    replica: Replica,
    segments: Sequence[int],
    spans: Sequence[tuple[int, int]],
) -> None:
    """Raises InvalidInput unless this lease's writer may publish that."""
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


def follower(session: Session, lease_id: int) -> tuple[Lease, Followed]:
    """The session's follower's lease of that number. Raises StaleLease."""
    lease = session.leases.get(lease_id)
    if lease is None or lease.followed is None:
        raise StaleLease(
            f"lease {lease_id} does not follow writers, or has ended (over the network also for "
            "want of an await)"
        )
    return lease, lease.followed


class Watch:
    """One `Await` until it is answered. Raises StaleLease if the session has no such lease, and
    InvalidInput for an answer that would be too large."""

    def __init__(self, core: NodeCore, session: Session, request: messages.Await) -> None:
        self._core = core
        self._session = session
        self._request = request
        self._segments = np.array(request.segments, np.intp)
        self._seen: tuple[int, int, int] | None = None
        lease, followed = follower(session, request.lease)
        followed.exposed = []  # a read that comes before the answer gets nothing
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
        """The answer, or None while some block is not so far; with `final` there is always one.

        `seal` reads the header of a committed block. Raises StaleLease if the lease, or a block
        that it follows, has ended.
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
        """What can make an answer possible: a publication, a commit or removal, an abort."""
        residency = self._core.residency
        return residency.published.version, residency.events.seq, residency.counters.aborts

    def _parts(
        self, lease: Lease, followed: Followed, seal: Callable[[Replica], Sealed]
    ) -> list[list[Part]] | None:
        """The awaited segments of every block; None if one is not there yet."""
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
        self, lease: Lease, followed: Followed, parts: list[list[Part]]
    ) -> messages.Awaited:
        if self._request.segments:
            followed.exposed = [
                Exposed(replica, *run)
                for replica, some in zip(lease.replicas, parts, strict=True)
                for run in _runs(some)
            ]
        else:  # all are committed
            followed.exposed = [Exposed(r, 0, r.length) for r in lease.replicas]
        sums = np.array([part.checksum for some in parts for part in some], "<u8")
        return messages.Awaited(self._request.id, True, sums.tobytes())


def _runs(parts: list[Part]) -> list[tuple[int, int]]:
    """(offset, length) of the parts in their order, neighbours joined."""
    runs: list[tuple[int, int]] = []
    for offset, length, _ in parts:
        if runs and sum(runs[-1]) == offset:
            runs[-1] = runs[-1][0], runs[-1][1] + length
        else:
            runs.append((offset, length))
    return runs
