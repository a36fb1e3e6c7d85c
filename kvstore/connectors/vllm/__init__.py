"""vLLM on the pool: `--kv-transfer-config` names `TiffinConnector` of this package (docs/vllm.md).

A scheduler side decides what to load and save, a worker side moves the bytes; both are pure where
they decide, and are tested without an engine. vLLM is imported by `connector.py` only.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    """`TiffinConnector`, imported on first access: it needs vLLM."""
    if name == "TiffinConnector":
        from .connector import TiffinConnector

        return TiffinConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
