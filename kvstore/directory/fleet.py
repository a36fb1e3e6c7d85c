"""Which server has what: one Redis, the master that sentinels name, or the shards of a cluster."""

from __future__ import annotations

import binascii
import threading
import time
from typing import TYPE_CHECKING, Protocol

import redis

from ..errors import DirectoryUnavailable
from .layout import CLUSTER_BUCKETS
from .server import LOST, Call, Server, ask, connection_to, exchange

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from .server import Connection, Reply
    from .url import RedisOptions

# How often the map of a cluster is asked for while a shard does not answer.
_REFRESH_S = 0.25

# Servers that one call asks for the map: each may cost a timeout.
_ASKED_MAX = 3

_SLOTS = 16_384


class Fleet(Protocol):
    """The servers of one directory. Thread-safe."""

    buckets: int

    def server(self, bucket: int) -> Server:
        """Where a bucket is. Raises DirectoryUnavailable if nobody knows."""
        ...

    def lost(self, server: Server) -> None:
        """The server did not answer: perhaps another one has taken its place."""
        ...

    def moved(self, server: Server) -> None:
        """The server says that it is not the one to ask (any more)."""
        ...

    def down(self) -> list[str]:
        """Servers that did not answer the last time, and why."""
        ...

    def close(self) -> None:
        """Close all connections."""
        ...


def open_fleet(options: RedisOptions, tags: Mapping[int, bytes]) -> Fleet:
    """`tags` maps each bucket to what stands in the braces of its names. Connects nothing yet."""
    if options.kind == "cluster":
        return _Cluster(options, tags)
    return _One(options)


class _One:
    """All buckets in one server, wherever it is now."""

    buckets = 1

    def __init__(self, options: RedisOptions) -> None:
        self._options = options
        dial = self._dial_master if options.kind == "sentinel" else self._dial
        self._server = Server(options.address, dial)

    def server(self, bucket: int) -> Server:
        return self._server

    def lost(self, server: Server) -> None:
        server.hang_up()

    def moved(self, server: Server) -> None:
        server.hang_up()

    def down(self) -> list[str]:
        server = self._server
        return [] if server.answers else [f"{server.address}: {server.last_error}"]

    def close(self) -> None:
        self._server.close()

    def _dial(self) -> Connection:
        (host, port), *_ = self._options.hosts
        return _dial(self._options, host, port)

    def _dial_master(self) -> Connection:
        """Ask the sentinels one after the other, each for its share of the time."""
        options = self._options
        share_s = options.timeout_s / len(options.hosts)
        why: list[str] = []
        for host, port in options.hosts:
            try:
                return _dial(options, *_ask_sentinel(options, host, port, share_s), master=True)
            except (redis.ResponseError, *LOST) as error:
                why.append(f"{host}:{port}: {error}")
        raise redis.ConnectionError(f"no sentinel leads to {options.service}: {'; '.join(why)}")


def _dial(options: RedisOptions, host: str, port: int, *, master: bool = False) -> Connection:
    connection = connection_to(options, host, port)
    try:
        connection.connect()
        if master and _role(connection) == b"slave":
            # Sentinels may be behind, and the old master may be back as a replica.
            raise redis.ConnectionError(f"{host}:{port} is not the master")
    except redis.ResponseError as error:  # what it answered to the greeting
        connection.disconnect()
        raise redis.ConnectionError(str(error)) from error
    except LOST:
        connection.disconnect()
        raise
    return connection


def _role(connection: Connection) -> Reply:
    try:
        reply = ask(connection, "ROLE")
    except redis.ResponseError:  # not allowed to ask
        return None
    return reply[0] if isinstance(reply, list) and reply else None


def _ask_sentinel(options: RedisOptions, host: str, port: int, timeout_s: float) -> tuple[str, int]:
    """Where the master is. Raises redis.ConnectionError if this sentinel knows none."""
    connection = connection_to(options.of_sentinels(), host, port, timeout_s=timeout_s)
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
    """Buckets over the shards of a cluster.

    The map is asked for when it is first needed, and again after a shard has sent us elsewhere or
    did not answer. Only the buckets' own slots matter.
    """

    buckets = CLUSTER_BUCKETS

    def __init__(self, options: RedisOptions, tags: Mapping[int, bytes]) -> None:
        self._options = options
        self._slots = {bucket: binascii.crc_hqx(tag, 0) % _SLOTS for bucket, tag in tags.items()}
        self._lock = threading.Lock()  # protects all below; `_refreshing` is taken before it
        self._servers: dict[tuple[str, int], Server] = {}
        self._map: dict[int, Server] = {}
        self._stale = True
        self._refresh_at = 0.0
        self._why = "not asked yet"
        self._refreshing = threading.Lock()

    def server(self, bucket: int) -> Server:
        if self._stale:
            self._refresh()
        server = self._map.get(bucket)
        if server is None:
            raise DirectoryUnavailable(
                f"the cluster at {self._options.address} does not say where its data is: "
                f"{self._why}"
            )
        return server

    def lost(self, server: Server) -> None:
        self._stale = True

    def moved(self, server: Server) -> None:
        self._stale = True
        self._refresh_at = 0.0  # who says so knows better already

    def down(self) -> list[str]:
        with self._lock:
            return [f"{s.address}: {s.last_error}" for s in self._servers.values() if not s.answers]

    def close(self) -> None:
        with self._lock:
            servers = list(self._servers.values())
        for server in servers:
            server.close()

    def _refresh(self) -> None:
        # Whoever has a map goes on with it while another thread asks.
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

    def _to_ask(self) -> list[Server]:
        with self._lock:
            known = [server for server in self._servers.values() if server.answers]
            seeds = [self._at(host, port) for host, port in self._options.hosts]
        asked = dict.fromkeys([*known, *(seed for seed in seeds if seed.answers), *seeds])
        return list(asked)[:_ASKED_MAX]

    def _ask_for_map(self, server: Server) -> bool:
        call = Call(server, [("CLUSTER", "SLOTS")])
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
        """Close what is neither in the map nor a seed."""
        kept = {*named, *self._options.hosts}
        for address in [address for address in self._servers if address not in kept]:
            self._servers.pop(address).close()

    def _at(self, host: str, port: int) -> Server:
        server = self._servers.get((host, port))
        if server is None:
            server = Server(f"{host}:{port}", lambda: _dial(self._options, host, port))
            self._servers[host, port] = server
        return server


def _ranges(reply: Reply, asked: str) -> list[tuple[int, int, tuple[str, int]]]:
    """CLUSTER SLOTS -> (first slot, last slot, master's address); () for anything else."""
    ranges = []
    for entry in reply if isinstance(reply, list) else ():
        match entry:
            case [int() as first, int() as last, [host, int() as port, *_], *_]:
                # No host, or "?", is the one that was asked.
                name = host.decode("ascii", "replace") if isinstance(host, bytes) else ""
                ranges.append((first, last, (name if name not in ("", "?") else asked, port)))
    return ranges
