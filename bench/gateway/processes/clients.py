"""Clients of an OpenAI-compatible endpoint; a process of its own.

    python -m tiffin.bench.gateway.processes.clients

It prints `"ready"` and then reads commands, one JSON object a line, and prints what came of each:

    {"port": 7900, "body": {...}, "requests": 1000, "at_once": 64}      a closed loop
    {"port": 7900, "body": {...}, "requests": 1000, "rate": 900.0}      an open loop
    {"port": 7900, "body": {...}, "hold": 500}                          streams that stay open
    {"drop": true}                                                      and no longer

In an open loop the time of a request counts from when it was due. On asyncio's transports: an HTTP
client would take more CPU time than the gateway.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from dataclasses import asdict, dataclass, field
from typing import Any, cast

_HOST = "127.0.0.1"
_PATIENCE_S = 120.0
_TOKEN = b'data: {"'
_CODE = re.compile(rb'"code": *"(\w+)"')
# Streams that begin at the same time.
_BEGUN_AT_ONCE = 64


@dataclass(slots=True)
class Outcome:
    """What came of some requests: seconds of each good answer, seconds of each refusal (429, 503),
    how many answers of each status, the codes of refusals, tokens of streams, answers with a
    fallback's header, and how long all took."""

    seconds: list[float] = field(default_factory=list)
    refused_s: list[float] = field(default_factory=list)
    statuses: dict[str, int] = field(default_factory=dict)
    reasons: dict[str, int] = field(default_factory=dict)
    tokens: int = 0
    fallbacks: int = 0
    took_s: float = 0.0

    def add(self, answer: Answer, seconds: float) -> None:
        """Count an answer."""
        self.count(str(answer.status))
        self.tokens += answer.tokens
        self.fallbacks += answer.fallback
        if answer.status == 200:
            self.seconds.append(seconds)
        elif answer.status in (429, 503):
            self.refused_s.append(seconds)
            code = answer.code or "without a reason"
            self.reasons[code] = self.reasons.get(code, 0) + 1

    def count(self, what: str) -> None:
        """Count an answer by its status, or the error in its place."""
        self.statuses[what] = self.statuses.get(what, 0) + 1


@dataclass(slots=True)
class Answer:
    """An answer so far. `code` of its error."""

    status: int = 0
    code: str = ""
    tokens: int = 0
    fallback: bool = False


class _Connection(asyncio.Protocol):
    """A connection with one request at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._reset()

    def _reset(self) -> None:
        self._head = self._tail = b""
        self._left: int | None = None  # bytes of the body; None: in chunks, or not known yet
        self._answer = Answer()
        self._done: asyncio.Future[Answer] | None = None
        self._begun: asyncio.Future[None] | None = None

    async def ask(self, port: int, raw: bytes, *, begun: bool = False) -> Answer:
        """Send a request; returns its whole answer, or with `begun` what there is of it once a
        token has come. Raises OSError."""
        loop = asyncio.get_running_loop()
        if self._transport is None or self._transport.is_closing():
            await loop.create_connection(lambda: self, _HOST, port)
        assert self._transport is not None
        self._reset()
        self._done = loop.create_future()
        if begun:
            self._begun = loop.create_future()
        self._transport.write(raw)
        if self._begun is not None:
            await self._begun
            return self._answer
        return await self._done

    def close(self) -> None:
        """Close the connection."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, error: Exception | None) -> None:
        for one in (self._done, self._begun):
            if one is not None and not one.done():
                one.set_exception(error or ConnectionResetError("it closed the connection"))
                one.exception()  # of a stream that is held nobody asks

    def data_received(self, data: bytes) -> None:
        if not self._answer.status:
            self._head += data
            head, ends, data = self._head.partition(b"\r\n\r\n")
            if not ends:
                return
            self._read_head(head.lower())
        if self._left is not None:
            self._left -= len(data)
            ended = self._left <= 0
            if self._answer.status != 200:
                self._tail += data
                code = _CODE.search(self._tail) if ended else None
                self._answer.code = code[1].decode() if code else ""
        else:
            seen = self._tail + data
            self._answer.tokens += seen.count(_TOKEN)
            self._tail = seen[-len(_TOKEN) + 1 :]
            ended = self._tail.endswith(b"0\r\n\r\n")
        begun = ended or self._answer.tokens
        if begun and self._begun is not None and not self._begun.done():
            self._begun.set_result(None)
        if ended and self._done is not None and not self._done.done():
            self._done.set_result(self._answer)

    def _read_head(self, head: bytes) -> None:
        self._answer.status = int(head[9:12])
        self._answer.fallback = b"\r\nx-tiffin-fallback: " in head
        at = head.find(b"\r\ncontent-length:")
        if at >= 0:
            self._left = int(head[at + 17 :].split(b"\r\n", 1)[0])


@dataclass(slots=True)
class Clients:
    """Open connections, by port, and streams that are held."""

    free: dict[int, list[_Connection]] = field(default_factory=dict)
    held: list[_Connection] = field(default_factory=list)

    async def closed_loop(self, port: int, raw: bytes, requests: int, at_once: int) -> Outcome:
        """`requests` requests, so many at a time."""
        outcome, left = Outcome(), iter(range(requests))
        connections = self._some(port, at_once)

        async def one_by_one(connection: _Connection) -> None:
            for _ in left:
                await _timed(connection, port, raw, outcome, time.perf_counter())

        await self._run(outcome, [one_by_one(one) for one in connections])
        return outcome

    async def open_loop(self, port: int, raw: bytes, requests: int, rate: float) -> Outcome:
        """`requests` requests, so many a second, whether or not earlier ones were answered."""
        outcome, begin_s = Outcome(), time.perf_counter()
        free = self.free.setdefault(port, [])

        async def when_due(due_s: float) -> None:
            await asyncio.sleep(due_s - time.perf_counter())
            connection = free.pop() if free else _Connection()
            await _timed(connection, port, raw, outcome, due_s)
            free.append(connection)

        await self._run(outcome, [when_due(begin_s + at / rate) for at in range(requests)])
        return outcome

    async def hold(self, port: int, raw: bytes, streams: int) -> Outcome:
        """Begin streams, so many at a time that none waits for long, and leave them open."""
        outcome, room = Outcome(), asyncio.Semaphore(_BEGUN_AT_ONCE)
        new = [_Connection() for _ in range(streams)]
        self.held += new

        async def begin(connection: _Connection) -> None:
            async with room:
                outcome.add(await connection.ask(port, raw, begun=True), 0.0)

        await self._run(outcome, [begin(one) for one in new])
        return outcome

    async def drop(self) -> Outcome:
        """Hang up on all streams that are held."""
        for one in self.held:
            one.close()
        self.held.clear()
        return Outcome()

    def _some(self, port: int, number: int) -> list[_Connection]:
        there = self.free.setdefault(port, [])
        there += [_Connection() for _ in range(number - len(there))]
        return there[:number]

    async def _run(self, outcome: Outcome, work: list[Any]) -> None:
        begin_s = time.perf_counter()
        async with asyncio.timeout(_PATIENCE_S):
            await asyncio.gather(*work)
        outcome.took_s = time.perf_counter() - begin_s


async def _timed(
    connection: _Connection, port: int, raw: bytes, outcome: Outcome, since_s: float
) -> None:
    try:
        answer = await connection.ask(port, raw)
    except OSError as error:
        outcome.count(type(error).__name__)
        return
    outcome.add(answer, time.perf_counter() - since_s)


def request_of(port: int, body: dict[str, Any]) -> bytes:
    """A completion request as it goes over the wire."""
    raw = json.dumps(body).encode()
    return (
        f"POST /v1/completions HTTP/1.1\r\nHost: {_HOST}:{port}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
    ).encode() + raw


async def run() -> None:
    """Serve commands until the input ends."""
    clients, loop = Clients(), asyncio.get_running_loop()
    print('"ready"', flush=True)
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        asked = json.loads(line)
        if "drop" in asked:
            outcome = await clients.drop()
        else:
            port = asked["port"]
            raw = request_of(port, asked["body"])
            if "hold" in asked:
                outcome = await clients.hold(port, raw, asked["hold"])
            elif "rate" in asked:
                outcome = await clients.open_loop(port, raw, asked["requests"], asked["rate"])
            else:
                requests, at_once = asked["requests"], asked["at_once"]
                outcome = await clients.closed_loop(port, raw, requests, at_once)
        print(json.dumps(asdict(outcome)), flush=True)


if __name__ == "__main__":
    import resource

    import uvloop

    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    uvloop.run(run())
