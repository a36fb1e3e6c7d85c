"""The contract, on every transport and on what is built from transports."""

from __future__ import annotations

import os
from contextlib import closing
from typing import TYPE_CHECKING

import numpy as np
import pytest
from netsupport import serving

from tiffin.messenger.doubles import Counting, Cut, Delayed, Lossy, Relay
from tiffin.messenger.errors import GrantError
from tiffin.messenger.messenger import Messenger
from tiffin.messenger.shm.region import Region
from tiffin.messenger.shm.transports import LocalTransport, ShmTransport
from tiffin.messenger.tcp.tcp_client import TcpTransport
from tiffin.messenger.tcp.tls_context import client_tls, server_tls
from tiffin.messenger.testing import GrantBook, ServingPeer, TransportContract
from tiffin.messenger.transport import Range

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tiffin.messenger.shm.host_copy import ByteArray


class TestLocal(TransportContract):
    @pytest.fixture
    def peer(self) -> Iterator[ServingPeer]:
        book = GrantBook()
        with closing(LocalTransport(book)) as transport:
            yield ServingPeer(transport, book)


class Neighbour:
    """A peer on this host: its grants lie in a region, which is mapped a second time here."""

    def __init__(self, region: Region) -> None:
        self._region = region
        self._at = 0
        self.book = GrantBook()

    def allocate(self, nbytes: int) -> ByteArray:
        start, self._at = self._at, self._at + nbytes
        return self._region.array[start : self._at]

    def resolve(self, grant: int, *, writes: bool) -> list[Range]:
        begin = self._region.array.ctypes.data
        with self.book.open(grant, writes=writes) as arrays:
            return [Range(array.ctypes.data - begin, len(array)) for array in arrays]


@pytest.fixture(scope="module")
def region() -> Iterator[Region]:
    with Region.create(32 << 20) as region:
        yield region


@pytest.fixture(scope="module")
def mapped(region: Region) -> Iterator[Region]:
    with Region.attach(os.dup(region.fd), region.nbytes, writable=True) as mapped:
        yield mapped


class TestShm(TransportContract):
    @pytest.fixture
    def peer(self, region: Region, mapped: Region) -> Iterator[ServingPeer]:
        neighbour = Neighbour(region)
        with closing(ShmTransport(mapped.array, neighbour.resolve)) as transport:
            yield ServingPeer(transport, neighbour.book, neighbour.allocate)


@pytest.mark.parametrize("place", [Range(4090, 7), Range(-1, 1), Range(2**64, 1), Range(0, -1)])
def test_a_grant_outside_the_region_is_refused(place: Range) -> None:
    memory = np.zeros(4096, np.uint8)
    with closing(ShmTransport(memory, lambda grant, *, writes: [place])) as transport:
        for length in (1, 7):
            with pytest.raises(GrantError, match="not in the region"):
                transport.read(
                    1, [Range(0, length)], [np.zeros(length, np.uint8)], deadline=float("inf")
                )


def test_a_region_mapped_read_only_is_not_written() -> None:
    memory = np.zeros(4096, np.uint8)
    memory.flags.writeable = False
    with closing(ShmTransport(memory, lambda grant, *, writes: [Range(0, 4096)])) as transport:
        target = np.ones(8, np.uint8)
        with pytest.raises(GrantError, match="read-only"):
            transport.write(1, [Range(0, 8)], [target], deadline=float("inf"))
        transport.read(1, [Range(0, 8)], [target], deadline=float("inf"))
        assert not target.any()


class TestTcp(TransportContract):
    @pytest.fixture
    def peer(self) -> Iterator[ServingPeer]:
        with serving() as server, closing(TcpTransport(server.opener())) as transport:
            yield ServingPeer(transport, server.book)


class TestTcpInParts(TransportContract):
    """Large transfers over three streams at a time."""

    @pytest.fixture
    def peer(self) -> Iterator[ServingPeer]:
        with (
            serving() as server,
            closing(TcpTransport(server.opener(), parallel_max=3)) as transport,
        ):
            yield ServingPeer(transport, server.book)


class TestTls(TransportContract):
    @pytest.fixture
    def peer(self, certificates: Path) -> Iterator[ServingPeer]:
        tls = server_tls(certificates / "server.pem", certificates / "server.key")
        with serving(tls=tls) as server:
            opener = server.opener(tls=client_tls(certificates / "ca.pem"))
            with closing(TcpTransport(opener)) as transport:
                yield ServingPeer(transport, server.book)


class TestRelayed(TransportContract):
    """Through a relay, the bytes come in other portions than they were sent in."""

    @pytest.fixture
    def peer(self) -> Iterator[ServingPeer]:
        with (
            serving() as server,
            closing(Relay(server.address)) as relay,
            closing(TcpTransport(server.opener(relay.address))) as transport,
        ):
            yield ServingPeer(transport, server.book)


class TestDoubles(TransportContract):
    """Doubles that do nothing (yet) are transports."""

    @pytest.fixture
    def peer(self) -> Iterator[ServingPeer]:
        book = GrantBook()
        plain = LocalTransport(book)
        with closing(Delayed(Lossy(Cut(Counting(plain)), 1 << 40), 0.0)) as transport:
            yield ServingPeer(transport, book)


class TestMessenger(TransportContract):
    @pytest.fixture
    def peer(self) -> Iterator[ServingPeer]:
        with serving() as server:
            paths = [TcpTransport(server.opener()), LocalTransport(server.book)]
            with closing(Messenger(paths)) as messenger:
                yield ServingPeer(messenger, server.book)


class TestMessengerOfBrokenPaths(TransportContract):
    """One path always fails, sooner or later; the other one finishes what it began."""

    @pytest.fixture
    def peer(self) -> Iterator[ServingPeer]:
        with serving() as server:
            book = server.book
            broken = [Lossy(LocalTransport(book), 300_000), Lossy(LocalTransport(book), 0)]
            with closing(Messenger([*broken, TcpTransport(server.opener())])) as messenger:
                yield ServingPeer(messenger, book)
