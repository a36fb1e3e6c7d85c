"""Finds the server of a bucket: one Redis, the master that sentinels name, or a cluster's shard."""

from __future__ import annotations

import binascii
import threading
import time
from typing import TYPE_CHECKING, Protocol

import redis

from ..errors import DirectoryUnavailable
from .redis_connection import LOST, RedisCall, RedisServer, ask, connection_to, exchange
from .redis_layout import CLUSTER_BUCKETS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from .redis_connection import RedisConnection, Reply
    from .url import RedisOptions

# The shortest interval between requests for a cluster's slot map, while a shard does not answer.
_REFRESH_S = 0.25

# The most servers that one call asks for the slot map: each may cost a timeout.
_ASKED_MAX = 3

_SLOTS = 16_384


class Fleet(Protocol):
    """The servers of one directory. Thread-safe."""

    buckets: int

    def server(self, bucket: int) -> RedisServer:
        """The server of a bucket. Raises DirectoryUnavailable if the cluster's map is unknown."""
        ...

    def lost(self, server: RedisServer) -> None:
        """Record that the server did not answer: another one may have taken over by failover."""
        ...

    def moved(self, server: RedisServer) -> None:
        """Record that the server redirected a command: it does not have the bucket (any more)."""
        ...

    def down(self) -> list[str]:
        """The servers that did not answer the last call, with their errors."""
        ...

    def close(self) -> None:
        """Close all connections."""
        ...


def open_fleet(options: RedisOptions, tags: Mapping[int, bytes]) -> Fleet:
    """Make the fleet of these options; connects lazily. `tags` maps each bucket to the hash tag in
    the braces of its names."""
    if options.kind == "cluster":
        return _Cluster(options, tags)
    return _One(options)


class _One:
    """All buckets on one server: a fixed address, or the current master."""

    buckets = 1

    def __init__(self, options: RedisOptions) -> None:
        self._options = options
        dial = self._dial_master if options.kind == "sentinel" else self._dial
        self._server = RedisServer(options.address, dial)

    def server(self, bucket: int) -> RedisServer:
        return self._server

    def lost(self, server: RedisServer) -> None:
        server.hang_up()

    def moved(self, server: RedisServer) -> None:
        server.hang_up()

    def down(self) -> list[str]:
        server = self._server
        return [] if server.answers else [f"{server.address}: {server.last_error}"]

    def close(self) -> None:
        self._server.close()

    def _dial(self) -> RedisConnection:
        (host, port), *_ = self._options.hosts
        return _dial(self._options, host, port)

    def _dial_master(self) -> RedisConnection:
        """Connect to the master. Queries the sentinels one after the other: calls do not wait for
        that any longer than they can (`RedisServer.take`)."""
        options = self._options
        why: list[str] = []
        for host, port in options.hosts:
            try:
                return _dial(options, *_ask_sentinel(options, host, port), master=True)
            except (redis.ResponseError, *LOST) as error:
                why.append(f"{host}:{port}: {error}")
        raise redis.ConnectionError(f"no sentinel leads to {options.service}: {'; '.join(why)}")


def _dial(options: RedisOptions, host: str, port: int, *, master: bool = False) -> RedisConnection:
    connection = connection_to(options, host, port)
    try:
        connection.connect()
        if master and _role(connection) == b"slave":
            # A sentinel's answer may be outdated, and the old master may be back as a replica.
            raise redis.ConnectionError(f"{host}:{port} is not the master")
    except redis.ResponseError as error:  # an error reply to the library's greeting
        connection.disconnect()
        raise redis.ConnectionError(str(error)) from error
    except LOST:
        connection.disconnect()
        raise
    return connection


def _role(connection: RedisConnection) -> Reply:
    try:
        reply = ask(connection, "ROLE")
    except redis.ResponseError:  # this user may not call ROLE
        return None
    return reply[0] if isinstance(reply, list) and reply else None


def _ask_sentinel(options: RedisOptions, host: str, port: int) -> tuple[str, int]:
    """The master's address. Raises redis.ConnectionError if this sentinel has none."""
    connection = connection_to(options.of_sentinels(), host, port)
    try:
        connection.connect()
        reply = ask(connection, "SENTINEL", "GET-MASTER-ADDR-BY-NAME", options.service)
    finally:
        connection.disconnect()
    match reply:
        case [bytes() as master, bytes() as master_port] if master_port.isdigit():
            return master.decode("ascii", "replace"), int(master_port)
    raise redis.ConnectionError(f"knows no master {options.service}")


class _Cluster:
    """Buckets spread over the shards of a cluster.

    Requests the cluster's slot map at its first use, and again after a shard redirected a command
    or did not answer. Only the buckets' own slots matter.
    """

    buckets = CLUSTER_BUCKETS

    def __init__(self, options: RedisOptions, tags: Mapping[int, bytes]) -> None:
        self._options = options
        self._slots = {bucket: binascii.crc_hqx(tag, 0) % _SLOTS for bucket, tag in tags.items()}
        self._lock = threading.Lock()  # protects all below; lock order: `_refreshing` first
        self._servers: dict[tuple[str, int], RedisServer] = {}
        self._map: dict[int, RedisServer] = {}
        self._stale = True
        self._refresh_at = 0.0
        self._why = "not asked yet"
        self._refreshing = threading.Lock()

    def server(self, bucket: int) -> RedisServer:
        if self._stale:
            self._refresh()
        server = self._map.get(bucket)
        if server is None:
            raise DirectoryUnavailable(
                f"the cluster at {self._options.address} does not say where its data is: "
                f"{self._why}"
            )
        return server

    def lost(self, server: RedisServer) -> None:
        self._stale = True

    def moved(self, server: RedisServer) -> None:
        self._stale = True
        self._refresh_at = 0.0  # refresh at once: the cluster has a newer map already

    def down(self) -> list[str]:
        with self._lock:
            return [f"{s.address}: {s.last_error}" for s in self._servers.values() if not s.answers]

    def close(self) -> None:
        with self._lock:
            servers = list(self._servers.values())
        for server in servers:
            server.close()

    def _refresh(self) -> None:
        # With an old map, do not wait for another thread that requests a new one.
        if not self._refreshing.acquire(blocking=not self._map):
            return
        try:
            now = time.monotonic()
            if not self._stale or now < self._refresh_at:
                return
            self._refresh_at = now + _REFRESH_S
            for server in self._to_ask():
                if self._ask_for_map(server):
                    self._stale = False
                    return
        finally:
            self._refreshing.release()

    def _to_ask(self) -> list[RedisServer]:
        with self._lock:
            known = [server for server in self._servers.values() if server.answers]
            seeds = [self._at(host, port) for host, port in self._options.hosts]
        asked = dict.fromkeys([*known, *(seed for seed in seeds if seed.answers), *seeds])
        return list(asked)[:_ASKED_MAX]

    def _ask_for_map(self, server: RedisServer) -> bool:
        call = RedisCall(server, [("CLUSTER", "SLOTS")])
        exchange([call], self._options.timeout_s)
        if call.error is not None:
            self._why = f"{server.address}: {call.error}"
            return False
        host = server.address.rpartition(":")[0]
        ranges = _ranges(call.replies[0], host)
        if not ranges:
            self._why = f"{server.address}: {str(call.replies[0])[:200]}"
            return False
        with self._lock:
            self._map = {
                bucket: self._at(*address)
                for bucket, slot in self._slots.items()
                for first, last, address in ranges
                if first <= slot <= last
            }
            self._forget({address for _, _, address in ranges})
        return True

    def _forget(self, named: Iterable[tuple[str, int]]) -> None:
        """Close connections to servers that are neither in the map nor seeds."""
        kept = {*named, *self._options.hosts}
        for address in [address for address in self._servers if address not in kept]:
            self._servers.pop(address).close()

    def _at(self, host: str, port: int) -> RedisServer:
        server = self._servers.get((host, port))
        if server is None:
            server = RedisServer(f"{host}:{port}", lambda: _dial(self._options, host, port))
            self._servers[host, port] = server
        return server


def _ranges(reply: Reply, asked: str) -> list[tuple[int, int, tuple[str, int]]]:
    """CLUSTER SLOTS -> (first slot, last slot, master's address); empty for any other reply."""
    ranges = []
    for entry in reply if isinstance(reply, list) else ():
        match entry:
            case [int() as first, int() as last, [host, int() as port, *_], *_]:
                # No host, or "?", means the server that we queried.
                name = host.decode("ascii", "replace") if isinstance(host, bytes) else ""
                ranges.append((first, last, (name if name not in ("", "?") else asked, port)))
    return ranges
