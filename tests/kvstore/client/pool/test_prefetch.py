"""Prefetching: how much, for how long, and how it ends."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import pytest
from kvsupport import Background, wait_until

from tiffin.kvstore.client.streaming import prefetch
from tiffin.kvstore.client.streaming.prefetch import FetchTimedOut, Prefetcher
from tiffin.kvstore.errors import ClientClosed, DeadlineExceeded, NodeUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterator


class Source:
    """Returns the items of a test, raises those that are errors; None when none is left."""

    def __init__(self, limit: int = 1, timeout_s: float = 30.0) -> None:
        self.fetched = 0
        self.stalled = threading.Event()
        self.allowed = 1 << 30  # items that may be fetched
        self.cut = threading.Event()
        self.items: list[object] = []
        self.ahead: Prefetcher[object] = Prefetcher(self._fetch, limit, timeout_s)

    def _fetch(self) -> object:
        began = time.monotonic()
        while self.fetched >= self.allowed:
            self.stalled.set()
            time.sleep(0.005)
            if self.cut.is_set():
                raise NodeUnavailable("cut")
            if time.monotonic() >= self.ahead.due(began):
                raise FetchTimedOut(DeadlineExceeded("nothing came"))
        self.fetched += 1
        item = self.items[self.fetched - 1] if self.fetched <= len(self.items) else None
        if isinstance(item, Exception):
            raise item
        return item

    def stop(self) -> bool:
        return self.ahead.stop(self.cut.set)


@pytest.fixture
def source(request: pytest.FixtureRequest) -> Iterator[Source]:
    source = Source(**getattr(request, "param", {}))
    yield source
    source.cut.set()
    source.stop()
    assert not running()


def running() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "tiffin-prefetch"]


@pytest.mark.parametrize("source", [{"limit": 1}, {"limit": 3}], indirect=True)
def test_no_more_is_fetched_than_may_wait(source: Source) -> None:
    source.items = list("abcdefgh")
    limit = source.ahead._limit
    assert not running(), "nothing is fetched before somebody wants the first"
    for taken, item in enumerate("abcde", start=1):
        assert source.ahead.take() == item
        wait_until(lambda n=taken: source.fetched == n + limit, "the next ones are fetched")
    source.allowed = 0
    for item in source.items[5 : 5 + limit]:
        assert source.ahead.take() == item, "they were here already"


def test_the_end_is_told_as_often_as_it_is_asked_for(source: Source) -> None:
    source.items = [1]
    assert [source.ahead.take() for _ in range(4)] == [1, None, None, None]
    wait_until(lambda: not running(), "there is nothing to fetch any more")


def test_a_failure_comes_after_what_came_before_it(source: Source) -> None:
    source.items = ["a", NodeUnavailable("lost"), "b"]
    assert source.ahead.take() == "a"
    wait_until(lambda: not running(), "it has failed")
    with pytest.raises(NodeUnavailable, match="lost"):
        source.ahead.take()
    assert source.ahead.take() == "b", "who asks again is served again"


def test_after_a_failure_only_one_thread_fetches(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A caller that got the failure may ask again before the thread that met it has ended."""
    source.items = [NodeUnavailable("lost"), "a", "b"]
    end, asked_again = source.ahead._end, threading.Event()

    def preempted(error: BaseException) -> None:
        source.allowed = 1  # the next fetch blocks
        end(error)
        assert asked_again.wait(30)

    monkeypatch.setattr(source.ahead, "_end", preempted)
    with pytest.raises(NodeUnavailable, match="lost"):
        source.ahead.take()
    waiting = Background(source.ahead.take)
    wait_until(source.stalled.is_set, "a second thread fetches")
    assert len(running()) == 2
    asked_again.set()
    wait_until(lambda: len(running()) == 1, "the first one ends, whatever the second does")
    source.allowed = 1 << 30
    assert [waiting.result(), source.ahead.take(), source.ahead.take()] == ["a", "b", None]


@pytest.mark.parametrize("source", [{"timeout_s": 0.1}], indirect=True)
def test_the_time_counts_from_when_the_caller_asks(source: Source) -> None:
    """A caller may work on a layer for longer than `timeout_s` without losing the next one."""
    source.items, source.allowed = ["a", "b"], 1
    assert source.ahead.take() == "a"
    wait_until(lambda: not running(), "nobody asked in all its time, so it was given up")
    waiting = Background(source.ahead.take)
    with pytest.raises(DeadlineExceeded, match="nothing came"):
        waiting.result()
    source.allowed = 2
    assert source.ahead.take() == "b"


def test_who_waits_is_sent_home(source: Source) -> None:
    source.allowed = 0
    waiting = Background(source.ahead.take)
    wait_until(source.stalled.is_set, "it is being fetched")
    source.ahead.halt()
    with pytest.raises(ClientClosed):
        waiting.result()
    assert not source.stop(), "the thread looked at its time, and needed no cutting"
    assert not running()


def test_a_thread_that_hangs_is_cut_off(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source.ahead, "due", lambda began: began + 3600.0)
    source.allowed = 0
    waiting = Background(source.ahead.take)
    wait_until(source.stalled.is_set, "it is being fetched")
    assert source.stop()
    assert not running()
    with pytest.raises(ClientClosed):
        waiting.result()
    assert not source.stop(), "a second time there is nothing to stop"


def test_what_nobody_takes_keeps_no_thread(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "_IDLE_S", 0.01)
    source.items = list("abc")
    assert source.ahead.take() == "a"
    wait_until(lambda: not running(), "it ends")
    assert [source.ahead.take() for _ in range(3)] == ["b", "c", None]
