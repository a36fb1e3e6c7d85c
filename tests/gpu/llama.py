"""A Llama of a billion random parameters on a GPU, or a tiny one on a CPU: the tokens with the pool
and with the HBM tier are those without, and the time to the first token each way."""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tiffin.kvstore import Client
from tiffin.kvstore.connectors.transformers import PrefixCache

GPU = torch.cuda.is_available()
TOKENS = 8192 if GPU else 600
COMPARED_TOKENS = 2048  # at most: in float32 attention's matrix may be in memory as a whole
# Kernels are compiled at their first use, and the pool's memory is pinned.
TIMEOUT_S = 60.0


def config(*, gpu: bool) -> LlamaConfig:
    """Llama-3.2-1B's shape, 1.24 billion parameters; on a CPU only the path is tried."""
    sizes: dict[str, int] = (
        {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}
        if gpu
        else {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    )
    return LlamaConfig(
        vocab_size=128256 if gpu else 1024,
        num_attention_heads=32 if gpu else 4,
        num_key_value_heads=8 if gpu else 2,
        max_position_embeddings=16384,
        tie_word_embeddings=True,
        **sizes,
    )


def first_token_s(generate: Any, prompt: Any) -> float:
    began = time.perf_counter()
    generate(prompt, max_new_tokens=1, do_sample=False)
    if GPU:
        torch.cuda.synchronize()
    return time.perf_counter() - began


def with_pool(client: Client, model: Any, hbm_bytes: int, prompt: Any, tokens: int) -> Any:
    """The tokens of an answer whose prompt is in the pool, and the median time to the first."""
    with PrefixCache(client, model, hbm_bytes=hbm_bytes, timeout_s=TIMEOUT_S) as cached:
        for _ in range(2):  # stores, then loads
            got = cached.generate(prompt, max_new_tokens=tokens, do_sample=False).tolist()
        times = [first_token_s(cached.generate, prompt) for _ in range(5)]
        block_tokens = cached.schema.block_tokens
        stored = (prompt.shape[1] - 1) // block_tokens * block_tokens
        assert cached.last.hit_tokens == stored, f"not loaded, {stored} tokens: {cached.last}"
        if cached.hbm is not None:
            assert cached.hbm.statistics()["hbm_hits"], "no block came from HBM"
        assert not cached.failures, f"{cached.failures} calls failed"
    return got, statistics.median(times)


def main() -> None:
    torch.manual_seed(0)
    with torch.device("cuda" if GPU else "cpu"):
        model = LlamaForCausalLM(config(gpu=GPU)).eval()
    prompt = torch.randint(0, model.config.vocab_size, (1, TOKENS), device=model.device)
    figures: dict[str, Any] = {
        "parameters": sum(one.numel() for one in model.parameters()),
        "tokens": TOKENS,
        "device": str(model.device),
    }
    tiers = {"pool": 0, "hbm": 1 << 30 if GPU else 16 << 20}
    with Client.open(f"embedded:?dram={1 << 30 if GPU else 64 << 20}") as client:
        # In float32: sums of 16 bits depend on what is computed at once, and with them the tokens
        # of a model that hardly prefers any.
        short = prompt[:, :COMPARED_TOKENS]
        expected = model.generate(short, max_new_tokens=16, do_sample=False).tolist()
        for name, hbm_bytes in tiers.items():
            got, _ = with_pool(client, model, hbm_bytes, short, 16)
            figures[f"{name}_same_tokens"] = got == expected
        print(json.dumps(figures), flush=True)
        if GPU:
            model.to(torch.bfloat16)  # as it is served
        first_token_s(model.generate, prompt)  # warm
        cold = [first_token_s(model.generate, prompt) for _ in range(3)]
        figures |= {"dtype": str(model.dtype), "cold_s": statistics.median(cold)}
        for name, hbm_bytes in tiers.items():
            _, figures[f"{name}_s"] = with_pool(client, model, hbm_bytes, prompt, 1)
    print(json.dumps(figures))
    if not (figures["pool_same_tokens"] and figures["hbm_same_tokens"]):
        sys.exit("other tokens than without the pool")


if __name__ == "__main__":
    main()
