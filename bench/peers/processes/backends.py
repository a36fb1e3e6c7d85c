"""Trivial workers behind a router: every request is answered at once, with the same completion.

    backends.py PORT ...

One process serves all ports on loopback, prints `"ready"`, and ends with its standard input. Its
answers are those that an engine gives: a completion, and for a router's look-ups a model.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import cast

MODEL = "bench"
_COMPLETION = {
    "id": "cmpl-0",
    "object": "text_completion",
    "created": 0,
    "model": MODEL,
    "choices": [{"index": 0, "text": "yes", "logprobs": None, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
}
_ABOUT = {"model_path": MODEL, "served_model_name": MODEL, "dp_size": 1, "is_generation": True}
_MODELS = {"object": "list", "data": [{"id": MODEL, "object": "model"}]}


def _answer(plain: object) -> bytes:
    body = json.dumps(plain).encode()
    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    return f"{head}\r\n\r\n".encode() + body


_COMPLETED, _TOLD, _LISTED = _answer(_COMPLETION), _answer(_ABOUT), _answer(_MODELS)


class Connection(asyncio.Protocol):
    """Reads whole requests and answers each."""

    def __init__(self) -> None:
        self._received = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Answer once the body is complete."""
        self._received += data
        head, ends, body = self._received.partition(b"\r\n\r\n")
        if not ends:
            return
        length = 0
        for field in head.lower().split(b"\r\n")[1:]:
            if field.startswith(b"content-length:"):
                length = int(field.partition(b":")[2])
        if len(body) < length:
            return
        self._received = b""
        assert self._transport is not None
        path = head.split(b" ", 2)[1]
        if head.startswith(b"POST"):
            self._transport.write(_COMPLETED)
        else:
            self._transport.write(_LISTED if path == b"/v1/models" else _TOLD)


async def _serve(ports: list[int]) -> None:
    loop = asyncio.get_running_loop()
    for port in ports:
        await loop.create_server(Connection, "127.0.0.1", port)
    print('"ready"', flush=True)
    await loop.run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(_serve([int(port) for port in sys.argv[1:]]))
