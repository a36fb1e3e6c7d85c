"""Shared by the tests of NIXL: a peer in a process of its own whose memory this one maps too.

Run as a program, it is that process: it maps the region that it inherited, registers it with a
NIXL agent, prints how to reach it, and carries out one word per line.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tiffin.messenger.nixl.agent import Description, NixlAgent
from tiffin.messenger.nixl.bindings import NixlUnavailable, load
from tiffin.messenger.nixl.nixl_transport import NixlTransport
from tiffin.messenger.shm.region import Region
from tiffin.messenger.testing import GrantBook, soon
from tiffin.messenger.transport import Range

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tiffin.messenger.shm.host_copy import ByteArray

REGION_BYTES = 40 << 20


def require_nixl(file: str = __file__) -> None:
    """Skip where NIXL is not installed; fail where TIFFIN_REQUIRE_NIXL=1 says that it must be.

    `file`: the module that is skipped. pytest-xdist reports one of several that have one reason.
    """
    try:
        load()
    except NixlUnavailable as error:
        if os.environ.get("TIFFIN_REQUIRE_NIXL") == "1":
            pytest.fail(f"TIFFIN_REQUIRE_NIXL=1 asks for these tests, and {error}")
        pytest.skip(f"{Path(file).stem}: {error}", allow_module_level=True)


class Neighbour:
    """A process that serves a region by NIXL, and the book of grants that lie in it."""

    def __init__(self, lanes: str, region: Region | None = None) -> None:
        self._owned = region is None
        self.region = region or Region.create(REGION_BYTES)
        fd = os.dup(self.region.fd)
        command = [sys.executable, __file__, str(fd), str(self.region.nbytes), lanes]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, pass_fds=[fd]
        )
        os.close(fd)
        said = json.loads(self.ask(""))
        self.description = Description(bytes.fromhex(said["metadata"]), said["base"], said["bytes"])
        self.fresh()

    def fresh(self) -> None:
        """No grants, all memory free, every grant held."""
        self.book = GrantBook()
        self._at = 0
        self.held = True
        self.confirmed = 0

    def ask(self, word: str) -> str:
        """Send one word to the process; returns its answer."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        if word:
            self.process.stdin.write(word + "\n")
            self.process.stdin.flush()
        return self.process.stdout.readline()

    def allocate(self, nbytes: int) -> ByteArray:
        """The region's next bytes."""
        start, self._at = self._at, self._at + nbytes
        return self.region.array[start : self._at]

    def resolve(self, grant: int) -> list[Range]:
        """Where a grant lies in the region."""
        begin = self.region.array.ctypes.data
        with self.book.open(grant, writes=False) as arrays:
            return [Range(array.ctypes.data - begin, len(array)) for array in arrays]

    def confirm(self, grant: int, *, deadline: float) -> bool:
        """Whether the grant is still held; a test says so."""
        self.confirmed += 1
        return self.held

    def stop(self) -> None:
        """SIGSTOP: the process hangs."""
        os.kill(self.process.pid, signal.SIGSTOP)
        # The signal takes effect when the kernel gets to it, in one thread after the other.
        while _states(self.process.pid) != {"T"}:
            time.sleep(0.001)

    def resume(self) -> None:
        """SIGCONT."""
        os.kill(self.process.pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        """End the process."""
        self.kill()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()
        if self._owned:
            self.region.close()


@contextlib.contextmanager
def ends(lanes: str) -> Iterator[tuple[NixlAgent, Neighbour]]:
    """An agent here and a neighbour, connected: the connection stays as long as both."""
    with contextlib.closing(NixlAgent(lanes=lanes)) as agent, neighbour(lanes) as other:
        transport = NixlTransport(agent, other.description, other.resolve, other.confirm)
        with contextlib.closing(transport):
            grant = other.book.add([other.allocate(1)])
            transport.read(grant, [Range(0, 1)], [np.zeros(1, np.uint8)], deadline=soon())
        yield agent, other


def _states(pid: int) -> set[str]:
    """The states of a process's threads."""
    states = set()
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(OSError):  # of a thread that has ended
            states.add(stat.read_text(encoding="ascii").rpartition(")")[2].split()[0])
    return states


@contextlib.contextmanager
def neighbour(lanes: str) -> Iterator[Neighbour]:
    """A neighbour for the length of the block."""
    made = Neighbour(lanes)
    try:
        yield made
    finally:
        made.close()


def serve(fd: int, nbytes: int, lanes: str) -> None:
    """The neighbour's process: see the module's docstring."""
    with Region.attach(fd, nbytes, writable=True) as region:
        agent = NixlAgent("neighbour", lanes=lanes)
        metadata, base, length = agent.register(region.array).description()
        said = {"metadata": metadata.hex(), "base": base, "bytes": length}
        print(json.dumps(said), flush=True)
        for line in sys.stdin:
            if line == "processor seconds\n":
                print(time.process_time(), flush=True)
        agent.close()


if __name__ == "__main__":
    serve(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
