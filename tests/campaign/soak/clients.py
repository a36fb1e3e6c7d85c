"""Clients of a gateway under faults: they send short answers and streams, and judge each answer.

On asyncio's streams and httptools: the client has to know which port of its own a request went
over, as that tells whether the worker that had its connection was killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import time
from collections import Counter
from dataclasses import dataclass, field

import httptools

MODEL = "soak"
# Of a client without one, a gateway keeps few connections.
KEY = "key-of-the-soak-0123456789"
STREAM_TOKENS, GAP_S = 20, 0.02
STREAMED = 0.2  # the share of requests
PATIENCE_S = 60.0
_BLOCK_TOKENS, _PREFIXES = 512, 50

# What docs/conductor/gateway.md and rest.md allow while engines, conductor and Redis are killed.
CLEAR: dict[int, frozenset[str]] = {
    429: frozenset({"rejected_ttft", "rejected_tbt", "rejected_kv_room", "rejected_queue_full"}),
    502: frozenset({"engine_failed", "request_poisonous"}),
    503: frozenset(
        {
            "engine_failed", "gateway_busy", "no_instance", "not_placed", "not_placed_in_time",
            "rejected_no_prefill", "rejected_no_decode",
        }
    ),
    504: frozenset({"engine_timeout", "timeout"}),
}  # fmt: skip
_EVENTS = frozenset().union(*CLEAR.values())


@dataclass(slots=True)
class Answer:
    """An answer as httptools tells of it."""

    status: int = 0
    fallback: bool = False
    body: bytearray = field(default_factory=bytearray)
    complete: bool = False

    def on_header(self, name: bytes, value: bytes) -> None:
        """Note the headers that count."""
        self.fallback |= name.lower() == b"x-tiffin-fallback"

    def on_body(self, data: bytes) -> None:
        """Keep a piece."""
        self.body += data

    def on_message_complete(self) -> None:
        """It is whole."""
        self.complete = True


class Broken(Exception):
    """A connection broke: the local port, and the monotonic time when it was opened."""

    def __init__(self, port: int, opened_s: float, why: str) -> None:
        super().__init__(why)
        self.port, self.opened_s = port, opened_s


class Connection:
    """A connection to the gateway, with one request at a time."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._local, self._opened_s = 0, 0.0

    async def ask(self, raw: bytes) -> Answer:
        """Send a request; returns its whole answer. Raises Broken."""
        try:
            return await self._ask(raw)
        except (OSError, httptools.HttpParserError) as error:
            self.close()
            raise Broken(self._local, self._opened_s, f"{type(error).__name__}: {error}") from error

    async def _ask(self, raw: bytes) -> Answer:
        if self._reader is None or self._reader.at_eof():
            self.close()
            self._local, self._opened_s = 0, time.monotonic()
            self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
            self._local = self._writer.get_extra_info("sockname")[1]
        assert self._writer is not None
        answer = Answer()
        parser = httptools.HttpResponseParser(answer)
        self._writer.write(raw)
        while not answer.complete:
            data = await self._reader.read(65536)
            if not data:
                raise ConnectionResetError("it ended within an answer")
            parser.feed_data(data)
        answer.status = parser.get_status_code()
        if not parser.should_keep_alive():
            self.close()
        return answer

    def close(self) -> None:
        """Close it."""
        if self._writer is not None:
            self._writer.close()
        self._reader = self._writer = None


def request(port: int, dice: random.Random) -> tuple[bytes, bool]:
    """A request as it goes over the wire, and whether its answer is a stream. Prompts share one of
    fifty prefixes."""
    stream = dice.random() < STREAMED
    tokens = [*[dice.randrange(_PREFIXES)] * _BLOCK_TOKENS, *dice.choices(range(9000), k=20)]
    more = {"stream": True, "max_tokens": STREAM_TOKENS, "gap_s": GAP_S} if stream else {}
    body = json.dumps({"model": MODEL, "prompt": tokens, "max_tokens": 1, **more}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n"
        f"Authorization: Bearer {KEY}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body, stream


def judge(answer: Answer, *, stream: bool) -> tuple[str, bool]:
    """What an answer is, in a word, and whether it is whole or a clear error."""
    body = bytes(answer.body)
    if answer.status == 200 and stream:
        return _judged_stream(body)
    try:
        said = json.loads(body)
    except ValueError:
        return f"{answer.status} that is no JSON: {body[:80]!r}", False
    if answer.status == 200:
        return ("answer", True) if said.get("choices") else (f"no choices in {body[:80]!r}", False)
    error = said.get("error", {})
    code = error.get("code")
    if code in CLEAR.get(answer.status, ()):
        return f"{answer.status} {code}", True
    return f"{answer.status} {code}: {error.get('message')}", False


def _judged_stream(body: bytes) -> tuple[str, bool]:
    events = [event for event in body.split(b"\n\n") if event.startswith(b"data: ")]
    tokens = sum(b'"choices"' in event for event in events)
    if events and events[-1] == b"data: [DONE]":
        if tokens == STREAM_TOKENS:
            return "stream", True
        return f"a stream with {tokens} of {STREAM_TOKENS} tokens and [DONE]", False
    with contextlib.suppress(IndexError, ValueError):
        code = json.loads(events[-1][6:]).get("error", {}).get("code")
        if code is not None:
            return f"event {code}", code in _EVENTS
    return "a stream without [DONE] or an error", False


class Load:
    """The load of a soak: its requests, and what came of them."""

    def __init__(self, port: int, seed: int) -> None:
        self.outcomes: Counter[str] = Counter()
        self.findings: list[str] = []
        self.broken: list[tuple[float, Broken]] = []  # when each connection broke, to be explained
        self.fallbacks = 0
        self._port = port
        self._dice = random.Random(seed)
        self._free: list[Connection] = []
        self._began_s = time.monotonic()

    async def most(self, seconds: float, at_once: int) -> float:
        """Requests per second of a closed loop, `at_once` at a time."""
        began_s, numbers = time.monotonic(), itertools.count()

        async def one_by_one() -> None:
            while time.monotonic() < began_s + seconds:
                await self._one()
                next(numbers)

        async with asyncio.TaskGroup() as group:
            for _ in range(at_once):
                group.create_task(one_by_one())
        return next(numbers) / (time.monotonic() - began_s)

    async def run(self, rate: float, seconds: float) -> None:
        """`rate` requests per second, at random times, whether or not earlier ones were answered;
        returns when all are."""
        due_s = time.monotonic()
        end_s = due_s + seconds
        async with asyncio.TaskGroup() as group:
            while (due_s := due_s + self._dice.expovariate(rate)) < end_s:
                await asyncio.sleep(due_s - time.monotonic())
                group.create_task(self._one())

    async def _one(self) -> None:
        raw, stream = request(self._port, self._dice)
        connection = self._free.pop() if self._free else Connection(self._port)
        try:
            async with asyncio.timeout(PATIENCE_S):
                answer = await connection.ask(raw)
        except TimeoutError:
            connection.close()
            self._count(f"no answer in {PATIENCE_S:.0f} s", clear=False)
        except Broken as broken:
            self.outcomes["broken connection"] += 1
            self.broken.append((time.monotonic(), broken))
        else:
            self.fallbacks += answer.fallback
            what, clear = judge(answer, stream=stream)
            self._count(what, clear=clear)
        self._free.append(connection)

    def told(self) -> str:
        """How many requests were answered so far, refused, and otherwise."""
        whole = self.outcomes["answer"] + self.outcomes["stream"]
        broken = self.outcomes["broken connection"]
        refused = self.outcomes.total() - whole - broken - len(self.findings)
        return (
            f"{whole} requests answered, {refused} refused or ended with an error, {broken} broken"
            f", {len(self.findings)} findings"
        )

    def _count(self, what: str, *, clear: bool) -> None:
        self.outcomes[what] += 1
        if not clear:
            self.findings.append(f"at {time.monotonic() - self._began_s:.1f} s: {what}")

    def close(self) -> None:
        """Close all connections."""
        for connection in self._free:
            connection.close()
