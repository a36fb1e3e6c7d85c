"""Requests to a scheduling service, over so many connections at a time; a process of its own.

    python -m tiffin.bench.conductor.load '{"port": 7800, "connections": 16, "prompts": 64, ...}'

It says `"ready"` and then reads lines: `ask N` sends N requests and answers with a list of seconds,
`finish` says that all of them have been answered, without being timed. A service that answers
anything but success ends it.

Written on the sockets of asyncio: an HTTP client takes more CPU time than the service that is
measured, of which there are as many cores.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import asdict, dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, cast

from tiffin.conductor import calls
from tiffin.conductor.records import Request, RequestEvent

from .index import keys_of
from .setting import BLOCK_TOKENS

if TYPE_CHECKING:
    from collections.abc import Iterator

_HOST = "127.0.0.1"
_ANSWER_S = 60.0


@dataclass(frozen=True, slots=True)
class Load:
    """What is sent: prompts of so many blocks, of which the first ones are all prompts'."""

    port: int
    model: str
    connections: int
    prompts: int
    prompt_blocks: int
    shared_blocks: int

    def text(self) -> str:
        """For the command line."""
        return json.dumps(asdict(self))


class _Connection(asyncio.Protocol):
    """One request at a time."""

    def __init__(self) -> None:
        self._received = b""
        self._answer: asyncio.Future[tuple[int, bytes]] | None = None
        self._transport: asyncio.Transport | None = None

    async def ask(self, raw: bytes) -> tuple[int, bytes]:
        """Status and body of the answer. Raises OSError if there is none."""
        assert self._transport is not None
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(raw)
        return await self._answer

    def close(self) -> None:
        """Nothing is under way."""
        assert self._transport is not None
        self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is of another family

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, ends, body = self._received.partition(b"\r\n\r\n")
        if not ends or self._answer is None:
            return
        status, length = _read_head(head)
        if len(body) >= length:
            self._received = b""
            self._answer.set_result((status, body))

    def connection_lost(self, error: Exception | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error or ConnectionResetError("it closed the connection"))


def _read_head(head: bytes) -> tuple[int, int]:
    """Status and length of what follows."""
    first, *fields = head.lower().split(b"\r\n")
    lengths = [field.partition(b":")[2] for field in fields if field.startswith(b"content-length:")]
    return int(first.split(b" ", 2)[1]), int(lengths[0]) if lengths else 0


class _Sender:
    """Makes requests, sends them and keeps the time."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._numbers = count()
        self._open: list[str] = []
        shared = keys_of(load.shared_blocks)
        tail = load.prompt_blocks - load.shared_blocks
        self._prompts = [tuple(shared + keys_of(tail)) for _ in range(load.prompts)]
        self._connections: list[_Connection] = []

    async def connect(self) -> None:
        """Open all connections."""
        loop = asyncio.get_running_loop()
        for _ in range(self._load.connections):
            _, one = await loop.create_connection(_Connection, _HOST, self._load.port)
            self._connections.append(one)

    async def ask(self, number: int) -> list[float]:
        """Schedule so many; seconds of each."""
        raw = [self._schedule() for _ in range(number)]
        return await self._send(raw)

    async def finish(self) -> list[float]:
        """All that are open have been answered."""
        raw = [self._raw(calls.observe(RequestEvent(name, "finished"))) for name in self._open]
        self._open.clear()
        return await self._send(raw)

    def close(self) -> None:
        """End all connections."""
        for one in self._connections:
            one.close()

    def _schedule(self) -> bytes:
        number = next(self._numbers)
        keys = self._prompts[number % len(self._prompts)]
        name = f"request-{number}"
        self._open.append(name)
        tokens = BLOCK_TOKENS * len(keys) + 100
        request = Request(name, self._load.model, tokens, keys)
        return self._raw(calls.schedule(request, None, ""))

    def _raw(self, call: calls.Call[Any]) -> bytes:
        body = call.body or b""
        kind = "Content-Type: application/json\r\n" if body else ""
        head = f"{call.method} {call.path} HTTP/1.1\r\nHost: {_HOST}:{self._load.port}\r\n"
        return f"{head}{kind}Content-Length: {len(body)}\r\n\r\n".encode() + body

    async def _send(self, raw: list[bytes]) -> list[float]:
        seconds: list[float] = []
        left = iter(raw)
        async with asyncio.timeout(_ANSWER_S), asyncio.TaskGroup() as tasks:
            for one in self._connections:
                tasks.create_task(_send_some(one, left, seconds))
        return seconds


async def _send_some(connection: _Connection, left: Iterator[bytes], seconds: list[float]) -> None:
    for raw in left:
        start_s = time.perf_counter()
        status, body = await connection.ask(raw)
        seconds.append(time.perf_counter() - start_s)
        if status >= 300:
            raise ConnectionError(f"answered {status}: {body[:500].decode(errors='replace')}")


async def run(load: Load) -> None:
    """Until the input ends."""
    sender, loop = _Sender(load), asyncio.get_running_loop()
    await sender.connect()
    print('"ready"', flush=True)
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        word, *numbers = line.split()
        seconds = await (sender.ask(int(numbers[0])) if word == "ask" else sender.finish())
        print(json.dumps(seconds), flush=True)
    sender.close()


if __name__ == "__main__":
    import uvloop

    uvloop.run(run(Load(**json.loads(sys.argv[1]))))
