"""The directory in Redis or Valkey: one server, a master with sentinels, or a cluster.

All state in it is soft: `redis_layout.py` describes the keys, and nodes publish lost entries again.
So no call waits for Redis' replicas, and a failed call is not retried here.
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
from msgspec.structs import replace

from tiffin.messenger.log_rate_limit import Ration

from ..errors import ClientClosed, DirectoryUnavailable, InvalidInput
from . import redis_layout
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
    check_record,
)
from .node_records import decode_entries, encode_entry, identity_of
from .redis_connection import RedisCall, exchange
from .redis_layout import CLUSTER_BUCKETS, MEMBERS, HolderSet, Layout, Script
from .redis_topology import open_fleet

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .redis_connection import RedisServer, Reply, Word
    from .url import RedisOptions

log = logging.getLogger(__name__)
log.addFilter(Ration())

# While the shard with the membership is down, `locate` uses a cached membership of at most this age
# with the other shards.
STALE_MEMBERSHIP_S = 60.0

# Keys of one MGET: 0.3 ms of the server's time, so that a very long prompt does not delay other
# clients.
_MGET_KEYS_MAX = 1024

# `pools` looks at about this many keys, in steps of less than a millisecond of the server's time,
# and gives so many names.
_SCAN_STEPS_MAX = 200
_SCAN_KEYS = 1000
_POOLS_MAX = 10

_POSITION = re.compile(r"[0-9]{1,20}(-[0-9]{1,20})?")


# The worst case of one query, in timeouts: to connect and to wait for the reply; before that, to
# query the sentinels, or three servers of a cluster for its map.
_TIMEOUTS = {"single": 2, "sentinel": 3, "cluster": 8}


class _Command(NamedTuple):
    """A command for the server of a bucket: its words, or a script and its arguments."""

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
    """The membership as last read. `holders` decodes locations and filters them by it."""

    nodes: dict[int, NodeRecord]
    holders: HolderSet
    read_at: float


class RedisDirectory(Directory):
    """See `Directory`. Finds only nodes that have the same `token`. The times are parameters for
    tests: all users of a pool must agree on them.

    Connects at the first call. While a cluster has lost one shard, `locate` returns no locations
    for its keys, and serves the other keys; `publish` raises until all shards are back.
    """

    def __init__(
        self,
        options: RedisOptions,
        *,
        pool: str = "default",
        token: bytes = b"",
        registration_ttl_s: float = REGISTRATION_TTL_S,
        location_ttl_s: float = LOCATION_TTL_S,
        membership_age_s: float = MEMBERSHIP_AGE_S,
    ) -> None:
        self._options = options
        self.patience_s = _TIMEOUTS[options.kind] * options.timeout_s
        self._pool = pool
        self._token = token
        self._layout = Layout(pool, CLUSTER_BUCKETS if options.kind == "cluster" else 1)
        self._fleet = open_fleet(options, self._layout.tags)
        self._registration_ttl_ms = round(registration_ttl_s * 1000)
        self._location_ttl_ms = round(location_ttl_s * 1000)
        self._membership_age_s = membership_age_s
        self._closed = False
        self._lock = threading.Lock()  # protects all below
        self._membership: _Membership | None = None
        self._membership_asked_at = 0.0
        self._ignored = self._strangers = 0  # entries of the membership that was last read
        self._ahead_ms: int | None = None  # Redis' clock minus our monotonic clock
        self._epoch = 0  # counts changes of the membership by this handle
        self._counters = {"locates": 0, "located_keys": 0, "published_keys": 0, "failures": 0}

    # -- the node's side -------------------------------------------------------------------------

    def register(self, record: NodeRecord) -> int:
        """See `Directory.register`."""
        check_record(record)
        names = (2, self._layout.nodes, self._layout.number)
        words = (*names, self._registration_ttl_ms, identity_of(record), secrets.randbits(31))
        number = self._run_with_clock(_Command(MEMBERS, words, redis_layout.REGISTER))
        if not isinstance(number, int):
            raise self._refused(number)
        if not number:
            raise DirectoryUnavailable(f"{NODES_MAX} nodes are registered; withdraw some first")
        if not self.heartbeat(replace(record, number=number)):
            raise DirectoryUnavailable("the directory lost a registration while it was made")
        self._forget_membership()
        return number

    def heartbeat(self, record: NodeRecord) -> bool:
        """See `Directory.heartbeat`."""
        check_number(record.number)
        if self._ahead_ms is None:
            self._run_with_clock()
        said_at_ms = _monotonic_ms() + (self._ahead_ms or 0)
        entry = encode_entry(record, said_at_ms, self._pool, self._token)
        words = (1, self._layout.nodes, record.number, self._registration_ttl_ms, entry)
        known = self._run_with_clock(_Command(MEMBERS, words, redis_layout.HEARTBEAT))
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
            for begin in range(0, len(listed), redis_layout.SCRIPT_KEYS_MAX):
                part = listed[begin : begin + redis_layout.SCRIPT_KEYS_MAX]
                commands.append(self._publication(number, bucket, part))
        event = redis_layout.encode_event(
            DirectoryEvent(number, first_seq, list(added), list(removed))
        )
        appending = (1, self._layout.events, redis_layout.STREAM_ENTRIES_MAX, event)
        commands.append(_Command(MEMBERS, appending, redis_layout.APPEND))
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
        values = (redis_layout.encode_number(number), added, self._location_ttl_ms)
        return _Command(bucket, (len(names), *names, *values), redis_layout.PUBLISH)

    # -- the reader's side -----------------------------------------------------------------------

    def nodes(self, *, fresh: bool = False) -> dict[int, NodeRecord]:
        """See `Directory.nodes`; up to `MEMBERSHIP_AGE_S` old."""
        self._check_open()
        known = self._membership
        if fresh or known is None or time.monotonic() >= known.read_at + self._membership_age_s:
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
        """See `Directory.events`. Skips stream entries that are no events."""
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
        """Whether this call should read the membership: one does so per `MEMBERSHIP_AGE_S`."""
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
        """The membership from `replies` if there are any, else the cached one. If reading it fails,
        the cached one serves for `STALE_MEMBERSHIP_S`. Raises DirectoryUnavailable."""
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
        now_ms = _clock_ms(clock)
        if now_ms is None or not isinstance(pairs, list):
            raise self._refused(clock if isinstance(pairs, list) else pairs)
        nodes, ignored, strangers, named = decode_entries(pairs, now_ms, self._pool, self._token)
        with self._lock:
            damaged, foreign = ignored > self._ignored, strangers > self._strangers
            self._ignored, self._strangers = ignored, strangers
            known = self._membership
            if known is not None and known.holders.alive == nodes.keys():
                holders = known.holders
            else:
                holders = HolderSet(nodes)
            read = _Membership(nodes, holders, time.monotonic())
            if epoch == self._epoch:  # else the reply may be older than our own changes
                self._membership = read
        if damaged:
            log.warning(
                "%d entries of the directory at %s are no records of nodes, and ignored",
                ignored, self._options.address,
            )  # fmt: skip
        if foreign:
            log.warning(
                "%d entries of the directory at %s are ignored, for they have not the stamp of our "
                "token: %s. They are of a node with another token or of another version, or forged",
                strangers, self._options.address, ", ".join(named) or "they name nobody",
            )  # fmt: skip
        return read

    def _forget_membership(self) -> None:
        """Invalidate the cached membership after a change by this handle."""
        with self._lock:
            self._membership = None
            self._epoch += 1

    # -- asking ----------------------------------------------------------------------------------

    def _run_with_clock(self, *commands: _Command) -> Reply:
        """Run at most one command, and return its reply. Also reads Redis' clock, which is the
        common clock of a pool: the clocks of its machines may differ."""
        *replies, clock = self._run([*commands, _Command(MEMBERS, ("TIME",))])
        now_ms = _clock_ms(clock)
        if now_ms is None:
            raise self._refused(clock)
        self._ahead_ms = now_ms - _monotonic_ms()
        return replies[0] if replies else None

    def _run(self, commands: Sequence[_Command]) -> list[Reply]:
        """Run the commands; returns a reply for each, or an exception in place of it.

        A second attempt is made only for commands that need it: a server that does not know our
        scripts yet gets them in full, and a bucket that a cluster has moved is looked up again.
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
        """Run the commands `todo` and store their replies; returns those to retry."""
        by_server: dict[RedisServer, list[int]] = {}
        for place in todo:
            try:
                server = self._fleet.server(commands[place].bucket)
            except DirectoryUnavailable as error:
                replies[place] = error
            else:
                by_server.setdefault(server, []).append(place)
        calls = [
            RedisCall(server, [commands[place].spelled(whole=whole) for place in places])
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
        """The exception to raise for an error or an invalid reply; counts a failure."""
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
                "pool": self._pool,
                "membership_read": known is not None,
                "nodes": len(known.nodes) if known is not None else 0,
                "ignored_records": self._ignored,
                "unauthenticated_records": self._strangers,
                **self._counters,
            }

    def pools(self) -> list[str]:
        """See `Directory.pools`. Of a cluster only those of one shard; none if Redis' access rules
        forbid SCAN."""
        found, cursor = set[str](), b"0"
        for _ in range(_SCAN_STEPS_MAX):
            words = ("SCAN", cursor, "MATCH", redis_layout.POOLS, "COUNT", _SCAN_KEYS)
            (reply,) = self._run([_Command(MEMBERS, words)])
            match reply:
                case [bytes() as cursor, [*names]]:
                    found.update(filter(None, map(redis_layout.pool_of, names)))
                case _:
                    break
            if cursor == b"0" or len(found) >= _POOLS_MAX:
                break
        return sorted(found)[:_POOLS_MAX]

    def close(self) -> None:
        """See `Directory.close`."""
        self._closed = True
        self._fleet.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ClientClosed("this directory is closed")


def _monotonic_ms() -> int:
    return time.monotonic_ns() // 1_000_000


def _clock_ms(reply: Reply) -> int | None:
    """The reply to TIME, in ms since 1970; None for any other reply."""
    match reply:
        case [bytes() as seconds, bytes() as microseconds]:
            return int(seconds) * 1000 + int(microseconds) // 1000
    return None


def _of_wrong_type(reply: Reply) -> bool:
    """Whether one of our keys has a value of a foreign type, which is treated as empty."""
    return isinstance(reply, redis.ResponseError) and str(reply).startswith("WRONGTYPE")


def _elsewhere(reply: Reply) -> bool:
    """Whether the reply redirects to another server, which has (or may change) this key."""
    if isinstance(reply, redis.exceptions.ReadOnlyError | redis.exceptions.MovedError):
        return True
    # Not every version of the library has a class for MOVED outside its cluster client.
    return isinstance(reply, redis.ResponseError) and str(reply).startswith("MOVED ")


def _decode_entries(entries: Sequence[Reply], after: str) -> tuple[str, list[DirectoryEvent]]:
    events = []
    for entry in entries:
        match entry:
            case [bytes() as position, [b"e", value]]:
                event = redis_layout.decode_event(value)
            case [bytes() as position, *_]:
                event = None
            case _:
                continue
        after = position.decode("ascii", "replace")
        if event is not None:
            events.append(event)
    return after, events
