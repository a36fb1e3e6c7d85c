"""Decisions to many followers: nobody waits for a slow one, and it is told what it missed."""

from __future__ import annotations

import asyncio

from tiffin.conductor.api.stream import Broadcast, events


def test_each_follower_gets_each_item_from_then_on() -> None:
    async def scenario() -> None:
        broadcast = Broadcast[int](4, backlog=10)
        broadcast.give(0)
        with broadcast.following() as a:
            broadcast.give(1)
            with broadcast.following() as b:
                broadcast.give(2)
                assert await a.take(1) == [1, 2]
                assert await b.take(1) == [2]
            assert len(broadcast) == 1
        assert len(broadcast) == 0

    asyncio.run(scenario())


def test_a_slow_one_misses_the_oldest() -> None:
    async def scenario() -> None:
        broadcast = Broadcast[int](4, backlog=3)
        with broadcast.following() as slow:
            for item in range(10):
                broadcast.give(item)
            assert await slow.take(1) == [7, 8, 9]
            assert slow.missed == 7

    asyncio.run(scenario())


def test_there_is_room_for_so_many() -> None:
    broadcast = Broadcast[int](1, backlog=3)
    assert not broadcast.full
    with broadcast.following():
        assert broadcast.full
    broadcast.close()
    assert broadcast.full


def test_the_text_of_a_stream() -> None:
    async def scenario() -> bytes:
        broadcast = Broadcast[int](4, backlog=2)
        text = b""
        stream = events(broadcast, lambda item: b"%d" % item, keep_alive_s=0.01)
        async for piece in stream:
            if not text:
                for item in (1, 2, 3):
                    broadcast.give(item)
            text += piece
            if b"still here" in text:
                broadcast.close()
        assert len(broadcast) == 0
        return text

    assert asyncio.run(scenario()) == (
        b": the conductor's decisions, as they are made\n\n"
        b'event: missed\ndata: {"count":1}\n\n'
        b"event: decision\ndata: 2\n\n"
        b"event: decision\ndata: 3\n\n"
        b": still here\n\n"
    )


def test_a_closed_broadcast_ends_streams_at_once() -> None:
    async def scenario() -> list[bytes]:
        broadcast = Broadcast[int](4, backlog=2)
        broadcast.close()
        return [piece async for piece in events(broadcast, lambda item: b"%d" % item)]

    assert len(asyncio.run(scenario())) == 1
