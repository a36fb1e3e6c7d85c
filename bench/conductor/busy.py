"""Rows about the tail latency of decisions while all else goes on, in CPU time of the deciding
thread.

The service runs in this process on an event loop whose clock is the CPU time of its thread, and
jumps where the loop would sleep. So a latency has everything that the thread does between the time
when a request is due and its answer (HTTP, JSON, other requests, its own ticks, collections of
garbage), and nothing of what other processes do to this machine.

Meanwhile: each of a thousand instances sends its registration and its load every 2 seconds; all
events of answers of 350 tokens come in batches every 25 ms; the conductor ticks ten times a second;
steering looks at 256 hot prefixes on 125 nodes, and somebody reads `/metrics`, every second.
"""

from __future__ import annotations

import asyncio
import heapq
import random
import selectors
import time
from collections import deque
from typing import TYPE_CHECKING, Any, cast

from msgspec import structs

from tiffin.conductor.api.app import create_app
from tiffin.conductor.client import calls
from tiffin.conductor.core import Conductor
from tiffin.conductor.events.index_updates import Added
from tiffin.conductor.records import Load, Request, RequestEvent
from tiffin.conductor.service.http_protocol import LimitedProtocol
from tiffin.conductor.service.server import collecting
from tiffin.conductor.service.web_server import web_server
from tiffin.conductor.web.connection_limits import ConnectionLimits
from tiffin.conductor.web.time_slices import TimeSlices
from tiffin.conductor.wire.event_batch import EVENTS_MAX

from ..store.rows import MILLISECONDS, Row, Target, times
from .decision import MODEL, spec
from .hot_pool import spaces_with_hot_prefixes
from .index import keys_of
from .load import events_of_an_answer, raw_call
from .setting import BLOCK_TOKENS

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from tiffin.conductor.api.conductor_service import Service

    from .setting import Setting, Sizes

_RATE = 150.0  # requests per second
_NODES, _PREFIXES = 125, 256
_BEAT_S, _BATCH_S, _TICK_S, _STEER_S, _SCRAPE_S = 2.0, 0.025, 0.1, 1.0, 1.0
# When the events of an answer happen, after its decision: 25 ms between tokens.
_FIRST_TOKEN_S, _REPORT_S = 0.5, 0.8
_ADDRESS = ("127.0.0.1", 7800)


class _SkippingSelector(selectors.DefaultSelector):
    """Never waits: adds up how long it would have waited, at most."""

    def __init__(self) -> None:
        super().__init__()
        self.skipped_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.skipped_s += max(timeout or 0.0, 0.0)
        return super().select(0)


class _CpuClockLoop(asyncio.SelectorEventLoop):
    """An event loop on the clock that the top of this file describes."""

    def __init__(self) -> None:
        self._skipping = _SkippingSelector()
        super().__init__(self._skipping)

    def time(self) -> float:
        return time.thread_time() + self._skipping.skipped_s


class _Transport(asyncio.Transport):
    """The other end of a connection: notes when the answer is complete."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__({"peername": _ADDRESS, "sockname": _ADDRESS})
        self._loop = loop
        self.answered: asyncio.Future[float] = loop.create_future()

    def write(self, data: Any) -> None:
        # The head comes with its body (`held_head.py`), of a long answer with the first piece.
        if self.answered.done():
            return
        answer = bytes(data)
        if answer.split(b" ", 2)[1] < b"300":
            self.answered.set_result(self._loop.time())
        else:
            self.answered.set_exception(ConnectionError(f"{answer[:500]!r}"))

    def next(self) -> None:
        """Begin the next request."""
        self.answered = self._loop.create_future()

    def is_closing(self) -> bool:
        return False

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


class _Fleet:
    """A conductor and all that happens to it."""

    def __init__(self, sizes: Sizes) -> None:
        self._loop = asyncio.get_running_loop()
        self._sizes = sizes
        self._dice = random.Random(0)
        self._core = Conductor(dice=random.Random(1))
        app = create_app(self._core, clock=self._loop.time)
        self._service: Service = app.state.service
        self._server = web_server(app, ConnectionLimits(), stop_s=1, tls=None)
        self._server.config.timeout_keep_alive = 3600  # a connection is idle in turns without beats
        self._free: list[tuple[LimitedProtocol, _Transport]] = []
        self._due: list[tuple[float, int, RequestEvent]] = []
        self._asked = 0
        now = self._loop.time()
        self._core.patch({"core": {"heartbeat_timeout_s": 3600.0}}, now)  # none in turns without
        self._spaces = spaces_with_hot_prefixes(self._core, _NODES, _PREFIXES, now)
        shared = keys_of(sizes.shared_blocks)
        tail_blocks = sizes.prompt_blocks - sizes.shared_blocks
        self._prompts = [tuple(shared + keys_of(tail_blocks)) for _ in range(sizes.instances)]
        load = Load(0, 0, 0, 0, 0, age_s=0.01)
        self._beats: deque[bytes] = deque()
        for number, keys in enumerate(self._prompts):
            one = spec(f"instance-{number}", number)
            self._core.register(one, now)
            self._core.apply(Added(one.id, "hbm", keys), now)
            self._beats.append(raw_call(calls.register(one, load), _ADDRESS[1]))

    async def run(self, seconds: float, *, busy: bool) -> list[float]:
        """Requests for so long, with all else (`busy`) or without; seconds of each."""
        begin_s = self._loop.time()
        until_s = begin_s + seconds
        latencies: list[asyncio.Task[float]] = []
        async with asyncio.TaskGroup() as tasks:
            collector = tasks.create_task(collecting())
            own = ((_TICK_S, self._tick), (_BATCH_S, self._tell))
            for every_s, work in (*own, *(self._else() if busy else ())):
                tasks.create_task(self._repeat(every_s, work, until_s))
            at = begin_s
            while (at := at + self._dice.expovariate(_RATE)) < until_s:
                await asyncio.sleep(at - self._loop.time() - _TICK_S)
                latencies.append(tasks.create_task(self._schedule(at)))
            await asyncio.wait(latencies)
            collector.cancel()
        # What is due later would come all at once in the next run.
        self._due.clear()
        for flight in self._core.ledger:
            self._core.observe(RequestEvent(flight.request.id, "cancelled"), self._loop.time())
        return [one.result() for one in latencies]

    def _else(self) -> Iterator[tuple[float, Callable[[], Awaitable[object]]]]:
        core, loop = self._core, self._loop
        scrape = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"
        yield (
            _STEER_S,
            lambda: TimeSlices().finish(core.steering.ticking(self._spaces, loop.time())),
        )
        yield _SCRAPE_S, lambda: self._ask(scrape, loop.time())
        yield _BEAT_S / self._sizes.instances, self._beat

    async def _repeat(
        self, every_s: float, work: Callable[[], Awaitable[object]], until_s: float
    ) -> None:
        at = self._loop.time()
        while (at := at + every_s) < until_s:
            await asyncio.sleep(at - self._loop.time())
            await work()

    async def _schedule(self, at: float) -> float:
        """Schedule a request that is due at a time; seconds until its answer."""
        self._asked += 1
        name = f"request-{self._asked}"
        keys = tuple(bytes(bytearray(key)) for key in self._dice.choice(self._prompts))
        request = Request(name, MODEL, BLOCK_TOKENS * len(keys) + 100, keys)
        answered = await self._ask(raw_call(calls.schedule(request), _ADDRESS[1]), at)
        for number, event in enumerate(events_of_an_answer()):
            happens_at = at + _FIRST_TOKEN_S + number * _REPORT_S
            told = structs.replace(event, request_id=name)
            heapq.heappush(self._due, (happens_at, 100 * self._asked + number, told))
        return answered - at

    async def _tick(self) -> None:
        await TimeSlices().finish(self._service.ticking())

    async def _tell(self) -> None:
        """Tell what has happened, in a batch."""
        events, now = list[RequestEvent](), self._loop.time()
        while self._due and self._due[0][0] <= now and len(events) < EVENTS_MAX:
            events.append(heapq.heappop(self._due)[2])
        if events:
            await self._ask(raw_call(calls.observe_many(events), _ADDRESS[1]), now)

    async def _beat(self) -> None:
        self._beats.rotate(-1)
        await self._ask(self._beats[0], self._loop.time())

    async def _ask(self, raw: bytes, at: float) -> float:
        """Send a request at a time; when it was answered."""
        protocol, transport = self._free.pop() if self._free else self._connection()
        transport.next()
        self._loop.call_at(at, protocol.data_received, raw)
        answered_at = await transport.answered
        self._free.append((protocol, transport))
        return answered_at

    def _connection(self) -> tuple[LimitedProtocol, _Transport]:
        transport = _Transport(self._loop)
        server = self._server
        config = cast("Any", server.config)
        protocol = LimitedProtocol(config, server.server_state, {}, self._loop)
        protocol.connection_made(transport)
        return protocol, transport


def busy(setting: Setting) -> list[Row]:
    """The p99 of `POST /v1/schedule` in CPU time, alone and while all else goes on."""
    sizes = setting.sizes
    setting.tell(f"{sizes.stall_turns} turns of {sizes.busy_s:g} s with all else, and without")
    with asyncio.Runner(loop_factory=_CpuClockLoop) as runner:
        alone, beside = runner.run(_turns(sizes))
    return [
        Row(
            name="busy",
            what=(
                f"p99 of POST /v1/schedule of {sizes.prompt_blocks} block keys in CPU time of the "
                f"deciding thread, {_RATE:.0f} a second, with the events of their answers, "
                f"heartbeats of {sizes.instances} instances, ticks, steering and scrapes"
            ),
            unit="ms",
            value=times(beside, MILLISECONDS),
            limit_what="p99 of the same requests with their events and ticks alone",
            limit=times(alone, MILLISECONDS),
            targets=(Target("p50", "<=", 2.0),),
            note=f"{sizes.stall_turns} turns of {sizes.busy_s:g} s, on a clock of CPU time",
        )
    ]


async def _turns(sizes: Sizes) -> tuple[list[float], list[float]]:
    """The p99 of each turn, without all else and with it; the first ones warm up."""
    fleet = _Fleet(sizes)
    found: tuple[list[float], list[float]] = [], []
    for turn in range(sizes.stall_turns + 1):
        for samples, beside in zip(found, (False, True), strict=True):
            seconds = sorted(await fleet.run(sizes.busy_s, busy=beside))
            if turn:
                samples.append(seconds[len(seconds) * 99 // 100])
    return found
