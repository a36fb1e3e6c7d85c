"""The handles of prefetches: blocks that nodes bring to this host while the caller does other
things."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from ...after_fork import OfOneProcess
from ...errors import ClientClosed, DeadlineExceeded
from ..connection.loop_threads import abandonable
from .arguments import verb
from .block_verbs import DEFAULT_TIMEOUT_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from ...format.keys import Prefix
    from ..connection.node_link import NodeLink
    from .prefetching import PrefetchState


class PrefetchHandle(OfOneProcess):
    """What the handles of both clients have in common: how far the prefetch was at the last `poll`
    or `wait`."""

    def __init__(self, state: PrefetchState, check_open: Callable[[], None]) -> None:
        self._state = state
        self._check_client = check_open

    @property
    def prefix(self) -> Prefix:
        """What is prefetched."""
        return self._state.prefix

    @property
    def blocks(self) -> int:
        """How many leading blocks were in the DRAM of the node on this host. They may be evicted
        again until they are read."""
        return self._state.blocks

    @property
    def tokens(self) -> int:
        """The tokens that these blocks cover."""
        return self.blocks * self.prefix.schema.block_tokens

    @property
    def ended(self) -> bool:
        """Whether it has ended: no more blocks will come."""
        return self._state.ended

    @property
    def complete(self) -> bool:
        """Whether all blocks were there."""
        return self.ended and self.reason is None

    @property
    def reason(self) -> str | None:
        """Why it ended with fewer blocks (docs/client.md); None if it has all, or goes on."""
        return self._state.reason

    def _check_open(self) -> None:
        self._check_process()
        self._check_client()

    def _failed(self, error: DeadlineExceeded | ConnectionError) -> bool:
        """The node did not answer; whether the prefetch has ended."""
        if isinstance(error, ConnectionError):
            return self._state.end("lost")
        return self._state.unanswered()

    def __repr__(self) -> str:
        how = self.reason or ("complete" if self.ended else "under way")
        return f"<{type(self).__name__} {self.blocks} of {len(self.prefix)} blocks, {how}>"


class Prefetch(PrefetchHandle):
    """What `Client.prefetch` returns."""

    def __init__(
        self, state: PrefetchState, check_open: Callable[[], None], link: NodeLink
    ) -> None:
        super().__init__(state, check_open)
        self._link = link

    @verb
    def poll(self) -> bool:
        """Whether it has ended; waits for nothing but the node's answer. Raises ClientClosed."""
        return self._carried_out(self._state.look)

    @verb
    def wait(self, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> bool:
        """Wait up to `timeout_s` for the end; whether it has ended. Raises ClientClosed."""
        return self._carried_out(self._state.wait, timeout_s)

    def _carried_out(self, step: Callable[..., bool], *timeout_s: float) -> bool:
        try:
            return step(self._link, *timeout_s)
        except ClientClosed:
            raise
        except (DeadlineExceeded, ConnectionError) as error:
            return self._failed(error)


class AsyncPrefetch(PrefetchHandle):
    """What `AsyncClient.prefetch` returns."""

    def __init__(self, prefetch: Prefetch) -> None:
        super().__init__(prefetch._state, prefetch._check_open)
        self._prefetch = prefetch

    @verb
    async def poll(self) -> bool:
        """See `Prefetch.poll`."""
        return await abandonable(self._prefetch.poll)

    @verb
    async def wait(self, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> bool:
        """See `Prefetch.wait`."""
        return await abandonable(partial(self._prefetch.wait, timeout_s=timeout_s))
