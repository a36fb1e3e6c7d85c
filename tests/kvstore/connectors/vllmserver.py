"""`vllm serve` of a tiny model, as a process of its own on ports of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from typing import TYPE_CHECKING

import httpx
import psutil
from directory.ports import free_port
from kvsupport import wait_until

if TYPE_CHECKING:
    from pathlib import Path

START_TIMEOUT_S = 300.0  # three processes import vLLM, on two cores
REQUEST_TIMEOUT_S = 120.0
_OPTIONS = (
    *("--served-model-name", "tiny", "--host", "127.0.0.1", "--dtype", "float32"),
    *("--max-model-len", "4096", "--max-num-seqs", "4", "--block-size", "128"),
    *("--kv-cache-memory-bytes", str(64 << 20), "--enforce-eager"),
)
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # The default: the scheduler and each worker are processes.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
}


class VllmServer:
    """Call `start`; it can be killed and started again. `options` come after those of all. With a
    `niceness` other processes of this machine go first."""

    def __init__(
        self, python: str, model: Path, log: Path, *options: str, niceness: int = 0
    ) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.http = httpx.Client(base_url=self.url, trust_env=False, timeout=REQUEST_TIMEOUT_S)
        self._log = log
        self._command = ["nice", "-n", str(niceness), python, "-m", "vllm.entrypoints.cli.main"]
        self._command += ["serve", str(model)]
        self._command += ["--port", str(port), *_OPTIONS, *options]
        self.later: tuple[str, ...] = ()  # instead of the same options, when it is started next
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Returns at once."""
        with self._log.open("ab") as log:
            # A group of its own: `end` ends what a killed server has left as well.
            self._process = subprocess.Popen(
                [*self._command, *self.later],
                env={**os.environ, **_ENVIRONMENT},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def wait(self) -> None:
        """Return when it answers; fails if it ends instead."""

        def answers() -> bool:
            assert self._running().poll() is None, self.log()[-8000:]
            return self.healthy()

        wait_until(answers, "the server answers", START_TIMEOUT_S)

    def healthy(self) -> bool:
        """Whether it serves."""
        with contextlib.suppress(httpx.TransportError):
            return self.http.get("/health", timeout=5.0).status_code == 200
        return False

    def log(self) -> str:
        return self._log.read_text()

    def counter(self, name: str, label: str = "") -> float:
        """One of vLLM's counters since the server's start, over all labels or for one, such as
        `reason="corrupt"`."""
        return sum(
            float(line.rpartition(" ")[2])
            for line in self.http.get("/metrics").text.splitlines()
            if line.startswith(f"vllm:{name}_total{{") and label in line
        )

    def gauge(self, name: str) -> float:
        """One of vLLM's gauges, over all labels."""
        lines = self.http.get("/metrics").text.splitlines()
        return sum(
            float(one.rpartition(" ")[2]) for one in lines if one.startswith(f"vllm:{name}{{")
        )

    def engine(self) -> psutil.Process:
        """The process with the scheduler; the HTTP server notices its end, and ends too."""
        children = psutil.Process(self._running().pid).children()
        (engine,) = (one for one in children if one.name().startswith("VLLM::Engine"))
        return engine

    def workers(self) -> list[psutil.Process]:
        """The processes of its ranks; with one rank, that is the engine's."""
        children = self.engine().children()
        return [one for one in children if one.name().startswith("VLLM::Worker")]

    def kill(self) -> None:
        """SIGKILL to the HTTP server."""
        self._running().kill()

    def kill_all(self) -> None:
        """SIGKILL to all of its processes; returns when none is left."""
        process = self._running()
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        wait_until(lambda: not _group(process.pid), "no process of the server is left")

    def end(self) -> None:
        """End all of its processes that are left, gently at first."""
        if self._process is None:
            return
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process = None

    def close(self) -> None:
        self.end()
        self.http.close()

    def _running(self) -> subprocess.Popen[bytes]:
        assert self._process is not None
        return self._process


def _group(number: int) -> list[int]:
    """The processes of a process group that run, or wait to."""
    found = []
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getpgid(pid) == number and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.append(pid)
    return found
