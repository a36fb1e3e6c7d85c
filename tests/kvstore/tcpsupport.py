"""Shared by tests of TCP: a relay that delays bytes or cuts connections, and a plain write."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import TYPE_CHECKING

from tiffin.messenger.errors import GrantError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tiffin.messenger.shm.host_copy import ByteArray
    from tiffin.messenger.tcp.tcp_client import TcpTransport
    from tiffin.messenger.transport import Range, Served


def write_ranges(
    transport: TcpTransport,
    grant: int,
    ranges: Sequence[Range],
    sources: Sequence[ByteArray],
    *,
    deadline: float,
    stall_s: float | None = None,
) -> Served:
    """Copy each source over its range of a peer's grant, with nothing else in the round trip. A
    refusal (GrantError) leaves the stream in the transport's pool."""
    with transport.stream(deadline) as stream:
        stream.ask_write(grant, ranges, sources)
        stream.flush(deadline, stall_s)
        try:
            return stream.receive_written(deadline, stall_s)
        except GrantError as error:
            refused = error
    raise refused


class Relay:
    """A TCP proxy between clients and a listener: connect to `address` instead of the target's.

    `pause` holds all bytes back, as a network partition without a reset would; `cut` ends all
    connections; `cut_after` ends them all once so many more bytes have come from the target.
    """

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._flowing = threading.Event()
        self._flowing.set()
        self._left_bytes: float = float("inf")
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._listening.getsockname()
        self._start(self._accept)

    def pause(self) -> None:
        """Hold all bytes back. Connections stay open."""
        self._flowing.clear()

    def resume(self) -> None:
        """Forward bytes again after `pause`."""
        self._flowing.set()

    def cut(self) -> None:
        """End all connections; new ones can be made."""
        with self._lock:
            for one in self._sockets:
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)

    def cut_after(self, nbytes: int) -> None:
        """End all connections, and refuse new ones, once so many more bytes came from the target.
        `mend` undoes it."""
        self._left_bytes = nbytes

    def mend(self) -> None:
        """Undo `cut_after`."""
        self._left_bytes = float("inf")

    def close(self) -> None:
        """End all connections, stop listening, and join all threads."""
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()  # from now on there are no new connections
        self._listening.close()
        self.resume()
        self.cut()
        for thread in self._threads:
            thread.join()

    def _start(self, work: Callable[..., None], *arguments: socket.socket) -> None:
        thread = threading.Thread(target=work, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(self._target)
            except OSError:
                client.close()
                continue
            with self._lock:
                self._sockets |= {client, server}
            self._start(self._carry, client, server)

    def _carry(self, client: socket.socket, server: socket.socket) -> None:
        """Forward both directions of one connection."""
        up = threading.Thread(target=self._pump, args=(client, server, False), daemon=True)
        up.start()
        self._pump(server, client, True)
        up.join()
        with self._lock:
            self._sockets -= {client, server}
        client.close()
        server.close()

    def _pump(self, source: socket.socket, sink: socket.socket, counted: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(64 << 10):
                self._flowing.wait()
                if counted:
                    data = data[: max(0, int(min(self._left_bytes, len(data))))]
                    self._left_bytes -= len(data)
                sink.sendall(data)
                if self._left_bytes <= 0:
                    break
        for one in (source, sink):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
