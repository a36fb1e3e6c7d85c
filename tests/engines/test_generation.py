"""Whole vLLM engines on the pool say, token for token, what they say without it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from generationsupport import Engine, Turn, converse, loadable, transfer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kvsupport import Daemon

pytestmark = pytest.mark.timeout(600)

# Models and settings that decide an answer's numbers; others must not.
KINDS: dict[str, tuple[str, str]] = {
    "llama": ("llama", "float32"),
    "llama-other": ("llama-other", "float32"),
    "llama-bfloat16": ("llama", "bfloat16"),
    "qwen2": ("qwen2", "float32"),
}


@pytest.fixture(scope="module")
def script(model_folders: Path) -> Callable[[str], list[Turn]]:
    """A function that has the conversations with an engine of a kind that has no pool."""
    scripts: dict[str, list[Turn]] = {}

    def script(kind: str) -> list[Turn]:
        if kind not in scripts:
            model, dtype = KINDS[kind]
            with Engine(model_folders / model, dtype=dtype) as engine:
                scripts[kind] = converse(engine, seed=1)
        return scripts[kind]

    return script


@pytest.fixture
def start(
    model_folders: Path, shared_node: Daemon, namespace: str
) -> Callable[..., Engine]:
    """A function that starts engines of a kind on the pool. `settings`: the connector's; others are
    vLLM's."""

    def start(
        kind: str = "llama",
        *,
        url: str = shared_node.url,
        policy: str = "recompute",
        settings: dict[str, Any] | None = None,
        **changes: Any,
    ) -> Engine:
        model, dtype = KINDS[kind]
        pool = transfer(url, namespace, policy, **(settings or {}))
        return Engine(model_folders / model, pool, dtype=dtype, **changes)

    return start


Start = Any  # of the fixture above
Script = Any

SYNCHRONOUS = {"loading": "synchronous"}
ASYNCHRONOUS = {"loading": "asynchronous"}


@pytest.mark.parametrize("settings", [SYNCHRONOUS, ASYNCHRONOUS, {}], ids=lambda s: s.get("loading", "auto"))
def test_a_fresh_engine_loads_what_another_stored(
    start: Start, script: Script, settings: dict[str, Any]
) -> None:
    turns = script("llama")
    with start(enable_prefix_caching=False) as engine:
        engine.play(turns)
    with start(enable_prefix_caching=False, settings=settings) as engine:
        cached = engine.play(turns)
    assert cached == [loadable(prompt, 128) for turn in turns for prompt in turn.prompts]


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "pages-of-32": ("llama", {"block_size": 32}),
    "pages-of-64": ("llama", {"block_size": 64, "enable_prefix_caching": False}),
    "chunked-prefill": ("llama", {"max_num_batched_tokens": 256, "block_size": 64}),
    "whole-prefill": ("llama", {"enable_chunked_prefill": False, "max_num_batched_tokens": 8192}),
    "few-pages": ("llama", {"kv_cache_memory_bytes": 9 << 20, "block_size": 32}),
    "bfloat16": ("llama-bfloat16", {}),
    "qwen2": ("qwen2", {}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_pool_changes_no_token(start: Start, script: Script, variant: str) -> None:
    kind, changes = VARIANTS[variant]
    turns = script(kind)
    with start(kind, **changes) as engine:
        engine.play(turns)
    with start(kind, **changes) as engine:
        cached = engine.play(turns)
    prompts = [prompt for turn in turns for prompt in turn.prompts]
    page_tokens = changes.get("block_size", 128)
    for tokens, prompt in zip(cached, prompts, strict=True):
        assert tokens >= loadable(prompt, page_tokens)  # more, where it has them itself
