"""Prefetches of a pool: the home node copies blocks from other nodes, and a thread of the client,
which touches no bytes, asks it to."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import TYPE_CHECKING

from .... import deadlines
from ....deadlines import until_s
from ....errors import (
    ClientClosed,
    DeadlineExceeded,
    DirectoryUnavailable,
    Draining,
    InvalidInput,
    NoRoom,
    TiffinError,
)
from ...verbs.arguments import verb
from ...verbs.block_verbs import DEFAULT_TIMEOUT_S
from ...verbs.prefetch_handles import Prefetch
from ..pool_verbs import leading
from ..replication.replication_requests import pull_from_any
from ..signal_safe_verbs import in_one_piece

if TYPE_CHECKING:
    from collections.abc import Callable

    from ...verbs.prefetching import PrefetchState
    from ..verb_driver import VerbDriver
    from .home import Home

# Prefetches of one client at a time, each a thread that waits: the home node makes as many copies.
TOGETHER = 2
# How often to look for blocks that come from the home node's NVMe.
LOOK_EVERY_S = 0.01


class HomePrefetch(Prefetch):
    """What `Client.prefetch` returns: its thread goes on whether or not it is polled."""

    def __init__(
        self, state: PrefetchState, check_open: Callable[[], None], work: Future[None]
    ) -> None:
        self._state = state
        self._check_client = check_open
        self._work = work

    @verb
    def poll(self) -> bool:
        """Whether it has ended; asks nobody. Raises ClientClosed."""
        return self.ended

    @verb
    @in_one_piece
    def wait(self, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> bool:
        """See `Prefetch.wait`."""
        wait([self._work], deadlines.left_s(timeout_s))
        self._check_open()
        return self.ended


class HomePrefetches:
    """All prefetches of a client. Thread-safe."""

    def __init__(self, home: Home | None, driver: VerbDriver) -> None:
        self._home = home
        self._driver = driver
        self._threads = ThreadPoolExecutor(TOGETHER, thread_name_prefix="tiffin-prefetch")
        self._closing = threading.Event()

    def begin(self, state: PrefetchState, check_open: Callable[[], None]) -> HomePrefetch:
        """Begin a prefetch. Raises ClientClosed."""
        work: Future[None] = Future()
        if self._home is None:
            state.end("no_home")
            work.set_result(None)
            return HomePrefetch(state, check_open, work)
        try:
            work = self._threads.submit(self._carry_out, state, self._home)
        except RuntimeError as error:  # it was shut down
            raise ClientClosed("this client is closed; open another") from error
        return HomePrefetch(state, check_open, work)

    def halt(self) -> None:
        """Begin no further step of any prefetch."""
        self._closing.set()

    def close(self) -> None:
        """`halt`, and wait for the threads, whose requests the driver has cut."""
        self.halt()
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _carry_out(self, state: PrefetchState, home: Home) -> None:
        call = deadlines.Within(until_s(state.deadline))
        try:
            call.run(partial(self._bring, state, home))
        except DeadlineExceeded:
            state.end("deadline" if time.monotonic() >= state.deadline else "lost")
        except TiffinError:
            state.end("lost")

    def _bring(self, state: PrefetchState, home: Home) -> None:
        state.absence, before, reason = None, -1, "miss"
        while not state.look(home) and state.resident > before:
            before = state.resident
            reason = self._pull(state, home)  # up to the next block that home has already
        state.absence = reason
        while not state.look(home) and not self._closing.wait(LOOK_EVERY_S):
            pass

    def _pull(self, state: PrefetchState, home: Home) -> str:
        """Have home copy the blocks that it lacks; the reason why it can't have more of them."""
        wanted, number = state.prefix[state.resident :], home.number
        try:
            located = self._driver.locate(wanted.keys) if len(wanted) else []
        except DirectoryUnavailable:
            return "directory"
        held = leading(located, number)
        if not held:
            return "miss"
        if number is None:
            return "no_directory"
        part = wanted[: len(held)]
        count, failure = pull_from_any(self._driver, part, number, held, state.deadline)
        if count == len(part) or (failure is None and until_s(state.deadline)):
            return "miss"
        return _why(failure)


def _why(failure: TiffinError | None) -> str:
    """The reason for an error of a copy; None: its time was up."""
    match failure:
        case None | DeadlineExceeded():
            return "deadline"
        case Draining():
            return "draining"
        case NoRoom():
            return "no_room"
        case InvalidInput():
            return "no_directory"
    return "lost"
