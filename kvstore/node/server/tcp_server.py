"""The node over the network: authenticated connections in front of `Node.submit`.

Two differences from the unix socket (`unix_server.py`). A client is a *session* of several
connections: all connections with the same 16 random bytes in their hello share the session's
leases, so that the ranges of one lease can travel over several streams. And clients do not map the
node's memory: a client reads and writes ranges of a lease it holds, the node's own threads move the
bytes, and the node checks every range against that lease. Clients never send memory addresses. A
transfer holds the extents it accesses, so the end of a session, or of a lease that expires, frees
no extent of an in-flight transfer.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from functools import partial
from typing import TYPE_CHECKING

from tiffin.messenger.errors import FrameError, PeerLost
from tiffin.messenger.log_rate_limit import Ration
from tiffin.messenger.tcp.tcp_client import Answer, Listener
from tiffin.messenger.wire.frame_tags import FrameSeals, Seal, can_tag_bytes

from ...credentials import (
    NONCE_BYTES,
    TAGS_MISSING,
    Credentials,
    format_address,
    format_socket,
    is_loopback,
    parse_address,
)
from ...errors import (
    InvalidInput,
    NodeUnavailable,
    NotAuthenticated,
    ProtocolError,
    TiffinError,
)
from ...token_proofs import Greeting, same
from ..core import messages
from ..node import LEASES_MAX
from .pending_reply import PendingReply

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from tiffin.messenger.shm.host_copy import ByteArray
    from tiffin.messenger.transport import Grants

    from ..core.records import Session
    from ..node import Node

log = logging.getLogger(__name__)
log.addFilter(Ration())

# A session belongs to one process: some dozens of streams at most.
SESSION_CONNECTIONS_MAX = 64
SESSIONS_MAX = 1024
SESSION_BYTES = 16
# A node answers parked requests at their deadline. If a reply is this late, the node is closing.
_LATE_S = 5.0
# Interval at which a connection's thread that waits for a reply checks whether the service closes.
_SLICE_S = 0.2
# Refused hellos per connection: three retries allow for honest mistakes; a client without the token
# cannot guess it.
_REFUSALS_MAX = 3


class _RemoteSession:
    """A client's session and the number of its open connections."""

    __slots__ = ("connections", "session")

    def __init__(self, session: Session) -> None:
        self.session = session
        self.connections = 0


class RemoteService:
    """Serves one node on a TCP address until `close`. `advertise` is the address that clients use,
    if it differs from `address`.

    Raises InvalidInput for an address beyond loopback without authentication, NodeUnavailable if
    it cannot listen on the address.
    """

    def __init__(
        self,
        node: Node,
        address: tuple[str, int],
        credentials: Credentials | None = None,
        advertise: tuple[str, int] | None = None,
    ) -> None:
        self.node = node
        self.credentials = credentials or Credentials()
        if not self.credentials.authenticates and not is_loopback(address[0]):
            raise InvalidInput(
                f"{address[0]} can be reached from other machines: give a --token-file "
                "(or --tls-ca, for clients with certificates), or listen on 127.0.0.1"
            )
        self.binding = self.credentials.server_binding()
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
        self.advertised = format_address(advertise or self.address)

    def close(self) -> None:
        """Close all connections; returns when no thread of the service accesses the node."""
        self.closing = True
        self._listener.close()

    def _converse(self, peer: str) -> _Conversation:
        return _Conversation(self, peer)

    def join(self, name: bytes, hello: messages.Hello) -> Session:
        """Add a connection to the session `name`; opens it if new. Raises NodeUnavailable."""
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
        """Remove a connection that has ended from its session; the last one ends the session."""
        with self._lock:
            remote = self._sessions[name]
            remote.connections -= 1
            if remote.connections:
                return
            del self._sessions[name]
        # Only this node's threads access its extents, and their transfers hold them.
        self.node.disconnect(remote.session, fenced=True)


class _Conversation:
    """One connection; used only by the listener's thread for this connection."""

    def __init__(self, service: RemoteService, peer: str) -> None:
        self.trusted = False
        self.grants: Grants = self
        self.hung_up: Callable[[], bool] = lambda: False
        self.reached = ("", 0)
        self._service = service
        self._node = service.node
        self._peer = peer
        nonce = secrets.token_bytes(NONCE_BYTES)
        challenge = messages.Challenge(0, nonce, messages.PROTOCOL_VERSION)
        self._challenge = messages.encoder.encode(challenge)
        self._session: Session | None = None
        self._session_name = b""
        self._last_lease = 0
        self._refusals = 0
        # Leases granted on this connection; some may have ended.
        self._granted: set[int] = set()

    def greet(self) -> bytes:
        """The challenge that the client's proof must cover."""
        return self._challenge

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
                return Answer(None)  # the last request got no lease: nothing to release
        return self._submit(self._session, request)

    def open(self, grant: int, *, writes: bool) -> AbstractContextManager[Sequence[ByteArray]]:
        """The extents of a lease of this session, held for a transfer. Raises GrantError."""
        assert self._session is not None  # the listener serves trusted conversations only
        return self._node.transfer(self._session, grant, writes=writes)

    def closed(self) -> None:
        """End the connection's leases, and the session with its last connection."""
        session, self._session = self._session, None
        if session is not None:
            self._node.give_back(session, self._granted)
            self._service.leave(self._session_name)

    def _hello(self, hello: messages.Request) -> Answer:
        try:
            if not isinstance(hello, messages.Hello):
                raise ProtocolError("a connection begins with one hello")
            messages.check_version(hello.version, "the client", "this node")
            greeting = self._authenticate(hello)
            self._session = self._service.join(hello.session, hello)
        except TiffinError as error:
            return self._refuse(hello.id, error)
        self._session_name = hello.session
        self.trusted = True
        return self._welcome(hello, greeting)

    def _authenticate(self, hello: messages.Hello) -> Greeting | None:
        """Verify the client's proof; returns the greeting, or None without a token. Raises
        NotAuthenticated, or ProtocolError for a malformed hello."""
        if len(hello.session) != SESSION_BYTES or len(hello.nonce) != NONCE_BYTES:
            raise ProtocolError("a hello over the network names a session and a nonce, 16 B each")
        service = self._service
        token = service.credentials.token
        if not token:
            if hello.proof:
                raise NotAuthenticated(
                    "this node has no token, the client has one; give the same token file to both"
                )
            return None
        said = messages.without_proof(hello)
        greeting = Greeting(token, service.binding, self._challenge, said)
        if not same(greeting.client_proof(), hello.proof):
            raise NotAuthenticated(
                "this node takes clients that know its token; give the same token file to both"
                + (" (or another end of TLS stands between them)" if service.binding else "")
            )
        self._check_address(hello)
        if hello.of_bytes and not can_tag_bytes():
            raise NotAuthenticated(f"the client wants bytes to have tags, and here {TAGS_MISSING}")
        return greeting

    def _check_address(self, hello: messages.Hello) -> None:
        """Check that the client meant to connect to this node, to detect a relay in between. Either
        the address that the client reached is this connection's local address, or the client was
        configured with this node's advertised address and its connection is forwarded. Raises
        NotAuthenticated."""
        reached, advertised = format_socket(self.reached), self._service.advertised
        if hello.reached == reached or _normal(hello.dialled) == _normal(advertised):
            return
        raise NotAuthenticated(
            f"the client has connected to {hello.dialled or 'nobody'}, which led it to "
            f"{hello.reached or 'nowhere'}, and this node was reached at {reached} and is known as "
            f"{advertised}: somebody in between passes on what they say. If that is a forwarded "
            f"port of yours, start the node with --advertise {hello.dialled or 'HOST:PORT'}"
        )

    def _welcome(self, hello: messages.Hello, greeting: Greeting | None) -> Answer:
        service = self._service
        welcome = messages.Welcome(
            hello.id,
            messages.PROTOCOL_VERSION,
            self._node.name,
            self._node.dram.region.nbytes,
            address=service.advertised,
            of_bytes=greeting is not None and (hello.of_bytes or service.credentials.of_bytes),
        )
        if greeting is None:
            return Answer(messages.encoder.encode(welcome))
        said = messages.without_proof(welcome)
        welcome.proof = greeting.node_proof(said)
        to_node, to_client = greeting.keys(said)
        seals = FrameSeals(Seal(to_client), Seal(to_node), welcome.of_bytes)
        return Answer(messages.encoder.encode(welcome), seals=seals)

    def _refuse(self, request_id: int, error: TiffinError) -> Answer:
        """Reply with a refusal. An unauthenticated client may send another hello, within its
        remaining time. Raises FrameError after too many."""
        log.warning("refusing %s: %s", self._peer, error)
        self._last_lease = 0  # a release of 0 after this request has no lease to end
        if self._session is None:
            self._refusals += 1
            if self._refusals > _REFUSALS_MAX:
                raise FrameError("too many hellos that were refused")
        return Answer(messages.encoder.encode(messages.refusal(request_id, error)))

    def _submit(self, session: Session, request: messages.Request) -> Answer:
        arrival: PendingReply[messages.AnyReply] = PendingReply(partial(self._undo, session))
        self._node.submit(session, request, arrival.put)
        reply = arrival.reply  # nearly always set at once
        if reply is None:
            reply = self._wait_for(arrival, getattr(request, "timeout_s", 0.0) + _LATE_S)
        if reply is None:
            if request.id == messages.UNAWAITED:
                return Answer(None)  # the client would take a reply for that to another request
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

    def _wait_for(
        self, arrival: PendingReply[messages.AnyReply], timeout_s: float
    ) -> messages.AnyReply | None:
        """Wait for the reply; None after the timeout or when the service closes. Raises PeerLost if
        the client has disconnected: its request must not keep a thread, and later get room, for up
        to an hour."""
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
        """Note a lease, which ends with the connection that it was granted on: the node cannot know
        whether the client received the reply."""
        self._granted.add(grant)
        if len(self._granted) > 2 * LEASES_MAX:
            self._granted &= set(session.leases)

    def _undo(self, session: Session, reply: messages.AnyReply) -> None:
        """Give back the lease of a reply that came too late; in a new thread, because this callback
        runs under the node's lock."""
        grant = getattr(reply, "lease", 0)
        if grant:
            threading.Thread(
                target=self._node.give_back, args=(session, {grant}), daemon=True
            ).start()


def _normal(address: str) -> tuple[str, int]:
    """An address in canonical form: host names in lower case, IP addresses in one notation."""
    try:
        host, port = parse_address(address)
    except InvalidInput:
        return "", 0
    try:
        return format_socket((host, port)), port
    except ValueError:
        return host.rstrip(".").lower(), port
