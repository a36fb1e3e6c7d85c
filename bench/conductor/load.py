"""Load generator for a scheduling service, over several connections; a process of its own.

    python -m tiffin.bench.conductor.load '{"port": 7800, "connections": 16, "prompts": 64, ...}'

It prints `"ready"` and then reads lines: `ask N` sends N requests in a closed loop and prints a
list of seconds; `pace N RATE` sends them in an open loop, RATE a second, whether or not earlier
requests were answered, and measures from the time when each was due: a closed loop, which waits for
an answer before the next request, hardly notices a stalled service. `finish` reports all scheduled
requests as finished to the service. `whole N` schedules N requests and then tells all events of
their answers in batches, `single N` in a call each. A status that is no success ends the process.

Written on asyncio's transports: an HTTP client would take more CPU time than the service under
test, which has no more cores than this process: one.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import asdict, dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, cast

from msgspec import structs

from tiffin.conductor.client import calls
from tiffin.conductor.records import Request, RequestEvent
from tiffin.conductor.wire.event_batch import EVENTS_MAX

from .index import keys_of
from .setting import BLOCK_TOKENS

if TYPE_CHECKING:
    from collections.abc import Iterator

_HOST = "127.0.0.1"
_ANSWER_S = 60.0
# An answer, and how much of it a gateway tells at a time: its default.
ANSWER_TOKENS = 350
_REPORT_TOKENS = 32


@dataclass(frozen=True, slots=True)
class RequestLoad:
    """The load: prompts of `prompt_blocks` blocks, of which all share the first
    `shared_blocks`."""

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
    """A connection with one in-flight request at a time."""

    def __init__(self) -> None:
        self._received = b""
        self._answer: asyncio.Future[tuple[int, bytes]] | None = None
        self._transport: asyncio.Transport | None = None

    async def ask(self, raw: bytes) -> tuple[int, bytes]:
        """Send a request; returns status and body of the answer. Raises OSError if there is
        none."""
        assert self._transport is not None
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(raw)
        return await self._answer

    def close(self) -> None:
        """Close the connection; no request may be in flight."""
        assert self._transport is not None
        self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's has another base class

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
    """Status and length of the body."""
    first, *fields = head.lower().split(b"\r\n")
    lengths = [field.partition(b":")[2] for field in fields if field.startswith(b"content-length:")]
    return int(first.split(b" ", 2)[1]), int(lengths[0]) if lengths else 0


class _Sender:
    """Makes requests, sends them and measures their latency."""

    def __init__(self, load: RequestLoad) -> None:
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
        """Schedule `number` requests in a closed loop; seconds of each."""
        raw = [self._schedule() for _ in range(number)]
        return await self._send(raw)

    async def pace(self, number: int, rate: float) -> list[float]:
        """Schedule `number` requests in an open loop, `rate` a second; seconds of each, from the
        time when it was due."""
        seconds: list[float] = []
        free: asyncio.Queue[_Connection] = asyncio.Queue()
        for one in self._connections:
            free.put_nowait(one)

        async def send(raw: bytes, due_s: float) -> None:
            await asyncio.sleep(due_s - time.perf_counter())
            connection = await free.get()
            await _send_one(connection, raw)
            free.put_nowait(connection)
            seconds.append(time.perf_counter() - due_s)

        raw = [self._schedule() for _ in range(number)]
        begin_s = time.perf_counter()
        async with asyncio.timeout(_ANSWER_S), asyncio.TaskGroup() as tasks:
            for at, one_raw in enumerate(raw):
                tasks.create_task(send(one_raw, begin_s + at / rate))
        return seconds

    async def finish(self) -> list[float]:
        """Report all open requests as finished; seconds of each report."""
        raw = [self._raw(calls.observe(RequestEvent(name, "finished"))) for name in self._open]
        self._open.clear()
        return await self._send(raw)

    async def whole(self, number: int, *, single: bool) -> list[float]:
        """Schedule `number` requests and tell all events of their answers, those that happen at the
        same time in one call, or in a call each; seconds of each call."""
        seconds = await self.ask(number)
        for event in events_of_an_answer():
            told = [structs.replace(event, request_id=name) for name in self._open]
            if single:
                raw = [self._raw(calls.observe(one)) for one in told]
            else:
                batches = range(0, len(told), EVENTS_MAX)
                raw = [self._raw(calls.observe_many(told[at : at + EVENTS_MAX])) for at in batches]
            seconds += await self._send(raw)
        self._open.clear()
        return seconds

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
        return self._raw(calls.schedule(request))

    def _raw(self, call: calls.RestCall[Any]) -> bytes:
        return raw_call(call, self._load.port)

    async def _send(self, raw: list[bytes]) -> list[float]:
        seconds: list[float] = []
        left = iter(raw)
        async with asyncio.timeout(_ANSWER_S), asyncio.TaskGroup() as tasks:
            for one in self._connections:
                tasks.create_task(_send_some(one, left, seconds))
        return seconds


def raw_call(call: calls.RestCall[Any], port: int) -> bytes:
    """A call to a service at this port, as it is sent."""
    body = call.body or b""
    kind = "Content-Type: application/json\r\n" if body else ""
    head = f"{call.method} {call.path} HTTP/1.1\r\nHost: {_HOST}:{port}\r\n"
    return f"{head}{kind}Content-Length: {len(body)}\r\n\r\n".encode() + body


def events_of_an_answer() -> list[RequestEvent]:
    """What a gateway tells of an answer."""
    totals = range(1 + _REPORT_TOKENS, ANSWER_TOKENS, _REPORT_TOKENS)
    return [
        RequestEvent("", "first_token", age_s=0.01),
        *(RequestEvent("", "tokens", total_tokens=total, age_s=0.01) for total in totals),
        RequestEvent("", "finished", total_tokens=ANSWER_TOKENS, age_s=0.01),
    ]


async def _send_some(connection: _Connection, left: Iterator[bytes], seconds: list[float]) -> None:
    for raw in left:
        start_s = time.perf_counter()
        await _send_one(connection, raw)
        seconds.append(time.perf_counter() - start_s)


async def _send_one(connection: _Connection, raw: bytes) -> None:
    status, body = await connection.ask(raw)
    if status >= 300:
        raise ConnectionError(f"answered {status}: {body[:500].decode(errors='replace')}")


async def run(load: RequestLoad) -> None:
    """Serve commands until the input ends."""
    sender, loop = _Sender(load), asyncio.get_running_loop()
    await sender.connect()
    print('"ready"', flush=True)
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        word, *numbers = line.split()
        if word == "pace":
            seconds = await sender.pace(int(numbers[0]), float(numbers[1]))
        elif word in ("whole", "single"):
            seconds = await sender.whole(int(numbers[0]), single=word == "single")
        else:
            seconds = await (sender.ask(int(numbers[0])) if word == "ask" else sender.finish())
        print(json.dumps(seconds), flush=True)
    sender.close()


if __name__ == "__main__":
    import uvloop

    uvloop.run(run(RequestLoad(**json.loads(sys.argv[1]))))
