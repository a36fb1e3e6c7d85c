"""What other conductors have promised, and how it is counted here. Pure.

**Load.** An instance's true load is ours, plus that of other conductors, plus that of strangers who
use it without any conductor. We know our own exactly, the others' own by their word, some tens of
milliseconds old, and from heartbeats of the instance the sum of all three, some seconds old. So

    strangers = max(0, reported - own - peers)      at the time of the report
    column    = own + peers + strangers             at any time after

Adding what others say to what the instance reports would count the same requests twice. A report
and the word of it do not come together: a request may be in the report before its conductor has
told us. For `SETTLE_S` after a report `strangers` is therefore computed again whenever others
speak, which makes the column max(own + peers, own + what was reported beyond own) in that time;
then it stays what it is until the next report.

Strangers are not stored by whom they are: what a dead conductor had promised is gone with it, and
what of it still runs is among the strangers then, as far as the instance reports it.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from .bulletins import Placed, Row
    from .cluster import Cluster
    from .records import Load, Request

    Counts = NDArray[np.int64]
    Floats = NDArray[np.float64]

# Twice what it takes until a decision of another conductor is known here, at most: an interval
# until it is told, one until it is read.
SETTLE_S = 0.25

# Requests in flight elsewhere that are remembered, some 1.5 KB each; beyond, the oldest leave.
ELSEWHERE_MAX = 65_536

# What heartbeats report, in the order of `Row`.
REPORTED = ("queued", "queued_tokens", "batch", "context_tokens", "kv_used_tokens")
# What others have promised to these columns and will come later is counted from now on: when our
# own request gets there, theirs will, too.
_COMING = {"batch": 5, "context_tokens": 6}
COUNTS = len(REPORTED) + len(_COMING)


class SharingSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How often conductors speak, and when one is taken for dead."""

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


def counts_of(row: Row) -> tuple[int, ...]:
    """The numbers of a row in the order of columns here."""
    return (
        row.queued, row.queued_tokens, row.batch, row.context_tokens, row.kv_used_tokens,
        row.coming, row.coming_tokens,
    )  # fmt: skip


class _Peer:
    """What one conductor has told: by instance, and the same by row of our cluster."""

    def __init__(self, size: int) -> None:
        self.rows: dict[str, tuple[Row, float]] = {}  # and when its seconds will have passed
        self.counts: Counts = np.zeros((COUNTS, size), np.int64)
        self.until: Floats = np.full(size, -np.inf)


class PeerLoads:
    """The load that other conductors have promised, in the columns of a cluster.

    Of columns it writes only what is not ours: `column - own_column`, and `others_s`. `report` is
    to follow each heartbeat, and `vacate` to precede the removal of an instance.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._peers: dict[str, _Peer] = {}
        self._version = -1
        self._size = 0
        self._total: Counts = np.zeros((COUNTS, 0), np.int64)
        # Per reported column and row: what the last report said beyond our own, what strangers have
        # of that, and until when that is computed again.
        self._reported: Counts = np.zeros((len(REPORTED), 0), np.int64)
        self._strangers = self._reported.copy()
        self._settles_at: Floats = np.zeros((len(REPORTED), 0))

    def tell(self, peer: str, rows: Iterable[Row], now: float) -> None:
        """These are a conductor's promises to these instances now."""
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
        """A conductor is gone, or begins to tell all anew."""
        self._refresh()
        known = self._peers.pop(peer, None)
        if known is not None:
            self._total -= known.counts
            self._settles_at[:, known.counts.any(axis=0)] = now + SETTLE_S

    def report(self, row: int, load: Load, now: float) -> None:
        """A heartbeat has just set the columns of a row (`Cluster.heard`)."""
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
        """The instance of this row is being removed; whoever has the row next begins with
        nothing."""
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
        """What others have in flight at an instance; of one that prefills and decodes, those in
        prefill twice."""
        self._refresh()
        at = REPORTED.index("queued"), REPORTED.index("batch"), _COMING["batch"]
        return int(self._total[list(at), row].sum())

    def check(self) -> None:
        """Raises AssertionError unless every sum is what was told. For tests."""
        self._refresh()
        total = np.zeros_like(self._total)
        for known in self._peers.values():
            for name, (row, _) in known.rows.items():
                if name in self._cluster:
                    total[:, self._cluster.row(name)] += counts_of(row)
        assert np.array_equal(total, self._total)
        assert (self._strangers >= 0).all()

    def _queued_s(self, now: float, part: slice) -> Floats:
        """Seconds of prefill that others have queued: what they said, less what has passed."""
        seconds = np.zeros(len(self._cluster.others_s[part]))
        for known in self._peers.values():
            seconds += np.maximum(known.until[part] - now, 0.0)
        return seconds

    def _refresh(self) -> None:
        """Rows are given again when instances come and go: put everything where it belongs now."""
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
class Entry:
    """A request that another conductor has, or had, in flight."""

    owner: str
    placed: Placed
    expires_at: float

    @property
    def rank(self) -> tuple[int, float, str]:
        return rank(self.placed, self.owner)


def rank(placed: Placed, owner: str) -> tuple[int, float, str]:
    """Of two conductors that have the same request in flight, the one with the higher rank keeps
    it: who took it over last, else who was asked last (by the clocks of their machines), else the
    one whose name is later. Whatever the order in which they hear of it, all agree."""
    return placed.claim, placed.decided_at, owner


class Elsewhere:
    """Requests in flight at other conductors, so that they are found here. Bounded.

    Those of a conductor that has died stay until they expire: that is when they are needed.
    """

    def __init__(self, most: int = ELSEWHERE_MAX) -> None:
        self._most = most
        self._entries: OrderedDict[str, Entry] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, request_id: str) -> Entry | None:
        """What is known of a request."""
        return self._entries.get(request_id)

    def put(self, owner: str, placed: Placed, now: float) -> None:
        """`owner` has it in flight; whoever had it before does not."""
        entry = self._entries.get(placed.request_id)
        if entry is not None and entry.owner != owner and entry.rank > rank(placed, owner):
            return
        self._entries[placed.request_id] = Entry(owner, placed, now + placed.ttl_s)
        self._entries.move_to_end(placed.request_id)
        if len(self._entries) > self._most:
            self._entries.popitem(last=False)

    def ended(self, owner: str, request_id: str) -> None:
        """It is not in flight at `owner` any more; if another one has it, nothing happens."""
        entry = self._entries.get(request_id)
        if entry is not None and entry.owner == owner:
            del self._entries[request_id]

    def pop(self, request_id: str) -> None:
        """It is ours now, or nobody's."""
        self._entries.pop(request_id, None)

    def expire(self, now: float) -> None:
        """Forget what its owner has not spoken of for too long. In order of arrival: who comes
        behind one that lasts longer may stay as long as that one."""
        while self._entries and next(iter(self._entries.values())).expires_at <= now:
            self._entries.popitem(last=False)


def same_prompt(placed: Placed, request: Request) -> bool:
    """Whether it is the prompt that was placed. Keys are chained, so that the last one tells."""
    last = request.keys[-1] if request.keys else b""
    found: tuple[Any, ...] = (placed.model, placed.prompt_tokens, placed.blocks, placed.last_key)
    return found == (request.model, request.prompt_tokens, len(request.keys), last)
