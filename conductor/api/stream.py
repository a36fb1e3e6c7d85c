"""Decisions as they are made, to whoever follows them: server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

T = TypeVar("T")

# Proxies cut connections on which nothing moves, mostly after 30 or 60 s.
KEEP_ALIVE_S = 15.0


class Follower(Generic[T]):
    """One that follows: what it has not been given yet, and how much it missed by being slow."""

    def __init__(self, backlog: int) -> None:
        self._waiting: deque[T] = deque(maxlen=backlog)
        self._more = asyncio.Event()
        self.missed = 0
        self.closed = False

    def give(self, item: T) -> None:
        """The oldest one leaves if too many wait: who is slow sees the latest."""
        if len(self._waiting) == self._waiting.maxlen:
            self.missed += 1
        self._waiting.append(item)
        self._more.set()

    def close(self) -> None:
        """Nothing more comes."""
        self.closed = True
        self._more.set()

    async def take(self, timeout_s: float) -> list[T]:
        """All that waits; after `timeout_s` without any, or when nothing more comes, nothing."""
        if not self.closed:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._more.wait()
        self._more.clear()
        taken = list(self._waiting)
        self._waiting.clear()
        return taken


class Broadcast(Generic[T]):
    """Gives each item to all who follow, and waits for none of them. For one event loop."""

    def __init__(self, followers_max: int, backlog: int) -> None:
        self._followers: set[Follower[T]] = set()
        self._followers_max, self._backlog = followers_max, backlog
        self._closed = False

    def __len__(self) -> int:
        return len(self._followers)

    @property
    def full(self) -> bool:
        """Whether nobody more can follow."""
        return self._closed or len(self._followers) >= self._followers_max

    def give(self, item: T) -> None:
        """To all, at once."""
        for follower in self._followers:
            follower.give(item)

    @contextlib.contextmanager
    def following(self) -> Iterator[Follower[T]]:
        """Follow, from now on until the block is left."""
        follower = Follower[T](self._backlog)
        if self._closed:
            follower.close()
        self._followers.add(follower)
        try:
            yield follower
        finally:
            self._followers.discard(follower)

    def close(self) -> None:
        """End all streams: a server that stops waits for its connections."""
        self._closed = True
        for follower in self._followers:
            follower.close()


async def events(
    broadcast: Broadcast[T], encode: Callable[[T], bytes | None], keep_alive_s: float = KEEP_ALIVE_S
) -> AsyncIterator[bytes]:
    """The text of an event stream: an event per item that `encode` gives JSON for, `missed` events
    where some were left out, and comments while nothing happens."""
    with broadcast.following() as follower:
        yield b": the conductor's decisions, as they are made\n\n"
        told, ended = 0, False
        while not ended:
            ended = follower.closed  # and what waits is still given
            items = await follower.take(keep_alive_s)
            if follower.missed > told:
                lines = b'event: missed\ndata: {"count":%d}\n\n' % (follower.missed - told)
                told = follower.missed
                yield lines
            encoded = [text for item in items if (text := encode(item)) is not None]
            if encoded:
                yield b"".join(b"event: decision\ndata: %b\n\n" % text for text in encoded)
            elif not items and not follower.closed:
                yield b": still here\n\n"
