"""A pool of real processes: nodes as daemons, a real Redis, two replicas of what is put."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from directory.redisserver import RedisServer
from kvsupport import EXTENT, SCHEMA, Daemon, fresh_prefix, payload_of, payloads_of, wait_until

from tiffin.kvstore import Client
from tiffin.kvstore.errors import DirectoryUnavailable, NoRoom, TiffinError

if TYPE_CHECKING:
    from pathlib import Path

    from tiffin.kvstore import Prefix

BLOCKS = 4


@dataclass
class Tally:
    """The results of a run's gets. `spans` (begin, end) and `waits_s` have one entry per get."""

    gets: int = 0
    short: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    spans: list[tuple[float, float]] = field(default_factory=list)
    wrong: int = 0

    @property
    def waits_s(self) -> list[float]:
        return [end - begin for begin, end in self.spans]

    def waited(self, began: float) -> None:
        """Record that a get that began then has returned."""
        self.spans.append((began, time.monotonic()))

    def longest_s(self, watch: Watch) -> float:
        """The longest wait, without the time for which this process was stopped."""
        return max(end - begin - watch.still_s(begin, end) for begin, end in self.spans)


class Watch:
    """Measures when a busy machine stops this process: that time does not count as a get's wait
    for a node."""

    _NAP_S = 0.01

    def __init__(self) -> None:
        self._still: list[tuple[float, float]] = []
        self._last = time.monotonic()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._work, name="watch")
        self._thread.start()

    def _work(self) -> None:
        while not self._ending.wait(self._NAP_S):
            now = time.monotonic()
            if now - self._last > 3 * self._NAP_S:
                self._still.append((self._last + self._NAP_S, now))
            self._last = now

    def still_s(self, begin: float, end: float) -> float:
        """How much of the time from `begin` to `end` this process was stopped."""
        # The calling thread may have been woken before the thread that records it.
        asleep = (self._last + self._NAP_S, time.monotonic())
        spans = [*self._still, asleep]
        return sum(max(0.0, min(end, until) - max(begin, since)) for since, until in spans)

    def close(self) -> None:
        self._ending.set()
        self._thread.join()


class FaultPool:
    """`nodes` daemons and a Redis, on loopback."""

    def __init__(
        self,
        commands_folder: Path,
        folder: Path,
        *,
        nodes: int = 2,
        dram: int = 512 * EXTENT,
        nvme: int = 0,
        token_file: Path | None = None,
    ) -> None:
        """`dram` and `nvme`: bytes of each node. `token_file`: of the pool; it exists."""
        with contextlib.ExitStack() as self._stack:
            self.watch = self._stack.enter_context(contextlib.closing(Watch()))
            self.redis = self._stack.enter_context(RedisServer(folder))
            self.name = f"faults-{random.randrange(1 << 40):x}"
            sizes = {"dram": dram, "nvme": nvme}
            self._secret = ["--token-file", str(token_file)] if token_file else []
            self.nodes = [self._start(commands_folder, i, sizes) for i in range(nodes)]
            # A Redis that is delayed for a moment is not a fault under test.
            self.directory = f"{self.redis.url}?pool={self.name}&timeout=5"
            if token_file:
                self.directory += f"&token_file={token_file}"
            self.url = f"{self.directory}&home=none"
            wait_until(lambda: len(self._numbers()) == nodes, "all nodes are in the directory")
            self._stack = self._stack.pop_all()

    def _start(self, commands_folder: Path, index: int, sizes: dict[str, int]) -> Daemon:
        options = ["--listen", "127.0.0.1:0", "--directory", self.redis.url, "--pool", self.name]
        options += ["--name", f"n{index}", "--no-prefault", *self._secret]
        daemon = Daemon(commands_folder, **sizes, options=options)
        self._stack.callback(daemon.close)
        return daemon

    def _numbers(self) -> dict[int, Any]:
        with Client.open(self.url, name="counting") as client:
            return client.nodes()  # type: ignore[attr-defined,no-any-return]

    def open(self, **options: str) -> Any:
        """A client without a home: every byte crosses a socket."""
        extra = "".join(f"&{name}={value}" for name, value in options.items())
        return Client.open(self.url + extra, name="faults")

    def fill(self, client: Any, prompts: int) -> list[Prefix]:
        """Prompts that are published by two nodes each."""
        prefixes = [fresh_prefix(BLOCKS) for _ in range(prompts)]
        for prefix in prefixes:
            wait_until(lambda prefix=prefix: put_twice(client, prefix), "two nodes take a put")  # type: ignore[misc]
        wait_until(lambda: self.replicated(client, prefixes), "both replicas are published")
        return prefixes

    @staticmethod
    def replicated(client: Any, prefixes: list[Prefix]) -> bool:
        """Whether the directory names two nodes for every block."""
        keys = [key for prefix in prefixes for key in prefix.keys]
        try:
            return all(len(nodes) == 2 for nodes in client._nodes.driver.members.locate(keys))
        except DirectoryUnavailable:
            return False

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def put_twice(client: Any, prefix: Prefix) -> bool:
    """Whether two nodes have it now; a node that is stopped for half a second does not take it."""
    try:
        return bool(client.put(prefix, payloads_of(prefix), replicas=2).complete)
    except NoRoom:
        return False


def read_once(client: Any, prefix: Prefix, tally: Tally, *, timeout_s: float = 5.0) -> None:
    """One get into a buffer of the caller, timed and compared."""
    into = [np.zeros(SCHEMA.block_bytes, np.uint8) for _ in range(len(prefix))]
    began = time.monotonic()
    try:
        with client.get(prefix, into=into, timeout_s=timeout_s) as blocks:
            tally.waited(began)
            if not blocks.complete:
                tally.short.append(str(blocks.reason))
            for index in range(len(blocks)):
                tally.wrong += not np.array_equal(into[index], payload_of(prefix.keys[index]))
    except TiffinError as error:
        tally.waited(began)
        tally.failed.append(f"{type(error).__name__}: {error}")
    tally.gets += 1


def read_for(
    client: Any, prefixes: list[Prefix], seconds: float, tally: Tally | None = None
) -> Tally:
    """Gets of random prompts for a while."""
    tally = tally or Tally()
    dice = random.Random(7)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        read_once(client, dice.choice(prefixes), tally)
    return tally
