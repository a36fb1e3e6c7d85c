"""Writes over a stream: what arrives, what is refused, and what is never sent."""

from __future__ import annotations

import threading
from contextlib import closing
from typing import TYPE_CHECKING

import numpy as np
import pytest
from netsupport import serving
from tcpsupport import write_ranges

from tiffin.messenger.errors import GrantError, MessengerError, RangeError, TransferTimeout
from tiffin.messenger.tcp.tcp_client import TcpTransport
from tiffin.messenger.tcp.tls_context import client_tls, server_tls
from tiffin.messenger.testing import GrantBook, eventually, random_bytes, soon
from tiffin.messenger.transport import NOTHING, Range, Served
from tiffin.messenger.wire.frames import RANGES_MAX

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from tiffin.messenger.shm.host_copy import ByteArray


class Writer:
    """A transport, and the table of grants at its other end."""

    def __init__(self, transport: TcpTransport, book: GrantBook) -> None:
        self.transport = transport
        self.book = book

    def grant(self, nbytes: int, *, writes: bool = True) -> tuple[int, ByteArray]:
        """A grant of so many random bytes, in two arrays of one memory: its number, the memory."""
        memory = random_bytes(nbytes, 1)
        return self.book.add(np.split(memory, [nbytes // 3]), writes=writes), memory

    def write(self, grant: int, ranges: Sequence[Range], sources: Sequence[ByteArray]) -> Served:
        return write_ranges(self.transport, grant, ranges, sources, deadline=soon())

    def quiet(self) -> bool:
        """Whether no grant is in use, within a while."""
        return eventually(lambda: not self.book.opened)


@pytest.fixture(params=["plain", "tls"])
def writer(request: pytest.FixtureRequest, certificates: Path) -> Iterator[Writer]:
    at_server = at_client = None
    if request.param == "tls":
        at_server = server_tls(certificates / "server.pem", certificates / "server.key")
        at_client = client_tls(certificates / "ca.pem")
    with (
        serving(tls=at_server) as server,
        closing(TcpTransport(server.opener(tls=at_client))) as transport,
    ):
        yield Writer(transport, server.book)


def test_what_is_written_is_there_and_nothing_else(writer: Writer) -> None:
    grant, memory = writer.grant(8000)
    expected = memory.copy()
    ranges = [Range(10, 100), Range(4990, 20), Range(110, 1), Range(7999, 1)]
    sources = [random_bytes(length, seed) for seed, (_, length) in enumerate(ranges)]
    assert writer.write(grant, ranges, sources) == Served(4, 122)
    for (offset, length), source in zip(ranges, sources, strict=True):
        expected[offset : offset + length] = source
    assert np.array_equal(memory, expected)
    assert writer.quiet()


def test_many_bytes(writer: Writer) -> None:
    grant, memory = writer.grant((24 << 20) + 5)
    expected = memory.copy()
    ranges = [Range(3, (20 << 20) + 11), Range((20 << 20) + 14, (4 << 20) - 9)]
    sources = [random_bytes(length, 7) for _, length in ranges]
    assert writer.write(grant, ranges, sources) == Served(2, (24 << 20) + 2)
    expected[3:] = np.concatenate(sources)
    assert np.array_equal(memory, expected)


def test_as_many_ranges_as_a_frame_holds(writer: Writer) -> None:
    grant, memory = writer.grant(RANGES_MAX)
    source = random_bytes(RANGES_MAX, 9)
    ranges = [Range(at, 1) for at in range(RANGES_MAX)]
    sources = [source[at : at + 1] for at in range(RANGES_MAX)]
    assert writer.write(grant, ranges, sources) == Served(RANGES_MAX, RANGES_MAX)
    assert np.array_equal(memory, source)


def test_nothing_asked_is_nothing_moved(writer: Writer) -> None:
    grant, _ = writer.grant(100)
    nothing: ByteArray = np.zeros(0, np.uint8)
    assert writer.write(grant, [], []) == NOTHING
    assert writer.write(grant, [Range(100, 0), Range(0, 0)], [nothing, nothing]) == Served(2, 0)


@pytest.mark.parametrize("outside", [1991, 2**63, 2**64 - 5])
def test_a_grant_that_ends_early_takes_what_it_has_room_for(writer: Writer, outside: int) -> None:
    grant, memory = writer.grant(2000)
    expected = memory.copy()
    ranges = [Range(0, 10), Range(1990, 10), Range(outside, 10), Range(0, 10)]
    ones = [np.ones(10, np.uint8) for _ in ranges]
    assert writer.write(grant, ranges, ones) == Served(2, 20)
    expected[:10] = expected[1990:] = 1
    assert np.array_equal(memory, expected)


@pytest.mark.parametrize("wrong", ["for reading", "unknown", "ended"])
def test_a_grant_that_is_not_for_writing_is_refused(writer: Writer, wrong: str) -> None:
    grant, memory = writer.grant(1 << 20, writes=wrong != "for reading")
    before = memory.copy()
    if wrong == "ended":
        writer.book.end(grant)
    asked = grant + 1 if wrong == "unknown" else grant
    with pytest.raises(GrantError):
        writer.write(asked, [Range(0, 1 << 20)], [np.zeros(1 << 20, np.uint8)])
    assert np.array_equal(memory, before)


def test_unsuitable_memory_is_refused_and_nothing_moves(writer: Writer) -> None:
    grant, memory = writer.grant(200)
    before = memory.copy()
    fine = np.zeros(10, np.uint8)
    wrong: list[ByteArray] = [
        np.zeros(9, np.uint8),
        np.zeros(11, np.uint8),
        np.zeros(20, np.uint8)[::2],
        np.zeros((2, 5), np.uint8),
        np.zeros(10, np.int8),
    ]
    for bad in wrong:
        for pair in ([fine, bad], [bad, fine]):
            with pytest.raises(RangeError):
                writer.write(grant, [Range(0, 10), Range(10, 10)], pair)
    assert np.array_equal(memory, before)
    fine.flags.writeable = False
    assert writer.write(grant, [Range(0, 10)], [fine]) == Served(1, 10)


def test_a_deadline_that_has_passed(writer: Writer) -> None:
    grant, memory = writer.grant(100)
    before = memory.copy()
    everything = [Range(0, 100)], [np.zeros(100, np.uint8)]
    with pytest.raises(TransferTimeout):
        write_ranges(writer.transport, grant, *everything, deadline=soon(-1))
    assert writer.quiet()
    assert np.array_equal(memory, before)


def test_threads_read_and_write_at_once(writer: Writer) -> None:
    grants = [writer.grant(1 << 18) for _ in range(6)]
    wrong: list[object] = []

    def work(number: int) -> None:
        grant, _ = grants[number]
        everything, target = [Range(0, 1 << 18)], np.zeros(1 << 18, np.uint8)
        try:
            for turn in range(6):
                source = random_bytes(1 << 18, number * 100 + turn)
                writer.write(grant, everything, [source])
                writer.transport.read(grant, everything, [target], deadline=soon())
                if not np.array_equal(target, source):
                    wrong.append((number, turn))
        except MessengerError as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert writer.quiet()
