"""A Llama of three small layers, prompts for it, and greedy answers."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM  # noqa: E402

from tiffin.kvstore.connectors.transformers.cache_argument import with_cache  # noqa: E402

BLOCK = 64
NEW = 12
POOL = "embedded:?dram=64MiB&prefault=false"


def make_model(*, dtype: str = "float32", kv_heads: int = 2, seed: int = 0, **changes: Any) -> Any:
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 2048,
        "initializer_range": 0.3,  # the default gives the same token for ever
    }
    config = LlamaConfig(**{**sizes, **changes})
    return LlamaForCausalLM(config).to(getattr(torch, dtype)).eval()


def tokens(count: int, seed: int = 1) -> Any:
    return torch.randint(4, 512, (1, count), generator=torch.Generator().manual_seed(seed))


def computed(model: Any, ids: Any) -> Any:
    """The cache of a prompt, as the model computes it."""
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, **with_cache(model, cache))
    return cache


def greedy(generate: Any, ids: Any, **kwargs: Any) -> list[int]:
    options = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    out: list[int] = generate(ids, **{**options, **kwargs})[0, ids.shape[1] :].tolist()
    return out


def plain(model: Any, ids: Any) -> list[int]:
    return greedy(model.generate, ids, attention_mask=torch.ones_like(ids))


def assert_same_cache(loaded: Any, expected: Any, tokens: int) -> None:
    """Bit for bit, the first `tokens` of it."""
    assert loaded.get_seq_length() == tokens
    for mine, theirs in zip(loaded.layers, expected.layers, strict=True):
        assert torch.equal(mine.keys, theirs.keys[:, :, :tokens])
        assert torch.equal(mine.values, theirs.values[:, :, :tokens])
