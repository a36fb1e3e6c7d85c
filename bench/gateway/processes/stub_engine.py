"""An engine that computes nothing: it answers completions at once, or streams tokens as asked.

    python -m tiffin.bench.gateway.processes.stub_engine PORT ...

One process serves all ports, each as an engine of its own. Fields of a body that it knows:
`stream`, `max_tokens`; `gap_s`, between two tokens of a stream and before a whole answer. `POST
/tokenize` gives a token id per word. What routers ask before they use an engine, by GET, is
answered as vLLM and SGLang do. On asyncio's transports, as it has to be far faster than what is
measured before it.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from typing import Any, cast

_TOKENIZED = b'{"count": 5, "max_model_len": 8192, "tokens": [11, 12, 13, 14, 15]}'
_WHOLE = json.dumps(
    {
        "id": "cmpl-1",
        "object": "text_completion",
        "created": 1,
        "model": "stub",
        "choices": [{"index": 0, "text": " dabbawalla", "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 5, "completion_tokens": 1, "total_tokens": 6},
    }
).encode()
_EVENT = (
    b'data: {"id":"cmpl-1","object":"text_completion","created":1,"model":"stub",'
    b'"choices":[{"index":0,"text":" word","logprobs":null,"finish_reason":null}]}\n\n'
)
_MODELS = json.dumps({"object": "list", "data": [{"id": "stub", "object": "model"}]}).encode()
_ABOUT = json.dumps({"model_path": "stub", "served_model_name": "stub", "dp_size": 1}).encode()
_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _json(body: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % len(body) + body


_TOKEN, _END = _chunk(_EVENT), _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
_ANSWER, _TOKENS = _json(_WHOLE), _json(_TOKENIZED)
_GOT = {b"/v1/models": _json(_MODELS), b"/metrics": _json(b"")}
_TOLD = _json(_ABOUT)


class _Connection(asyncio.Protocol):
    """A connection with one request at a time."""

    def __init__(self) -> None:
        self._received = b""
        self._work: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, _: Exception | None) -> None:
        if self._work is not None:
            self._work.cancel()

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, ends, rest = self._received.partition(b"\r\n\r\n")
        length = _LENGTH.search(head)
        nbytes = int(length[1]) if length else 0
        if not ends or len(rest) < nbytes:
            return
        body, self._received = rest[:nbytes], rest[nbytes:]
        if head.startswith(b"POST /tokenize "):
            self._transport.write(_TOKENS)
            return
        if head.startswith(b"GET "):
            self._transport.write(_GOT.get(head.split(b" ", 2)[1], _TOLD))
            return
        asked = json.loads(body) if body else {}
        if asked.get("stream") or asked.get("gap_s"):
            self._work = asyncio.get_running_loop().create_task(self._answer(asked))
        else:
            self._transport.write(_ANSWER)

    async def _answer(self, asked: dict[str, Any]) -> None:
        gap_s = asked.get("gap_s", 0.0)
        if not asked.get("stream"):
            await asyncio.sleep(gap_s)
            self._transport.write(_ANSWER)
            return
        self._transport.write(_STREAM_HEAD + _TOKEN)
        for _ in range(asked["max_tokens"] - 1):
            await asyncio.sleep(gap_s)
            self._transport.write(_TOKEN)
        self._transport.write(_END)


async def run(ports: list[int]) -> None:
    """Serve until the process is ended."""
    loop = asyncio.get_running_loop()
    servers = [
        await loop.create_server(_Connection, "127.0.0.1", port, backlog=4096) for port in ports
    ]
    await asyncio.gather(*(server.serve_forever() for server in servers))


if __name__ == "__main__":
    import uvloop

    uvloop.run(run([int(port) for port in sys.argv[1:]]))
