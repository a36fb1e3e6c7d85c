"""Shared by the measurements: sizes of a run, schemas of exact block sizes, a real node daemon."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tiffin.kvstore.cli.local.child_processes import tethered
from tiffin.kvstore.client.client import Client
from tiffin.kvstore.errors import NodeUnavailable
from tiffin.kvstore.format.schema import KVSchema

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tiffin.kvstore.format.keys import Prefix

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
BLOCK_TOKENS = 512
_LAYERS = 32
_UNIT_BYTES = _LAYERS * 2 * 2 * BLOCK_TOKENS  # K and V of 32 layers, one head of one bf16
_START_S = 60.0

# The daemon as users start it, without needing the program to be installed.
_COMMANDS = (
    "import typer; from tiffin.kvstore.cli import commands;"
    " app = typer.Typer(); commands(app); app()"
)


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much a run measures. The defaults are the run that `docs/benchmarks.md` shows."""

    rounds: int = 40
    calls: int = 25
    get_blocks: int = 16
    small_block_bytes: int = 64 * KIB
    large_block_bytes: int = 64 * MIB
    copied_blocks: int = 4
    disk_block_bytes: tuple[int, ...] = (16 * MIB, 64 * MIB)
    disk_bytes: int = 1 * GIB
    disk_rounds: int = 11
    # Disks of virtual machines are throttled by a token bucket that fills while they are idle.
    # fio's start is such a pause, so each step gets a longer pause before it.
    disk_pause_s: float = 0.5
    prompt_tokens: int = 131_072
    restart_blocks: int = 2_000
    restart_rounds: int = 7
    resident_blocks: int = 500_000
    operations: int = 1_000_000

    @classmethod
    def quick(cls) -> Sizes:
        """Half a minute instead of some minutes; the same sizes of blocks."""
        return cls(
            rounds=10,
            calls=20,
            disk_bytes=256 * MIB,
            disk_rounds=3,
            restart_rounds=3,
            resident_blocks=100_000,
            operations=200_000,
        )


def silent(text: str) -> None:
    """A progress callback that shows nothing."""
    del text


@dataclass(frozen=True, slots=True)
class Setting:
    """One run: its sizes, the folder of the measured disk, and a callback for progress."""

    sizes: Sizes
    nvme_dir: Path
    tell: Callable[[str], None] = field(default=silent)


def schema_of(block_bytes: int) -> KVSchema:
    """A schema of 32 layers of K and V in bf16 with blocks of exactly this size, a multiple of
    64 KiB.

    All sizes have the same number of layers, so headers and checksums cost the same. 64 MiB is
    Llama-3-8B.
    """
    units, rest = divmod(block_bytes, _UNIT_BYTES)
    if rest or not units:
        raise ValueError(f"a block of {block_bytes} bytes; choose a multiple of {_UNIT_BYTES}")
    heads = next(heads for heads in (8, 4, 2, 1) if units % heads == 0)
    schema = KVSchema.gqa(
        model="bench",
        layers=_LAYERS,
        kv_heads=heads,
        head_dim=units // heads,
        dtype="bfloat16",
        block_tokens=BLOCK_TOKENS,
    )
    assert schema.block_bytes == block_bytes
    return schema


def prompt(tokens: int, seed: int = 0) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Random token ids of a vocabulary of 128,256, in a tokenizer's type: int64."""
    return np.random.default_rng(seed).integers(0, 128_256, tokens, np.int64)


def prefix_of(schema: KVSchema, blocks: int, seed: int = 0) -> Prefix:
    """The prefix of a prompt of `blocks` full blocks."""
    return schema.prefix(prompt(blocks * schema.block_tokens, seed))


@dataclass(frozen=True, slots=True)
class NodeDaemon:
    """A running node process."""

    url: str
    pid: int


@contextlib.contextmanager
def running(command: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process, and end it after the `with` block. The kernel does, if this process ends
    before: killed, or interrupted when the other one had just begun."""
    process = subprocess.Popen(
        tethered(command, signal.SIGTERM), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(timeout=_START_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextlib.contextmanager
def daemon(dram_bytes: int) -> Iterator[NodeDaemon]:
    """A `tiffin node` process with that much DRAM, all of it prefaulted."""
    with tempfile.TemporaryDirectory(prefix="tiffin-bench-") as folder:
        path = Path(folder) / "node.sock"
        command = [sys.executable, "-c", _COMMANDS, "node"]
        options = ["--socket", str(path), "--dram", str(dram_bytes), "--log-level", "error"]
        with running([*command, *options]) as process:
            _await_node(path, process)
            yield NodeDaemon(f"unix:{path}", process.pid)


@contextlib.contextmanager
def one_core(*pids: int) -> Iterator[None]:
    """Pin this thread and the main threads of `pids` to one core; afterwards all of them get this
    thread's earlier affinity."""
    cores = os.sched_getaffinity(0)
    try:
        for pid in (0, *pids):
            os.sched_setaffinity(pid, {max(cores)})
        yield
    finally:
        for pid in (0, *pids):
            os.sched_setaffinity(pid, cores)


def _await_node(path: Path, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline and process.poll() is None:
        if path.exists():
            with contextlib.suppress(NodeUnavailable), Client.open(f"unix:{path}"):
                return
        time.sleep(0.02)
    raise NodeUnavailable(f"the node for this benchmark did not start (exit {process.poll()})")


def room_for(schema: KVSchema, blocks: int) -> int:
    """DRAM for `blocks` blocks and a quarter more, so that the node evicts nothing."""
    return schema.extent_bytes * (blocks + blocks // 4 + 1)


def size_text(nbytes: int) -> str:
    """`64KiB`, for names of rows."""
    for unit, scale in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if nbytes >= scale and nbytes % scale == 0:
            return f"{nbytes // scale}{unit}"
    return f"{nbytes}B"
