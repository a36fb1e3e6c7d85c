"""Kills and stops: nodes, a Redis and clients are killed, stopped and lose their memory, until a
number of gets has been checked.
"""

from __future__ import annotations

import os
import random
import secrets
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attacks.forger import Forger, Trap
from faults.faultpool import FaultPool
from kvsupport import EXTENT, is_quiet

from tiffin.kvstore import Client
from tiffin.kvstore.directory.redis_connection import LOST

from .processes import Configuration, Tally, Visitors, parse, report
from .visitor import BLOCKS_MAX, prompt

if TYPE_CHECKING:
    from collections.abc import Callable

NODES, PROCESSES = 3, 3
# The requested blocks do not fit: they move between the tiers, and are evicted.
DRAM_BLOCKS, NVME_BLOCKS = 48, 256
# Faults come in bursts; between them the pool works.
CALM_S = 15.0
SETTLE_S = 60.0
FORGED = 50
# Descriptors that a node may still have open at the end: connections to Redis and a few to each
# other node. Clients opened hundreds.
FILES_MORE = 16


class Campaign:
    """Three nodes, a Redis, and processes of clients of every kind."""

    def __init__(self, seed: int) -> None:
        self.tally = Tally()
        self.faults: Counter[str] = Counter()
        self._dice = random.Random(seed)
        self._stack = ExitStack()
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        token = folder / "token"
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32))
        sizes = {"dram": DRAM_BLOCKS * EXTENT, "nvme": NVME_BLOCKS * EXTENT}
        self.pool = self._stack.enter_context(
            FaultPool(folder, folder, nodes=NODES, **sizes, token_file=token)
        )
        self._files = max(map(_open_files, self.pool.nodes))
        self._crowds = [self._start() for _ in range(PROCESSES)]

    def _start(self) -> Visitors:
        """A process with clients of all kinds: with a home node, without one, of a single node."""
        directory = self.pool.directory
        homes = [f"{directory}&home={node.socket}" for node in self.pool.nodes]
        alone = [node.url for node in self.pool.nodes]
        urls = [self.pool.url, *homes, *alone]
        return Visitors(Configuration(urls, self._dice.randrange(1 << 30)))

    @property
    def gets(self) -> int:
        """The number of checked gets so far."""
        return self.tally.gets + sum(crowd.gets for crowd in self._crowds)

    def run(self, gets: int, show: Callable[[Campaign], None]) -> None:
        """Inject faults until `gets` gets are checked; then heal the pool and end the clients."""
        while self.gets < gets and not any(crowd.ended for crowd in self._crowds):
            for fault in self._dice.sample(FAULTS, len(FAULTS)):
                fault(self, self._dice)
                self.faults[fault.__name__] += 1
                show(self)
                time.sleep(self._dice.uniform(0.0, 1.0))
            self._pause(self._dice.uniform(0.0, CALM_S), gets, show)
        for crowd in self._crowds:
            self.tally.add(crowd.finish())
        self._crowds.clear()
        self._check_rest()

    def _pause(self, seconds: float, gets: int, show: Callable[[Campaign], None]) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until and self.gets < gets:
            show(self)
            time.sleep(0.2)

    def _check_rest(self) -> None:
        """No node holds anything of clients that have ended or were killed."""
        for node in self.pool.nodes:
            with Client.open(node.url, name="looking") as client:
                self._eventually(lambda c=client: is_quiet(c.statistics()), "a node is not at rest")
            allowed = self._files + FILES_MORE
            self._eventually(lambda n=node, a=allowed: _open_files(n) <= a, "a node has files open")

    def _eventually(self, condition: Callable[[], Any], what: str) -> None:
        give_up = time.monotonic() + SETTLE_S
        while not condition():
            if time.monotonic() > give_up:
                self.tally.leaks.append(what)
                return
            time.sleep(0.05)

    def replace_crowd(self, index: int) -> None:
        """kill -9 a process of clients, and start another one."""
        self.tally.add(self._crowds[index].kill())
        self._crowds[index] = self._start()

    def hold_crowd(self, index: int, seconds: float) -> None:
        """Stop a process of clients for a while, with all of its leases."""
        self._crowds[index].signal(signal.SIGSTOP)
        time.sleep(seconds)
        self._crowds[index].signal(signal.SIGCONT)

    def close(self) -> None:
        for crowd in self._crowds:
            crowd.kill()
        self._stack.close()


def _open_files(node: Any) -> int:
    return len(os.listdir(f"/proc/{node.process.pid}/fd"))


# -- faults ----------------------------------------------------------------------------------------


def stop_a_node(run: Campaign, dice: random.Random) -> None:
    with dice.choice(run.pool.nodes).stopped():
        time.sleep(dice.uniform(0.1, 1.5))


def kill_a_node(run: Campaign, dice: random.Random) -> None:
    node = dice.choice(run.pool.nodes)
    node.kill()
    time.sleep(dice.uniform(0.0, 1.0))
    node.start()


def stop_redis(run: Campaign, dice: random.Random) -> None:
    run.pool.redis.pause()
    time.sleep(dice.uniform(0.1, 2.0))
    run.pool.redis.resume()


def kill_redis(run: Campaign, dice: random.Random) -> None:
    run.pool.redis.kill()
    time.sleep(dice.uniform(0.0, 1.0))
    run.pool.redis.start()


def empty_redis(run: Campaign, dice: random.Random) -> None:
    with run.pool.redis.client() as redis:
        redis.flushall()


def kill_clients(run: Campaign, dice: random.Random) -> None:
    run.replace_crowd(dice.randrange(PROCESSES))


def stop_clients(run: Campaign, dice: random.Random) -> None:
    run.hold_crowd(dice.randrange(PROCESSES), dice.uniform(0.1, 2.0))


def forge_records(run: Campaign, dice: random.Random) -> None:
    """Forge records of nodes without the token: all have more room than the real nodes, and all
    claim to have the requested blocks."""
    with run.pool.redis.client() as redis, Trap() as trap, suppress(*LOST):
        forger = Forger(redis, run.pool.name)
        forger.flood(FORGED, trap.address)
        forger.locate(list(prompt(1, BLOCKS_MAX).keys), list(range(1, FORGED)))
        time.sleep(dice.uniform(0.5, 2.0))
        if trap.caught:
            run.tally.untyped.append(f"{trap.caught} connections went to a node that is none")


FAULTS: list[Callable[[Campaign, random.Random], None]] = [
    stop_a_node, kill_a_node, stop_redis, kill_redis, empty_redis, kill_clients, stop_clients,
    forge_records,
]  # fmt: skip


def main(arguments: list[str]) -> int:
    """See `__main__`."""
    chosen = parse("faults", arguments, gets=500_000)
    began = time.monotonic()
    run = Campaign(chosen.seed)
    try:
        run.run(chosen.gets, _Progress(chosen.gets))
    finally:
        run.close()
    return report("faults", chosen.seed, began, run.tally, run.faults)


class _Progress:
    """A line of progress on the terminal; nothing if there is no terminal."""

    def __init__(self, gets: int) -> None:
        self._gets = gets
        self._began = time.monotonic()

    def __call__(self, run: Campaign) -> None:
        if sys.stderr.isatty():
            took_s = time.monotonic() - self._began
            line = (
                f"{run.gets:,} of {self._gets:,} gets, {run.faults.total()} faults, {took_s:.0f} s"
            )
            print(f"\r{line}", end="", file=sys.stderr, flush=True)
