"""Which clients are accepted over TLS, by their certificates."""

from __future__ import annotations

import ssl
from contextlib import closing
from typing import TYPE_CHECKING

import numpy as np
import pytest
from netsupport import serving
from tcpsupport import Relay

from tiffin.messenger.errors import PeerLost, Stalled, TransferTimeout
from tiffin.messenger.tcp.tcp_client import TcpTransport, connect
from tiffin.messenger.tcp.tls_context import client_tls, server_tls
from tiffin.messenger.testing import eventually, random_bytes, soon
from tiffin.messenger.transport import Range

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from netsupport import Server


@pytest.fixture
def server(certificates: Path) -> Iterator[Server]:
    """Accepts clients with a certificate of the CA."""
    tls = server_tls(
        certificates / "server.pem", certificates / "server.key", certificates / "ca.pem"
    )
    with serving(tls=tls, hello_timeout_s=60.0) as server:
        yield server


def of_client(certificates: Path, name: str = "client") -> ssl.SSLContext:
    return client_tls(
        certificates / "ca.pem", certificates / f"{name}.pem", certificates / f"{name}.key"
    )


def test_both_sides_show_a_certificate(server: Server, certificates: Path) -> None:
    with closing(server.opener(tls=of_client(certificates))(soon())) as stream:
        assert stream._socket.version() in ("TLSv1.2", "TLSv1.3")
        body = random_bytes(300_000, 2).tobytes()
        stream.message(body)
        stream.flush(soon())
        assert stream.receive_message(soon()) == body


@pytest.mark.parametrize("who", ["nobody", "stranger"])
def test_clients_of_another_ca_are_refused(server: Server, certificates: Path, who: str) -> None:
    if who == "nobody":
        tls = client_tls(certificates / "ca.pem")
    else:
        tls = of_client(certificates, "stranger")
    with pytest.raises(PeerLost):
        server.opener(tls=tls)(soon())
    assert server.talks == []


def test_a_server_of_another_ca_is_refused(server: Server, certificates: Path) -> None:
    tls = client_tls(
        certificates / "stranger.pem", certificates / "client.pem", certificates / "client.key"
    )
    with pytest.raises(PeerLost, match="certificate verify failed"):
        server.opener(tls=tls)(soon())


def test_a_server_of_another_name_is_refused(server: Server, certificates: Path) -> None:
    tls = of_client(certificates)
    with pytest.raises(PeerLost, match="certificate"):
        connect(server.address, soon(), tls=tls, server_hostname="example.org")
    connect(server.address, soon(), tls=tls).close()  # the address is in the certificate


def test_who_does_not_speak_tls(server: Server, certificates: Path) -> None:
    with closing(connect(server.address, soon())) as plain:
        plain.message(b"hello")
        plain.flush(soon())
        with pytest.raises(PeerLost):
            plain.receive_message(soon())
    with serving() as plain_server, pytest.raises(PeerLost):
        connect(plain_server.address, soon(), tls=of_client(certificates))
    assert eventually(lambda: not server.listener.statistics()["untrusted"])


def test_a_handshake_that_does_not_end(server: Server, certificates: Path) -> None:
    """On either side: the listener gives up after the time for a hello, the client at its
    deadline."""
    server.listener.hello_timeout_s = 0.2
    with closing(connect(server.address, soon())) as silent, pytest.raises(PeerLost):
        silent.receive_message(soon())
    server.listener.hello_timeout_s = 60.0
    with closing(Relay(server.address)) as relay:
        relay.pause()
        with pytest.raises(TransferTimeout):
            connect(relay.address, soon(0.2), tls=of_client(certificates))


def test_old_versions_are_refused(server: Server, certificates: Path) -> None:
    tls = of_client(certificates)
    assert tls.minimum_version == ssl.TLSVersion.TLSv1_2
    with pytest.warns(DeprecationWarning, match="TLSv1"):
        tls.minimum_version = ssl.TLSVersion.TLSv1
    with pytest.warns(DeprecationWarning, match="TLSv1"):
        tls.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises(PeerLost):
        connect(server.address, soon(), tls=tls)


def test_stalls_and_cuts(server: Server, certificates: Path) -> None:
    nbytes = 8 << 20
    content = random_bytes(nbytes, 1)
    grant = server.book.add([content])
    target = np.zeros(nbytes, np.uint8)
    with closing(Relay(server.address)) as relay:
        opener = server.opener(relay.address, of_client(certificates))
        with closing(TcpTransport(opener)) as transport:
            everything, into = [Range(0, nbytes)], [target]
            transport.read(grant, everything, into, deadline=soon())
            assert np.array_equal(target, content)
            relay.pause()
            with pytest.raises(Stalled):
                transport.read(grant, everything, into, deadline=soon(600), stall_s=0.2)
            relay.resume()
            relay.cut_after(3 << 20)
            with pytest.raises(PeerLost):
                transport.read(grant, everything, into, deadline=soon())
            relay.mend()
            target[:] = 0
            transport.read(grant, everything, into, deadline=soon())
            assert np.array_equal(target, content)


def test_close_while_shaking_hands(server: Server) -> None:
    with closing(connect(server.address, soon())):
        assert eventually(lambda: server.listener.statistics()["untrusted"] == 1)
        server.listener.close()


def test_files_that_are_missing(certificates: Path) -> None:
    with pytest.raises(FileNotFoundError):
        server_tls(certificates / "server.pem", certificates / "nothing.key")
    with pytest.raises(FileNotFoundError):
        client_tls(certificates / "nothing.pem")
