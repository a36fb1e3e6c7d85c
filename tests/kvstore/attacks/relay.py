"""A relay between a client and a node, without the pool's token; it may change the bytes.

    with Middle(node_address, Meddling(...)) as middle:
        Client.open(f"tiffin://127.0.0.1:{middle.address[1]}")

Bytes are split into frames by docs/wire.md, with sockets and numbers only: the attacks do not
depend on Tiffin's own code. `change` is called with every frame and returns what is forwarded in
its place: the frame, another, several, or none.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, Self

if TYPE_CHECKING:
    import ssl

MESSAGE, READ, DATA, WRITE, WRITTEN = range(1, 6)
TO_NODE, TO_CLIENT = "to node", "to client"
# Frames of the greeting, which have no tags: challenge and welcome, and hello.
GREETING = {TO_CLIENT: 2, TO_NODE: 1}
TAG_BYTES = 16
_HEADER = struct.Struct("<IB")
_HEAD = struct.Struct("<IBBHIIQQ")
_RANGE = struct.Struct("<QQ")


class Frame(NamedTuple):
    """One frame on its way. `index` counts those of its direction and connection from 0 on."""

    connection: int
    direction: str
    index: int
    kind: int
    head: bytes  # length and kind, and the body
    tag: bytes
    raw: bytes  # what follows the frame, with its tag if there is one

    @property
    def whole(self) -> bytes:
        return self.head + self.tag + self.raw

    @property
    def greets(self) -> bool:
        return self.index < GREETING[self.direction]


Change = Callable[[Frame], Sequence[bytes]]


def pass_on(frame: Frame) -> Sequence[bytes]:
    """Forward the frame unchanged."""
    return [frame.whole]


class Middle:
    """Accepts, connects to `target`, and forwards frames in both directions. `tags`: whether frames
    have tags after the greeting; `byte_tags`: whether raw bytes have.

    With `front`, it terminates the clients' TLS (and with `back` opens its own to the node). If
    `opaque`, it forwards all bytes unread.
    """

    def __init__(
        self,
        target: tuple[str, int],
        change: Change = pass_on,
        *,
        tags: bool = True,
        byte_tags: bool = False,
        opaque: bool = False,
        front: ssl.SSLContext | None = None,
        back: ssl.SSLContext | None = None,
        host: str = "127.0.0.1",
        keep: bool = True,
    ) -> None:
        """`keep`: keep all frames in `frames`, for tests."""
        self.target = target
        self.change = change
        self.tag_bytes = TAG_BYTES if tags else 0
        self.byte_tag_bytes = TAG_BYTES if byte_tags else 0
        self.opaque = opaque
        self.frames: list[Frame] = []
        self._keep = keep
        self.changed = 0
        self._front, self._back = front, back
        self._lock = threading.Lock()
        self._sinks: dict[tuple[int, str], socket.socket] = {}
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._listening = socket.create_server((host, 0))
        self.address: tuple[str, int] = self._listening.getsockname()[:2]
        self._start(self._accept)

    def inject(self, connection: int, direction: str, data: bytes) -> None:
        """Send the relay's own bytes on one of the connections."""
        with self._lock:
            self._sinks[connection, direction].sendall(data)

    @property
    def connections(self) -> int:
        """How many connections were accepted."""
        return len({connection for connection, _ in self._sinks})

    def _start(self, action: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=action, args=arguments, name="middle", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        number = 0
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            self._sockets.append(client)
            try:
                node = socket.create_connection(self.target, timeout=10)
                self._sockets.append(node)
                if self._front is not None:
                    client = self._front.wrap_socket(client, server_side=True)
                    self._sockets.append(client)
                if self._back is not None:
                    node = self._back.wrap_socket(node, server_hostname=self.target[0])
                    self._sockets.append(node)
                node.settimeout(None)
            except OSError:
                client.close()
                continue
            self._sinks[number, TO_NODE], self._sinks[number, TO_CLIENT] = node, client
            self._start(self._pump, number, TO_NODE, client, node)
            self._start(self._pump, number, TO_CLIENT, node, client)
            number += 1

    def _pump(
        self, connection: int, direction: str, source: socket.socket, sink: socket.socket
    ) -> None:
        try:
            if self.opaque:
                while data := source.recv(1 << 16):
                    sink.sendall(data)
                return
            for frame in self._cut(connection, direction, source):
                if self._keep:
                    self.frames.append(frame)
                sent = self.change(frame)
                self.changed += list(sent) != [frame.whole]
                for data in sent:
                    with self._lock:
                        sink.sendall(data)
        except (OSError, EOFError):
            pass
        finally:
            for end in (source, sink):
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def _cut(self, connection: int, direction: str, source: socket.socket) -> Iterator[Frame]:
        index = 0
        while True:
            header = _exactly(source, _HEADER.size)
            length, kind = _HEADER.unpack(header)
            head = header + _exactly(source, length - 1)
            greets = index < GREETING[direction]
            tag = b"" if greets else _exactly(source, self.tag_bytes)
            raw = _exactly(source, self._raw_bytes(kind, head))
            yield Frame(connection, direction, index, kind, head, tag, raw)
            index += 1

    def _raw_bytes(self, kind: int, head: bytes) -> int:
        if kind == DATA and not head[5]:
            return _HEAD.unpack_from(head)[6] + self.byte_tag_bytes
        if kind == WRITE:
            lengths = (length for _, length in _RANGE.iter_unpack(head[_HEAD.size :]))
            return sum(lengths) + self.byte_tag_bytes
        return 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        for sock in [self._listening, *self._sockets]:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)
        for sock in [self._listening, *self._sockets]:
            sock.close()


def _exactly(source: socket.socket, nbytes: int) -> bytes:
    data = bytearray()
    while len(data) < nbytes:
        some = source.recv(nbytes - len(data))
        if not some:
            raise EOFError
        data += some
    return bytes(data)


def message(body: bytes) -> bytes:
    """A message frame of the relay, without a tag."""
    return _HEADER.pack(1 + len(body), MESSAGE) + body


def flipped(data: bytes, at: int) -> bytes:
    """One bit of it is another."""
    changed = bytearray(data)
    changed[at] ^= 1
    return bytes(changed)


# -- attacks of a relay ----------------------------------------------------------------------------


class Meddler:
    """Replaces the `nth` frame after the greeting for which `wants` is true, once, by the result of
    `how`; forwards all other frames."""

    def __init__(
        self, wants: Callable[[Frame], bool], how: Callable[[Frame], Sequence[bytes]], nth: int = 0
    ) -> None:
        self._wants, self._how, self._left = wants, how, nth
        self._lock = threading.Lock()
        self.done = False

    def __call__(self, frame: Frame) -> Sequence[bytes]:
        if frame.greets or not self._wants(frame):
            return [frame.whole]
        with self._lock:
            self._left -= 1
            if self._left != -1:
                return [frame.whole]
            self.done = True
        return self._how(frame)


class Swap:
    """Swaps two frames of one direction: the first is held back until the next has come."""

    def __init__(self, direction: str) -> None:
        self._direction = direction
        self._held: bytes | None = None
        self.done = False

    def __call__(self, frame: Frame) -> Sequence[bytes]:
        if frame.greets or frame.direction != self._direction or self.done:
            return [frame.whole]
        if self._held is None:
            self._held = frame.whole
            return []
        self.done = True
        return [frame.whole, self._held]


class Mix:
    """Replaces a frame of one connection by a frame of another connection."""

    def __init__(self, direction: str) -> None:
        self._direction = direction
        self._of: dict[int, Frame] = {}
        self.done = False

    def __call__(self, frame: Frame) -> Sequence[bytes]:
        if frame.greets or frame.direction != self._direction:
            return [frame.whole]
        same = [f for f in self._of.values() if f.connection != frame.connection]
        self._of.setdefault(frame.connection, frame)
        if not same or self.done:
            return [frame.whole]
        self.done = True
        return [same[0].whole]
