"""Exceptions from signal handlers, at random times in the calls of reused clients.

An alarm raises in the middle of a call, of an `open` or of a `close`. Then the client is used
again: it must answer in time, with the right bytes, no lease may remain, and it must be possible to
close it. A hang ends the run with every thread's stack.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import json
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
from kvsupport import wait_until

from tiffin.kvstore import Client
from tiffin.kvstore.errors import CorruptBlock, DeadlineExceeded, NoRoom, StaleLease
from tiffin.kvstore.node.node import Node, NodeOptions

from .world import (
    DRAM_BLOCKS,
    PROMPT_BLOCKS,
    SCHEMA,
    SETTLE_S,
    Broken,
    Late,
    NodeProcess,
    WrongBytes,
    check_at_rest,
    check_bytes,
    payload_of,
    prompts,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tiffin.kvstore import Prefix

KINDS = ("embedded", "unix", "pool", "tcp", "hbm", "asyncio", "asyncio-embedded", "asyncio-tcp")
TIMEOUT_S = 2.0
# No call, close or check may take longer.
HANG_S = 60.0
# Interrupts between two checks of leases, and between two clients.
LOOK_EVERY, REOPEN_EVERY = 20, 100
_TEXT_MAX = 3000  # of a finding
EXPECTED = (NoRoom, StaleLease, CorruptBlock)


class Interrupted(KeyboardInterrupt):
    """The exception that the handler raises."""


@dataclass
class Report:
    """The results of one run."""

    part: str
    seed: int
    interrupts: int = 0
    calls: int = 0
    gets: int = 0
    checked_blocks: int = 0
    seconds: float = 0.0
    landed: dict[str, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    untyped: list[str] = field(default_factory=list)
    late: list[str] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)

    @property
    def findings(self) -> int:
        """The number of findings."""
        return sum(map(len, (self.wrong, self.untyped, self.late, self.leaks)))

    def note(self, error: BaseException) -> None:
        """Add a finding."""
        kind = self.untyped
        if isinstance(error, WrongBytes):
            kind = self.wrong
        elif isinstance(error, Late | DeadlineExceeded):
            kind = self.late
        elif isinstance(error, Broken):
            kind = self.leaks
        lines = traceback.format_exception(error, limit=-6)
        kind.append("".join(lines)[-_TEXT_MAX:])


class Alarm:
    """Raises `Interrupted` in the main thread at a random time of a call."""

    def __init__(self, dice: random.Random) -> None:
        self.cancels = False  # a Ctrl-C instead of an exception
        self._dice = dice
        self._armed = False
        self._usual_s: dict[str, float] = {}  # how long each call takes
        signal.signal(signal.SIGALRM, self._rings)

    def _rings(self, number: int, frame: object) -> None:
        if self._armed:
            self._armed = False
            if self.cancels:
                signal.raise_signal(signal.SIGINT)
            else:
                raise Interrupted

    def during(self, name: str, action: Callable[[], Any]) -> bool:
        """Carry out `action` with an alarm at a random time; returns whether it was interrupted."""
        usual_s = self._usual_s.get(name)
        began = time.monotonic()
        try:
            self._armed = usual_s is not None
            if usual_s is not None:
                delay_s = max(1e-6, self._dice.random() * 1.2 * usual_s)
                signal.setitimer(signal.ITIMER_REAL, delay_s)
            action()
            self._armed = False
        except Interrupted:
            return True
        finally:
            self._armed = False
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            took_s = min(0.02, time.monotonic() - began)
            self._usual_s[name] = (7 * (usual_s or took_s) + took_s) / 8
        return False


class Campaign:
    """One kind of client."""

    def __init__(self, kind: str, seed: int) -> None:
        self.kind = kind
        self.report = Report(f"interrupts {kind}", seed)
        self.dice = random.Random(seed)
        self.prompts = prompts(seed)
        self.alarm = Alarm(self.dice)
        self._stack = contextlib.ExitStack()
        self._landed: Counter[str] = Counter()

    # -- nodes and clients -----------------------------------------------------------------------

    def start(self) -> None:
        """Start the nodes, and clients to read their statistics."""
        self._nodes: list[NodeProcess] = []
        self._node: Node | None = None
        if self.kind.endswith("embedded"):
            dram = DRAM_BLOCKS * SCHEMA.extent_bytes
            self._node = Node(NodeOptions(dram, prefault=False))
            self._stack.callback(self._node.close)
            return
        for _ in range(2 if self.kind == "pool" else 1):
            self._nodes.append(NodeProcess())
            self._stack.callback(self._nodes[-1].close)
        self._monitors = [
            self._stack.enter_context(Client.open(f"unix:{node.socket}", name="monitor"))
            for node in self._nodes
        ]

    def close(self) -> None:
        """Stop the nodes."""
        self._stack.close()

    def numbers(self) -> Iterator[dict[str, Any]]:
        """The statistics of the nodes, after a garbage collection: the tasks of a lost loop are in
        reference cycles."""
        gc.collect()
        if self._node is not None:
            yield self._node.statistics()
            return
        for monitor in self._monitors:
            yield monitor.statistics()

    @property
    def url(self) -> str:
        """The URL for clients."""
        if self.kind in ("unix", "asyncio"):
            return f"unix:{self._nodes[0].socket}"
        ports = ",".join(f"127.0.0.1:{node.port}" for node in self._nodes)
        if self.kind == "pool":
            return f"tiffin://{ports}?home=unix:{self._nodes[0].socket}&admission=always"
        return f"tiffin://{ports}"

    def check(self) -> None:
        """No lease is held, and nothing was lost."""
        check_at_rest(self.numbers)
        if self._node is not None:
            self._node.check()

    # -- the run ---------------------------------------------------------------------------------

    def run(self, number: int) -> Report:
        """Interrupt `number` calls."""
        began = time.monotonic()
        self.start()
        try:
            with contextlib.closing(self.open()) as client:  # starts the threads that remain
                self.used_again(client)
            while self.report.interrupts < number:
                before = _resources()
                faulthandler.dump_traceback_later(HANG_S, exit=True)
                try:
                    self.client_of(min(REOPEN_EVERY, number - self.report.interrupts))
                    self.check()
                    self.given_back(before)
                except Exception as error:  # noqa: BLE001 - each is a finding
                    self.report.note(error)
        finally:
            faulthandler.dump_traceback_later(HANG_S, exit=True)
            self.close()
            faulthandler.cancel_dump_traceback_later()
        self.report.seconds = round(time.monotonic() - began, 1)
        self.report.landed = dict(self._landed)
        return self.report

    def given_back(self, before: Counter[str]) -> None:
        """There are no more threads and open files than before. Raises Broken."""
        with contextlib.suppress(AssertionError):
            wait_until(lambda: not _resources() - before, "all is given back", SETTLE_S)
        if left := _resources() - before:
            raise Broken(f"not given back: {dict(left)}")

    def interrupt(self, name: str, action: Callable[[], Any]) -> bool:
        """Carry out `action`, perhaps interrupted; errors that a store may raise are no finding."""
        self.report.calls += 1
        faulthandler.dump_traceback_later(HANG_S, exit=True)
        try:
            landed = self.alarm.during(name, action)
        except EXPECTED:
            return False
        if landed:
            self.report.interrupts += 1
            self._landed[name] += 1
        return landed

    def client_of(self, number: int) -> None:
        """One client, from its opening to its end."""
        until = self.report.interrupts + number
        client = self.opened()
        try:
            while self.report.interrupts < until:
                name = self.dice.choice(list(CALLS))
                if self.interrupt(name, lambda n=name: CALLS[n](self, client)):
                    self.used_again(client)
                    if not self.report.interrupts % LOOK_EVERY:
                        self.check()
        finally:
            while self.interrupt("close", client.close):
                pass

    def opened(self) -> Client:
        """A client; if its opening is interrupted, it is repeated."""
        found: list[Client] = []
        while not found:
            self.interrupt("open", lambda: found.append(self.open()))
        return found[-1]

    def open(self) -> Client:
        """A new client."""
        if self._node is not None:
            return Client.attach(self._node, name="campaign")
        return Client.open(self.url, name="campaign")

    def used_again(self, client: Client) -> None:
        """The client answers in time, with the right bytes."""
        prefix = self.dice.choice(self.prompts)
        began = time.monotonic()
        with client.get(prefix, timeout_s=TIMEOUT_S) as blocks:
            self.right(blocks, prefix)
        with contextlib.suppress(*EXPECTED):
            client.put(prefix, payloads_of(prefix), timeout_s=TIMEOUT_S)
        if time.monotonic() - began > 2 * TIMEOUT_S + 2.0:
            raise Late("a client that was interrupted does not answer in time")

    def right(self, blocks: Any, prefix: Prefix) -> None:
        """Every block has the bytes of its key."""
        self.report.gets += 1
        for block, key in zip(blocks, prefix.keys, strict=False):
            check_bytes(block.bytes, key)
            self.report.checked_blocks += 1

    def some(self) -> Prefix:
        """A random part of a prompt."""
        return self.dice.choice(self.prompts)[: self.dice.randint(1, PROMPT_BLOCKS)]


def payloads_of(prefix: Prefix) -> list[Any]:
    """The right bytes of every block."""
    return [payload_of(key) for key in prefix.keys]


def _resources() -> Counter[str]:
    """Threads and open files of this process, by name."""
    gc.collect()
    names = [t.name for t in threading.enumerate()]
    found = Counter(name for name in names if not name.startswith("tiffin-uninterrupted"))
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found[os.readlink(f"/proc/self/fd/{number}").partition(":[")[0]] += 1
    return found


# -- calls -----------------------------------------------------------------------------------------


def _put(run: Campaign, client: Client) -> None:
    prefix = run.some()
    client.put(prefix, payloads_of(prefix), timeout_s=TIMEOUT_S)


def _get(run: Campaign, client: Client) -> None:
    prefix = run.some()
    with client.get(prefix, timeout_s=TIMEOUT_S) as blocks:
        run.right(blocks, prefix)


def _get_into(run: Campaign, client: Client) -> None:
    prefix = run.some()
    target = np.empty((len(prefix), SCHEMA.block_bytes), np.uint8)
    found = client.get(prefix, into=target, timeout_s=TIMEOUT_S)
    for row, key in zip(target[: len(found)], prefix.keys, strict=False):
        check_bytes(row, key)


def _reserve(run: Campaign, client: Client) -> None:
    prefix = run.some()
    with client.reserve(prefix, timeout_s=TIMEOUT_S) as slots:
        for slot in slots:
            slot.view[:] = payload_of(prefix.keys[slot.index])


def _publish(run: Campaign, client: Client) -> None:
    prefix = run.some()
    with client.reserve(prefix, timeout_s=TIMEOUT_S) as slots:
        for slot in slots:
            slot.view[:] = payload_of(prefix.keys[slot.index])
        for layer in range(len(SCHEMA.layers)):
            slots.publish(layer, timeout_s=TIMEOUT_S)


def _stream(run: Campaign, client: Client) -> None:
    with client.stream(run.some(), timeout_s=TIMEOUT_S) as stream:
        for _ in stream:
            pass


CALLS: dict[str, Callable[[Campaign, Client], Any]] = {
    "put": _put,
    "get": _get,
    "get-into": _get_into,
    "reserve": _reserve,
    "publish": _publish,
    "stream": _stream,
    "match": lambda run, client: client.match(run.some(), timeout_s=TIMEOUT_S),
    "exists": lambda run, client: client.exists(run.some(), timeout_s=TIMEOUT_S),
    "pin": lambda run, client: client.pin(run.some(), ttl_s=0.05, timeout_s=TIMEOUT_S),
    "remove": lambda run, client: client.remove(run.some(), timeout_s=TIMEOUT_S),
    "statistics": lambda run, client: client.statistics(timeout_s=TIMEOUT_S),
}


def _possible() -> list[str]:
    kinds = list(KINDS)
    if find_spec("torch") is None:
        kinds.remove("hbm")
        print("hbm is left out: it needs torch", file=sys.stderr)
    return kinds


def _campaign(kind: str, seed: int) -> Campaign:
    if kind == "hbm":
        from .hbm import HbmCampaign

        return HbmCampaign(kind, seed)
    if kind.startswith("asyncio"):
        from .asyncio_interrupts import AsyncCampaign

        return AsyncCampaign(kind, seed)
    return Campaign(kind, seed)


def main(arguments: list[str]) -> int:
    """See `__main__`."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaign interrupts")
    parser.add_argument("--kind", choices=KINDS, action="append", help="else all of KINDS")
    parser.add_argument("--number", type=int, default=10_000, help="interrupts for each kind")
    parser.add_argument("--seed", type=int, default=1)
    faulthandler.enable()
    chosen = parser.parse_args(arguments)
    failed = 0
    for kind in chosen.kind or _possible():
        report = _campaign(kind, chosen.seed).run(chosen.number)
        print(json.dumps(asdict(report)), flush=True)
        failed += report.findings
    return 1 if failed else 0
