"""Disturbs a conductor by costly requests or floods while it decides; a process of its own.

    python -m tiffin.bench.conductor.processes.disturber '{"port": 7800, "kind": "followers"}'

It prints `"ready"` and then reads lines, `begin` and `end`, and answers each with the number of its
operations so far.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import sys
from dataclasses import asdict, dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

_HOST = "127.0.0.1"
_HEAD = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n"
_PLANNING = {"predictor": "holt-winters", "interval_s": 1.0}
# The same interval without Holt-Winters: the planner has to observe intervals before it can fit.
_USUAL = {"predictor": "constant", "interval_s": 1.0}
FOLLOWERS = 64
HALF_OPEN = 4300
TOKENS = 131_072


@dataclass(frozen=True, slots=True)
class Disturbance:
    """The kind of a disturbance, and the port of the conductor."""

    port: int
    kind: str

    def text(self) -> str:
        """For the command line."""
        return json.dumps(asdict(self))


class _Disturber:
    def __init__(self, port: int) -> None:
        self._port = port
        self.done = 0

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(_HOST, self._port)

    async def _ask(self, method: str, path: str, body: bytes = b"") -> int:
        """Send a request on a connection of its own; returns the status of the answer."""
        reader, writer = await self._connect()
        try:
            kind = "Content-Type: application/json\r\n" if body else ""
            head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n{kind}"
            head += f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
            writer.write(head.encode() + body)
            answer = await reader.read(1 << 16)
            self.done += 1
            return int(answer.split(b" ", 2)[1])
        finally:
            writer.close()

    async def _often(self, every_s: float, once: Callable[[], Awaitable[object]]) -> None:
        while True:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                await once()
            await asyncio.sleep(every_s)

    async def forecast(self) -> None:
        """Enable a plan by Holt-Winters every second."""
        try:
            await self._patch(_PLANNING)
            await asyncio.sleep(3600)
        finally:
            await self._patch(_USUAL)

    async def replication(self) -> None:
        """Enable replication, which checks the hot prefixes every second."""
        try:
            await self._ask("PATCH", "/v1/policy", b'{"replication": {"enabled": true}}')
            await asyncio.sleep(3600)
        finally:
            await self._ask("PATCH", "/v1/policy", b'{"replication": {"enabled": false}}')

    async def _patch(self, planner: dict[str, Any]) -> None:
        await self._ask("PATCH", "/v1/policy", json.dumps({"planner": planner}).encode())

    async def tokens(self) -> None:
        """Match ten prompts a second as token ids; each tenth is too long."""
        prompt = json.dumps({"model": "m", "token_ids": [100_000] * TOKENS}).encode()
        too_long = json.dumps({"model": "m", "token_ids": [100_000] * 1_000_000}).encode()
        bodies = [prompt] * 9 + [too_long]

        async def once() -> None:
            await self._ask("POST", "/v1/blocks/match", bodies[self.done % len(bodies)])

        await self._often(0.1, once)

    async def followers(self) -> None:
        """Followers that each read the stream of decisions."""

        async def follow() -> None:
            reader, writer = await self._connect()
            path = "/v1/decisions/stream?candidates=5"
            writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            try:
                while await reader.read(1 << 20):
                    self.done += 1
            finally:
                writer.close()

        async with asyncio.TaskGroup() as tasks:
            for _ in range(FOLLOWERS):
                tasks.create_task(follow())

    async def readyz(self) -> None:
        """Read /readyz two hundred times a second."""
        await self._often(0.005, lambda: self._ask("GET", "/readyz"))

    async def instances(self) -> None:
        """List all instances as often as ten gateways that each do so every two seconds."""
        await self._often(0.2, lambda: self._ask("GET", "/v1/instances"))

    async def head(self) -> None:
        """Ten endless request heads a second, each until the conductor refuses it."""

        async def once() -> None:
            _, writer = await self._connect()
            try:
                writer.write(_HEAD + b"X: ")
                for _ in range(100):
                    writer.write(b"a" * (1 << 20))
                    await writer.drain()
            finally:
                self.done += 1
                writer.transport.abort()

        await self._often(0.1, once)

    async def half_open(self) -> None:
        """HALF_OPEN incomplete request heads, opened as fast as possible; then a new one for each
        that the conductor disconnects, at most a thousand a second."""
        free = asyncio.Semaphore(HALF_OPEN)

        async def hold() -> None:
            try:
                reader, writer = await self._connect()
                try:
                    writer.write(_HEAD)
                    self.done += 1
                    await reader.read()
                finally:
                    writer.transport.abort()
            except OSError:
                pass
            finally:
                free.release()

        async with asyncio.TaskGroup() as tasks:
            for number in count():
                await free.acquire()
                tasks.create_task(hold())
                await asyncio.sleep(0.0 if number < HALF_OPEN else 0.001)


async def run(disturbance: Disturbance) -> None:
    """Serve commands until the input ends."""
    disturber, loop = _Disturber(disturbance.port), asyncio.get_running_loop()
    work: Callable[[], Coroutine[Any, Any, None]] = getattr(disturber, disturbance.kind)
    going: asyncio.Task[None] | None = None
    print('"ready"', flush=True)
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        if going is not None:
            going.cancel()
            await asyncio.gather(going, return_exceptions=True)
            going = None
        if line.split() == ["begin"]:
            going = asyncio.create_task(work())
        print(json.dumps(disturber.done), flush=True)


if __name__ == "__main__":
    import uvloop

    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    uvloop.run(run(Disturbance(**json.loads(sys.argv[1]))))
