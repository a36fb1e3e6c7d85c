"""Load of several conductors: what this one says of its own, how that of its peers counts. Pure.

An instance's true load is this conductor's own, plus that of its peers, plus that of strangers:
clients that use the instance without any conductor. The own load is known exactly, the peers' from
their states, some tens of milliseconds old, and the sum of all three from heartbeats of the
instance, some seconds old. So

    strangers = max(0, reported - own - peers)      at the time of the report
    column    = own + peers + strangers             at any time after

Adding the peers' load to the reported load would count the same requests twice. Until the next
report, requests may count twice that a peer had placed just before this one, and those of a peer
that has died since do not count.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import astuple

from .states import SECONDS_MAX, LoadRow

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ..core.inflight_requests import Ledger
    from ..prefill.wait_estimate import Queues
    from ..records import Load
    from ..state.instance_table import Cluster

    Counts = NDArray[np.int64]
    Floats = NDArray[np.float64]

# The columns that heartbeats report, in the order of `LoadRow`.
REPORTED = ("queued", "queued_tokens", "batch", "context_tokens", "kv_used_tokens")
# For these columns, peers' requests that are still in prefill count already: by the time that a
# request placed now decodes there, they will, too.
_COMING = {"batch": 5, "context_tokens": 6}
COUNTS = len(REPORTED) + len(_COMING)
# A prefill longer than any queue, so that the wait behind the queue covers everything in it.
_FOREVER_S = 1e9


def own_rows(
    cluster: Cluster, ledger: Ledger, queues: Queues, lowest: str, now: float
) -> list[LoadRow]:
    """The load of this conductor's in-flight requests, for its peers; `lowest` is the lowest class
    of priority. A loop over the in-flight requests: 1 ms for 10,000."""
    counts: Counts = np.zeros((COUNTS, len(cluster.used)), np.int64)
    for at, name in enumerate(REPORTED):
        counts[at] = getattr(cluster, f"own_{name}")
    coming, coming_tokens = counts[len(REPORTED) :]
    for flight in ledger:
        total = sum(flight.shares.values())
        if flight.phase or not total:
            continue
        for row, tokens in flight.shares.items():
            coming[row] += row == flight.decode_row
            coming_tokens[row] += flight.request.prompt_tokens * tokens // total
    np.maximum(counts, 0, out=counts)
    rows = np.flatnonzero(counts.any(axis=0) & cluster.used)
    if not len(rows):
        return []
    # The wait of a request of the lowest class whose own prefill is longer than any queue.
    seconds = np.minimum(queues.wait_s(rows, lowest, _FOREVER_S, now), SECONDS_MAX).tolist()
    table = zip(map(cluster.name, rows.tolist()), *counts[:, rows].tolist(), seconds, strict=True)
    return list(itertools.starmap(LoadRow, table))


class PeerLoads:
    """The load of other conductors (peers), merged into the columns of a cluster.

    It writes only the part of the columns that is not our own: `column - own_column`, and
    `others_s`. Call `report` after each heartbeat, `vacate` before an instance is removed, and
    `blend` after any of these.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        # Each peer's rows: instances, counts [rows, COUNTS], and when `queued_s` will have passed.
        self._peers: dict[str, tuple[list[str], Counts, Floats]] = {}
        self._version = -1
        self._stale = True
        self._total: Counts = np.zeros((COUNTS, 0), np.int64)
        self._queues: list[tuple[Counts, Floats]] = []  # of each peer: rows here, until when
        self._strangers: Counts = np.zeros((len(REPORTED), 0), np.int64)

    def tell(self, peer: str, rows: Sequence[LoadRow], now: float) -> None:
        """Set all of a peer's load."""
        numbers = np.array([astuple(row)[1:] for row in rows], float).reshape(-1, COUNTS + 1)
        counts, until = numbers[:, :COUNTS].astype(np.int64), now + numbers[:, COUNTS]
        self._peers[peer] = [row.instance for row in rows], counts, until
        self._stale = True

    def forget(self, peer: str) -> None:
        """Remove the load of a peer that has died."""
        del self._peers[peer]
        self._stale = True

    def report(self, row: int, load: Load) -> None:
        """Take the load that an instance reports: what is not ours or our peers' is strangers'."""
        self._refresh()
        values = (
            load.queued, load.queued_prefill_tokens, load.running, load.context_tokens,
            load.kv_used_tokens,
        )  # fmt: skip
        for at, (name, value) in enumerate(zip(REPORTED, values, strict=True)):
            if value is not None:
                known = getattr(self._cluster, f"own_{name}")[row] + self._total[at, row]
                self._strangers[at, row] = max(value - known, 0)

    def vacate(self, row: int) -> None:
        """Clear a row whose instance is being removed, for the next instance in this row."""
        self._refresh()
        self._strangers[:, row] = 0

    def blend(self, now: float, row: int | None = None) -> None:
        """Bring the columns up to date, of one row or of all. 0.1 ms for a thousand rows."""
        self._refresh()
        part = slice(None) if row is None else slice(row, row + 1)
        cluster, total = self._cluster, self._total[:, part]
        for at, name in enumerate(REPORTED):
            column = getattr(cluster, name)[part]
            own = getattr(cluster, f"own_{name}")[part]
            np.add(own, self._strangers[at, part] + total[at], out=column)
            if name in _COMING:
                column += total[_COMING[name]]
        seconds = np.zeros(len(cluster.used))
        for rows, until in self._queues:
            seconds[rows] += np.maximum(until - now, 0.0)
        strangers_s = cluster.c1[part] * self._strangers[REPORTED.index("queued_tokens"), part]
        cluster.others_s[part] = strangers_s + seconds[part]

    def queued(self, row: int) -> int:
        """How many requests of peers wait for their prefill at an instance, or are prefilled."""
        self._refresh()
        return self._total.item(REPORTED.index("queued"), row)

    def requests(self, row: int) -> int:
        """How many in-flight requests peers have at an instance; a request that is in prefill and
        will decode on the same instance counts twice."""
        self._refresh()
        at = REPORTED.index("queued"), REPORTED.index("batch"), _COMING["batch"]
        return int(self._total[list(at), row].sum())

    def _refresh(self) -> None:
        """Sum the peers' rows again when one of them has changed, or the rows here have."""
        cluster = self._cluster
        if not self._stale and cluster.version == self._version:
            return
        self._stale, self._version = False, cluster.version
        more = len(cluster.used) - self._strangers.shape[1]
        self._strangers = np.pad(self._strangers, ((0, 0), (0, more)))
        self._total, self._queues = np.zeros((COUNTS, len(cluster.used)), np.int64), []
        for names, counts, until in self._peers.values():
            here = [at for at, name in enumerate(names) if name in cluster]
            rows = np.array([cluster.row(names[at]) for at in here], np.int64)
            self._total[:, rows] += counts[here].T
            self._queues.append((rows, until[here]))
