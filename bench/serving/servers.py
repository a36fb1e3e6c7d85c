"""The HTTP servers: vLLM processes on the pool, and the gateway."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from typing import TYPE_CHECKING, Any, Literal, Self

import httpx

from tiffin.kvstore import KVSchema
from tiffin.kvstore.cli.local.child_processes import ChildProcess
from tiffin.kvstore.cli.local.local_redis import free_port

from .errors import ProcessFailed

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

Handoff = Literal["pool", "stream"]

HOST = "127.0.0.1"
MODEL = "demo-llama"
CONTEXT_TOKENS = 8192
PAGE_TOKENS = 128
PAGES = 160
# Of `bench.vllm.engine.model`, which makes the weights.
SCHEMA = KVSchema.gqa(model=MODEL, layers=8, kv_heads=4, head_dim=32, dtype="float32")
STOP_S = 30.0
_LOOK_S = 0.1
_REQUEST_S = 300.0
_ENVIRONMENT = (
    "VLLM_CPU_OMP_THREADS_BIND=nobind",
    "VLLM_HOST_IP=127.0.0.1",
    "VLLM_NO_USAGE_STATS=1",
    # Else vLLM for CPUs starts a worker process whatever the executor is; the engine is a process
    # of its own all the same.
    "VLLM_ENABLE_V1_MULTIPROCESSING=0",
    "HF_HUB_OFFLINE=1",
)
# The command `tiffin gateway`, also where no `tiffin` is installed.
_PROGRAM = (
    "import typer; from tiffin.conductor.gateway.cli import commands; "
    "app = typer.Typer(); app.callback()(lambda: None); commands(app); app()"
)


class Server:
    """A child process that answers HTTP. It ends with the `with` block."""

    def __init__(self, name: str, command: Sequence[str], port: int, folder: Path) -> None:
        self.name, self.url = name, f"http://{HOST}:{port}"
        self.http = httpx.Client(base_url=self.url, trust_env=False, timeout=_REQUEST_S)
        self._child = ChildProcess(name, command, folder / f"{name}.log")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()
        self._child.ask_to_stop()
        self._child.collect(STOP_S)
        with contextlib.suppress(ProcessLookupError):  # what it started, if that is left
            os.killpg(self._child.process.pid, signal.SIGKILL)

    def kill(self) -> None:
        """kill -9, it and what it started."""
        self.http.close()
        os.killpg(self._child.process.pid, signal.SIGKILL)
        self._child.process.wait()

    def wait(self, path: str, timeout_s: float) -> None:
        """Return when `path` answers 200. Raises ProcessFailed."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            self.look()
            with contextlib.suppress(httpx.TransportError):
                if self.http.get(path).status_code == 200:
                    return
            time.sleep(_LOOK_S)
        raise self._failed(f"was not ready within {timeout_s:.0f} s")

    def look(self) -> None:
        """Raises ProcessFailed if it has ended."""
        if not self._child.alive:
            raise self._failed(self._child.end_in_words())

    def counter(self, name: str) -> int:
        """One of vLLM's counters, over all labels."""
        lines = self.http.get("/metrics").text.splitlines()
        found = [line for line in lines if line.startswith(f"vllm:{name}_total{{")]
        return int(sum(float(line.rpartition(" ")[2]) for line in found))

    def _failed(self, how: str) -> ProcessFailed:
        return ProcessFailed(
            f"{self.name} {how}; its last words:\n" + "\n".join(self._child.last_lines())
        )


def vllm(
    name: str,
    kv_role: str,
    python: Path,
    model: str,
    pool: str,
    folder: Path,
    *,
    port: int = 0,
    own_pages: int = 0,
    core: int | None = None,
    more: Sequence[str] = (),
    **settings: Any,
) -> Server:
    """`vllm serve` on the pool at this URL, if any. Without `own_pages` for a prefix cache of its
    own, what it does not compute came from the pool. `core`: it runs on this one alone. `more`:
    options; `settings`: of the connector."""
    port = port or free_port(HOST)
    pages = own_pages or PAGES
    transfer = {
        "kv_connector": "TiffinConnector",
        "kv_connector_module_path": "tiffin.kvstore.connectors.vllm",
        "kv_role": kv_role,
        "kv_load_failure_policy": "recompute",
        # All of this shares a few cores: be patient.
        "kv_connector_extra_config": {
            "url": pool,
            "lookup_timeout_s": 10,
            "handoff_timeout_s": 10,
            **settings,
        },
    }
    alone = () if core is None else ("taskset", "-c", str(core))
    threads = () if core is None else ("OMP_NUM_THREADS=1",)
    command = [
        *(*alone, "env", *_ENVIRONMENT, *threads),
        *(str(python), "-m", "vllm.entrypoints.cli.main", "serve", model),
        *("--served-model-name", MODEL, "--host", HOST, "--port", str(port)),
        *("--skip-tokenizer-init", "--dtype", "float32", "--enforce-eager"),
        # A worker process of its own spins for a second after each step: on a few cores, in the
        # way of the instance that decodes. See `_ENVIRONMENT` too.
        *("--distributed-executor-backend", "uni"),
        *("--max-model-len", str(CONTEXT_TOKENS), "--max-num-seqs", "4"),
        *("--block-size", str(PAGE_TOKENS), "--num-gpu-blocks-override", str(pages)),
        *("--kv-cache-memory-bytes", str(pages << 20), "--enable-prompt-tokens-details", *more),
        *(() if own_pages else ("--no-enable-prefix-caching",)),
        *(("--kv-transfer-config", json.dumps(transfer)) if pool else ()),
    ]
    return Server(name, command, port, folder)


def gateway(conductor: str, handoff: Handoff, folder: Path) -> Server:
    """`tiffin gateway`, where one instance hands over to another by the pool."""
    port = free_port(HOST)
    config = folder / "gateway.json"
    config.write_text(json.dumps({"models": {MODEL: {"handoff": handoff}}}), encoding="utf-8")
    command = [sys.executable, "-c", _PROGRAM, "gateway", "--listen", f"{HOST}:{port}"]
    command += ["--conductor", conductor, "--config", str(config)]
    return Server("gateway", command, port, folder)
