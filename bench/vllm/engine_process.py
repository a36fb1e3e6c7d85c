"""Processes of a run: engines, which do what they are told, and the services that they load from.

Each is the first of a process group of its own, which can be stopped while another is measured:
some of them poll. An idle vLLM takes a fifth of a core.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import threading
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from tiffin.kvstore.cli.local.child_processes import tethered

from ..conductor.processes.peer import PeerProcess

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from .engine.engine import EngineOptions
    from .setting import Setting

_ANSWER_S = 600.0
_END_S = 60.0
_ENGINE = "tiffin.bench.vllm.engine"
_ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}


class GroupProcess(PeerProcess):
    """A process, and all that it started, in a process group of their own. `answer` kills it after
    ten minutes of silence."""

    def __init__(
        self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> None:
        with contextlib.ExitStack() as stack:
            log = stack.enter_context(tempfile.TemporaryFile())
            self.popen = subprocess.Popen(
                command,
                env={**os.environ, **(environment or {})},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                process_group=0,
            )
            stack.pop_all()
        super().__init__(name, self.popen, log)

    def tell(self, name: str, **arguments: Any) -> Any:
        """The answer to one of `engine.commands.Commands`. Raises NodeUnavailable, with the end of
        its log, if the process has ended."""
        return self.ask(json.dumps([name, arguments]))

    def answer(self) -> Any:
        """The next line of its output. Raises NodeUnavailable if the process has ended."""
        limit = threading.Timer(_ANSWER_S, self._signal, [signal.SIGKILL])
        limit.start()
        try:
            return super().answer()
        finally:
            limit.cancel()

    def ready(self) -> None:
        """Wait for a line of any text. Raises NodeUnavailable if the process has ended."""
        assert self.popen.stdout is not None
        if not self.popen.stdout.readline():
            self.answer()

    def stop(self) -> None:
        """It takes no more CPU time, until `resume`."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """End a stop."""
        self._signal(signal.SIGCONT)

    def end(self, number: signal.Signals | None = None) -> None:
        """Close its input, on which an engine ends, and send the signal, if given; kill the group
        after a minute. Returns when it has ended."""
        self.resume()
        assert self.popen.stdin is not None
        assert self.popen.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.popen.stdin.close()
        if number is not None:
            self._signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.popen.wait(_END_S)
        self._signal(signal.SIGKILL)
        self.popen.wait()
        self.popen.stdout.close()
        self._log.close()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):  # all have ended
            os.killpg(self.popen.pid, number)


@contextlib.contextmanager
def service(
    name: str, command: Sequence[str], environment: Mapping[str, str] | None = None
) -> Iterator[GroupProcess]:
    """A process that runs until the end of the `with` block, or of this process. What it prints
    goes to its log: nobody reads its output."""
    to_log = tethered(["sh", "-c", 'exec "$@" >&2', "sh", *command], signal.SIGTERM)
    process = GroupProcess(name, to_log, environment)
    try:
        yield process
    finally:
        process.end(signal.SIGTERM)


@contextlib.contextmanager
def engine(
    setting: Setting, options: EngineOptions, environment: Mapping[str, str] | None = None
) -> Iterator[GroupProcess]:
    """An engine that has started. Raises Missing, NodeUnavailable with the end of its log."""
    command = [str(setting.python()), "-m", f"{_ENGINE}.commands", json.dumps(asdict(options))]
    process = GroupProcess(
        "vLLM",
        command,
        {
            **_ENVIRONMENT,
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if options.in_process else "1",
            **(environment or {}),
        },
    )
    try:
        process.answer()
        yield process
    finally:
        process.end()


@contextlib.contextmanager
def model(setting: Setting) -> Iterator[str]:
    """The folder with the model's files."""
    with tempfile.TemporaryDirectory(prefix="tiffin-bench-") as folder:
        done = subprocess.run(
            [str(setting.python()), "-m", f"{_ENGINE}.model", folder],
            env={**os.environ, **_ENVIRONMENT},
            capture_output=True,
            text=True,
            timeout=_ANSWER_S,
            check=False,
        )
        if done.returncode:
            raise subprocess.SubprocessError(f"no model was made: {done.stderr[-3000:]}")
        yield folder
