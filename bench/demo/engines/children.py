"""Engine processes, which receive and send lines of JSON, and never outlive the demo.

The kernel kills them when the demo ends, for any reason: the end of their stdin alone would wait
behind all orders that were read before it, some of them for a pool that is gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from tiffin.kvstore.cli.local.child_processes import tethered

from ...serving.errors import ProcessFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

STOP_S = 10.0
DEATH_S = 1.0  # from a child's last output to its end
LOOK_S = 0.5  # how soon the death of a node, or of the conductor, is noticed
STDERR_TAIL_BYTES = 4000

# Unread lines of all children. Each child sends a few per request, and the demo has some hundred
# requests in flight at most.
EVENTS_MAX = 4096


class EngineProcess:
    """A child process, which ends on SIGTERM, and is killed when this process ends."""

    def __init__(self, name: str, arguments: Sequence[str], folder: Path) -> None:
        self.name = name
        self._stderr = folder / f"{name}.log"
        with self._stderr.open("wb") as log:
            self.process = subprocess.Popen(
                tethered([sys.executable, "-m", *arguments], signal.SIGKILL),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={
                    **os.environ,
                    "OMP_NUM_THREADS": "1",
                    "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
                },
                # Ctrl-C reaches only the demo, which then stops its children in order.
                start_new_session=True,
            )

    def send(self, message: dict[str, Any]) -> None:
        """Send a line of JSON. Raises ProcessFailed if the process died, or stopped reading."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(message) + "\n")
            self.process.stdin.flush()
        except OSError as error:
            raise self.failed("stopped reading", if_dead="died") from error

    def failed(self, what: str, *, if_dead: str | None = None) -> ProcessFailed:
        """The error to raise, with the end of the process's standard error. Waits for the process
        up to DEATH_S: one whose pipe broke may be about to end."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(DEATH_S)
        code = self.process.poll()
        if code is not None and if_dead is not None:
            what = if_dead
        state = "is still running" if code is None else f"ended with status {code}"
        tail = self._stderr.read_bytes()[-STDERR_TAIL_BYTES:].decode(errors="replace")
        return ProcessFailed(f"{self.name} {what} and {state}; its last words:\n{tail}")

    def stop(self) -> None:
        """End the process and wait for it."""
        self.process.terminate()
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


class Crew:
    """Several children, and one queue of their messages and deaths.

    `look` is called twice a second while no message comes; it raises ProcessFailed if something
    else that the demo needs has died.
    """

    def __init__(self, children: Sequence[EngineProcess], look: Callable[[], None]) -> None:
        self.children = {child.name: child for child in children}
        self._look = look
        self._events: queue.Queue[tuple[str, dict[str, Any] | None]] = queue.Queue(EVENTS_MAX)
        for child in children:
            threading.Thread(target=self._listen, args=(child,), daemon=True).start()

    def send(self, name: str, message: dict[str, Any]) -> None:
        """Send a message to one child. Raises ProcessFailed."""
        self.children[name].send(message)

    def ask(self, names: Sequence[str], message: dict[str, Any], timeout_s: float) -> list[Any]:
        """Send the same message to each child and wait for their answers: the values under the key
        "done", in the order of the names. Raises ProcessFailed."""
        for name in names:
            self.send(name, message)
        answers = self.wait_for("done", names, timeout_s)
        return [answers[name] for name in names]

    def wait_for(self, event: str, names: Sequence[str], timeout_s: float) -> dict[str, Any]:
        """The value that each child sends under this key. Raises ProcessFailed if one dies, sends
        nothing in time, or sends something else."""
        answers: dict[str, Any] = {}
        while len(answers) < len(names):
            name, message = self.next(timeout_s)
            if event not in message:
                raise self.children[name].failed(f"said {message} instead of {event!r}")
            answers[name] = message[event]
        return answers

    def next(self, timeout_s: float) -> tuple[str, dict[str, Any]]:
        """The next message and its child. Raises ProcessFailed if none comes within `timeout_s`."""
        said = self.poll(timeout_s)
        if said is None:
            raise next(iter(self.children.values())).failed(
                f"and the others said nothing for {timeout_s:.0f} s"
            )
        return said

    def poll(self, timeout_s: float) -> tuple[str, dict[str, Any]] | None:
        """The next message and its child, or None if none comes within `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while True:
            left_s = deadline - time.monotonic()
            try:
                name, message = self._events.get(timeout=min(max(left_s, 0.0), LOOK_S))
                break
            except queue.Empty:
                self._look()
            if left_s <= 0:
                return None
        if message is None:
            raise self.children[name].failed("died")
        return name, message

    def _listen(self, child: EngineProcess) -> None:
        assert child.process.stdout is not None
        with contextlib.suppress(ValueError, OSError):  # closed or cut in the middle of a line
            for line in child.process.stdout:
                self._events.put((child.name, json.loads(line)))
        self._events.put((child.name, None))
