"""What campaigns stand on: nodes as processes, contents derived from keys, and what must hold."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import kvsupport
import numpy as np
from directory.ports import free_port

from tiffin.kvstore import Client, KVSchema, Prefix
from tiffin.kvstore.errors import TiffinError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from numpy.typing import NDArray

SCHEMA = KVSchema.gqa(
    model="campaign", layers=2, kv_heads=2, head_dim=8, dtype="bfloat16", block_tokens=16
)
# What is asked for never fits: blocks leave, and readers and writers wait for each other.
DRAM_BLOCKS = 16
PROMPTS, PROMPT_BLOCKS = 10, 4
# A machine with two cores has slow moments; longer is a hang.
SETTLE_S = 10.0

_TIFFIN = (sys.executable, "-c", "from tiffin.kvstore.cli import main; main()")
_numbers = itertools.count(1)


class Broken(AssertionError):
    """A promise that does not hold."""


class WrongBytes(Broken):
    """A get returned what was not put."""


class Late(Broken):
    """A call did not end in its time."""


def prompts(seed: int) -> list[Prefix]:
    """Prompts of one run: no other has blocks of theirs."""
    tokens = np.arange(PROMPT_BLOCKS * SCHEMA.block_tokens) % 50_000
    run = f"{os.getpid()}-{seed}-{next(_numbers)}"
    return [SCHEMA.prefix(tokens, namespace=f"{run}-{i}") for i in range(PROMPTS)]


def payload_of(key: bytes) -> NDArray[np.uint8]:
    """The only right bytes of the block with this key."""
    return kvsupport.payload_of(key, SCHEMA)


def check_bytes(found: Any, key: bytes) -> None:
    """Raises Broken unless these are the bytes that belong to the key."""
    if not np.array_equal(found, payload_of(key)):
        raise WrongBytes(f"wrong bytes for {key.hex()}")


class NodeProcess:
    """`tiffin node` with a socket and a port."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="tiffin-campaign-"))
        self.socket = self.folder / "n.sock"
        self.port = free_port()
        dram = DRAM_BLOCKS * SCHEMA.extent_bytes
        self._log = (self.folder / "log").open("wb")
        self._process = subprocess.Popen(
            [
                *_TIFFIN, "node", "--socket", str(self.socket), "--dram", str(dram),
                "--listen", f"127.0.0.1:{self.port}", "--no-prefault",
            ],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
        )  # fmt: skip
        eventually(self._answers, "a node answers", 30.0)

    def _answers(self) -> bool:
        if self._process.poll() is not None:
            raise Broken(f"a node ended: {(self.folder / 'log').read_text()}")
        with contextlib.suppress(TiffinError), Client.open(f"unix:{self.socket}") as client:
            return bool(client.statistics())
        return False

    def close(self) -> None:
        """Stop it."""
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def eventually(condition: Callable[[], Any], what: str, timeout_s: float = SETTLE_S) -> None:
    """Wait until it holds; raises Broken."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise Broken(f"not within {timeout_s:.0f} s: {what}")
        time.sleep(0.002)


def check_conserved(numbers: dict[str, Any]) -> None:
    """free + reserved + committed + quarantined == capacity, in bytes, per tier."""
    for name, tier in numbers["tiers"].items():
        kinds = ("free", "reserved", "committed", "quarantined")
        if sum(tier[f"{kind}_bytes"] for kind in kinds) != tier["capacity_bytes"]:
            raise Broken(f"{name} is not conserved: {tier}")


def held(numbers: dict[str, Any]) -> int:
    """Leases that any client holds, and requests that wait."""
    kinds = ("read_leases", "write_leases", "zombie_leases")
    leases = sum(session[kind] for session in numbers["sessions"] for kind in kinds)
    return int(leases + numbers["waiting_requests"])


def check_at_rest(ask: Callable[[], Iterable[dict[str, Any]]]) -> None:
    """Soon nobody holds or waits for anything, and nothing was lost."""
    numbers: list[dict[str, Any]] = []

    def quiet() -> bool:
        numbers[:] = ask()
        return not sum(map(held, numbers))

    try:
        eventually(quiet, "no lease is held")
    except Broken as error:
        raise Broken(f"{error}: {[one['sessions'] for one in numbers]}") from None
    for one in numbers:
        check_conserved(one)
        if one["tiers"]["dram"]["reserved_bytes"] or one["tiers"]["dram"]["quarantined_bytes"]:
            raise Broken(f"bytes are reserved for nobody: {one['tiers']['dram']}")
