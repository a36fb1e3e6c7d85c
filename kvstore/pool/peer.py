"""One remote node, as a client or another node sees it.

A peer is a session of several streams (`node/remote.py` has the other end). Reading is one round
trip where one stream is enough: the lease, the ranges to read of it and its release leave together,
and the block bytes are received where they belong. Every header and, by policy, every segment is
checked as it arrives, while its bytes are in the processor's cache.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING, Any

import msgspec

from tiffin.messenger import tcp
from tiffin.messenger.errors import FrameError as BadFrame
from tiffin.messenger.errors import GrantError, MessengerError, PeerLost, TransferTimeout

from ..credentials import NONCE_BYTES, Credentials
from ..errors import (
    DeadlineExceeded,
    NodeUnavailable,
    NotAuthenticated,
    ProtocolError,
    TiffinError,
    VersionMismatch,
)
from ..link import GRACE_S, raise_refusal
from ..node import messages

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tiffin.messenger.stream import Stream

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0


@contextmanager
def as_ours(address: str) -> Iterator[None]:
    """Turn the messenger's errors into the store's."""
    try:
        yield
    except TransferTimeout as error:
        raise DeadlineExceeded(f"the node at {address} did not answer in time: {error}") from error
    except PeerLost as error:
        raise NodeUnavailable(f"lost the node at {address}: {error}") from error
    except (BadFrame, msgspec.DecodeError) as error:
        raise ProtocolError(f"the node at {address} sent garbage: {error}") from error
    except GrantError as error:
        raise NodeUnavailable(f"the node at {address} took a lease back: {error}") from error
    except MessengerError as error:
        raise NodeUnavailable(f"the node at {address}: {error}") from error


class Peer:
    """Connections to one node. Thread-safe; connects when it is first used."""

    def __init__(
        self,
        address: tuple[str, int],
        credentials: Credentials,
        name: str = "",
        *,
        streams_max: int = 8,
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
        self.transport = tcp.TcpTransport(self._open, streams_max=streams_max)

    def close(self) -> None:
        """Say goodbye by hanging up: the node ends the session with its last connection."""
        self.transport.close()

    def cut(self) -> None:
        """The node is taken for dead: whoever waits for it learns it now."""
        self.transport.cut()

    # -- connecting ------------------------------------------------------------------------------

    def _open(self, deadline: float) -> Stream:
        """A stream that has said hello. Raises NotAuthenticated, VersionMismatch, and what the
        messenger raises."""
        deadline = min(deadline, time.monotonic() + CONNECT_TIMEOUT_S)
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
        if challenge.version != messages.PROTOCOL_VERSION:
            raise VersionMismatch(
                f"the node at {self.label} speaks protocol {challenge.version}, this client "
                f"{messages.PROTOCOL_VERSION}; run the same version of tiffin on both sides"
            )
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
        deadline = time.monotonic() + timeout_s + GRACE_S
        with as_ours(self.label), self.transport.stream(deadline) as stream:
            self.queue(stream, request)
            stream.flush(deadline)
            reply = self.receive(stream, request, deadline)
        return raise_refusal(reply)

    def post(self, request: messages.Request) -> None:
        """Send what gets no reply; a node that is gone has released everything already."""
        request.id = messages.UNAWAITED
        deadline = time.monotonic() + CONNECT_TIMEOUT_S
        try:
            with as_ours(self.label), self.transport.stream(deadline) as stream:
                stream.message(messages.encoder.encode(request))
                stream.flush(deadline)
        except TiffinError as error:
            log.debug("not sent to %s: %s", self.label, error)

    def queue(self, stream: Stream, request: messages.Request) -> None:
        """Number a request and queue it on a stream."""
        request.id = next(self._ids)
        stream.message(messages.encoder.encode(request))

    def receive(
        self, stream: Stream, request: messages.Request, deadline: float
    ) -> messages.AnyReply:
        """The reply to `request`, the oldest unanswered one of this stream."""
        body = stream.receive_message(deadline)
        reply: messages.AnyReply = messages.reply_decoder.decode(body)
        if reply.id != request.id:
            raise BadFrame(f"a reply to request {reply.id} instead of {request.id}")
        return reply
