"""Rows against Mooncake Store over TCP, as its Python package does it by default, in turns with us.

Mooncake lives in a Python of its own, given by `--mooncake`; `docs/benchmarks.md` says how to make
one. Three processes are its side: master, holder of the memory, reader. The CPU time of all three
counts, as that of the node and the client does on ours.

They look for work without sleeping, which takes a core or more from whoever is measured beside
them. So they are stopped while we are measured; our processes sleep when nobody asks them. A stop
lasts for one batch, a fraction of a second: its master gives clients up after seconds.

Mooncake's data port takes connections on every address of the machine and authenticates nobody. Run
this where nobody else reaches it: `docs/benchmarks.md` shows how to use a network namespace.
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
from .setting import LOOPBACK, Metered, Missing, apart, await_answer
from .transfer import GIGA, get, pair

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from .setting import Setting

_PEER = Path(__file__).with_name("mooncake_peer.py")
_WARM_CALLS = 200
# Before each batch of small blocks, on either side: it has slept while the other was measured.
_WARM_AGAIN_CALLS = 200
_END_S = 10.0
# Of what its libraries have to say, for an error message: some forty lines.
_LOG_BYTES = 4096
_NOTE = "Mooncake's processes, which poll, are stopped while ours are measured"


class _Process:
    """One process of Mooncake, in the process group `group` (0: its own); what it says besides its
    answers is kept for error messages."""

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
        """What it says next. Raises NodeUnavailable if it has ended instead."""
        assert self.popen.stdout is not None
        line = self.popen.stdout.readline()
        if not line:
            raise NodeUnavailable(f"Mooncake's {self._role} has ended: {self.log()}")
        return line

    def tell(self, line: str) -> None:
        """Send a line. Raises NodeUnavailable if it has ended."""
        assert self.popen.stdin is not None
        try:
            self.popen.stdin.write(line.encode() + b"\n")
            self.popen.stdin.flush()
        except BrokenPipeError as error:
            raise NodeUnavailable(f"Mooncake's {self._role} has ended: {self.log()}") from error

    def log(self) -> str:
        """The end of the standard error of one that has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):  # its output ends first
            self.popen.wait(_END_S)
        # Not `seek`: it writes where the same file is at.
        descriptor = self._log.fileno()
        start = max(0, os.fstat(descriptor).st_size - _LOG_BYTES)
        return os.pread(descriptor, _LOG_BYTES, start).decode(errors="replace")

    def end(self, number: signal.Signals | None = None) -> None:
        """Its input ends and, if given, it gets a signal. Returns when it is gone."""
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
    """A reader process and those that serve it, all in the process group of the master."""

    def __init__(self, master: _Process, holder: _Process, reader: _Process) -> None:
        self._reader = reader
        self._group = master.popen.pid
        self.pids = tuple(one.popen.pid for one in (reader, master, holder))

    def get(self, blocks: int, times: int = 1) -> list[float]:
        """Seconds of each of `times` rounds of `get_into` of the first so many blocks."""
        self._reader.tell(f"{blocks} {times}")
        seconds: list[float] = json.loads(self._reader.line())
        return seconds

    def stop(self) -> None:
        """None of them takes CPU time from here on. Raises NodeUnavailable if one has ended."""
        os.killpg(self._group, signal.SIGSTOP)
        for pid in self.pids:
            # WNOWAIT: an end is for Popen to collect.
            found = os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
            if found is None or found.si_code != os.CLD_STOPPED:
                raise NodeUnavailable("a process of Mooncake has ended between its measurements")

    def resume(self, calls: int = 1) -> None:
        """They run again, and have been asked for a block so many times."""
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
    # It gives a segment away in pieces of its own and evicts at 95 %.
    segment_bytes = max(256 * MIB, 2 * block_bytes * blocks)
    with contextlib.ExitStack() as stack:
        master, address = _master(program, stack)
        peer = partial(_peer, python, address, master.popen.pid, stack)
        holder = peer("holder", segment_bytes)
        reader = peer("reader", block_bytes, blocks)
        # Whoever is stopped would not notice that it is to end.
        stack.callback(_continue, master.popen.pid)
        yield _Mooncake(master, holder, reader)


def _master(program: Path, stack: contextlib.ExitStack) -> tuple[_Process, str]:
    """A running master, which `stack` ends, and its address."""
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
