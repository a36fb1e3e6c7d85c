"""Connections to one Redis server, and one exchange of commands with several servers at once.

This uses the library's connections without its connection pool and clients, which retry for longer
than a prompt may wait. Here a call sends its commands once, to all servers at the same time, and
calls back off from a server that did not answer (`Health`).
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

import redis

from tiffin.messenger.health import Health

from ..deadlines import until_s

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .url import RedisOptions

    Word = bytes | str | int
    Reply = object

E = TypeVar("E", bound=BaseException)

# A connection's exceptions for a server that is unreachable, or that is no Redis server.
LOST = (redis.ConnectionError, redis.TimeoutError, OSError, redis.InvalidResponse)

# How long a server is left alone after a failure. The first rest is short: it may have been one
# broken connection. The longest bounds how late a recovered server is used again: a prompt must not
# wait for a server that has been down for an hour.
FIRST_S, MAX_S = 0.1, 2.0
# The most idle connections kept open; more threads than these at once open further connections.
_IDLE_MAX = 16


class Down(Exception):
    """The call was not sent: the server is left alone for a moment, or there was no time left."""


class RedisConnection(Protocol):
    """The part of the library's connections that this module uses."""

    def connect(self) -> None: ...
    def disconnect(self) -> None: ...
    def can_read(self, timeout: float = 0) -> bool: ...
    def read_response(self) -> Reply: ...
    def pack_command(self, *words: Word) -> list[bytes]: ...
    def send_packed_command(self, command: list[bytes]) -> None: ...


def connection_to(options: RedisOptions, host: str, port: int) -> RedisConnection:
    """A connection with the options' password and TLS; not yet opened."""
    arguments: dict[str, Any] = {
        "host": host,
        "port": port,
        "db": options.database,
        "username": options.username,
        "password": options.password,
        "socket_timeout": options.timeout_s,
        "socket_connect_timeout": options.timeout_s,
        "protocol": 2,
    }
    kind: Any = redis.SSLConnection if options.tls else redis.Connection
    if options.tls:
        arguments |= {
            "ssl_ca_certs": options.ca,
            "ssl_certfile": options.cert,
            "ssl_keyfile": options.key,
            "ssl_cert_reqs": "required",
            "ssl_check_hostname": True,
        }
    return cast("RedisConnection", kind(**arguments))


def ask(connection: RedisConnection, *words: Word) -> Reply:
    """Send one command and return its reply. Raises one of `LOST`, or redis.ResponseError."""
    connection.send_packed_command(connection.pack_command(*words))
    return connection.read_response()


class RedisServer:
    """One server: its idle connections and health. `dial` returns an opened connection, or
    raises one of `LOST`. Thread-safe."""

    def __init__(self, address: str, dial: Callable[[], RedisConnection]) -> None:
        self.address = address
        self._dial = dial
        self._lock = threading.Lock()  # protects all below
        self._idle: list[RedisConnection] = []
        # Being opened, for calls that had no time left to wait for it.
        self._begun: list[Future[RedisConnection]] = []
        self._health = Health(FIRST_S, MAX_S)
        self._closed = False
        self.last_error = ""

    @property
    def answers(self) -> bool:
        """Whether the server answered the last call."""
        return self._health.well

    def admits(self) -> bool:
        """Whether to call the server now: see `Health.admits`."""
        with self._lock:
            return self._health.admits(time.monotonic())

    def take(self, deadline: float) -> RedisConnection:
        """An idle connection that is not known to be broken, or a new one. Opening one takes a
        distant server several round trips: what is not open by the deadline is opened further in
        the background, for a later call. Raises one of `LOST`."""
        while True:
            with self._lock:
                self._collect()
                connection = self._idle.pop() if self._idle else None
                begun = self._begun.pop() if connection is None and self._begun else None
            if connection is None:
                return self._await(begun or self._begin(), deadline)
            try:
                if not connection.can_read():
                    return connection
            except LOST:
                pass
            connection.disconnect()  # closed by the server, or with a stray reply to read

    def _begin(self) -> Future[RedisConnection]:
        dialled: Future[RedisConnection] = Future()

        def dial() -> None:
            try:
                connection = self._dial()
            except BaseException as error:  # noqa: BLE001 - raised by whoever waits for it
                dialled.set_exception(_without_frames(error))
            else:
                dialled.set_result(connection)

        threading.Thread(target=dial, name="tiffin-redis", daemon=True).start()
        return dialled

    def _await(self, dialled: Future[RedisConnection], deadline: float) -> RedisConnection:
        try:
            return dialled.result(until_s(deadline))
        except BaseException as error:
            if dialled.done() and dialled.exception() is error:
                raise
            with self._lock:
                kept = not self._closed and len(self._begun) < _IDLE_MAX
                if kept:
                    self._begun.append(dialled)
            if not kept:
                dialled.add_done_callback(_disconnect)
            if isinstance(error, TimeoutError):
                raise redis.TimeoutError(
                    "no connection in time; it is still being opened"
                ) from None
            raise

    def _collect(self) -> None:
        """Make the connections that were opened in the background idle ones."""
        done = [dialled for dialled in self._begun if dialled.done()]
        self._begun = [dialled for dialled in self._begun if dialled not in done]
        self._idle += [dialled.result() for dialled in done if dialled.exception() is None]

    def give(self, connection: RedisConnection) -> None:
        """Return a connection after a complete exchange."""
        with self._lock:
            self._health.answered()
            if not self._closed and len(self._idle) < _IDLE_MAX:
                self._idle.append(connection)
                return
        connection.disconnect()

    def fail(self, error: Exception) -> None:
        """Record that an exchange failed."""
        with self._lock:
            self.last_error = str(error) or type(error).__name__
            self._health.failed(time.monotonic())

    def hang_up(self) -> None:
        """Close idle connections: the next call dials."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.disconnect()

    def close(self) -> None:
        """Close all connections: idle ones now, those in use when they are returned."""
        with self._lock:
            self._closed = True
            begun, self._begun = self._begun, []
        for dialled in begun:
            dialled.add_done_callback(_disconnect)
        self.hang_up()


def _disconnect(dialled: Future[RedisConnection]) -> None:
    if dialled.exception() is None:
        dialled.result().disconnect()


class RedisCall:
    """Commands for one server: `replies` in their order (Redis' error replies are values), or
    `error` if not all replies came."""

    __slots__ = ("_connection", "commands", "error", "replies", "server")

    def __init__(self, server: RedisServer, commands: Sequence[Sequence[Word]]) -> None:
        self.server = server
        self.commands = commands
        self.replies: list[Reply] = []
        self.error: Exception | None = None
        self._connection: RedisConnection | None = None

    def send(self, deadline: float) -> None:
        if time.monotonic() >= deadline:  # connecting to earlier servers took all the time
            self.error = Down("not asked, others took too long")
            return
        if not self.server.admits():
            self.error = Down(self.server.last_error)
            return
        connection = None
        try:
            connection = self.server.take(deadline)
            pack = connection.pack_command
            packed = b"".join([piece for words in self.commands for piece in pack(*words)])
            connection.send_packed_command([packed])
        except LOST as error:
            self._fail(connection, error)
        else:
            self._connection = connection

    def receive(self, deadline: float) -> None:
        connection = self._connection
        if connection is None:
            return
        try:
            # Servers that are down at the same time cost one timeout, not one each.
            if not connection.can_read(until_s(deadline)):
                raise redis.TimeoutError("no answer in time")
            for _ in self.commands:
                try:
                    self.replies.append(connection.read_response())
                except redis.ResponseError as error:
                    self.replies.append(error)
        except LOST as error:
            self._fail(connection, error)
        else:
            self.server.give(connection)

    def _fail(self, connection: RedisConnection | None, error: Exception) -> None:
        if connection is not None:
            connection.disconnect()
        self.error = _without_frames(error)
        self.server.fail(error)


def _without_frames(error: E) -> E:
    """The error without its tracebacks, and those of what it came of. Their frames have the call,
    which has the error: an outage would leave ten such cycles a second to the collector."""
    one: BaseException | None = error
    while one is not None:
        one.__traceback__ = None
        one = one.__cause__ or one.__context__
    return error


def exchange(calls: Sequence[RedisCall], timeout_s: float) -> None:
    """Send all, then receive all, within about `timeout_s`. Never raises: see `RedisCall`."""
    deadline = time.monotonic() + timeout_s
    for call in calls:
        call.send(deadline)
    for call in calls:
        call.receive(deadline)
