"""Feeds wait while the inbox is full, and end when the owner of the index closes it."""

from __future__ import annotations

import pytest
from kvsupport import Background, wait_until

from tiffin.conductor.events.index_updates import Added, Heard
from tiffin.conductor.events.update_inbox import InboxClosed, UpdateInbox


def added(keys: int) -> Added:
    return Added("n", "dram", [b"k" * 16] * keys)


def test_updates_come_out_in_order_and_wake_once() -> None:
    woken = []
    inbox = UpdateInbox(lambda: woken.append(1))
    for keys in (3, 4, 5):
        inbox(added(keys))
    assert (len(inbox), len(woken)) == (3, 1)
    assert inbox.take(keys_max=4) == [added(3), added(4)]
    assert inbox.take() == [added(5)]
    assert inbox.take() == []
    inbox(Heard("n", "dram"))
    assert len(woken) == 2


def test_who_puts_too_much_waits() -> None:
    inbox = UpdateInbox(keys_max=10)
    inbox(added(8))
    put = Background(lambda: inbox(added(3)))
    assert len(inbox) == 1
    assert inbox.take() == [added(8)]
    put.result()
    assert inbox.take() == [added(3)]
    inbox(added(11))  # larger than the inbox: accepted when it is empty
    assert len(inbox) == 1


def test_closing_lets_go_of_those_who_wait() -> None:
    inbox = UpdateInbox(keys_max=1)
    inbox(added(1))
    put = Background(lambda: inbox(added(1)))
    wait_until(lambda: put._thread.is_alive(), "it waits")
    inbox.close()
    with pytest.raises(InboxClosed, match="nobody"):
        put.result()
    with pytest.raises(InboxClosed):
        inbox(Heard("n", "dram"))
    assert inbox.take() == []
