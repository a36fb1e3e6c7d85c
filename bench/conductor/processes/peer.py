"""A helper process that reads commands, one per line, and answers each with a line of JSON."""

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
# The end of its standard error that goes into an error message.
_LOG_BYTES = 4096


class PeerProcess:
    """A running helper process; `name` is for error messages."""

    def __init__(self, name: str, popen: subprocess.Popen[bytes], log: Any) -> None:
        self._name, self._popen, self._log = name, popen, log
        assert popen.stdin is not None
        assert popen.stdout is not None
        self._input, self._output = popen.stdin, popen.stdout

    def ask(self, line: str) -> Any:
        """Send a command; returns the answer. Raises NodeUnavailable if the process has ended."""
        with contextlib.suppress(BrokenPipeError):  # it has ended: then it answers nothing
            self._input.write(line.encode() + b"\n")
            self._input.flush()
        return self.answer()

    def answer(self) -> Any:
        """The next line of its output. Raises NodeUnavailable if the process has ended."""
        line = self._output.readline()
        if not line:
            size = self._log.seek(0, os.SEEK_END)
            self._log.seek(max(0, size - _LOG_BYTES))
            said = self._log.read().decode(errors="replace")
            raise NodeUnavailable(f"{self._name} has ended: {said}")
        return json.loads(line)

    def end(self) -> None:
        """Close its input, on which it ends; kill it after a timeout. Returns when it has ended."""
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
) -> Iterator[PeerProcess]:
    """Start a helper process, and wait for its `"ready"`. Raises NodeUnavailable, OSError."""
    with tempfile.TemporaryFile() as log:
        popen = subprocess.Popen(
            command,
            env={**os.environ, **(environment or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
        )
        started = PeerProcess(name, popen, log)
        try:
            started.answer()
            yield started
        finally:
            started.end()
