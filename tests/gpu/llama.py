"""A Llama of a billion random parameters on a GPU, or a tiny one on a CPU: the tokens with the pool
and with the HBM tier are those without, and the time to the first token each way."""

from __future__ import annotations

import json
import statistics
import time
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tiffin.kvstore import Client
from tiffin.kvstore.connectors.transformers import PrefixCache

GPU = torch.cuda.is_available()
TOKENS = 8192 if GPU else 600


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


def main() -> None:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16 if GPU else torch.float32)
    with torch.device("cuda" if GPU else "cpu"):
        model = LlamaForCausalLM(config(gpu=GPU)).eval()
    prompt = torch.randint(0, model.config.vocab_size, (1, TOKENS), device=model.device)
    first_token_s(model.generate, prompt)  # warm
    cold = statistics.median(first_token_s(model.generate, prompt) for _ in range(3))
    expected = model.generate(prompt, max_new_tokens=16, do_sample=False).tolist()
    figures: dict[str, Any] = {
        "parameters": sum(one.numel() for one in model.parameters()),
        "tokens": TOKENS,
        "device": str(model.device),
        "cold_s": cold,
    }
    with Client.open(f"embedded:?dram={2 << 30 if GPU else 64 << 20}") as client:
        for name, hbm_bytes in (("pool_s", 0), ("hbm_s", 1 << 30 if GPU else 16 << 20)):
            with PrefixCache(client, model, hbm_bytes=hbm_bytes) as cached:
                for _ in range(2):  # stores, then loads
                    got = cached.generate(prompt, max_new_tokens=16, do_sample=False).tolist()
                    assert got == expected, f"{name}: other tokens than without the pool"
                times = [first_token_s(cached.generate, prompt) for _ in range(5)]
                assert not cached.failures, f"{name}: {cached.failures} calls failed"
                figures[name] = statistics.median(times)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
