"""Load and in-flight requests of other conductors (peers), as counted here. Pure.

**Load.** An instance's true load is this conductor's own, plus that of its peers, plus that of
strangers: clients that use the instance without any conductor. The own load is known exactly, the
peers' load from their bulletins, some tens of milliseconds old, and the sum of all three from
heartbeats of the instance, some seconds old. So

    strangers = max(0, reported - own - peers)      at the time of the report
    column    = own + peers + strangers             at any time after

Adding the peers' load to the reported load would count the same requests twice. A report and the
bulletin about the same request do not arrive together: the report may include a request before its
conductor's bulletin arrives here. For `SETTLE_S` after a report `strangers` is therefore computed
again at each update, which makes the column max(own + peers, own + what was reported beyond own) in
that time; then `strangers` stays constant until the next report.

Strangers are a single number per column: when a conductor dies, its load is removed, and those of
its requests that still run count as strangers, as far as the instance reports them.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from ..state.request_ids import ById

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from ..records import Load, Request
    from ..state.instance_table import Cluster
    from .bulletins import LoadRow, Placed

    Counts = NDArray[np.int64]
    Floats = NDArray[np.float64]

# Some twice the longest time until a peer's decision is known here: with the default `interval_s`,
# an interval until the peer sends it, and one until it is read here.
SETTLE_S = 0.25

# Peers' in-flight requests that are remembered, some 1.5 KB each; the oldest are evicted.
ELSEWHERE_MAX = 65_536

# The columns that heartbeats report, in the order of `LoadRow`.
REPORTED = ("queued", "queued_tokens", "batch", "context_tokens", "kv_used_tokens")
# For these columns, peers' requests that are still in prefill count already: by the time that a
# request placed now decodes there, they will, too.
_COMING = {"batch": 5, "context_tokens": 6}
COUNTS = len(REPORTED) + len(_COMING)


class SharingSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How often conductors exchange bulletins, and when a silent one counts as dead."""

    interval_s: Annotated[float, Meta(ge=0.005, le=10)] = 0.05
    """Between bulletins: what a decision may be unknown to others for, once more until they read
    it."""

    burst: Annotated[int, Meta(ge=1, le=65_536)] = 32
    """So many decisions are told at once, without waiting for the interval."""

    dead_s: Annotated[float, Meta(ge=0.1, le=3600)] = 2.0
    """Whose silence lasts so long is dead: what it had promised counts no more, and its requests
    may be taken over. Some garbage collections and a failover of Redis."""

    lead_s: Annotated[float, Meta(ge=0.2, le=3600)] = 3.0
    """For how long the conductor that leads has the lease, which it renews four times as often: so
    long nobody leads after it has died."""


def counts_of(row: LoadRow) -> tuple[int, ...]:
    """The numbers of a row in the order of columns here."""
    return (
        row.queued, row.queued_tokens, row.batch, row.context_tokens, row.kv_used_tokens,
        row.coming, row.coming_tokens,
    )  # fmt: skip


class _Peer:
    """One peer's load rows: by instance, and the same by row of our cluster."""

    def __init__(self, size: int) -> None:
        self.rows: dict[str, tuple[LoadRow, float]] = {}  # and when its `queued_s` will have passed
        self.counts: Counts = np.zeros((COUNTS, size), np.int64)
        self.until: Floats = np.full(size, -np.inf)


class PeerLoads:
    """The load of other conductors (peers), merged into the columns of a cluster.

    It writes only the part of the columns that is not our own: `column - own_column`, and
    `others_s`. Call `report` after each heartbeat, and `vacate` before an instance is removed.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._peers: dict[str, _Peer] = {}
        self._version = -1
        self._size = 0
        self._total: Counts = np.zeros((COUNTS, 0), np.int64)
        # Per reported column and row: the last reported load beyond our own, the strangers' part of
        # that, and until when that part is computed again.
        self._reported: Counts = np.zeros((len(REPORTED), 0), np.int64)
        self._strangers = self._reported.copy()
        self._settles_at: Floats = np.zeros((len(REPORTED), 0))

    def tell(self, peer: str, rows: Iterable[LoadRow], now: float) -> None:
        """Set a peer's current load on these instances."""
        self._refresh()
        known = self._peers.get(peer)
        if known is None:
            known = self._peers[peer] = _Peer(self._size)
        for row in rows:
            counts = counts_of(row)
            until = now + row.queued_s
            if any(counts):
                known.rows[row.instance] = row, until
            else:
                known.rows.pop(row.instance, None)
            if row.instance in self._cluster:
                at = self._cluster.row(row.instance)
                self._total[:, at] += np.subtract(counts, known.counts[:, at])
                known.counts[:, at] = counts
                known.until[at] = until

    def forget(self, peer: str, now: float) -> None:
        """Remove a peer's load: it has died, or is about to send its full state again."""
        self._refresh()
        known = self._peers.pop(peer, None)
        if known is not None:
            self._total -= known.counts
            self._settles_at[:, known.counts.any(axis=0)] = now + SETTLE_S

    def report(self, row: int, load: Load, now: float) -> None:
        """Merge a heartbeat, which has just set the columns of a row (`Cluster.heard`)."""
        self._refresh()
        values = (
            load.queued, load.queued_prefill_tokens, load.running, load.context_tokens,
            load.kv_used_tokens,
        )  # fmt: skip
        for at, (name, value) in enumerate(zip(REPORTED, values, strict=True)):
            if value is not None:
                own = getattr(self._cluster, f"own_{name}")[row]
                self._reported[at, row] = max(value - own, 0)
                self._settles_at[at, row] = now + SETTLE_S
        self.blend(now, row)

    def vacate(self, row: int) -> None:
        """Clear a row whose instance is being removed, for the next instance in this row."""
        self._refresh()
        for numbers in (self._reported, self._strangers, self._settles_at):
            numbers[:, row] = 0

    def blend(self, now: float, row: int | None = None) -> None:
        """Bring the columns up to date, of one row or of all. 0.1 ms for a thousand rows."""
        self._refresh()
        part = slice(None) if row is None else slice(row, row + 1)
        cluster, total = self._cluster, self._total[:, part]
        for at, name in enumerate(REPORTED):
            column = getattr(cluster, name)[part]
            strangers = self._strangers[at, part]
            beyond = np.maximum(self._reported[at, part] - total[at], 0)
            np.copyto(strangers, beyond, where=self._settles_at[at, part] > now)
            np.add(getattr(cluster, f"own_{name}")[part], strangers, out=column)
            column += total[at]
            if name in _COMING:
                column += total[_COMING[name]]
        strangers_s = cluster.c1[part] * self._strangers[REPORTED.index("queued_tokens"), part]
        cluster.others_s[part] = strangers_s + self._queued_s(now, part)

    def requests(self, row: int) -> int:
        """How many in-flight requests peers have at an instance; a request that is in prefill and
        will decode on the same instance counts twice."""
        self._refresh()
        at = REPORTED.index("queued"), REPORTED.index("batch"), _COMING["batch"]
        return int(self._total[list(at), row].sum())

    def check(self) -> None:
        """Raises AssertionError unless every total is the sum of the peers' rows. For tests."""
        self._refresh()
        total = np.zeros_like(self._total)
        for known in self._peers.values():
            for name, (row, _) in known.rows.items():
                if name in self._cluster:
                    total[:, self._cluster.row(name)] += counts_of(row)
        assert np.array_equal(total, self._total)
        assert (self._strangers >= 0).all()

    def _queued_s(self, now: float, part: slice) -> Floats:
        """Seconds of prefill in the peers' queues: as they sent them, less the time since then."""
        seconds = np.zeros(len(self._cluster.others_s[part]))
        for known in self._peers.values():
            seconds += np.maximum(known.until[part] - now, 0.0)
        return seconds

    def _refresh(self) -> None:
        """Rebuild the columns by row when instances have joined or left, as rows are re-used."""
        cluster = self._cluster
        if cluster.version == self._version:
            return
        self._version = cluster.version
        more = len(cluster.used) - self._size
        if more > 0:
            self._size += more
            for name in ("_reported", "_strangers", "_settles_at"):
                setattr(self, name, np.pad(getattr(self, name), ((0, 0), (0, more))))
        self._total = np.zeros((COUNTS, self._size), np.int64)
        for known in self._peers.values():
            known.counts = np.zeros((COUNTS, self._size), np.int64)
            known.until = np.full(self._size, -np.inf)
            for name, (row, until) in known.rows.items():
                if name in cluster:
                    at = cluster.row(name)
                    known.counts[:, at] = counts_of(row)
                    known.until[at] = until
            self._total += known.counts


@dataclass(slots=True)
class RemoteEntry:
    """A request that another conductor has, or had, in flight."""

    owner: str
    placed: Placed
    expires_at: float

    @property
    def rank(self) -> tuple[int, float, str]:
        return rank(self.placed, self.owner)


def rank(placed: Placed, owner: str) -> tuple[int, float, str]:
    """If two conductors have the same request in flight, the one with the higher rank keeps it: the
    one with the later takeover (`claim`), else the one that decided last (by the clocks of their
    machines), else the one whose name is later. All conductors agree, in whatever order the words
    arrive."""
    return placed.claim, placed.decided_at, owner


class Elsewhere:
    """In-flight requests of other conductors, so that calls here find them. Bounded.

    Requests of a conductor that has died stay until they expire, so that another conductor can take
    them over.
    """

    def __init__(self, most: int = ELSEWHERE_MAX) -> None:
        self._most = most
        self._entries: OrderedDict[str, RemoteEntry] = OrderedDict()
        self._by_id = ById()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, request_id: str) -> RemoteEntry | None:
        """The entry of a request, or None."""
        return self._entries.get(request_id)

    def find(self, request_id: str) -> RemoteEntry | None:
        """`get`; for an id without a tenant, the latest entry of any tenant with this id."""
        return self.get(request_id) or self.get(self._by_id.latest(request_id))

    def put(self, owner: str, placed: Placed, now: float) -> None:
        """Record that `owner` has a request in flight, and no earlier owner does, unless the
        earlier owner's entry has a higher rank."""
        entry = self._entries.get(placed.request_id)
        if entry is not None and entry.owner != owner and entry.rank > rank(placed, owner):
            return
        self._entries[placed.request_id] = RemoteEntry(owner, placed, now + placed.ttl_s)
        self._entries.move_to_end(placed.request_id)
        self._by_id.add(placed.request_id)
        if len(self._entries) > self._most:
            self.pop(next(iter(self._entries)))

    def ended(self, owner: str, request_id: str) -> None:
        """Remove a request that `owner` no longer has in flight; no-op if another one owns it."""
        entry = self._entries.get(request_id)
        if entry is not None and entry.owner == owner:
            self.pop(request_id)

    def pop(self, request_id: str) -> None:
        """Remove a request: this conductor owns it now, or it has ended."""
        self._entries.pop(request_id, None)
        self._by_id.discard(request_id)

    def expire(self, now: float) -> None:
        """Forget requests that their owner has not renewed in time. Entries are checked in order of
        arrival: an entry behind a longer-lived one may stay as long as that one."""
        while self._entries and next(iter(self._entries.values())).expires_at <= now:
            self.pop(next(iter(self._entries)))


def same_prompt(placed: Placed, request: Request) -> bool:
    """Whether the request has the placed prompt. Keys are chained, so the last key identifies
    it."""
    last = request.keys[-1] if request.keys else b""
    found: tuple[Any, ...] = (placed.model, placed.prompt_tokens, placed.blocks, placed.last_key)
    return found == (request.model, request.prompt_tokens, len(request.keys), last)
