"""Shared by the measurements: the sizes of a run, nodes on the network, a clock of CPU time."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tiffin.kvstore.cli.local.local_redis import free_port, need_redis
from tiffin.kvstore.client.client import Client
from tiffin.kvstore.errors import InvalidInput, NodeUnavailable

from ..store.setting import KIB, MIB, running, silent
from ..suite import Missing

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Iterable, Iterator, Sequence

LOOPBACK = "127.0.0.1"
_START_S = 60.0

# The daemon as users start it, without needing the program to be installed.
_COMMANDS = (
    "import typer; from tiffin.kvstore.cli import commands;"
    " app = typer.Typer(); commands(app); app()"
)


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a run. The defaults are the run that `docs/benchmarks.md` shows."""

    rounds: int = 20
    block_bytes: tuple[int, ...] = (16 * MIB, 64 * MIB)
    # Of one get. More than the last-level cache, so that each byte comes from memory.
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
    # Of all readers together, for each number of readers.
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
    """One run: its sizes, a Python interpreter with Mooncake, if given, and a callback for
    progress."""

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
        """The URL for `Client.open`: over the network, although the node is on this host."""
        token = f"?token_file={self.token_file}" if self.token_file is not None else ""
        return f"tiffin://{self.address[0]}:{self.address[1]}{token}"


def node_command(dram_bytes: int, path: Path) -> list[str]:
    """The command line of a node with this much DRAM, at this socket."""
    node = ["node", "--dram", str(dram_bytes), "--socket", str(path), "--log-level", "error"]
    return [sys.executable, "-c", _COMMANDS, *node]


@contextlib.contextmanager
def remote_node(
    dram_bytes: int, options: Sequence[str] = (), token_file: Path | None = None
) -> Iterator[RemoteNode]:
    """A `tiffin node` process with this much DRAM, all of it touched, that listens on loopback."""
    with tempfile.TemporaryDirectory(prefix="tiffin-bench-") as folder:
        address = (LOOPBACK, free_port(LOOPBACK))
        command = node_command(dram_bytes, Path(folder) / "node.sock")
        command += ["--listen", f"{address[0]}:{address[1]}", *options]
        if token_file is not None:
            command += ["--token-file", str(token_file)]
        with running(command) as process:
            node = RemoteNode(address, process.pid, token_file)
            await_answer(process, lambda: greets(node.url), "the node")
            yield node


def greets(url: str) -> bool:
    """Whether the node at `url` takes a client."""
    with contextlib.suppress(NodeUnavailable), Client.open(url):
        return True
    return False


@contextlib.contextmanager
def redis_server() -> Iterator[str]:
    """The URL of a new Redis process without persistence. Raises Missing."""
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


def await_answer(process: subprocess.Popen[bytes], answers: Callable[[], bool], what: str) -> None:
    """Wait until `answers()`. Raises NodeUnavailable if the process ends before, or after a
    minute."""
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline and process.poll() is None:
        if answers():
            return
        time.sleep(0.02)
    raise NodeUnavailable(f"{what} for this benchmark did not start (exit {process.poll()})")


# -- cores -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def apart(clients: Iterable[int], servers: Iterable[int]) -> Iterator[None]:
    """Pin the clients and this process to one core and the servers to the other cores, as on two
    hosts. Otherwise the kernel now and then puts a client and its server on the same core, where
    each waits for the other. With one core nothing changes."""
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
    """Pin all threads of a process; threads that start later inherit it."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # the thread has just ended
            os.sched_setaffinity(int(thread.name), cores)


# -- CPU time --------------------------------------------------------------------------------------


def cpu_seconds(pids: Iterable[int]) -> float:
    """CPU time of whole processes since their start, user and system, in nanosecond steps.

    The clock that clock_getcpuclockid(3) gives for a process; /proc/PID/stat counts in steps of
    10 ms. Raises OSError for a process that has ended.
    """
    return sum(time.clock_gettime((~pid << 3) | 2) for pid in pids)


class Metered:
    """An action that records the CPU time of these processes for each of its runs."""

    def __init__(self, action: Callable[[], object], pids: Sequence[int]) -> None:
        self._action = action
        self._pids = pids
        self.seconds: list[float] = []

    def __call__(self) -> None:
        """Run it."""
        before_s = cpu_seconds(self._pids)
        self._action()
        self.seconds.append(cpu_seconds(self._pids) - before_s)
