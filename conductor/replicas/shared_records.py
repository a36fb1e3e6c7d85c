"""Which records of instances to write, and which of other conductors' changes to take in. Pure.

A conductor that changes an instance writes its record, on condition that the record is still the
one that this conductor has read last; else it reads again, and merges: of each field, the change of
either side stands. So no change is lost, and no clock decides. An instance that was removed keeps a
record that says so; the record of one that has none, as after Redis was emptied, is written again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from ..state.instance_table import INSTANCES_MAX
from .states import InstanceRecord, pack, unpack

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..state.instance_table import Cluster

# How long the record of a removed instance is kept: a conductor that was cut off for less time does
# not bring the instance back.
REMOVED_S = 600.0
# A longer schema is not shared: instances tell it to each conductor.
SCHEMA_CHARACTERS_MAX = 16 * 1024

Flips = dict[str, tuple[str, str]]


class Change(NamedTuple):
    """Replace an instance's record, b"" for none, if it is still the one `read`."""

    instance: str
    read: bytes
    new: bytes


class RecordNews(NamedTuple):
    """A record that another conductor has changed: the one known before, if any, and the one of
    now."""

    before: InstanceRecord | None
    theirs: InstanceRecord


def merged(news: RecordNews, mine: InstanceRecord) -> InstanceRecord:
    """The record that has the changes of both sides since `news.before`; where both have changed a
    field, `news.theirs`, which the other conductors know already."""
    before, theirs = news
    if before is None or before.spec is None:
        return theirs
    fields = ("spec", "role", "draining", "flip", "schema")
    kept = [name for name in fields if getattr(theirs, name) == getattr(before, name)]
    return replace(theirs, **{name: getattr(mine, name) for name in kept})


class SharedRecords:
    """The records as they were read last, and this conductor's own changes. `flips()` has the
    instances in a role flip: (new role, name of the conductor that flips it)."""

    def __init__(self, cluster: Cluster, flips: Callable[[], Flips]) -> None:
        self._cluster, self._flips = cluster, flips
        self._read: dict[str, bytes] = {}
        # Also records that Redis has lost since: what is merged are changes of these.
        self._known: dict[str, bytes] = {}
        self._sent: dict[str, bytes] = {}  # by the last exchange, or one that failed
        self._removed: dict[str, None] = {}  # here, and not yet in the records
        self._gone_at: dict[str, float] = {}  # Unix times of the records of removed instances
        self._schemas: dict[str, str] = {}  # by model
        self._written: tuple[int, Flips] | None = None  # the last state that is fully written

    def removed(self, instance: str) -> None:
        """This conductor has removed an instance, for all."""
        self._removed[instance] = None
        if len(self._removed) > INSTANCES_MAX:
            del self._removed[next(iter(self._removed))]

    def schema(self, model: str, canonical: str) -> None:
        """Record the schema of a model of which there are instances."""
        if len(canonical) <= SCHEMA_CHARACTERS_MAX and self._schemas.get(model) != canonical:
            self._schemas[model], self._written = canonical, None

    def mine(self, instance: str, flips: Flips | None = None) -> InstanceRecord:
        """The record of an instance as it is here."""
        cluster, row = self._cluster, self._cluster.row(instance)
        spec, role = cluster.spec(instance), cluster.role(row).value
        draining = bool(cluster.draining[row])  # missing heartbeats here are not shared
        flip = (self._flips() if flips is None else flips).get(instance, ("", ""))
        return InstanceRecord(
            instance, spec, role, draining, flip, self._schemas.get(spec.model, "")
        )

    def changes(self, unix_s: float) -> list[Change]:
        """The records to write. Some milliseconds for a thousand instances, if anything has changed
        since the last call; what the records do not say yet is returned again."""
        cluster, read, flips = self._cluster, self._read, self._flips()
        numbered = cluster.model_number
        self._schemas = {m: text for m, text in self._schemas.items() if numbered(m) is not None}
        if (cluster.version, flips) == self._written:
            return []
        wanted = {name: pack(self.mine(name, flips)) for name in cluster.names}
        for name in self._removed:
            if name in read:
                wanted.setdefault(name, pack(InstanceRecord(name, None, removed_at=unix_s)))
        for name, at in self._gone_at.items():
            if unix_s > at + REMOVED_S:
                wanted.setdefault(name, b"")
        found = [Change(name, read.get(name, b""), new) for name, new in wanted.items()]
        changes = [one for one in found if one.read != one.new]
        self._sent |= {one.instance: one.new for one in changes}
        self._written = None if changes else (cluster.version, flips)
        return changes

    def merge(self, found: dict[str, bytes]) -> list[RecordNews]:
        """Take all records as they are now; returns what others have changed, removals first."""
        known, cluster = self._known, self._cluster
        self._read, self._written = found, None
        self._known = {name: raw for name, raw in known.items() if name in cluster} | found
        self._gone_at = {n: at for n, at in self._gone_at.items() if found.get(n) == known.get(n)}
        news = []
        for name, raw in found.items():
            theirs = unpack(raw, InstanceRecord) if raw != known.get(name) else None
            if theirs is None or name != theirs.id:
                continue
            if theirs.spec is None:
                self._gone_at[name] = theirs.removed_at
            elif name in self._removed and name not in cluster:
                continue  # a removal wins: an instance that is still there registers again
            if raw == self._sent.get(name):
                continue  # it may have changed here since
            if theirs.spec is not None and theirs.schema:
                self.schema(theirs.spec.model, theirs.schema)
            news.append(RecordNews(unpack(known.get(name, b""), InstanceRecord), theirs))
        self._sent = {}
        self._removed = {n: None for n in self._removed if n in found and n not in self._gone_at}
        return sorted(news, key=lambda one: one.theirs.spec is not None)
