"""Load of several conductors: what this one says of its own, how that of its peers counts. Pure.

An instance's true load is this conductor's own, plus that of its peers, plus that of strangers:
clients that use the instance without any conductor. The own load is known exactly, the peers' from
their states, some tens of milliseconds old, and the sum of all three from heartbeats of the
instance, some seconds old. So

    strangers = max(0, reported - own then - peers then)    then: when the report was measured
    column    = own + peers + strangers                     at any time after

Adding the peers' load to the reported load would count the same requests twice
(`state/load_reports.py`). Of peers' load, the most of about that time counts, as it is known some
tens of milliseconds late. Until the next report, those of a peer that has died do not count.
"""

from __future__ import annotations

import itertools
from collections import deque
from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import astuple

from ..state.load_reports import AGE_S_MAX, REPORTED, TRANSIT_S, UNKNOWN_AGE_S
from .states import SECONDS_MAX, LoadRow

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ..core.inflight_requests import Ledger
    from ..prefill.wait_estimate import Queues
    from ..state.instance_table import Cluster

    Counts = NDArray[np.int64]
    Floats = NDArray[np.float64]

# The counts of a `LoadRow` are in the order of `REPORTED`, and then these. For these columns,
# peers' requests that are still in prefill count already: by the time that a request placed now
# decodes there, they will, too.
_COMING = {"batch": 5, "context_tokens": 6}
COUNTS = len(REPORTED) + len(_COMING)
# Peers' load is kept as the most in each of these intervals.
_KEPT_S = 0.5
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
    """The load of other conductors (peers), as a cluster's load from elsewhere. Call `blend` after
    any of the others."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        # Each peer's rows: instances, counts [rows, COUNTS], and when `queued_s` will have passed.
        self._peers: dict[str, tuple[list[str], Counts, Floats]] = {}
        self._version = -1
        self._stale = True
        self._total: Counts = np.zeros((COUNTS, 0), np.int64)
        self._queues: list[tuple[Counts, Floats]] = []  # of each peer: rows here, until when
        self._past: deque[tuple[float, Counts]] = deque()  # (begin of an interval, most in it)

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
        self._past.clear()  # its requests run on, and are strangers' from now on

    def at(self, row: int, age_s: float | None, now: float) -> Counts:
        """The most that peers had at an instance since a report was measured, in the order of
        `REPORTED`. `age_s`: of the report; None if it is not known."""
        self._refresh(now)
        since = now - (UNKNOWN_AGE_S if age_s is None else age_s) - TRANSIT_S - _KEPT_S
        most = self._total[: len(REPORTED), row]
        for begin, past in self._past:
            if begin >= since and row < past.shape[1]:
                most = np.maximum(most, past[:, row])
        return most

    def blend(self, now: float, row: int | None = None) -> None:
        """Bring the columns up to date, of one row or of all. 0.1 ms for a thousand rows."""
        self._refresh(now)
        part = slice(None) if row is None else slice(row, row + 1)
        cluster, total = self._cluster, self._total[:, part]
        cluster.elsewhere[:, part] = total[: len(REPORTED)]
        for name, at in _COMING.items():
            cluster.elsewhere[REPORTED.index(name), part] += total[at]
        seconds = np.zeros(len(cluster.used))
        for rows, until in self._queues:
            seconds[rows] += np.maximum(until - now, 0.0)
        cluster.elsewhere_s[part] = seconds[part]
        cluster.blend(now, row)

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

    def _refresh(self, now: float | None = None) -> None:
        """Sum the peers' rows again when one of them has changed, or the rows here have."""
        cluster = self._cluster
        if self._stale or cluster.version != self._version:
            if cluster.version != self._version:
                self._past.clear()  # a row may have another instance
            self._stale, self._version = False, cluster.version
            self._total, self._queues = np.zeros((COUNTS, len(cluster.used)), np.int64), []
            for names, counts, until in self._peers.values():
                here = [at for at, name in enumerate(names) if name in cluster]
                rows = np.array([cluster.row(names[at]) for at in here], np.int64)
                self._total[:, rows] += counts[here].T
                self._queues.append((rows, until[here]))
            if now is not None:
                self._keep(now)

    def _keep(self, now: float) -> None:
        """Keep the present load for reports that are yet to come."""
        total, past = self._total[: len(REPORTED)], self._past
        if past and now < past[-1][0] + _KEPT_S:
            np.maximum(past[-1][1], total, out=past[-1][1])
        else:
            past.append((now, total.copy()))
        while past[0][0] < now - AGE_S_MAX:
            past.popleft()
