"""The log of scheduling decisions, by request name, with what became of each request. Pure.

A busy fleet fills the log of the latest decisions in seconds. What somebody will ask about is kept
for longer: rejections by their reason, requests that missed an objective, whose prediction was far
off or that were lost, and those that were asked about. Each of these kinds has room for `KEPT_MAX`,
and once `BURST` of them came in a row it takes one in `KEPT_S` / `KEPT_MAX` seconds: so an overload
of hours is kept as a sample of all of its hours, and a few are kept all.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import count, islice
from typing import TYPE_CHECKING

from ..records import Decision, Rejection
from ..state.request_ids import ById
from .request_outcome import notable, outcome_of

if TYPE_CHECKING:
    from .inflight_requests import InflightRequest, Ledger
    from .request_outcome import RequestOutcome

Outcome = Decision | Rejection

# Of each kind, some 3 KB each; there are about a dozen kinds: 20 MB.
KEPT_MAX = 500
# That many last for an hour, however many there are.
KEPT_S = 3600.0
BURST = 100
# Who was asked about is asked about again.
ASKED = "asked"


@dataclass(slots=True)
class LoggedDecision:
    """A decision, or a rejection; `became` is None until the request has ended, and for good if it
    was rejected."""

    outcome: Outcome
    number: int  # of two entries for one request at the same time, the later one's is higher
    became: RequestOutcome | None = None


@dataclass(slots=True)
class _Kept:
    """The entries of one kind, and a token bucket for further ones."""

    entries: OrderedDict[str, LoggedDecision] = field(default_factory=OrderedDict)
    room: float = BURST
    filled_at: float = 0.0

    def takes(self, now: float) -> bool:
        self.room = min(BURST, self.room + max(0.0, now - self.filled_at) * KEPT_MAX / KEPT_S)
        self.filled_at = max(now, self.filled_at)
        if self.room < 1.0:
            return False
        self.room -= 1.0
        return True


class DecisionLog:
    """The latest outcome of each request, and notable ones for longer. When a part is full, its
    oldest entry is evicted."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._latest: OrderedDict[str, LoggedDecision] = OrderedDict()
        self._kept: dict[str, _Kept] = {}
        self._by_id = ById()
        self._numbers = count(1)

    def put(self, outcome: Outcome, most: int) -> None:
        """Add an outcome, replacing the request's earlier one; keep at most `most` in all, beside
        notable ones."""
        name, entry = outcome.request_id, LoggedDecision(outcome, next(self._numbers))
        self._latest.pop(name, None)
        self._latest[name] = entry
        self._by_id.add(name)
        while len(self._latest) > most:
            self._left(self._latest.popitem(last=False)[0])
        if isinstance(outcome, Rejection):
            self._keep(outcome.reason, entry, outcome.decided_at)

    def ended(self, flight: InflightRequest, end: str, now: float) -> None:
        """Record the end of a request: what was observed of it, which may be notable."""
        decision, name = flight.decision, flight.request.id
        became = outcome_of(flight, end, now)
        known = (self._latest.get(name), *(one.entries.get(name) for one in self._kept.values()))
        # Of an id that was used again, the later decision is in the log.
        entry = next((e for e in known if e is not None and e.outcome is decision), None)
        if entry is None:
            entry = LoggedDecision(decision, next(self._numbers))
        entry.became = became
        if why := notable(flight, became):
            self._keep(why, entry, now)

    def get(self, name: str) -> Outcome | None:
        """The latest outcome of the request with this name; if there is none, `name` is taken as an
        id and the latest request of any tenant with this id is returned."""
        entry = self._find(name) or self._find(self._by_id.latest(name))
        return None if entry is None else entry.outcome

    def asked(self, name: str, now: float) -> Outcome | None:
        """As `get`, for somebody who may ask again: the entry is kept for longer."""
        entry = self._find(name) or self._find(self._by_id.latest(name))
        if entry is None:
            return None
        kept = self._kept.get(ASKED)
        if kept is None or kept.entries.get(entry.outcome.request_id) is not entry:
            self._keep(ASKED, entry, now)
        return entry.outcome

    def latest(self, limit: int) -> list[Outcome]:
        """At most `limit` outcomes, the latest first."""
        return [one.outcome for one in islice(reversed(self._latest.values()), limit)]

    def kept(self, kind: str, limit: int) -> list[Outcome]:
        """At most `limit` outcomes of a kind that is kept for longer, the latest first."""
        entries = self._kept[kind].entries if kind in self._kept else {}
        return [one.outcome for one in islice(reversed(entries.values()), limit)]

    def became(self, outcome: Outcome) -> RequestOutcome | None:
        """What was observed of the request of this entry, so far or at its end; None if it was
        rejected."""
        flight = self._ledger.get(outcome.request_id)
        if flight is not None and flight.decision is outcome:
            return outcome_of(flight)
        entry = self._find(outcome.request_id)
        return entry.became if entry is not None and entry.outcome is outcome else None

    def _find(self, name: str) -> LoggedDecision | None:
        if name in self._latest:  # it is never older than one that is kept
            return self._latest[name]
        found = (one.entries[name] for one in self._kept.values() if name in one.entries)
        return max(found, key=lambda e: (e.outcome.decided_at, e.number), default=None)

    def _keep(self, kind: str, entry: LoggedDecision, now: float) -> None:
        kept = self._kept.get(kind)
        if kept is None:
            kept = self._kept[kind] = _Kept(filled_at=now)
        if not kept.takes(now):
            return
        name = entry.outcome.request_id
        kept.entries.pop(name, None)
        kept.entries[name] = entry
        self._by_id.add(name)
        while len(kept.entries) > KEPT_MAX:
            self._left(kept.entries.popitem(last=False)[0])

    def _left(self, name: str) -> None:
        """An entry left a part of the log: nothing finds its id if no part has it."""
        if self._find(name) is None:
            self._by_id.discard(name)
