"""Several paths to one peer: which is chosen, and what happens when one fails during a read."""

from __future__ import annotations

import numpy as np
import pytest
from netsupport import StoppedClock
from pathsupport import ScriptedPath

from tiffin.messenger.errors import FrameError, GrantError, PeerLost, TransferTimeout
from tiffin.messenger.messenger import Messenger
from tiffin.messenger.testing import GrantBook, random_bytes, soon
from tiffin.messenger.transport import Range, Served

CONTENT = random_bytes(1000, 1)
RANGES = [Range(at, 100) for at in range(0, 1000, 100)]
ALL = Served(10, 1000)


class Net:
    """Two paths to one grant, the first expected to be faster, and the messenger over both. By
    `clock`, a read takes as long as its path delays it."""

    def __init__(self, clock: StoppedClock) -> None:
        self.clock = clock
        book = GrantBook()
        self.grant = book.add([CONTENT])
        self.first = ScriptedPath(book, "nixl")
        self.second = ScriptedPath(book, "tcp")
        self.messenger = Messenger([self.first, self.second])
        self.links = self.messenger.links
        self.links[1].statistics.latency_s = 1.0
        self.targets = [np.zeros(100, np.uint8) for _ in RANGES]

    def read(self, ranges: list[Range] = RANGES, told: list[int] | None = None) -> Served:
        return self.messenger.read(
            self.grant,
            ranges,
            self.targets,
            deadline=soon(),
            arrived=None if told is None else told.append,
        )

    def read_count(self) -> tuple[int, int]:
        return self.first.reads, self.second.reads


@pytest.fixture
def net(monkeypatch: pytest.MonkeyPatch) -> Net:
    # The choice of a path must not depend on how busy this machine is.
    clock = StoppedClock()
    monkeypatch.setattr("tiffin.messenger.messenger.time", clock)
    monkeypatch.setattr("pathsupport.time", clock)
    return Net(clock)


def test_the_best_path_is_taken(net: Net) -> None:
    assert net.read() == ALL
    assert np.array_equal(np.concatenate(net.targets), CONTENT)
    assert net.read_count() == (1, 0)


def test_a_path_that_turns_out_slow_is_left(net: Net) -> None:
    net.first.delay_s = 0.02
    net.links[1].statistics.latency_s = 1e-3
    for _ in range(5):
        net.read()
    assert net.read_count() == (1, 4)
    slow, fast = (link.statistics for link in net.links)
    assert slow.latency_s > fast.latency_s
    assert (slow.transfers, fast.transfers) == (1, 4)


@pytest.mark.parametrize("asks_to_be_told", [True, False])
@pytest.mark.parametrize("bytes_left", [0, 99, 100, 450, 999])
def test_only_what_has_not_arrived_is_repeated(
    net: Net, bytes_left: int, asks_to_be_told: bool
) -> None:
    net.first.bytes_left = bytes_left
    told = list[int]() if asks_to_be_told else None
    assert net.read(told=told) == ALL
    assert told in (None, list(range(10)))
    whole = bytes_left // 100
    assert np.array_equal(np.concatenate(net.targets), CONTENT)
    assert net.first.asked == RANGES[:whole]
    assert net.second.asked == RANGES[whole:]
    assert net.links[0].statistics.errors == 1
    assert net.links[0].health.rests(net.clock.now)
    assert net.links[1].statistics.bytes == 1000 - 100 * whole


def test_a_path_that_failed_rests_and_is_tried_again(net: Net) -> None:
    net.first.bytes_left = 0
    for _ in range(3):
        net.read()
    assert net.read_count() == (1, 3)
    net.first.bytes_left = 1 << 40
    net.read()
    assert net.read_count() == (1, 4)
    net.clock.sleep(0.1)
    net.read()
    assert net.read_count() == (2, 4)


def test_when_all_paths_fail_the_error_says_how_far_it_came(net: Net) -> None:
    net.first.bytes_left, net.second.bytes_left = 250, 300
    with pytest.raises(PeerLost) as lost:
        net.read()
    assert lost.value.served == Served(5, 500)
    assert np.array_equal(np.concatenate(net.targets[:5]), CONTENT[:500])


def test_all_paths_rest_and_one_is_tried_all_the_same(net: Net) -> None:
    net.first.bytes_left = net.second.bytes_left = 0
    with pytest.raises(PeerLost):
        net.read()
    net.second.bytes_left = 1 << 40
    assert net.read() == ALL


def test_a_refusal_is_final(net: Net) -> None:
    """The peer would answer the same on every path; no path counts as failed."""
    net.grant += 1
    with pytest.raises(GrantError):
        net.read()
    assert net.read_count() == (1, 0)
    assert net.links[0].statistics.errors == 0


def test_garbage_on_one_path_is_not_the_end(net: Net) -> None:
    net.first.failure = FrameError("a kind that nobody knows")
    assert net.read() == ALL
    assert net.read_count() == (1, 1)


def test_a_grant_that_ends_early_is_a_result(net: Net) -> None:
    assert net.read([*RANGES[:3], Range(950, 100), *RANGES[3:9]]) == Served(3, 300)
    assert net.read_count() == (1, 0)


def test_a_path_that_hangs_leaves_time_for_the_next(net: Net) -> None:
    """A path may take half of the time that is left."""
    net.first.delay_s = 3600
    began, deadline = net.clock.now, soon()
    served = net.messenger.read(net.grant, RANGES, net.targets, deadline=deadline)
    assert served == ALL
    assert net.clock.now - began == pytest.approx((deadline - began) / 2)
    net.second.delay_s = 3600
    with pytest.raises(TransferTimeout):
        net.read()
