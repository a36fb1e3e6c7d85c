"""Which clients a node accepts at its port: tokens, tags of frames, TLS."""

from __future__ import annotations

import contextlib
import socket
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from kvsupport import Background, fresh_prefix, payloads_of
from poolsupport import LARGE

from tiffin.kvstore import Client
from tiffin.kvstore.cli.daemon import DaemonOptions
from tiffin.kvstore.credentials import Credentials, is_loopback, load_credentials, parse_address
from tiffin.kvstore.errors import (
    DeadlineExceeded,
    InvalidInput,
    NodeUnavailable,
    NotAuthenticated,
    ProtocolError,
    VersionMismatch,
)
from tiffin.kvstore.node.core import messages
from tiffin.kvstore.node.node import Node, NodeOptions
from tiffin.kvstore.node.server.tcp_server import RemoteService
from tiffin.kvstore.token_proofs import Greeting
from tiffin.messenger.errors import PeerLost
from tiffin.messenger.tcp import tcp_client
from tiffin.messenger.testing import soon
from tiffin.messenger.transport import Range
from tiffin.messenger.wire.frames import Kind

if TYPE_CHECKING:
    from collections.abc import Callable

    from certsupport import Authority

    from tiffin.kvstore.client.pool.remote.peer import Peer
    from tiffin.messenger.tcp.stream import Stream

TOKEN = b"0123456789abcdef-of-the-pool"
OTHER = b"another-token-0123456789abcdef"
BLOCK = LARGE.extent_bytes
NOW = messages.PROTOCOL_VERSION


def hello_by_hand(
    address: tuple[str, int], prove: Callable[[bytes, messages.Hello], bytes]
) -> tuple[Stream, Any]:
    """A stream, and the node's answer to a hello with this proof."""
    stream = tcp_client.connect(address, soon())
    challenge = stream.receive_message(soon())
    here = f"{address[0]}:{address[1]}"
    hello = messages.Hello(
        1,
        messages.PROTOCOL_VERSION,
        session=b"s" * 16,
        nonce=b"n" * 16,
        dialled=here,
        reached=here,
    )
    hello.proof = prove(challenge, hello)
    return stream, say(stream, hello)


def right(challenge: bytes, hello: messages.Hello) -> bytes:
    """The proof of a client that knows the token."""
    return Greeting(TOKEN, b"", challenge, messages.without_proof(hello)).client_proof()


class Rogue:
    """A node that accepts every client, and proves nothing."""

    trusted = False

    def __init__(self, proof: bytes) -> None:
        self._proof = proof
        self.grants: Any = None

    def greet(self) -> bytes:
        challenge = messages.Challenge(0, b"n" * 16, messages.PROTOCOL_VERSION)
        return messages.encoder.encode(challenge)

    def message(self, body: bytes | memoryview) -> tcp_client.Answer:
        hello = messages.request_decoder.decode(body)
        self.trusted = True
        welcome = messages.Welcome(
            hello.id, messages.PROTOCOL_VERSION, "rogue", 1 << 20, self._proof
        )
        return tcp_client.Answer(messages.encoder.encode(welcome))

    def closed(self) -> None:
        pass


def say(stream: Stream, message: messages.Request | bytes) -> Any:
    body = message if isinstance(message, bytes) else messages.encoder.encode(message)
    stream.message(body)
    stream.flush(soon())
    return messages.reply_decoder.decode(stream.receive_message(soon()))


class TestTokens:
    @pytest.mark.parametrize("node_token", [b"", TOKEN], ids=["open node", "node with token"])
    @pytest.mark.parametrize("client_token", [b"", TOKEN, OTHER], ids=["none", "right", "wrong"])
    def test_both_sides_know_the_same(
        self, serve: Any, connect: Any, node_token: bytes, client_token: bytes
    ) -> None:
        _, address = serve(Credentials(node_token))
        peer = connect(address, Credentials(client_token))
        if node_token == client_token:
            assert peer.call(messages.Match(0, b""), 5.0).flags == b""
        else:
            with pytest.raises(NotAuthenticated, match="token"):
                peer.call(messages.Match(0, b""), 5.0)

    @pytest.mark.parametrize("proof", [b"", b"x" * 32])
    def test_a_client_refuses_a_node_that_does_not_know_the_token(
        self, connect: Any, proof: bytes
    ) -> None:
        with contextlib.closing(
            tcp_client.Listener(("127.0.0.1", 0), lambda _: Rogue(proof))
        ) as rogue:
            peer = connect(rogue.address, Credentials(TOKEN))
            with pytest.raises(NotAuthenticated, match="does not know our token"):
                peer.call(messages.Match(0, b""), 5.0)

    def test_a_proof_is_good_for_one_connection(self, serve: Any) -> None:
        _, address = serve(Credentials(TOKEN))
        proofs = []

        def prove(challenge: bytes, hello: messages.Hello) -> bytes:
            proofs.append(right(challenge, hello))
            return proofs[-1]

        stream, welcome = hello_by_hand(address, prove)
        stream.close()
        assert isinstance(welcome, messages.Welcome)
        for stale in (proofs[0], welcome.proof):  # the node's own proof is not valid either
            stream, refused = hello_by_hand(address, lambda _, __, stale=stale: stale)
            stream.close()
            assert isinstance(refused, messages.Refused)
            assert refused.error == "NotAuthenticated"

    def test_who_goes_on_without_tags_is_hung_up_on(self, serve: Any) -> None:
        """A client has to prove that it knows the token in every frame, not once."""
        node, address = serve(Credentials(TOKEN))
        stream, welcome = hello_by_hand(address, right)
        with contextlib.closing(stream):
            assert isinstance(welcome, messages.Welcome)
            stream.message(messages.encoder.encode(messages.Drain(2, True)))
            stream.send_frame(bytes(16))  # in place of its tag
            stream.flush(soon())
            with pytest.raises(PeerLost):
                stream.receive_message(soon())
        assert not node.draining

    def test_guessing_ends_the_connection(self, serve: Any) -> None:
        _, address = serve(Credentials(TOKEN))
        stream, refused = hello_by_hand(address, lambda *_: b"y" * 32)
        hello = messages.Hello(1, messages.PROTOCOL_VERSION, "", 1, b"s" * 16, b"n" * 16, b"z")
        with contextlib.closing(stream):
            for _ in range(2):
                assert refused.error == "NotAuthenticated"
                refused = say(stream, hello)
            with pytest.raises(PeerLost):
                say(stream, hello)

    @pytest.mark.parametrize(
        ("first", "error"),
        [
            (messages.Match(1, b""), "ProtocolError"),
            (messages.Drain(1, True), "ProtocolError"),
            (messages.Hello(1, 99, "", 1, b"s" * 16, b"n" * 16), "VersionMismatch"),
            (messages.Hello(1, NOW, "", 1, b"s", b"n" * 16), "ProtocolError"),
            (messages.Hello(1, NOW, "", 1, b"s" * 16, b""), "ProtocolError"),
            (b"\xc1 garbage", "ProtocolError"),
        ],
        ids=["match", "drain", "version", "session", "nonce", "garbage"],
    )
    def test_nothing_but_a_right_hello_comes_first(
        self, serve: Any, first: Any, error: str
    ) -> None:
        node, address = serve()
        stream = tcp_client.connect(address, soon())
        with contextlib.closing(stream):
            stream.receive_message(soon())
            refused = say(stream, first)
            assert (type(refused), refused.error) == (messages.Refused, error)
        assert not node.draining
        assert not node.core.sessions

    @pytest.mark.parametrize("kind", [Kind.READ, Kind.WRITE])
    def test_a_stranger_moves_no_bytes(self, serve: Any, kind: Kind) -> None:
        _, address = serve()
        stream = tcp_client.connect(address, soon())
        with contextlib.closing(stream):
            stream.receive_message(soon())
            if kind is Kind.READ:
                stream.ask_read(1, [Range(0, 8)])
            else:
                stream.ask_write(1, [Range(0, 8)], [np.zeros(8, np.uint8)])
            stream.flush(soon())
            with pytest.raises(PeerLost):
                stream.receive_message(soon())

    def test_a_second_hello_is_refused(self, serve: Any, connect: Any) -> None:
        _, address = serve()
        peer = connect(address)
        with pytest.raises(ProtocolError, match="one hello"):
            peer.call(messages.Hello(0, 1), 5.0)
        assert peer.call(messages.Match(0, b""), 5.0).flags == b""

    @pytest.mark.parametrize(
        ("version", "older"), [(NOW - 1, "the node"), (NOW + 1, "this client")]
    )
    def test_a_node_of_another_version(self, connect: Any, version: int, older: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            peer = connect(server.getsockname()[:2], Credentials(TOKEN))
            ending = Background(lambda: peer.call(messages.Match(0, b""), 5.0))
            sock, _ = server.accept()
            with sock:
                body = messages.encoder.encode(messages.Challenge(0, b"n" * 16, version))
                sock.sendall(struct.pack("<IB", 1 + len(body), 1) + body)
                with pytest.raises(VersionMismatch, match=rf"{older}( at [0-9.:]+)? is older"):
                    ending.result()
                assert sock.recv(100) == b"", "it says nothing to such a one"

    @pytest.mark.parametrize(("version", "older"), [(1, "the client"), (NOW + 1, "this node")])
    def test_a_client_of_another_version(self, serve: Any, version: int, older: str) -> None:
        """The proof covers the versions, so no relay can make both ends use an older one."""
        _, address = serve(Credentials(TOKEN))

        def prove(challenge: bytes, hello: messages.Hello) -> bytes:
            hello.version = version
            return right(challenge, hello)

        stream, refused = hello_by_hand(address, prove)
        stream.close()
        assert refused.error == "VersionMismatch"
        assert f"{older} is older" in refused.message


class TestTokenFiles:
    def test_a_token_comes_from_a_file_or_a_files_name_in_the_environment(
        self, tmp_path: Path
    ) -> None:
        path = tmp_path / "token"
        path.write_bytes(TOKEN + b"\n")
        path.chmod(0o600)
        assert load_credentials(path, environ={}).token == TOKEN
        assert load_credentials(environ={"TIFFIN_TOKEN_FILE": str(path)}).token == TOKEN
        assert load_credentials(environ={}).token == b""
        assert "0123" not in repr(load_credentials(path, environ={}))

    @pytest.mark.parametrize(
        ("content", "mode", "message"),
        [
            (TOKEN, 0o640, "chmod 600"),
            (TOKEN, 0o604, "chmod 600"),
            (b"short", 0o600, "5 bytes"),
            (b"", 0o600, "0 bytes"),
            (b"x" * 5000, 0o600, "5000 bytes"),
            (None, 0, "can't read"),
        ],
    )
    def test_files_that_are_refused(
        self, tmp_path: Path, content: bytes | None, mode: int, message: str
    ) -> None:
        path = tmp_path / "token"
        if content is not None:
            path.write_bytes(content)
            path.chmod(mode)
        with pytest.raises(InvalidInput, match=message):
            load_credentials(path, environ={})

    @pytest.mark.parametrize(
        "text",
        ["", "host", "host:", ":1", "host:x", "host:65536", "host:-1", "a b:1", "a@b:1", "a/b:1",
         "::1:7", "[]:1", "[::1]", "host:123456", "a..b:1", "x" * 64 + ":1", "a:\uff11"],
    )  # fmt: skip
    def test_what_is_no_address(self, text: str) -> None:
        with pytest.raises(InvalidInput, match=r"HOST:PORT|brackets"):
            parse_address(text)

    def test_addresses(self) -> None:
        assert parse_address("10.0.0.5:7700") == ("10.0.0.5", 7700)
        assert parse_address("[::1]:0") == ("::1", 0)
        assert parse_address("node-7.pool.example:1") == ("node-7.pool.example", 1)
        assert is_loopback("127.0.0.1")
        assert not is_loopback("0.0.0.0")
        with pytest.raises(InvalidInput, match="name of a host"):
            is_loopback("no-such-host.invalid")


class TestListening:
    @pytest.mark.parametrize("host", ["0.0.0.0", "10.1.2.3"])
    def test_beyond_loopback_only_with_authentication(self, host: str) -> None:
        node = Node(NodeOptions(BLOCK, prefault=False))
        with contextlib.closing(node), pytest.raises(InvalidInput, match="--token-file"):
            RemoteService(node, (host, 0))

    @pytest.mark.parametrize(
        ("host", "shown"), [("127.0.0.1", "0100007F"), ("0.0.0.0", "00000000")]
    )
    def test_exactly_the_address_that_was_given(self, host: str, shown: str) -> None:
        node = Node(NodeOptions(BLOCK, prefault=False))
        with contextlib.closing(node):
            service = RemoteService(node, (host, 0), Credentials(TOKEN))
            with contextlib.closing(service):
                lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
                listening = {line.split()[1] for line in lines if line.split()[3] == "0A"}
                assert f"{shown}:{service.address[1]:04X}" in listening

    def test_an_address_that_cannot_be_had(self) -> None:
        node = Node(NodeOptions(BLOCK, prefault=False))
        with contextlib.closing(node), socket.create_server(("127.0.0.1", 0)) as taken:
            with pytest.raises(NodeUnavailable, match="can't listen"):
                RemoteService(node, taken.getsockname())
            with pytest.raises(NodeUnavailable, match="can't listen"):
                RemoteService(node, ("203.0.113.7", 1), Credentials(TOKEN))

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"directory": "embedded:x"}, "--listen"),
            ({"listen": ("0.0.0.0", 1)}, "--advertise"),
            (
                {
                    "directory": "embedded:x",
                    "listen": ("127.0.0.1", 1),
                    "credentials": Credentials(tls_cert=Path("c"), tls_key=Path("k")),
                },
                "--tls-ca",
            ),
        ],
    )
    def test_a_daemons_options_go_together(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(InvalidInput, match=message):
            DaemonOptions(NodeOptions(BLOCK), "n", Path("/s"), **options)


# -- TLS -------------------------------------------------------------------------------------------


class TestTls:
    def ask(self, peer: Peer) -> None:
        assert peer.call(messages.Match(0, b""), 5.0).flags == b""

    def node_with(self, authority: Authority, *, mutual: bool = False) -> Credentials:
        crt, key = authority.certificate("node")
        return Credentials(tls_ca=authority.ca if mutual else None, tls_cert=crt, tls_key=key)

    def test_bytes_go_through_tls(self, serve: Any, connect: Any, ours: Authority) -> None:
        node, address = serve(self.node_with(ours))
        peer = connect(address, Credentials(tls_ca=ours.ca))
        prefix = fresh_prefix(2, LARGE)
        with Client.attach(node) as local:
            local.put(prefix, payloads_of(prefix))
        leased = peer.call(messages.Lease(0, prefix.key_bytes, 20.0), 20.0)
        target = np.zeros(LARGE.block_bytes, np.uint8)
        where = Range(BLOCK + LARGE.header_bytes, LARGE.block_bytes)
        peer.transport.read(leased.lease, [where], [target], deadline=soon())
        assert np.array_equal(target, payloads_of(prefix)[1])

    def test_a_node_that_proves_nothing_is_refused(
        self, serve: Any, connect: Any, ours: Authority, theirs: Authority
    ) -> None:
        _, foreign = serve(self.node_with(theirs))
        with pytest.raises(NotAuthenticated, match="certificates"):
            self.ask(connect(foreign, Credentials(tls_ca=ours.ca)))
        crt, key = ours.certificate("elsewhere", "10.9.9.9")
        _, elsewhere = serve(Credentials(tls_cert=crt, tls_key=key))
        with pytest.raises(NotAuthenticated, match="certificates"):
            self.ask(connect(elsewhere, Credentials(tls_ca=ours.ca)))
        _, plain = serve()
        with pytest.raises(NodeUnavailable):
            self.ask(connect(plain, Credentials(tls_ca=ours.ca)))

    def test_a_client_without_tls_gets_nowhere(
        self, serve: Any, connect: Any, ours: Authority
    ) -> None:
        _, address = serve(self.node_with(ours))
        with pytest.raises(DeadlineExceeded):  # each end waits for the other to begin
            connect(address).call(messages.Match(0, b""), 0.1)

    def test_with_a_ca_the_node_wants_to_see_the_clients_certificate(
        self, serve: Any, connect: Any, ours: Authority, theirs: Authority
    ) -> None:
        _, address = serve(self.node_with(ours, mutual=True))
        crt, key = ours.certificate("client")
        self.ask(connect(address, Credentials(tls_ca=ours.ca, tls_cert=crt, tls_key=key)))
        with pytest.raises(NotAuthenticated, match="certificates"):
            self.ask(connect(address, Credentials(tls_ca=ours.ca)))
        crt, key = theirs.certificate("client")
        with pytest.raises(NotAuthenticated, match="certificates"):
            self.ask(connect(address, Credentials(tls_ca=ours.ca, tls_cert=crt, tls_key=key)))

    def test_a_token_inside_tls(self, serve: Any, connect: Any, ours: Authority) -> None:
        crt, key = ours.certificate("node")
        _, address = serve(Credentials(TOKEN, tls_cert=crt, tls_key=key))
        self.ask(connect(address, Credentials(TOKEN, tls_ca=ours.ca)))
        with pytest.raises(NotAuthenticated, match="token"):
            self.ask(connect(address, Credentials(OTHER, tls_ca=ours.ca)))

    def test_files_that_do_not_go_together(self, ours: Authority, tmp_path: Path) -> None:
        crt, key = ours.certificate("node")
        other_key = ours.certificate("client")[1]
        with pytest.raises(InvalidInput, match="both or neither"):
            load_credentials(tls_cert=crt, environ={})
        with pytest.raises(InvalidInput, match="--tls-cert and --tls-key"):
            Credentials(tls_ca=ours.ca).server_context()
        with pytest.raises(InvalidInput, match="tls_ca as well"):
            Credentials(tls_cert=crt, tls_key=key).client_context()
        with pytest.raises(InvalidInput, match="can't load"):
            Credentials(tls_cert=crt, tls_key=other_key).server_context()
        with pytest.raises(InvalidInput, match="can't load"):
            Credentials(tls_ca=tmp_path / "none").client_context()
