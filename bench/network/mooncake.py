"""Rows against Mooncake Store over TCP, as its Python package does it by default, in turns with us.

Mooncake lives in a Python of its own, given by `--mooncake`; `docs/benchmarks.md` says how to make
one. Three processes are its side: master, holder of the memory, reader. The CPU time of all three
counts, as that of the node and the client does on ours.

Mooncake's data port takes connections on every address of the machine and authenticates nobody. Run
this where nobody else reaches it: `docs/benchmarks.md` shows how to use a network namespace.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tiffin.kvstore.errors import NodeUnavailable

from ..store.rows import MICROSECONDS, Row, Side, Target, interleave, rates, times
from ..store.setting import MIB, size_text
from .setting import LOOPBACK, Metered, Missing, await_answer, free_port, running
from .transfer import GIGA, get, pair

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .setting import Setting

_PEER = Path(__file__).with_name("mooncake_peer.py")
_WARM_CALLS = 200
_END_S = 10.0
# Of what its libraries have to say, for an error message.
_LOG_BYTES = 600


class _Reader:
    """A reader process and the processes that serve it."""

    def __init__(self, process: subprocess.Popen[str], others: list[int]) -> None:
        self._process = process
        self.pids = (process.pid, *others)

    def get(self, blocks: int, times: int = 1) -> list[float]:
        """Seconds of each of `times` rounds of `get_into` of the first so many blocks."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{blocks} {times}\n")
        self._process.stdin.flush()
        line = _line(self._process)
        if not line:
            raise NodeUnavailable("Mooncake's reader has ended")
        seconds: list[float] = json.loads(line)
        return seconds


@contextlib.contextmanager
def _mooncake(setting: Setting, block_bytes: int, blocks: int) -> Iterator[_Reader]:
    """Mooncake with `blocks` blocks. Raises Missing, NodeUnavailable."""
    python = setting.mooncake
    if python is None:
        raise Missing("give --mooncake PYTHON, of an environment that has Mooncake")
    master = python.parent / "mooncake_master"
    if not master.exists():
        raise Missing(f"{master} is not there; docs/benchmarks.md says how to install Mooncake")
    port = free_port()
    # It gives a segment away in pieces of its own and evicts at 95 %.
    segment_bytes = max(256 * MIB, 2 * block_bytes * blocks)
    command = [
        *(str(master), f"--rpc_address={LOOPBACK}", f"--rpc_port={port}"),
        *(f"--metrics_host={LOOPBACK}", f"--metrics_port={free_port()}"),
        *("--enable_metric_reporting=false", "--minloglevel=2"),
    ]
    address = f"{LOOPBACK}:{port}"
    with running(command) as serving:
        await_answer(serving, lambda: _accepts(port), "mooncake_master")
        with (
            _peer(python, "holder", address, segment_bytes) as holder,
            _peer(python, "reader", address, block_bytes, blocks) as reader,
        ):
            yield _Reader(reader, [serving.pid, holder.pid])


@contextlib.contextmanager
def _peer(python: Path, role: str, master: str, *numbers: int) -> Iterator[subprocess.Popen[str]]:
    command = [str(python), str(_PEER), role, master, *map(str, numbers)]
    environment = {**os.environ, "GLOG_minloglevel": "2"}
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command,
            text=True,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
        )
        try:
            if not _line(process):
                log.seek(0)
                last = log.read()[-_LOG_BYTES:].decode(errors="replace")
                raise NodeUnavailable(f"Mooncake's {role} did not start: {last}")
            yield process
        finally:
            _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdout.close()


def _line(process: subprocess.Popen[str]) -> str:
    """What it says next; nothing if it has ended."""
    assert process.stdout is not None
    return process.stdout.readline()


def _accepts(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((LOOPBACK, port), 1.0):
        return True
    return False


# -- rows ------------------------------------------------------------------------------------------


def mooncake(setting: Setting) -> list[Row]:
    """The same blocks from Mooncake's TCP and from ours. Raises Missing."""
    rows = [row for size in setting.sizes.block_bytes for row in _large(setting, size)]
    return rows + _small(setting)


def _large(setting: Setting, block_bytes: int) -> list[Row]:
    count = max(1, setting.sizes.transfer_bytes // block_bytes)
    rounds = setting.sizes.rounds
    with _mooncake(setting, block_bytes, count) as theirs, pair(block_bytes, count) as ours:
        setting.tell(f"{count} blocks of {size_text(block_bytes)}")
        read = partial(get, ours.client, ours.prefix, ours.targets, "off")
        sides = [
            Metered(partial(theirs.get, count), theirs.pids),
            Metered(read, (os.getpid(), ours.node.pid)),
        ]
        limit, found = interleave([Side(side) for side in sides], rounds=rounds)
    nbytes = count * block_bytes
    size = size_text(block_bytes)
    what = f"get(into=) of {count} blocks of {size} over TCP, verify=off"
    return [
        Row(
            name=f"mooncake-get-{size}",
            what=what,
            unit="GB/s",
            value=rates(found, nbytes),
            limit_what=f"Mooncake's get_into of {count} keys of {size} over TCP",
            limit=rates(limit, nbytes),
            targets=(Target("ratio", ">=", 1.5),),
        ),
        Row(
            name=f"mooncake-cpu-{size}",
            what=f"CPU time of client and node, {what}",
            unit="s/GB",
            value=times(sides[1].seconds[-rounds:], GIGA / nbytes),
            limit_what="CPU time of Mooncake's reader, holder and master",
            limit=times(sides[0].seconds[-rounds:], GIGA / nbytes),
            targets=(Target("ratio", "<=", 0.5),),
        ),
    ]


def _small(setting: Setting) -> list[Row]:
    sizes = setting.sizes
    nbytes = sizes.small_block_bytes
    setting.tell(f"one block of {size_text(nbytes)}")
    limit: list[float] = []
    found: list[float] = []
    with _mooncake(setting, nbytes, 1) as theirs, pair(nbytes, 1) as ours:
        read = partial(get, ours.client, ours.prefix, ours.targets, "off")
        theirs.get(1, _WARM_CALLS)
        interleave([Side(read)], rounds=_WARM_CALLS)
        for _ in range(sizes.rounds):
            limit += theirs.get(1, sizes.calls)
            (seconds,) = interleave([Side(read)], rounds=1, batch=sizes.calls)
            found += seconds
    size = size_text(nbytes)
    return [
        Row(
            name=f"mooncake-{size}",
            what=f"get(into=) of one block of {size} over TCP, verify=off",
            unit="us",
            value=times(found, MICROSECONDS),
            limit_what=f"Mooncake's get_into of one key of {size} over TCP",
            limit=times(limit, MICROSECONDS),
            targets=(Target("ratio", "<=", 0.6),),
        )
    ]
