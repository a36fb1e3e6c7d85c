"""Streams of a pool: layers from a remote node, and which node to follow."""

from __future__ import annotations

import logging
import time
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from tiffin.messenger.errors import GrantError
from tiffin.messenger.transport import Range

from ..blocks import Payload, select
from ..errors import (
    ClientClosed,
    InvalidInput,
    ProtocolError,
    StaleLease,
    TiffinError,
)
from ..link import GRACE_S, raise_refusal
from ..node import messages
from ..streaming import Following, NearFollowing, StreamedLayer
from .peer import as_ours

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from ..keys import Prefix
    from ..verbs import Access, Verb
    from .peer import Peer

    Bytes = NDArray[np.uint8]

log = logging.getLogger(__name__)

# Nodes that are asked whether they have the first block, or its writer. The directory names a few
# holders at most; a list of fixed nodes may be long.
ASKED_MAX = 8


class FarFollowing(Following):
    """A stream of a node over the network: layers are memory of this process, packed.

    An await and the read of what it exposes leave together, so a layer that is there costs one
    round trip. The node refuses the read if the await came to nothing.
    """

    def __init__(
        self,
        connect: Callable[[int], Peer],
        prefix: Prefix,
        access: Access,
        timeout_s: float,
        node: int,
    ) -> None:
        """`connect(node)` gives the connections to it; asked when the stream begins."""
        super().__init__(prefix, access, timeout_s)
        self._connect = connect
        self._node = node
        self._connected: Peer | None = None

    @property
    def _peer(self) -> Peer:
        if self._connected is None:
            self._connected = self._connect(self._node)
        return self._connected

    def _lease(self, request: messages.Lease) -> Verb[messages.Leased]:
        yield from ()
        reply: messages.Leased = self._peer.call(request, self._timeout_s)
        size = self.schema.extent_bytes
        if any(length != size for length in reply.lengths):
            self._peer.post(messages.Release(0, reply.lease))
            raise ProtocolError(f"extents of {reply.lengths} bytes; blocks have {size}")
        return reply

    def _ask(self, request: messages.Await) -> Verb[tuple[messages.Awaited, list[Any]]]:
        yield from ()
        schema = self.schema
        if request.segments:
            chosen = [schema.segments[index] for index in request.segments]
            size = stride = sum(segment.length for segment in chosen)
        else:
            size, stride = schema.header_bytes, schema.extent_bytes
        memory = np.empty((self.count, size), np.uint8)
        ranges = [Range(block * stride, size) for block in range(self.count)]
        reply = self._exchange(request, ranges, list(memory))
        if not reply.ready:
            return reply, []
        if not request.segments:
            return reply, [memory[block].tobytes() for block in range(self.count)]
        layer = select(schema, layers=self._next)
        return reply, [Payload(memory[i], layer, packed=True) for i in range(self.count)]

    def _exchange(
        self, request: messages.Await, ranges: list[Range], targets: list[Bytes]
    ) -> messages.Awaited:
        """One await and one read. Raises what the node refuses with, and what happens to it."""
        deadline = time.monotonic() + request.timeout_s + GRACE_S
        served = 0
        with as_ours(self._peer.label), self._peer.stream(deadline) as stream:
            self._peer.queue(stream, request)
            stream.ask_read(request.lease, ranges)
            stream.flush(deadline)
            reply = self._peer.receive(stream, request, deadline)
            try:
                # From here on the bytes come, as many as there are: a layer of a long prompt.
                late = time.monotonic() + self._timeout_s + GRACE_S
                served = stream.receive_data(ranges, targets, late).ranges
            except GrantError as error:
                log.debug("nothing to read yet: %s", error)
        raise_refusal(reply)
        assert isinstance(reply, messages.Awaited)
        if reply.ready and served < len(ranges):
            raise StaleLease(f"node {self._peer.label} did not send all that it said is there")
        return reply

    def _work(self, action: Callable[[], Any]) -> Verb[Any]:
        yield from ()
        return action()

    def _post(self, request: messages.Request) -> Verb[None]:
        yield from ()
        self._peer.post(request)


class Searching:
    """A `Course` that finds its node when it begins: the first that has all blocks, else the one
    that has most of them.

    Asked are the node of number `node` and no other, or without one home and then the nodes that
    `locate` names. `home()` is home's number; None for a client without a home.
    """

    def __init__(
        self,
        prefix: Prefix,
        access: Access,
        timeout_s: float,
        connect: Callable[[int], Peer],
        home: Callable[[], int | None] | None,
        node: int | None,
        locate: Callable[[Prefix], Sequence[int]],
    ) -> None:
        self.prefix = prefix
        self._access = access
        self._timeout_s = timeout_s
        self._connect = connect
        self._home = home
        self._node = node
        self._locate = locate
        self._found: Following | None = None
        self._ended = False

    @property
    def count(self) -> int:
        """See `Course.count`."""
        return self._found.count if self._found is not None else 0

    @property
    def reason(self) -> str | None:
        """See `Course.reason`."""
        if self._found is None:
            return "miss" if len(self.prefix) else None
        return self._found.reason

    def begin(self) -> Verb[None]:
        """See `Course.begin`. Raises what the last node met if none of those asked answered."""
        if self._ended:
            raise ClientClosed("this stream has ended; begin another")
        if self._found is not None or not len(self.prefix):
            return
        failure: TiffinError | None = None
        for following in islice(self._ways(), ASKED_MAX):
            try:
                yield from self._try(following)
            except (ClientClosed, InvalidInput):
                raise
            except TiffinError as error:
                log.info("not streamed from a node: %s", error)
                failure = error
            if self.count == len(self.prefix):
                return
        if self._found is None and failure is not None:
            raise failure

    def _ways(self) -> Iterator[Following]:
        how = self.prefix, self._access, self._timeout_s
        away = self._node is not None and (self._home is None or self._node != self._home())
        if self._home is not None and not away:
            yield NearFollowing(*how)
        if self._node is None:
            yield from (FarFollowing(self._connect, *how, n) for n in self._locate(self.prefix))
        elif away:
            yield FarFollowing(self._connect, *how, self._node)

    def _try(self, another: Following) -> Verb[None]:
        """Begin there; keep it if it has more than what was found before."""
        yield from another.begin()
        worse: Following | None = another
        if self._found is None or another.count > self._found.count:
            worse, self._found = self._found, another
        if worse is not None:
            yield from worse.end()

    def advance(self) -> Verb[StreamedLayer | None]:
        """See `Course.advance`."""
        yield from self.begin()
        if self._found is None:
            return None
        return (yield from self._found.advance())

    def end(self) -> Verb[None]:
        """See `Course.end`."""
        self._ended = True
        if self._found is not None:
            yield from self._found.end()
