"""Clients that would rather speak HTTP/2, as those of Java and `curl --http2` say always,
and those that speak HTTP/1.0, as the probes of load balancers do."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from typing import TYPE_CHECKING, Any

import pytest
from serversupport import served

from tiffin.conductor.core import Conductor
from tiffin.conductor.service.web_server import listening, web_server
from tiffin.conductor.web.connection_limits import ConnectionLimits

if TYPE_CHECKING:
    from collections.abc import Iterator

BODY = b'{"say": "it"}'
OFFER = (
    b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
    b"HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA\r\n"
)
POST = b"POST /it?a=b HTTP/1.1\r\nHost: localhost\r\nX-Other: x\r\n" + OFFER
SIZED = POST + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n" % len(BODY) + BODY + b"\r\n0\r\n\r\n"


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answers in two pieces, without a length: with the request as JSON, and a full stop."""
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    heard = {
        "method": scope["method"],
        "path": scope["path"],
        "query": scope["query_string"].decode(),
        "headers": {name.decode(): value.decode() for name, value in scope["headers"]},
        "body": body.decode(),
    }
    await send({"type": "http.response.start", "status": 200, "headers": []})
    start = {"type": "http.response.body", "body": json.dumps(heard).encode(), "more_body": True}
    await send(start)
    await send({"type": "http.response.body", "body": b"."})


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    server = web_server(echo, ConnectionLimits(), stop_s=2, tls=None)
    with listening(("127.0.0.1", 0)) as door:
        thread = threading.Thread(target=lambda: asyncio.run(server.serve([door])))
        thread.start()
        yield door.getsockname()[1]
        server.should_exit = True
        thread.join()


@contextlib.contextmanager
def connected(port: int) -> Iterator[Any]:
    """A connection's stream of bytes."""
    with (
        socket.create_connection(("127.0.0.1", port), timeout=20) as client,
        client.makefile("rwb", buffering=0) as stream,
    ):
        yield stream


def chunked_answer(stream: Any) -> dict[str, Any]:
    assert stream.readline() == b"HTTP/1.1 200 OK\r\n"
    while stream.readline() != b"\r\n":
        pass
    content = b""
    while size := int(stream.readline(), 16):
        content += stream.read(size)
        stream.readline()
    stream.readline()
    assert content.endswith(b".")
    return json.loads(content[:-1])  # type: ignore[no-any-return]


def check(heard: dict[str, Any]) -> None:
    assert heard["method"] == "POST"
    assert heard["path"] == "/it"
    assert heard["query"] == "a=b"
    assert heard["body"] == BODY.decode()
    assert heard["headers"]["x-other"] == "x"
    assert not {"upgrade", "http2-settings"} & set(heard["headers"])


@pytest.mark.parametrize("request_bytes", [SIZED, CHUNKED], ids=["sized", "chunked"])
@pytest.mark.parametrize("piece", [1, 7, 1 << 20])
def test_an_offer_is_ignored_however_it_arrives(
    port: int, request_bytes: bytes, piece: int
) -> None:
    with connected(port) as stream:
        for at in range(0, len(request_bytes), piece):
            stream.write(request_bytes[at : at + piece])
        check(chunked_answer(stream))


def test_every_request_of_a_connection_may_have_one(port: int) -> None:
    plain = b"POST /it?a=b HTTP/1.1\r\nHost: localhost\r\nX-Other: x\r\nContent-Length: %d\r\n\r\n"
    with connected(port) as stream:
        for one in (SIZED, CHUNKED, plain % len(BODY) + BODY, SIZED):
            stream.write(one)
            check(chunked_answer(stream))
        stream.write(SIZED + CHUNKED + SIZED)  # pipelined
        for _ in range(3):
            check(chunked_answer(stream))


def test_a_request_without_a_body(port: int) -> None:
    with connected(port) as stream:
        stream.write(b"GET /it HTTP/1.1\r\nHost: localhost\r\n" + OFFER + b"\r\n")
        assert chunked_answer(stream)["method"] == "GET"


def test_what_else_the_client_wants_of_the_connection_stays(port: int) -> None:
    close = SIZED.replace(b"Connection: Upgrade,", b"Connection: close, Upgrade,")
    with connected(port) as stream:
        stream.write(close)
        assert chunked_answer(stream)["headers"]["connection"] == "close"
        assert stream.read() == b""


def test_a_request_behind_an_offer_is_limited_as_any(port: int) -> None:
    with connected(port) as stream:
        stream.write(POST + b"X-Long: " + b"x" * (70 << 10) + b"\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            assert b" 431 " in stream.readline()


def test_one_of_1_0_gets_no_chunks(port: int) -> None:
    with connected(port) as stream:
        stream.write(b"POST /it HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY)
        head, _, content = stream.read().partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower()
    assert b"connection: close" in head.lower()
    assert content.endswith(b".")
    assert json.loads(content[:-1])["body"] == BODY.decode()


def test_a_probe_of_1_0_needs_no_host() -> None:
    with served(Conductor()) as url, connected(int(url.rpartition(":")[2])) as stream:
        stream.write(b"GET /livez HTTP/1.0\r\n\r\n")
        assert b" 200 " in stream.readline()
    with served(Conductor()) as url, connected(int(url.rpartition(":")[2])) as stream:
        stream.write(b"GET /livez HTTP/1.0\r\nHost: elsewhere\r\n\r\n")
        assert b" 421 " in stream.readline()
