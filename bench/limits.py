"""Limits of this machine, each measured in the same run as the value compared with it.

Each limit is the simplest program that does the same physical work and nothing else: a socket
without a protocol, a copy without a checksum, a hash without a check, a disk without a format.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, Self

import numpy as np
from xxhash import xxh3_128_digest

from .environment import fio_version

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]

MESSAGE_BYTES = 64
_ECHO = """
import socket, sys
with socket.socket(fileno=int(sys.argv[1])) as peer:
    while data := peer.recv(64):
        peer.sendall(data)
"""

Direction = Literal["read", "write"]


class RoundTrip:
    """64 bytes to another process and back, over a unix socket with plain blocking calls."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._echo = subprocess.Popen(
                [sys.executable, "-S", "-c", _ECHO, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
            )
        self._message = bytes(MESSAGE_BYTES)
        self.pid = self._echo.pid

    def __call__(self) -> None:
        """One round trip."""
        self._socket.sendall(self._message)
        received = 0
        while received < MESSAGE_BYTES:
            received += len(self._socket.recv(MESSAGE_BYTES))

    def close(self) -> None:
        """End the other process."""
        self._socket.close()
        self._echo.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def touched(nbytes: int) -> Bytes:
    """`nbytes` of private memory as NumPy allocates it, every page written to.

    Not an mmap: two mappings begin at the same offset in a page, and a copy between such buffers is
    a fifth slower on some CPUs. Such a low limit would make Tiffin look better than it is.
    """
    return filled(np.empty(nbytes, np.uint8))


def filled(memory: Bytes) -> Bytes:
    """`memory`, every byte of it written; not compressible."""
    pattern = np.random.default_rng(0).integers(0, 256, min(len(memory), 1 << 20), np.uint8)
    for start in range(0, len(memory), len(pattern)):
        part = memory[start : start + len(pattern)]
        part[:] = pattern[: len(part)]
    return memory


def aligned(nbytes: int) -> Bytes:
    """`nbytes` of private memory that begins on a page, for direct I/O; zeros, not touched."""
    return np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)


def copy_all(targets: Sequence[Bytes], sources: Sequence[Bytes]) -> None:
    """memcpy by one thread: `np.copyto` of each pair."""
    for target, source in zip(targets, sources, strict=True):
        np.copyto(target, source)


def copy_in_pieces(targets: Sequence[Bytes], sources: Sequence[Bytes], piece_bytes: int) -> None:
    """`copy_all` in calls of `piece_bytes`, which may keep more of the data in the caches."""
    for target, source in zip(targets, sources, strict=True):
        for start in range(0, len(target), piece_bytes):
            stop = start + piece_bytes
            np.copyto(target[start:stop], source[start:stop])


def chained_digests(root: bytes, tokens: bytes, chunk_bytes: int) -> bytes:
    """Compute the chain of hashes of a prompt's block keys, and nothing else; returns the last
    key."""
    key = root
    for start in range(0, len(tokens), chunk_bytes):
        key = xxh3_128_digest(key + tokens[start : start + chunk_bytes])
    return key


@dataclass(frozen=True, slots=True)
class DiskJob:
    """Sequential direct I/O over a file of its own: `nbytes` in pieces, `depth` at a time."""

    path: Path
    nbytes: int
    piece_bytes: int
    depth: int


class Disk(Protocol):
    """A program that transfers a job's bytes and measures the time."""

    @property
    def what(self) -> str:
        """Its description, for the table."""

    def run(self, job: DiskJob, direction: Direction) -> float:
        """Seconds that the transfer of all bytes took."""


class Fio:
    """fio with libaio: one thread that keeps `depth` pieces queued at the kernel all the time."""

    what = "fio"

    def run(self, job: DiskJob, direction: Direction) -> float:
        """Seconds by fio's own clock, without its start. Raises OSError if fio fails."""
        done = subprocess.run(
            [
                "fio", "--name=limit", f"--filename={job.path}", f"--size={job.nbytes}",
                f"--rw={direction}", f"--bs={job.piece_bytes}", f"--iodepth={job.depth}",
                "--ioengine=libaio", "--direct=1", "--thread", "--overwrite=1",
                "--output-format=json",
            ],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise OSError(f"fio ended with {done.returncode}: {done.stderr.strip()[:300]}")
        report = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
        return job.nbytes / float(report[direction]["bw_bytes"])


class DirectThreads:
    """The fallback without fio: `depth` threads, each with its share of the pieces, preadv or
    pwritev.

    It has a barrier at the end only, like fio; a thread per piece in flight costs less than 1 % of
    fio's bandwidth at pieces of 2 MiB.
    """

    what = "O_DIRECT loop of threads (fio is not installed)"

    def run(self, job: DiskJob, direction: Direction) -> float:
        """Seconds of the transfers alone. Raises OSError."""
        verb = os.preadv if direction == "read" else os.pwritev
        fd = os.open(job.path, os.O_RDWR | os.O_CREAT | os.O_DIRECT | os.O_CLOEXEC, 0o600)
        buffers = [filled(aligned(job.piece_bytes)).data for _ in range(job.depth)]

        def share(worker: int) -> None:
            for piece in range(worker, job.nbytes // job.piece_bytes, job.depth):
                verb(fd, [buffers[worker]], piece * job.piece_bytes)

        try:
            os.posix_fallocate(fd, 0, job.nbytes)
            with ThreadPoolExecutor(job.depth) as pool:
                start_s = time.perf_counter()
                list(pool.map(share, range(job.depth)))
                return time.perf_counter() - start_s
        finally:
            os.close(fd)


def best_disk() -> Disk:
    """fio if it is installed, else the threads."""
    return Fio() if fio_version() else DirectThreads()


def read_pages(path: Path, offsets: Sequence[int], depth: int) -> None:
    """One direct read of 4 KiB at each offset, by `depth` threads: the minimum I/O of a scan."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)

    def share(worker: int) -> None:
        page = [aligned(mmap.PAGESIZE).data]
        for offset in offsets[worker::depth]:
            os.preadv(fd, page, offset)

    try:
        with ThreadPoolExecutor(depth) as pool:
            list(pool.map(share, range(depth)))
    finally:
        os.close(fd)
