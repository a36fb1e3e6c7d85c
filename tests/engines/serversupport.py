"""`vllm serve` as a process of its own."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from generationsupport import SAID, Answer
from kvsupport import wait_until

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig

START_TIMEOUT_S = 300.0  # three processes import vLLM, on two cores
REQUEST_TIMEOUT_S = 120.0


class Server:
    """A server of a model, with the pool; `options` go to `vllm serve`."""

    def __init__(self, model: Path, pool: KVTransferConfig, log: Path, *options: str) -> None:
        self._log = log
        port = _free_port()
        self._url = f"http://127.0.0.1:{port}"
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
            self._process = subprocess.Popen(command, env=environment, stdout=file, stderr=file)

    def __enter__(self) -> Self:
        try:
            wait_until(self._answers, "the server answers", START_TIMEOUT_S)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answers(self) -> bool:
        assert self._process.poll() is None, self._log.read_text()[-8000:]
        try:
            with urllib.request.urlopen(f"{self._url}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

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
            f"{self._url}/v1/completions",
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


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
