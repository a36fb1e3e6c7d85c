"""Limits of data before a request is complete: heads, trailers, and silent connections.

All tests use raw sockets, because no HTTP client would send this.
"""

from __future__ import annotations

import contextlib
import hashlib
import socket
import struct
import time
from typing import TYPE_CHECKING

import pytest
from apisupport import Recorder
from serversupport import served

from tiffin.conductor.service import http_protocol
from tiffin.conductor.web.auth import ALL_RIGHTS, Grant, Tokens
from tiffin.conductor.web.connection_limits import ConnectionLimits

if TYPE_CHECKING:
    from collections.abc import Iterator

KIB = 1024
TOKEN = b"t" * 43
TOKENS = Tokens({hashlib.sha256(TOKEN).digest(): Grant(ALL_RIGHTS)})
START = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n"
LIVE = START + b"\r\n"
AUTHORISED = b"GET /v1/policy HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer " + TOKEN + b"\r\n\r\n"
CHUNKED = (
    b"POST /v1/schedule HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)
# More than fits into the buffers between two sockets.
ENDLESS_BYTES = 64 << 20


def connect(url: str) -> socket.socket:
    host, port = url.partition("://")[2].split(":")
    return socket.create_connection((host, int(port)), timeout=20)


def rest(client: socket.socket) -> bytes:
    """All bytes until the server closes the connection."""
    received = b""
    with contextlib.suppress(ConnectionError):
        while more := client.recv(65536):
            received += more
    return received


def trickle(client: socket.socket) -> None:
    """Send little until the connection breaks."""
    while True:
        client.sendall(b"x")
        time.sleep(0.01)


def answer(client: socket.socket) -> bytes:
    """One answer, with its body."""
    received = b""
    while b"\r\n\r\n" not in received:
        more = client.recv(65536)
        assert more, received
        received += more
    head, _, body = received.partition(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
    while len(body) < length:
        body += client.recv(65536)
    return head + b"\r\n\r\n" + body


def is_open(client: socket.socket) -> bool:
    """Whether the connection is open, without any received bytes."""
    client.setblocking(False)
    try:
        return client.recv(1, socket.MSG_PEEK) != b""
    except BlockingIOError:
        return True
    except ConnectionError:
        return False
    finally:
        client.settimeout(20)


def status(received: bytes) -> int:
    return int(received.split(b" ", 2)[1])


@pytest.fixture
def url() -> Iterator[str]:
    with served(Recorder()) as found:
        yield found


class TestSize:
    @pytest.mark.parametrize(
        ("begin", "more", "expected"),
        [
            (START + b"X: ", b"a" * KIB, 431),
            (START, b"X" * KIB, 431),
            (START, b"X: y\r\n" * 200, 431),
            (b"GET /", b"a" * KIB, 414),
            (b"GET /livez?", b"a" * KIB, 414),
            (b"", b"\r\n" * 512, 431),
            (CHUNKED + b"2\r\n{}\r\n0\r\nX: ", b"a" * KIB, 431),
            (CHUNKED + b"2\r\n{}\r\n0\r\n", b"X: y\r\n" * 200, 431),
            (CHUNKED + b"2;", b"a" * KIB, 431),
            (CHUNKED, b"0" * KIB, 431),
        ],
        ids=[
            *("value", "name", "count", "path", "query", "before"),
            *("trailer", "trailers", "extension", "digits"),
        ],
    )
    def test_what_has_no_end_is_refused(
        self, url: str, begin: bytes, more: bytes, expected: int
    ) -> None:
        with connect(url) as client:
            client.sendall(begin)
            with contextlib.suppress(ConnectionError):
                for _ in range(ENDLESS_BYTES // len(more)):
                    client.sendall(more)
                pytest.fail("all of it was taken")
            found = rest(client)
        assert status(found) == expected
        assert b'"error"' in found
        assert b"connection: close" in found.lower()

    def test_a_large_head_is_read(self, url: str) -> None:
        with connect(url) as client:
            for _ in range(2):
                client.sendall(START + b"X: " + b"a" * (63 * KIB) + b"\r\n\r\n")
                assert status(answer(client)) == 200

    def test_the_limit_holds_however_it_is_cut(self, url: str) -> None:
        head = START + b"X: " + b"a" * (64 * KIB) + b"\r\n\r\n"
        for pieces in (1, 2, 7, 100):
            with connect(url) as client:
                size = len(head) // pieces + 1
                with contextlib.suppress(ConnectionError):
                    for at in range(0, len(head), size):
                        client.sendall(head[at : at + size])
                assert status(rest(client)) == 431

    def test_a_hundred_fields_are_read(self, url: str) -> None:
        with connect(url) as client:
            client.sendall(START + b"X: y\r\n" * 99 + b"\r\n")
            assert status(answer(client)) == 200
            client.sendall(START + b"X: y\r\n" * 100 + b"\r\n")
            assert status(rest(client)) == 431

    def test_a_body_is_no_head(self, url: str) -> None:
        """However large the body is, and however small its chunks."""
        body = b'{"request_id": "' + b"a" * 200 * KIB + b'"}'
        with connect(url) as client:
            client.sendall(CHUNKED)
            client.sendall(b"".join(b"1\r\n%c\r\n" % one for one in body) + b"0\r\nX: y\r\n\r\n")
            assert status(answer(client)) == 422  # it was read
            client.sendall(LIVE)
            assert status(answer(client)) == 200

    def test_trailers_are_no_headers(self) -> None:
        """A token after the body does not authorise the request."""
        with served(Recorder(), TOKENS) as url, connect(url) as client:
            client.sendall(
                CHUNKED + b"2\r\n{}\r\n0\r\nAuthorization: Bearer " + TOKEN + b"\r\n\r\n"
            )
            assert status(answer(client)) == 401


class TestPipelining:
    def test_answers_come_in_order(self, url: str) -> None:
        with connect(url) as client:
            client.sendall(LIVE + b"GET /none HTTP/1.1\r\nHost: localhost\r\n\r\n" + LIVE)
            found = b""
            while found.count(b"HTTP/1.1 ") < 3 or not found.endswith(b"}"):
                found += client.recv(65536)
            assert [part[:3] for part in found.split(b"HTTP/1.1 ")[1:]] == [b"200", b"404", b"200"]

    def test_so_many_are_answered_and_then_it_ends(self, url: str) -> None:
        with connect(url) as client:
            client.sendall(LIVE * 1000)
            found = rest(client)
        assert 1 <= found.count(b"HTTP/1.1 200 ") <= 100
        assert found.count(b"HTTP/1.1 ") == found.count(b"HTTP/1.1 200 ")

    def test_what_was_asked_before_is_answered(self, url: str) -> None:
        with connect(url) as client, contextlib.suppress(ConnectionError):
            client.sendall(LIVE + START + b"X: y\r\n" * 200 + b"\r\n")
            assert status(rest(client)) == 200


class TestTime:
    HEAD_S = 0.3

    @pytest.fixture
    def url(self) -> Iterator[str]:
        with served(Recorder(), TOKENS, connections=ConnectionLimits(head_s=self.HEAD_S)) as found:
            yield found

    def test_a_head_byte_by_byte_is_given_up(self, url: str) -> None:
        with connect(url) as client:
            with contextlib.suppress(ConnectionError):
                for byte in START * 100:
                    client.sendall(bytes([byte]))
                    time.sleep(0.02)
                pytest.fail("it is still read")
            assert status(rest(client)) == 408

    def test_who_says_nothing_is_hung_up_on(self, url: str) -> None:
        with connect(url) as client:
            assert rest(client) == b""

    @pytest.mark.slow
    def test_the_second_head_has_a_deadline_too(self, url: str) -> None:
        with connect(url) as client:
            client.sendall(LIVE)
            assert status(answer(client)) == 200
            time.sleep(2 * self.HEAD_S)  # the time between requests has another limit
            client.sendall(START)
            assert status(rest(client)) == 408

    def test_a_body_that_nobody_waits_for_has_a_deadline(self, url: str) -> None:
        """The request is refused before its body is read; later bytes don't keep the connection
        open."""
        with connect(url) as client:
            client.sendall(
                b"POST /v1/schedule HTTP/1.1\r\nHost: h\r\nContent-Length: 1000000\r\n\r\n"
            )
            assert status(answer(client)) == 401
            with contextlib.suppress(ConnectionError):
                for _ in range(1000):
                    client.sendall(b"x")
                    time.sleep(0.02)
                pytest.fail("it is still read")

    def test_a_body_in_time_is_read_to_its_end(self, url: str) -> None:
        with connect(url) as client:
            client.sendall(b"POST /v1/schedule HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\n\r\n")
            assert status(answer(client)) == 401
            client.sendall(b"12345" + AUTHORISED)
            assert status(answer(client)) == 200


class TestRoom:
    LIMITS = ConnectionLimits(connections=2, strangers=16, per_peer=8, head_s=30.0)

    @pytest.fixture
    def url(self) -> Iterator[str]:
        with served(Recorder(), TOKENS, connections=self.LIMITS) as found:
            yield found

    @staticmethod
    def half_open(url: str, number: int, stack: contextlib.ExitStack) -> list[socket.socket]:
        found = []
        for _ in range(number):
            client = stack.enter_context(connect(url))
            client.sendall(START)
            found.append(client)
        return found

    def test_a_flood_of_half_open_heads_is_nobody_elses(self, url: str) -> None:
        with contextlib.ExitStack() as stack, connect(url) as early:
            early.sendall(AUTHORISED)
            assert status(answer(early)) == 200
            flood = self.half_open(url, 60, stack)
            early.sendall(AUTHORISED)
            assert status(answer(early)) == 200
            with connect(url) as late:
                late.sendall(AUTHORISED)
                assert status(answer(late)) == 200
            stay = [client for client in flood if is_open(client)]
            assert 0 < len(stay) <= self.LIMITS.strangers
            assert stay == flood[-len(stay) :]  # the latest

    @pytest.mark.slow
    def test_one_peer_has_less_than_all_of_the_room(self, url: str) -> None:
        with contextlib.ExitStack() as stack:
            flood = self.half_open(url, self.LIMITS.strangers - 1, stack)
            with connect(url) as client:
                client.sendall(LIVE)
                assert status(answer(client)) == 200
            assert all(map(is_open, flood))  # one of many simultaneous clients may be slow
            time.sleep(1.1)
            self.half_open(url, 1, stack)
            with connect(url) as client:
                client.sendall(LIVE)
                assert status(answer(client)) == 200
            assert sum(map(is_open, flood)) < self.LIMITS.per_peer

    def test_who_was_let_in_stays_when_there_are_too_many(self, url: str) -> None:
        with connect(url) as first, connect(url) as second, connect(url) as third:
            for client in (first, second):
                client.sendall(AUTHORISED)
                assert status(answer(client)) == 200
            third.sendall(AUTHORISED)
            refused = rest(third)
            assert status(refused) == 503
            assert b'"busy"' in refused
            assert b"retry-after" in refused
            first.sendall(AUTHORISED)
            assert status(answer(first)) == 200
            second.close()
            with connect(url) as fourth:
                fourth.sendall(AUTHORISED)
                assert status(answer(fourth)) == 200

    def test_who_leaves_at_once_takes_no_place(self, url: str) -> None:
        """The server may handle a request when its connection has already ended."""
        at_once = struct.pack("ii", 1, 0)
        for _ in range(20 * self.LIMITS.connections):
            with connect(url) as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
                client.sendall(AUTHORISED)
        said = 503
        give_up = time.monotonic() + 10
        while said == 503 and time.monotonic() < give_up:  # until the server noticed their end
            with connect(url) as client:
                client.sendall(AUTHORISED)
                said = status(answer(client))
        assert said == 200

    def test_a_wrong_token_proves_nothing(self, url: str) -> None:
        with contextlib.ExitStack() as stack:
            wrong = []
            for _ in range(60):
                client = stack.enter_context(connect(url))
                client.sendall(AUTHORISED.replace(TOKEN, b"u" * 43))
                assert status(answer(client)) == 401
                wrong.append(client)
            assert sum(map(is_open, wrong)) <= self.LIMITS.strangers


class TestBodiesOfAnsweredRequests:
    """A client that reads only once it has sent all gets its answer, unless that is very much."""

    POST = b"POST /v1/schedule HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    SIZED, PIECED = b"Content-Length: %d\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n"
    # More than fits into the buffers between two sockets.
    PIECE, PIECES = b"x" * (1 << 20), 16

    @pytest.mark.parametrize("chunked", [True, False])
    def test_are_read_to_their_end(self, chunked: bool) -> None:
        with served(Recorder()) as url, connect(url) as client:
            nbytes = len(self.PIECE) * self.PIECES
            client.sendall(self.POST + (self.PIECED if chunked else self.SIZED % nbytes))
            for _ in range(self.PIECES):
                client.sendall(
                    b"%x\r\n%b\r\n" % (len(self.PIECE), self.PIECE) if chunked else self.PIECE
                )
            if chunked:
                client.sendall(b"0\r\n\r\n")
            found = rest(client)
        assert status(found) == 413
        assert b"too_large" in found
        assert b"connection: close" in found.lower()

    def test_of_strangers_too(self) -> None:
        with served(Recorder(), TOKENS) as url, connect(url) as client:
            client.sendall(self.POST + self.SIZED % (len(self.PIECE) * self.PIECES))
            for _ in range(self.PIECES):
                client.sendall(self.PIECE)
            assert status(answer(client)) == 401
            client.sendall(AUTHORISED)
            assert status(answer(client)) == 200

    def test_are_cut_off_at_a_size(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(http_protocol, "DROPPED_BYTES_MAX", 1 << 20)
        for tokens in (None, TOKENS):
            with served(Recorder(), tokens) as url, connect(url) as client:
                client.sendall(self.POST + self.SIZED % ENDLESS_BYTES)
                with pytest.raises(ConnectionError):
                    client.sendall(bytes(ENDLESS_BYTES))

    def test_are_cut_off_after_a_time(self) -> None:
        limits = ConnectionLimits(head_s=0.05)
        with served(Recorder(), connections=limits) as url, connect(url) as client:
            client.sendall(self.POST + self.SIZED % ENDLESS_BYTES)
            assert status(rest(client)) == 413
            with pytest.raises(ConnectionError):
                trickle(client)
