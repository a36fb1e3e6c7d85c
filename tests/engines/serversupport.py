"""`vllm serve` with the pool."""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Self

from connectors.vllmserver import VllmServer
from generationsupport import SAID, Answer

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from vllm.config import KVTransferConfig

CLIENTS = 8  # requests of `generate` at a time


class Server(VllmServer):
    """A server of a model, with the pool, for the length of a `with` block."""

    def __init__(self, model: Path, pool: KVTransferConfig, log: Path, *options: str) -> None:
        transfer = {
            name: getattr(pool, name)
            for name in (
                "kv_connector",
                "kv_connector_module_path",
                "kv_role",
                "kv_load_failure_policy",
                "kv_connector_extra_config",
            )
        }
        ours = ("--enable-prompt-tokens-details", "--no-enable-prefix-caching")
        ours += ("--kv-transfer-config", json.dumps(transfer))
        super().__init__(sys.executable, model, log, *ours, *options)

    def __enter__(self) -> Self:
        try:
            self.start()
            self.wait()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def generate(self, prompts: Sequence[list[int]]) -> list[Answer]:
        """Greedy answers, in order, to several clients at a time."""
        with ThreadPoolExecutor(CLIENTS) as clients:
            return list(clients.map(self.complete, prompts))

    def counter(self, name: str, label: str = "") -> float:
        """One of the connector's counters since the server's start."""
        return super().counter(f"tiffin_{name}", label)

    def complete(self, prompt: list[int]) -> Answer:
        """A greedy answer."""
        body = {
            "model": "tiny",
            "prompt": prompt,
            "temperature": 0,
            "max_tokens": SAID,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        said = self.http.post("/v1/completions", json=body).raise_for_status().json()
        (choice,) = said["choices"]
        details = said["usage"].get("prompt_tokens_details") or {}
        return Answer(
            choice["token_ids"], details.get("cached_tokens") or 0, choice["finish_reason"]
        )
