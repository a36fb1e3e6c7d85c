"""Carries bulletins between conductors, through one stream in Redis.

    tiffin:{POOL:c}:conductors      stream: field "e" = a stamp by the pool's token, and a bulletin
    tiffin:{POOL:c}:leader          string: the name of the conductor that leads, until it expires

Both are soft state: the stream is trimmed to its latest entries, expires when no conductor writes,
and lost bulletins are sent again. One exchange appends this conductor's bulletins and reads the new
ones. An exchange is not retried; the connections are the directory's, with a circuit breaker that
leaves a server alone for a while after it did not answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
from typing import TYPE_CHECKING, Any

import redis

from tiffin.kvstore.directory.redis_connection import RedisCall, exchange
from tiffin.kvstore.directory.redis_layout import APPEND, MEMBERS, Script
from tiffin.kvstore.directory.redis_topology import open_fleet
from tiffin.kvstore.directory.url import check_pool, parse_redis
from tiffin.kvstore.errors import ClientClosed, DirectoryUnavailable
from tiffin.kvstore.token_proofs import STAMP_BYTES, is_stamped, stamp
from tiffin.messenger.log_rate_limit import Ration

from .bulletins import BULLETIN_BYTES_MAX

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tiffin.kvstore.directory.redis_connection import Reply

    from ..pool.leader import LeaderLease
    from .learnt_instances import News
    from .replica import SharedConductor

log = logging.getLogger(__name__)
log.addFilter(Ration())

PURPOSE = "conductor bulletin"
# Entries of 20 s with ten conductors that each write 20 times a second. 256 MB if all entries were
# full; most are some KB.
STREAM_ENTRIES_MAX = 4096
# The stream expires so long after the last write.
_STREAM_TTL_MS = 60_000
# The most entries of one read, and the most reads of one exchange while there are more entries.
_READ_MAX = 256
_READS_MAX = 16
# The most bulletins of one call: 4 MiB of full ones, mostly much less.
_APPENDS_MAX = 64
# Bulletins handled before other tasks have their turn in the event loop; some 0.3 ms each.
_PER_TURN = 4
# The minimum pause between two exchanges, however many decisions there are.
_PAUSE_S = 0.01

# KEYS: leader. ARGV: a name, the lease in ms. Returns the name of the leader. Names are unique and
# never re-used, so a conductor that finds its own name there holds the lease.
LEAD = Script(
    """
local leader = redis.pcall('GET', KEYS[1])
if type(leader) == 'string' and leader ~= ARGV[1] then return leader end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return ARGV[1]
"""
)
# KEYS: leader. ARGV: a name.
RESIGN = Script(
    """
if redis.pcall('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
"""
)


def unique_name() -> str:
    """A name for a conductor: the host's name and a random part, so that it is never re-used."""
    return f"{socket.gethostname()[:200]}:{secrets.token_hex(6)}"


class RedisLink:
    """The stream of one pool. Connects at the first exchange. For one thread at a time, except that
    another thread may call `close` meanwhile. Bulletins without the stamp of `token` are ignored.

    Raises InvalidInput for a URL that can't work, or that names no Redis.
    """

    def __init__(self, url: str, *, pool: str = "default", token: bytes = b"") -> None:
        options = parse_redis(url)
        self._pool, self._token = pool, token
        tag = f"{check_pool(pool)}:c"
        self._name = f"tiffin:{{{tag}}}:conductors".encode()
        self._leader = f"tiffin:{{{tag}}}:leader".encode()
        self._address, self._timeout_s = options.address, options.timeout_s
        self._fleet = open_fleet(options, {MEMBERS: tag.encode()})
        self._position: bytes | None = None
        self._closed = False
        self._counts = {"exchanges": 0, "failures": 0, "appended": 0, "read": 0, "forged": 0}
        self.last_error = ""

    def exchange(self, bulletins: Sequence[bytes]) -> list[bytes]:
        """Append these bulletins, and return all that were appended since the last exchange, these
        among them. The first exchange returns none from before it.

        Blocks for about the URL's timeout at most for each 64 bulletins. Raises
        DirectoryUnavailable, and then it is unknown which were appended; and ClientClosed.
        """
        if self._closed:
            raise ClientClosed("this link is closed")
        try:
            if self._position is None:
                self._position = self._last()
            for begin in range(0, len(bulletins), _APPENDS_MAX):
                self._append(bulletins[begin : begin + _APPENDS_MAX])
            found = self._read()
        except DirectoryUnavailable as error:
            self._counts["failures"] += 1
            self.last_error = str(error)
            raise
        self._counts["exchanges"] += 1
        self._counts["appended"] += len(bulletins)
        self._counts["read"] += len(found)
        self.last_error = ""
        return found

    def lead(self, name: str, lead_s: float) -> str:
        """Acquire the leader lease for `lead_s`, or renew it, unless another conductor holds it.
        Returns the name of the holder. Blocks and raises as `exchange`; the lease starts at a
        moment during this call."""
        if self._closed:
            raise ClientClosed("this link is closed")
        reply = self._run(LEAD, name.encode(), int(lead_s * 1000))
        if not isinstance(reply, bytes):
            raise self._refused(reply)
        return reply.decode(errors="replace")

    def resign(self, name: str) -> None:
        """Release the leader lease, if the conductor `name` holds it: another conductor may lead at
        once. May be called by any thread. Raises as `lead`."""
        if self._closed:
            raise ClientClosed("this link is closed")
        self._run(RESIGN, name.encode())

    def statistics(self) -> dict[str, Any]:
        """Counters, the server's address, and the `error` of the last exchange, "" if none."""
        return {"address": self._address, "error": self.last_error, **self._counts}

    def close(self) -> None:
        """Close all connections; idempotent."""
        self._closed = True
        self._fleet.close()

    def _last(self) -> bytes:
        """The position of the last entry; "0-0" for an empty stream."""
        (reply,) = self._ask([("XREVRANGE", self._name, "+", "-", "COUNT", 1)])
        match reply:
            case [[bytes() as position, *_]]:
                return position
            case []:
                return b"0-0"
        return self._not_a_stream(reply)

    def _append(self, bulletins: Sequence[bytes]) -> None:
        commands: list[Sequence[bytes | str | int]] = [
            ("EVAL", APPEND.text, 1, self._name, STREAM_ENTRIES_MAX, self._stamp(raw) + raw)
            for raw in bulletins
        ]
        commands.append(("PEXPIRE", self._name, _STREAM_TTL_MS))
        for reply in self._ask(commands)[:-1]:
            if not isinstance(reply, bytes):
                raise self._refused(reply)
            if self._position is not None and _order(reply) <= _order(self._position):
                # The stream was lost, or its server's clock went back: our position is not in it.
                self._position = b"0-0"

    def _read(self) -> list[bytes]:
        found: list[bytes] = []
        for _ in range(_READS_MAX):
            assert self._position is not None
            words = ("XREAD", "COUNT", _READ_MAX, "STREAMS", self._name, self._position)
            (reply,) = self._ask([words])
            match reply:
                case None:
                    return found
                case [[_, [*entries]]]:
                    found += self._bulletins(entries)
                case _:
                    self._not_a_stream(reply)
                    return found
            if len(entries) < _READ_MAX:
                break
        return found

    def _bulletins(self, entries: Sequence[Reply]) -> list[bytes]:
        found = []
        for entry in entries:
            match entry:
                case [bytes() as position, [b"e", bytes() as raw]]:
                    self._position = position
                    if len(raw) <= STAMP_BYTES + BULLETIN_BYTES_MAX:
                        found += self._genuine(raw)
                case [bytes() as position, *_]:
                    self._position = position
        return found

    def _stamp(self, bulletin: bytes) -> bytes:
        return stamp(self._token, PURPOSE, self._pool, bulletin)

    def _genuine(self, entry: bytes) -> list[bytes]:
        """The entry's bulletin, if its stamp proves that a conductor of the pool wrote it."""
        found, bulletin = entry[:STAMP_BYTES], entry[STAMP_BYTES:]
        if is_stamped(self._token, PURPOSE, self._pool, bulletin, found):
            return [bulletin]
        self._counts["forged"] += 1
        log.warning(
            "a bulletin by %s is ignored, for it has not the stamp of our token: it is of a "
            "conductor with another token or of another version, or forged",
            self._address,
        )
        return []

    def _run(self, script: Script, *words: bytes | int) -> Reply:
        (reply,) = self._ask([("EVAL", script.text, 1, self._leader, *words)])
        return reply

    def _ask(self, commands: Sequence[Sequence[bytes | str | int]]) -> list[Reply]:
        server = self._fleet.server(MEMBERS)
        call = RedisCall(server, commands)
        exchange([call], self._timeout_s)
        if call.error is not None:
            self._fleet.lost(server)
            raise self._refused(call.error)
        for reply in call.replies:
            if _elsewhere(reply):
                self._fleet.moved(server)
                raise self._refused(reply)
        return call.replies

    def _not_a_stream(self, reply: Reply) -> bytes:
        """Handle a reply that is not of a stream. A value of another type under the stream's key
        counts as an empty stream: the next append replaces it. Raises for other errors."""
        if isinstance(reply, redis.ResponseError) and str(reply).startswith("WRONGTYPE"):
            return b"0-0"
        raise self._refused(reply)

    def _refused(self, reply: Reply) -> DirectoryUnavailable:
        is_error = isinstance(reply, Exception)
        why = f"{reply} ({type(reply).__name__})" if is_error else f"it answered {reply!r}"
        return DirectoryUnavailable(f"the other conductors, by {self._address}: {why[:300]}")


def _order(position: bytes) -> tuple[int, ...]:
    return tuple(int(part) for part in position.split(b"-"))


def _elsewhere(reply: Reply) -> bool:
    """Whether the reply redirects to another server: MOVED, or a read-only replica."""
    if isinstance(reply, redis.exceptions.ReadOnlyError | redis.exceptions.MovedError):
        return True
    return isinstance(reply, redis.ResponseError) and str(reply).startswith(("MOVED ", "READONLY"))


def exchange_once(core: SharedConductor, link: RedisLink, clock: Callable[[], float]) -> None:
    """One turn for a caller without an event loop: exchange bulletins, handle them, settle, and
    acquire or renew the leader lease. Never raises for a Redis that does not answer."""
    try:
        heard = link.exchange(core.bulletins(clock()))
    except DirectoryUnavailable:
        core.interrupted()
        heard = []
    asked_at = clock()
    if core.lease.due(asked_at):
        _answered(core.lease, _leader(core.lease, link), asked_at)
    for raw in heard:
        core.hear(raw, clock())
    core.settle(clock())


def _leader(lease: LeaderLease, link: RedisLink) -> str | DirectoryUnavailable:
    try:
        return link.lead(lease.name, lease.lead_s)
    except DirectoryUnavailable as error:
        return error


def _answered(lease: LeaderLease, leader: str | DirectoryUnavailable, asked_at: float) -> None:
    """Record the answer about the lease; a leader without an answer leads until its lease
    expires."""
    before = lease.error
    lease.error = "" if isinstance(leader, str) else str(leader)
    if isinstance(leader, str):
        lease.answered(leader, asked_at)
    elif not before:
        log.warning("who leads is not known: %s", leader)


async def share(
    core: SharedConductor,
    link: RedisLink,
    clock: Callable[[], float],
    learnt: Callable[[News], None] | None = None,
) -> None:
    """Exchange bulletins for ever, in the core's event loop; another thread waits for Redis. The
    callback `learnt` gets the other conductors' news about instances and this conductor's requests.
    Cancel this task before closing the link: it then releases the leader lease. Raises ClientClosed
    if the link was closed first."""
    try:
        await _share(core, link, clock, learnt)
    finally:
        if core.lease.holds(clock()):
            core.lease.resign()
            with contextlib.suppress(DirectoryUnavailable, ClientClosed):
                await asyncio.to_thread(link.resign, core.name)


async def _share(
    core: SharedConductor,
    link: RedisLink,
    clock: Callable[[], float],
    learnt: Callable[[News], None] | None,
) -> None:
    woken, lease = asyncio.Event(), core.lease
    core.wake = woken.set
    reached, led = True, False
    while True:
        woken.clear()
        try:
            heard = await asyncio.to_thread(link.exchange, core.bulletins(clock()))
        except DirectoryUnavailable as error:
            if reached:
                log.warning("deciding alone: %s", error)
            core.interrupted()
            reached, heard = False, []
        else:
            if not reached:
                log.info("the other conductors are heard again")
            reached = True
        for number, raw in enumerate(heard):
            core.hear(raw, clock())
            if number % _PER_TURN == _PER_TURN - 1:
                await asyncio.sleep(0)
        core.settle(clock())
        asked_at = clock()
        if reached and lease.due(asked_at):
            _answered(lease, await asyncio.to_thread(_leader, lease, link), asked_at)
        if lease.holds(clock()) != led:
            led = not led
            log.info("this conductor leads" if led else "this conductor leads no more")
        if learnt is not None:
            learnt(core.news())
        await asyncio.sleep(min(_PAUSE_S, core.sharing.interval_s))
        with contextlib.suppress(TimeoutError):
            left_s = max(core.sharing.interval_s - _PAUSE_S, 0.0)
            await asyncio.wait_for(woken.wait(), left_s)
