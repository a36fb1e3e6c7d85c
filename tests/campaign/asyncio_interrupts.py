"""Interrupts of asyncio clients: an exception of a signal handler may end the loop's run."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np

from tiffin.kvstore import AsyncClient

from .interrupts import EXPECTED, LOOK_EVERY, TIMEOUT_S, Campaign, Interrupted, payloads_of
from .world import SCHEMA, Late, check_bytes, payload_of

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Coroutine

# Cancelled tasks end at once; one that has not ended after this time never will.
LOST_S = 0.5


class AsyncCampaign(Campaign):
    """The asyncio clients. Every other interrupt is a Ctrl-C as `asyncio.run` handles it, which
    cancels the task; the others raise wherever the loop is, and end its run."""

    def client_of(self, number: int) -> None:
        """One loop and one client."""
        until = self.report.interrupts + number
        runner = asyncio.Runner()
        clients: list[AsyncClient] = []
        try:
            while not clients:
                self.awaited(runner, "open", lambda: self.opening(clients))
            while self.report.interrupts < until:
                name = self.dice.choice(list(ASYNC_CALLS))
                call = ASYNC_CALLS[name]
                if self.awaited(runner, name, lambda c=call: c(self, clients[0])):
                    self.unless_lost(runner, self.used_again_soon(clients[0]))
                    if not self.report.interrupts % LOOK_EVERY:
                        # Only a running loop collects a reply that is no longer awaited.
                        self.unless_lost(runner, self.check_soon())
            while self.awaited(runner, "close", lambda: clients[0].close()):
                pass
            if asyncio.all_tasks(runner.get_loop()):  # tasks that never wake: `close` awaits them
                raise _LoopLost
            runner.close()
        except _LoopLost:
            # An exception at the wrong place of asyncio itself: this loop can't run again.
            self._landed["loop lost"] += 1
            loop = runner._loop
            runner._state = None
            clients.clear()
            _force_close(loop)
            del loop
            gc.collect()
        finally:
            # A runner that was interrupted while it ended leaves its signal handler installed,
            # which refers to its task, and so to all that the task refers to.
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def given_back(self, before: Counter[str]) -> None:
        """No check here: asyncio itself leaks descriptors of loops that are interrupted while they
        are made or closed. `check` looks at what is held at the node."""

    async def opening(self, clients: list[AsyncClient]) -> None:
        """Open one more client."""
        if self._node is not None:
            clients.append(await AsyncClient.attach(self._node, name="campaign"))
        else:
            clients.append(await AsyncClient.open(self.url, name="campaign"))

    @property
    def url(self) -> str:
        """The URL for clients."""
        if self.kind == "asyncio-tcp":
            return f"tiffin://127.0.0.1:{self._nodes[0].port}"
        return super().url

    def awaited(self, runner: asyncio.Runner, name: str, make: Callable[[], Any]) -> bool:
        """Run the awaitable that `make()` returns; returns whether it was interrupted."""
        self.alarm.cancels = bool(self.dice.randrange(2))

        def action() -> None:
            try:
                self.unless_lost(runner, make())
            except asyncio.CancelledError:
                raise Interrupted from None

        try:
            landed = self.interrupt(name, action)
        except KeyboardInterrupt:  # raised by asyncio itself, after it cancelled the task
            self.report.interrupts += 1
            self._landed[name] += 1
            landed = True
        if landed:
            self.unless_lost(runner, _end_others())
        return landed

    def unless_lost(self, runner: asyncio.Runner, what: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine. Raises _LoopLost if asyncio refuses, or stops in the middle."""
        try:
            runner.run(what)
        except RuntimeError as error:
            if "event loop" not in str(error).lower():
                raise
            raise _LoopLost from error

    async def check_soon(self) -> None:
        """See `check`. In a thread of its own, not of the loop's executor: a lost loop would not
        end that."""
        found: list[Exception] = []

        def check() -> None:
            try:
                self.check()
            except Exception as error:  # noqa: BLE001 - raised below
                found.append(error)

        thread = threading.Thread(target=check)
        thread.start()
        while thread.is_alive():  # noqa: ASYNC110 - the thread can't wake a loop that may be lost
            await asyncio.sleep(0.001)
        for error in found:
            raise error

    async def used_again_soon(self, client: AsyncClient) -> None:
        """See `used_again`."""
        prefix = self.dice.choice(self.prompts)
        began = time.monotonic()
        async with client.get(prefix, timeout_s=TIMEOUT_S) as blocks:
            self.right(blocks, prefix)
        with contextlib.suppress(*EXPECTED):
            await client.put(prefix, payloads_of(prefix), timeout_s=TIMEOUT_S)
        if time.monotonic() - began > 2 * TIMEOUT_S + 2.0:
            raise Late("a client that was interrupted does not answer in time")


class _LoopLost(Exception):
    """asyncio considers the loop running, or closed."""


def _force_close(loop: asyncio.AbstractEventLoop | None) -> None:
    """Close a lost loop, as far as a process can that goes on without it."""
    asyncio._set_running_loop(None)
    if loop is not None:
        loop._thread_id = None  # type: ignore[attr-defined]
        with contextlib.suppress(RuntimeError):
            loop.close()
    asyncio.set_event_loop(None)


_lost: weakref.WeakSet[asyncio.Task[Any]] = weakref.WeakSet()


async def _end_others() -> None:
    """Cancel the tasks that an interrupted run left, as `asyncio.run` does, except tasks whose
    wake-up was lost in asyncio itself."""
    others = asyncio.all_tasks() - set(_lost) - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if others:
        _, left = await asyncio.wait(others, timeout=LOST_S)
        _lost.update(left)
    for task in others:
        if task.done() and not task.cancelled():
            task.exception()


async def _async_put(run: Campaign, client: AsyncClient) -> None:
    prefix = run.some()
    await client.put(prefix, payloads_of(prefix), timeout_s=TIMEOUT_S)


async def _async_get(run: Campaign, client: AsyncClient) -> None:
    prefix = run.some()
    async with client.get(prefix, timeout_s=TIMEOUT_S) as blocks:
        run.right(blocks, prefix)


async def _async_get_into(run: Campaign, client: AsyncClient) -> None:
    prefix = run.some()
    target = np.empty((len(prefix), SCHEMA.block_bytes), np.uint8)
    found = await client.get(prefix, into=target, timeout_s=TIMEOUT_S)
    for row, key in zip(target[: len(found)], prefix.keys, strict=False):
        check_bytes(row, key)


async def _async_reserve(run: Campaign, client: AsyncClient) -> None:
    prefix = run.some()
    async with client.reserve(prefix, timeout_s=TIMEOUT_S) as slots:
        for slot in slots:
            slot.view[:] = payload_of(prefix.keys[slot.index])


async def _async_stream(run: Campaign, client: AsyncClient) -> None:
    async with client.stream(run.some(), timeout_s=TIMEOUT_S) as stream:
        async for _ in stream:
            pass


async def _side_by_side(run: Campaign, client: AsyncClient) -> None:
    await asyncio.gather(*(_async_get(run, client) for _ in range(3)), _async_put(run, client))


ASYNC_CALLS: dict[str, Callable[[Campaign, AsyncClient], Coroutine[Any, Any, Any]]] = {
    "put": _async_put,
    "get": _async_get,
    "get-into": _async_get_into,
    "reserve": _async_reserve,
    "stream": _async_stream,
    "side-by-side": _side_by_side,
    "match": lambda run, client: client.match(run.some(), timeout_s=TIMEOUT_S),
    "pin": lambda run, client: client.pin(run.some(), ttl_s=0.05, timeout_s=TIMEOUT_S),
    "remove": lambda run, client: client.remove(run.some(), timeout_s=TIMEOUT_S),
    "statistics": lambda run, client: client.statistics(timeout_s=TIMEOUT_S),
}
