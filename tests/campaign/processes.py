"""Processes of clients, for campaigns: each calls its verbs at random, checks every byte and says
once a second what it has done.

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
    """What a process of clients is told."""

    urls: Sequence[str]
    seed: int


@dataclass
class Tally(Account):
    """What several processes did."""

    leaks: list[str] = field(default_factory=list)

    @property
    def findings(self) -> list[str]:
        """Everything that may not be."""
        return [*super().findings, *self.leaks]

    def add(self, said: dict[str, Any]) -> None:
        """The last words of one of them; none, if it had not come to them."""
        self.gets += said.get("gets", 0)
        self.checked_blocks += said.get("checked_blocks", 0)
        self.done.update(said.get("done", {}))
        self.refused.update(said.get("refused", {}))
        for kind in ("wrong", "untyped", "late", "leaks"):
            getattr(self, kind).extend(said.get(kind, []))


class Visitors:
    """One such process. It may be stopped and killed; what it had said until then counts."""

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
            if line.endswith("\n"):  # one that is killed may not come to the end of a line
                self.said = json.loads(line)

    @property
    def gets(self) -> int:
        """Checked ones, so far."""
        return int(self.said.get("gets", 0))

    @property
    def ended(self) -> bool:
        """By itself, which it may not."""
        return self._process.poll() is not None

    def signal(self, number: int) -> None:
        """SIGSTOP, SIGCONT."""
        self._process.send_signal(number)

    def kill(self) -> dict[str, Any]:
        """kill -9; what it had said."""
        self._process.kill()
        self._collect()
        return self.said

    def finish(self) -> dict[str, Any]:
        """Ask it to end; what it says then, with the failure to end as a leak."""
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
    """Print what came of it; 1 if that is anything that may not be. `faults`: how often each."""
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
        visitor.visit(lambda: time.monotonic() > calls.until)  # one second: what is loaded lazily
        before = _resources()
        calls.until = float("inf")
        visitor.visit(calls.ended)
        faulthandler.cancel_dump_traceback_later()
        _say(account, _leaks(before))
    return 0


class _Calls:
    """Looks at the clock before each call."""

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
    # msgspec knows counters, which `dataclasses.asdict` does not.
    print(json.dumps({**msgspec.to_builtins(account), "leaks": leaks}), flush=True)


def _resources() -> Counter[str]:
    """Threads by name, and open files by what they are."""
    gc.collect()
    found = open_files()
    found.update(f"thread {thread.name}" for thread in threading.enumerate())
    return found


def _leaks(before: Counter[str]) -> list[str]:
    """What has not been given back within 10 s of the last client's end."""
    give_up = time.monotonic() + 10.0
    while True:
        more = _resources() - before
        if not more or time.monotonic() > give_up:
            return [f"{count} more of: {name}" for name, count in more.items()]
        time.sleep(0.1)
