"""Verbs of a pool that the main thread calls: another thread carries them out.

They change state that all calls of a client share: streams, turns at home, budgets, health. An
exception of a signal handler must not interrupt such a change (`messenger/signal_safe.py`). When
one is raised, the main thread gives up the call: it cuts the streams that the call uses, the call
does not wait for the home node again, and its leases and slots are given back. The exception
propagates when no thread touches the caller's memory any more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from tiffin.messenger.signal_safe import off_main_thread, uninterrupted
from tiffin.messenger.tcp.pending_connect import Caller

from ..verbs.leased_blocks import LeasedBlocks
from ..verbs.slots import Slots

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


def given_up_together(action: Callable[[], T], cancel: Callable[[], object] = lambda: None) -> T:
    """Run `action()` off the main thread; call `cancel()` if a signal handler's exception ends the
    wait for it."""
    caller = Caller(breaks=True)

    def carry_out() -> T:
        with caller.in_this_thread():
            return action()

    def give_up() -> None:
        cancel()
        caller.cut()

    return uninterrupted(carry_out, undo=give_back, cancel=give_up)


in_one_piece = off_main_thread(lambda _, action: given_up_together(action))


def give_back(outcome: object) -> None:
    """Give back the outcome of a call that was given up: leases or slots."""
    if isinstance(outcome, LeasedBlocks):
        outcome.release()
    elif isinstance(outcome, Slots):
        outcome.abort()
