"""Forecast of the decode load: how much each instance will decode at a future time. Pure.

A request that is admitted now reaches its decode instance only after its prefill, seconds later. By
then other requests, whose prefills are in flight now, will have arrived there, and others will have
finished. Admission by the current load therefore admits too much while decode is still idle and too
little while it drains ("Mooncake", arXiv 2407.00079, section 7.3).

**From its turn in the prefill queue on, the highest load counts** until it has decoded, and not
that of the moment when it begins. Who waits for the same queue is judged from the same time on, so
a longer prefill is no merit: judged at its end, those with long prompts would find free places, of
those who end meanwhile, and short prompts none. Where decode is what there is too little of, nobody
waits for prefill, and the present load decides; where prefill is, places are promised as far ahead
as all wait. Nor is one with a place far ahead overrun by those who come before it and stay.

**Who will come later is not counted.** What was promised is kept (`promised_tbt.py`), so nobody who
comes later can break it.

**How much will have gone is uncertain**, the more so the further ahead, and the more so if single
requests have much of it: with each request gone at the same probability p, independently, its
variance is p (1 - p) times the sum of squares. Places are promised only as far as they will be free
in all but few cases. So queues stay short where decode is short, too.

The forecast is read with every request and updated with every event, and both should cost
microseconds with a thousand instances. So time is divided into buckets, and each bucket has, per
instance, the number of requests that will be decoding in it:

                     row 0  row 1  row 2                  a lookup reads the lines of its span
      bucket  now      3      0      5
              now+1    3      1      5    <- a request   a request adds one to a part of one column:
              now+2    2      1      4    <- on row 1       256 numbers
              now+3    2      0      4

and likewise their tokens of context, and the tokens of KV that are reserved for them.

The alternative, to store only changes and sum them at a lookup, makes the cost of a lookup grow
with the number of buckets. The buckets are a ring buffer; a request beyond its end is added when
time reaches it.

The price is resolution: times are rounded to buckets, and a request counts in each bucket that it
touches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..cost.latency_model import decode_step_s
from ..errors import InvalidRequest
from .promised_tbt import PromisedTbt

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..state.instance_table import Cluster

    Floats = NDArray[np.float64]
    Counts = NDArray[np.int64]

# A quarter of a second is less than the error of a TTFT prediction, and 256 buckets, 64 s, are
# twice the longest published TTFT objective (30 s). 24 bytes per bucket and row: 6 MB for a
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


# By so many standard deviations fewer are counted on to be gone: lengths of answers have longer
# tails than a normal distribution, of which two would be 97.7%.
DEVIATIONS = 3.0


class Span(NamedTuple):
    """The time from a request's turn to prefill until it has decoded, in seconds of the clock."""

    begin_s: float
    end_s: float


class ForecastLoad(NamedTuple):
    """The load of some rows [n]: requests in the batch, tokens of their contexts, and tokens of KV
    that are reserved."""

    batch: Counts
    context_tokens: Counts
    kv_used_tokens: Counts


@dataclass(slots=True)
class _Stay:
    """A request at a decode instance, in buckets [first, stop). `amounts`: those of `Amount`."""

    row: int
    amounts: Counts
    decode_s: float
    first: int
    stop: int
    tbt_s: float
    running: bool = False


class Amount(IntEnum):
    """What is counted of a request: itself, tokens of its context, tokens of KV reserved for it."""

    BATCH = 0
    CONTEXT = 1
    KV = 2


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
        self.promised = PromisedTbt()
        self._head = 0  # the current bucket; the ring has [head, head + buckets)
        self._stays: dict[str, _Stay] = {}
        # Stays by their stop bucket; and by their first bucket if that is beyond the ring.
        self._stops: dict[int, dict[str, _Stay]] = {}
        self._firsts: dict[int, dict[str, _Stay]] = {}
        self._ring: Counts = np.zeros((buckets, len(Amount), _ROWS_MIN), np.int64)
        # Of all requests, whenever they run; and of those known to decode now: an instance's own
        # report should have the same count.
        self._all: Counts = np.zeros((len(Amount), _ROWS_MIN), np.int64)
        self._running: Counts = np.zeros((len(Amount), _ROWS_MIN), np.int64)
        self._squares: Counts = np.zeros((len(Amount), _ROWS_MIN), np.int64)  # of all, summed

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
        kv_tokens: int = 0,
        tbt_s: float = math.inf,
    ) -> None:
        """Add a request whose prefill should end at `starts_at`, and which will then decode on
        `row` for `decode_s`. `context_tokens`: prompt and half of the answer, the mean over that
        time; `kv_tokens`: what is reserved there for it, in `Cluster.kv_used_tokens`; `tbt_s`: what
        was promised to it, infinite for nothing. Replaces the request's earlier entry. Raises
        InvalidRequest for a negative row or `decode_s`, and for a `starts_at` that is not
        finite."""
        if not (row >= 0 and math.isfinite(starts_at) and decode_s >= 0):
            raise InvalidRequest(
                f"request {request_id!r} on row {row} from {starts_at} for {decode_s} s: "
                "give a row of the cluster and times that are numbers"
            )
        self.end(request_id, now)
        self._need(row)
        self.promised.add(row, tbt_s)
        decode_s = min(decode_s, DECODE_S_MAX)
        first, stop = self._buckets_of(max(starts_at, now), decode_s)
        amounts = np.array((1, context_tokens, kv_tokens))
        self._put(request_id, _Stay(row, amounts, decode_s, first, stop, tbt_s))

    def start(self, request_id: str, now: float, decode_s: float | None = None) -> None:
        """Record that a request's prefill is done and it decodes from `now` on, for the time given
        to `promise` or for `decode_s`. No effect if the request is unknown or has started."""
        self.advance(now)
        stay = self._stays.get(request_id)
        if stay is None or stay.running:
            return
        self._leave(request_id, stay)
        if decode_s is not None:
            stay.decode_s = min(decode_s, DECODE_S_MAX)
        stay.first, stay.stop = self._buckets_of(now, stay.decode_s)
        stay.running = True
        self._running[:, stay.row] += stay.amounts
        self._enter(request_id, stay)

    def move(self, request_id: str, row: int, now: float) -> None:
        """Let a request go on at another row. No effect if it is unknown."""
        self.advance(now)
        stay = self._stays.get(request_id)
        if stay is None:
            return
        self._need(row)
        self._forget(request_id)
        stay.row = row
        self.promised.add(row, stay.tbt_s)
        if stay.running:
            self._running[:, row] += stay.amounts
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
        batch, context, _ = self._ring[self._slot(time_s)].take(rows, axis=1)
        return batch, context

    def change(self, rows: Counts, span: Span, now: float) -> ForecastLoad:
        """By how much the load of each of `rows` [n] will at most be more (or, below 0, less)
        during `span` than what it is now.

        To be added to the load that the instances report: it includes requests from elsewhere,
        which the forecast does not have.
        """
        self.advance(now)
        rows = self._known(rows)
        parts = [self._ring[part].max(axis=0) for part in self._parts(*self._slots(span))]
        highest = parts[0] if len(parts) == 1 else np.maximum(*parts)
        return self._change(rows, highest.take(rows, axis=1))

    def change_of(self, row: int, span: Span, now: float) -> tuple[int, int, int]:
        """`change` of one row, in plain numbers: for one, arrays would take four times as long."""
        self.advance(now)
        self._need(row)
        parts = [
            self._ring[part, :, row].max(axis=0).tolist()
            for part in self._parts(*self._slots(span))
        ]
        highest = parts[0] if len(parts) == 1 else [max(pair) for pair in zip(*parts, strict=True)]
        running, every = self._running[:, row].tolist(), self._all[:, row].tolist()
        squares = self._squares[:, row].tolist()
        left = []
        for at, runs in enumerate(running):
            promised = every[at] - runs
            gone = max(promised - (highest[at] - runs), 0)
            share = gone / max(every[at], 1)
            unsure = DEVIATIONS * math.sqrt(share * (1.0 - share) * squares[at])
            left.append(promised - round(max(gone - unsure, 0.0)))
        batch, context, kv = left
        return batch, context, kv - (every[Amount.KV] - running[Amount.KV])

    def _change(self, rows: Counts, highest: Counts) -> ForecastLoad:
        """The change from now to the `highest` [amounts, n] of a span."""
        running = self._running.take(rows, axis=1)
        promised = self._all.take(rows, axis=1) - running
        gone = np.maximum(promised - (highest - running), 0)
        every = np.maximum(running + promised, 1)
        share = gone / every
        unsure = DEVIATIONS * np.sqrt(share * (1.0 - share) * self._squares.take(rows, axis=1))
        surely = np.rint(np.maximum(gone - unsure, 0.0)).astype(np.int64)
        batch, context, kv = promised - surely
        # What is reserved for the promised is in the column already.
        return ForecastLoad(batch, context, kv - promised[Amount.KV])

    def course(self, row: int, now: float) -> tuple[Floats, Counts, Counts]:
        """`change` of one row in all buckets: (seconds from now, batch, context) [buckets]."""
        self.advance(now)
        self._need(row)
        order = (self._head + np.arange(self.buckets)) % self.buckets
        from_now_s = (self._head + np.arange(self.buckets)) * self.bucket_s - now
        batch, context, _ = (self._ring[order, :, row] - self._running[:, row]).T
        return np.maximum(from_now_s, 0.0), batch, context

    def check(self) -> None:
        """Raises AssertionError unless every number is the sum over the stays. For tests."""
        ring, every = np.zeros_like(self._ring), np.zeros_like(self._all)
        squares = np.zeros_like(self._squares)
        running = np.zeros_like(self._running)
        for stay in self._stays.values():
            assert stay.stop > self._head, f"{stay} has ended and is still there"
            for bucket in range(max(stay.first, self._head), min(stay.stop, self._end)):
                ring[bucket % self.buckets, :, stay.row] += stay.amounts
            every[:, stay.row] += stay.amounts
            squares[:, stay.row] += stay.amounts**2
            running[:, stay.row] += stay.running * stay.amounts
        assert np.array_equal(ring, self._ring)
        assert np.array_equal(every, self._all)
        assert np.array_equal(squares, self._squares)
        assert np.array_equal(running, self._running)
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
        self._ring[slot] = self._ring[last]
        for stay in self._firsts.pop(new, {}).values():
            self._ring[slot, :, stay.row] += stay.amounts
        for stay in self._stops.get(new, {}).values():
            self._ring[slot, :, stay.row] -= stay.amounts
        self._head += 1
        for request_id, stay in self._stops.pop(self._head, {}).items():
            self._prolong(stay)
            self._stops.setdefault(stay.stop, {})[request_id] = stay
            self._add(stay, self._head, stay.stop, 1)

    def _begin_anew(self, head: int) -> None:
        """Rebuild the ring after a time longer than the ring has passed."""
        stays = self._stays
        self._head, self._stays, self._stops, self._firsts = head, {}, {}, {}
        self._ring[:] = 0
        self._all[:] = 0
        self._squares[:] = 0
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
        self._all[:, stay.row] += stay.amounts
        self._squares[:, stay.row] += stay.amounts**2
        self._enter(request_id, stay)

    def _enter(self, request_id: str, stay: _Stay) -> None:
        """Put a stay into the ring."""
        self._stops.setdefault(stay.stop, {})[request_id] = stay
        if stay.first >= self._end:
            self._firsts.setdefault(stay.first, {})[request_id] = stay
        self._add(stay, stay.first, stay.stop, 1)

    def _take(self, request_id: str) -> _Stay:
        stay = self._stays.pop(request_id)
        self._all[:, stay.row] -= stay.amounts
        self._squares[:, stay.row] -= stay.amounts**2
        self._leave(request_id, stay)
        return stay

    def _leave(self, request_id: str, stay: _Stay) -> None:
        """Take a stay out of the ring."""
        for place, bucket in ((self._stops, stay.stop), (self._firsts, stay.first)):
            names = place.get(bucket)
            if names is not None and names.pop(request_id, None) is not None and not names:
                del place[bucket]
        self._add(stay, stay.first, stay.stop, -1)

    def _forget(self, request_id: str) -> None:
        stay = self._take(request_id)
        self.promised.remove(stay.row, stay.tbt_s)
        if stay.running:
            self._running[:, stay.row] -= stay.amounts

    def _add(self, stay: _Stay, first: int, stop: int, count: int) -> None:
        for part in self._parts(max(first, self._head), min(stop, self._end)):
            self._ring[part, :, stay.row] += count * stay.amounts

    def _slots(self, span: Span) -> tuple[int, int]:
        """The buckets [first, stop) of a span, of those in the ring: one at least."""
        last = self._end - 1
        first = math.floor(min(span.begin_s / self.bucket_s, last))
        stop = math.ceil(min(span.end_s / self.bucket_s, self._end))
        first = min(max(first, self._head), last)
        return first, max(stop, first + 1)

    def _parts(self, first: int, stop: int) -> tuple[slice, ...]:
        """The slices of the ring for buckets [first, stop): one, or two around its end."""
        if first >= stop:
            return ()
        begin, length = first % self.buckets, stop - first
        if begin + length <= self.buckets:
            return (slice(begin, begin + length),)
        return slice(begin, None), slice(0, begin + length - self.buckets)

    def _need(self, row: int) -> None:
        have = self._running.shape[1]
        if row < have:
            return
        more = max(row + 1, 2 * have) - have
        self._ring = np.pad(self._ring, ((0, 0), (0, 0), (0, more)))
        self._all = np.pad(self._all, ((0, 0), (0, more)))
        self._squares = np.pad(self._squares, ((0, 0), (0, more)))
        self._running = np.pad(self._running, ((0, 0), (0, more)))

    def _known(self, rows: Counts) -> Counts:
        if len(rows):
            self._need(int(rows.max()))
        return rows


def expected_load(
    horizon: Horizon, cluster: Cluster, rows: Counts, span: Span, now: float
) -> ForecastLoad:
    """The highest load of each of `rows` [n] during `span`: the current load in the cluster's
    columns plus the horizon's `change`."""
    return _added(horizon.change(rows, span, now), cluster, rows)


def expected_load_of(
    horizon: Horizon, cluster: Cluster, row: int, span: Span, now: float
) -> tuple[int, int, int]:
    """`expected_load` of one row, as plain numbers."""
    batch, context, kv_used = horizon.change_of(row, span, now)
    return (
        max(batch + cluster.batch.item(row), 0),
        max(context + cluster.context_tokens.item(row), 0),
        max(kv_used + cluster.kv_used_tokens.item(row), 0),
    )


def _added(change: ForecastLoad, cluster: Cluster, rows: Counts) -> ForecastLoad:
    columns = (cluster.batch, cluster.context_tokens, cluster.kv_used_tokens)
    loads = (
        np.maximum(more + column.take(rows), 0)
        for more, column in zip(change, columns, strict=True)
    )
    return ForecastLoad(*loads)


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
