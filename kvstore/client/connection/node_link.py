"""How a client reaches its node: a call in the same process, or frames over a unix socket.

A link carries requests and their replies, and has the mapping of the region in which the node's
blocks lie. It makes no decisions. A call that is over before its reply has come may still be
granted a lease: the link gives that back, so that no lease stays without an owner.
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
from tiffin.messenger.signal_safe import Forsaken, uninterrupted
from tiffin.messenger.tcp.pending_connect import given_up_with

from ... import deadlines
from ...deadlines import GRACE_S
from ...errors import ClientClosed, DeadlineExceeded
from ...node.core import messages
from ...node.server.pending_reply import PendingReply
from .connection import NodeAnswer, raise_refusal
from .connections import CLOSED, Connections
from .lease_lifetime import Lending
from .region_mapping import Mapping

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from ...node.core.records import Session
    from ...node.node import Node

    Bytes = NDArray[np.uint8]

log = logging.getLogger(__name__)
# How long `close` waits for copies of other threads, and for a call in flight. After the first, it
# hangs up without a goodbye, so that the node keeps the blocks that they may still touch; the call
# fails then.
CLOSE_S, CALL_CLOSE_S = 5.0, 0.5
_LOOK_S = 0.001  # how often `close` looks for calls that are in flight


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


class LocalLink:
    """A client in the node's own process."""

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

    def call(self, request: messages.Request, timeout_s: float) -> NodeAnswer:
        """See `NodeLink.call`. A reply that comes after the timeout is dropped, and the lease that
        it grants goes back."""
        arrival: PendingReply[NodeAnswer] = PendingReply()
        try:
            with given_up_with(arrival.give_up):
                self._hand_in(request, arrival.put)
                answer = arrival.wait(deadlines.left_s(timeout_s + GRACE_S))
        except BaseException:
            arrival.give_up()  # at once, and not only when the traceback is collected
            raise
        if answer is None:
            raise DeadlineExceeded(f"no answer within {timeout_s} s")
        raise_refusal(answer.reply)
        self._lending.ended(request)
        _ = self.mapping  # raises ClientClosed: what was granted ended with the session
        return answer

    def _hand_in(self, request: messages.Request, take: Callable[[NodeAnswer], None]) -> None:
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

    def post(self, request: messages.Request) -> None:
        """See `NodeLink.post`."""
        if self._mapping is not None:
            request.id = messages.UNAWAITED
            # A caller that gives room back may rely on it at once.
            self._node.hand_in(self._session, request, drop, waits=True)
            self._lending.ended(request)

    def close(self) -> None:
        """End the session; close the node if this link owns it, which may write blocks back to
        NVMe."""
        uninterrupted(self._end)

    def _end(self) -> None:
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
    """A client's link to a node daemon on this host, over its unix socket. Calls of several threads
    go over connections of their own.

    When the node goes away, the call that notices raises NodeUnavailable, and the next call
    reconnects: the client finds a restarted node by itself. Leases do not survive.
    """

    def __init__(self, path: Path, name: str) -> None:
        self.gate = CallGate()
        self._connections = Connections(path, name)
        Forsaken.when(self, partial(_forsaken, self._connections))
        open_links.add(self)

    @property
    def mapping(self) -> Mapping:
        """See `NodeLink.mapping`."""
        mapping = self._connections.mapping
        if self._connections.closed or mapping is None:
            raise ClientClosed(CLOSED)
        return mapping

    def call(self, request: messages.Request, timeout_s: float) -> NodeAnswer:
        """See `NodeLink.call`."""
        deadline = time.monotonic() + deadlines.left_s(timeout_s + GRACE_S)
        connections = self._connections
        answer = connections.call(request, deadline)
        raise_refusal(answer.reply)
        connections.lending.ended(request)
        return answer

    def post(self, request: messages.Request) -> None:
        """See `NodeLink.post`."""
        self._connections.post(request)
        self._connections.lending.ended(request)

    def close(self) -> None:
        """Say goodbye and unmap. Waits for copies of other threads, and for their calls; after an
        interrupt, close it again."""
        polite = self.gate.close(CLOSE_S)
        until = time.monotonic() + CALL_CLOSE_S
        while self._connections.busy() and time.monotonic() < until:
            time.sleep(_LOOK_S)
        self._connections.close(polite=polite)

    def forget(self) -> None:
        """In a forked child: close the link, whose connections and region are the parent's. The
        child does not even have the region mapped (see `Region`): touching it would end the
        process."""
        self.gate = CallGate()
        self._connections.forget()


def _forsaken(connections: Connections) -> None:
    """Close the connections of a link that was dropped without `close`, once its leases have ended.
    Without a goodbye the node would keep later grants until this process is dead."""
    connections.lending.outlive(lambda: connections.close(polite=True))


open_links: weakref.WeakSet[Any] = weakref.WeakSet()  # for `_forget_all`


def _forget_all() -> None:
    for link in list(open_links):
        link.forget()


os.register_at_fork(after_in_child=_forget_all)
