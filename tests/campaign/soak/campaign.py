"""The soak: a load, kills under it, and what has to hold.

python -m tests.campaign soak --minutes 30
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from .clients import Load
from .front_door import WORKERS, FrontDoor, kill_worker, until
from .memory import grown, memory_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from .memory import Sample

LOADED = 0.7
# A closed loop of so many for so long tells what this machine carries.
MEASURED_S, AT_ONCE = 5.0, 64
# Between two faults, and until what was killed is started again. A gateway that lost its
# conductor asks it every second.
CALM_S, AWAY_S = 12.0, (0.5, 4.0)
# The conductor is killed within this part of the time alone. The last one that is started has to
# fill what it keeps before its memory is watched.
KILLED_SHARE = 1 / 6
SAMPLE_S, TELL_S = 1.0, 60.0
# A client notices within this time that its connection has ended.
NOTICED_S = 2.0


@dataclass(slots=True)
class WorkerKill:
    """A worker that was killed: when it was stopped, when it was dead, and its clients' ports."""

    stopped_s: float
    dead_s: float
    ports: frozenset[int]

    def explains(self, broke_s: float, port: int, opened_s: float) -> bool:
        """Whether a connection from `port` broke because of it. One that was being opened just
        then may have been given to it after its connections were counted."""
        if not self.stopped_s <= broke_s <= self.dead_s + NOTICED_S:
            return False
        return port in self.ports or self.stopped_s - 1.0 <= opened_s <= self.dead_s


@dataclass(slots=True)
class Watched:
    """What was seen of the processes: memory, kills of workers, fallbacks that these counted."""

    memory: list[Sample] = field(default_factory=list)
    kills: list[WorkerKill] = field(default_factory=list)
    # Fallbacks that killed workers had counted, and answers that came while that was not known.
    lost_fallbacks: float = 0.0
    uncertain: int = 0
    never: list[str] = field(default_factory=list)  # what should have come and did not


class Soak:
    """One run."""

    def __init__(self, door: FrontDoor, seconds: float, seed: int) -> None:
        self.faults: Counter[str] = Counter()
        self.watched = Watched()
        self.load = Load(door.port, seed)
        self.door = door
        self._seconds = seconds
        self._dice = random.Random(seed)
        self._began_s = time.monotonic()

    async def run(self, calm_s: float) -> dict[str, Any]:
        """Measure, load, kill and check; returns the report."""
        async with asyncio.TaskGroup() as group:
            beside = [group.create_task(self.door.heartbeats())]
            await self.door.ready()
            carried = await self.load.most(MEASURED_S, AT_ONCE)
            self._began_s = time.monotonic()
            also = (self._sample(), self._fault(calm_s), self._tell())
            beside += [group.create_task(work) for work in also]
            await self.load.run(LOADED * carried, self._seconds)
            for one in beside[1:]:
                one.cancel()
            await asyncio.gather(*beside[1:], return_exceptions=True)
            report = await self._reported()
            beside[0].cancel()
        self.load.close()
        await self.door.close()
        return {**report, "requests_per_s": round(LOADED * carried)}

    async def _reported(self) -> dict[str, Any]:
        """The report, with what the processes say at the end."""
        left: Mapping[str, float] = {}
        counted = lost = 0.0
        try:
            left = await self._rest()
            lost = await self.door.lost()
            counted = await self.door.fallbacks(WORKERS) + self.watched.lost_fallbacks
        except (AssertionError, httpx.HTTPError) as never:
            self.watched.never.append(f"at the end {never!r}")
        return {**self._report(counted, left), "lost_at_the_conductor": lost}

    def _report(self, counted: float, left: Mapping[str, float]) -> dict[str, Any]:
        load, watched = self.load, self.watched
        told = {"answers": load.fallbacks, "metric": counted, "uncertain": watched.uncertain}
        memory = memory_of(watched.memory, self._seconds)
        return {
            "faults": dict(self.faults),
            "outcomes": dict(load.outcomes.most_common()),
            "fallbacks": told,
            "memory_mib": {name: one.told() for name, one in memory.items()},
            "answers": [
                *load.findings, *unexplained(load.broken, watched.kills), *watched.never,
            ],
            "leaks": [
                *(f"{name} is {value:g} at the end" for name, value in left.items()),
                *uncounted(**told), *grown(memory, self._seconds),
                *(f"{one} logged a traceback" for one in self._tracebacks()),
            ],
        }  # fmt: skip

    def _tracebacks(self) -> list[str]:
        logs = {"gateway": self.door.gateway.log(), "conductor": self.door.conductor.log()}
        for name, log in logs.items():
            if "Traceback" in log:
                print(name, log[-4000:], file=sys.stderr)
        return [name for name, log in logs.items() if "Traceback" in log]

    async def _rest(self) -> Mapping[str, float]:
        """What is still in flight a while after the last answer."""
        left: dict[str, float] = {}

        async def nothing() -> bool:
            left.clear()
            left.update(await self.door.in_flight())
            return not left

        await self.door.all_workers()
        with suppress(AssertionError):
            await until(nothing, "nothing is in flight")
        return left

    async def _sample(self) -> None:
        while True:
            self.watched.memory.append((self._at_s, self.door.memory()))
            await asyncio.sleep(SAMPLE_S)

    async def _tell(self) -> None:
        """A line on stderr every minute."""
        while True:
            await asyncio.sleep(TELL_S)
            at, of = self._at_s / 60, self._seconds / 60
            faults = sum(self.faults.values())
            print(
                f"minute {at:.0f} of {of:g}: {self.load.told()}; {faults} faults; "
                f"own memory in MiB: {self._memory_now()}",
                file=sys.stderr,
                flush=True,
            )

    def _memory_now(self) -> str:
        memory = self.watched.memory[-1][1] if self.watched.memory else {}
        return ", ".join(f"{name} {one.own_mib:.1f}" for name, one in memory.items())

    @property
    def _at_s(self) -> float:
        return time.monotonic() - self._began_s

    async def _fault(self, calm_s: float) -> None:
        peaked = set[str]()
        while True:
            for fault in self._dice.sample(FAULTS, len(FAULTS)):
                await asyncio.sleep(calm_s)
                # Later its memory is watched, so it has to live: it stands still instead.
                if fault is kill_conductor and self._at_s > self._seconds * KILLED_SHARE:
                    fault = stop_conductor
                self.faults[fault.__name__] += 1
                first = fault.__name__ not in peaked and self._at_s > self._seconds * KILLED_SHARE
                if first:  # what it leaves behind in the heaps is no growth later
                    peaked.add(fault.__name__)
                away_s = max(AWAY_S) if first else self._dice.uniform(*AWAY_S)
                try:
                    await fault(self, away_s)
                except AssertionError as never:
                    why = f"after {fault.__name__} at {self._at_s:.0f} s {never}"
                    self.watched.never.append(why)


# -- faults ----------------------------------------------------------------------------------------


async def kill_engine(soak: Soak, away_s: float) -> None:
    engine = soak.door.engines[soak.faults["kill_engine"] % len(soak.door.engines)]
    engine.kill()
    try:
        await asyncio.sleep(away_s)
    finally:
        engine.start()


async def kill_conductor(soak: Soak, away_s: float) -> None:
    conductor = soak.door.conductor
    conductor.process.kill()
    conductor.process.wait()
    try:
        await asyncio.sleep(away_s)
    finally:
        conductor.start()


async def stop_conductor(soak: Soak, away_s: float) -> None:
    process = soak.door.conductor.process
    process.send_signal(signal.SIGSTOP)
    try:
        await asyncio.sleep(away_s)
    finally:
        process.send_signal(signal.SIGCONT)


async def kill_redis(soak: Soak, away_s: float) -> None:
    soak.door.redis.kill()
    try:
        await asyncio.sleep(away_s)
    finally:
        soak.door.redis.start()


async def kill_gateway_worker(soak: Soak, _: float) -> None:
    """What it has counted is read before."""
    door, watched, load = soak.door, soak.watched, soak.load
    await door.all_workers()
    answered = load.fallbacks
    before = await door.fallbacks(WORKERS)
    stopped_s = time.monotonic()
    (victim, *_) = (pid for pid in door.workers() if pid != door.kept)
    ports = await kill_worker(victim, door.port)
    watched.kills.append(WorkerKill(stopped_s, time.monotonic(), frozenset(ports)))
    watched.lost_fallbacks += max(0.0, before - await door.fallbacks(WORKERS - 1))
    await asyncio.sleep(1.0)  # answers that were placed meanwhile are streams of half a second
    watched.uncertain += load.fallbacks - answered


FAULTS: list[Callable[[Soak, float], Awaitable[None]]] = [
    kill_engine, kill_conductor, kill_gateway_worker, kill_redis,
]  # fmt: skip


# -- checks ----------------------------------------------------------------------------------------


def unexplained(broken: Sequence[tuple[float, Any]], kills: Sequence[WorkerKill]) -> list[str]:
    """Broken connections that no kill of their own worker explains."""
    return [
        f"a connection from {why.port} broke, and not its worker: {why}; "
        f"{[round(broke_s - kill.stopped_s, 2) for kill in kills]} s after kills of workers"
        for broke_s, why in broken
        if not any(kill.explains(broke_s, why.port, why.opened_s) for kill in kills)
    ]


def uncounted(answers: int, metric: float, uncertain: int) -> list[str]:
    """Fallbacks that answers tell of and the metric does not. It may count more: of requests that
    were placed twice, or whose answer has no header, as it is an error."""
    missing = answers - metric - uncertain
    return [f"{missing:g} fallbacks were not counted"] if missing > 0 else []


def soak(seconds: float, seed: int, calm_s: float = CALM_S) -> dict[str, Any]:
    """Run it; returns the report, whose `answers` and `leaks` are findings."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tiffin-soak-")))
        run = Soak(FrontDoor(stack, folder), seconds, seed)
        return {"part": "soak", "seed": seed, "seconds": seconds, **asyncio.run(run.run(calm_s))}


def main(arguments: list[str]) -> int:
    """See `tests/campaign/__main__.py`."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaign soak")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--calm", type=float, default=CALM_S, help="seconds between two faults")
    chosen = parser.parse_args(arguments)
    report = soak(60.0 * chosen.minutes, chosen.seed, chosen.calm)
    for finding in (*report["answers"], *report["leaks"]):
        print(finding, file=sys.stderr)
    print(json.dumps(report))
    return 1 if report["answers"] or report["leaks"] else 0
