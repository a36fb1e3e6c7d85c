"""Child processes of a supervisor: they log to a file, and never outlive who started them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_TETHER = str(Path(__file__).with_name("tether.py"))

# A log is cut to its tail beyond this: a child that complains for weeks must not fill /tmp.
LOG_BYTES_MAX = 16 << 20
_TAIL_BYTES = 64 << 10

# What a person reads when a child has ended.
LAST_LINES = 10


# What typer draws around an error.
_FRAME = str.maketrans("", "", "╭╮╰╯│─")


def tethered(command: Sequence[str], at_death: signal.Signals) -> list[str]:
    """The command line of a process that gets `at_death` when this process ends, by whatever (see
    `tether.py`). Start it from a thread that lives as long as it may: mostly the main one."""
    return [sys.executable, "-IS", _TETHER, str(int(at_death)), str(os.getpid()), *command]


class ChildProcess:
    """One process. It gets `at_death` when this process ends (see `tethered`)."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        *,
        at_death: signal.Signals = signal.SIGTERM,
    ) -> None:
        self.name = name
        self.log = log
        self.started_at = time.monotonic()
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                tethered(command, at_death),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env={**os.environ, "COLUMNS": "200"},  # log lines stay lines
                # Ctrl-C is for the supervisor, which then stops its children in order.
                start_new_session=True,
            )

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self.process.poll() is None

    def end_in_words(self) -> str:
        """How it ended."""
        status = self.process.poll()
        if status is None:
            return "is still running"
        if status < 0:
            return f"was killed by {signal.Signals(-status).name}"
        return f"ended with status {status}"

    def last_lines(self, count: int = LAST_LINES) -> list[str]:
        """The end of its log, without the frame that typer draws around an error."""
        text = _tail(self.log).decode("utf-8", "replace").translate(_FRAME)
        return [line.rstrip() for line in text.splitlines() if line.strip()][-count:]

    def trim_log(self) -> None:
        """Keep the log below `LOG_BYTES_MAX`. The child appends, so it goes on after the tail."""
        try:
            if self.log.stat().st_size > LOG_BYTES_MAX:
                tail = _tail(self.log)
                with self.log.open("r+b") as file:
                    file.truncate(0)
                    file.write(b"[older lines were cut]\n" + tail)
        except OSError:
            pass  # the disk is full or the folder gone; the child is what matters

    def ask_to_stop(self) -> None:
        """SIGTERM; returns at once."""
        if self.alive:
            self.process.send_signal(signal.SIGCONT)  # a stopped process does not see SIGTERM
            self.process.terminate()

    def collect(self, timeout_s: float) -> bool:
        """Wait for its end, then force it. Whether it ended by itself."""
        try:
            self.process.wait(max(0.0, timeout_s))
        except subprocess.TimeoutExpired:
            self.kill()
            return False
        return True

    def kill(self) -> None:
        """kill -9, and collect it."""
        self.process.kill()
        self.process.wait()


def _tail(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            return file.read()
    except OSError:
        return b""
