"""Processes of clients, for campaigns: each calls verbs at random, checks every byte and reports
once a second.

`python -m tests.campaign visit CONFIGURATION` is one of them; it ends when its input does.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import subprocess
import sys
import threading
import time
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from faults.faultpool import Watch
from kvsupport import open_files

from .visitor import Account, Visitor

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Sequence

# No call returns more than half a second after its deadline.
OVER_S = 0.5
# The longest calls have 8 s, and there are several in a row in one verb.
HANG_S = 120.0
_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Configuration:
    """The configuration of a process of clients."""

    urls: Sequence[str]
    seed: int


@dataclass
class Tally(Account):
    """The sum of the accounts of several processes."""

    leaks: list[str] = field(default_factory=list)

    @property
    def findings(self) -> list[str]:
        """All findings."""
        return [*super().findings, *self.leaks]

    def add(self, said: dict[str, Any]) -> None:
        """Add the last report of a process; it is empty if the process had sent none."""
        self.gets += said.get("gets", 0)
        self.checked_blocks += said.get("checked_blocks", 0)
        self.done.update(said.get("done", {}))
        self.refused.update(said.get("refused", {}))
        for kind in ("wrong", "untyped", "late", "leaks"):
            getattr(self, kind).extend(said.get(kind, []))


class Visitors:
    """One process of clients. It may be stopped and killed; its last report counts."""

    def __init__(self, configuration: Configuration) -> None:
        self.said: dict[str, Any] = {}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.campaign", "visit", json.dumps(asdict(configuration))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=_ROOT,
        )
        self._listener = threading.Thread(target=self._listen)
        self._listener.start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.endswith("\n"):  # a kill may cut the last line
                self.said = json.loads(line)

    @property
    def gets(self) -> int:
        """The number of checked gets so far."""
        return int(self.said.get("gets", 0))

    @property
    def ended(self) -> bool:
        """Whether the process has ended by itself, which is a finding."""
        return self._process.poll() is not None

    def signal(self, number: int) -> None:
        """Send a signal: SIGSTOP or SIGCONT."""
        self._process.send_signal(number)

    def kill(self) -> dict[str, Any]:
        """kill -9 the process; returns its last report."""
        self._process.kill()
        self._collect()
        return self.said

    def finish(self) -> dict[str, Any]:
        """Ask the process to end; returns its last report, with a failure to end as a leak."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(HANG_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._collect()
        if self._process.returncode:
            leak = f"clients ended with status {self._process.returncode}; see above"
            self.said.setdefault("leaks", []).append(leak)
        return self.said

    def _collect(self) -> None:
        self._process.wait()
        self._listener.join()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


# -- the command line ------------------------------------------------------------------------------


def parse(part: str, arguments: Sequence[str], *, gets: int) -> argparse.Namespace:
    """`gets` and `seed` of a part."""
    parser = argparse.ArgumentParser(prog=f"python -m tests.campaign {part}")
    parser.add_argument("--gets", type=int, default=gets, help="checked ones, of all clients")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args(arguments)


def report(part: str, seed: int, began: float, tally: Tally, faults: Counter[str]) -> int:
    """Print the report; returns 1 if it has findings. `faults`: the count of each fault."""
    seconds = round(time.monotonic() - began, 1)
    head = {"part": part, "seed": seed, "seconds": seconds, "faults": faults}
    print(json.dumps({**head, **msgspec.to_builtins(tally)}))
    return 1 if tally.findings else 0


# -- the process -----------------------------------------------------------------------------------


def main(arguments: list[str]) -> int:
    """See `__main__`."""
    chosen = Configuration(**json.loads(arguments[0]))
    ending = threading.Event()
    threading.Thread(target=_await_end, args=(ending,), daemon=True).start()
    account = Account()
    with (
        closing(Watch()) as watch,
        closing(Visitor(chosen.urls, chosen.seed, watch, account, over_s=OVER_S)) as visitor,
    ):
        calls = _Calls(account, ending)
        visitor.visit(lambda: time.monotonic() > calls.until)  # one second, for lazy imports
        before = _resources()
        calls.until = float("inf")
        visitor.visit(calls.ended)
        faulthandler.cancel_dump_traceback_later()
        _say(account, _leaks(before))
    return 0


class _Calls:
    """Reads the clock before each call."""

    def __init__(self, account: Account, ending: threading.Event) -> None:
        self.until = time.monotonic() + 1.0
        self._account = account
        self._ending = ending
        self._next = 0.0

    def ended(self) -> bool:
        now = time.monotonic()
        if now > self._next:
            self._next = now + 1.0
            _say(self._account, [])
            faulthandler.dump_traceback_later(HANG_S, exit=True)
        return self._ending.is_set()


def _await_end(ending: threading.Event) -> None:
    sys.stdin.read()
    ending.set()


def _say(account: Account, leaks: list[str]) -> None:
    # msgspec converts counters, `dataclasses.asdict` does not.
    print(json.dumps({**msgspec.to_builtins(account), "leaks": leaks}), flush=True)


def _resources() -> Counter[str]:
    """The numbers of threads by name, and of open files by target."""
    gc.collect()
    found = open_files()
    found.update(f"thread {thread.name}" for thread in threading.enumerate())
    return found


def _leaks(before: Counter[str]) -> list[str]:
    """Threads and files that still exist 10 s after the end of the last client."""
    give_up = time.monotonic() + 10.0
    while True:
        more = _resources() - before
        if not more or time.monotonic() > give_up:
            return [f"{count} more of: {name}" for name, count in more.items()]
        time.sleep(0.1)
