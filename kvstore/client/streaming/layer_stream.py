"""Both clients' handles of a stream: an iterable of layers, with a lease that ends with it."""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeVar

from ... import deadlines
from ...after_fork import OfOneProcess
from ...deadlines import GRACE_S
from ..connection.loop_threads import in_thread

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Iterator

    from ...format.keys import Prefix
    from .layer_source import LayerSource, StreamedLayer


T = TypeVar("T")


class _Stream(OfOneProcess):
    """Base of both clients' streams. Its counts are known once the stream has begun."""

    def __init__(self, source: LayerSource, timeout_s: float) -> None:
        self._source = source
        self._timeout_s = timeout_s  # the timeout of each step
        self._entered = False

    @property
    def prefix(self) -> Prefix:
        """The prefix whose blocks this streams."""
        return self._source.prefix

    @property
    def blocks(self) -> int:
        """How many leading blocks the stream covers."""
        return self._source.count

    @property
    def tokens(self) -> int:
        """How many tokens these blocks cover."""
        return self.blocks * self.prefix.schema.block_tokens

    @property
    def complete(self) -> bool:
        """Whether the stream covers every block of the prefix."""
        return self.blocks == len(self.prefix)

    @property
    def reason(self) -> str | None:
        """Why there are not more blocks, as in `Blocks.reason`."""
        return self._source.reason


class LayerStream(_Stream):
    """An iterable of the layers of the leading blocks, in order; iterate over it once.

    Views are valid until the iteration ends, or in a `with` block until that ends; layers are
    provisional until the iteration has ended without an error.
    """

    def __init__(
        self, source: LayerSource, run: Callable[[Callable[[], Any]], Any], timeout_s: float
    ) -> None:
        super().__init__(source, timeout_s)
        self._run = run

    def __enter__(self) -> Self:
        self._entered = True
        self._check_process()
        try:
            deadlines.Within(self._timeout_s).run(partial(self._run, self._source.begin))
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[StreamedLayer]:
        """Raises CorruptBlock, StaleLease (a writer aborted, or died), DeadlineExceeded,
        NodeUnavailable."""
        try:
            while (layer := self.step()) is not None:
                yield layer
        finally:
            if not self._entered:
                self.close()

    def step(self) -> StreamedLayer | None:
        """The next layer, None at the end: one step of the iteration."""
        self._check_process()
        advance = partial(self._run, self._source.advance)
        layer: StreamedLayer | None = deadlines.Within(self._timeout_s).run(advance)
        return layer

    def close(self) -> None:
        """Release the lease, at any point of the stream."""
        if not self._inherited:
            self._run(self._source.end)


class AsyncLayerStream(_Stream):
    """`LayerStream` for `async for` and `async with`."""

    def __init__(
        self, stream: LayerStream, run: Callable[[Callable[[], Any]], Coroutine[Any, Any, Any]]
    ) -> None:
        """`run` carries out a step of `stream` in a thread."""
        super().__init__(stream._source, stream._timeout_s)
        self._stream = stream  # when nobody refers to it any more, its lease is given back
        self._run = run

    async def __aenter__(self) -> Self:
        self._entered = True
        self._check_process()
        try:
            await self._in_time(self._source.begin)
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def __aiter__(self) -> AsyncIterator[StreamedLayer]:
        """See `LayerStream.__iter__`."""
        self._check_process()
        try:
            while (layer := await self._step()) is not None:
                yield layer
        finally:
            if not self._entered:
                await self.close()

    async def _step(self) -> StreamedLayer | None:
        layer: StreamedLayer | None = await self._in_time(self._source.advance)
        return layer

    async def _in_time(self, step: Callable[[], Any]) -> Any:
        return await deadlines.Within(self._timeout_s).run_soon(partial(self._run, step))

    async def close(self) -> None:
        """See `LayerStream.close`. A cancellation meanwhile is raised after the release, which
        would otherwise not reach the node."""
        if self._inherited:
            return
        # Not as a call: it waits for no turn, and a client that was closed has streams to end.
        ending = asyncio.ensure_future(in_thread(self._source.end))
        try:
            await asyncio.shield(ending)
        except asyncio.CancelledError:
            await outlast(ending)
            raise


async def outlast(running: asyncio.Future[Any]) -> None:
    """Wait until `running` is done, in whatever way, and ignore cancellations meanwhile."""
    while not running.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([running])
    if not running.cancelled():
        running.exception()  # mark as retrieved, so that asyncio does not log it


async def interruptible(source: LayerSource, step: Coroutine[Any, Any, T]) -> T:
    """Await a step of a source. A cancellation interrupts the step, and is raised once the step has
    ended, when no thread works for the source any more."""
    running = asyncio.ensure_future(step)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        source.interrupt()
        running.cancel()  # it may still wait for its turn
        # A healthy node answers a lease at once, so that only a sick one is given up.
        late = asyncio.get_running_loop().call_later(GRACE_S, source.give_up)
        try:
            await outlast(running)
        finally:
            late.cancel()
        raise
