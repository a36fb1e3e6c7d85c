"""The processes of a soak, and what can be seen of them from outside."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
from directory.ports import free_port
from directory.redisserver import RedisServer
from serversupport import GatewayProcess, Process

from tiffin.conductor.client import AsyncConductorClient
from tiffin.conductor.errors import ConductorError
from tiffin.conductor.records import InstanceSpec, Load, Role
from tiffin.kvstore import KVSchema

from .clients import KEY, MODEL
from .memory import Memory

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from contextlib import ExitStack

ENGINES, WORKERS = 4, 2
# A machine with more to do takes most of a minute to start the processes.
SETTLE_S = 180.0
# A system call, of the same number on all machines.
_PIDFD_GETFD = 438
_libc = ctypes.CDLL(None, use_errno=True)
_PROFILE = "llama-3.1-8b.h100.tp1.vllm"
# Reservations of a killed worker's requests are to end within the run's last minute.
# Its log of decisions is full long before its memory is watched, however slow the machine is.
_CONDUCTOR = {"core": {"decision_ttl_s": 20.0, "log_max": 2000}}
# So that prompts have keys, and workers keep the last known state of their prefixes.
_GATEWAY = {"default": {"tokenizer": "estimate", "keys": "conductor"}}
_SCHEMA = KVSchema.gqa(model=MODEL, layers=2, kv_heads=2, head_dim=8, dtype="bfloat16")
_HEARTBEAT_S = 1.0
_KIB_PER_MIB = 1024


class Engine:
    """A stub engine as a process."""

    def __init__(self, number: int) -> None:
        self.port = free_port()
        self.spec = InstanceSpec(
            f"e{number}", MODEL, Role.MIXED, _PROFILE, url=f"http://127.0.0.1:{self.port}"
        )
        self.process: subprocess.Popen[bytes]
        self.start()

    def start(self) -> None:
        """Start it, also again."""
        module = "tiffin.bench.gateway.processes.stub_engine"
        self.process = subprocess.Popen([sys.executable, "-m", module, str(self.port)])

    def kill(self) -> None:
        """kill -9."""
        self.process.kill()
        self.process.wait()


class FrontDoor:
    """Engines, a Redis, a conductor that shares its load there, and a gateway with two workers."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self.engines = [Engine(number) for number in range(ENGINES)]
        for engine in self.engines:
            stack.callback(engine.kill)
        self.redis = stack.enter_context(RedisServer(folder))
        self.port, conductor = free_port(), free_port()
        self.conductor_url = f"http://127.0.0.1:{conductor}"
        keys = folder / "keys"
        keys.touch(mode=0o600)
        keys.write_text(KEY)
        configs = {"conductor": _CONDUCTOR, "gateway": _GATEWAY}
        for name, config in configs.items():
            (folder / f"{name}.json").write_text(json.dumps(config))
        quiet = ("--log-level", "warning")
        self.conductor = stack.enter_context(
            Process(
                *("--listen", f"127.0.0.1:{conductor}", "--share", self.redis.url),
                *("--config", str(folder / "conductor.json"), *quiet),
            )
        )
        self.gateway = stack.enter_context(
            GatewayProcess(
                *("--listen", f"127.0.0.1:{self.port}", "--conductor", self.conductor_url),
                *("--config", str(folder / "gateway.json"), "--token-file", str(keys)),
                *("--workers", str(WORKERS), *quiet),
            )
        )
        self.kept = 0  # the pid of the worker that is not killed, as its memory is watched
        headers = {"authorization": f"Bearer {KEY}"}
        self._http = httpx.AsyncClient(trust_env=False, timeout=10.0, headers=headers)

    async def ready(self) -> None:
        """Wait until all workers serve, and know all engines."""
        await self.all_workers()
        self.kept = self.workers()[0]

        async def known() -> bool:
            return (await self.metrics())["instances"] == ENGINES

        await until(known, "the gateway knows the engines")

    async def all_workers(self) -> None:
        """Wait until all workers serve, and their conductor answers."""

        async def they_do() -> bool:
            found = await self.metrics()
            return found["workers"] == WORKERS and bool(found["conductor_up"])

        await until(they_do, "the workers serve, and the conductor answers")

    async def fallbacks(self, workers: int) -> float:
        """How many fallbacks so many workers have counted."""
        found: dict[str, float] = {}

        async def complete() -> bool:
            found.update(await self.metrics())
            return found["workers"] == workers

        await until(complete, f"{workers} workers answer")
        return found["fallbacks_total"]

    async def metrics(self) -> dict[str, float]:
        """The gateway's metrics, each summed over its labels. Raises httpx.HTTPError."""
        text = (await self._http.get(f"http://127.0.0.1:{self.port}/metrics")).text
        found: dict[str, float] = {}
        for name, value in re.findall(
            r"^tiffin_gateway_(\w+)(?:\{.*\})? (\S+)$", text, re.MULTILINE
        ):
            found[name] = found.get(name, 0.0) + float(value)
        return found

    async def in_flight(self) -> dict[str, float]:
        """What is not at rest: gauges of the gateway, and requests at the conductor, by name."""
        names = ("requests_in_flight", "requests_placing", "requests_queued", "held_bytes")
        metrics = await self.metrics()
        found = {name: metrics[name] for name in names}
        text = (await self._http.get(f"{self.conductor_url}/metrics")).text
        for value in re.findall(r"^tiffin_conductor_requests_in_flight\S* (\S+)$", text, re.M):
            found["at the conductor"] = found.get("at the conductor", 0.0) + float(value)
        return {name: value for name, value in found.items() if value}

    async def lost(self) -> float:
        """Requests whose end the conductor was not told, since it was started last."""
        text = (await self._http.get(f"{self.conductor_url}/metrics")).text
        found = re.search(
            r'^tiffin_conductor_requests_ended_total{why="expired"} (\S+)$', text, re.MULTILINE
        )
        return float(found[1]) if found else 0.0

    def workers(self) -> list[int]:
        """The pids of the gateway's workers."""
        pid = self.gateway.process.pid
        path = Path(f"/proc/{pid}/task/{pid}/children")
        return [int(pid) for pid in path.read_text(encoding="ascii").split()]

    async def heartbeats(self) -> None:
        """Register living engines every second, as what runs beside an engine does."""
        async with AsyncConductorClient(self.conductor_url, retries=0) as client:
            while True:
                for engine in self.engines:
                    if engine.process.poll() is None:
                        with contextlib.suppress(ConductorError):
                            await client.register(engine.spec, Load(), _SCHEMA)
                await asyncio.sleep(_HEARTBEAT_S)

    def memory(self) -> dict[str, Memory]:
        """The memory of the processes that are to live on, of those that do, by name and pid."""
        gateway, conductor = self.gateway.process.pid, self.conductor.process.pid
        found = {}
        for name, pid in (("gateway", gateway), ("worker", self.kept), ("conductor", conductor)):
            with contextlib.suppress(OSError):
                found[f"{name} {pid}"] = memory_of_process(pid)
        return found

    async def close(self) -> None:
        """Close what asks them."""
        await self._http.aclose()


def memory_of_process(pid: int) -> Memory:
    """Its memory. Raises OSError for a process that has ended."""
    text = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    kib = {
        name: int(value) for name, value in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)
    }
    return Memory(kib.get("RssAnon", 0) / _KIB_PER_MIB, kib.get("VmRSS", 0) / _KIB_PER_MIB)


def clients_of(pid: int, port: int) -> set[int]:
    """The ports of those that are connected to `port` of this process, or of none yet. A stopped
    process accepts no more meanwhile. Raises OSError."""
    return _accepted(pid, port) | _not_accepted(port)


def _accepted(pid: int, port: int) -> set[int]:
    """By the process's own sockets: the system's table leaves out some while others change."""
    found, process = set(), os.pidfd_open(pid)
    try:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if not str(link.readlink()).startswith("socket:"):
                    continue
                number = _pidfd_getfd(process, int(link.name))
                with socket.socket(fileno=number) as connection:
                    if connection.getsockname()[1:2] == (port,):
                        found.add(connection.getpeername()[1])
    finally:
        os.close(process)
    return found


def _pidfd_getfd(process: int, number: int) -> int:
    """A file of another process as one of ours; Python has no function for it. Raises OSError."""
    found: int = _libc.syscall(_PIDFD_GETFD, process, number, 0)
    if found < 0:
        raise OSError(ctypes.get_errno(), "pidfd_getfd")
    return found


def _not_accepted(port: int) -> set[int]:
    found = set()
    for line in Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()[1:]:
        fields = line.split()
        local, remote, inode = fields[1], fields[2], fields[9]
        if int(local.split(":")[1], 16) == port and inode == "0":
            found.add(int(remote.split(":")[1], 16))
    return found


async def kill_worker(pid: int, port: int) -> set[int]:
    """kill -9 a worker; returns the ports of the clients whose connections it had. It is dead when
    this returns: a busy machine takes a while to end it, and it gets connections meanwhile."""
    os.kill(pid, signal.SIGSTOP)
    try:
        found = clients_of(pid, port)
    finally:
        os.kill(pid, signal.SIGKILL)

    async def dead() -> bool:
        return has_ended(pid)

    await until(dead, f"{pid} ends")
    return found


def has_ended(pid: int) -> bool:
    """With all its threads: until the last one ends, it listens and is given connections."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    except OSError:
        return True
    state, threads = fields[0], int(fields[17])
    return state in "ZX" and threads <= 1


async def until(holds: Callable[[], Awaitable[bool]], what: str) -> None:
    """Wait until `await holds()`; errors of the network count as not yet. Raises AssertionError."""
    give_up_s = time.monotonic() + SETTLE_S
    while True:
        with contextlib.suppress(httpx.HTTPError):
            if await holds():
                return
        assert time.monotonic() < give_up_s, f"never: {what}"
        await asyncio.sleep(0.05)
