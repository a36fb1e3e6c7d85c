"""The processes of split.py and fleet.py: vLLM servers, a conductor and a gateway."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path
    from typing import Self

HOW_TO_INSTALL = """This example also needs the command `vllm serve` (docs/vllm.md, Install) and

    vllm-venv/bin/pip install '.[conductor]'      # in the root of this repository"""
MODEL = "tiny"
PROFILE = "llama-3.1-8b.h100.tp1.vllm"  # predicts times; with one instance of each role, no matter
TIFFIN = "from tiffin.kvstore.cli import main; main()"
START_S, STOP_S = 300, 30
VLLM = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
}  # fmt: skip


def check_services() -> None:
    """Exit with what to do if something is missing."""
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        sys.exit(HOW_TO_INSTALL)
    if importlib.util.find_spec("httpx_sse") is None:
        sys.exit(HOW_TO_INSTALL)


class Service:
    """A Python process that serves HTTP; it ends with the `with` block."""

    def __init__(self, log: Path, port: int, health: str, command: Sequence[str]) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._log, self._health = log, health
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                [sys.executable, *command], env={**os.environ, **VLLM}, stdout=file, stderr=file,
                start_new_session=True,  # Ctrl-C is for us, who end it in order
            )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_S)
        with contextlib.suppress(ProcessLookupError):  # what it started, if that is left
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def kill(self) -> None:
        """kill -9, it and what it started."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def wait(self) -> None:
        """Return when it answers."""
        for _ in range(START_S * 5):
            with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
                urllib.request.urlopen(self.url + self._health, timeout=2)
                return
            if self._process.poll() is not None:
                break
            time.sleep(0.2)
        sys.exit(f"{self._log.stem} did not start:\n{self._log.read_text()[-3000:]}")


def vllm(
    role: str, model: Path, pool: str, kv_role: str, *options: str, **settings: str
) -> Service:
    """`vllm serve` on the pool. `settings`: of the connector."""
    port = free_port()
    transfer = {
        "kv_connector": "TiffinConnector",
        "kv_connector_module_path": "tiffin.kvstore.connectors.vllm",
        "kv_role": kv_role, "kv_load_failure_policy": "recompute",
        # All of this shares a few cores: be patient.
        "kv_connector_extra_config": {
            "url": pool, "lookup_timeout_s": 10, "handoff_timeout_s": 10, **settings,
        },
    }  # fmt: skip
    command = [
        "-m", "vllm.entrypoints.cli.main", "serve", str(model), "--served-model-name", MODEL,
        "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager",
        "--max-model-len", "8192", "--block-size", "128", "--max-num-seqs", "4",
        "--kv-cache-memory-bytes", str(64 << 20), "--enable-prompt-tokens-details",
        "--kv-transfer-config", json.dumps(transfer), *options,
    ]  # fmt: skip
    return Service(model.parent / f"{role}.log", port, "/health", command)


def conductor(folder: Path, *options: str) -> Service:
    """`tiffin conductor`."""
    port = free_port()
    command = ["-c", TIFFIN, "conductor", "--listen", f"127.0.0.1:{port}", *options]
    return Service(folder / "conductor.log", port, "/livez", command)


def gateway(folder: Path, conductor: Service) -> Service:
    """`tiffin gateway`, where one instance hands over to another by the pool."""
    port = free_port()
    config = folder / "gateway.toml"
    config.write_text(f'[models."{MODEL}"]\nhandoff = "pool"\n', encoding="utf-8")
    command = ["-c", TIFFIN, "gateway", "--listen", f"127.0.0.1:{port}"]
    command += ["--conductor", conductor.url, "--config", str(config)]
    return Service(folder / "gateway.log", port, "/readyz", command)


def add(
    conducting: Service, name: str, one: Service, role: str, ports: tuple[int, int] = (0, 0)
) -> None:
    """As `tiffin conductor add`: the conductor asks the engine what it is, and finds its node.
    `ports`: of its KV events, live and replayed."""
    from tiffin.conductor.client import ConductorClient

    live, replay = ports
    events = {"kv_events_port": live, "kv_events_replay_port": replay} if live else {}
    with ConductorClient(conducting.url) as client:
        client.add_engine(one.url, id=name, profile=PROFILE, role=role, **events)
        while not client.instance(name).node or client.instance(name).status != "ready":
            time.sleep(0.2)


def free_port() -> int:
    """A TCP port that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
