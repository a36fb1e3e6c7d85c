"""The gate: `close` waits for the callers inside, and no new caller enters."""

from __future__ import annotations

import threading

import pytest

from tiffin.messenger.errors import PeerLost
from tiffin.messenger.usage_gate import UsageGate


@pytest.fixture
def gate() -> UsageGate:
    return UsageGate(lambda: PeerLost("it is closed"))


def test_who_comes_after_the_close_is_refused(gate: UsageGate) -> None:
    assert gate.run(lambda: 5) == 5
    gate.close()
    gate.close()
    with pytest.raises(PeerLost, match="it is closed"), gate:
        raise AssertionError("inside")
    with pytest.raises(PeerLost):
        gate.run(lambda: 5)
    with pytest.raises(PeerLost):
        gate.check()


def test_the_close_waits_for_all_who_are_inside(gate: UsageGate) -> None:
    inside = [threading.Event(), threading.Event()]
    go = [threading.Event(), threading.Event()]
    left: list[int] = []

    def use(which: int) -> None:
        with gate:
            inside[which].set()
            assert go[which].wait(20)
            left.append(which)

    users = [threading.Thread(target=use, args=(which,)) for which in range(2)]
    for user, came in zip(users, inside, strict=True):
        user.start()
        assert came.wait(20)
    closing = threading.Thread(target=gate.close)
    closing.start()
    while not gate.closed:
        go[0].wait(0.001)
    with pytest.raises(PeerLost):
        gate.check()  # as a caller inside would, to end early
    for which, user in enumerate(users):
        assert closing.is_alive(), f"{2 - which} are inside"
        go[which].set()
        user.join(20)
    closing.join(20)
    assert not closing.is_alive()
    assert left == [0, 1]


def test_what_goes_wrong_inside_leaves_the_gate(gate: UsageGate) -> None:
    with pytest.raises(KeyError), gate, gate:
        raise KeyError
    gate.close()  # would wait for ever if a caller were counted twice
