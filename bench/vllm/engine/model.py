"""Writes a random Llama of 8 KiB of KV cache per token.

python -m tiffin.bench.vllm.engine.model FOLDER
"""

from __future__ import annotations

import sys

VOCABULARY = 1024


def make_model(folder: str) -> None:
    """8 layers, 4 KV heads of 32 numbers, float32: 32 MiB of cache for 4,096 tokens."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=8192,
        initializer_range=0.1,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(folder)


if __name__ == "__main__":
    make_model(sys.argv[1])
