"""Interrupts of asyncio clients: what a signal handler raises may end the loop's run."""

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

# Tasks that were cancelled end at once; but who does not in so long will never wake.
LOST_S = 0.5


class AsyncCampaign(Campaign):
    """The asyncio clients. Every other interrupt is a Ctrl-C as `asyncio.run` has it, which cancels
    the task; the others raise wherever the loop is, and end its run."""

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
                        # A reply that nobody awaits any more is fetched by a loop that runs.
                        self.unless_lost(runner, self.check_soon())
            while self.awaited(runner, "close", lambda: clients[0].close()):
                pass
            if asyncio.all_tasks(runner.get_loop()):  # tasks that never wake: `close` awaits them
                raise _LoopLost
            runner.close()
        except _LoopLost:
            # An exception at the wrong place of asyncio itself: nobody can run this loop again.
            self._landed["loop lost"] += 1
            loop = runner._loop
            runner._state = None
            clients.clear()
            _force_close(loop)
            del loop
            gc.collect()
        finally:
            # A runner that was interrupted as it ended leaves its own handler behind, which holds
            # its task, and all that this has.
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def given_back(self, before: Counter[str]) -> None:
        """asyncio itself keeps descriptors of loops that are interrupted while they are made, or
        end; what is held at the node, `check` has seen."""

    async def opening(self, clients: list[AsyncClient]) -> None:
        """Open one more."""
        if self._node is not None:
            clients.append(await AsyncClient.attach(self._node, name="campaign"))
        else:
            clients.append(await AsyncClient.open(self.url, name="campaign"))

    @property
    def url(self) -> str:
        """Where clients go."""
        if self.kind == "asyncio-tcp":
            return f"tiffin://127.0.0.1:{self._nodes[0].port}"
        return super().url

    def awaited(self, runner: asyncio.Runner, name: str, make: Callable[[], Any]) -> bool:
        """Run what `make()` gives; whether it was interrupted."""
        self.alarm.cancels = bool(self.dice.randrange(2))

        def action() -> None:
            try:
                self.unless_lost(runner, make())
            except asyncio.CancelledError:
                raise Interrupted from None

        try:
            landed = self.interrupt(name, action)
        except KeyboardInterrupt:  # asyncio's own, after the task was cancelled
            self.report.interrupts += 1
            self._landed[name] += 1
            landed = True
        if landed:
            self.unless_lost(runner, _end_others())
        return landed

    def unless_lost(self, runner: asyncio.Runner, what: Coroutine[Any, Any, None]) -> None:
        """Run it. Raises _LoopLost if asyncio refuses, or stops in the middle."""
        try:
            runner.run(what)
        except RuntimeError as error:
            if "event loop" not in str(error).lower():
                raise
            raise _LoopLost from error

    async def check_soon(self) -> None:
        """See `check`. In a thread that no loop has: one that is lost would not end it."""
        found: list[Exception] = []

        def check() -> None:
            try:
                self.check()
            except Exception as error:  # noqa: BLE001 - raised below
                found.append(error)

        thread = threading.Thread(target=check)
        thread.start()
        while thread.is_alive():  # noqa: ASYNC110 - nobody calls into a loop that may be lost
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
    """asyncio takes the loop for running, or for closed."""


def _force_close(loop: asyncio.AbstractEventLoop | None) -> None:
    """What a process that goes on without its loop can do."""
    asyncio._set_running_loop(None)
    if loop is not None:
        loop._thread_id = None  # type: ignore[attr-defined]
        with contextlib.suppress(RuntimeError):
            loop.close()
    asyncio.set_event_loop(None)


_lost: weakref.WeakSet[asyncio.Task[Any]] = weakref.WeakSet()


async def _end_others() -> None:
    """Tasks that an interrupted run left behind are cancelled, as `asyncio.run` does. One whose
    wake-up was lost in asyncio itself is left alone."""
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
