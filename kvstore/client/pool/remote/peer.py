"""One remote node, as a client or another node sees it.

A peer is a session of several streams (`server/tcp_server.py` has the other end). A read is one
round trip where one stream is enough: the lease, the ranges to read of it and its release leave
together, and the block bytes are received into their targets. The reader verifies every header and,
by policy, every segment as it arrives, while its bytes are in the processor's cache.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import ssl
import threading
import time
from collections import deque
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING, Any

from tiffin.messenger.budget import PEER_BYTES, Budget
from tiffin.messenger.errors import Abandoned, GrantError, MessengerError, PeerLost, TransferTimeout
from tiffin.messenger.errors import FrameError as BadFrame
from tiffin.messenger.health import Health
from tiffin.messenger.signal_safe import later
from tiffin.messenger.tcp import tcp_client
from tiffin.messenger.tcp.pending_connect import Caller
from tiffin.messenger.wire.frame_tags import FrameSeals, Seal, can_tag_bytes

from .... import deadlines
from ....credentials import (
    NONCE_BYTES,
    TAGS_MISSING,
    Credentials,
    binding_of,
    format_address,
    format_socket,
)
from ....deadlines import GRACE_S
from ....errors import (
    ClientClosed,
    DeadlineExceeded,
    NodeUnavailable,
    NotAuthenticated,
    ProtocolError,
    TiffinError,
)
from ....node.core import messages
from ....token_proofs import Greeting, same
from ...connection.connection import raise_refusal
from .nixl_reads import OneSided
from .reply_checks import check_reply

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from tiffin.messenger.tcp.stream import Stream

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0
# A post must not hold up its caller. One that times out is sent with the next request or, if there
# is none, so often by a thread that rests as `Health` tells: then every lease has expired (30 s).
POST_TIMEOUT_S = GRACE_S
PAY_TRIES = 7
# The most posts that wait for one node: a node with more of them will not recover.
OWED_MAX = 1024


class as_ours:  # noqa: N801 - used as `contextlib.suppress` is
    """A context manager that turns the messenger's errors into the store's. A class: a generator
    would cost every small read a microsecond."""

    __slots__ = ("_address",)

    def __init__(self, address: str) -> None:
        self._address = address

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            ours = _ours(self._address, error)
            if ours is not None:
                raise ours from error


def _ours(address: str, error: BaseException) -> TiffinError | None:
    """The store's error to raise instead; None if `error` is not the messenger's."""
    if isinstance(error, Abandoned):
        return ClientClosed(f"not asked any more: {error}")
    if isinstance(error, TransferTimeout):
        return DeadlineExceeded(f"the node at {address} did not answer in time: {error}")
    if isinstance(error, PeerLost):
        if _refused_certificate(error.__cause__):
            return NotAuthenticated(
                f"the node at {address} and we don't take each other's certificates: {error}"
            )
        return NodeUnavailable(f"lost the node at {address}: {error}")
    if isinstance(error, (BadFrame, *messages.NOT_A_MESSAGE)):
        return ProtocolError(f"the node at {address} sent garbage: {error}")
    if isinstance(error, GrantError):
        return NodeUnavailable(f"the node at {address} took a lease back: {error}")
    if isinstance(error, MessengerError):
        return NodeUnavailable(f"the node at {address}: {error}")
    return None


def _refused_certificate(error: BaseException | None) -> bool:
    """Whether TLS ended because one side's certificate is missing or not of the right CA."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return True
    reason = getattr(error, "reason", None) or ""
    return isinstance(error, ssl.SSLError) and any(w in reason for w in ("CERTIFICATE", "_CA"))


class Peer:
    """Connections to one node. Thread-safe; connects when it is first used."""

    def __init__(
        self,
        address: tuple[str, int],
        credentials: Credentials,
        name: str = "",
        *,
        streams_max: int = 8,
        nixl: bool = False,
    ) -> None:
        self.address = address
        self.label = format_address(address)
        self.region_bytes = 0
        self._credentials = credentials
        self._tls = credentials.client_context()
        self._name = name
        # The id of this session: all streams whose hello has it share their leases.
        self._session = secrets.token_bytes(16)
        self._ids = count(1)
        self._patience = _Patience()
        # Posts that could not be sent in time, to be retried.
        self._owed: deque[bytes] = deque(maxlen=OWED_MAX)
        self._paying = threading.Lock()
        self._closed = threading.Event()
        # For all large reads from this node: a node that hangs must not take the whole in-flight
        # budget from the others.
        self.budget = Budget(PEER_BYTES)
        self.transport = tcp_client.TcpTransport(self._open, streams_max=streams_max)
        self.one_sided = OneSided(self.label, self.call, self.transport) if nixl else None

    def close(self) -> None:
        """Close all connections: the node ends the session with the last one. Requests in flight
        fail at once; returns when no thread waits for the node any more."""
        self._closed.set()
        self.cut()
        if self.one_sided is not None:
            self.one_sided.forget()
        self.transport.close()

    def cut(self) -> None:
        """Cut all connections, when the node is taken for dead: requests in flight fail at once."""
        self.transport.cut()

    def stream(
        self, deadline: float, connect_s: float = CONNECT_TIMEOUT_S
    ) -> AbstractContextManager[Stream]:
        """As `TcpTransport.stream`. A connect times out after `connect_s`; a stream that other
        threads use is waited for until the deadline: that it is busy is no sign of an unhealthy
        node."""
        if connect_s == CONNECT_TIMEOUT_S and not self._owed:
            return self.transport.stream(deadline)
        return self._special_stream(deadline, connect_s)

    @contextmanager
    def _special_stream(self, deadline: float, connect_s: float) -> Iterator[Stream]:
        """A stream with a shorter connect timeout, or one that first sends the posts that could not
        be sent before."""
        owed: list[bytes] = []
        self._patience.connect_s = connect_s
        try:
            with self.transport.stream(deadline) as stream:
                self._patience.connect_s = CONNECT_TIMEOUT_S
                with contextlib.suppress(IndexError):  # until this or another thread has all
                    while True:
                        owed.append(self._owed.popleft())
                for message in owed:
                    stream.message(message)
                yield stream
        except BaseException:
            # To send a post twice does no harm: leases and generations are never reused.
            self._owed.extend(owed)
            raise
        finally:
            self._patience.connect_s = CONNECT_TIMEOUT_S

    # -- connecting ------------------------------------------------------------------------------

    def _open(self, deadline: float) -> Stream:
        """Open a stream and do the handshake; the transport's pool can cut it meanwhile. Raises
        NotAuthenticated, VersionMismatch, and the messenger's errors."""
        deadline = min(deadline, time.monotonic() + self._patience.connect_s)
        stream = tcp_client.connect(
            self.address, deadline, tls=self._tls, server_hostname=self.address[0]
        )
        try:
            self._greet(stream, deadline)
        except BaseException:
            stream.close()
            raise
        return stream

    def _greet(self, stream: Stream, deadline: float) -> None:
        challenged = stream.receive_message(deadline)
        challenge = messages.reply_decoder.decode(challenged)
        if isinstance(challenge, messages.Refused):
            raise_refusal(challenge)
        if not isinstance(challenge, messages.Challenge):
            raise ProtocolError(f"{self.label} is not a Tiffin node: it sent no challenge")
        messages.check_version(challenge.version, f"the node at {self.label}", "this client")
        hello = messages.Hello(
            1,
            messages.PROTOCOL_VERSION,
            self._name,
            os.getpid(),
            self._session,
            secrets.token_bytes(NONCE_BYTES),
            dialled=format_address(self.address),
            reached=format_socket(stream.peer_address),
            of_bytes=self._credentials.of_bytes,
        )
        greeting: Greeting | None = None
        if self._credentials.token:
            binding = binding_of(stream.peer_certificate)
            said = messages.without_proof(hello)
            greeting = Greeting(self._credentials.token, binding, challenged, said)
            hello.proof = greeting.client_proof()
        stream.message(messages.encoder.encode(hello))
        stream.flush(deadline)
        welcome = raise_refusal(messages.reply_decoder.decode(stream.receive_message(deadline)))
        if not isinstance(welcome, messages.Welcome):
            raise ProtocolError(f"{self.label} did not answer a hello with a welcome")
        self._believe(stream, welcome, greeting)
        self.region_bytes = welcome.region_bytes

    def _believe(
        self, stream: Stream, welcome: messages.Welcome, greeting: Greeting | None
    ) -> None:
        """Verify the node's proof of the token, and from then on protect all frames by tags. Raises
        NotAuthenticated."""
        if greeting is None:
            if welcome.proof:
                raise NotAuthenticated(f"the node at {self.label} has a token, and we have none")
            return
        said = messages.without_proof(welcome)
        if not same(greeting.node_proof(said), welcome.proof):
            raise NotAuthenticated(f"the node at {self.label} does not know our token")
        if self._credentials.of_bytes and not welcome.of_bytes:
            raise NotAuthenticated(f"the node at {self.label} sends bytes of blocks without tags")
        if welcome.of_bytes and not can_tag_bytes():
            raise NotAuthenticated(
                f"the node at {self.label} wants bytes to have tags, and here {TAGS_MISSING}"
            )
        to_node, to_client = greeting.keys(said)
        stream.protect(FrameSeals(Seal(to_node), Seal(to_client), welcome.of_bytes))

    # -- messages --------------------------------------------------------------------------------

    def call(self, request: messages.Request, timeout_s: float) -> Any:
        """Send one request and wait for its reply. Raises the node's refusal, DeadlineExceeded,
        NodeUnavailable."""
        return raise_refusal(self.exchange(request, timeout_s))

    def exchange(self, request: messages.Request, timeout_s: float) -> messages.AnyReply:
        """As `call`, but returns a refusal: a node that refuses is healthy."""
        deadline = time.monotonic() + deadlines.left_s(timeout_s + GRACE_S)
        with as_ours(self.label), self.stream(deadline) as stream:
            self.queue(stream, request)
            stream.flush(deadline)
            return self.receive(stream, request, deadline)

    def post(self, request: messages.Request) -> None:
        """Send a request that gets no reply; a node that is gone has released every lease already.
        A call that was given up also posts, to give back what it got, and takes no longer for that.
        A node that is only slow gets the request with the next one, or by a retry: else it would
        hold the blocks of a lease until that expires, and miss the report of a corrupt block."""
        request.id = messages.UNAWAITED
        message = messages.encoder.encode(request)
        deadline = time.monotonic() + deadlines.left_s(POST_TIMEOUT_S)
        try:
            with Caller().in_this_thread(), as_ours(self.label), self.stream(deadline) as stream:
                stream.message(message)
                stream.flush(deadline)
        except TiffinError as error:
            log.debug("not sent to %s yet: %s", self.label, error)
            self._owed.append(message)
            later(self._pay)

    def _pay(self) -> None:
        """Retry the posts that could not be sent, for a node that gets no request meanwhile. One
        thread at a time."""
        if not self._paying.acquire(blocking=False):
            return
        paid = False
        try:
            health = Health()
            for _ in range(PAY_TRIES):
                now = time.monotonic()
                health.failed(now)
                if self._closed.wait(health.retry_at - now):
                    return
                paid = not self._owed
                if paid:
                    break
                deadline = time.monotonic() + POST_TIMEOUT_S
                told, ours = contextlib.suppress(TiffinError), as_ours(self.label)
                with told, ours, self.stream(deadline) as stream:
                    stream.flush(deadline)
        finally:
            self._paying.release()
        if paid and self._owed:  # owed since the last look, by a thread that found this one paying
            later(self._pay)

    def queue(self, stream: Stream, request: messages.Request) -> None:
        """Number a request and queue it on a stream."""
        request.id = next(self._ids)
        stream.message(messages.encoder.encode(request))

    def receive(
        self, stream: Stream, request: messages.Request, deadline: float
    ) -> messages.AnyReply:
        """The reply to `request`, the oldest unanswered one of this stream; `check_reply` validates
        it. Raises the messenger's FrameError."""
        body = stream.receive_message(deadline)
        reply: messages.AnyReply = messages.reply_decoder.decode(body)
        if isinstance(reply, messages.Refused) and reply.id == messages.UNAWAITED:
            return reply  # the node could not decode the request, so it does not know its id
        if reply.id != request.id:
            raise BadFrame(f"a reply to request {reply.id} instead of {request.id}")
        if not check_reply(request, reply):
            raise BadFrame(f"{type(reply).__name__} does not answer {type(request).__name__}")
        return reply


class _Patience(threading.local):
    """The connect timeout of this thread: the transport does not pass it to `Peer._open`."""

    connect_s = CONNECT_TIMEOUT_S
