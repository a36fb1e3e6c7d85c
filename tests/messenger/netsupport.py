"""Shared by the messenger's network tests: a small application on a listener."""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING

from tiffin.messenger.errors import FrameError
from tiffin.messenger.tcp import tcp_client
from tiffin.messenger.testing import GrantBook

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Iterator

    from tiffin.messenger.tcp.stream import Stream

HELLO = b"let me in"


class Talk:
    """A conversation: `HELLO` makes it trusted; "grant N" is answered with that grant; "quiet" is
    not answered; "break" breaks it; anything else is echoed."""

    def __init__(self, server: Server, peer: str) -> None:
        self._server = server
        self.trusted = server.trusting
        self.grants = server.book
        self.peer = peer
        self.closed_count = 0
        server.talks.append(self)

    def greet(self) -> bytes | None:
        return self._server.greeting

    def message(self, body: bytes | memoryview) -> tcp_client.Answer:
        text = bytes(body)
        self._server.messages.append(text)
        if text == HELLO:
            self.trusted = True
            return tcp_client.Answer(b"welcome")
        if text == b"quiet":
            return tcp_client.Answer(None)
        if text == b"break":
            raise self._server.error
        if text.startswith(b"grant "):
            return tcp_client.Answer(b"granted", int(text[6:]))
        return tcp_client.Answer(text)

    def closed(self) -> None:
        self.closed_count += 1


class Server:
    """A listener, its book of grants, and its conversations."""

    def __init__(
        self,
        *,
        trusting: bool = False,
        greeting: bytes | None = b"who are you?",
        tls: ssl.SSLContext | None = None,
        **options: float,
    ) -> None:
        self.trusting = trusting
        self.greeting = greeting
        self.book = GrantBook()
        self.talks: list[Talk] = []
        self.messages: list[bytes] = []
        self.error: Exception = FrameError("an application that has had enough")
        self.listener = tcp_client.Listener(
            ("127.0.0.1", 0),
            lambda peer: Talk(self, peer),
            tls=tls,
            **options,  # type: ignore[arg-type]
        )
        self.address = self.listener.address

    def close(self) -> None:
        self.listener.close()
        assert all(talk.closed_count == 1 for talk in self.talks)
        assert not self.book.opened

    def opener(
        self, address: tuple[str, int] | None = None, tls: ssl.SSLContext | None = None
    ) -> Callable[[float], Stream]:
        """A function that connects and says hello, as an application would."""

        def open_stream(deadline: float) -> Stream:
            stream = tcp_client.connect(
                address or self.address, deadline, tls=tls, server_hostname="localhost"
            )
            try:
                assert stream.receive_message(deadline) == self.greeting
                stream.message(HELLO)
                stream.flush(deadline)
                assert stream.receive_message(deadline) == b"welcome"
            except BaseException:
                stream.close()
                raise
            return stream

        return open_stream


@contextlib.contextmanager
def serving(**options: object) -> Iterator[Server]:
    server = Server(**options)  # type: ignore[arg-type]
    try:
        yield server
    finally:
        server.close()


class StoppedClock:
    """Stands in for the module `time`: only `sleep` advances it, and takes no time, so that
    measurements are the same on every machine. It begins at the real time, so that its deadlines
    are valid for the real clock too, which is ahead of it."""

    def __init__(self) -> None:
        self.now = time.monotonic()

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))
