"""Forecast of the decode load: how many requests each instance will decode at a future time. Pure.

A request that is admitted now reaches its decode instance only after its prefill, seconds later. By
then other requests, whose prefills are in flight now, will have arrived there, and others will have
finished. Admission by the current load therefore admits too much while decode is still idle and too
little while it drains ("Mooncake", arXiv 2407.00079, section 7.3).

The forecast is read with every request and updated with every event, and both should cost
microseconds with a thousand instances. So time is divided into buckets, and each bucket has, per
instance, the number of requests that will be decoding in it:

                     row 0  row 1  row 2                  a lookup reads one line: 1,000 numbers
      bucket  now      3      0      5
              now+1    3      1      5    <- a request   a request adds one to a part of one column:
              now+2    2      1      4    <- on row 1       256 numbers
              now+3    2      0      4

The alternative, to store only changes and sum them at a lookup, makes the cost of a lookup grow
with the number of buckets. The buckets are a ring buffer; a request beyond its end is added when
time reaches it.

The price is resolution: times are rounded to buckets, and a request counts in each bucket that it
touches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..cost.latency_model import decode_step_s
from ..errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from ..state.instance_table import Cluster

    Floats = NDArray[np.float64]
    Counts = NDArray[np.int64]

# A quarter of a second is less than the error of a TTFT prediction, and 256 buckets, 64 s, are
# twice the longest published TTFT objective (30 s). 12 bytes per bucket and row: 3 MB for a
# thousand instances.
BUCKET_S = 0.25
BUCKETS = 256
_ROWS_MIN = 64
# Longer than any answer; caps absurd estimates, which would give absurd bucket numbers.
DECODE_S_MAX = 86_400.0
# A request that has outlived its estimate is prolonged by this share of its age, repeatedly.
# Lengths of answers are heavy-tailed: a request that is late is likely to run on; and the number of
# times that a long request is prolonged grows only with the logarithm of its age.
OVERTIME = 0.5


@dataclass(slots=True)
class _Stay:
    """A request at a decode instance, in buckets [first, stop)."""

    row: int
    context_tokens: int
    decode_s: float
    first: int
    stop: int
    running: bool = False


class Horizon:
    """The forecast, from the estimated start and end of each in-flight request. Not thread-safe.

    The caller reports each request by `promise`, `start` and `end`; in whatever order, a request's
    counts are subtracted exactly once. `now` must not go back.
    """

    def __init__(self, bucket_s: float = BUCKET_S, buckets: int = BUCKETS) -> None:
        if not (bucket_s > 0 and math.isfinite(bucket_s) and buckets >= 2):
            raise InvalidRequest(f"{buckets} buckets of {bucket_s} s: give 2 or more, above 0 s")
        self.bucket_s = bucket_s
        self.buckets = buckets
        self._head = 0  # the current bucket; the ring has [head, head + buckets)
        self._stays: dict[str, _Stay] = {}
        # Stays by their stop bucket; and by their first bucket if that is beyond the ring.
        self._stops: dict[int, dict[str, _Stay]] = {}
        self._firsts: dict[int, dict[str, _Stay]] = {}
        self._batch: NDArray[np.int32] = np.zeros((buckets, _ROWS_MIN), np.int32)
        self._context: Counts = np.zeros((buckets, _ROWS_MIN), np.int64)
        # Requests known to decode now; an instance's own report should have the same count.
        self._running: Counts = np.zeros(_ROWS_MIN, np.int64)
        self._running_context: Counts = np.zeros(_ROWS_MIN, np.int64)

    def __len__(self) -> int:
        return len(self._stays)

    # -- events of requests ------------------------------------------------------------------------

    def promise(
        self,
        request_id: str,
        row: int,
        context_tokens: int,
        starts_at: float,
        decode_s: float,
        now: float,
    ) -> None:
        """Add a request whose prefill should end at `starts_at`, and which will then decode on
        `row` for `decode_s`. `context_tokens`: prompt and half of the answer, the mean over that
        time. Replaces the request's earlier entry. Raises InvalidRequest for a negative row or
        `decode_s`, and for a `starts_at` that is not finite."""
        if not (row >= 0 and math.isfinite(starts_at) and decode_s >= 0):
            raise InvalidRequest(
                f"request {request_id!r} on row {row} from {starts_at} for {decode_s} s: "
                "give a row of the cluster and times that are numbers"
            )
        self.end(request_id, now)
        self._need(row)
        decode_s = min(decode_s, DECODE_S_MAX)
        first, stop = self._buckets_of(max(starts_at, now), decode_s)
        self._put(request_id, _Stay(row, context_tokens, decode_s, first, stop))

    def start(self, request_id: str, now: float, decode_s: float | None = None) -> None:
        """Record that a request's prefill is done and it decodes from `now` on, for the time given
        to `promise` or for `decode_s`. No effect if the request is unknown or has started."""
        self.advance(now)
        stay = self._stays.get(request_id)
        if stay is None or stay.running:
            return
        self._take(request_id)
        if decode_s is not None:
            stay.decode_s = min(decode_s, DECODE_S_MAX)
        stay.first, stay.stop = self._buckets_of(now, stay.decode_s)
        stay.running = True
        self._running[stay.row] += 1
        self._running_context[stay.row] += stay.context_tokens
        self._put(request_id, stay)

    def end(self, request_id: str, now: float) -> None:
        """Remove a request that has finished, was cancelled or has expired. No effect if it is
        unknown."""
        self.advance(now)
        if request_id in self._stays:
            self._forget(request_id)

    def forget_row(self, row: int, now: float) -> None:
        """Remove all requests of an instance that was removed."""
        self.advance(now)
        for request_id in [name for name, stay in self._stays.items() if stay.row == row]:
            self._forget(request_id)

    # -- lookups -----------------------------------------------------------------------------------

    def at(self, rows: Counts, time_s: float, now: float) -> tuple[Counts, Counts]:
        """Requests, and their context tokens, that will be decoding on each of `rows` [n] at
        `time_s`: those whose prefill will have ended, less those that will have finished."""
        self.advance(now)
        rows = self._known(rows)
        slot = self._slot(time_s)
        return self._batch[slot].take(rows).astype(np.int64), self._context[slot].take(rows)

    def change(self, rows: Counts, time_s: float, now: float) -> tuple[Counts, Counts]:
        """How many more (or, below 0, fewer) requests and context tokens `at` gives, compared with
        those that decode now.

        To be added to the load that the instances report: it includes requests from elsewhere,
        which the forecast does not have.
        """
        batch, context = self.at(rows, time_s, now)
        rows = self._known(rows)
        return batch - self._running.take(rows), context - self._running_context.take(rows)

    def change_of(self, row: int, time_s: float, now: float) -> tuple[int, int]:
        """`change` of one row, as plain numbers."""
        self.advance(now)
        self._need(row)
        slot = self._slot(time_s)
        batch = self._batch.item(slot, row) - self._running.item(row)
        return batch, self._context.item(slot, row) - self._running_context.item(row)

    def course(self, row: int, now: float) -> tuple[Floats, Counts, Counts]:
        """`change` of one row in all buckets: (seconds from now, batch, context) [buckets]."""
        self.advance(now)
        self._need(row)
        order = (self._head + np.arange(self.buckets)) % self.buckets
        from_now_s = (self._head + np.arange(self.buckets)) * self.bucket_s - now
        batch = self._batch[order, row] - self._running[row]
        context = self._context[order, row] - self._running_context[row]
        return np.maximum(from_now_s, 0.0), batch, context

    def check(self) -> None:
        """Raises AssertionError unless every number is the sum over the stays. For tests."""
        batch, context = np.zeros_like(self._batch), np.zeros_like(self._context)
        running, running_context = np.zeros((2, len(self._running)), np.int64)
        for stay in self._stays.values():
            assert stay.stop > self._head, f"{stay} has ended and is still there"
            for bucket in range(max(stay.first, self._head), min(stay.stop, self._end)):
                batch[bucket % self.buckets, stay.row] += 1
                context[bucket % self.buckets, stay.row] += stay.context_tokens
            running[stay.row] += stay.running
            running_context[stay.row] += stay.running * stay.context_tokens
        assert np.array_equal(batch, self._batch)
        assert np.array_equal(context, self._context)
        assert np.array_equal(running, self._running)
        assert np.array_equal(running_context, self._running_context)
        assert sum(map(len, self._stops.values())) == len(self._stays)
        beyond = [name for name, stay in self._stays.items() if stay.first >= self._end]
        assert sorted(beyond) == sorted(name for names in self._firsts.values() for name in names)

    # -- time --------------------------------------------------------------------------------------

    def advance(self, now: float) -> None:
        """Advance time: buckets that are past are reused at the far end of the ring."""
        head = math.floor(now / self.bucket_s)
        if head - self._head >= self.buckets:
            self._begin_anew(head)
        while self._head < head:
            self._pass_one()

    def _pass_one(self) -> None:
        new, slot, last = self._end, self._head % self.buckets, (self._end - 1) % self.buckets
        # The new bucket starts as a copy of the last one, without the stays that stop in it.
        self._batch[slot] = self._batch[last]
        self._context[slot] = self._context[last]
        for stay in self._firsts.pop(new, {}).values():
            self._batch[slot, stay.row] += 1
            self._context[slot, stay.row] += stay.context_tokens
        for stay in self._stops.get(new, {}).values():
            self._batch[slot, stay.row] -= 1
            self._context[slot, stay.row] -= stay.context_tokens
        self._head += 1
        for request_id, stay in self._stops.pop(self._head, {}).items():
            self._prolong(stay)
            self._stops.setdefault(stay.stop, {})[request_id] = stay
            self._add(stay, self._head, stay.stop, 1)

    def _begin_anew(self, head: int) -> None:
        """Rebuild the ring after a time longer than the ring has passed."""
        stays = self._stays
        self._head, self._stays, self._stops, self._firsts = head, {}, {}, {}
        self._batch[:] = 0
        self._context[:] = 0
        for request_id, stay in stays.items():
            if stay.stop <= head:
                self._prolong(stay)
            self._put(request_id, stay)

    def _prolong(self, stay: _Stay) -> None:
        """Move the stop of a request that is past its estimate. If its prefill is late, its whole
        decode is still to come."""
        if stay.running:
            more = int((self._head - stay.first) * OVERTIME)
        else:
            more = math.ceil(stay.decode_s / self.bucket_s)
        stay.stop = self._head + max(more, 1)

    # -- the ring ----------------------------------------------------------------------------------

    @property
    def _end(self) -> int:
        return self._head + self.buckets

    def _buckets_of(self, starts_at: float, decode_s: float) -> tuple[int, int]:
        first = math.floor(starts_at / self.bucket_s)
        return first, max(first + 1, math.ceil((starts_at + decode_s) / self.bucket_s))

    def _slot(self, time_s: float) -> int:
        bucket = math.floor(min(time_s / self.bucket_s, self._end - 1))
        return max(bucket, self._head) % self.buckets

    def _put(self, request_id: str, stay: _Stay) -> None:
        self._stays[request_id] = stay
        self._stops.setdefault(stay.stop, {})[request_id] = stay
        if stay.first >= self._end:
            self._firsts.setdefault(stay.first, {})[request_id] = stay
        self._add(stay, stay.first, stay.stop, 1)

    def _take(self, request_id: str) -> _Stay:
        stay = self._stays.pop(request_id)
        for place, bucket in ((self._stops, stay.stop), (self._firsts, stay.first)):
            names = place.get(bucket)
            if names is not None and names.pop(request_id, None) is not None and not names:
                del place[bucket]
        self._add(stay, stay.first, stay.stop, -1)
        return stay

    def _forget(self, request_id: str) -> None:
        stay = self._take(request_id)
        if stay.running:
            self._running[stay.row] -= 1
            self._running_context[stay.row] -= stay.context_tokens

    def _add(self, stay: _Stay, first: int, stop: int, count: int) -> None:
        for part in self._parts(max(first, self._head), min(stop, self._end)):
            self._batch[part, stay.row] += count
            self._context[part, stay.row] += count * stay.context_tokens

    def _parts(self, first: int, stop: int) -> Iterable[slice]:
        """The slices of the ring for buckets [first, stop): one, or two around its end."""
        if first >= stop:
            return ()
        begin, length = first % self.buckets, stop - first
        if begin + length <= self.buckets:
            return (slice(begin, begin + length),)
        return slice(begin, None), slice(0, begin + length - self.buckets)

    def _need(self, row: int) -> None:
        have = len(self._running)
        if row < have:
            return
        more = max(row + 1, 2 * have) - have
        self._batch = np.pad(self._batch, ((0, 0), (0, more)))
        self._context = np.pad(self._context, ((0, 0), (0, more)))
        self._running = np.pad(self._running, (0, more))
        self._running_context = np.pad(self._running_context, (0, more))

    def _known(self, rows: Counts) -> Counts:
        if len(rows):
            self._need(int(rows.max()))
        return rows


def expected_load(
    horizon: Horizon, cluster: Cluster, rows: Counts, time_s: float, now: float
) -> tuple[Counts, Counts]:
    """Requests and context tokens that will be decoding on each of `rows` [n] at `time_s`: the
    current load in the cluster's columns plus the horizon's `change`."""
    batch, context = horizon.change(rows, time_s, now)
    batch += cluster.batch.take(rows)
    context += cluster.context_tokens.take(rows)
    return np.maximum(batch, 0, out=batch), np.maximum(context, 0, out=context)


def expected_load_of(
    horizon: Horizon, cluster: Cluster, row: int, time_s: float, now: float
) -> tuple[int, int]:
    """`expected_load` of one row, as plain numbers."""
    batch, context = horizon.change_of(row, time_s, now)
    batch += cluster.batch.item(row)
    context += cluster.context_tokens.item(row)
    return max(batch, 0), max(context, 0)


def relief_s(
    horizon: Horizon,
    cluster: Cluster,
    row: int,
    tbt_s: float,
    now: float,
    context_tokens: int,
) -> float | None:
    """In how many seconds a request of `context_tokens` could begin to decode on `row` with a TBT
    of at most `tbt_s`; None if that is beyond the end of the forecast."""
    from_now_s, batch, context = horizon.course(row, now)
    batch = np.maximum(batch + cluster.batch[row], 0) + 1
    context = np.maximum(context + cluster.context_tokens[row], 0) + context_tokens
    d0, d1, d2 = float(cluster.d0[row]), float(cluster.d1[row]), float(cluster.d2[row])
    within = np.flatnonzero(decode_step_s(d0, d1, d2, batch, context) <= tbt_s)
    return float(from_now_s[within[0]]) if len(within) else None
