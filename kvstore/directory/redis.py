"""The directory in Redis or Valkey: one server, a master with sentinels, or a cluster.

Everything here is soft: `layout.py` says what lies where, the nodes publish again what is lost. So
nothing waits for replicas, and a call that does not come through is not repeated here.
"""

from __future__ import annotations

import logging
import re
import secrets
import threading
import time
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import redis

from ..errors import ClientClosed, DirectoryUnavailable, InvalidInput
from . import layout
from .base import (
    EVENTS_MAX,
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
from .server import Call, exchange

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .server import Reply, Server, Word
    from .url import RedisOptions

log = logging.getLogger(__name__)

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
        membership_age_s: float = MEMBERSHIP_AGE_S,
    ) -> None:
        self._options = options
        self._layout = Layout(pool, CLUSTER_BUCKETS if options.kind == "cluster" else 1)
        self._fleet = open_fleet(options, self._layout.tags)
        self._registration_ttl_ms = round(registration_ttl_s * 1000)
        self._location_ttl_ms = round(location_ttl_s * 1000)
        self._membership_age_s = membership_age_s
        self._closed = False
        self._lock = threading.Lock()  # protects all below
        self._membership: _Membership | None = None
        self._membership_asked_at = 0.0
        self._ignored_records = 0  # of the membership that was last read
        self._epoch = 0  # changes of the membership by this handle
        self._counters = {"locates": 0, "located_keys": 0, "published_keys": 0, "failures": 0}

    # -- the node's side -------------------------------------------------------------------------

    def register(self, record: NodeRecord) -> int:
        """See `Directory.register`."""
        names = (2, self._layout.nodes, self._layout.number)
        identified = layout.encode_record(record)
        words = (*names, self._registration_ttl_ms, identified, secrets.randbits(31))
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
        appending = (1, self._layout.events, layout.STREAM_ENTRIES_MAX, event)
        commands.append(_Command(MEMBERS, appending, layout.APPEND))
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
        if known is None or time.monotonic() >= known.read_at + self._membership_age_s:
            known = self._ask_for_membership()
        return dict(known.nodes)

    def locate(self, keys: Sequence[bytes]) -> list[tuple[int, ...]]:
        """See `Directory.locate`."""
        check_keys(keys, LOCATE_KEYS_MAX)
        epoch = self._epoch
        asks = self._membership_commands() if self._membership_due() else []
        reads = self._reads(keys)
        replies = self._run([*asks, *(command for _, command in reads)])
        holders = self._membership_of(replies[: len(asks)], epoch).holders
        found: list[tuple[int, ...]] = [()] * len(keys)
        answered, refusal = False, None
        for (positions, _), reply in zip(reads, replies[len(asks) :], strict=True):
            if isinstance(reply, list) and len(reply) == len(positions):
                answered = True
                for position, numbers in zip(
                    positions, map(holders.__getitem__, reply), strict=True
                ):
                    found[position] = numbers
            else:
                refusal = reply
        if refusal is not None and not answered:
            raise self._refused(refusal)
        with self._lock:
            self._counters["locates"] += 1
            self._counters["located_keys"] += len(keys)
        return found

    def _reads(self, keys: Sequence[bytes]) -> list[tuple[Sequence[int], _Command]]:
        """Per MGET, the positions of its keys in `keys`, and the command."""
        by_bucket: dict[int, Sequence[int]] = {}
        if self._layout.buckets == 1:
            by_bucket[0] = range(len(keys))
        else:
            lists: dict[int, list[int]] = {}
            for position, key in enumerate(keys):
                lists.setdefault(self._layout.bucket(key), []).append(position)
            by_bucket.update(lists)
        reads = []
        for bucket, positions in by_bucket.items():
            for begin in range(0, len(positions), _MGET_KEYS_MAX):
                part = positions[begin : begin + _MGET_KEYS_MAX]
                names = self._layout.names(bucket, [keys[position] for position in part])
                reads.append((part, _Command(bucket, (b"MGET", *names))))
        return reads

    def events(self, after: str) -> tuple[str, list[DirectoryEvent]]:
        """See `Directory.events`. Entries that are no events are left out, and passed over."""
        if not _POSITION.fullmatch(after):
            raise InvalidInput(f"{after!r} is no position of an event stream; begin with '0'")
        words = ("XREAD", "COUNT", EVENTS_MAX, "STREAMS", self._layout.events, after)
        (reply,) = self._run([_Command(MEMBERS, words)])
        if reply is None or _of_wrong_type(reply):
            return after, []
        match reply:
            case [[_, [*entries]]]:
                return _decode_entries(entries, after)
        raise self._refused(reply)

    # -- membership ------------------------------------------------------------------------------

    def _membership_commands(self) -> list[_Command]:
        return [
            _Command(MEMBERS, ("HGETALL", self._layout.nodes)),
            _Command(MEMBERS, ("TIME",)),
        ]

    def _membership_due(self) -> bool:
        """Whether this call should read it: one does so per `MEMBERSHIP_AGE_S`."""
        now = time.monotonic()
        with self._lock:
            known = self._membership
            if known is not None:
                last = max(known.read_at, self._membership_asked_at)
                if now < last + self._membership_age_s:
                    return False
            self._membership_asked_at = now
            return True

    def _ask_for_membership(self) -> _Membership:
        epoch = self._epoch
        return self._read_membership(self._run(self._membership_commands()), epoch)

    def _membership_of(self, replies: Sequence[Reply], epoch: int) -> _Membership:
        """From the replies if it was asked for, else as known."""
        known = self._membership
        if not replies:
            return known or self._ask_for_membership()
        try:
            return self._read_membership(replies, epoch)
        except DirectoryUnavailable:
            if known is None or time.monotonic() > known.read_at + STALE_MEMBERSHIP_S:
                raise
            return known

    def _read_membership(self, replies: Sequence[Reply], epoch: int) -> _Membership:
        pairs, clock = replies
        if _of_wrong_type(pairs):
            pairs = []
        match clock:
            case [bytes() as seconds, bytes() as microseconds] if isinstance(pairs, list):
                now_ms = int(seconds) * 1000 + int(microseconds) // 1000
            case _:
                raise self._refused(clock if isinstance(pairs, list) else pairs)
        nodes, ignored = layout.decode_nodes(pairs, now_ms)
        with self._lock:
            is_news = ignored > self._ignored_records
            self._ignored_records = ignored
            known = self._membership
            if known is not None and known.holders.alive == nodes.keys():
                holders = known.holders
            else:
                holders = Holders(nodes)
            read = _Membership(nodes, holders, time.monotonic())
            if epoch == self._epoch:  # else the question may be older than what we have changed
                self._membership = read
        if is_news:
            log.warning(
                "%d entries of the directory at %s are no records of nodes, and ignored",
                ignored, self._options.address,
            )  # fmt: skip
        return read

    def _forget_membership(self) -> None:
        """Who changes it reads it anew."""
        with self._lock:
            self._membership = None
            self._epoch += 1

    # -- asking ----------------------------------------------------------------------------------

    def _run(self, commands: Sequence[_Command]) -> list[Reply]:
        """A reply per command; what went wrong stands in its place, as an exception.

        Twice at most: a server that does not know our scripts yet gets them whole, and a cluster
        that has moved a bucket says so.
        """
        self._check_open()
        replies: list[Reply] = [None] * len(commands)
        todo = list(range(len(commands)))
        todo = self._attempt(commands, todo, replies, whole=False)
        if todo:
            self._attempt(commands, todo, replies, whole=True)
        return replies

    def _attempt(
        self, commands: Sequence[_Command], todo: list[int], replies: list[Reply], *, whole: bool
    ) -> list[int]:
        """Put replies in their places; returns which commands are worth another attempt."""
        by_server: dict[Server, list[int]] = {}
        for place in todo:
            try:
                server = self._fleet.server(commands[place].bucket)
            except DirectoryUnavailable as error:
                replies[place] = error
            else:
                by_server.setdefault(server, []).append(place)
        calls = [
            Call(server, [commands[place].spelled(whole=whole) for place in places])
            for server, places in by_server.items()
        ]
        exchange(calls, self._options.timeout_s)
        again = []
        for call, places in zip(calls, by_server.values(), strict=True):
            if call.error is not None:
                self._fleet.lost(call.server)
            for index, place in enumerate(places):
                reply = replies[place] = call.error or call.replies[index]
                if isinstance(reply, redis.exceptions.NoScriptError):
                    again.append(place)
                elif _elsewhere(reply):
                    self._fleet.moved(call.server)
                    again.append(place)
        return again

    def _refused(self, reply: Reply) -> DirectoryUnavailable:
        """What to raise for a reply that is none."""
        with self._lock:
            self._counters["failures"] += 1
        if isinstance(reply, DirectoryUnavailable):
            return reply
        is_error = isinstance(reply, Exception)
        why = f"{reply} ({type(reply).__name__})" if is_error else f"it answered {reply!r}"
        return DirectoryUnavailable(f"the directory at {self._options.address}: {why[:300]}")

    # -- the rest --------------------------------------------------------------------------------

    def statistics(self) -> dict[str, Any]:
        """See `Directory.statistics`."""
        down = self._fleet.down()
        with self._lock:
            known = self._membership
            return {
                "kind": self._options.kind,
                "address": self._options.address,
                "healthy": not down,
                "down": down,
                "nodes": len(known.nodes) if known is not None else 0,
                "ignored_records": self._ignored_records,
                **self._counters,
            }

    def close(self) -> None:
        """See `Directory.close`."""
        self._closed = True
        self._fleet.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ClientClosed("this directory is closed")


def _of_wrong_type(reply: Reply) -> bool:
    """Somebody else's value lies under one of our names: it is taken for nothing."""
    return isinstance(reply, redis.ResponseError) and str(reply).startswith("WRONGTYPE")


def _elsewhere(reply: Reply) -> bool:
    """Whether the server says that another one has (or may change) this."""
    if isinstance(reply, redis.exceptions.ReadOnlyError | redis.exceptions.MovedError):
        return True
    # Not every version of the library has a class for it outside its cluster client.
    return isinstance(reply, redis.ResponseError) and str(reply).startswith("MOVED ")


def _decode_entries(entries: Sequence[Reply], after: str) -> tuple[str, list[DirectoryEvent]]:
    events = []
    for entry in entries:
        match entry:
            case [bytes() as position, [b"e", value]]:
                event = layout.decode_event(value)
            case [bytes() as position, *_]:
                event = None
            case _:
                continue
        after = position.decode("ascii", "replace")
        if event is not None:
            events.append(event)
    return after, events
