"""One remote node, as a client or another node sees it.

A peer is a session of several streams (`node/remote.py` has the other end). Reading is one round
trip where one stream is enough: the lease, the ranges to read of it and its release leave together,
and the block bytes are received where they belong. Every header and, by policy, every segment is
checked as it arrives, while its bytes are in the processor's cache.
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

from tiffin.messenger import tcp
from tiffin.messenger.budget import PEER_BYTES, Budget
from tiffin.messenger.errors import Abandoned, GrantError, MessengerError, PeerLost, TransferTimeout
from tiffin.messenger.errors import FrameError as BadFrame
from tiffin.messenger.opening import Caller

from ..credentials import NONCE_BYTES, Credentials
from ..errors import (
    ClientClosed,
    DeadlineExceeded,
    NodeUnavailable,
    NotAuthenticated,
    ProtocolError,
    TiffinError,
)
from ..link import GRACE_S, check_version, raise_refusal
from ..node import messages
from .onesided import OneSided
from .replies import check_reply

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from tiffin.messenger.stream import Stream

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0
# What is only posted must not keep its caller: it goes with the next request instead.
POST_TIMEOUT_S = GRACE_S
# More are owed to no node that will ever be well again.
OWED_MAX = 1024


class as_ours:  # noqa: N801 - used as `contextlib.suppress` is
    """A context that turns the messenger's errors into the store's. A class: a generator would cost
    every small read a microsecond."""

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
    """What to raise instead; None for what is not the messenger's."""
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
        self.label = f"{address[0]}:{address[1]}"
        self.node_name = ""
        self.region_bytes = 0
        self._credentials = credentials
        self._tls = credentials.client_context()
        self._name = name
        # Names our session: all streams that say it share their leases.
        self._session = secrets.token_bytes(16)
        self._ids = count(1)
        self._patience = _Patience()
        # Unawaited messages that could not be sent in time.
        self._owed: deque[bytes] = deque(maxlen=OWED_MAX)
        # Of all large reads of this node: one that hangs must not take the room of all others.
        self.budget = Budget(PEER_BYTES)
        self.transport = tcp.TcpTransport(self._open, streams_max=streams_max)
        self.one_sided = OneSided(self) if nixl else None

    def close(self) -> None:
        """Say goodbye by hanging up: the node ends the session with its last connection. Whoever
        waits for the node learns it now; returns when nobody does any more."""
        self.cut()
        if self.one_sided is not None:
            self.one_sided.forget()
        self.transport.close()

    def cut(self) -> None:
        """The node is taken for dead: whoever waits for it learns it now."""
        self.transport.cut()

    def stream(
        self, deadline: float, connect_s: float = CONNECT_TIMEOUT_S
    ) -> AbstractContextManager[Stream]:
        """As `TcpTransport.stream`. A new stream is given up on after `connect_s`; one that others
        use is waited for until the deadline, because their being busy says nothing of the node."""
        if connect_s == CONNECT_TIMEOUT_S and not self._owed:
            return self.transport.stream(deadline)
        return self._special_stream(deadline, connect_s)

    @contextmanager
    def _special_stream(self, deadline: float, connect_s: float) -> Iterator[Stream]:
        """One that is waited for less long, or that first carries what could not be sent before."""
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
            self._owed.extend(owed)  # twice does no harm: leases and generations are never reused
            raise
        finally:
            self._patience.connect_s = CONNECT_TIMEOUT_S

    # -- connecting ------------------------------------------------------------------------------

    def _open(self, deadline: float) -> Stream:
        """A stream that has said hello; the transport's pool can cut it meanwhile. Raises
        NotAuthenticated, VersionMismatch, and what the messenger raises."""
        deadline = min(deadline, time.monotonic() + self._patience.connect_s)
        stream = tcp.connect(self.address, deadline, tls=self._tls, server_hostname=self.address[0])
        try:
            self._greet(stream, deadline)
        except BaseException:
            stream.close()
            raise
        return stream

    def _greet(self, stream: Stream, deadline: float) -> None:
        challenge = messages.reply_decoder.decode(stream.receive_message(deadline))
        if isinstance(challenge, messages.Refused):
            raise_refusal(challenge)
        if not isinstance(challenge, messages.Challenge):
            raise ProtocolError(f"{self.label} is not a Tiffin node: it sent no challenge")
        check_version(challenge.version, self.label)
        nonce = secrets.token_bytes(NONCE_BYTES)
        proof = self._credentials.prove(b"client", nonce, challenge.nonce)
        hello = messages.Hello(
            1, messages.PROTOCOL_VERSION, self._name, os.getpid(), self._session, nonce, proof
        )
        stream.message(messages.encoder.encode(hello))
        stream.flush(deadline)
        welcome = raise_refusal(messages.reply_decoder.decode(stream.receive_message(deadline)))
        if not isinstance(welcome, messages.Welcome):
            raise ProtocolError(f"{self.label} did not answer a hello with a welcome")
        if not self._credentials.accepts(welcome.proof, b"node", nonce, challenge.nonce):
            raise NotAuthenticated(f"the node at {self.label} does not know our token")
        self.node_name, self.region_bytes = welcome.node, welcome.region_bytes

    # -- messages --------------------------------------------------------------------------------

    def call(self, request: messages.Request, timeout_s: float) -> Any:
        """One request, one reply. Raises what the node refused with, DeadlineExceeded,
        NodeUnavailable."""
        return raise_refusal(self.exchange(request, timeout_s))

    def exchange(self, request: messages.Request, timeout_s: float) -> messages.AnyReply:
        """As `call`, but a refusal is returned: the node is well, whatever it says."""
        deadline = time.monotonic() + timeout_s + GRACE_S
        with as_ours(self.label), self.stream(deadline) as stream:
            self.queue(stream, request)
            stream.flush(deadline)
            return self.receive(stream, request, deadline)

    def post(self, request: messages.Request) -> None:
        """Send what gets no reply; a node that is gone has released everything already. Also for a
        call that was given up, which gives back what it got: it takes no longer for that. A node
        that is only slow gets it with the next request: else it would hold the blocks of a lease
        until that expires, and never hear of a damaged one."""
        request.id = messages.UNAWAITED
        message = messages.encoder.encode(request)
        deadline = time.monotonic() + POST_TIMEOUT_S
        try:
            with Caller().in_this_thread(), as_ours(self.label), self.stream(deadline) as stream:
                stream.message(message)
                stream.flush(deadline)
        except TiffinError as error:
            log.debug("not sent to %s yet: %s", self.label, error)
            self._owed.append(message)

    def queue(self, stream: Stream, request: messages.Request) -> None:
        """Number a request and queue it on a stream."""
        request.id = next(self._ids)
        stream.message(messages.encoder.encode(request))

    def receive(
        self, stream: Stream, request: messages.Request, deadline: float
    ) -> messages.AnyReply:
        """The reply to `request`, the oldest unanswered one of this stream; checked to be one that
        can follow it. Raises the messenger's FrameError."""
        body = stream.receive_message(deadline)
        reply: messages.AnyReply = messages.reply_decoder.decode(body)
        if isinstance(reply, messages.Refused) and reply.id == messages.UNAWAITED:
            return reply  # it could not read our request, and so does not know its number
        if reply.id != request.id:
            raise BadFrame(f"a reply to request {reply.id} instead of {request.id}")
        if not check_reply(request, reply):
            raise BadFrame(f"{type(reply).__name__} does not answer {type(request).__name__}")
        return reply


class _Patience(threading.local):
    """How long this thread waits for a connection; `Peer._open` is called without being told."""

    connect_s = CONNECT_TIMEOUT_S
