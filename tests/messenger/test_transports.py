"""The contract, on every transport and on messengers over transports."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

import pytest
from netsupport import serving
from pathsupport import ScriptedPath
from tcpsupport import Relay

from tiffin.messenger.messenger import Messenger
from tiffin.messenger.tcp.tcp_client import TcpTransport
from tiffin.messenger.tcp.tls_context import client_tls, server_tls
from tiffin.messenger.testing import ServingPeer, TransportContract

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tiffin.messenger.transport import Transport


class TestTcp(TransportContract):
    @pytest.fixture
    def peer(self) -> Iterator[ServingPeer]:
        with serving() as server, closing(TcpTransport(server.opener())) as transport:
            yield ServingPeer(transport, server.book)


class TestTcpInParts(TransportContract):
    """Large reads over three streams at a time."""

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
    """Through a relay, bytes arrive in other portions than they were sent in."""

    @pytest.fixture
    def peer(self) -> Iterator[ServingPeer]:
        with (
            serving() as server,
            closing(Relay(server.address)) as relay,
            closing(TcpTransport(server.opener(relay.address))) as transport,
        ):
            yield ServingPeer(transport, server.book)


class MessengerTransport(Messenger):
    """A messenger that also closes its paths, as the contract demands of a transport."""

    name = "tcp"

    def __init__(self, paths: list[Transport]) -> None:
        super().__init__(paths)
        self._mine = paths

    def close(self) -> None:
        for path in self._mine:
            path.close()


class TestMessenger(TransportContract):
    """TCP behind another path that works; or behind two that fail at different times, so that TCP
    finishes their reads."""

    @pytest.fixture(params=[(1 << 40,), (300_000, 0)], ids=["good", "broken"])
    def peer(self, request: pytest.FixtureRequest) -> Iterator[ServingPeer]:
        with serving() as server:
            others = [ScriptedPath(server.book, "nixl", bytes_left=n) for n in request.param]
            messenger = MessengerTransport([*others, TcpTransport(server.opener())])
            with closing(messenger):
                yield ServingPeer(messenger, server.book)
