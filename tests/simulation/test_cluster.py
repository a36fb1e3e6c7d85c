"""A whole pool under faults drawn from a seed keeps its invariants. See docs/simulation.md.

The code under test is the product: nodes with their caretakers and publishers, the network service,
the pool's client. Only clocks, threads, sockets, disks and the directory's delays are simulated. A
failure prints its seed and the last events; `python -m tests.simulation SEED` repeats it.
"""

from __future__ import annotations

import random
import threading
import time

import pytest

from . import clients
from .cluster import INVARIANTS, simulate
from .world import Violation, World


def failures(seeds: range) -> list[str]:
    """The failures of these seeds."""
    found = []
    for seed in seeds:
        try:
            simulate(seed)
        except Violation as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize("first", range(0, 40, 10))
def test_nothing_wrong_is_served_and_nothing_is_left(first):
    assert failures(range(first, first + 10)) == []


@pytest.mark.slow
@pytest.mark.parametrize("first", range(10_000, 10_200, 50))
def test_the_same_for_many_seeds(first):
    assert failures(range(first, first + 50)) == []


@pytest.mark.parametrize("seed", [3, 17])
def test_a_seed_is_a_run(seed):
    one, other = simulate(seed), simulate(seed)
    assert one == other
    assert one.checked > 0


def test_another_seed_is_another_run():
    assert simulate(1).trace != simulate(2).trace


def test_a_failure_says_how_to_repeat_it(monkeypatch):
    monkeypatch.setattr(clients, "is_right", lambda key, payload: False)
    with pytest.raises(Violation) as caught:
        simulate(5)
    assert caught.value.kind == "bytes"
    assert "[seed 5, " in str(caught.value)
    assert len(str(caught.value).splitlines()) > 3


def test_every_kind_of_violation_is_explained():
    assert all(meaning for meaning in INVARIANTS.values())


def test_time_is_given_back():
    """A world restores the clock, the threads and the random generator of the process."""
    before = time.monotonic, time.sleep, threading.Thread, threading.Lock, random.Random
    simulate(0)
    after = time.monotonic, time.sleep, threading.Thread, threading.Lock, random.Random
    assert after == before


def test_who_waits_for_a_lock_gets_it_in_turn_or_gives_up_in_time():
    world = World(0)
    seen: list[str] = []
    with world.rules():
        lock = threading.Lock()
        process = world.process("p")

        def holder() -> None:
            with lock:
                world.sleep(1.0)

        def patient() -> None:
            with lock:
                seen.append(f"patient {world.now - 1000:.1f}")

        def hasty() -> None:
            seen.append(f"hasty {lock.acquire(timeout=0.5)} {world.now - 1000:.1f}")

        world.spawn(process, holder, "holder")
        world.call_at(1000.1, lambda: world.spawn(process, patient, "patient"))
        world.call_at(1000.2, lambda: world.spawn(process, hasty, "hasty"))
        world.run(1010.0)
        world.end()
    assert seen == ["hasty False 0.7", "patient 1.0"]


def test_a_killed_process_unwinds_and_touches_nothing_more():
    world = World(0)
    seen: list[str] = []
    with world.rules():
        process = world.process("p")

        def sleeper() -> None:
            try:
                world.sleep(5.0)
                seen.append("woke")
            finally:
                seen.append("unwound")
                world.sleep(1.0)  # raises ProcessDied again
                seen.append("slept")

        world.spawn(process, sleeper, "sleeper")
        world.call_at(1001.0, lambda: world.kill(process))
        world.run(1010.0)
    assert seen == ["unwound"]
