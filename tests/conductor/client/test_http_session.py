"""The HTTP client: what its errors say of a request, and that an answer nobody wants ends."""

from __future__ import annotations

import asyncio
import gzip
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
from directory.ports import free_port

from tiffin.conductor.client.http_session import (
    Broken,
    HttpAnswer,
    HttpFailure,
    HttpSession,
    NotConnected,
    Silent,
    TooLarge,
)
from tiffin.conductor.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

PATIENCE_S = 20.0


class Peer:
    """A server that reads heads, and does as it is told for the request of each number."""

    def __init__(self, *acts: Callable[[asyncio.StreamWriter], Awaitable[None]]) -> None:
        self.acts = acts
        self.heads: list[bytes] = []
        self.left = asyncio.Event()
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                self.heads.append(await reader.readuntil(b"\r\n\r\n"))
                await self.acts[len(self.heads) - 1](writer)
                if writer.is_closing():
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            self.left.set()
        finally:
            writer.close()


@asynccontextmanager
async def peer(*acts: Callable[[asyncio.StreamWriter], Awaitable[None]]) -> AsyncIterator[Peer]:
    it = Peer(*acts)
    server = await asyncio.start_server(it.serve, "127.0.0.1", 0)
    it.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server, asyncio.timeout(PATIENCE_S):
        yield it


@asynccontextmanager
async def session(headers: dict[str, str] | None = None) -> AsyncIterator[HttpSession]:
    it = HttpSession(headers or {}, connect_s=PATIENCE_S)
    try:
        yield it
    finally:
        await it.close()


def answers(body: bytes, *fields: str) -> Callable[[asyncio.StreamWriter], Awaitable[None]]:
    async def act(writer: asyncio.StreamWriter) -> None:
        head = "".join(f"{field}\r\n" for field in (*fields, f"content-length: {len(body)}"))
        writer.write(b"HTTP/1.1 200 OK\r\n" + head.encode() + b"\r\n" + body)

    return act


async def begins(writer: asyncio.StreamWriter) -> None:
    """The first piece of an answer that goes on."""
    writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\ndabba\r\n")


async def breaks_off(writer: asyncio.StreamWriter) -> None:
    await begins(writer)
    writer.close()


async def hangs_up(writer: asyncio.StreamWriter) -> None:
    writer.close()


async def says_nothing(writer: asyncio.StreamWriter) -> None:
    pass


async def sent(http: HttpSession, url: str, silence_s: float | None = None) -> HttpAnswer:
    return await http.send("POST", url, b"", {}, silence_s)


def test_a_body_comes_as_it_was_sent() -> None:
    packed = gzip.compress(b"dabbawallas")

    async def scenario() -> None:
        async with (
            peer(answers(packed, "content-encoding: gzip")) as it,
            session({"authorization": "Bearer x"}) as http,
        ):
            answer = await http.send("POST", f"{it.url}/a%2Fb?c=%20d", b"", {"x-one": "1"})
            assert await answer.read(1000) == packed
            assert answer.headers["content-encoding"] == "gzip"
            head = it.heads[0].lower()
            assert head.startswith(b"post /a%2fb?c=%20d http/1.1\r\n")
            assert b"authorization: bearer x\r\n" in head
            assert b"x-one: 1\r\n" in head
            assert b"accept-encoding" not in head

    asyncio.run(scenario())


def test_after_a_whole_answer_the_connection_is_used_again() -> None:
    async def scenario() -> None:
        async with peer(answers(b"one"), hangs_up) as it, session() as http:
            assert await (await sent(http, it.url)).read(10) == b"one"
            with pytest.raises(Broken) as broken:
                await sent(http, it.url)
            assert broken.value.reused, "the server may have hung up before it read"
            assert len(it.heads) == 2, "nothing is sent again unasked"

    asyncio.run(scenario())


def test_a_new_connection_that_breaks_is_told_apart() -> None:
    async def scenario() -> None:
        async with peer(hangs_up) as it, session() as http:
            with pytest.raises(Broken) as broken:
                await sent(http, it.url)
            assert not broken.value.reused

    asyncio.run(scenario())


def test_a_get_is_not_repeated_by_itself() -> None:
    async def scenario() -> None:
        async with peer(answers(b"one"), hangs_up, answers(b"two")) as it, session() as http:
            await (await http.send("GET", it.url, None, {})).read(10)
            with pytest.raises(Broken):
                await http.send("GET", it.url, None, {})

    asyncio.run(scenario())


def test_nobody_there() -> None:
    async def scenario() -> None:
        async with session() as http:
            with pytest.raises(NotConnected) as refused:
                await sent(http, f"http://127.0.0.1:{free_port()}")
            assert not refused.value.late
            assert "Connection refused" in str(refused.value)
            assert "ssl" not in str(refused.value)
            for url in ("", "nowhere", "http://", "ftp://h/x"):
                with pytest.raises(InvalidRequest):
                    await sent(http, url)
        with pytest.raises(NotConnected):  # it is closed
            await sent(http, "http://127.0.0.1:1")

    asyncio.run(scenario())


def test_who_is_silent_or_says_too_much() -> None:
    async def scenario() -> None:
        async with peer(says_nothing) as it, session() as http:
            with pytest.raises(Silent):
                await sent(http, it.url, 0.05)
        async with peer(begins) as it, session() as http:
            answer = await sent(http, it.url, 0.05)
            assert await answer.piece() == b"dabba"
            with pytest.raises(Silent):
                await answer.piece()
            answer.close()
        async with peer(answers(b"x" * 11)) as it, session() as http:
            answer = await sent(http, it.url)
            with pytest.raises(TooLarge):
                await answer.read(10)
            answer.close()

    asyncio.run(scenario())


def test_an_answer_that_breaks_off_is_not_whole() -> None:
    async def scenario() -> None:
        async with peer(breaks_off) as it, session() as http:
            answer = await sent(http, it.url)
            assert await answer.piece() == b"dabba"
            with pytest.raises(Broken):
                await answer.piece()
            answer.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("how", ["closed", "cancelled", "cancelled before its head"])
def test_an_answer_that_nobody_wants_ends_its_connection(how: str) -> None:
    """So the engine stops to compute it."""

    async def read(http: HttpSession, url: str, begun: asyncio.Event) -> None:
        answer = await sent(http, url)
        try:
            await answer.piece()
            begun.set()
            await answer.piece()
        finally:
            answer.close()

    async def scenario() -> None:
        act = says_nothing if "before" in how else begins
        async with peer(act) as it, session() as http:
            begun = asyncio.Event()
            if how == "closed":
                answer = await sent(http, it.url)
                await answer.piece()
                waiting = asyncio.ensure_future(answer.piece())
                await asyncio.sleep(0)
                answer.close()
                with pytest.raises(HttpFailure):
                    await waiting
            else:
                call = asyncio.ensure_future(read(http, it.url, begun))
                while not it.heads:  # noqa: ASYNC110 # of a list nobody tells
                    await asyncio.sleep(0.002)
                if act is begins:
                    await begun.wait()
                call.cancel()
            await it.left.wait()

    asyncio.run(scenario())
