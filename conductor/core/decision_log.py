"""The log of recent scheduling decisions, by request name. Pure."""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice

from ..records import Decision, Rejection
from ..state.request_ids import ById

Outcome = Decision | Rejection


class DecisionLog:
    """The latest outcome of each request. When the log is full, the oldest outcome is evicted."""

    def __init__(self) -> None:
        self._outcomes: OrderedDict[str, Outcome] = OrderedDict()
        self._by_id = ById()

    def put(self, outcome: Outcome, most: int) -> None:
        """Add an outcome, replacing the request's earlier one; keep at most `most` in all."""
        name = outcome.request_id
        self._outcomes.pop(name, None)
        self._outcomes[name] = outcome
        self._by_id.add(name)
        while len(self._outcomes) > most:
            self._by_id.discard(self._outcomes.popitem(last=False)[0])

    def get(self, name: str) -> Outcome | None:
        """The outcome of the request with this name; if there is none, `name` is taken as an id and
        the latest request of any tenant with this id is returned."""
        return self._outcomes.get(name) or self._outcomes.get(self._by_id.latest(name))

    def latest(self, limit: int) -> list[Outcome]:
        """At most `limit` outcomes, the latest first."""
        return list(islice(reversed(self._outcomes.values()), limit))
