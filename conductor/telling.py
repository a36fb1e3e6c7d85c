"""What a conductor tells others of itself: its promises and its instances. Pure. Requests:
`flights.py`.

Nothing has to say when an instance or a promise changes: what is, is compared with what was told
last.
"""

from __future__ import annotations

from math import inf, nextafter
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from .bulletins import SECONDS_MAX, Instance, Row
from .sharing import COUNTS, REPORTED

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from .cluster import Cluster
    from .ledger import Ledger
    from .queues import Queues
    from .records import InstanceSpec, Role

    Counts = NDArray[np.int64]

# Longer than any queue: what is asked of it is everything that waits in it.
_FOREVER_S = 1e9
# Ids of removed instances that are remembered, so that nobody brings them back.
_REMOVED_MAX = 16_384


class OwnRows:
    """Our promises, by instance, as far as they are other than was told."""

    def __init__(self, cluster: Cluster, ledger: Ledger, queues: Queues) -> None:
        self._cluster = cluster
        self._ledger = ledger
        self._queues = queues
        self._told: Counts = np.zeros((COUNTS, 0), np.int64)
        self._names: list[str] = []
        self._version = -1

    def changed(self, now: float, lowest: str, *, whole: bool) -> list[Row]:
        """Rows to be told; with `whole`, all that are not zero. `lowest` is the lowest class of
        priority."""
        rows = self._left()
        counts = self._counts()
        told = np.zeros_like(counts) if whole else self._told
        changed = np.flatnonzero((counts != told).any(axis=0))
        self._told = counts
        if len(changed):
            # What somebody of the lowest class would wait for, whose own prefill never ends.
            waits_s = self._queues.wait_s(changed, lowest, _FOREVER_S, now)
            seconds = np.minimum(waits_s, SECONDS_MAX).tolist()
            table = zip(changed.tolist(), counts[:, changed].T.tolist(), seconds, strict=True)
            rows += [_row(self._cluster.name(row), *numbers) for row, *numbers in table]
        return rows

    def _left(self) -> list[Row]:
        """Rows are given to others: zeros for who has left."""
        cluster = self._cluster
        if cluster.version == self._version:
            return []
        self._version = cluster.version
        more = len(cluster.used) - self._told.shape[1]
        self._told = np.pad(self._told, ((0, 0), (0, more)))
        names = [spec.id if spec is not None else "" for spec in cluster.specs]
        gone = []
        for row, before in enumerate(self._names):
            if before != names[row] and self._told[:, row].any():
                gone.append(Row(before))
                self._told[:, row] = 0
        self._names = names
        return gone

    def _counts(self) -> Counts:
        """[COUNTS, rows] in the order of `Row`. A loop over the flights: 1 ms for 10,000."""
        cluster = self._cluster
        counts: Counts = np.zeros((COUNTS, len(cluster.used)), np.int64)
        for at, name in enumerate(REPORTED):
            counts[at] = getattr(cluster, f"own_{name}")
        coming: dict[int, list[int]] = {}
        for flight in self._ledger:
            if flight.phase:
                continue
            total = sum(flight.shares.values())
            for row, tokens in flight.shares.items():
                found = coming.setdefault(row, [0, 0])
                found[0] += row == flight.decode_row
                found[1] += flight.request.prompt_tokens * tokens // total if total else 0
        for row, found in coming.items():
            counts[len(REPORTED) :, row] = found
        return np.maximum(counts, 0)


def _row(name: str, counts: list[int], queued_s: float) -> Row:
    queued, queued_tokens, batch, context, kv_used, coming, coming_tokens = counts
    return Row(
        name, queued, queued_tokens, batch, context, kv_used, coming, coming_tokens, queued_s
    )


class _State(NamedTuple):
    """What conductors agree on about an instance."""

    spec: InstanceSpec
    role: Role
    draining: bool
    flip: tuple[str, str] = ("", "")


def _rank(word: Instance) -> tuple[bool, bytes]:
    return word.draining, msgspec.msgpack.encode(word, order="deterministic")


class Registry:
    """When each instance changed last, by Unix time: of two different words, the later is right.

    A change here is later than all that is known of the instance, whatever the clocks of those say
    who told us. `flips()` has the instances that are given another role: (role, by whom).
    """

    def __init__(
        self,
        cluster: Cluster,
        unix_offset_s: float,
        flips: Callable[[], dict[str, tuple[str, str]]] = dict,
    ) -> None:
        self._cluster = cluster
        self._unix_offset_s = unix_offset_s
        self._flips_now = flips
        self._flips: dict[str, tuple[str, str]] = {}
        self._version = -1
        self._states: dict[str, _State] = {}
        self._changed_at: dict[str, float] = {}

    def changed(self, now: float) -> list[str]:
        """Instances that came, changed or left here since the last call."""
        cluster, flips = self._cluster, self._flips_now()
        if cluster.version == self._version and flips == self._flips:
            return []
        self._version, self._flips = cluster.version, flips
        changed = [name for name in self._states if name not in cluster]
        changed += [name for name in cluster.names if self._state(name) != self._states.get(name)]
        for name in changed:
            before = self._changed_at.get(name, -inf)
            self.settled(name, max(now + self._unix_offset_s, nextafter(before, inf)))
        return changed

    def changed_at(self, instance: str) -> float:
        """When it changed last; before all times if it is unknown."""
        return self._changed_at.get(instance, -inf)

    def is_news(self, word: Instance) -> bool | None:
        """Whether a word is right rather than what is known here; None if they say the same.

        Two may be of the same time: who has heard of a change by a clock ahead of its own dates
        what follows just after it, and so does another one meanwhile. Then a drain is right, else
        whatever, if it is the same to all.
        """
        known_at = self.changed_at(word.instance)
        if word.changed_at != known_at:
            return word.changed_at > known_at
        mine = self.word(word.instance)
        return None if word == mine else _rank(word) > _rank(mine)

    def settled(self, instance: str, changed_at: float) -> None:
        """It is now as it was said to be since then."""
        self._flips.pop(instance, None)  # what changed of others meanwhile is still to be found
        flip = self._flips_now().get(instance)
        if flip is not None:
            self._flips[instance] = flip
        self._changed_at.pop(instance, None)
        self._changed_at[instance] = changed_at
        if instance in self._cluster:
            self._states[instance] = self._state(instance)
        else:
            self._states.pop(instance, None)
        if len(self._changed_at) > len(self._cluster) + _REMOVED_MAX:
            del self._changed_at[next(n for n in self._changed_at if n not in self._cluster)]

    def word(self, instance: str) -> Instance:
        """What others should know of it."""
        changed_at = self._changed_at[instance]
        state = self._states.get(instance)
        if state is None:
            return Instance(instance, changed_at, None)
        role, by = state.flip
        return Instance(
            instance, changed_at, state.spec, state.role.value, state.draining, role, by
        )

    def _state(self, instance: str) -> _State:
        cluster, row = self._cluster, self._cluster.row(instance)
        draining = bool(cluster.draining[row])  # that it is silent here is our own affair
        flip = self._flips.get(instance, ("", ""))
        return _State(cluster.spec(instance), cluster.role(row), draining, flip)
