"""The directory in Redis or Valkey: one server, a master with sentinels, or a cluster.

Everything here is soft: `layout.py` says what lies where, the nodes publish again what is lost. So
nothing waits for replicas, and a call that does not come through is not repeated here.
"""

from __future__ import annotations

import re
import threading
import time
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from ..errors import DirectoryUnavailable
from . import layout
from .base import (
    LOCATE_KEYS_MAX,
    LOCATION_TTL_S,
    MEMBERSHIP_AGE_S,
    NODES_MAX,
    REGISTRATION_TTL_S,
    Directory,
    DirectoryEvent,
    NodeRecord,
    check_batch,
    check_keys,
    check_number,
)
from .fleet import open_fleet
from .layout import CLUSTER_BUCKETS, MEMBERS, Holders, Layout, Script

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .server import Word
    from .url import RedisOptions

# While the shard with the membership is away, the others are read with what was known of it.
STALE_MEMBERSHIP_S = 60.0

# Keys of one MGET: 0.3 ms of the server's time, so that a very long prompt does not hold up others.
_MGET_KEYS_MAX = 1024

_POSITION = re.compile(r"[0-9]{1,20}(-[0-9]{1,20})?")


class _Command(NamedTuple):
    """Words for the server of a bucket; of a script, what follows its name."""

    bucket: int
    words: Sequence[Word]
    script: Script | None = None

    def spelled(self, *, whole: bool) -> Sequence[Word]:
        if self.script is None:
            return self.words
        if whole:
            return (b"EVAL", self.script.text, *self.words)
        return (b"EVALSHA", self.script.sha, *self.words)


@dataclass(slots=True)
class _Membership:
    """What was last read of it, and when. `holders` decodes locations by it."""

    nodes: dict[int, NodeRecord]
    holders: Holders
    read_at: float


class RedisDirectory(Directory):
    """See `Directory`. The times are parameters for tests: all users of a pool must agree on them.

    Connects at the first call. Where a cluster has lost one shard, `locate` finds nothing of it and
    goes on; `publish` raises until all shards are back.
    """

    def __init__(
        self,
        options: RedisOptions,
        *,
        pool: str = "default",
        registration_ttl_s: float = REGISTRATION_TTL_S,
        location_ttl_s: float = LOCATION_TTL_S,
    ) -> None:
        self._options = options
        self._layout = Layout(pool, CLUSTER_BUCKETS if options.kind == "cluster" else 1)
        self._fleet = open_fleet(options, self._layout.tags)
        self._registration_ttl_ms = round(registration_ttl_s * 1000)
        self._location_ttl_ms = round(location_ttl_s * 1000)
        self._closed = False
        self._lock = threading.Lock()  # protects all below
        self._membership: _Membership | None = None
        self._membership_asked_at = 0.0
        self._counters = {"locates": 0, "located_keys": 0, "published_keys": 0, "failures": 0}

    # -- the node's side -------------------------------------------------------------------------

    def register(self, record: NodeRecord) -> int:
        """See `Directory.register`."""
        names = (2, self._layout.nodes, self._layout.number)
        words = (*names, self._registration_ttl_ms, layout.encode_record(record))
        (number,) = self._run([_Command(MEMBERS, words, layout.REGISTER)])
        if not isinstance(number, int):
            raise self._refused(number)
        if not number:
            raise DirectoryUnavailable(f"{NODES_MAX} nodes are registered; withdraw some first")
        self._forget_membership()
        return number

    def heartbeat(self, record: NodeRecord) -> bool:
        """See `Directory.heartbeat`."""
        check_number(record.number)
        words = (
            *(1, self._layout.nodes),
            *(record.number, self._registration_ttl_ms, layout.encode_record(record)),
        )
        (known,) = self._run([_Command(MEMBERS, words, layout.HEARTBEAT)])
        if not isinstance(known, int):
            raise self._refused(known)
        return bool(known)

    def withdraw(self, number: int) -> None:
        """See `Directory.withdraw`."""
        check_number(number)
        (reply,) = self._run([_Command(MEMBERS, ("HDEL", self._layout.nodes, number))])
        if isinstance(reply, Exception):
            raise self._refused(reply)
        self._forget_membership()

    def publish(
        self, number: int, added: Sequence[bytes], removed: Sequence[bytes], first_seq: int
    ) -> None:
        """See `Directory.publish`."""
        check_batch(number, added, removed, first_seq)
        changes = sorted(
            [(self._layout.bucket(key), 0, key) for key in added]
            + [(self._layout.bucket(key), 1, key) for key in removed]
        )
        commands = []
        for bucket, of_bucket in groupby(changes, key=lambda change: change[0]):
            listed = list(of_bucket)
            for begin in range(0, len(listed), layout.SCRIPT_KEYS_MAX):
                part = listed[begin : begin + layout.SCRIPT_KEYS_MAX]
                commands.append(self._publication(number, bucket, part))
        event = layout.encode_event(DirectoryEvent(number, first_seq, list(added), list(removed)))
        trim = ("MAXLEN", "~", layout.STREAM_ENTRIES_MAX)
        commands.append(_Command(MEMBERS, ("XADD", self._layout.events, *trim, "*", "e", event)))
        for reply in self._run(commands):
            if isinstance(reply, Exception):
                raise self._refused(reply)
        with self._lock:
            self._counters["published_keys"] += len(changes)

    def _publication(
        self, number: int, bucket: int, changes: Sequence[tuple[int, int, bytes]]
    ) -> _Command:
        names = self._layout.names(bucket, (key for _, _, key in changes))
        added = sum(not is_removed for _, is_removed, _ in changes)
        values = (layout.encode_number(number), added, self._location_ttl_ms)
        return _Command(bucket, (len(names), *names, *values), layout.PUBLISH)

    # -- the reader's side -----------------------------------------------------------------------

    def nodes(self) -> dict[int, NodeRecord]:
        """See `Directory.nodes`; up to `MEMBERSHIP_AGE_S` old."""
        self._check_open()
        known = self._membership
        if known is None or time.monotonic() >= known.read_at + MEMBERSHIP_AGE_S:
            known = self._read_membership(self._run(self._membership_commands()))
        return dict(known.nodes)

    def locate(self, keys: Sequence[bytes]) -> list[tuple[int, ...]]:
        """See `Directory.locate`."""
        check_keys(keys, LOCATE_KEYS_MAX)
        asks = self._membership_commands() if self._membership_due() else []
        places, reads = self._reads(keys)
        replies = self._run([*asks, *reads])
        membership = self._membership_of(replies[: len(asks)])
        found = [()] * len(keys) if len(places) > 1 else []
        for place, reply in zip(places, replies[len(asks) :], strict=True):
            if not isinstance(reply, list) or len(reply) != len(place):
                continue
            numbers = map(membership.holders.__getitem__, reply)
            if len(places) == 1:
                found = list(numbers)
            else:
                for position, located in zip(place, numbers, strict=True):
                    found[position] = located
        return found
