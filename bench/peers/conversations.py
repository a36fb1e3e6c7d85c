"""Prompts for a router, as text and as token ids, and a plain HTTP client that times them.

Conversations share a system prompt and go on with text of their own, of various lengths. A token is
taken as four characters, as it is in English, and its id is a hash of them: so prompts that share
text share ids.
"""

from __future__ import annotations

import json
import random
import socket
import time
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from ..network.setting import LOOPBACK
from .processes.backends import MODEL

if TYPE_CHECKING:
    from collections.abc import Iterable

_TOKEN_CHARACTERS = 4
_SYSTEM_CHARACTERS = 4 << 10
_CHARACTERS = (4 << 10, 32 << 10)
_WORDS = ("alpha", "beta", "gamma", "delta", "cache", "block", "token", "prefix")
_VOCABULARY = 128_000


@dataclass(frozen=True, slots=True)
class Conversation:
    """A prompt as text, and as the ids of its tokens."""

    text: str
    ids: list[int]


def conversations(number: int) -> list[Conversation]:
    """The same ones in every run."""
    dice = random.Random(0)
    system = _text(dice, _SYSTEM_CHARACTERS)
    texts = [system + _text(dice, dice.randint(*_CHARACTERS)) for _ in range(number)]
    return [Conversation(text, _ids(text)) for text in texts]


def _text(dice: random.Random, characters: int) -> str:
    words = " ".join(dice.choices(_WORDS, k=characters // 4))
    return words[:characters]


def _ids(text: str) -> list[int]:
    pieces = (text[at : at + _TOKEN_CHARACTERS] for at in range(0, len(text), _TOKEN_CHARACTERS))
    return [zlib.crc32(piece.encode()) % _VOCABULARY for piece in pieces]


def completion(prompt: str | list[int]) -> bytes:
    """The request for a completion, as it goes over the connection."""
    body = json.dumps({"model": MODEL, "prompt": prompt, "max_tokens": 1}).encode()
    return raw_request("POST", "/v1/completions", body)


def raw_request(method: str, path: str, body: bytes) -> bytes:
    """A request with a JSON body."""
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: {LOOPBACK}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


class Http:
    """A connection with one request at a time, blocking. Answers have a Content-Length."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._socket = self._connect()

    def renew(self) -> None:
        """Connect again: servers close connections that were idle for seconds."""
        self._socket.close()
        self._socket = self._connect()

    def _connect(self) -> socket.socket:
        connected = socket.create_connection((LOOPBACK, self._port), 30.0)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connected

    def ask(self, raw: bytes) -> bytes:
        """The body of the answer. Raises ConnectionError for a status that is no success."""
        self._socket.sendall(raw)
        received = b""
        while b"\r\n\r\n" not in received:
            received += self._more()
        head, _, body = received.partition(b"\r\n\r\n")
        while len(body) < _length(head):
            body += self._more()
        if not head.split(b" ", 2)[1].startswith(b"2"):
            raise ConnectionError(f"{head[:100]!r}: {body[:300]!r}")
        return body

    def seconds(self, raw: Iterable[bytes]) -> list[float]:
        """Seconds of each request, one after the other."""
        taken = []
        for one in raw:
            start_s = time.perf_counter()
            self.ask(one)
            taken.append(time.perf_counter() - start_s)
        return taken

    def _more(self) -> bytes:
        data = self._socket.recv(1 << 16)
        if not data:
            raise ConnectionError("the connection was closed before the answer was complete")
        return data

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()


def _length(head: bytes) -> int:
    for field in head.lower().split(b"\r\n")[1:]:
        if field.startswith(b"content-length:"):
            return int(field.partition(b":")[2])
    return 0
