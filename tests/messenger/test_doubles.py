"""The doubles do the harm they promise, and no other."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest
from netsupport import soon

from tiffin.messenger.doubles import Corrupting, Counting, Cut, Delayed, Lossy
from tiffin.messenger.errors import PeerLost, TransferTimeout
from tiffin.messenger.shm.host_copy import hash_bytes
from tiffin.messenger.shm.transports import LocalTransport
from tiffin.messenger.testing import GrantBook, random_bytes
from tiffin.messenger.transport import Range, Served

CONTENT = random_bytes(1000, 1)
RANGES = [Range(at, 100) for at in range(0, 1000, 100)]


@pytest.fixture
def book() -> GrantBook:
    book = GrantBook()
    assert book.add([CONTENT.copy()], writes=True) == 1
    return book


def targets() -> list[np.ndarray]:
    return [np.zeros(100, np.uint8) for _ in RANGES]


def memory(book: GrantBook) -> np.ndarray:
    with book.open(1, writes=True) as (array,):
        return np.array(array)


def test_delayed_beyond_the_deadline_moves_nothing(book: GrantBook) -> None:
    counting = Counting(LocalTransport(book))
    with closing(Delayed(counting, 0.05)) as transport:
        with pytest.raises(TransferTimeout):
            transport.read(1, RANGES, targets(), deadline=soon(0.01))
        with pytest.raises(TransferTimeout):
            transport.write(1, RANGES, targets(), deadline=soon(0.01))
        assert counting.reads == counting.writes == 0
        assert transport.read(1, RANGES, targets(), deadline=soon()).ranges == 10
        assert transport.write(1, RANGES, targets(), deadline=soon()).ranges == 10


def test_lossy_breaks_in_the_middle_of_a_range(book: GrantBook) -> None:
    with closing(Lossy(LocalTransport(book), 330)) as transport:
        into = targets()
        with pytest.raises(PeerLost) as lost:
            transport.read(1, RANGES, into, deadline=soon())
        assert lost.value.served == Served(3, 300)
        assert np.array_equal(np.concatenate(into[:3]), CONTENT[:300])
        assert (into[3][:30] == 0xAA).all()
        assert not into[3][30:].any()
        with pytest.raises(PeerLost):
            transport.write(1, RANGES, targets(), deadline=soon())
        transport.nbytes = 250
        with pytest.raises(PeerLost) as lost:
            transport.write(1, RANGES, targets(), deadline=soon())
        assert lost.value.served == Served(2, 200)
        assert not memory(book)[:200].any()
        assert np.array_equal(memory(book)[200:], CONTENT[200:])


def test_corrupting_is_what_checksums_are_for(book: GrantBook) -> None:
    hashes = [hash_bytes(CONTENT[at : at + 100]) for at, _ in RANGES]
    wrong: list[int] = []
    with closing(Corrupting(LocalTransport(book), every=3)) as transport:
        into = targets()

        def arrived(index: int) -> None:
            if hash_bytes(into[index]) != hashes[index]:
                wrong.append(index)

        transport.read(1, RANGES, into, deadline=soon(), arrived=arrived)
        assert wrong == [2, 5, 8]
        assert transport.corrupted == 3
        source = np.zeros(1000, np.uint8)
        transport.every = 1
        transport.write(1, [Range(0, 1000)], [source], deadline=soon())
        assert not source.any()
        assert np.count_nonzero(memory(book)) == 1


def test_cut_and_mended(book: GrantBook) -> None:
    with closing(Cut(LocalTransport(book))) as transport:
        into = targets()

        def arrived(index: int) -> None:
            if index == 4:
                transport.cut()

        with pytest.raises(PeerLost) as lost:
            transport.read(1, RANGES, into, deadline=soon(), arrived=arrived)
        assert lost.value.served == Served(5, 500)
        with pytest.raises(PeerLost):
            transport.write(1, RANGES, into, deadline=soon())
        transport.mend()
        assert transport.write(1, RANGES, into, deadline=soon()).ranges == 10


def test_counting(book: GrantBook) -> None:
    with closing(Counting(LocalTransport(book))) as transport:
        transport.read(1, RANGES[:3], targets()[:3], deadline=soon())
        transport.write(1, [Range(990, 20)], [np.zeros(20, np.uint8)], deadline=soon())
        assert (transport.reads, transport.writes) == (1, 1)
        assert transport.asked == [*RANGES[:3], Range(990, 20)]
        assert transport.served_bytes == 300
