"""Rows that compare with Mooncake Store over TCP, its Python package's default, in turns.

Mooncake runs in a Python environment of its own, given by `--mooncake`; `docs/benchmarks.md` says
how to make one. Its side has three processes: master, holder of the memory, reader. The CPU time of
all three counts, as that of the node and the client does on our side.

Its processes poll for work without sleeping, which takes a core or more from any process measured
at the same time. So they are stopped (SIGSTOP) while ours are measured; ours sleep when there are
no requests. A stop lasts for one batch, a fraction of a second, as Mooncake's master gives clients
up after seconds.

Mooncake's data port accepts connections on every address of the machine, without authentication.
Run this where no other host can reach it: `docs/benchmarks.md` shows how to use a network
namespace.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tiffin.kvstore.cli.local.local_redis import free_port
from tiffin.kvstore.errors import NodeUnavailable

from ..store.rows import MICROSECONDS, Row, Side, Target, interleave, rates, timed, times
from ..store.setting import MIB, size_text
from ..suite import Missing
from .setting import LOOPBACK, Metered, apart, await_answer
from .transfer import GIGA, get, pair

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from .setting import Setting

_PEER = Path(__file__).with_name("mooncake_peer.py")
_WARM_CALLS = 200
# Unmeasured calls before each batch of small blocks, on both sides: the side was idle or stopped
# while the other was measured.
_WARM_AGAIN_CALLS = 200
_END_S = 10.0
# The end of its libraries' output that goes into an error message: some forty lines.
_LOG_BYTES = 4096
_NOTE = "Mooncake's processes, which poll, are stopped while ours are measured"


class _Process:
    """One process of Mooncake, in the process group `group` (0: its own); its standard error is
    kept for error messages."""

    def __init__(self, role: str, command: Sequence[str], group: int = 0) -> None:
        self._role = role
        with contextlib.ExitStack() as stack:
            self._log = stack.enter_context(tempfile.TemporaryFile())
            self.popen = subprocess.Popen(
                command,
                env={**os.environ, "GLOG_minloglevel": "2"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                process_group=group,
            )
            stack.pop_all()

    def line(self) -> bytes:
        """The next line of its output. Raises NodeUnavailable if the process has ended."""
        assert self.popen.stdout is not None
        line = self.popen.stdout.readline()
        if not line:
            raise NodeUnavailable(f"Mooncake's {self._role} has ended: {self.log()}")
        return line

    def tell(self, line: str) -> None:
        """Send a line. Raises NodeUnavailable if the process has ended."""
        assert self.popen.stdin is not None
        try:
            self.popen.stdin.write(line.encode() + b"\n")
            self.popen.stdin.flush()
        except BrokenPipeError as error:
            raise NodeUnavailable(f"Mooncake's {self._role} has ended: {self.log()}") from error

    def log(self) -> str:
        """The end of the standard error of a process that has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):  # its output ends first
            self.popen.wait(_END_S)
        # Not `seek`: the process shares the file's offset, and writes there.
        descriptor = self._log.fileno()
        start = max(0, os.fstat(descriptor).st_size - _LOG_BYTES)
        return os.pread(descriptor, _LOG_BYTES, start).decode(errors="replace")

    def end(self, number: signal.Signals | None = None) -> None:
        """Close its input and, if given, send a signal. Returns when the process has ended."""
        assert self.popen.stdin is not None
        assert self.popen.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.popen.stdin.close()
        if number is not None:
            self.popen.send_signal(number)
        try:
            self.popen.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()
        self.popen.stdout.close()
        self._log.close()


class _Mooncake:
    """A reader process, a holder and a master, all in the process group of the master."""

    def __init__(self, master: _Process, holder: _Process, reader: _Process) -> None:
        self._reader = reader
        self._group = master.popen.pid
        self.pids = tuple(one.popen.pid for one in (reader, master, holder))

    def get(self, blocks: int, times: int = 1) -> list[float]:
        """Seconds of each of `times` rounds of `get_into` of the first `blocks` blocks."""
        self._reader.tell(f"{blocks} {times}")
        seconds: list[float] = json.loads(self._reader.line())
        return seconds

    def stop(self) -> None:
        """Stop all three: they take no more CPU time. Raises NodeUnavailable if one has ended."""
        os.killpg(self._group, signal.SIGSTOP)
        for pid in self.pids:
            # WNOWAIT: a process that ended is left for Popen to wait for.
            found = os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
            if found is None or found.si_code != os.CLD_STOPPED:
                raise NodeUnavailable("a process of Mooncake has ended between its measurements")

    def resume(self, calls: int = 1) -> None:
        """Continue all three, and get a block `calls` times."""
        os.killpg(self._group, signal.SIGCONT)
        self.get(1, calls)


@contextlib.contextmanager
def _mooncake(setting: Setting, block_bytes: int, blocks: int) -> Iterator[_Mooncake]:
    """Mooncake with `blocks` blocks. Raises Missing, NodeUnavailable."""
    python = setting.mooncake
    if python is None:
        raise Missing("give --mooncake PYTHON, of an environment that has Mooncake")
    program = python.parent / "mooncake_master"
    if not program.exists():
        raise Missing(f"{program} is not there; docs/benchmarks.md says how to install Mooncake")
    # Mooncake allocates a segment in pieces of its own sizes and evicts at 95 %.
    segment_bytes = max(256 * MIB, 2 * block_bytes * blocks)
    with contextlib.ExitStack() as stack:
        master, address = _master(program, stack)
        peer = partial(_peer, python, address, master.popen.pid, stack)
        holder = peer("holder", segment_bytes)
        reader = peer("reader", block_bytes, blocks)
        # A stopped process would not notice that it has to end.
        stack.callback(_continue, master.popen.pid)
        yield _Mooncake(master, holder, reader)


def _master(program: Path, stack: contextlib.ExitStack) -> tuple[_Process, str]:
    """A running master and its address; `stack` ends it."""
    port = free_port(LOOPBACK)
    command = [
        *(str(program), f"--rpc_address={LOOPBACK}", f"--rpc_port={port}"),
        *(f"--metrics_host={LOOPBACK}", f"--metrics_port={free_port(LOOPBACK)}"),
        *("--enable_metric_reporting=false", "--minloglevel=2"),
    ]
    master = _Process("master", command)
    stack.callback(master.end, signal.SIGTERM)
    await_answer(master.popen, lambda: _accepts(port), "mooncake_master")
    return master, f"{LOOPBACK}:{port}"


def _peer(
    python: Path, master: str, group: int, stack: contextlib.ExitStack, role: str, *numbers: int
) -> _Process:
    """A holder or a reader that is ready; `stack` ends it."""
    command = [str(python), str(_PEER), role, master, *map(str, numbers)]
    process = _Process(role, command, group)
    stack.callback(process.end)
    process.line()
    return process


def _continue(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # all have ended
        os.killpg(group, signal.SIGCONT)


def _accepts(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((LOOPBACK, port), 1.0):
        return True
    return False


# -- rows ------------------------------------------------------------------------------------------


def mooncake(setting: Setting) -> list[Row]:
    """The same blocks over Mooncake's TCP and over ours. Raises Missing."""
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
        turns = [Side(sides[0], theirs.stop), Side(sides[1], theirs.resume)]
        limit, found = interleave(turns, rounds=rounds)
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
            note=_NOTE,
        ),
        Row(
            name=f"mooncake-cpu-{size}",
            what=f"CPU time of client and node, {what}",
            unit="s/GB",
            value=times(sides[1].seconds[-rounds:], GIGA / nbytes),
            limit_what="CPU time of Mooncake's reader, holder and master",
            limit=times(sides[0].seconds[-rounds:], GIGA / nbytes),
            targets=(Target("ratio", "<=", 0.5),),
            note=_NOTE,
        ),
    ]


def _small(setting: Setting) -> list[Row]:
    sizes = setting.sizes
    nbytes = sizes.small_block_bytes
    setting.tell(f"one block of {size_text(nbytes)}")
    limit: list[float] = []
    found: list[float] = []
    with (
        _mooncake(setting, nbytes, 1) as theirs,
        pair(nbytes, 1) as ours,
        apart(theirs.pids[:1], [*theirs.pids[1:], ours.node.pid]),
    ):
        read = partial(get, ours.client, ours.prefix, ours.targets, "off")
        theirs.get(1, _WARM_CALLS)
        theirs.stop()
        timed(read, _WARM_CALLS)
        theirs.resume()
        for _ in range(sizes.rounds):
            limit += theirs.get(1, sizes.calls)
            theirs.stop()
            timed(read, _WARM_AGAIN_CALLS)
            found += timed(read, sizes.calls)
            theirs.resume(_WARM_AGAIN_CALLS)
    size = size_text(nbytes)
    return [
        Row(
            name=f"mooncake-{size}",
            what=f"get(into=) of one block of {size} over TCP, verify=off, clients on one core and "
            "servers on the others",
            unit="us",
            value=times(found, MICROSECONDS),
            limit_what=f"Mooncake's get_into of one key of {size} over TCP",
            limit=times(limit, MICROSECONDS),
            targets=(Target("ratio", "<=", 0.6),),
            note=_NOTE,
        )
    ]
