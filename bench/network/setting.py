"""What the measurements share: how large a run is, nodes on the network, a clock of CPU time."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tiffin.kvstore.cli.local.local_redis import free_port, need_redis
from tiffin.kvstore.client.client import Client
from tiffin.kvstore.errors import InvalidInput, NodeUnavailable

from ..store.setting import KIB, MIB, silent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

LOOPBACK = "127.0.0.1"
_START_S = 60.0

# The daemon as users start it, without needing the program to be installed.
_COMMANDS = (
    "import typer; from tiffin.kvstore.cli import commands;"
    " app = typer.Typer(); commands(app); app()"
)


class Missing(Exception):
    """A measurement needs a program or library that is not here; says how to get it."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much a run measures. The defaults are the run that `docs/benchmarks.md` shows."""

    rounds: int = 20
    block_bytes: tuple[int, ...] = (16 * MIB, 64 * MIB)
    # Of one get. More than the last cache has, so that each byte comes from memory.
    transfer_bytes: int = 256 * MIB
    small_block_bytes: int = 64 * KIB
    calls: int = 50
    # Blocks of which one head of eight is read: 64 ranges each, 32 KiB at 16 MiB.
    scattered_block_bytes: int = 16 * MIB
    scattered_blocks: int = 16
    prefix_blocks: int = 256
    layered_block_bytes: int = 64 * MIB
    readers: tuple[int, ...] = (1, 2, 4, 8, 16)
    reader_bytes: int = 32 * MIB
    # Of all readers together, for each of their numbers.
    read_bytes: int = 1024 * MIB
    reader_rounds: int = 7

    @classmethod
    def quick(cls) -> Sizes:
        """Less of the same: half a minute instead of minutes."""
        return cls(
            rounds=6,
            transfer_bytes=128 * MIB,
            calls=20,
            reader_bytes=16 * MIB,
            read_bytes=256 * MIB,
            reader_rounds=3,
        )


@dataclass(frozen=True, slots=True)
class Setting:
    """One run: its sizes, a Python that has Mooncake if there is one, and whom to tell what is
    going on."""

    sizes: Sizes
    mooncake: Path | None = None
    tell: Callable[[str], None] = field(default=silent)


# -- processes -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RemoteNode:
    """A running node process and its network address."""

    address: tuple[str, int]
    pid: int
    token_file: Path | None = None

    @property
    def url(self) -> str:
        """For `Client.open`: over the network, although it is on this host."""
        token = f"?token_file={self.token_file}" if self.token_file is not None else ""
        return f"tiffin://{self.address[0]}:{self.address[1]}{token}"


@contextlib.contextmanager
def remote_node(
    dram_bytes: int, options: Sequence[str] = (), token_file: Path | None = None
) -> Iterator[RemoteNode]:
    """A `tiffin node` process with so much DRAM, all of it touched, that listens on loopback."""
    with tempfile.TemporaryDirectory(prefix="tiffin-bench-") as folder:
        address = (LOOPBACK, free_port(LOOPBACK))
        command = [
            *(sys.executable, "-c", _COMMANDS, "node", "--dram", str(dram_bytes)),
            *("--socket", str(Path(folder) / "node.sock"), "--log-level", "error"),
            *("--listen", f"{address[0]}:{address[1]}", *options),
        ]
        if token_file is not None:
            command += ["--token-file", str(token_file)]
        with running(command) as process:
            node = RemoteNode(address, process.pid, token_file)
            await_answer(process, lambda: _greet(node), "the node")
            yield node


def _greet(node: RemoteNode) -> bool:
    with contextlib.suppress(NodeUnavailable), Client.open(node.url):
        return True
    return False


@contextlib.contextmanager
def redis_server() -> Iterator[str]:
    """A Redis of our own without persistence; its URL. Raises Missing."""
    try:
        program = need_redis()
    except InvalidInput as error:
        raise Missing(str(error)) from error
    with tempfile.TemporaryDirectory(prefix="tiffin-bench-") as folder:
        port = free_port(LOOPBACK)
        command = [
            *(program, "--port", str(port), "--bind", LOOPBACK, "--dir", folder),
            *("--save", "", "--appendonly", "no", "--loglevel", "warning"),
        ]
        with running(command) as process:
            await_answer(process, lambda: _accepts(port), "redis-server")
            yield f"redis://{LOOPBACK}:{port}"


def _accepts(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((LOOPBACK, port), 1.0):
        return True
    return False


@contextlib.contextmanager
def running(command: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is ended with the block."""
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(timeout=_START_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def await_answer(process: subprocess.Popen[bytes], answers: Callable[[], bool], what: str) -> None:
    """Until `answers()`. Raises NodeUnavailable if the process ends before, or takes a minute."""
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline and process.poll() is None:
        if answers():
            return
        time.sleep(0.02)
    raise NodeUnavailable(f"{what} for this benchmark did not start (exit {process.poll()})")


# -- cores -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def apart(clients: Iterable[int], servers: Iterable[int]) -> Iterator[None]:
    """Keep these processes, and this one with the clients, on a core of their own and the servers
    on the others: as on two hosts. Left alone, the kernel now and then puts two that answer each
    other on one core, and each waits for the other. With one core nothing changes."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        yield
        return
    ours = os.getpid()
    for pid in (ours, *clients):
        _keep_on(pid, cores[:1])
    for pid in servers:
        _keep_on(pid, cores[1:])
    try:
        yield
    finally:
        _keep_on(ours, cores)


def _keep_on(pid: int, cores: Sequence[int]) -> None:
    """All threads of a process; those that begin later are where their parents are."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.sched_setaffinity(int(thread.name), cores)


# -- CPU time --------------------------------------------------------------------------------------


def cpu_seconds(pids: Iterable[int]) -> float:
    """CPU time of whole processes since their start, user and system, in nanosecond steps.

    The clock that clock_getcpuclockid(3) gives for a process; /proc/PID/stat counts in steps of
    10 ms. Raises OSError for a process that has ended.
    """
    return sum(time.clock_gettime((~pid << 3) | 2) for pid in pids)


class Metered:
    """An action that notes how much CPU time these processes took for each of its runs."""

    def __init__(self, action: Callable[[], object], pids: Sequence[int]) -> None:
        self._action = action
        self._pids = pids
        self.seconds: list[float] = []

    def __call__(self) -> None:
        """Run it."""
        before_s = cpu_seconds(self._pids)
        self._action()
        self.seconds.append(cpu_seconds(self._pids) - before_s)
