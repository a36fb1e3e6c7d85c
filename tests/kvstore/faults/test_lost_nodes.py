"""A node is killed or stopped while it is read and written, and another has the same blocks."""

from __future__ import annotations

import signal
import threading
import time

import pytest
from faults.faultpool import FaultPool, Tally, read_for, read_once
from kvsupport import fresh_prefix, payloads_of, wait_until

from tiffin.kvstore.errors import NodeUnavailable, NoRoom

# How much longer than usual a get may wait for a node that has just died or stopped. On a machine
# whose cores are busy, the processes that do answer are late themselves: hence the slack, which is
# much less than the 5 s of a get that waits for a dead node until its deadline.
EXTRA_S = 0.25
SLACK_S = 1.0


def check(tally: Tally, pool: FaultPool) -> None:
    """No get failed, was short, late or wrong."""
    assert tally.gets > 20
    assert tally.wrong == 0
    assert tally.failed == []
    assert tally.short == []
    assert tally.longest_s(pool.watch) < EXTRA_S + SLACK_S


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_no_get_fails_when_a_node_is_killed(pool: FaultPool, victim: int) -> None:
    with pool.open() as client:
        prefixes = pool.fill(client, 12)
        tally = read_for(client, prefixes, 0.5)
        killer = threading.Timer(0.3, pool.nodes[victim].kill)
        killer.start()
        read_for(client, prefixes, 2.0, tally)
        killer.join()
        check(tally, pool)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_no_get_fails_when_a_node_stops_answering(pool: FaultPool, victim: int) -> None:
    with pool.open() as client:
        prefixes = pool.fill(client, 12)
        tally = read_for(client, prefixes, 0.5)
        with pool.nodes[victim].stopped():
            read_for(client, prefixes, 2.0, tally)
        read_for(client, prefixes, 0.5, tally)
        check(tally, pool)


def test_the_only_node_that_is_left_is_waited_for(pool: FaultPool) -> None:
    """While the only live node is stopped for a moment, a get waits: no other node can help."""
    with pool.open() as client:
        (prefix,) = pool.fill(client, 1)
        (dead,) = (n for n, record in client.nodes().items() if record.name == "n0")
        pool.nodes[0].kill()
        client._nodes.driver.links.failed(dead, time.monotonic() + 1000)
        tally = Tally()
        goes_on = threading.Timer(0.5, pool.nodes[1].signal, (signal.SIGCONT,))
        with pool.nodes[1].stopped():
            goes_on.start()
            read_once(client, prefix, tally)
        goes_on.join()
        assert (tally.wrong, tally.failed, tally.short) == (0, [], [])


@pytest.mark.slow
def test_a_put_finds_another_node_when_one_is_killed(pool: FaultPool) -> None:
    with pool.open() as client:
        pool.fill(client, 2)
        pool.nodes[0].kill()
        for _ in range(8):
            prefix = fresh_prefix(3)
            try:
                result = client.put(prefix, payloads_of(prefix), timeout_s=5.0)
            except (NoRoom, NodeUnavailable) as error:
                raise AssertionError(f"the other node has room: {error}") from error
            assert result.complete
            tally = Tally()
            wait_until(
                lambda prefix=prefix: client.match(prefix).blocks == 3,  # type: ignore[misc]
                "the directory has the new blocks",
            )
            read_once(client, prefix, tally)
            assert (tally.short, tally.failed, tally.wrong) == ([], [], 0)


@pytest.mark.slow
def test_a_node_that_comes_back_is_used_again(pool: FaultPool) -> None:
    with pool.open() as client:
        prefixes = pool.fill(client, 4)
        old = {number for number, record in client.nodes().items() if record.name == "n1"}
        pool.nodes[1].kill()
        tally = read_for(client, prefixes, 0.5)
        pool.nodes[1].start()

        def is_back() -> bool:
            names = {number: record.name for number, record in client.nodes().items()}
            return any(name == "n1" and number not in old for number, name in names.items())

        wait_until(is_back, "the node is in the directory again", 20.0)
        read_for(client, prefixes, 0.5, tally)
        assert (tally.wrong, tally.failed, tally.short) == (0, [], [])


@pytest.mark.slow
def test_redis_may_be_killed_and_emptied(pool: FaultPool) -> None:
    with pool.open() as client:
        prefixes = pool.fill(client, 6)
        pool.redis.kill()
        tally = Tally()
        read_once(client, prefixes[0], tally, timeout_s=2.0)
        # Without a directory and a home, the places of blocks are unknown: a miss that says so.
        assert tally.failed == []
        assert tally.short in ([], ["directory"])
        pool.redis.start()  # empty
        wait_until(lambda: pool.replicated(client, prefixes), "all is published again", 40.0)
        again = read_for(client, prefixes, 0.5)
        assert (again.wrong, again.failed, again.short) == (0, [], [])


@pytest.mark.slow
def test_an_emptied_directory_is_filled_again(pool: FaultPool) -> None:
    with pool.open() as client:
        prefixes = pool.fill(client, 6)
        with pool.redis.client() as redis:
            redis.flushall()
        wait_until(lambda: pool.replicated(client, prefixes), "all is published again", 40.0)
        tally = read_for(client, prefixes, 0.5)
        assert (tally.wrong, tally.failed, tally.short) == (0, [], [])
