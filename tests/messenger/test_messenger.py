"""Several paths to one peer: which is taken, and what happens when one fails in the middle."""

from __future__ import annotations

import threading
import time
from contextlib import closing
from typing import TYPE_CHECKING

import numpy as np
import pytest
from netsupport import StoppedClock, soon

from tiffin.messenger.budget import SHARED, Budget, Priority
from tiffin.messenger.doubles import Counting, Cut, Delayed, Lossy, Wrapper
from tiffin.messenger.errors import FrameError, GrantError, PeerLost, TransferTimeout
from tiffin.messenger.messenger import Messenger
from tiffin.messenger.shm.transports import LocalTransport
from tiffin.messenger.testing import GrantBook, eventually, random_bytes
from tiffin.messenger.transport import Range, Served

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tiffin.messenger.shm.host_copy import ByteArray
    from tiffin.messenger.transport import Arrived, Transport

CONTENT = random_bytes(1000, 1)
RANGES = [Range(at, 100) for at in range(0, 1000, 100)]


class Named(Wrapper):
    """A path under another transport's name, and so with its expectations."""

    def __init__(self, inner: Transport, name: str) -> None:
        super().__init__(inner)
        self.name = name


class Net:
    """Two paths to one book of grants, the first expected to be faster. Each counts what it is
    asked for. By `clock`, a transfer takes as long as a double delays it."""

    def __init__(self, clock: StoppedClock) -> None:
        self.clock = clock
        self.book = GrantBook()
        self.memory = CONTENT.copy()
        self.grant = self.book.add([self.memory], writes=True)
        self.first = Counting(LocalTransport(self.book))
        self.second = Counting(LocalTransport(self.book))

    def messenger(
        self, first: Transport, second: Transport, *, second_s: float = 1.0, **options: Budget
    ) -> Messenger:
        messenger = Messenger([Named(first, "local"), Named(second, "tcp")], **options)
        messenger._links[1].statistics.latency_s = second_s
        return messenger


@pytest.fixture
def net(monkeypatch: pytest.MonkeyPatch) -> Net:
    # Which path is taken must not be a matter of how busy this machine is.
    clock = StoppedClock()
    for module in ("messenger", "doubles"):
        monkeypatch.setattr(f"tiffin.messenger.{module}.time", clock)
    return Net(clock)


def targets() -> list[ByteArray]:
    return [np.zeros(100, np.uint8) for _ in RANGES]


def test_the_best_path_is_taken(net: Net) -> None:
    with closing(net.messenger(net.first, net.second)) as messenger:
        into = targets()
        served = messenger.read(net.grant, RANGES, into, deadline=soon())
    assert served == Served(10, 1000)
    assert np.array_equal(np.concatenate(into), CONTENT)
    assert (net.first.reads, net.second.reads) == (1, 0)


def test_a_path_that_turns_out_slow_is_left(net: Net) -> None:
    slow = Delayed(net.first, 0.02)
    with closing(net.messenger(slow, net.second, second_s=1e-3)) as messenger:
        for _ in range(5):
            messenger.read(net.grant, RANGES, targets(), deadline=soon())
        numbers = messenger.statistics()
    assert (net.first.reads, net.second.reads) == (1, 4)
    assert numbers["local"]["latency_s"] > numbers["tcp"]["latency_s"]
    assert (numbers["local"]["transfers"], numbers["tcp"]["transfers"]) == (1, 4)
    assert messenger.predicted_s(0) == numbers["tcp"]["latency_s"]


@pytest.mark.parametrize("broken_after", [0, 99, 100, 450, 999])
def test_only_what_has_not_arrived_is_repeated(net: Net, broken_after: int) -> None:
    into, told = targets(), list[int]()
    with closing(net.messenger(Lossy(net.first, broken_after), net.second)) as messenger:
        served = messenger.read(net.grant, RANGES, into, deadline=soon(), arrived=told.append)
        numbers = messenger.statistics()
    whole = broken_after // 100
    assert served == Served(10, 1000)
    assert told == list(range(10))
    assert np.array_equal(np.concatenate(into), CONTENT)
    assert net.first.asked == RANGES[:whole]
    assert net.second.asked == RANGES[whole:]
    assert numbers["local"]["errors"] == 1
    assert not numbers["local"]["healthy"]
    assert numbers["tcp"]["bytes"] == 1000 - 100 * whole


def test_only_what_is_not_known_to_be_written_is_repeated(net: Net) -> None:
    sources = [random_bytes(100, seed) for seed in range(10)]
    with closing(net.messenger(Lossy(net.first, 450), net.second)) as messenger:
        served = messenger.write(net.grant, RANGES, sources, deadline=soon())
    assert served == Served(10, 1000)
    assert np.array_equal(net.memory, np.concatenate(sources))
    assert net.second.asked == RANGES[4:]


def test_a_path_that_failed_rests_and_is_tried_again(net: Net) -> None:
    cut = Cut(net.first)
    with closing(net.messenger(cut, net.second)) as messenger:
        cut.cut()
        for _ in range(3):
            messenger.read(net.grant, RANGES, targets(), deadline=soon())
        assert (net.first.reads, net.second.reads) == (0, 3)
        cut.mend()
        messenger.read(net.grant, RANGES, targets(), deadline=soon())
        assert (net.first.reads, net.second.reads) == (0, 4)
        net.clock.sleep(0.1)
        assert messenger.statistics()["local"]["healthy"]
        messenger.read(net.grant, RANGES, targets(), deadline=soon())
        assert (net.first.reads, net.second.reads) == (1, 4)


def test_when_all_paths_fail_the_error_says_how_far_it_came(net: Net) -> None:
    into = targets()
    lossy = net.messenger(Lossy(net.first, 250), Lossy(net.second, 300))
    with closing(lossy) as messenger, pytest.raises(PeerLost) as lost:
        messenger.read(net.grant, RANGES, into, deadline=soon())
    assert lost.value.served == Served(5, 500)
    assert np.array_equal(np.concatenate(into[:5]), CONTENT[:500])


def test_all_paths_rest_and_one_is_tried_all_the_same(net: Net) -> None:
    first, second = Cut(net.first), Cut(net.second)
    with closing(net.messenger(first, second)) as messenger:
        first.cut()
        second.cut()
        with pytest.raises(PeerLost):
            messenger.read(net.grant, RANGES, targets(), deadline=soon())
        second.mend()
        assert messenger.read(net.grant, RANGES, targets(), deadline=soon()).ranges == 10


def test_a_refusal_is_final(net: Net) -> None:
    """The peer's word is the same on every path; no path is to blame."""
    with closing(net.messenger(net.first, net.second)) as messenger:
        with pytest.raises(GrantError):
            messenger.read(net.grant + 1, RANGES, targets(), deadline=soon())
        assert net.second.reads == 0
        assert messenger.statistics()["local"]["errors"] == 0


def test_garbage_on_one_path_is_not_the_end(net: Net) -> None:
    class Garbage(Wrapper):
        def reading(self, *arguments: object) -> Served:
            raise FrameError("a kind that nobody knows")

    with closing(net.messenger(Garbage(net.first), net.second)) as messenger:
        assert messenger.read(net.grant, RANGES, targets(), deadline=soon()).ranges == 10


def test_a_grant_that_ends_early_is_a_result(net: Net) -> None:
    over = [*RANGES[:3], Range(950, 100), *RANGES[3:9]]
    with closing(net.messenger(net.first, net.second)) as messenger:
        assert messenger.read(net.grant, over, targets(), deadline=soon()) == Served(3, 300)
        assert messenger.write(net.grant, over, targets(), deadline=soon()) == Served(3, 300)
    assert net.second.reads == net.second.writes == 0


def test_a_path_that_hangs_leaves_time_for_the_next(net: Net) -> None:
    """It may take half of what is left."""
    with closing(net.messenger(Delayed(net.first, 3600), net.second)) as messenger:
        began, deadline = net.clock.now, soon()
        served = messenger.read(net.grant, RANGES, targets(), deadline=deadline)
        assert served == Served(10, 1000)
        assert net.clock.now - began == pytest.approx((deadline - began) / 2)
    both_hang = net.messenger(Delayed(net.first, 3600), Delayed(net.second, 3600))
    with closing(both_hang) as messenger, pytest.raises(TransferTimeout):
        messenger.read(net.grant, RANGES, targets(), deadline=soon())


def test_paths_of_one_kind_have_names_of_their_own(net: Net) -> None:
    with closing(Messenger([Named(net.first, "tcp") for _ in range(3)])) as messenger:
        assert list(messenger.statistics()) == ["tcp", "tcp-2", "tcp-3"]


def test_a_messenger_needs_a_path() -> None:
    with pytest.raises(ValueError, match="at least one path"):
        Messenger([])


def test_large_transfers_let_others_in_between(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks; a range that is cut is told when its last byte has come."""
    monkeypatch.setattr("tiffin.messenger.messenger._CHUNK_BYTES", 150)
    budget, turns = Budget(150), []

    class Recording(Wrapper):
        def reading(
            self,
            move: object,
            ranges: Sequence[Range],
            targets: Sequence[ByteArray],
            deadline: float,
            arrived: Arrived | None,
        ) -> Served:
            turns.append(sum(length for _, length in ranges))
            if len(turns) == 2:
                urgent.start()
                assert eventually(lambda: budget.waiting == 1)
            return super().reading(move, ranges, targets, deadline, arrived)  # type: ignore[arg-type]

    into, told = targets(), list[int]()
    with closing(net.messenger(Recording(net.first), net.second, budget=budget)) as messenger:

        def decode() -> None:
            where = [Range(0, 7)], [np.zeros(7, np.uint8)]
            messenger.read(net.grant, *where, deadline=soon(), priority=Priority.DECODE)

        urgent = threading.Thread(target=decode)
        served = messenger.read(
            net.grant,
            RANGES,
            into,
            deadline=soon(),
            priority=Priority.BACKGROUND,
            arrived=told.append,
        )
        urgent.join()
    assert served == Served(10, 1000)
    assert told == list(range(10))
    assert np.array_equal(np.concatenate(into), CONTENT)
    assert turns == [150, 150, 7, 150, 150, 150, 150, 100]


def test_chunks_and_a_path_that_fails(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiffin.messenger.messenger._CHUNK_BYTES", 150)
    into, told = targets(), list[int]()
    lossy = net.messenger(Lossy(net.first, 370), Lossy(net.second, 300))
    with closing(lossy) as messenger, pytest.raises(PeerLost) as lost:
        messenger.read(net.grant, RANGES, into, deadline=soon(), arrived=told.append)
    assert lost.value.served.ranges == len(told) == 6
    assert told == list(range(6))
    assert np.array_equal(np.concatenate(into[:6]), CONTENT[:600])


def test_no_room_in_flight_is_a_timeout(net: Net) -> None:
    budget = Budget(1000)
    with closing(net.messenger(net.first, net.second, budget=budget)) as messenger:
        with budget.hold(1, Priority.BACKGROUND, soon()), pytest.raises(TransferTimeout):
            messenger.read(net.grant, RANGES, targets(), deadline=time.monotonic() + 0.05)
        assert messenger.statistics()["local"]["errors"] == 0
        assert messenger.read(net.grant, RANGES, targets(), deadline=soon()).ranges == 10
    assert budget.used_bytes == 0


def test_who_took_its_turn_before_does_not_wait_for_itself(net: Net) -> None:
    into = targets()
    with (
        closing(Messenger([net.first], budget=None)) as messenger,
        SHARED.hold(SHARED.limit_bytes, Priority.DECODE, soon()),
    ):
        assert messenger.read(net.grant, RANGES, into, deadline=soon()) == Served(10, 1000)
    assert np.array_equal(np.concatenate(into), CONTENT)
