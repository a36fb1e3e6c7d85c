"""A loop whose run was ended by an exception: its clients work in the next run."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from kvsupport import SCHEMA, fresh_prefix, is_quiet, payloads_of, wait_until

from tiffin.kvstore import AsyncClient, Client
from tiffin.kvstore.client.connection import loop_threads
from tiffin.kvstore.client.connection.loop_threads import (
    ConcurrencyLimit,
    NotBegun,
    ThreadCall,
    in_thread,
)
from tiffin.kvstore.node.node import Node, NodeOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvsupport import Daemon


class Interrupted(KeyboardInterrupt):
    """The exception of a signal handler."""


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(params=["embedded", "daemon"])
def opening(request: pytest.FixtureRequest) -> Iterator[Callable[[], Any]]:
    """A function that opens one more asyncio client of one node."""
    if request.param == "daemon":
        daemon: Daemon = request.getfixturevalue("own_daemon")()
        yield lambda: AsyncClient.open(daemon.url)
        return
    node = Node(NodeOptions(dram_bytes=8 * SCHEMA.extent_bytes, prefault=False))
    yield lambda: AsyncClient.attach(node)
    node.check()
    node.close()


async def opened(opening: Callable[[], Any]) -> AsyncClient:
    return await opening()  # type: ignore[no-any-return]


@pytest.mark.slow
def test_a_call_that_an_interrupted_run_left_behind_does_not_shorten_the_next(
    runner: asyncio.Runner, opening: Callable[[], Any]
) -> None:
    """All tasks that a runner runs share one context."""
    client = runner.run(opened(opening))
    prefix = fresh_prefix(1)
    runner.run(client.put(prefix, payloads_of(prefix)))
    lost: list[Any] = []

    async def begin() -> None:
        lost.append(client.match(prefix, timeout_s=0.0))
        lost[0].send(None)  # it waits for its reply
        raise Interrupted

    with pytest.raises(Interrupted):
        runner.run(begin())

    async def go_on() -> bool:
        await asyncio.sleep(0.6)  # longer than the lost call's time
        async with client.get(prefix) as blocks:
            return blocks.complete

    assert runner.run(go_on())
    lost.pop().close()
    runner.run(client.close())


def test_a_reply_that_comes_between_two_runs_is_taken_by_the_second(
    runner: asyncio.Runner, opening: Callable[[], Any]
) -> None:
    client = runner.run(opened(opening))
    prefix = fresh_prefix(2)
    runner.run(client.put(prefix, payloads_of(prefix)))

    async def get() -> int:
        async with client.get(prefix) as blocks:
            return len(blocks)

    async def begin() -> asyncio.Task[int]:
        task = asyncio.ensure_future(get())
        await asyncio.sleep(0)
        return task

    task = runner.run(begin())
    time.sleep(0.05)  # time for the node's answer

    async def end() -> int:
        return await task

    assert runner.run(end()) == 2
    runner.run(client.close())


def test_a_client_goes_on_in_another_loop(opening: Callable[[], Any]) -> None:
    prefix = fresh_prefix(2)
    with asyncio.Runner() as one:
        client = one.run(opened(opening))
        assert one.run(client.put(prefix, payloads_of(prefix))).complete
    with asyncio.Runner() as two:
        assert two.run(client.match(prefix)).blocks == 2
        two.run(client.close())


def test_a_client_is_closed_by_another_loop_than_the_one_that_was_lost(
    opening: Callable[[], Any],
) -> None:
    loop, prefix = asyncio.new_event_loop(), fresh_prefix(2)
    client = loop.run_until_complete(opened(opening))
    lost = client.match(prefix)

    async def begin() -> None:
        lost.send(None)  # it waits for its reply

    loop.run_until_complete(begin())
    loop.close()
    asyncio.run(client.close())
    lost.close()


@pytest.mark.slow
@pytest.mark.parametrize("way", ["sync", "asyncio"])
def test_a_client_that_is_dropped_says_goodbye(way: str, own_daemon: Callable[..., Daemon]) -> None:
    """And releases its leases once no view of them is left."""
    daemon = own_daemon()
    prefix = fresh_prefix(2)
    with Client.open(daemon.url) as monitor:

        def use() -> Any:
            client = Client.open(daemon.url)
            client.put(prefix, payloads_of(prefix))
            return client.get(prefix)[0].bytes

        async def use_soon() -> Any:
            client = await AsyncClient.open(daemon.url)
            await client.put(prefix, payloads_of(prefix))
            return (await client.get(prefix))[0].bytes

        view = use() if way == "sync" else asyncio.run(use_soon())
        gc.collect()
        assert not is_quiet(monitor.statistics()), "a view of it is left"
        del view
        gc.collect()
        wait_until(lambda: is_quiet(monitor.statistics()), "the lease is given back")
        wait_until(lambda: len(monitor.statistics()["sessions"]) == 1, "and the session has ended")


# -- what threads do for tasks ---------------------------------------------------------------------


def test_a_letter_whose_delivery_is_interrupted_is_delivered_by_the_next_run(
    runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    settle, interrupts = loop_threads.settle, [Interrupted()]

    def interrupted_once(future: asyncio.Future[Any], outcome: Any) -> None:
        if interrupts:
            raise interrupts.pop()
        settle(future, outcome)

    monkeypatch.setattr(loop_threads, "settle", interrupted_once)
    works: list[ThreadCall[int]] = []

    async def begin() -> None:
        works.append(ThreadCall(lambda: 7))
        await works[0].outlast()

    with pytest.raises(Interrupted):
        runner.run(begin())

    async def end() -> int:
        await works[0].ended
        return works[0].take()

    assert runner.run(end()) == 7


def test_an_exception_in_the_task_waits_for_its_thread(runner: asyncio.Runner) -> None:
    """Else the thread might write into memory that has been given to another owner."""
    begun, go, ended = threading.Event(), threading.Event(), threading.Event()

    def action() -> None:
        begun.set()
        assert go.wait(30)
        ended.set()

    async def run() -> None:
        waiting = in_thread(action)
        waiting.send(None)
        assert begun.wait(30)
        threading.Timer(0.05, go.set).start()
        with pytest.raises(Interrupted):
            waiting.throw(Interrupted())
        assert ended.is_set()

    runner.run(run())


def test_so_many_at_a_time_have_a_turn(runner: asyncio.Runner) -> None:
    turns, go = ConcurrencyLimit(2), threading.Event()
    running: list[int] = []

    def action(number: int) -> int:
        running.append(number)
        assert go.wait(30)
        return number

    async def run() -> None:
        works = [ThreadCall(lambda n=number: action(n)) for number in range(3)]
        calls = [asyncio.ensure_future(work.outlast(turns.put)) for work in works]
        while len(running) < 2:  # noqa: ASYNC110 - threads do not call into a loop
            await asyncio.sleep(0.001)
        with pytest.raises(NotBegun):
            await ThreadCall(lambda: action(3)).outlast(turns.put, begin_within_s=0.05)
        assert len(running) == 2
        go.set()
        assert await asyncio.gather(*calls) == [0, 1, 2]
        assert turns.outlast(30)
        assert 3 not in running, "who did not wait for his turn has none"

    runner.run(run())
