"""A conductor's own state for its peers: its load rows and its instances. Pure. Requests:
`request_records.py`.

Changes need no notification: the current state is compared with the state that was sent last.
"""

from __future__ import annotations

from math import inf, nextafter
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from .bulletins import SECONDS_MAX, Instance, LoadRow
from .remote_load import COUNTS, REPORTED

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from ..core.inflight_requests import Ledger
    from ..prefill.wait_estimate import Queues
    from ..records import InstanceSpec, Role
    from ..state.instance_table import Cluster

    Counts = NDArray[np.int64]

# A prefill longer than any queue, so that the wait behind the queue covers everything in it.
_FOREVER_S = 1e9
# Ids of removed instances that are remembered, so that a peer's old word does not restore them.
_REMOVED_MAX = 16_384


class OwnRows:
    """This conductor's load rows by instance, and which of them changed since they were sent."""

    def __init__(self, cluster: Cluster, ledger: Ledger, queues: Queues) -> None:
        self._cluster = cluster
        self._ledger = ledger
        self._queues = queues
        self._told: Counts = np.zeros((COUNTS, 0), np.int64)
        self._names: list[str] = []
        self._version = -1

    def changed(self, now: float, lowest: str, *, whole: bool) -> list[LoadRow]:
        """The rows to send: those that changed; with `whole`, all that are not zero. `lowest` is
        the lowest class of priority."""
        rows = self._left()
        counts = self._counts()
        told = np.zeros_like(counts) if whole else self._told
        changed = np.flatnonzero((counts != told).any(axis=0))
        self._told = counts
        if len(changed):
            # The wait of a request of the lowest class whose own prefill is longer than any queue.
            waits_s = self._queues.wait_s(changed, lowest, _FOREVER_S, now)
            seconds = np.minimum(waits_s, SECONDS_MAX).tolist()
            table = zip(changed.tolist(), counts[:, changed].T.tolist(), seconds, strict=True)
            rows += [_row(self._cluster.name(row), *numbers) for row, *numbers in table]
        return rows

    def _left(self) -> list[LoadRow]:
        """Zero rows for instances that have left: the cluster re-uses their rows for others."""
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
                gone.append(LoadRow(before))
                self._told[:, row] = 0
        self._names = names
        return gone

    def _counts(self) -> Counts:
        """[COUNTS, rows] in the order of `LoadRow`. A loop over the in-flight requests: 1 ms for
        10,000."""
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


def _row(name: str, counts: list[int], queued_s: float) -> LoadRow:
    queued, queued_tokens, batch, context, kv_used, coming, coming_tokens = counts
    return LoadRow(
        name, queued, queued_tokens, batch, context, kv_used, coming, coming_tokens, queued_s
    )


class _State(NamedTuple):
    """The part of an instance's state that conductors agree on."""

    spec: InstanceSpec
    role: Role
    draining: bool
    flip: tuple[str, str] = ("", "")


def _rank(word: Instance) -> tuple[bool, bytes]:
    return word.draining, msgspec.msgpack.encode(word, order="deterministic")


class Registry:
    """Versions of the instances' states by Unix time: of two different words, the later wins.

    A local change gets a time later than all known changes of the instance, whatever the clocks of
    the conductors that reported those. `flips()` has the instances in a role flip: (new role, name
    of the conductor that flips it).
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
        """Instances that joined, changed or left here since the last call."""
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
        """When an instance changed last; -inf if it is unknown."""
        return self._changed_at.get(instance, -inf)

    def is_news(self, word: Instance) -> bool | None:
        """Whether a word wins over the state known here; None if they are equal.

        Two words may have the same time: a conductor that learns of a change dated ahead of its own
        clock dates its next change just after it, and another conductor may do the same meanwhile.
        Then a draining state wins, else an arbitrary one that is the same for all conductors.
        """
        known_at = self.changed_at(word.instance)
        if word.changed_at != known_at:
            return word.changed_at > known_at
        mine = self.word(word.instance)
        return None if word == mine else _rank(word) > _rank(mine)

    def settled(self, instance: str, changed_at: float) -> None:
        """Record that the state here is the one of the time `changed_at`."""
        self._flips.pop(instance, None)  # only this one: `changed` still has to find the others
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
        """The word for an instance, for the other conductors."""
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
        draining = bool(cluster.draining[row])  # missing heartbeats here are not shared
        flip = self._flips.get(instance, ("", ""))
        return _State(cluster.spec(instance), cluster.role(row), draining, flip)
