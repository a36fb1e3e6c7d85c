"""Nodes that stop in the middle of a call, and the time that calls to them take."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


class Watch:
    """Measures when a busy machine stops this process: that time does not count as a call's."""

    _NAP_S = 0.004

    def __init__(self) -> None:
        self._still: list[tuple[float, float]] = []
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._work, name="watch")
        self._thread.start()

    def _work(self) -> None:
        last = time.monotonic()
        while not self._ending.wait(self._NAP_S):
            now = time.monotonic()
            if now - last > 2 * self._NAP_S:
                self._still.append((last + self._NAP_S, now))
            last = now

    def took_s(self, began: float, ended: float) -> float:
        """The time from `began` to `ended`, without the time for which this process was stopped."""
        spans = list(self._still)
        still = (max(0.0, min(ended, until) - max(began, since)) for since, until in spans)
        return ended - began - sum(still)

    @contextlib.contextmanager
    def within(self, limit_s: float, what: str) -> Iterator[None]:
        """The `with` block must not take longer."""
        began = time.monotonic()
        yield
        took_s = self.took_s(began, time.monotonic())
        assert took_s <= limit_s, f"{what} took {took_s:.3f} s, {limit_s} are allowed"

    def close(self) -> None:
        self._ending.set()
        self._thread.join()


class StandingStill:
    """A relay between a client and a node's socket or port. It forwards bytes and descriptors until
    a chosen word passes on its way to the node, and then nothing, like a node that is stopped at
    that point; `go_on` forwards all that was held."""

    def __init__(self, target: str | tuple[str, int]) -> None:
        self._target = target
        self._words: tuple[bytes, ...] = ()
        self._flowing = threading.Event()
        self._flowing.set()
        self._folder = tempfile.TemporaryDirectory(prefix="tiffin-still-")
        self._ends: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        if isinstance(target, str):
            path = Path(self._folder.name) / "n.sock"
            self._listening = socket.socket(socket.AF_UNIX)
            self._listening.bind(str(path))
            self._listening.listen(64)
            self.url = f"unix:{path}"
        else:
            self._listening = socket.create_server(("127.0.0.1", 0))
            self.url = f"tiffin://127.0.0.1:{self._listening.getsockname()[1]}"
        self._start(self._accept)

    def at(self, *words: bytes) -> None:
        """Stop when one of these words comes."""
        self._words = words

    def now(self) -> None:
        """Stop now."""
        self._flowing.clear()

    def go_on(self) -> None:
        """Forward again, without loss."""
        self._words = ()
        self._flowing.set()

    @property
    def connections(self) -> int:
        """How many connections were made so far."""
        return len(self._ends) // 2

    @property
    def stands(self) -> bool:
        """Whether it is stopped."""
        return not self._flowing.is_set()

    def close(self) -> None:
        self.go_on()
        for end in (self._listening, *self._ends):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)
        for end in (self._listening, *self._ends):
            end.close()
        self._folder.cleanup()

    def _start(self, work: object, *arguments: object) -> None:
        thread = threading.Thread(target=work, args=arguments, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listening.accept()
                if isinstance(self._target, str):
                    far = socket.socket(socket.AF_UNIX)
                    far.connect(self._target)
                else:
                    far = socket.create_connection(self._target)
                self._ends += [near, far]
                self._start(self._carry, near, far, True)
                self._start(self._carry, far, near, False)

    def _carry(self, source: socket.socket, sink: socket.socket, outward: bool) -> None:
        unix = source.family == socket.AF_UNIX
        with contextlib.suppress(OSError):
            while True:
                select.select([source], [], [])
                if unix:
                    data, descriptors, _, _ = socket.recv_fds(source, 1 << 16, 4)
                else:
                    data, descriptors = source.recv(1 << 16), []
                if not data:
                    break
                if outward and any(word in data for word in self._words):
                    self._flowing.clear()
                self._flowing.wait()
                if descriptors:
                    socket.send_fds(sink, [data], descriptors)
                    for descriptor in descriptors:
                        os.close(descriptor)
                else:
                    sink.sendall(data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)
