"""A process that is told something on a line and answers with one, as JSON."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
from typing import TYPE_CHECKING, Any

from tiffin.kvstore.errors import NodeUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_END_S = 10.0
# Of what it has to say on standard error, for an error message.
_LOG_BYTES = 4096


class Peer:
    """A running process, by the name that people know it by."""

    def __init__(self, name: str, popen: subprocess.Popen[bytes], log: Any) -> None:
        self._name, self._popen, self._log = name, popen, log
        assert popen.stdin is not None
        assert popen.stdout is not None
        self._input, self._output = popen.stdin, popen.stdout

    def ask(self, line: str) -> Any:
        """What it answers. Raises NodeUnavailable if it has ended instead."""
        with contextlib.suppress(BrokenPipeError):  # it has ended: then it answers nothing
            self._input.write(line.encode() + b"\n")
            self._input.flush()
        return self.answer()

    def answer(self) -> Any:
        """What it says next. Raises NodeUnavailable if it has ended instead."""
        line = self._output.readline()
        if not line:
            size = self._log.seek(0, os.SEEK_END)
            self._log.seek(max(0, size - _LOG_BYTES))
            said = self._log.read().decode(errors="replace")
            raise NodeUnavailable(f"{self._name} has ended: {said}")
        return json.loads(line)

    def end(self) -> None:
        """Its input ends, which it takes as a sign. Returns when it is gone."""
        with contextlib.suppress(BrokenPipeError):
            self._input.close()
        try:
            self._popen.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()
        self._output.close()


@contextlib.contextmanager
def peer(
    name: str, command: Sequence[str], environment: Mapping[str, str] | None = None
) -> Iterator[Peer]:
    """Start one; it says `"ready"` when it is. Raises NodeUnavailable, OSError."""
    with tempfile.TemporaryFile() as log:
        popen = subprocess.Popen(
            command,
            env={**os.environ, **(environment or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
        )
        started = Peer(name, popen, log)
        try:
            started.answer()
            yield started
        finally:
            started.end()
