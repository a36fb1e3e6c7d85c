"""Bytes in flight: never more than allowed, urgent ones first, no large one starves."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from contextlib import ExitStack

import pytest
from netsupport import StoppedClock

from tiffin.messenger.budget import SHARED, Budget, Priority
from tiffin.messenger.errors import TransferTimeout
from tiffin.messenger.testing import eventually, soon


class Waiters:
    """Threads that want room, in the order in which they were started."""

    def __init__(self, budget: Budget, deadline: float | None = None) -> None:
        self._budget = budget
        self._deadline = deadline or soon()
        self._threads: list[threading.Thread] = []
        self.got: list[str] = []

    def add(self, name: str, nbytes: int, priority: Priority) -> None:
        def work() -> None:
            with self._budget.hold(nbytes, priority, self._deadline):
                self.got.append(name)

        before = self._budget.waiting
        thread = threading.Thread(target=work)
        thread.start()
        self._threads.append(thread)
        assert eventually(lambda: self._budget.waiting == before + 1)

    def join(self) -> list[str]:
        for thread in self._threads:
            thread.join()
        return self.got


def test_a_waiting_decode_goes_before_what_asked_earlier() -> None:
    budget = Budget(100)
    waiters = Waiters(budget)
    with budget.hold(100, Priority.BACKGROUND, soon()):
        waiters.add("replication", 100, Priority.BACKGROUND)
        waiters.add("prefill", 100, Priority.PREFILL)
        waiters.add("decode", 100, Priority.DECODE)
        waiters.add("another decode", 100, Priority.DECODE)
    assert waiters.join() == ["decode", "another decode", "prefill", "replication"]
    assert budget.used_bytes == budget.waiting == 0


def test_small_ones_do_not_overtake_a_large_one() -> None:
    budget = Budget(100)
    waiters = Waiters(budget)
    with ExitStack() as first:
        first.enter_context(budget.hold(60, Priority.PREFILL, soon()))
        waiters.add("large", 90, Priority.PREFILL)
        waiters.add("small", 10, Priority.PREFILL)
        assert waiters.got == []
    assert waiters.join() == ["large", "small"]


def test_no_room_by_the_deadline() -> None:
    budget = Budget(100)
    with budget.hold(60, Priority.DECODE, soon()):
        with (
            pytest.raises(TransferTimeout, match="60 of 100"),
            budget.hold(50, Priority.DECODE, soon(0.02)),
        ):
            pytest.fail("there is no room for 50")
        assert budget.waiting == 0
        with budget.hold(40, Priority.BACKGROUND, soon(-1)):
            assert budget.used_bytes == 100


def test_a_waiter_that_gives_up_lets_the_next_one_go(monkeypatch: pytest.MonkeyPatch) -> None:
    budget, clock = Budget(100), StoppedClock()
    monkeypatch.setattr("tiffin.messenger.budget.time", clock)
    gave_up: list[TransferTimeout] = []

    def impatient() -> None:
        try:
            with budget.hold(90, Priority.DECODE, clock.now + 100):
                pytest.fail("there is no room for 90")
        except TransferTimeout as error:
            gave_up.append(error)

    waiters = Waiters(budget, deadline=clock.now + 10_000)
    with budget.hold(50, Priority.DECODE, clock.now):
        thread = threading.Thread(target=impatient)
        thread.start()
        assert eventually(lambda: budget.waiting == 1)
        waiters.add("would fit", 50, Priority.BACKGROUND)
        assert waiters.got == []
        clock.sleep(100)
        with budget._changed:
            budget._changed.notify()  # the one that waits longest looks at the clock
        assert waiters.join() == ["would fit"]
        thread.join()
    assert len(gave_up) == 1


def test_more_than_the_limit_takes_all_of_it() -> None:
    budget = Budget(100)
    with budget.hold(10**9, Priority.PREFILL, soon()):
        assert budget.used_bytes == 100
    assert budget.used_bytes == 0


def test_the_limit_holds_among_many() -> None:
    budget = Budget(1000)
    over: list[int] = []

    def work(seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(200):
            with budget.hold(chance.randrange(1, 600), chance.choice(list(Priority)), soon()):
                if budget.used_bytes > 1000:
                    over.append(budget.used_bytes)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert over == []
    assert budget.used_bytes == budget.waiting == 0


def test_a_forked_child_starts_with_all_of_it() -> None:
    code = """
import os, sys
from tiffin.messenger.budget import SHARED, Priority
with SHARED.hold(SHARED.limit_bytes, Priority.DECODE, float("inf")):
    child = os.fork()
    if not child:
        with SHARED.hold(1, Priority.BACKGROUND, 0.0):
            os._exit(7)
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    done = subprocess.run([sys.executable, "-c", code], timeout=60, check=False, env={**os.environ})
    assert done.returncode == 7
    assert SHARED.used_bytes == 0
