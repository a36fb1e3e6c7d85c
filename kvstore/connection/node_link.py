"""How a client reaches its node: a call in the same process, or frames over a unix socket.

A link assigns request ids, carries one request and its reply, and has the mapping of the region in
which the node's blocks lie. It makes no decisions. After a timeout the reply may still come: if
that late reply grants a lease, the link gives the lease back, so that no lease stays without an
owner.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, Protocol

from tiffin.messenger import usage_gate
from tiffin.messenger.signal_safe import later, uninterrupted

from .. import deadlines
from ..deadlines import GRACE_S
from ..errors import (
    ClientBusy,
    ClientClosed,
    DeadlineExceeded,
    NodeUnavailable,
    ProtocolError,
    TiffinError,
)
from ..node.core import messages
from ..node.server.pending_reply import PendingReply
from .connection import HANDSHAKE_S, Connection, NodeAnswer, connected, raise_refusal
from .frame_queues import remaining_s
from .lease_lifetime import Lending
from .region_mapping import Mapping

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from ..node.core.records import Session
    from ..node.node import Node

    Bytes = NDArray[np.uint8]

log = logging.getLogger(__name__)
CLOSED = "this client is closed (a forked child has to open its own)"

# How long `close` waits for copies of other threads, and for a call in flight. After the first, it
# hangs up without a goodbye, so that the node keeps the blocks that they may still touch; the call
# fails then.
CLOSE_S, CALL_CLOSE_S = 5.0, 0.5
# How often to poll for the reply to a call that was interrupted.
_LISTEN_S = 0.05


class CallGate(usage_gate.UsageGate):
    """The gate around steps that touch the region, in any thread; after `close` they raise
    ClientClosed.

    If a client said goodbye while one of its threads still copies, that thread would write into
    memory that the node may have granted to another client by then.
    """

    def __init__(self) -> None:
        super().__init__(lambda: ClientClosed(CLOSED))


class NodeLink(Protocol):
    """The interface of a connection that the verbs need."""

    gate: CallGate

    @property
    def mapping(self) -> Mapping:
        """The node's DRAM region. Raises ClientClosed."""

    def call(self, request: messages.Request, timeout_s: float) -> NodeAnswer:
        """Send one request and wait for its reply. Raises the node's refusal, DeadlineExceeded,
        NodeUnavailable, ClientClosed, TierUnavailable (see `Mapping.of`)."""

    def post(self, request: messages.Request) -> None:
        """Send a request that gets no reply; does not wait for the node."""

    def close(self) -> None:
        """Say goodbye to the node and unmap the region."""


class LocalSession:
    """A session of a client in the node's own process; base of `LocalLink` and its asyncio
    counterpart."""

    def __init__(self, node: Node, name: str, *, owns_node: bool) -> None:
        self._node = node
        self._owns_node = owns_node
        self._mapping: Mapping | None
        self._mapping, self._session = joined(node, name)
        self.gate = CallGate()
        self._ids = count(1)
        self._closing = threading.Lock()
        self._lending = Lending(self.post)

    @property
    def mapping(self) -> Mapping:
        """See `NodeLink.mapping`."""
        if self._mapping is None:
            raise ClientClosed(CLOSED)
        return self._mapping

    def hand_in(self, request: messages.Request, take: Callable[[NodeAnswer], None]) -> None:
        """Hand a request to the node, which calls back `take` with the answer, in any thread. If
        the caller has given up by then, it drops the answer, and a lease that it grants goes
        back."""
        memory, lending = self.mapping.of(request), self._lending
        request.id = next(self._ids)
        self._node.hand_in(
            self._session,
            request,
            lambda reply: take(NodeAnswer(reply, lending.lend(memory, reply))),
        )

    def answered(self, request: messages.Request, answer: NodeAnswer) -> NodeAnswer:
        """The answer for the caller that waits for it. Raises the node's refusal, ClientClosed."""
        raise_refusal(answer.reply)
        self._lending.ended(request)
        _ = self.mapping  # raises ClientClosed: what was granted ended with the session
        return answer

    def post(self, request: messages.Request) -> None:
        """See `NodeLink.post`."""
        if self._mapping is not None:
            request.id = messages.UNAWAITED
            # A caller that gives room back may rely on it at once.
            self._node.hand_in(self._session, request, drop, waits=True)
            self._lending.ended(request)

    def end(self) -> None:
        """End the session; close the node if this link owns it, which may write blocks back to
        NVMe. Not in the main thread."""
        with self._closing:
            polite = self.gate.close(CLOSE_S)
            mapping, self._mapping = self._mapping, None
            if mapping is None:
                return
            self._lending.forget()
            mapping.close()
            self._node.disconnect(self._session, fenced=polite)
            if self._owns_node:
                self._node.close()


class LocalLink(LocalSession):
    """A client in the node's own process."""

    def call(self, request: messages.Request, timeout_s: float) -> NodeAnswer:
        """See `NodeLink.call`. A reply that comes after the timeout is dropped, and the lease that
        it grants goes back."""
        arrival: PendingReply[NodeAnswer] = PendingReply()
        try:
            self.hand_in(request, arrival.put)
            answer = arrival.wait(deadlines.left_s(timeout_s + GRACE_S))
        except BaseException:
            arrival.give_up()  # at once, and not only when the traceback is collected
            raise
        if answer is None:
            raise DeadlineExceeded(f"no answer within {timeout_s} s")
        return self.answered(request, answer)

    def close(self) -> None:
        """End the session; close the node if this link owns it."""
        uninterrupted(self.end)


def joined(node: Node, name: str) -> tuple[Mapping, Session]:
    """A mapping of the node's region and a new session, for a client in the node's process."""

    def join() -> tuple[Mapping, Session]:
        mapping = Mapping.beside(node.dram.region)
        return mapping, node.connect(name, os.getpid())

    def leave(made: tuple[Mapping, Session]) -> None:
        made[0].close()
        node.disconnect(made[1], fenced=True)

    return uninterrupted(join, undo=leave)


def drop(reply: messages.AnyReply) -> None:
    """Drop the reply to a post; log a refusal."""
    if isinstance(reply, messages.Refused):
        log.debug("unawaited request refused: %s: %s", reply.error, reply.message)


class SocketLink:
    """A client's link to a node daemon on this host, over its unix socket. Calls from several
    threads take turns; open one client per thread to let them wait in parallel.

    When the node goes away, the call that notices raises NodeUnavailable, and the next call
    reconnects: the client finds a restarted node by itself. Leases do not survive.
    """

    def __init__(self, path: Path, name: str) -> None:
        self._path = path
        self._name = name
        self.gate = CallGate()
        self._ids = count(1)
        self._lock = threading.Lock()  # held by the thread whose call is in flight
        self._closing = threading.Lock()
        self._closed = False
        self._connection: Connection | None = None
        self._connect(HANDSHAKE_S)
        open_links.add(self)

    def _connect(self, timeout_s: float) -> Connection:
        connect = partial(connected, self._path, self._name, timeout_s)
        old, connection = self._connection, uninterrupted(connect, undo=Connection.close)
        self._connection = connection
        if old is not None:
            old.mapping.close()  # of the node that went away
        return connection

    @property
    def mapping(self) -> Mapping:
        """See `NodeLink.mapping`."""
        connection = self._connection
        if self._closed or connection is None:
            raise ClientClosed(CLOSED)
        return connection.mapping

    def call(self, request: messages.Request, timeout_s: float) -> NodeAnswer:
        """See `NodeLink.call`."""
        wait_s = deadlines.left_s(timeout_s + GRACE_S)
        deadline = time.monotonic() + wait_s
        taken: list[bool] = []
        connection: Connection | None = None
        try:
            taken.extend(map(self._lock.acquire, (True,), (wait_s,)))
            if not taken[0]:
                raise ClientBusy("calls of other threads took all the time; open one client each")
            if self._closed:
                raise ClientClosed(CLOSED)
            connection = self._connection
            if connection is None or connection.broken:
                connection = self._connect(remaining_s(deadline))
            connection.mapping.of(request)  # before the send: an error leaves no reservation
            request.id = next(self._ids)
            connection.send(request, deadline)
            answer = connection.receive(request, deadline)
            raise_refusal(answer.reply)
            connection.ended(request)
            return answer
        except ProtocolError as error:
            self._broken(connection, error)
            raise
        except TiffinError:
            raise
        except OSError as error:
            raise self._broken(connection, error) from error
        except BaseException:
            if connection is not None:
                later(partial(self._listen, connection, deadline))
            raise
        finally:
            if taken and taken[0]:
                self._lock.release()

    def _listen(self, connection: Connection, until: float) -> None:
        """Poll for the reply to a call that was interrupted, unless another call receives it: the
        reply may grant a lease, which then goes back."""
        while not connection.broken and time.monotonic() < until:
            if self._lock.acquire(blocking=False):
                try:
                    connection.hear()
                except OSError:
                    return
                finally:
                    self._lock.release()
            time.sleep(_LISTEN_S)

    def post(self, request: messages.Request) -> None:
        """See `NodeLink.post`. Does not wait for a turn: a thread may give back the very room that
        another thread's call waits for. A broken connection has no lease left to give back."""
        connection = self._connection
        if connection is not None:
            connection.post(request)

    def close(self) -> None:
        """Say goodbye and unmap."""
        uninterrupted(self._close)

    def _close(self) -> None:
        with self._closing:
            if self._closed:
                return
            polite = self.gate.close(CLOSE_S)
            self._closed = True
            has_turn = self._lock.acquire(timeout=CALL_CLOSE_S)
            connection, self._connection = self._connection, None
            if connection is not None:
                connection.close(polite=polite)
            if has_turn:
                self._lock.release()

    def forget(self) -> None:
        """In a forked child: close the link, whose connection and region are the parent's. The
        child does not even have the region mapped (see `Region`): touching it would end the
        process."""
        self._lock, self._closing, self.gate = threading.Lock(), threading.Lock(), CallGate()
        self._closed = True
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.forget()

    def _broken(self, connection: Connection | None, why: object) -> TiffinError:
        if self._closed:
            return ClientClosed(CLOSED)
        if connection is not None and not connection.broken:
            connection.broken = True
            later(connection.hang_up)
        return connection.gone(why) if connection else NodeUnavailable(str(why))


open_links: weakref.WeakSet[Any] = weakref.WeakSet()  # of both clients, for `_forget_all`


def _forget_all() -> None:
    for link in list(open_links):
        link.forget()


os.register_at_fork(after_in_child=_forget_all)
