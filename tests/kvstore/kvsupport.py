"""Shared by the store's tests: contents derived from keys, nodes and daemons."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import inspect
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tiffin.kvstore import KVSchema, Prefix
from tiffin.kvstore.client.connection.node_link import SocketLink
from tiffin.kvstore.errors import NodeUnavailable
from tiffin.kvstore.format.header import pack_header
from tiffin.kvstore.node.core.node_core import CoreOptions
from tiffin.kvstore.node.node import Node, NodeOptions
from tiffin.kvstore.testing import random_bytes
from tiffin.kvstore.tiers.slab import SLAB_NAME, inspect_slab
from tiffin.kvstore.url import parse_nvme
from tiffin.messenger.shm.host_copy import hash_segments

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import pytest

    from tiffin.kvstore.memory.arena import Extent
    from tiffin.kvstore.tiers.nvme import NvmeTier

Bytes = NDArray[np.uint8]

SCHEMA = KVSchema.gqa(
    model="small", layers=2, kv_heads=2, head_dim=8, dtype="bfloat16", block_tokens=16
)
EXTENT = SCHEMA.extent_bytes  # two pages: one of header, half a one of payload
DRAM_BLOCKS = 16
NVME_BLOCKS = 48

# Long enough that a loaded machine does not count as a hang, short enough to notice one.
SLACK_S = 8.0

_numbers = itertools.count(1)


# -- damage ----------------------------------------------------------------------------------------


def damage(view: Bytes, at: int) -> None:
    """Flip a bit of shared memory that this process may have mapped read-only, as another process
    with a writable mapping could."""
    address = int(view.__array_interface__["data"][0]) + at
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, offset, _, inode, *_ = line.split()
        begin, end = (int(number, 16) for number in span.split("-"))
        if begin <= address < end:
            position = int(offset, 16) + address - begin
            break
    for found in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if found.stat().st_ino == int(inode) and "memfd:" in os.readlink(found):
                with open(found, "r+b", buffering=0) as file:
                    (byte,) = os.pread(file.fileno(), 1, position)
                    os.pwrite(file.fileno(), bytes([byte ^ 1]), position)
                    return
    raise AssertionError("no region of this process has that address")


def damage_on_disk(folder: Path, prefix: Prefix, at: int) -> None:
    """Flip a bit of a prefix's first block in the slab file, `at` bytes from its extent's begin."""
    report = inspect_slab(folder)
    block = next(block for block in report.blocks if block.key == prefix.keys[0].hex())
    with open(folder / SLAB_NAME, "r+b") as slab:
        data_offset = slab.seek(0, os.SEEK_END) - report.capacity_bytes
        slab.seek(data_offset + block.offset + at)
        byte = slab.read(1)[0]
        slab.seek(-1, os.SEEK_CUR)
        slab.write(bytes([byte ^ 1]))


# -- contents --------------------------------------------------------------------------------------


def fresh_prefix(blocks: int, schema: KVSchema = SCHEMA, extra_tokens: int = 0) -> Prefix:
    """A prompt that no other call of this process has: its own namespace."""
    tokens = np.arange(blocks * schema.block_tokens + extra_tokens) % 50_000
    return schema.prefix(tokens, namespace=f"test-{os.getpid()}-{next(_numbers)}")


def payload_of(key: bytes, schema: KVSchema = SCHEMA) -> Bytes:
    """The only right bytes of the block with this key."""
    return random_bytes(schema.block_bytes, int.from_bytes(key, "little"))


def payloads_of(prefix: Prefix) -> list[Bytes]:
    """The right bytes of every block of a prefix."""
    return [payload_of(key, prefix.schema) for key in prefix.keys]


def assert_right(blocks: Sequence[Any], prefix: Prefix) -> None:
    """Every served block has the bytes of its key."""
    for block, key in zip(blocks, prefix.keys, strict=False):
        assert np.array_equal(block.bytes, payload_of(key, prefix.schema)), key.hex()


def write_block(
    tier: NvmeTier, extent: Extent, prefix: Prefix, generation: int, payload: Any
) -> None:
    """The first block of a prefix, as a node would have left it there."""
    schema = prefix.schema
    data = payload.astype(np.uint8)
    header = np.zeros(schema.header_bytes, np.uint8)
    pack_header(
        header,
        key=prefix.keys[0],
        parent=prefix.parent,
        schema_fingerprint=prefix.schema_fingerprint,
        namespace_fingerprint=prefix.namespace_fingerprint,
        generation=generation,
        payload_bytes=schema.block_bytes,
        extent_offset=extent.offset,
        extent_bytes=extent.length,
        tokens=prefix.token_bytes(0),
        segment_bytes=[segment.length for segment in schema.segments],
        checksums=hash_segments(data, [(s.offset, s.length) for s in schema.segments]),
    )
    tier.write(extent, schema.header_bytes, data)
    tier.commit(extent, header)


# -- waiting ---------------------------------------------------------------------------------------


def wait_until(condition: Callable[[], Any], what: str, timeout_s: float = SLACK_S) -> Any:
    """The first true value of `condition`; fails with `what` when there is none in time."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s} s: {what}")
        time.sleep(0.005)
    return value


def open_files() -> collections.Counter[str]:
    """The open descriptors of this process, counted by target; all sockets count as one target."""
    found: collections.Counter[str] = collections.Counter()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of this listing
            found[os.readlink(f"/proc/self/fd/{number}").partition(":[")[0]] += 1
    return found


def await_closed(before: collections.Counter[str]) -> None:
    """Wait until no more files are open than `before`; fails with the ones left."""
    try:
        wait_until(lambda: open_files().total() <= before.total(), "files are closed")
    except AssertionError as error:
        raise AssertionError(f"{error}; more than before: {open_files() - before}") from None


@contextlib.contextmanager
def within(timeout_s: float, what: str) -> Iterator[None]:
    """The block must not take longer than this and generous slack: it would be a hang."""
    began = time.monotonic()
    yield
    took_s = time.monotonic() - began
    assert took_s < timeout_s + SLACK_S, f"{what} took {took_s:.1f} s of {timeout_s} s"


def skip_time(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Advance the time of nodes in this process: leases and deadlines until then have ended."""
    monkeypatch.setattr("tiffin.kvstore.node.node._now", lambda: time.monotonic() + seconds)


def stop_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop the time of nodes in this process: no lease and no deadline ends."""
    now = time.monotonic()
    monkeypatch.setattr("tiffin.kvstore.node.node._now", lambda: now)


class Background:
    """A call in a thread; `result()` waits for it and raises what it raised."""

    def __init__(self, action: Callable[[], Any]) -> None:
        self._action = action
        self._outcome: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._outcome = self._action()
        except BaseException as error:  # noqa: BLE001 - raised again by result()
            self._error = error

    def result(self, timeout_s: float = 30.0) -> Any:
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), "the call did not return"
        if self._error is not None:
            raise self._error
        return self._outcome


# -- conservation ----------------------------------------------------------------------------------


def assert_conserved(numbers: dict[str, Any]) -> None:
    """free + reserved + committed + quarantined == capacity, in bytes, per tier."""
    for name, tier in numbers["tiers"].items():
        kinds = ("free", "reserved", "committed", "quarantined")
        total = sum(tier[f"{kind}_bytes"] for kind in kinds)
        assert total == tier["capacity_bytes"], (name, tier)


def held_bytes(numbers: dict[str, Any]) -> int:
    """How many bytes all sessions hold."""
    return sum(session["held_bytes"] for session in numbers["sessions"])


def is_quiet(numbers: dict[str, Any]) -> bool:
    """Nothing is held, written, waited for or moved."""
    tiers = numbers["tiers"].values()
    return (
        held_bytes(numbers) == 0
        and numbers["waiting_requests"] == numbers["queued_moves"] == 0
        and all(
            tier["reserved_bytes"] == tier["quarantined_bytes"] == tier["evicting_bytes"] == 0
            for tier in tiers
        )
    )


# -- the command line ------------------------------------------------------------------------------

TIFFIN = (sys.executable, "-c", "from tiffin.kvstore.cli import main; main()")


def command_environment(folder: Path) -> dict[str, str]:
    """An environment in which `TIFFIN` finds its commands, installed or not.

    Commands come from entry points; a checkout that is only on the path has none, so `folder` gets
    the metadata that an installation of the store alone would have.
    """
    info = folder / "tiffin-0.1.0.dist-info"
    if not info.exists():
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tiffin\nVersion: 0.1.0\n")
        entry = "[tiffin.commands]\nkvstore = tiffin.kvstore.cli:commands\n"
        (info / "entry_points.txt").write_text(entry)
    inherited = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    paths = [str(folder), *map(os.path.abspath, inherited)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONDEVMODE": ""}


class Daemon:
    """`tiffin node` as a real process."""

    def __init__(
        self,
        folder: Path | None = None,
        *,
        dram: int = DRAM_BLOCKS * EXTENT,
        nvme: int = 0,
        options: Sequence[str] = (),
        before: Sequence[str] = (),
    ) -> None:
        """`folder`: that of `command_environment`, one of its own by default. `before`: words in
        front of the command, such as those of `ip netns exec`."""
        self._before = before
        # Paths of unix sockets have 107 bytes at most, and pytest's folders are deep.
        self.folder = Path(tempfile.mkdtemp(prefix="tiffin-test-"))
        self.socket = self.folder / "n.sock"
        self.url = f"unix:{self.socket}"
        self.nvme = self.folder / "nvme"
        self._environment = command_environment(folder or self.folder)
        self._arguments = ["node", "--socket", str(self.socket), "--dram", str(dram), *options]
        if nvme:
            self._arguments += ["--nvme", f"{self.nvme}:{nvme}"]
        self.process: subprocess.Popen[bytes]
        self.start()

    def start(self) -> None:
        """Start, or start again on the same socket and folder; returns when it answers."""
        with open(self.folder / "log", "ab") as log:
            self.process = subprocess.Popen(
                [*self._before, *TIFFIN, *self._arguments],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        wait_until(self._answers, f"the daemon answers; its log:\n{self.log()}", 30.0)

    def restart(self, *, dram: int | None = None) -> None:
        """SIGKILL, and start again, with another size of DRAM if there is one."""
        self.kill()
        if dram is not None:
            self._arguments[self._arguments.index("--dram") + 1] = str(dram)
        self.start()

    def _answers(self) -> bool:
        assert self.process.poll() is None, f"the daemon ended:\n{self.log()}"
        try:
            SocketLink(self.socket, "is it there?").close()
        except NodeUnavailable:
            return False
        return True

    def log(self) -> str:
        return (self.folder / "log").read_text()

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL; returns when it is gone."""
        self.process.kill()
        self.process.wait()

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """SIGSTOP for the length of the block."""
        self.signal(signal.SIGSTOP)
        try:
            wait_until(self._is_stopped, "every thread of the daemon has stopped")
            yield
        finally:
            self.signal(signal.SIGCONT)

    def _is_stopped(self) -> bool:
        states = Path(f"/proc/{self.process.pid}/task").glob("*/stat")
        return all(state.read_text().rpartition(") ")[2][0] == "T" for state in states)

    def alive(self) -> bool:
        return self.process.poll() is None

    def close(self) -> None:
        if self.alive():
            self.signal(signal.SIGCONT)
            self.process.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


class Worker:
    """A script of this folder as a process: it reads words and prints a line for each. It is killed
    at the end of a `with` block."""

    def __init__(self, script: str, folder: Path, *arguments: object) -> None:
        """`folder`: that of `command_environment`."""
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name(script)), *map(str, arguments)],
            env=command_environment(folder),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def says(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def ask(self, word: str) -> str:
        """Send it a word; returns its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{word}\n")
        self._process.stdin.flush()
        return self.says()

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


# -- nodes and loops -------------------------------------------------------------------------------


@dataclass(frozen=True)
class PoolOptions:
    """Sizes in blocks of SCHEMA."""

    dram_blocks: int = DRAM_BLOCKS
    nvme_blocks: int = 0
    write_lease_s: float = 60.0

    def start_daemon(self, folder: Path) -> Daemon:
        return Daemon(
            folder,
            dram=self.dram_blocks * EXTENT,
            nvme=self.nvme_blocks * EXTENT,
            options=["--write-lease-s", str(self.write_lease_s), "--no-prefault"],
        )

    def start_node(self, folder: Path) -> Node:
        nvme_path, nvme_bytes = None, 0
        if self.nvme_blocks:
            nvme_path, nvme_bytes = parse_nvme(f"{folder}:{self.nvme_blocks * EXTENT}")
        return Node(
            NodeOptions(
                self.dram_blocks * EXTENT,
                nvme_path,
                nvme_bytes,
                prefault=False,
                core=CoreOptions(write_lease_s=self.write_lease_s),
            )
        )


class LoopThread:
    """One asyncio loop in a thread of its own, which runs the tests' coroutines."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, awaitable: Any) -> Any:
        """The awaitable's result; plain values are returned unchanged."""
        if not inspect.isawaitable(awaitable):
            return awaitable

        async def wait() -> Any:
            return await awaitable

        return asyncio.run_coroutine_threadsafe(wait(), self.loop).result(60)

    def call(self, action: Callable[..., Any], *arguments: Any) -> Any:
        """Call `action` in the loop's thread, and await its result if it is awaitable."""

        async def wait() -> Any:
            result = action(*arguments)
            return await result if inspect.isawaitable(result) else result

        return asyncio.run_coroutine_threadsafe(wait(), self.loop).result(60)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()
