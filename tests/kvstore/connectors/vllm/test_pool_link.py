"""The link of an engine's process to its pool: it costs nothing while the pool is away."""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from fakepool import SCHEMA
from kvsupport import Background, Daemon, wait_until

from tiffin.kvstore import Client
from tiffin.kvstore.connectors.vllm import pool_link
from tiffin.kvstore.connectors.vllm.pool_link import PoolLink
from tiffin.kvstore.errors import ClientBusy, InvalidInput, NodeUnavailable, NoRoom
from tiffin.kvstore.format.key_space import KeySpace

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

URL = "embedded:?dram=1MiB&prefault=false"
PREFIX = SCHEMA.prefix(range(24))
LONG_S = 3600.0


def blocks(client: Client) -> int:
    return client.match(PREFIX).blocks


def answers(link: PoolLink) -> bool:
    try:
        link.call(blocks)
    except NodeUnavailable:
        return False
    return True


def unexpected(_: Client) -> Any:
    raise AssertionError("the pool was asked")


@pytest.fixture
def link() -> Iterator[PoolLink]:
    link = PoolLink.shared(URL, "always")
    yield link
    link.close()


@pytest.fixture
def long_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_link, "FIRST_REST_S", LONG_S)
    monkeypatch.setattr(pool_link, "LONGEST_REST_S", LONG_S)


@pytest.fixture
def short_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_link, "FIRST_REST_S", 0.01)
    monkeypatch.setattr(pool_link, "LONGEST_REST_S", 0.01)


def test_it_connects_in_the_background(link: PoolLink) -> None:
    wait_until(lambda: answers(link), "the link is there")


def test_waiting_for_ones_own_threads_is_no_failure_of_the_pool(
    link: PoolLink, long_rests: None
) -> None:
    """It costs one miss; the pool is asked by the next call."""

    def busy(_: Client) -> Any:
        raise ClientBusy("calls of other threads took all the time")

    assert link.call(blocks, wait_s=30.0) == 0
    with pytest.raises(ClientBusy):
        link.call(busy)
    assert link.call(blocks) == 0


def test_a_call_can_wait_for_the_connection(link: PoolLink) -> None:
    assert link.call(blocks, wait_s=30.0) == 0


def test_a_call_can_wait_for_a_connection_that_has_hardly_begun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start = threading.Thread.start

    def start_late(thread: threading.Thread) -> None:
        if thread.name == "tiffin-open":
            beginning.set()
            time.sleep(0.1)  # the system runs other threads first
        start(thread)

    beginning = threading.Event()
    monkeypatch.setattr(threading.Thread, "start", start_late)
    opening = Background(lambda: PoolLink.shared(URL, "always"))
    beginning.wait(30.0)
    link = PoolLink.shared(URL, "always")
    assert link.call(blocks, wait_s=30.0) == 0
    opening.result().close()
    link.close()


def test_sides_of_one_process_share_a_client(link: PoolLink) -> None:
    other = PoolLink.shared(URL, "always")
    assert other is link
    mine = link.call(lambda client: client, wait_s=30.0)
    other.close()
    assert link.call(lambda client: client) is mine


def announced(link: PoolLink) -> list[dict[str, Any]]:
    return list(link.call(lambda client: client.statistics()["key_spaces"], wait_s=30.0))


def test_a_key_space_that_changes_is_announced_soon(
    link: PoolLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_link, "_ANNOUNCE_S", LONG_S)
    spaces = [KeySpace(schema="text")]
    link.announce(lambda: spaces[-1])
    wait_until(lambda: announced(link), "it is announced")
    spaces.append(KeySpace(schema="text", adapters={"sql": "weights"}))
    wait_until(lambda: announced(link)[0]["adapters"] == ["sql"], "and announced again")


def test_a_key_space_that_is_refused_is_told_once(
    link: PoolLink, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pool_link, "_ANNOUNCE_S", 0.01)
    monkeypatch.setattr(pool_link, "_LOOK_S", 0.01)
    asked = []

    def space() -> KeySpace:
        asked.append(True)
        return KeySpace(schema="text", engine="a\nb")

    assert link.call(blocks, wait_s=30.0) == 0
    link.announce(space)
    wait_until(lambda: len(asked) > 3, "it is tried again")
    told = [one for one in caplog.messages if "key space" in one]
    assert len(told) == 1
    assert "not announced" in told[0]


def test_links_that_verify_otherwise_are_others(link: PoolLink) -> None:
    other = PoolLink.shared(URL, "off")
    assert other is not link
    other.close()


def test_a_closed_link_asks_nobody_and_opens_nothing() -> None:
    link = PoolLink.shared(URL, "always")
    link.call(blocks, wait_s=30.0)
    link.close()
    with pytest.raises(NodeUnavailable):
        link.call(unexpected, wait_s=30.0)
    assert (os.getpid(), URL, "always") not in PoolLink._links


def test_a_link_that_is_closed_while_it_opens_closes_its_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opening, may_open, closed = threading.Event(), threading.Event(), threading.Event()

    class Late:
        def close(self) -> None:
            closed.set()

    def open_late(*_: object, **__: object) -> Late:
        opening.set()
        may_open.wait(30)
        return Late()

    monkeypatch.setattr(pool_link.Client, "open", open_late)
    link = PoolLink.shared(URL, "always")
    opening.wait(30)
    link.close()
    may_open.set()
    assert closed.wait(30)


@pytest.mark.slow
def test_a_pool_that_is_not_there_at_the_start_is_found_later(
    tmp_path: Path, short_rests: None
) -> None:
    daemon = Daemon(tmp_path, options=["--no-prefault"])
    daemon.kill()
    link = PoolLink.shared(daemon.url, "always")
    with pytest.raises(NodeUnavailable):
        link.call(unexpected, wait_s=30.0)
    daemon.start()
    wait_until(lambda: answers(link), "the link comes back")
    link.close()
    daemon.close()


def test_while_the_pool_rests_it_is_not_asked(long_rests: None) -> None:
    link = PoolLink.shared(URL, "always")
    link.call(blocks, wait_s=30.0)

    def fail(_: Client) -> None:
        raise NodeUnavailable("gone")

    with pytest.raises(NodeUnavailable, match="gone"):
        link.call(fail)
    with pytest.raises(NodeUnavailable, match="rest"):
        link.call(unexpected, wait_s=LONG_S)
    link.close()


def test_calls_that_fail_together_are_one_failure(link: PoolLink) -> None:
    """Else a few threads that wait for one hanging node would make it rest for long."""
    link.call(blocks, wait_s=30.0)
    together = threading.Barrier(4)

    def fail(_: Client) -> None:
        together.wait(30)
        raise NodeUnavailable("none")

    def call() -> None:
        with pytest.raises(NodeUnavailable):
            link.call(fail)

    for calling in [Background(call) for _ in range(4)]:
        calling.result()
    assert link._health.failures == 1


@pytest.mark.parametrize("error", [NoRoom("full"), InvalidInput("bad"), RuntimeError("torch")])
def test_an_answer_that_is_an_error_is_no_reason_to_rest(link: PoolLink, error: Exception) -> None:
    link.call(blocks, wait_s=30.0)

    def fail(_: Client) -> None:
        raise error

    with pytest.raises(type(error)):
        link.call(fail)
    assert link.call(blocks) == 0


@pytest.mark.slow
def test_a_killed_node_fails_calls_and_comes_back_after_its_restart(
    tmp_path: Path, short_rests: None
) -> None:
    daemon = Daemon(tmp_path, options=["--no-prefault"])
    link = PoolLink.shared(daemon.url, "always")
    before = link.call(lambda client: client, wait_s=30.0)
    daemon.kill()
    with pytest.raises(NodeUnavailable):
        link.call(blocks)
    assert not answers(link)
    daemon.start()
    wait_until(lambda: answers(link), "the link comes back")
    assert link.call(lambda client: client) is not before
    link.close()
    daemon.close()


def test_calls_of_several_threads_open_one_client(
    monkeypatch: pytest.MonkeyPatch, short_rests: None
) -> None:
    opened: list[object] = []
    real_open = Client.open

    def count(*arguments: Any, **options: Any) -> Client:
        opened.append(arguments)
        return real_open(*arguments, **options)

    monkeypatch.setattr(pool_link.Client, "open", count)
    link = PoolLink.shared(URL, "always")
    calls = [Background(lambda: link.call(blocks, wait_s=30.0)) for _ in range(8)]
    assert [call.result() for call in calls] == [0] * 8
    assert len(opened) == 1
    link.close()
