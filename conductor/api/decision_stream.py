"""Streams the conductor's decisions to subscribers as server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import deque
from typing import TYPE_CHECKING, Generic, TypeVar

from ..web.time_slices import TimeSlices

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from ..wire.decision_text import Shown

T = TypeVar("T")

# How long decisions are batched: the stream is for people, who do not notice such a delay.
GATHER_S = 0.1
# Size of one write: mostly, the socket's send buffer takes it at once.
_PIECE_BYTES = 64 << 10
# Proxies close idle connections, mostly after 30 or 60 s.
KEEP_ALIVE_S = 15.0


class Follower(Generic[T]):
    """A subscriber: a bounded queue of items that its stream has not taken yet, and how many it
    `missed` by being slow."""

    def __init__(self, backlog: int) -> None:
        self._waiting: deque[T] = deque(maxlen=backlog)
        self._more, self._ended = asyncio.Event(), asyncio.Event()
        self.missed = 0

    def give(self, item: T) -> None:
        """Queue an item. If the queue is full, its oldest item is dropped: a slow subscriber gets
        the latest items."""
        if len(self._waiting) == self._waiting.maxlen:
            self.missed += 1
        self._waiting.append(item)
        self._more.set()

    def close(self) -> None:
        """End the stream: no more items come."""
        self._ended.set()
        self._more.set()

    @property
    def closed(self) -> bool:
        """Whether the stream has ended."""
        return self._ended.is_set()

    async def pause(self, seconds: float) -> None:
        """Wait `seconds` for more items to queue; return at once when the stream ends."""
        if not self.closed:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._ended.wait()

    async def take(self, timeout_s: float) -> list[T]:
        """Wait for queued items and take all of them. Empty after a timeout of `timeout_s`, or if
        the stream has ended."""
        if not self.closed:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._more.wait()
        self._more.clear()
        taken = list(self._waiting)
        self._waiting.clear()
        return taken


class Broadcast(Generic[T]):
    """Gives each item to all subscribers, without waiting for any of them. For one event loop."""

    def __init__(self, followers_max: int, backlog: int) -> None:
        self._followers: set[Follower[T]] = set()
        self._followers_max, self._backlog = followers_max, backlog
        self._closed = False

    def __len__(self) -> int:
        return len(self._followers)

    @property
    def full(self) -> bool:
        """Whether there is no room for another subscriber, or the broadcast is closed."""
        return self._closed or len(self._followers) >= self._followers_max

    def give(self, item: T) -> None:
        """Queue an item for every subscriber. Does not block."""
        for follower in self._followers:
            follower.give(item)

    @contextlib.contextmanager
    def following(self) -> Iterator[Follower[T]]:
        """Subscribe, from now on until the `with` block ends."""
        follower = Follower[T](self._backlog)
        if self._closed:
            follower.close()
        self._followers.add(follower)
        try:
            yield follower
        finally:
            self._followers.discard(follower)

    def close(self) -> None:
        """End all streams, because a server that shuts down waits for its connections."""
        self._closed = True
        for follower in self._followers:
            follower.close()


async def events(
    broadcast: Broadcast[Shown], candidates: int, keep_alive_s: float = KEEP_ALIVE_S
) -> AsyncIterator[bytes]:
    """The text of an event stream: an event per decision with at most `candidates` candidates,
    `missed` events where decisions were dropped, and keepalive comments while there are none.

    A subscriber gets decisions up to `GATHER_S` late, in batches, and at a random offset to other
    subscribers: sending to one subscriber takes 50 us, and every subscriber gets each decision.
    """
    pause_s = GATHER_S * random.uniform(0.5, 1.0)
    with broadcast.following() as follower:
        yield b": the conductor's decisions, as they are made\n\n"
        told, ended = 0, False
        while not ended:
            ended = follower.closed  # items that are queued already are still sent
            items = await follower.take(keep_alive_s)
            if follower.missed > told:
                lines = b'event: missed\ndata: {"count":%d}\n\n' % (follower.missed - told)
                told = follower.missed
                yield lines
            turns, parts, nbytes = TimeSlices(), list[bytes](), 0
            for item in items:
                text = item.text(candidates)
                parts.append(b"event: decision\ndata: %b\n\n" % text)
                nbytes += len(text)
                if nbytes > _PIECE_BYTES:
                    yield b"".join(parts)
                    parts, nbytes = [], 0
                await turns.give()
            if parts:
                yield b"".join(parts)
            elif not items and not follower.closed:
                yield b": still here\n\n"
            if items and not ended:
                await follower.pause(pause_s)
