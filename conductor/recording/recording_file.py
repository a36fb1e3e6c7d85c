"""Writes a recording in a thread of its own, with bounds: lines that wait, and bytes of the files.

The event loop only appends to a queue. A line that finds the queue full is dropped and counted; so
are the lines that a full disk does not take. When FILE has reached its size it becomes FILE.1, in
place of an earlier one, and a new FILE begins with all that is in force: header and instances.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Self

import msgspec

from tiffin.kvstore.errors import InvalidInput

from .lines import HeaderLine, InstanceLine, LeftLine, SettingsLine, block_ids, encoder

if TYPE_CHECKING:
    from pathlib import Path
    from typing import BinaryIO

    from .lines import Line

log = logging.getLogger("tiffin.conductor")

# The two files together have at most twice so many bytes. A request has some 400, and 20 for each
# block of its prompt: a million requests of 8,000 tokens are 700 MB.
BYTES_MAX = 1 << 30
# A second of ten thousand requests. Each line holds its prompt's keys.
WAITING_MAX = 10_000
# How often what waits is written. A conductor that is killed loses so much.
FLUSH_S = 0.5


class RecordingFile:
    """An open recording. `put` is for one thread; close it, or use it in a `with`.

    An earlier file of this name becomes FILE.1. Raises InvalidInput if it can't be written.
    """

    def __init__(
        self, path: Path, bytes_max: int = BYTES_MAX, waiting_max: int = WAITING_MAX
    ) -> None:
        self._path, self._bytes_max, self._waiting_max = path, bytes_max, waiting_max
        self._waiting: deque[tuple[Line, tuple[bytes, ...]]] = deque()
        self._salt = secrets.token_bytes(16)
        self._header: HeaderLine | None = None
        self._instances: dict[str, InstanceLine] = {}
        self._bytes = 0
        self._complained = False
        self.written = self.lost = 0  # lines
        try:
            self._file = self._opened()
        except OSError as error:
            raise InvalidInput(f"can't record to {path}: {error.strerror}") from error
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="recording", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def put(self, line: Line, keys: tuple[bytes, ...] = ()) -> None:
        """Write a line soon; of a request with the ids of its prompt's blocks."""
        if len(self._waiting) >= self._waiting_max:
            self.lost += 1
            if not self._complained:
                self._complained = True
                log.warning("too much comes for the recording %s: lines are lost", self._path)
        else:
            self._waiting.append((line, keys))

    def close(self) -> None:
        """Write what waits, and close the file."""
        self._closing.set()
        self._thread.join()
        self._file.close()
        log.info("recorded %d lines to %s, lost %d", self.written, self._path, self.lost)

    def _run(self) -> None:
        while not self._closing.wait(FLUSH_S):
            self._write_all()
        self._write_all()

    def _write_all(self) -> None:
        count = len(self._waiting)
        try:
            for _ in range(count):
                self._write(*self._waiting.popleft())
                count -= 1
                # Lets the event loop in, which else waits 5 ms for the interpreter, over and over:
                # beside 1,600 requests of 64 blocks a second on two busy cores, one in 1,000 of its
                # timers was 19 to 24 ms late, and 5 to 9 ms with this.
                time.sleep(0)
            self._file.flush()
        except OSError as error:
            self.lost += count
            for _ in range(count - 1):  # that one has left
                self._waiting.popleft()
            if not self._complained:
                self._complained = True
                log.error("can't record to %s: %s", self._path, error.strerror)

    def _write(self, line: Line, keys: tuple[bytes, ...]) -> None:
        self._remember(line)
        if keys:
            line = msgspec.structs.replace(line, blocks=block_ids(keys, self._salt))
        text = encoder.encode(line) + b"\n"
        if self._bytes + len(text) > self._bytes_max:
            self._file.close()
            self._file = self._opened()
            for one in (self._header, *self._instances.values()):
                self._append(encoder.encode(one) + b"\n")
        self._append(text)
        self.written += 1

    def _append(self, text: bytes) -> None:
        self._file.write(text)
        self._bytes += len(text)

    def _remember(self, line: Line) -> None:
        """Keep what a new file begins with."""
        if isinstance(line, HeaderLine):
            self._header = line
        elif isinstance(line, SettingsLine) and self._header is not None:
            self._header = msgspec.structs.replace(self._header, settings=line.settings)
        elif isinstance(line, InstanceLine):
            self._instances[line.id] = line
        elif isinstance(line, LeftLine):
            self._instances.pop(line.id, None)

    def _opened(self) -> BinaryIO:
        """A new file, which only its owner may read: it has the names of tenants."""
        with contextlib.suppress(FileNotFoundError):
            self._path.replace(f"{self._path}.1")
        self._bytes = 0
        number = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        return os.fdopen(number, "wb")
