"""What instances report of their load, and what of it this conductor did not place. Pure.

A report is of the time when it was measured, and comes later: after a queue, a retry, a stopped
process. Since then requests have ended and others were placed. So it is compared with what this
conductor had there at that time,

    strangers = max(0, reported - own then - others' then)
    column    = own now + others' now + strangers

and a request that ended meanwhile is not taken for a stranger's. `Load.age_s` tells how old a
report is, by the instance's own clock: those of two machines differ. Without it, a report may be
`UNKNOWN_AGE_S` old, and what was there at any time since then is accounted for.

Strangers' work is done, too: the seconds of their prompts pass, and what they decode counts half
after `DECODE_HALF_LIFE_S`, unless it is reported again.
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from ..records import Load

    Counts = NDArray[np.int64]
    Floats = NDArray[np.float64]

# The columns that heartbeats report.
REPORTED = ("queued", "queued_tokens", "batch", "context_tokens", "kv_used_tokens")
QUEUED, QUEUED_TOKENS = 0, 1
_PLACE = {name: at for at, name in enumerate(REPORTED)}

# A report is on its way for so long at most, if it is not held up.
TRANSIT_S = 0.1
# A heartbeat is sent every second, and one that is held up by more is followed by the next one.
UNKNOWN_AGE_S = 1.0
# Longer than a heartbeat that was held up is worth: an instance silent for so long is lost.
AGE_S_MAX = 10.0
# An answer of some hundred tokens.
DECODE_HALF_LIFE_S = 20.0


def values_of(load: Load) -> tuple[int | None, ...]:
    """A report's values, in the order of `REPORTED`; None for unknown ones."""
    return (
        load.queued,
        load.queued_prefill_tokens,
        load.running,
        load.context_tokens,
        load.kv_used_tokens,
    )


class LoadReports:
    """The load of strangers at all instances, by row. Not thread-safe."""

    def __init__(self, rows: int) -> None:
        self._strangers: Counts = np.zeros((len(REPORTED), rows), np.int64)
        self._measured_at: Floats = np.full((len(REPORTED), rows), -np.inf)
        self._rows: set[int] = set()  # where there are any
        # By row, what was promised and released lately: time, column, amount, time, ... A tuple of
        # each would be one more object for the garbage collector, twenty for a request.
        self._promised: defaultdict[int, deque[float]] = defaultdict(deque)

    def grow(self, rows: int) -> None:
        """Have room for so many rows."""
        more = ((0, 0), (0, rows - self._strangers.shape[1]))
        self._strangers = np.pad(self._strangers, more)
        self._measured_at = np.pad(self._measured_at, more, constant_values=-np.inf)

    def promised(self, row: int, amounts: Mapping[str, int], now: float) -> None:
        """This conductor has promised (or, if negative, released) so much at an instance, by
        column."""
        recent = self._promised[row]
        for name, amount in amounts.items():
            recent += now, _PLACE[name], amount
        while recent[0] < now - AGE_S_MAX:
            for _ in range(3):
                recent.popleft()

    def heard(
        self, row: int, load: Load, own: list[int], others: Counts | None, now: float
    ) -> bool:
        """Take a report. `own` is what this conductor has there now, `others` what other conductors
        had there at that time, both in the order of `REPORTED`. A report that is older than the
        one before is ignored. Returns whether there are strangers there, or were."""
        age_s = UNKNOWN_AGE_S if load.age_s is None else load.age_s
        measured_at = now - (load.age_s or 0.0)
        until = now if load.age_s is None else measured_at
        known = self._most_own(row, own, now - age_s - TRANSIT_S, until)
        if others is not None:
            known = [own + int(other) for own, other in zip(known, others, strict=True)]
        were, some = row in self._rows, False
        for at, value in enumerate(values_of(load)):
            if value is None or measured_at < self._measured_at.item(at, row):
                continue
            self._measured_at[at, row] = measured_at
            # No prompt of a stranger's: the tokens of the others are only counted differently.
            none = at == QUEUED_TOKENS and load.queued is not None and load.queued <= known[QUEUED]
            strangers = 0 if none else max(value - known[at], 0)
            if strangers or were:
                self._strangers[at, row] = strangers
                some = some or strangers > 0
        if some or were:
            self._rows.add(row)
            if not self._strangers[:, row].any():
                self._rows.discard(row)
        return some or were

    def strangers(self, c1: Floats, now: float, part: slice) -> tuple[Counts, Floats]:
        """What strangers have at some rows now, [columns, rows], and the seconds of prefill in it.
        `c1`: seconds per token, of these rows."""
        counts = self._strangers[:, part]
        if not self._rows:
            return counts, np.zeros(counts.shape[1])
        age_s = np.maximum(now - self._measured_at[:, part], 0.0)
        seconds = c1 * counts[QUEUED_TOKENS]
        left_s = np.maximum(seconds - age_s[QUEUED_TOKENS], 0.0)
        share = np.where(counts > 0, 0.5 ** (age_s / DECODE_HALF_LIFE_S), 0.0)
        prefill = np.divide(left_s, seconds, out=np.zeros_like(left_s), where=seconds > 0.0)
        share[QUEUED_TOKENS] = prefill
        share[QUEUED] = np.where(seconds > 0.0, prefill, share[QUEUED])
        return np.rint(counts * share).astype(np.int64), left_s

    def forget(self, row: int) -> None:
        """Clear a row whose instance is removed, for the next instance in it."""
        self._strangers[:, row] = 0
        self._measured_at[:, row] = -np.inf
        self._promised.pop(row, None)
        self._rows.discard(row)

    def _most_own(self, row: int, own: list[int], since: float, until: float) -> list[int]:
        """The most that this conductor had in each column at any time from `since` to `until`; it
        has `own` now."""
        then, most = list(own), list(own)
        seen = False  # whether `then` is of a time before `until`
        backwards = reversed(self._promised.get(row, ()))
        for amount, column, at_s in zip(backwards, backwards, backwards, strict=True):
            if at_s <= until and not seen:
                most, seen = list(then), True
            if at_s <= since:
                break
            at = int(column)
            then[at] -= int(amount)
            if seen:
                most[at] = max(most[at], then[at])
        return most if seen else then
