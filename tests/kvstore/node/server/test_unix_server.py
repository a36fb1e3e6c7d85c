"""A node survives invalid bytes and clients that misbehave.

Whatever one connection does, other connections are served; and after its end it holds nothing.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import socket
import struct
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import kvsupport
import msgspec
import pytest
from kvsupport import (
    EXTENT,
    SLACK_S,
    Daemon,
    LoopThread,
    PoolOptions,
    assert_conserved,
    assert_right,
    fresh_prefix,
    is_quiet,
    payloads_of,
    wait_until,
)
from rich.console import Console

from tiffin.kvstore import Client
from tiffin.kvstore.cli.status import status_table
from tiffin.kvstore.errors import NodeUnavailable
from tiffin.kvstore.node.core import messages
from tiffin.kvstore.node.server import unix_server
from tiffin.kvstore.node.server.unix_server import UnixServer
from tiffin.messenger.wire.framing import FRAME_BYTES_MAX, FrameDecoder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

KEY = b"k" * 16
HELLO = ["hello", 1, messages.PROTOCOL_VERSION, "raw", 0]
WORKER = Path(kvsupport.__file__).with_name("kvworker.py")


class Raw:
    """A bare connection, without Tiffin's client."""

    def __init__(self, path: Path, *, hello: bool = True) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(SLACK_S)
        self.sock.connect(str(path))
        self._decoder = FrameDecoder()
        self._replies: list[Any] = []
        if hello:
            assert isinstance(self.ask(HELLO), messages.Welcome)

    def send(self, data: bytes) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.sock.sendall(data)

    def ask(self, request: Any) -> Any:
        self.send(frame(request))
        return self.reply()

    def reply(self) -> Any:
        """The next reply, or None when the node has hung up."""
        while not self._replies:
            try:
                data = self.sock.recv(1 << 16)
            except ConnectionResetError:
                return None
            if not data:
                return None
            self._replies += map(messages.reply_decoder.decode, self._decoder.feed(data))
        return self._replies.pop(0)

    def ended(self) -> list[Any]:
        """All replies until the node closes the connection."""
        replies = []
        while (reply := self.reply()) is not None:
            replies.append(reply)
        return replies

    def close(self) -> None:
        self.sock.close()


def frame(request: Any) -> bytes:
    body = request if isinstance(request, bytes) else msgspec.msgpack.encode(request)
    return struct.pack("<I", len(body)) + body


@pytest.fixture
def daemon(own_daemon: Callable[..., Daemon]) -> Daemon:
    return own_daemon()


@pytest.fixture(scope="module")
def _module_daemon(commands_folder: Path) -> Iterator[Daemon]:
    daemon = PoolOptions().start_daemon(commands_folder)
    yield daemon
    daemon.close()


@pytest.fixture
def node(_module_daemon: Daemon) -> Iterator[Daemon]:
    """A daemon; at the end of the test it must be alive, whole and hold nothing."""
    yield _module_daemon
    assert _module_daemon.alive()
    assert_untouched(_module_daemon)


def assert_untouched(daemon: Daemon) -> None:
    with Client.open(daemon.url, name="checker") as client:

        def alone() -> Any:
            numbers = client.statistics()
            return numbers if len(numbers["sessions"]) == 1 and is_quiet(numbers) else None

        assert_conserved(wait_until(alone, "every other session is gone"))
        prefix = fresh_prefix(2)
        assert client.put(prefix, payloads_of(prefix)).complete
        with client.get(prefix) as blocks:
            assert_right(blocks, prefix)
        client.remove(prefix)


DEEP = b"\x96\xa5hello\x01\x01\xa3raw\x00" + b"\x91" * 1_000_000 + b"\xc0"

# Whole streams of bytes, none of them valid for a node.
GARBAGE = {
    "zeros": bytes(100),
    "text": b"GET / HTTP/1.1\r\nHost: node\r\n\r\n",
    "an empty frame": frame(b""),
    "a frame above the limit": struct.pack("<I", FRAME_BYTES_MAX + 1) + bytes(10),
    "the longest length": b"\xff" * 4,
    "no msgpack": frame(b"\xc1\xc1\xc1"),
    "half a frame": frame(HELLO)[:-3],
    "half a length": b"\x10\x00",
    "nothing": b"",
    "a map": frame({"hello": 1}),
    "a number": frame(5),
    "an empty array": frame([]),
    "an unknown tag": frame(["reboot", 1]),
    "a tag of another type": frame([1, 1]),
    "another request first": frame(["match", 1, KEY]),
    "a goodbye first": frame(["goodbye", 1]),
    "a name that is not UTF-8": frame(msgspec.msgpack.encode(HELLO).replace(b"raw", b"\xff" * 3)),
    "a name of 10 KiB": frame(["hello", 1, 1, "x" * 10_240, 0]),
    "a version of another type": frame(["hello", 1, "1", "raw", 0]),
    "a negative id": frame(["hello", -1, 1, "raw", 0]),
    "a hello without version": frame(["hello", 1]),
    "a million nested arrays": frame(DEEP),
    "another version": frame(["hello", 1, 99, "raw", 0]),
}  # fmt: skip


class TestBeforeTheHello:
    @pytest.mark.parametrize("name", GARBAGE)
    def test_it_hangs_up_on_what_is_no_hello(self, node: Daemon, name: str) -> None:
        raw = Raw(node.socket, hello=False)
        raw.send(GARBAGE[name])
        with contextlib.suppress(OSError):
            raw.sock.shutdown(socket.SHUT_WR)
        replies = raw.ended()
        assert all(isinstance(reply, messages.Refused) for reply in replies)
        raw.close()

    def test_a_refusal_says_what_is_spoken_here(self, node: Daemon) -> None:
        raw = Raw(node.socket, hello=False)
        refusal = raw.ask(["hello", 5, 99, "raw", 0])
        assert (refusal.id, refusal.error) == (5, "VersionMismatch")
        assert f"protocol {messages.PROTOCOL_VERSION}" in refusal.message
        assert raw.ended() == []
        raw.close()

    def test_a_second_hello_ends_the_connection(self, node: Daemon) -> None:
        raw = Raw(node.socket)
        refusal = raw.ask(HELLO)
        assert (refusal.error, raw.ended()) == ("ProtocolError", [])
        raw.close()

    def test_hellos_and_requests_may_come_in_pieces(self, node: Daemon) -> None:
        raw = Raw(node.socket, hello=False)
        for byte in frame(HELLO):
            raw.send(bytes([byte]))
        assert isinstance(raw.reply(), messages.Welcome)
        many = b"".join(frame(["match", number, KEY]) for number in range(1, 51))
        for start in range(0, len(many), 7):
            raw.send(many[start : start + 7])
        assert [raw.reply().id for _ in range(50)] == list(range(1, 51))
        raw.close()


BAD_REQUESTS: dict[str, Any] = {
    "keys are a number": ["match", 1, 5],
    "keys are missing": ["match", 1],
    "too many keys": ["match", 1, bytes(16 * 65_537)],
    "a negative timeout": ["lease", 1, KEY, -1.0],
    "an endless timeout": ["lease", 1, KEY, float("inf")],
    "a timeout that is no number": ["lease", 1, KEY, float("nan")],
    "a short parent": ["reserve", 1, KEY, b"short", 0, 8192, 1.0],
    "a negative depth": ["reserve", 1, KEY, KEY, -1, 8192, 1.0],
    "a lease beyond 64 bits": ["commit", 1, 1 << 63],
    "skip is text": ["commit", 1, 1, "all"],
    "a pin level of 3": ["pin", 1, KEY, 3, 1.0],
    "a pin of no time": ["pin", 1, KEY, 1, 0.0],
    "a key of 15 bytes": ["report", 1, KEY[:15], 1],
    "a reply as a request": ["leased", 1, 0, 1, [], []],
    "text that is not UTF-8": b"\x92\xa5\xff\xff\xff\xff\xff\x01",
}

REFUSED: dict[str, Any] = {
    "half a key": (["match", 1, KEY[:15]], "InvalidInput"),
    "an extent of nothing": (["reserve", 1, KEY, KEY, 0, 0, 1.0], "InvalidInput"),
    "an extent larger than the tier": (["reserve", 1, KEY, KEY, 0, 1 << 40, 1.0], "InvalidInput"),
    "a commit of nothing": (["commit", 1, 12345], "StaleLease"),
    "an abort of nothing": (["abort", 1, 12345], "StaleLease"),
    "a release of nothing": (["release", 1, 12345], "StaleLease"),
}


class TestRequests:
    @pytest.mark.parametrize("name", BAD_REQUESTS)
    def test_what_is_no_request_ends_its_connection(self, node: Daemon, name: str) -> None:
        raw = Raw(node.socket)
        refusal = raw.ask(BAD_REQUESTS[name])
        assert isinstance(refusal, messages.Refused)
        assert refusal.error == "ProtocolError"
        assert raw.ended() == []
        raw.close()

    @pytest.mark.parametrize("name", REFUSED)
    def test_what_cannot_be_done_is_refused_and_the_connection_lives(
        self, node: Daemon, name: str
    ) -> None:
        request, error = REFUSED[name]
        raw = Raw(node.socket)
        refusal = raw.ask(request)
        assert (refusal.id, refusal.error) == (1, error)
        assert raw.ask(["match", 2, KEY]).flags == b""
        raw.close()

    def test_the_largest_request_is_answered(self, node: Daemon) -> None:
        raw = Raw(node.socket)
        keys = b"".join(number.to_bytes(16, "big") for number in range(65_536))
        assert raw.ask(["exists", 3, keys]).flags == bytes(65_536)
        leased = raw.ask(["lease", 4, keys, 0.0])
        assert (leased.lease, leased.offsets) == (0, [])
        raw.close()

    def test_the_same_key_twice_is_granted_once(self, node: Daemon) -> None:
        raw = Raw(node.socket)
        reserved = raw.ask(["reserve", 1, KEY * 3, b"p" * 16, 0, EXTENT, 0.0])
        assert reserved.statuses == b"\x01\x03\x03"
        assert len(reserved.offsets) == 1
        assert isinstance(raw.ask(["abort", 2, reserved.lease]), messages.Done)
        raw.close()

    def test_a_commit_without_a_header_is_not_believed(self, node: Daemon) -> None:
        raw = Raw(node.socket)
        reserved = raw.ask(["reserve", 1, KEY, b"p" * 16, 0, EXTENT, 0.0])
        assert raw.ask(["commit", 2, reserved.lease]).flags == b"\0"
        assert raw.ask(["match", 3, KEY]).flags == b""
        raw.close()

    def test_what_has_the_id_0_is_done_and_not_answered(self, node: Daemon) -> None:
        raw = Raw(node.socket)
        reserved = raw.ask(["reserve", 1, KEY, b"p" * 16, 0, EXTENT, 0.0])
        raw.send(frame(["abort", 0, reserved.lease]) + frame(["release", 0, 12345]))
        assert raw.ask(["exists", 2, KEY]).id == 2
        assert raw.ask(["abort", 3, reserved.lease]).error == "StaleLease"
        raw.close()

    def test_fields_of_a_later_version_are_ignored(self, node: Daemon) -> None:
        raw = Raw(node.socket)
        assert raw.ask(["match", 9, KEY, False, 0, 0.0, "from", {"the": "future"}]).id == 9
        raw.close()

    def test_a_report_is_looked_into_before_it_is_believed(self, node: Daemon) -> None:
        prefix, raw = fresh_prefix(1), Raw(node.socket)
        with Client.open(node.url) as client:
            client.put(prefix, payloads_of(prefix))
            with client.get(prefix) as blocks:
                generation = blocks[0].generation
            assert raw.ask(["report", 1, prefix.keys[0], generation]).count == 0
            assert client.match(prefix).blocks == 1
            client.remove(prefix)
        raw.close()


class TestConnections:
    def test_many_broken_connections_do_not_keep_a_healthy_one_from_working(
        self, node: Daemon
    ) -> None:
        broken = [Raw(node.socket, hello=bool(number % 2)) for number in range(20)]
        for raw, data in zip(broken, list(GARBAGE.values()) * 2, strict=False):
            raw.send(data)
        prefix = fresh_prefix(1)
        with Client.open(node.url) as client:
            assert client.put(prefix, payloads_of(prefix)).complete
            client.remove(prefix)
        for raw in broken:
            raw.close()

    def test_a_client_that_never_reads_stops_only_itself(self, node: Daemon) -> None:
        raw = Raw(node.socket)
        raw.sock.settimeout(0.3)
        request = frame(["statistics", 1]) * 100
        sent = 0
        with contextlib.suppress(TimeoutError):
            while sent < 1 << 26:
                sent += raw.sock.send(request)
        assert sent < 1 << 26, "the node went on reading and kept all its replies"
        prefix = fresh_prefix(1)
        with Client.open(node.url) as client:
            assert client.put(prefix, payloads_of(prefix)).complete
            client.remove(prefix)
        raw.close()

    def test_a_client_that_reads_late_gets_every_reply(self, node: Daemon) -> None:
        raw = Raw(node.socket)
        count = 3000
        sender = kvsupport.Background(
            lambda: raw.send(b"".join(frame(["statistics", n]) for n in range(1, count + 1)))
        )
        assert [raw.reply().id for _ in range(count)] == list(range(1, count + 1))
        sender.result()
        raw.close()

    def test_what_a_goodbye_gives_back_is_free_at_once(self, node: Daemon) -> None:
        raw = Raw(node.socket)
        assert raw.ask(["reserve", 1, KEY, b"p" * 16, 0, EXTENT, 0.0]).statuses == b"\x01"
        raw.send(frame(["goodbye", 2]))
        assert raw.ended() == []
        raw.close()

    @pytest.mark.parametrize("requests", [1, 200])
    def test_a_goodbye_counts_though_its_sender_does_not_wait_for_replies(
        self, node: Daemon, requests: int
    ) -> None:
        """Unread replies may break the connection before the node has read its last request."""
        for _ in range(50):
            raw = Raw(node.socket)
            raw.ask(["reserve", 1, KEY, b"p" * 16, 0, EXTENT, 5.0])
            for _ in range(requests):
                raw.send(frame(["statistics", 2]))
            raw.send(frame(["goodbye", 3]))
            raw.close()

    @pytest.mark.slow
    def test_without_a_goodbye_extents_wait_for_the_end_of_the_process(
        self, daemon: Daemon
    ) -> None:
        raw = Raw(daemon.socket)
        raw.ask(["reserve", 1, KEY, b"p" * 16, 0, EXTENT, 0.0])
        raw.close()  # this process lives on, and could still write
        with Client.open(daemon.url) as client:
            wait_until(
                lambda: client.statistics()["tiers"]["dram"]["quarantined_bytes"] == EXTENT,
                "the extent is quarantined",
            )
            assert_conserved(client.statistics())
            states = [session["gone"] for session in client.statistics()["sessions"]]
            assert sorted(states) == [False, True]

    def test_a_request_that_waits_ends_with_its_connection(self, node: Daemon) -> None:
        blocks = [fresh_prefix(1) for _ in range(kvsupport.DRAM_BLOCKS)]
        with Client.open(node.url) as client:
            for one in blocks:
                client.put(one, payloads_of(one))
            held = [client.get(one) for one in blocks]
            raw = Raw(node.socket)
            raw.send(frame(["reserve", 1, KEY, b"p" * 16, 0, EXTENT, 600.0]))
            wait_until(lambda: client.statistics()["waiting_requests"] == 1, "it waits")
            raw.close()
            wait_until(lambda: client.statistics()["waiting_requests"] == 0, "it is forgotten")
            for one in held:
                one.release()
            for one in blocks:
                client.remove(one)

    @pytest.mark.slow
    def test_random_frames_harm_nobody(self, daemon: Daemon, commands_folder: Path) -> None:
        seed = 20_240_817
        print(f"seed {seed}")
        done = subprocess.run(
            [sys.executable, str(WORKER), "fuzz", str(daemon.socket), str(seed), "2000"],
            env=kvsupport.command_environment(commands_folder),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.stdout == "done\n", done.stderr
        assert daemon.alive(), daemon.log()
        assert_untouched(daemon)
        assert "Traceback" not in daemon.log(), daemon.log()


# -- in this process, with smaller limits ----------------------------------------------------------


class InProcess:
    """A server in a thread of this process, with smaller limits."""

    def __init__(self, path: Path, loop: LoopThread) -> None:
        self.socket = path
        self.url = f"unix:{path}"
        self._loop = loop
        self._node = PoolOptions().start_node(path.parent)
        self._server = loop.call(UnixServer, self._node, path)
        loop.call(self._server.__aenter__)

    def close(self) -> None:
        self._loop.call(self._server.__aexit__)
        self._node.check()
        self._node.close()


@pytest.fixture
def in_process(
    tmp_path_factory: pytest.TempPathFactory,
    loop_thread: LoopThread,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[InProcess]:
    monkeypatch.setattr(unix_server, "_SWEEP_S", 0.05)
    monkeypatch.setattr(unix_server, "CONNECTIONS_MAX", 5)
    running = InProcess(tmp_path_factory.mktemp("s") / "n.sock", loop_thread)
    yield running
    running.close()


@pytest.fixture
def soon_tired(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """A function; from its call on the server waits 0.1 s for a frame. Not before: if this process
    were stopped for a moment, the server would disconnect a client during its hello."""
    return lambda: monkeypatch.setattr(unix_server, "FRAME_TIMEOUT_S", 0.1)


def _opens(url: str) -> bool:
    try:
        Client.open(url).close()
    except NodeUnavailable:
        return False
    return True


class TestLimits:
    def test_one_process_cannot_use_up_the_connections(
        self, in_process: InProcess, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(unix_server, "PROCESS_CONNECTIONS_MAX", 3)
        clients = [Client.open(in_process.url) for _ in range(3)]
        with pytest.raises(NodeUnavailable, match=r"process .* has 3 connections"):
            Client.open(in_process.url)
        clients.pop().close()
        wait_until(lambda: _opens(in_process.url), "the place of the closed one to be free")
        for client in clients:
            client.close()

    def test_no_descriptors_left_is_no_reason_to_take_a_client_for_dead(
        self, in_process: InProcess, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def none_left(*_: object) -> int:
            raise OSError(errno.EMFILE, "too many open files")

        monkeypatch.setattr(unix_server, "_SO_PEERPIDFD", 9999)  # as on an older kernel
        with monkeypatch.context() as patch:
            patch.setattr(os, "pidfd_open", none_left)
            with pytest.raises(NodeUnavailable, match="takes no more clients"):
                Client.open(in_process.url)
        Client.open(in_process.url).close()

    @pytest.mark.parametrize("hello", [False, True])
    def test_a_frame_that_drips_is_hung_up_on(
        self, in_process: InProcess, soon_tired: Callable[[], None], hello: bool
    ) -> None:
        raw = Raw(in_process.socket, hello=hello)
        raw.sock.settimeout(0.05)
        soon_tired()

        def dripped() -> bool:
            raw.send(b"\x01" if raw.sock.fileno() >= 0 else b"")
            try:
                return raw.sock.recv(1 << 16) == b""
            except TimeoutError:
                return False
            except ConnectionResetError:
                return True

        raw.send(struct.pack("<I", 1 << 20))
        wait_until(dripped, "the node hangs up")
        raw.close()

    def test_a_connection_without_a_hello_is_hung_up_on(
        self, in_process: InProcess, soon_tired: Callable[[], None]
    ) -> None:
        soon_tired()
        raw = Raw(in_process.socket, hello=False)
        assert raw.ended() == []
        raw.close()

    def test_an_idle_client_is_left_alone(
        self, in_process: InProcess, soon_tired: Callable[[], None]
    ) -> None:
        with Client.open(in_process.url) as client:
            soon_tired()
            silent = Raw(in_process.socket, hello=False)
            assert silent.ended() == []  # by now the client has been idle for the frame timeout
            silent.close()
            link: Any = client.near_link
            (connection,) = link._connections._idle
            assert client.match(fresh_prefix(1)).blocks == 0
            assert link._connections._idle == [connection]

    def test_one_client_too_many_is_told_so(self, in_process: InProcess) -> None:
        clients = [Client.open(in_process.url) for _ in range(5)]
        refusals = []
        for _ in range(10):
            with pytest.raises(NodeUnavailable) as caught:
                Client.open(in_process.url)
            refusals.append(str(caught.value))
        assert any("5 clients already" in text for text in refusals), refusals
        clients.pop().close()
        wait_until(lambda: self._fits(in_process), "there is room for one again")
        for client in clients:
            client.close()

    def _fits(self, node: InProcess) -> bool:
        try:
            Client.open(node.url).close()
        except NodeUnavailable:
            return False
        return True

    def test_two_nodes_cannot_share_a_socket(
        self, in_process: InProcess, loop_thread: LoopThread
    ) -> None:
        with pytest.raises(NodeUnavailable, match="another node listens"):
            loop_thread.call(_listen_at, in_process.socket)
        Client.open(in_process.url).close()

    def test_children_of_a_client_inherit_no_descriptor_of_it(self, in_process: InProcess) -> None:
        with Client.open(in_process.url):
            for name in os.listdir("/proc/self/fd"):
                with contextlib.suppress(OSError):  # that of the listing itself
                    if "memfd:" in os.readlink(f"/proc/self/fd/{name}"):
                        assert not os.get_inheritable(int(name)), name

    def test_a_socket_that_was_removed_is_made_again(self, in_process: InProcess) -> None:
        with Client.open(in_process.url) as before:
            in_process.socket.unlink()
            wait_until(lambda: _opens(in_process.url), "the node listens there again")
            assert before.statistics()["socket"]["healthy"]

    def test_where_another_took_its_place_its_health_says_so(self, in_process: InProcess) -> None:
        with Client.open(in_process.url) as before:
            in_process.socket.unlink()
            in_process.socket.mkdir()
            wait_until(lambda: not before.statistics()["socket"]["healthy"], "it is said")
            assert "no client finds this node" in shown(status_table(before.statistics()))
            in_process.socket.rmdir()
            wait_until(lambda: before.statistics()["socket"]["healthy"], "it is mended")


def shown(table: Any) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(table)
    return console.export_text()


async def _listen_at(path: Path) -> None:
    node: Any = None  # it is not asked for anything
    await UnixServer(node, path).__aenter__()
