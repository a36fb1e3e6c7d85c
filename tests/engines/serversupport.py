"""`vllm serve` as a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import psutil
from directory.ports import free_port
from generationsupport import SAID, Answer
from kvsupport import wait_until

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.config import KVTransferConfig

START_TIMEOUT_S = 300.0  # three processes import vLLM, on two cores
REQUEST_TIMEOUT_S = 120.0
CLIENTS = 8  # requests of `generate` at a time


class Server:
    """A server of a model, with the pool; `options` go to `vllm serve`, after those of all."""

    def __init__(self, model: Path, pool: KVTransferConfig, log: Path, *options: str) -> None:
        self._log = log
        self._served = False
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        settings = {
            name: getattr(pool, name)
            for name in (
                "kv_connector",
                "kv_connector_module_path",
                "kv_role",
                "kv_load_failure_policy",
                "kv_connector_extra_config",
            )
        }
        command = [
            *(str(Path(sys.executable).with_name("vllm")), "serve", str(model)),
            *("--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port)),
            *("--dtype", "float32", "--max-model-len", "4096", "--block-size", "128"),
            *("--max-num-seqs", "4", "--kv-cache-memory-bytes", str(64 << 20)),
            *("--enforce-eager", "--enable-prompt-tokens-details", "--no-enable-prefix-caching"),
            *("--kv-transfer-config", json.dumps(settings), *options),
        ]
        # The default: the scheduler and each worker are processes.
        environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
        with log.open("wb") as file:
            # A group of its own: `close` ends what a killed server has left as well.
            self._process = subprocess.Popen(
                command, env=environment, stdout=file, stderr=file, start_new_session=True
            )

    def __enter__(self) -> Self:
        try:
            wait_until(self.healthy, "the server answers", START_TIMEOUT_S)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def healthy(self) -> bool:
        """Whether it serves. While it starts, its end is an error."""
        assert self._served or self._process.poll() is None, self._log.read_text()[-8000:]
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                self._served = bool(answer.status == 200)
                return self._served
        except (urllib.error.URLError, OSError):
            return False

    def close(self) -> None:
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def generate(self, prompts: Sequence[list[int]]) -> list[Answer]:
        """Greedy answers, in order, to several clients at a time."""
        with ThreadPoolExecutor(CLIENTS) as clients:
            return list(clients.map(self.complete, prompts))

    def counter(self, name: str, label: str = "") -> float:
        """One of the connector's counters since the server's start, over all labels or for one,
        such as `reason="corrupt"`."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=REQUEST_TIMEOUT_S) as answer:
            lines = answer.read().decode().splitlines()
        return sum(
            float(line.rpartition(" ")[2])
            for line in lines
            if line.startswith(f"vllm:tiffin_{name}_total{{") and label in line
        )

    def kill_engine(self) -> None:
        """SIGKILL to the process with the scheduler; the HTTP server notices it, and ends."""
        children = psutil.Process(self._process.pid).children()
        (engine,) = (one for one in children if one.name().startswith("VLLM::Engine"))
        engine.kill()

    def complete(self, prompt: list[int]) -> Answer:
        """A greedy answer."""
        body: dict[str, Any] = {
            "model": "tiny",
            "prompt": prompt,
            "temperature": 0,
            "max_tokens": SAID,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        request = urllib.request.Request(
            f"{self.url}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S) as answer:
            said = json.load(answer)
        choice = said["choices"][0]
        details = said["usage"].get("prompt_tokens_details") or {}
        return Answer(
            choice["token_ids"], details.get("cached_tokens") or 0, choice["finish_reason"]
        )
