"""The layers of a pool: chooses the node, and moves to another node when that one is lost."""

from __future__ import annotations

import contextlib
import logging
import time
from typing import TYPE_CHECKING

from ... import deadlines
from ...deadlines import GRACE_S
from ...errors import (
    ClientClosed,
    DeadlineExceeded,
    InvalidInput,
    NodeUnavailable,
    ProtocolError,
    StaleLease,
    TiffinError,
)
from ..streaming.local_source import LocalSource
from .remote.remote_source import RemoteSource

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ...format.keys import Prefix
    from ...format.schema import HeadRange
    from ..streaming.layer_source import NodeSource, StreamedLayer
    from ..verbs.block_verbs import Access
    from .home.home_link import HomeLink
    from .remote.peer import Peer

log = logging.getLogger(__name__)

# The most nodes that a stream asks for the first block, or its writer's reservation. The directory
# lists a few holders at most; a list of fixed nodes may be long.
ASKED_MAX = 8
# How often one stream may move to another node: with more losses, the stream ends with the error.
MOVES_MAX = 8


class FailoverSource:
    """A `LayerSource` that chooses its node when it begins: the first candidate that has all
    blocks, else the one that has most of them. When that node is lost, the stream moves to another
    that can `resume`.

    The only candidate is the node of number `node`; without one, the candidates are the home node
    and then the nodes that `locate` returns. After a loss they are the home node and these.
    `home()` is the home node's number; `home` is None for a client without a home node.
    """

    def __init__(
        self,
        prefix: Prefix,
        access: Access,
        timeout_s: float,
        connect: Callable[[int], Peer],
        home: HomeLink | None,
        node: int | None,
        locate: Callable[[Prefix], Sequence[int]],
        heads: HeadRange | None = None,
        ahead: int = 0,
    ) -> None:
        self.prefix = prefix
        self._access = access
        self._timeout_s = timeout_s
        self._connect = connect
        self._home = home
        self._node = node
        self._locate = locate
        self._heads = heads
        self._ahead = ahead
        self._current: NodeSource | None = None
        self._tried: NodeSource | None = None  # the candidate that is being asked
        self._lost: list[NodeSource] = []  # whose layers the caller may still use
        self._reason = "miss" if len(prefix) else None
        self._ended = False

    @property
    def count(self) -> int:
        """See `LayerSource.count`."""
        return self._current.count if self._current is not None else 0

    @property
    def reason(self) -> str | None:
        """See `LayerSource.reason`."""
        return self._reason

    def begin(self) -> None:
        """See `LayerSource.begin`. Raises the last candidate's error if no candidate answered."""
        if self._ended:
            raise ClientClosed("this stream has ended; begin another")
        if self._current is not None or not len(self.prefix):
            return
        failure: TiffinError | None = None
        until = time.monotonic() + self._timeout_s
        for source, share in self._candidates():
            left_s = until - time.monotonic()
            if left_s <= 0 and isinstance(failure, DeadlineExceeded):
                break
            try:
                self._try(source, left_s / share)
            except (ClientClosed, InvalidInput):
                raise
            except TiffinError as error:
                log.info("not streamed from a node: %s", error)
                failure = error
            if self.count == len(self.prefix):
                return
        if self._current is None and failure is not None:
            raise failure

    def _candidates(self) -> Iterator[tuple[NodeSource, int]]:
        """The candidates, each with the number of candidates that share the time that is left. The
        link to a silent home node gives up by itself if another node could answer."""
        away = self._node is not None and (self._home is None or self._node != self._home.number)
        if self._home is not None and not away:
            yield self._local_source(self.prefix), 1
        if self._node is None:
            yield from self._remote_candidates(self.prefix, self._locate(self.prefix))
        elif away:
            yield self._remote_source(self.prefix, self._node), 1

    def _remote_candidates(
        self, prefix: Prefix, nodes: Sequence[int]
    ) -> Iterator[tuple[NodeSource, int]]:
        """These nodes as candidates. A node that hangs leaves half of the time to the others; the
        last one gets all that is left."""
        nodes = nodes[:ASKED_MAX]
        for node in nodes:
            yield self._remote_source(prefix, node), 1 if node == nodes[-1] else 2

    def _local_source(self, prefix: Prefix) -> NodeSource:
        assert self._home is not None
        return LocalSource(self._home, prefix, self._access, self._timeout_s, self._heads)

    def _remote_source(self, prefix: Prefix, node: int) -> NodeSource:
        how = self._access, self._timeout_s, node, self._heads, self._ahead
        return RemoteSource(self._connect, prefix, *how)

    @contextlib.contextmanager
    def _trying(self, another: NodeSource) -> Iterator[None]:
        """During the block, `interrupt` and `give_up` reach the candidate `another`."""
        self._tried = another  # set before the check of `_ended`: `interrupt` does the reverse
        try:
            if self._ended:
                raise ClientClosed("this stream has ended; begin another")
            yield
        finally:
            self._tried = None

    def _try(self, another: NodeSource, left_s: float) -> None:
        """Begin at this candidate; keep it if it has more blocks than the best one before."""
        with self._trying(another):
            another.begin(left_s)
        worse: NodeSource | None = another
        if self._current is None or another.count > self._current.count:
            worse, self._current = self._current, another
            self._reason = another.reason
        if worse is not None:
            worse.end()

    def advance(self) -> StreamedLayer | None:
        """See `LayerSource.advance`. Raises the node's error if no other node can take over."""
        self.begin()
        while self._current is not None:
            if self._ended:
                raise ClientClosed("this stream has ended; begin another")
            try:
                return self._current.advance()
            except (NodeUnavailable, DeadlineExceeded, ProtocolError, StaleLease) as error:
                if self._ended or self._current.overdue or not self._move(error):
                    raise
        return None

    def _move(self, error: TiffinError) -> bool:
        """Move the stream to another node that has all blocks committed; whether there is one."""
        lost = self._current
        assert lost is not None
        if len(self._lost) >= MOVES_MAX:
            return False
        # Perhaps only the lease has ended: then the stream may go on at the same node.
        again = isinstance(error, StaleLease)
        until = time.monotonic() + deadlines.left_s(self._timeout_s + GRACE_S)
        for another, share in self._successors(lost, again=again):
            left_s = until - time.monotonic()
            if left_s <= 0 or self._ended:
                break
            resumed = False
            try:
                with self._trying(another):
                    resumed = another.resume(lost, left_s / share)
            except (ClientClosed, InvalidInput):
                raise
            except TiffinError as failure:
                log.debug("not resumed at another node: %s", failure)
            finally:
                if not resumed:
                    another.end()
            if resumed:
                log.info("a stream goes on at another node: %s", error)
                self._lost.append(lost)
                self._current = another
                return True
        return False

    def _successors(self, lost: NodeSource, *, again: bool) -> Iterator[tuple[NodeSource, int]]:
        """As `_candidates`, to take over from a lost node. `again`: that node as well."""
        prefix = self.prefix[: lost.count]
        if self._home is not None and (again or not isinstance(lost, LocalSource)):
            yield self._local_source(prefix), 1
        gone = lost.node if isinstance(lost, RemoteSource) and not again else None
        yield from self._remote_candidates(
            prefix, [node for node in self._locate(prefix) if node != gone]
        )

    def interrupt(self) -> None:
        """Make a thread that waits in `advance` return soon; call `end` afterwards. From any
        thread."""
        self._ended = True
        for source in (self._current, self._tried):
            if source is not None:
                source.interrupt()

    def give_up(self) -> None:
        """Stop waiting for a remote node, whether for a layer or for a lease. Called some time
        after `interrupt`, from any thread. A lease that the node grants now expires there."""
        for source in (self._current, self._tried):
            if source is not None:
                source.give_up()

    def release_dropped(self) -> None:
        """Release the leases of a stream that no caller refers to any more: those at remote nodes.
        At home, the caller may still use layers, and the last one gives the lease back."""
        self._ended = True
        for source in (*self._lost, self._current, self._tried):
            if isinstance(source, RemoteSource):
                with contextlib.suppress(TiffinError):
                    source.end()

    def end(self) -> None:
        """See `LayerSource.end`."""
        self._ended = True
        sources, self._lost = [*self._lost, self._current], []
        for source in sources:
            if source is not None:
                source.end()
