"""A client's connections to the daemon on this host: one for each call that it makes at a time.

They share a session, and its leases. An exception of a signal handler may interrupt this code, and
whatever called it, between any two steps. Then a call ends without having put its connection back,
and nobody knows what the node has made of it. So a connection is *idle*, has a *user* that lives as
long as its call, or is *lost*. Before the next call the node is told which connections are lost,
and which leases the client knows (`Settle`): it closes those connections, and ends what was granted
over them and the client has never heard of.

What must not be lost with a connection (the requests that end leases) waits in a queue until it was
sent: to send one twice does no harm, as the numbers of leases are never used again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import threading
import time
import weakref
from collections import deque
from functools import partial
from itertools import count
from typing import TYPE_CHECKING

from tiffin.messenger.health import Health
from tiffin.messenger.signal_safe import later, uninterrupted
from tiffin.messenger.tcp.pending_connect import calling, given_up_with

from ...errors import (
    ClientBusy,
    ClientClosed,
    DeadlineExceeded,
    NodeUnavailable,
    TiffinError,
)
from ...node.core import messages
from .connection import (
    GIVEN_UP,
    HANDSHAKE_S,
    Connection,
    Greeted,
    NodeAnswer,
    handshake,
    nobody,
    raise_refusal,
    remaining_s,
)
from .lease_lifetime import Lending

if TYPE_CHECKING:
    from pathlib import Path

    from .region_mapping import Mapping

log = logging.getLogger(__name__)
CLOSED = "this client is closed (a forked child has to open its own)"
# A post does not wait for a node that takes nothing, but for the rest of a message.
POST_S = 0.25
# A thread of ours tries so often to say what is owed and lost, and rests as `Health` tells. A node
# that stands still for longer, some 30 s, learns it with the next call.
TRY_S, TRIES = 1.0, 7
# A connection that no call has needed for so long is given back to the node: as one that is lost.
IDLE_S = 10.0
# How often to look for a connection that another call has put back.
_LOOK_S = 0.001


class _Call:
    """What one call refers to while it has a connection."""

    __slots__ = ("__weakref__",)


class Connections:
    """The connections of one client's session. Thread-safe. Connects at once; raises as
    `handshake`."""

    def __init__(self, path: Path, name: str) -> None:
        self.lending = Lending(self.post)
        self.mapping: Mapping | None = None
        self.closed = False
        self._path = path
        self._name = name
        self._session = secrets.token_bytes(16)  # its name in our hellos
        self._began = b""  # which one the node made of it (`Welcome.session`)
        self._numbers = count(1)
        self._all: dict[int, Connection] = {}
        self._idle: list[Connection] = []
        self._owed: deque[messages.Request] = deque()
        self.renew_locks()
        self._try_to_take(time.monotonic() + HANDSHAKE_S)

    def renew_locks(self) -> None:
        """Also for a forked child, where the threads that held them are the parent's."""
        # `with` a lock of C is one step: no interrupt leaves it taken.
        self._changing = threading.Lock()
        self._opening = threading.Lock()
        self._paying = threading.Lock()
        self._catching_up = threading.Lock()
        self._ending = threading.Lock()  # free when the session ends
        self._ending.acquire()

    def call(self, request: messages.Request, deadline: float) -> NodeAnswer:
        """Send a request over a connection that no other call has; a lease that the reply grants
        lasts as long as the answer's memory. Raises what `Connection.call` and `handshake` raise,
        with NodeUnavailable for an OSError, ClientBusy, ClientClosed, and TierUnavailable (see
        `Mapping.of`)."""
        call = _Call()
        connection = self._take(call, deadline)
        try:
            # Before the send, so that an error leaves no reservation.
            memory = connection.mapping.of(request)
        except TiffinError:
            self._put_back(connection)
            raise
        try:
            with given_up_with(connection.give_up):
                reply = connection.call(request, deadline)
            answer = NodeAnswer(reply, self.lending.lend(memory, reply))
        except BaseException as error:
            self._lose(connection, error)
            raise
        self._put_back(connection)
        return answer

    def post(self, request: messages.Request) -> None:
        """Send a request that gets no reply, soon; does not wait for the node."""
        self._owed.append(request)
        call = _Call()
        with contextlib.suppress(TiffinError):
            connection = self._idle_for(call)
            if connection is not None:
                try:
                    self._pay_over(connection)
                except BaseException as error:
                    self._lose(connection, error)
                    raise
                self._put_back(connection)
            if self._owed:
                self._catch_up_soon()

    def close(self, *, polite: bool) -> None:
        """End the session. `polite`: with a goodbye, because no thread of this process touches the
        region any more. Idempotent, and whole only if it was not interrupted."""
        with contextlib.suppress(RuntimeError):  # it was closed before
            self._ending.release()
        if polite and self._all:
            self._say_goodbye()
        self.closed = True
        self._end()
        self.lending.forget()
        self._unmap()

    def _unmap(self) -> None:
        mapping, self.mapping = self.mapping, None
        if mapping is not None:
            mapping.close()  # views of it stay valid

    def _say_goodbye(self) -> None:
        """Over any connection that is between two requests, even a lost one; does not wait."""
        until = time.monotonic() + POST_S
        for one in list(self._all.values()):
            with contextlib.suppress(OSError, TiffinError):
                if (
                    one.user() is None
                    and not one.half_sent
                    and one.post(messages.Goodbye(0), until)
                ):
                    return

    def _end(self) -> None:
        """Close all connections; a call that another thread has on one fails now, and closes it."""
        with self._changing:
            self._idle.clear()
            ended = list(self._all.values())
            self._all.clear()
        for connection in ended:
            connection.cut()
            if connection.user() is None:
                connection.close()

    def busy(self) -> bool:
        """Whether a call has a connection."""
        return any(one.user() is not None for one in list(self._all.values()))

    def forget(self) -> None:
        """In a forked child: close the child's descriptors."""
        self.renew_locks()
        self.closed = True
        self._idle.clear()
        for connection in self._all.values():
            connection.close()

    # -- connections -----------------------------------------------------------------------------

    def _take(self, call: _Call, deadline: float) -> Connection:
        """A connection for this call, in order. The node knows what was lost before it, and has
        what was owed to it."""
        while (connection := self._idle_for(call) or self._open(call, deadline)) is None:
            if calling().was_cut:
                raise ClientClosed(GIVEN_UP)
            if time.monotonic() >= deadline:
                raise ClientBusy(
                    f"{messages.CONNECTIONS_MAX} calls of other threads took all the time"
                )
            time.sleep(_LOOK_S)
        try:
            if self._lost():
                with given_up_with(connection.give_up):
                    self._settle(connection, deadline)
            if self._owed:
                self._pay_over(connection)
        except BaseException as error:
            self._lose(connection, error)
            raise
        return connection

    def _idle_for(self, call: _Call) -> Connection | None:
        with self._changing:
            if self.closed:
                raise ClientClosed(CLOSED)
            if not self._idle:
                return None
            connection = self._idle.pop()
            connection.user = weakref.ref(call)
            connection.given_up = False
            return connection

    def _put_back(self, connection: Connection) -> None:
        with self._changing:
            is_ours = not self.closed and connection.number in self._all
            if is_ours:
                connection.idle_since = now = time.monotonic()
                self._idle.append(connection)
                # The last one that was put back is the first to be used.
                if self._idle[0].idle_since < now - IDLE_S:
                    least = self._idle.pop(0)
                    if least.unread:  # until a call over it was answered
                        self._idle.append(least)
            connection.user = nobody  # now: one that is neither idle nor used is lost
        if not is_ours:
            connection.close()

    def _lose(self, connection: Connection, error: BaseException) -> None:
        """Note that `error` has ended a call on this connection. Raises NodeUnavailable or
        ClientClosed in place of an OSError."""
        connection.user = nobody
        if self._all.get(connection.number) is connection and not self.closed:
            self._catch_up_soon()
        else:
            connection.close()
        if isinstance(error, OSError) and not isinstance(error, TiffinError):
            with self._changing:
                self._idle.clear()  # the others of a node that has gone are no better
            ends = self.closed or not self._ending.locked()
            raise ClientClosed(CLOSED) if ends else connection.gone(error) from error

    def _settle(self, connection: Connection, deadline: float) -> None:
        """Tell the node which connections are lost, and which leases are known."""
        lost = self._lost()[: messages.CONNECTIONS_MAX]
        numbers, live = [one.number for one in lost], list(self.lending.lent)
        raise_refusal(connection.call(messages.Settle(0, numbers, live), deadline))
        for one in lost:
            self._all.pop(one.number, None)
            one.close()

    def _lost(self) -> list[Connection]:
        if len(self._all) == len(self._idle):
            return []
        with self._changing:
            every = list(self._all.values())
            return [one for one in every if one.user() is None and one not in self._idle]

    def _open(self, call: _Call, deadline: float) -> Connection | None:
        """Another connection of the session, one at a time: a session that is new at the node, as
        after its restart, has another region, which all of them must know. None if it has all."""
        has_turn: list[bool] = []
        try:
            has_turn.extend(map(self._opening.acquire, (True,), (remaining_s(deadline),)))
            if not has_turn[0]:
                raise DeadlineExceeded("the node welcomed no connection within the deadline")
            if not self._has_room():
                return None
            connection = None
            while connection is None:
                connection = self._try_to_open(call, deadline)
            return connection
        except NodeUnavailable as error:
            if error.__cause__ is None and len(self._all) > len(self._lost()):
                return None  # the node takes no more of them, and others will be put back
            raise
        finally:
            if has_turn and has_turn[0]:
                self._opening.release()

    def _has_room(self) -> bool:
        """Whether another connection may be opened. Lost ones are closed for it, but for one, with
        which the session goes on; the node still has to hear of them."""
        open_ones = [one for one in list(self._all.values()) if not one.closed]
        if len(open_ones) < messages.CONNECTIONS_MAX:
            return True
        lost = [one for one in self._lost() if not one.closed]
        for one in lost if len(lost) < len(open_ones) else lost[1:]:
            one.close()
        return bool(lost)

    def _try_to_open(self, call: _Call, deadline: float) -> Connection | None:
        """None if an interrupt came between this session's beginning at the node and here, so that
        another has to begin."""
        if self.closed:
            raise ClientClosed(CLOSED)
        if calling().was_cut:
            raise ClientClosed(GIVEN_UP)
        number, version = next(self._numbers), messages.PROTOCOL_VERSION
        named = self._name, os.getpid(), self._session
        hello = messages.Hello(0, version, *named, connection=number)
        try:
            greet = partial(handshake, self._path, hello, remaining_s(deadline))
            sock, welcome, mapping = uninterrupted(greet, undo=Greeted.drop)
        except NodeUnavailable as error:
            if calling().was_cut:
                raise ClientClosed(GIVEN_UP) from error
            if self.mapping is not None and isinstance(error.__cause__, TimeoutError):
                raise DeadlineExceeded("the node welcomed no connection in time") from error
            raise
        if mapping is not None:
            self._begin(mapping, welcome.session)
        elif welcome.session != self._began:
            sock.close()
            self._session = secrets.token_bytes(16)
            return None
        with self._changing:
            mapping = self.mapping
            if not self.closed and mapping is not None:
                connection = Connection(self._path, number, sock, mapping)
                connection.user = weakref.ref(call)
                self._all[number] = connection
                return connection
        sock.close()
        self._unmap()
        raise ClientClosed(CLOSED)

    def _begin(self, mapping: Mapping, session: bytes) -> None:
        """The node has begun a session: what the one before had is gone."""
        old, self.mapping = self.mapping, mapping
        self._began = session
        self._end()
        self._owed = deque()
        self.lending.forget()
        if old is not None:
            old.close()

    # -- what is owed ----------------------------------------------------------------------------

    def _pay_over(self, connection: Connection) -> None:
        owed, deadline = self._owed, time.monotonic() + POST_S
        with self._paying:
            while owed and connection.post(owed[0], deadline):
                owed.popleft()

    def _catch_up_soon(self) -> None:
        if self._ending.locked() and not self._catching_up.locked():
            later(self._catch_up)

    def _catch_up(self) -> None:
        """Say what is owed and what is lost, in a thread of ours: the next call may come late."""
        while self._is_behind() and self._catching_up.acquire(blocking=False):
            try:
                if not self._catches_up():
                    return
            finally:
                self._catching_up.release()

    def _is_behind(self) -> bool:
        return self._ending.locked() and bool(self._owed or self._lost())

    def _catches_up(self) -> bool:
        """Whether the node has heard all by the last try."""
        health = Health()
        for _ in range(TRIES):
            try:
                self._try_to_take(time.monotonic() + TRY_S)
            except TiffinError as error:
                log.debug("the node has not heard yet what is owed: %s", error)
            if not self._is_behind():
                return True
            health.failed(now := time.monotonic())
            if self._ending.acquire(timeout=health.retry_at - now):
                self._ending.release()
                break
        return False

    def _try_to_take(self, deadline: float) -> None:
        """Take a connection and put it back."""
        call = _Call()
        self._put_back(self._take(call, deadline))
