"""Starts the workers of a gateway, starts those again that end, and stops all of them.

Each worker is this program with the same options and `TIFFIN_GATEWAY_WORKER` in its environment.
All listen at the same port (SO_REUSEPORT): the kernel spreads connections over them, and a worker
that ends takes none of the others' with it. The supervisor keeps the port by a socket that is bound
and does not listen.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from tiffin.kvstore.errors import InvalidInput

from .shared_counts import SharedCounts, size_of
from .worker_metrics import socket_of

if TYPE_CHECKING:
    from collections.abc import Iterator

log = logging.getLogger("tiffin.gateway")

VARIABLE = "TIFFIN_GATEWAY_WORKER"
_LOOK_S = 0.1
# A worker that ends as soon as it is started is started again so often.
_RESTART_S = 1.0
# After the workers' own time to stop.
_KILL_S = 10.0


class WorkerSpec(msgspec.Struct, frozen=True):
    """What a worker is told: its number of `workers`, the port, where all workers have their
    sockets, and the file descriptor of their counts."""

    number: int
    workers: int
    port: int
    folder: str
    counts_fd: int

    @classmethod
    def from_environment(cls) -> WorkerSpec | None:
        """That of this process; None if it is no worker."""
        text = os.environ.get(VARIABLE)
        return None if text is None else msgspec.json.decode(text, type=cls)

    def counts(self) -> SharedCounts:
        """This worker's counts."""
        return SharedCounts.of(self.counts_fd, self.workers, self.number)


class Supervisor:
    """Of `workers` processes at `host` and `port`. `run` returns the exit status."""

    def __init__(self, address: tuple[str, int], workers: int, stop_s: float) -> None:
        self._address, self._workers, self._stop_s = address, workers, stop_s
        self._stop = threading.Event()
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        self._started_at: dict[int, float] = {}

    def run(self) -> int:
        """Run until SIGTERM or SIGINT, or until a worker can't start. SIGHUP goes to all workers.
        Raises InvalidInput."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._stop.set())
        signal.signal(signal.SIGHUP, lambda *_: self._reload())
        with _kept(self._address) as port, _folder() as folder, _memory(self._workers) as counts:
            specs = [
                WorkerSpec(number, self._workers, port, str(folder), counts)
                for number in range(self._workers)
            ]
            try:
                for spec in specs:
                    self._start(spec)
                return self._watch(specs)
            finally:
                self._end()

    def _watch(self, specs: list[WorkerSpec]) -> int:
        while not self._stop.wait(_LOOK_S):
            for spec in specs:
                status = self._children[spec.number].poll()
                if status is None:
                    continue
                path = socket_of(Path(spec.folder), spec.number)
                if not path.exists():  # it has never served, and would not the next time
                    return status or 1
                if time.monotonic() - self._started_at[spec.number] > _RESTART_S:
                    log.error("worker %d has ended (%d), and is started again", spec.number, status)
                    spec.counts().clear()
                    self._start(spec)
        return 0

    def _start(self, spec: WorkerSpec) -> None:
        # `tether.py` ends it with this process, whatever ends that.
        found = find_spec("tiffin.kvstore.cli.local.tether")
        assert found is not None
        assert found.origin is not None
        tether = [sys.executable, "-IS", found.origin, str(int(signal.SIGTERM)), str(os.getpid())]
        told = msgspec.json.encode(spec).decode()
        self._started_at[spec.number] = time.monotonic()
        self._children[spec.number] = subprocess.Popen(
            [*tether, sys.executable, *sys.orig_argv[1:]],
            env={**os.environ, VARIABLE: told},
            pass_fds=[spec.counts_fd],
        )

    def _reload(self) -> None:
        for child in self._children.values():
            child.send_signal(signal.SIGHUP)

    def _end(self) -> None:
        for child in self._children.values():
            child.terminate()
        ends_at = time.monotonic() + self._stop_s + _KILL_S
        for child in self._children.values():
            try:
                child.wait(max(0.0, ends_at - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


@contextlib.contextmanager
def _kept(address: tuple[str, int]) -> Iterator[int]:
    """Keep a port for the workers; yields its number. Raises InvalidInput."""
    host, port = address
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as door:
        door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            door.bind((host, port))
        except OSError as error:
            raise InvalidInput(f"can't listen at {host}:{port}: {error.strerror}") from error
        yield int(door.getsockname()[1])


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="tiffin-gateway-") as folder:  # for this user alone
        yield Path(folder)


@contextlib.contextmanager
def _memory(workers: int) -> Iterator[int]:
    """A file descriptor of the counts' memory."""
    descriptor = os.memfd_create("tiffin-gateway-counts", 0)
    try:
        os.ftruncate(descriptor, max(size_of(workers), mmap.PAGESIZE))
        yield descriptor
    finally:
        os.close(descriptor)
