"""Everything at once: clients do all that clients can while nodes and Redis stop, die and return.

The other tests of this folder each know what one fault costs. This one knows only what no mixture
may cost: wrong bytes, an error that is not typed, a call that outlives its deadline, or a pool that
is not at rest once all is well again.
"""

from __future__ import annotations

import collections
import contextlib
import random
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from faults.faultpool import FaultPool
from kvsupport import (
    EXTENT,
    SCHEMA,
    Daemon,
    assert_right,
    is_quiet,
    payload_of,
    payloads_of,
    wait_until,
)
from streamworker import is_right

from tiffin.kvstore import Client
from tiffin.kvstore.errors import TiffinError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tiffin.kvstore import Prefix

SECONDS = 20.0
TIMEOUTS_S = (0.5, 2.0, 8.0)
# What a call may take beyond its deadline, which is where it stops waiting, not where it returns.
OVER_S = 0.5
# Of the thread that checks: others of this process compare bytes and hold Python's lock.
SLACK_S = 1.0
PROMPTS = 60
BLOCKS_MAX = 8


# -- what clients do -------------------------------------------------------------------------------


class Abandoned(Exception):
    """A writer changes its mind."""


def get(client: Any, prefix: Prefix, dice: random.Random, timeout_s: float) -> None:
    with client.get(prefix, timeout_s=timeout_s) as blocks:
        assert_right(blocks, prefix)


def get_into(client: Any, prefix: Prefix, dice: random.Random, timeout_s: float) -> None:
    into = [np.zeros(SCHEMA.block_bytes, np.uint8) for _ in range(len(prefix))]
    blocks = client.get(prefix, into=into, timeout_s=timeout_s)
    for target, key in zip(into[: len(blocks)], prefix.keys, strict=False):
        assert np.array_equal(target, payload_of(key)), key.hex()


def stream(client: Any, prefix: Prefix, dice: random.Random, timeout_s: float) -> None:
    with client.stream(prefix, timeout_s=timeout_s) as layers:
        for layer in layers:
            assert is_right(layer, prefix)


def put(client: Any, prefix: Prefix, dice: random.Random, timeout_s: float) -> None:
    client.put(prefix, payloads_of(prefix), replicas=dice.choice((1, 1, 2)), timeout_s=timeout_s)


def reserve(client: Any, prefix: Prefix, dice: random.Random, timeout_s: float) -> None:
    with (
        contextlib.suppress(Abandoned),
        client.reserve(prefix, timeout_s=timeout_s) as slots,
    ):
        for slot in slots:
            slot.view[:] = payload_of(prefix.keys[slot.index])
        if dice.random() < 0.5:
            raise Abandoned


def replicate(client: Any, prefix: Prefix, dice: random.Random, timeout_s: float) -> None:
    known = list(client.nodes()) or [1]
    client.replicate(prefix, to=[dice.choice(known)], timeout_s=timeout_s)


def look(client: Any, prefix: Prefix, dice: random.Random, timeout_s: float) -> None:
    client.match(prefix, timeout_s=timeout_s)
    client.exists(prefix, timeout_s=timeout_s)
    client.pin(prefix, ttl_s=0.5, timeout_s=timeout_s)


def remove(client: Any, prefix: Prefix, dice: random.Random, timeout_s: float) -> None:
    client.remove(prefix, timeout_s=timeout_s)


VERBS = {get: 6, get_into: 6, put: 6, stream: 4, reserve: 2, replicate: 1, look: 1, remove: 1}


class Crowd:
    """Threads with clients of their own, at home and not, which are opened anew now and then."""

    def __init__(self, pool: FaultPool, seed: int, threads: int) -> None:
        self.done: collections.Counter[str] = collections.Counter()
        self.refused: collections.Counter[str] = collections.Counter()
        self.faults: list[str] = []
        self._pool = pool
        self._ending = threading.Event()
        self._threads = [
            threading.Thread(target=self._work, args=(random.Random(1000 * seed + number),))
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """Returns when every client is closed."""
        self._ending.set()
        for thread in self._threads:
            thread.join(60.0)
            assert not thread.is_alive(), "a call never returns"

    def _work(self, dice: random.Random) -> None:
        while not self._ending.is_set():
            with contextlib.suppress(TiffinError), self._open(dice) as client:
                for _ in range(dice.randint(1, 100)):
                    if self._ending.is_set():
                        return
                    self._call(client, dice)

    def _open(self, dice: random.Random) -> Any:
        home = dice.choice(["none", *(str(node.socket) for node in self._pool.nodes)])
        return Client.open(f"{self._pool.redis.url}?pool={self._pool.name}&home={home}")

    def _call(self, client: Any, dice: random.Random) -> None:
        (verb,) = dice.choices(list(VERBS), list(VERBS.values()))
        prefix = prompt(min(int(dice.paretovariate(0.7)), PROMPTS), dice.randint(1, BLOCKS_MAX))
        timeout_s = dice.choice(TIMEOUTS_S)
        began = time.monotonic()
        try:
            verb(client, prefix, dice, timeout_s)
            self.done[verb.__name__] += 1
        except TiffinError as error:
            self.refused[f"{verb.__name__}: {type(error).__name__}"] += 1
        except Exception as error:  # noqa: BLE001 - whatever it is, it is not typed
            self.faults.append(f"{verb.__name__}: {type(error).__name__}: {error}")
        ended = time.monotonic()
        # `look` is three calls.
        late_s = ended - began - self._pool.watch.still_s(began, ended) - OVER_S - SLACK_S
        if late_s > (3 if verb is look else 1) * timeout_s:
            self.faults.append(f"{verb.__name__} took {ended - began:.2f} s of {timeout_s} s")


def prompt(document: int, blocks: int) -> Prefix:
    """The same in every run: what nodes have found again on NVMe is right as well."""
    tokens = np.arange(blocks * SCHEMA.block_tokens) + document
    return SCHEMA.prefix(tokens, namespace=f"document {document}")


# -- what goes wrong -------------------------------------------------------------------------------


def stop_a_node(pool: FaultPool, dice: random.Random) -> None:
    with dice.choice(pool.nodes).stopped():
        time.sleep(dice.uniform(0.1, 1.5))


def kill_a_node(pool: FaultPool, dice: random.Random) -> None:
    node: Daemon = dice.choice(pool.nodes)
    node.kill()
    time.sleep(dice.uniform(0.0, 1.0))
    node.start()


def stop_redis(pool: FaultPool, dice: random.Random) -> None:
    pool.redis.pause()
    time.sleep(dice.uniform(0.1, 2.0))
    pool.redis.resume()


def kill_redis(pool: FaultPool, dice: random.Random) -> None:
    pool.redis.kill()
    time.sleep(dice.uniform(0.0, 1.0))
    pool.redis.start()


def empty_redis(pool: FaultPool, dice: random.Random) -> None:
    with pool.redis.client() as redis:
        redis.flushall()


FAULTS: list[Callable[[FaultPool, random.Random], None]] = [
    stop_a_node, kill_a_node, stop_redis, kill_redis, empty_redis,
]  # fmt: skip


@pytest.fixture
def pool(commands_folder: Path, tmp_path: Path) -> Iterator[FaultPool]:
    sizes = {"dram": 48 * EXTENT, "nvme": 256 * EXTENT}
    with FaultPool(commands_folder, tmp_path, nodes=3, **sizes) as pool:
        yield pool


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_no_mixture_of_faults_costs_more_than_blocks(pool: FaultPool, seed: int) -> None:
    dice = random.Random(seed)
    crowd = Crowd(pool, seed, threads=4)
    try:
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            for fault in dice.sample(FAULTS, len(FAULTS)):
                fault(pool, dice)
                time.sleep(dice.uniform(0.0, 1.5))
    finally:
        crowd.end()
    assert crowd.faults == [], crowd.refused
    # Some calls are refused, as nobody is there to answer; most are not.
    assert all(crowd.done[verb.__name__] for verb in VERBS), (crowd.done, crowd.refused)
    assert crowd.done.total() > 2 * crowd.refused.total(), (crowd.done, crowd.refused)
    for node in pool.nodes:
        with Client.open(node.url) as client:
            wait_until(lambda client=client: is_quiet(client.statistics()), "a node is at rest")
