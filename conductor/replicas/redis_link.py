"""Carries what conductors say of themselves and of instances, by a few keys in Redis.

    tiffin:{POOL:c}:2:MARK:conductor:NAME   string: a conductor's state, until it expires
    tiffin:{POOL:c}:2:MARK:conductors       set: the names of the conductors
    tiffin:{POOL:c}:2:MARK:instances        hash: a record per instance; its field "" is a random
                                            word, a new one with each change
    tiffin:{POOL:c}:leader                  string: the name of the conductor that leads, until it
                                            expires

The 2 is the version, MARK 8 hex digits of a stamp by the pool's token: conductors of another
version or token work as if these were not there. States and records begin with a stamp. All is soft
state: it expires when no conductor writes, and what is lost is written again. An exchange is not
retried; the connections are the directory's, with a circuit breaker that leaves a server alone for
a while after it did not answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import redis

from tiffin.kvstore.directory.redis_connection import RedisCall, exchange
from tiffin.kvstore.directory.redis_layout import MEMBERS, Script
from tiffin.kvstore.directory.redis_topology import open_fleet
from tiffin.kvstore.directory.url import check_pool, parse_redis
from tiffin.kvstore.errors import ClientClosed, DirectoryUnavailable
from tiffin.kvstore.token_proofs import STAMP_BYTES, is_stamped, stamp
from tiffin.messenger.log_rate_limit import Ration

from .states import State, pack, unpack

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tiffin.kvstore.directory.redis_connection import Reply, Word

    from .replica import News, SharedConductor
    from .shared_records import Change

log = logging.getLogger(__name__)
log.addFilter(Ration())

# The purposes of stamps.
STATE, RECORD, MARK = "conductor state", "conductor record", "conductor keys"
# A state with two rows for each of 16,384 instances whose ids have 128 characters; the longest
# registration that the service takes, with 64 labels, is shorter.
VALUE_BYTES_MAX = 8 << 20
# The most conductors of a pool, because each reads the states of all others.
CONDUCTORS_MAX = 64
# How long Redis keeps names and records after the last write of a conductor.
_KEPT_MS = 60_000
# Changes of one script call: some milliseconds of Redis' time for large records.
_CHANGES_MAX = 250
# Errors that redirect to another server; those of a script have the same names in their texts.
_ELSEWHERE = redis.exceptions.ReadOnlyError | redis.exceptions.MovedError

# KEYS: instances. ARGV: a random word, then for each change: field, value as it was read, new
# value; "" is no value. A field whose value is no longer the one read is not changed.
CHANGE = Script(
    """
local changed = false
for i = 2, #ARGV, 3 do
  if (redis.call('HGET', KEYS[1], ARGV[i]) or '') == ARGV[i + 1] then
    redis.call('HDEL', KEYS[1], ARGV[i])
    if ARGV[i + 2] ~= '' then redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 2]) end
    changed = true
  end
end
if changed then redis.call('HSET', KEYS[1], '', ARGV[1]) end
return 0
"""
)
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


class Met(NamedTuple):
    """What an exchange has read: the states of the conductors that are alive, by name, which of
    them leads, and all records if any has changed since the last exchange."""

    states: dict[str, State]
    leader: str
    records: dict[str, bytes] | None


class RedisLink:
    """The keys of one pool. Connects at the first exchange. For one thread at a time, except that
    another thread may call `close` meanwhile. Ignores what lacks the stamp of `token`.

    Raises InvalidInput for a URL that can't work, or that names no Redis.
    """

    def __init__(self, url: str, *, pool: str = "default", token: bytes = b"") -> None:
        options = parse_redis(url)
        self._pool, self._token = pool, token
        tag = f"{check_pool(pool)}:c"
        prefix = f"tiffin:{{{tag}}}:2:{self._stamped(MARK, b'')[:4].hex()}:"
        self._states, self._names = f"{prefix}conductor:", f"{prefix}conductors"
        self._instances, self._leader = f"{prefix}instances", f"tiffin:{{{tag}}}:leader"
        self._address, self._timeout_s = options.address, options.timeout_s
        self._fleet = open_fleet(options, {MEMBERS: tag.encode()})
        self._closed = False
        # As read last: stamped states, stamped records, what is forged among these, and their word.
        self._known: dict[str, tuple[bytes, State]] = {}
        self._records: dict[str, bytes] = {}
        self._strange: dict[str, bytes] = {}
        self._word: Reply = None
        self._forged = 0
        self.last_error = ""

    def exchange(
        self, state: State, changes: Sequence[Change], *, dead_s: float, lead_s: float
    ) -> Met:
        """Write a state, which expires after `dead_s`, and changes of records; acquire the leader
        lease for `lead_s`, or renew it, unless another conductor holds it; read what there is then.

        Blocks for some times the URL's timeout at most. Raises DirectoryUnavailable, and then it is
        unknown what was written; and ClientClosed.
        """
        key, value = self._states + state.name, self._stamped(STATE, pack(state))
        commands: list[Sequence[Word]] = [
            ("SET", key, value, "PX", int(dead_s * 1000)),
            ("SADD", self._names, state.name),
            ("PEXPIRE", self._names, _KEPT_MS),
            ("PEXPIRE", self._instances, _KEPT_MS),
            *self._changing(changes),
            ("SMEMBERS", self._names),
            ("HGET", self._instances, ""),
            ("EVAL", LEAD.text, 1, self._leader, state.name, int(lead_s * 1000)),
        ]
        *_, names, word, leader = self._ask(commands)
        states = self._new_states(names)
        records = None
        if word != self._word:  # at the end: what is read here is not read again
            (reply,) = self._ask([("HGETALL", self._instances)])
            records = self._new_records(reply)
        self.last_error = ""
        return Met(states, leader.decode(errors="replace"), records)

    def leave(self, name: str) -> None:
        """Remove the conductor `name`: its promises count no more, and if it led, another one may
        lead at once. Raises as `exchange`."""
        gone = ("DEL", self._states + name), ("SREM", self._names, name)
        self._ask([*gone, ("EVAL", RESIGN.text, 1, self._leader, name)])

    def statistics(self) -> dict[str, Any]:
        """The server's address, the `error` of the last exchange, "" if none, and how many values
        were `forged`."""
        return {"address": self._address, "error": self.last_error, "forged": self._forged}

    def close(self) -> None:
        """Close all connections; idempotent."""
        self._closed = True
        self._fleet.close()

    def _changing(self, changes: Sequence[Change]) -> list[Sequence[Word]]:
        commands: list[Sequence[Word]] = []
        for at in range(0, len(changes), _CHANGES_MAX):
            words: list[Word] = [secrets.token_bytes(8)]
            for instance, read, new in changes[at : at + _CHANGES_MAX]:
                # A forged record counts as missing, and is replaced.
                before = self._stamped(RECORD, read) if read else self._strange.get(instance, b"")
                words += [instance, before, self._stamped(RECORD, new) if new else b""]
            commands.append(("EVAL", CHANGE.text, 1, self._instances, *words))
        return commands

    def _new_states(self, reply: Any) -> dict[str, State]:
        names = [name.decode(errors="replace") for name in reply][:CONDUCTORS_MAX]
        (values,) = self._ask([("MGET", *(self._states + name for name in names))])
        gone = [name for name, value in zip(names, values, strict=True) if value is None]
        if gone:
            self._ask([("SREM", self._names, *gone)])
        before, self._known = self._known, {}
        for name, value in zip(names, values, strict=True):
            if name in before and before[name][0] == value:
                self._known[name] = before[name]
            elif value is not None and (body := self._genuine(STATE, value)):
                state = unpack(body, State)
                if state is not None and state.name == name:
                    self._known[name] = value, state
        return {name: state for name, (_, state) in self._known.items()}

    def _new_records(self, reply: Any) -> dict[str, bytes]:
        pairs = zip(reply[::2], reply[1::2], strict=True)
        values = {field.decode(errors="replace"): value for field, value in pairs}
        self._word, before = values.pop("", None), self._records
        self._records = {
            name: value
            for name, value in values.items()
            if value == before.get(name) or self._genuine(RECORD, value)
        }
        self._strange = {n: value for n, value in values.items() if n not in self._records}
        return {name: value[STAMP_BYTES:] for name, value in self._records.items()}

    def _stamped(self, purpose: str, body: bytes) -> bytes:
        return stamp(self._token, purpose, self._pool, body) + body

    def _genuine(self, purpose: str, value: bytes) -> bytes:
        """What is behind the stamp, if that proves that a conductor of the pool wrote it."""
        found, body = value[:STAMP_BYTES], value[STAMP_BYTES:]
        if len(body) <= VALUE_BYTES_MAX and is_stamped(
            self._token, purpose, self._pool, body, found
        ):
            return body
        self._forged += 1
        log.warning(
            "a %s at %s is ignored, for it has not the stamp of our token: it is forged",
            purpose,
            self._address,
        )
        return b""

    def _ask(self, commands: Sequence[Sequence[Word]]) -> list[Any]:
        if self._closed:
            raise ClientClosed("this link is closed")
        server = self._fleet.server(MEMBERS)
        call = RedisCall(server, commands)
        exchange([call], self._timeout_s)
        if call.error is not None:
            self._fleet.lost(server)
        errors = [call.error, *(one for one in call.replies if isinstance(one, Exception))]
        for error in filter(None, errors):
            why = str(error)
            if isinstance(error, _ELSEWHERE) or why.startswith(("MOVED ", "READONLY")):
                self._fleet.moved(server)
            elif "WRONGTYPE" in why:  # not written by a conductor: deleted, and written again
                forget = RedisCall(server, [("DEL", self._names, self._instances)])
                exchange([forget], self._timeout_s)
            self.last_error = f"the other conductors, by {self._address}: {why[:300]}"
            raise DirectoryUnavailable(self.last_error)
        return call.replies


async def share(
    core: SharedConductor,
    link: RedisLink,
    clock: Callable[[], float],
    learnt: Callable[[News], None] = lambda _: None,
) -> None:
    """Exchange states for ever, in the core's event loop; another thread waits for Redis. The
    callback `learnt` gets what other conductors have changed. Cancel this task before closing the
    link: it then removes this conductor from Redis. Raises ClientClosed if the link was closed
    first."""
    reached, led = True, False
    try:
        while True:
            error = await _meet(core, link, clock)
            if reached and error:
                log.warning("deciding alone: %s", error)
            elif not reached and not error:
                log.info("the other conductors are heard again")
            reached = not error
            if core.lease.holds(clock()) != led:
                led = not led
                log.info("this conductor leads" if led else "this conductor leads no more")
            learnt(core.news())
            await asyncio.sleep(core.sharing.interval_s)
    finally:
        core.lease.resign()
        with contextlib.suppress(DirectoryUnavailable, ClientClosed):
            await asyncio.to_thread(link.leave, core.name)


async def _meet(core: SharedConductor, link: RedisLink, clock: Callable[[], float]) -> str:
    """One exchange; why there was none, or ""."""
    began, sharing = clock(), core.sharing
    write = partial(link.exchange, core.state(began), core.changes(began))
    work = asyncio.ensure_future(
        asyncio.to_thread(write, dead_s=sharing.dead_s, lead_s=sharing.lead_s)
    )
    try:
        met = await asyncio.shield(work)
    except DirectoryUnavailable as error:
        core.settle(None, clock())
        return str(error)
    except asyncio.CancelledError:
        await asyncio.gather(work, return_exceptions=True)  # else it may write after `leave`
        raise
    finally:
        del work  # it has the error, whose traceback has this frame: only the collector finds that
    core.lease.answered(met.leader, began)
    for state in met.states.values():
        core.hear(state, clock())
        await asyncio.sleep(0)  # some take a millisecond, and requests wait
    core.settle(met.states, clock())
    if met.records is not None:
        core.merge(met.records, clock())
    return ""
