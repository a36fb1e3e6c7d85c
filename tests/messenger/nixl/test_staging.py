"""Staging pieces of transfers, and the quarantine of those whose transfer was abandoned."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from tiffin.messenger.errors import PeerLost, RangeError, TransferTimeout
from tiffin.messenger.nixl.staging import Staging
from tiffin.messenger.testing import soon


class Flight:
    """A transfer; it ends when `ended` is set."""

    def __init__(self) -> None:
        self.ended = False

    def quiet(self, now: float) -> bool:
        return self.ended


def staging_of(count: int) -> Staging:
    return Staging(np.zeros(count * 100 + 50, np.uint8), 100)


def fine() -> None:
    """A check that never forbids waiting."""


def test_pieces_are_distinct() -> None:
    staging = staging_of(4)
    pieces = [staging.try_take() for _ in range(4)]
    starts = {piece.ctypes.data for piece in pieces if piece is not None}
    assert len(starts) == 4
    assert staging.try_take() is None


def test_a_piece_whose_transfer_goes_on_is_nobodys() -> None:
    staging, flight = staging_of(1), Flight()
    piece = staging.take(soon(), fine)
    staging.give(piece, flight, "peer", time.monotonic())
    assert (staging.quarantined, staging.try_take()) == (1, None)
    with pytest.raises(PeerLost, match="does not end"):
        staging.take(soon(), fine)
    flight.ended = True
    assert staging.take(soon(), fine) is piece
    assert staging.quarantined == 0


def test_a_piece_whose_transfer_has_ended_is_free_at_once() -> None:
    staging, flight = staging_of(1), Flight()
    flight.ended = True
    staging.give(staging.take(soon(), fine), flight, "peer", time.monotonic())
    assert (staging.free, staging.quarantined) == (1, 0)


def test_who_waits_gets_the_next_free_piece() -> None:
    staging = staging_of(1)
    piece = staging.take(soon(), fine)
    got: list[object] = []
    waiting = threading.Thread(target=lambda: got.append(staging.take(soon(), fine)))
    waiting.start()
    staging.give(piece, None, "peer", time.monotonic())
    waiting.join()
    assert got[0] is piece


def test_waiting_ends_at_the_deadline_and_when_it_is_pointless() -> None:
    staging = staging_of(1)
    staging.take(soon(), fine)
    with pytest.raises(TransferTimeout):
        staging.take(time.monotonic() + 0.01, fine)

    def closed() -> None:
        raise PeerLost("closed")

    with pytest.raises(PeerLost, match="closed"):
        staging.take(soon(), closed)


def test_a_quarter_is_what_one_owner_may_leave_hanging() -> None:
    staging = staging_of(8)
    flights = [Flight(), Flight()]
    for flight in flights:
        staging.check("peer", time.monotonic())
        staging.give(staging.take(soon(), fine), flight, "peer", time.monotonic())
    with pytest.raises(PeerLost, match="2 transfers"):
        staging.check("peer", time.monotonic())
    staging.check("another", time.monotonic())
    flights[0].ended = True
    staging.check("peer", time.monotonic())


def test_memory_smaller_than_a_piece_is_refused() -> None:
    with pytest.raises(RangeError):
        Staging(np.zeros(99, np.uint8), 100)
