"""The node over the network: authenticated connections in front of `Node.submit`.

Two differences from the unix socket (`server.py`). A client is a *session* of several connections:
all that say the same 16 random bytes in their hello share its leases, so that the ranges of one
lease can travel over several streams. And nobody maps the node's memory: a client reads and writes
ranges of a lease it holds, the node's own threads move the bytes, and every range is checked
against that lease. No address ever comes from the wire. Who moves bytes holds the extents it
touches, so a session that ends, or a lease that expires, frees nothing under a running transfer.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from functools import partial
from typing import TYPE_CHECKING

from tiffin.messenger.errors import FrameError, PeerLost
from tiffin.messenger.ration import Ration
from tiffin.messenger.tcp import Answer, Listener

from ..credentials import NONCE_BYTES, Credentials, is_loopback
from ..errors import (
    InvalidInput,
    NodeUnavailable,
    NotAuthenticated,
    ProtocolError,
    TiffinError,
    VersionMismatch,
)
from . import messages
from .arrival import Arrival
from .node import LEASES_MAX

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from tiffin.messenger.local import ByteArray
    from tiffin.messenger.transport import Grants

    from .node import Node
    from .records import Session

log = logging.getLogger(__name__)
log.addFilter(Ration())

# A session is one process: some dozens of streams at most.
SESSION_CONNECTIONS_MAX = 64
SESSIONS_MAX = 1024
SESSION_BYTES = 16
# A node answers parked requests at their deadline. This much later it is being closed.
_LATE_S = 5.0
# How often who waits for a decision looks whether the service is being closed.
_SLICE_S = 0.2
# A stranger who does not know the token does not guess it: three tries are for honest mistakes.
_REFUSALS_MAX = 3


class _RemoteSession:
    """A client's session and how many of its connections are open."""

    __slots__ = ("connections", "session")

    def __init__(self, session: Session) -> None:
        self.session = session
        self.connections = 0


class RemoteService:
    """Serves one node on a TCP address until `close`.

    Raises InvalidInput for an address beyond loopback without authentication, NodeUnavailable if
    the address can't be had.
    """

    def __init__(
        self, node: Node, address: tuple[str, int], credentials: Credentials | None = None
    ) -> None:
        self.node = node
        self.credentials = credentials or Credentials()
        if not self.credentials.authenticates and not is_loopback(address[0]):
            raise InvalidInput(
                f"{address[0]} can be reached from other machines: give a --token-file "
                "(or --tls-ca, for clients with certificates), or listen on 127.0.0.1"
            )
        self.closing = False
        self._lock = threading.Lock()
        self._sessions: dict[bytes, _RemoteSession] = {}
        try:
            self._listener = Listener(
                address, self._converse, tls=self.credentials.server_context()
            )
        except OSError as error:
            raise NodeUnavailable(f"can't listen on {address[0]}:{address[1]}: {error}") from error
        self.address = self._listener.address

    def close(self) -> None:
        """Cut every connection; returns when none of its threads touches the node any more."""
        self.closing = True
        self._listener.close()

    def _converse(self, peer: str) -> _Conversation:
        return _Conversation(self, peer)

    def join(self, name: bytes, hello: messages.Hello) -> Session:
        """The session called `name`, opened if there is none. Raises NodeUnavailable."""
        with self._lock:
            remote = self._sessions.get(name)
            if remote is None:
                if len(self._sessions) >= SESSIONS_MAX:
                    raise NodeUnavailable(f"this node has {SESSIONS_MAX} network clients already")
                session = self.node.connect(hello.name, hello.pid, remote=True)
                remote = self._sessions[name] = _RemoteSession(session)
            if remote.connections >= SESSION_CONNECTIONS_MAX:
                raise NodeUnavailable(f"a client has at most {SESSION_CONNECTIONS_MAX} connections")
            remote.connections += 1
            return remote.session

    def leave(self, name: bytes) -> None:
        """One of the session's connections has ended; the last one ends it."""
        with self._lock:
            remote = self._sessions[name]
            remote.connections -= 1
            if remote.connections:
                return
            del self._sessions[name]
        # Nothing but our own threads touches its extents, and those hold what they touch.
        self.node.disconnect(remote.session, fenced=True)


class _Conversation:
    """One connection; used by the listener's thread for it."""

    def __init__(self, service: RemoteService, peer: str) -> None:
        self.trusted = False
        self.grants: Grants = self
        self.hung_up: Callable[[], bool] = lambda: False
        self._service = service
        self._node = service.node
        self._peer = peer
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._session: Session | None = None
        self._session_name = b""
        self._last_lease = 0
        self._refusals = 0
        # Leases that were granted on this connection; some have ended.
        self._granted: set[int] = set()

    def greet(self) -> bytes:
        """The challenge that the client's hello has to answer."""
        challenge = messages.Challenge(0, self._nonce, messages.PROTOCOL_VERSION)
        return messages.encoder.encode(challenge)

    def message(self, body: bytes | memoryview) -> Answer:
        """Carry out one request."""
        try:
            request = messages.request_decoder.decode(body)
        except messages.NOT_A_MESSAGE as error:
            return self._refuse(0, ProtocolError(f"not a request: {error}"))
        if self._session is None:
            return self._hello(request)
        if isinstance(request, messages.Hello):
            return self._refuse(request.id, ProtocolError("a connection begins with one hello"))
        if isinstance(request, messages.Goodbye):
            return Answer(None)  # the client hangs up
        if isinstance(request, messages.Release) and not request.lease:
            request.lease, self._last_lease = self._last_lease, 0
            if not request.lease:
                return Answer(None)  # the lease before it was not granted: nothing to release
        return self._submit(self._session, request)

    def open(self, grant: int, *, writes: bool) -> AbstractContextManager[Sequence[ByteArray]]:
        """The extents of a lease of this session, held for a transfer. Raises GrantError."""
        assert self._session is not None  # the listener serves trusted conversations only
        return self._node.transfer(self._session, grant, writes=writes)

    def closed(self) -> None:
        """The connection has ended."""
        session, self._session = self._session, None
        if session is not None:
            self._node.give_back(session, self._granted)
            self._service.leave(self._session_name)

    def _hello(self, hello: messages.Request) -> Answer:
        try:
            if not isinstance(hello, messages.Hello):
                raise ProtocolError("a connection begins with one hello")
            if hello.version != messages.PROTOCOL_VERSION:
                raise VersionMismatch(
                    f"this node speaks protocol {messages.PROTOCOL_VERSION}, not {hello.version}"
                )
            self._authenticate(hello)
            self._session = self._service.join(hello.session, hello)
        except TiffinError as error:
            return self._refuse(hello.id, error)
        self._session_name = hello.session
        self.trusted = True
        proof = self._service.credentials.prove(b"node", hello.nonce, self._nonce)
        region_bytes = self._node.dram.region.nbytes
        welcome = messages.Welcome(
            hello.id, messages.PROTOCOL_VERSION, self._node.name, region_bytes, proof
        )
        return Answer(messages.encoder.encode(welcome))

    def _authenticate(self, hello: messages.Hello) -> None:
        if len(hello.session) != SESSION_BYTES or len(hello.nonce) != NONCE_BYTES:
            raise ProtocolError("a hello over the network names a session and a nonce, 16 B each")
        if not self._service.credentials.accepts(hello.proof, b"client", hello.nonce, self._nonce):
            raise NotAuthenticated(
                "this node takes clients that know its token; give the same token file to both"
                if self._service.credentials.token
                else "this node has no token, the client has one; give the same token file to both"
            )

    def _refuse(self, request_id: int, error: TiffinError) -> Answer:
        """Say why. A stranger who is refused has what is left of its time for another hello."""
        log.warning("refusing %s: %s", self._peer, error)
        self._last_lease = 0  # what is released behind this request was not granted
        if self._session is None:
            self._refusals += 1
            if self._refusals > _REFUSALS_MAX:
                raise FrameError("too many hellos that were refused")
        return Answer(messages.encoder.encode(messages.refusal(request_id, error)))

    def _submit(self, session: Session, request: messages.Request) -> Answer:
        arrival = Arrival(partial(self._undo, session))
        self._node.submit(session, request, arrival.put)
        reply = arrival.reply  # nearly always it is here at once
        if reply is None:
            reply = self._wait_for(arrival, getattr(request, "timeout_s", 0.0) + _LATE_S)
        if reply is None:
            if request.id == messages.UNAWAITED:
                return Answer(None)  # an answer would be taken for that to another request
            late = NodeUnavailable("the node did not decide in time; it may be closing")
            return self._refuse(request.id, late)
        grant = 0
        if isinstance(reply, messages.Leased | messages.Reserved):
            grant = reply.lease
            self._remember(session, grant)
        self._last_lease = grant
        if request.id == messages.UNAWAITED:
            return Answer(None, grant)
        return Answer(messages.encoder.encode(reply), grant)

    def _wait_for(self, arrival: Arrival, timeout_s: float) -> messages.AnyReply | None:
        """Raises PeerLost if the client has left: it must not keep a thread, and get room, for an
        hour."""
        deadline = time.monotonic() + timeout_s
        left = False
        while not (arrival.here(_SLICE_S) or self._service.closing or left):
            if time.monotonic() > deadline:
                break
            left = self.hung_up()
        reply = arrival.wait(0.0)
        if reply is None and left:
            raise PeerLost("the client left before its request was decided")
        return reply

    def _remember(self, session: Session, grant: int) -> None:
        """What a connection was granted ends with it: nobody knows whether its peer heard of it."""
        self._granted.add(grant)
        if len(self._granted) > 2 * LEASES_MAX:
            self._granted &= set(session.leases)

    def _undo(self, session: Session, reply: messages.AnyReply) -> None:
        """Too late: what it grants goes back. In a thread of its own: this one is in the node."""
        grant = getattr(reply, "lease", 0)
        if grant:
            threading.Thread(
                target=self._node.give_back, args=(session, {grant}), daemon=True
            ).start()
