"""The contract of a transport as a test suite, for the transports here and for those of
other projects.

    class TestMyTransport(TransportContract):
        @pytest.fixture
        def peer(self):
            book = GrantBook()
            with serve(book) as address, closing(MyTransport(address)) as transport:
                yield ServingPeer(transport, book)

Nothing here imports pytest: the suite is plain methods that take a fixture named `peer`.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from itertools import count, pairwise
from typing import TYPE_CHECKING

import numpy as np

from .errors import (
    GrantError,
    MessengerError,
    PeerLost,
    RangeError,
    TransferError,
    TransferTimeout,
)
from .transport import NOTHING, Range, Served

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from .shm.host_copy import ByteArray
    from .transport import Transport

# The timeout of a transfer that should succeed, and the polling interval of `eventually`.
PATIENCE_S = 30.0
_LOOK_S = 0.005


class GrantBook:
    """A table of grants (see `Grants`) for tests; thread-safe. `opened` counts grants in use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = count(1)
        self._grants: dict[int, tuple[Sequence[ByteArray], bool]] = {}
        self.opened = 0

    def add(self, arrays: Sequence[ByteArray], *, writes: bool = False) -> int:
        """Make a new grant of these arrays; returns its number."""
        with self._lock:
            number = next(self._numbers)
            self._grants[number] = arrays, writes
            return number

    def end(self, grant: int) -> None:
        """End a grant: later calls refuse it."""
        with self._lock:
            del self._grants[grant]

    @contextlib.contextmanager
    def open(self, grant: int, *, writes: bool) -> Iterator[Sequence[ByteArray]]:
        """See `Grants.open`."""
        with self._lock:
            if grant not in self._grants:
                raise GrantError(f"there is no grant {grant}; ask for one")
            arrays, writable = self._grants[grant]
            if writes and not writable:
                raise GrantError(f"grant {grant} is for reading")
            self.opened += 1
        try:
            yield arrays
        finally:
            with self._lock:
                self.opened -= 1


class ServingPeer:
    """A transport, and the table of grants at its other end. `allocate` makes an array of so many
    bytes that the other end can grant, for transports that can access only certain memory."""

    def __init__(
        self,
        transport: Transport,
        book: GrantBook,
        allocate: Callable[[int], ByteArray] | None = None,
    ) -> None:
        self.transport = transport
        self.book = book
        self._allocate = allocate or (lambda nbytes: np.zeros(nbytes, np.uint8))

    def grant(self, sizes: Sequence[int]) -> tuple[int, ByteArray]:
        """A grant of arrays of these sizes, with random bytes: number, all bytes."""
        arrays = [self._allocate(nbytes) for nbytes in sizes]
        content = random_bytes(sum(sizes), 1)
        at = 0
        for array in arrays:
            array[:] = content[at : at + len(array)]
            at += len(array)
        return self.book.add(arrays), content

    def quiet(self) -> bool:
        """Whether no grant is in use; waits for that, PATIENCE_S at most."""
        return eventually(lambda: not self.book.opened)


def eventually(condition: Callable[[], bool], patience_s: float = PATIENCE_S) -> bool:
    """Poll the condition until it is true, or for `patience_s`; returns whether it is."""
    give_up = time.monotonic() + patience_s
    while not condition():
        if time.monotonic() > give_up:
            return False
        time.sleep(_LOOK_S)
    return True


def random_bytes(nbytes: int, seed: int) -> ByteArray:
    """Random bytes; the same for the same seed."""
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def soon(seconds: float = PATIENCE_S) -> float:
    """A deadline; by default one that a healthy transfer of a test does not reach."""
    return time.monotonic() + seconds


class TransportContract:
    """The tests that every transport passes. `peer` can grant at least 32 MiB."""

    def test_bytes_arrive(self, peer: ServingPeer) -> None:
        grant, content = peer.grant([100_000])
        target = np.zeros(100_000, np.uint8)
        served = peer.transport.read(grant, [Range(0, 100_000)], [target], deadline=soon())
        assert served == Served(1, 100_000)
        assert np.array_equal(target, content)
        assert peer.quiet()

    def test_ranges_of_all_shapes(self, peer: ServingPeer) -> None:
        sizes = [4096, 1, 65_537, 0, 300_000, 7]
        grant, content = peer.grant(sizes)
        chance = random.Random(5)
        for turn in range(40):
            ranges = _random_ranges(chance, sum(sizes), chance.choice((1, 3, 13, 200)))
            targets = [np.zeros(length, np.uint8) for _, length in ranges]
            told: list[int] = []
            served = peer.transport.read(
                grant, ranges, targets, deadline=soon(), arrived=told.append
            )
            assert served == Served(len(ranges), sum(length for _, length in ranges)), turn
            assert told == list(range(len(ranges)))
            for (offset, length), target in zip(ranges, targets, strict=True):
                assert np.array_equal(target, content[offset : offset + length])

    def test_neighbours_and_pieces_of_one_array(self, peer: ServingPeer) -> None:
        grant, content = peer.grant([1 << 20])
        ranges = [Range(at, 4096) for at in range(0, 1 << 20, 4096)]
        whole = np.zeros(1 << 20, np.uint8)
        targets = [whole[at : at + 4096] for at in range(0, 1 << 20, 4096)]
        peer.transport.read(grant, ranges, targets, deadline=soon())
        assert np.array_equal(whole, content)
        backwards = ranges[::-1]
        peer.transport.read(grant, backwards, targets, deadline=soon())
        assert np.array_equal(whole, content.reshape(256, 4096)[::-1].reshape(-1))

    def test_large(self, peer: ServingPeer) -> None:
        sizes = [9 << 20, (3 << 20) + 5, 12 << 20]
        grant, content = peer.grant(sizes)
        ranges = [Range(3, (20 << 20) + 11), Range((20 << 20) + 14, (4 << 20) - 9)]
        targets = [np.zeros(length, np.uint8) for _, length in ranges]
        told: list[int] = []
        peer.transport.read(grant, ranges, targets, deadline=soon(), arrived=told.append)
        assert told == [0, 1]
        assert np.array_equal(np.concatenate(targets), content[3 : (24 << 20) + 5])

    def test_more_ranges_than_a_frame_holds(self, peer: ServingPeer) -> None:
        grant, content = peer.grant([66_000])
        ranges = [Range(at, 1) for at in range(66_000)]
        target = np.zeros(66_000, np.uint8)
        told: list[int] = []
        targets = [target[at : at + 1] for at in range(66_000)]
        served = peer.transport.read(grant, ranges, targets, deadline=soon(), arrived=told.append)
        assert served == Served(66_000, 66_000)
        assert told == list(range(66_000))
        assert np.array_equal(target, content)

    def test_nothing_asked_is_nothing_moved(self, peer: ServingPeer) -> None:
        grant, _ = peer.grant([100])
        nothing: ByteArray = np.zeros(0, np.uint8)
        assert peer.transport.read(grant, [], [], deadline=soon()) == NOTHING
        ranges, arrays = [Range(100, 0), Range(0, 0)], [nothing, nothing]
        assert peer.transport.read(grant, ranges, arrays, deadline=soon()) == Served(2, 0)

    def test_a_grant_that_ends_early_serves_what_it_has(self, peer: ServingPeer) -> None:
        grant, content = peer.grant([1000, 1000])
        over = [
            [Range(0, 10), Range(1990, 10), Range(1991, 10), Range(0, 10)],
            [Range(0, 10), Range(1990, 10), Range(2**64 - 5, 10), Range(0, 10)],
            [Range(0, 10), Range(1990, 10), Range(2**63, 10), Range(0, 10)],
        ]
        for ranges in over:
            targets = [np.zeros(length, np.uint8) for _, length in ranges]
            served = peer.transport.read(grant, ranges, targets, deadline=soon())
            assert served == Served(2, 20)
            assert np.array_equal(targets[1], content[1990:])

    def test_many_ranges_of_which_one_is_outside(self, peer: ServingPeer) -> None:
        grant, _ = peer.grant([4096])
        for at in (0, 1, 57, 99):
            ranges = [Range(i * 8, 8) for i in range(100)]
            ranges[at] = Range(2**64 - 8, 8)
            targets = [np.zeros(8, np.uint8) for _ in ranges]
            served = peer.transport.read(grant, ranges, targets, deadline=soon())
            assert served == Served(at, 8 * at)
            assert not any(target.any() for target in targets[at:])

    def test_unknown_and_ended_grants_are_refused(self, peer: ServingPeer) -> None:
        grant, content = peer.grant([100])
        target = np.zeros(100, np.uint8)
        with raises(GrantError):
            peer.transport.read(grant + 1, [Range(0, 100)], [target], deadline=soon())
        peer.transport.read(grant, [Range(0, 100)], [target], deadline=soon())
        assert np.array_equal(target, content)
        peer.book.end(grant)
        target[:] = 0
        with raises(GrantError):
            peer.transport.read(grant, [Range(0, 100)], [target], deadline=soon())
        assert not target.any()

    def test_unsuitable_memory_is_refused_and_nothing_moves(self, peer: ServingPeer) -> None:
        grant, _ = peer.grant([200])
        fine = np.zeros(10, np.uint8)
        fixed = np.zeros(10, np.uint8)
        fixed.flags.writeable = False
        wrong: list[ByteArray] = [
            np.zeros(9, np.uint8),
            np.zeros(11, np.uint8),
            np.zeros(20, np.uint8)[::2],
            np.zeros((2, 5), np.uint8),
            np.zeros(10, np.int8),
        ]
        for bad in wrong:
            for pair in ([fine, bad], [bad, fine]):
                ranges = [Range(0, 10), Range(10, 10)]
                with raises(RangeError):
                    peer.transport.read(grant, ranges, pair, deadline=soon())
        with raises(RangeError):
            peer.transport.read(grant, [Range(0, 10)], [fixed], deadline=soon())
        with raises(RangeError):
            peer.transport.read(grant, [Range(0, 10)], [fine, fine], deadline=soon())
        with raises(RangeError):
            peer.transport.read(grant, [Range(-1, 10)], [fine], deadline=soon())
        assert not fine.any()

    def test_a_deadline_that_has_passed(self, peer: ServingPeer) -> None:
        grant, content = peer.grant([100])
        target = np.zeros(100, np.uint8)
        late = time.monotonic() - 1
        with raises(TransferTimeout):
            peer.transport.read(grant, [Range(0, 100)], [target], deadline=late)
        assert not target.any()
        assert peer.quiet()
        peer.transport.read(grant, [Range(0, 100)], [target], deadline=soon())
        assert np.array_equal(target, content)

    def test_a_target_is_the_callers_again_after_an_error(self, peer: ServingPeer) -> None:
        nbytes = 16 << 20
        grant, _ = peer.grant([nbytes])
        target = np.zeros(nbytes, np.uint8)
        for allowed_s in (1e-4, 5e-4, 2e-3):
            deadline = time.monotonic() + allowed_s
            with contextlib.suppress(TransferError):  # out of time, or cut by a double
                peer.transport.read(grant, [Range(0, nbytes)], [target], deadline=deadline)
            target[:] = 0
            time.sleep(0.02)
            assert not target.any()

    def test_an_error_of_the_callback_is_the_callers(self, peer: ServingPeer) -> None:
        grant, content = peer.grant([1000])
        targets = [np.zeros(100, np.uint8) for _ in range(10)]
        ranges = [Range(at, 100) for at in range(0, 1000, 100)]

        def arrived(index: int) -> None:
            if index == 3:
                raise KeyError(index)

        with raises(KeyError):
            peer.transport.read(grant, ranges, targets, deadline=soon(), arrived=arrived)
        assert peer.quiet()
        peer.transport.read(grant, ranges, targets, deadline=soon())
        assert np.array_equal(np.concatenate(targets), content)

    def test_threads_read_at_once(self, peer: ServingPeer) -> None:
        shared, content = peer.grant([1 << 20])
        wrong: list[object] = []

        def work(number: int) -> None:
            chance = random.Random(number)
            try:
                for turn in range(6):
                    ranges = _random_ranges(chance, 1 << 20, 20)
                    targets = [np.zeros(length, np.uint8) for _, length in ranges]
                    peer.transport.read(shared, ranges, targets, deadline=soon())
                    for (offset, length), target in zip(ranges, targets, strict=True):
                        if not np.array_equal(target, content[offset : offset + length]):
                            wrong.append((number, turn, offset))
            except MessengerError as error:
                wrong.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        assert peer.quiet()

    def test_a_closed_transport_says_so(self, peer: ServingPeer) -> None:
        grant, _ = peer.grant([100])
        target = np.zeros(100, np.uint8)
        peer.transport.read(grant, [Range(0, 100)], [target], deadline=soon())
        peer.transport.close()
        peer.transport.close()
        with raises(PeerLost):
            peer.transport.read(grant, [Range(0, 100)], [target], deadline=soon())


@contextlib.contextmanager
def raises(kind: type[BaseException]) -> Iterator[None]:
    """The block must raise exactly this kind of error or one below it."""
    try:
        yield
    except kind:
        return
    raise AssertionError(f"nothing was raised; expected {kind.__name__}")


def _random_ranges(chance: random.Random, space: int, number: int) -> list[Range]:
    """Random ranges: some scattered, some adjacent, some of zero bytes."""
    cuts = sorted(chance.randrange(space + 1) for _ in range(number + 1))
    ranges = [Range(start, stop - start) for start, stop in pairwise(cuts)]
    if chance.random() < 0.5:
        chance.shuffle(ranges)
    return ranges
