"""The stream of decisions: a slow follower delays nothing, and hears how many it missed."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

from apisupport import MODEL, profile

from tiffin.conductor.api.conductor_service import Service
from tiffin.conductor.api.decision_stream import Broadcast, events
from tiffin.conductor.core import Conductor
from tiffin.conductor.records import InstanceSpec, Request, Role


class Item:
    """A decision with only a number."""

    def __init__(self, number: int) -> None:
        self._number = number

    def text(self, candidates: int) -> bytes:
        return b"%d" % self._number


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
        broadcast = Broadcast[Any](4, backlog=2)
        text = b""
        stream = events(broadcast, 0, keep_alive_s=0.01)
        async for piece in stream:
            if not text:
                for item in (1, 2, 3):
                    broadcast.give(Item(item))
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
        broadcast = Broadcast[Any](4, backlog=2)
        broadcast.close()
        return [piece async for piece in events(broadcast, 0)]

    assert len(asyncio.run(scenario())) == 1


def test_a_decision_is_encoded_once_for_all_who_follow() -> None:
    """Each follower gets the number of candidates that it asked for."""
    encoded = 0

    def wall() -> float:  # called once per encoded decision
        nonlocal encoded
        encoded += 1
        return 1e9

    core = Conductor(dice=random.Random(1), profile=profile)
    for name in ("a", "b", "c"):
        core.register(InstanceSpec(name, MODEL, Role.MIXED, "p"), 0.0)
    service = Service(core, clock=lambda: 0.0, wall=wall)

    async def follow(candidates: int) -> list[dict[str, Any]]:
        found = []
        async for piece in events(service.broadcast, candidates):
            lines = piece.decode().splitlines()
            found += [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
        return found

    async def scenario() -> list[list[dict[str, Any]]]:
        following = [asyncio.create_task(follow(number)) for number in (0, 1, 2, 64, 2, 0)]
        await asyncio.sleep(0.01)
        assert len(service.broadcast) == len(following)
        for name in ("r1", "r2"):
            service.schedule(Request(name, MODEL, 1000))
        await asyncio.sleep(0.01)
        service.stop()
        return await asyncio.gather(*following)

    found = asyncio.run(scenario())
    assert encoded == 2
    for decisions, shown in zip(found, (0, 1, 2, 3, 2, 0), strict=True):
        assert [one["request_id"] for one in decisions] == ["r1", "r2"]
        assert [len(one["candidates"]) for one in decisions] == [shown, shown]
        assert [one["candidates_count"] for one in decisions] == [3, 3]
        for one, most in zip(decisions, found[3], strict=True):
            assert one["candidates"] == most["candidates"][:shown]


def test_many_decisions_at_a_time_are_told_together() -> None:
    async def scenario() -> list[bytes]:
        broadcast = Broadcast[Any](4, backlog=1000)

        async def follow() -> list[bytes]:
            return [piece async for piece in events(broadcast, 0)]

        following = asyncio.create_task(follow())
        await asyncio.sleep(0.01)
        for number in range(200):
            broadcast.give(Item(number))
            await asyncio.sleep(0)
        broadcast.close()
        return await following

    pieces = asyncio.run(scenario())
    assert b"".join(pieces).count(b"event: decision\n") == 200
    assert len(pieces) < 10
