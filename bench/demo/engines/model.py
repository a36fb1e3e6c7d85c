"""A small Llama with random weights: the architecture is real, the answers are nonsense.

Nothing is downloaded, and every process that builds it from one seed has the same weights, so their
blocks are interchangeable. The pool does the same work as for a trained model; only the time that a
block saves is smaller here than with a real model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

VOCAB = 2048
NEW_TOKENS = 8  # of each answer


@dataclass(frozen=True, slots=True)
class ModelSize:
    """What differs between the demo and its quick version.

    Wide for its depth, because the time of attention grows with the square of the prompt and the
    rest with the width: a narrow model would spend most of a long prompt in attention, unlike any
    real one.
    """

    layers: int
    hidden: int = 512
    heads: int = 8
    kv_heads: int = 2


# A block of 512 tokens is 2 MiB; a prompt of 4,096 takes about two seconds on one core.
FULL = ModelSize(layers=4)
QUICK = ModelSize(layers=2, hidden=256)


def build(size: ModelSize, seed: int) -> Any:
    """The model, in float32 and ready for inference."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=size.hidden,
        intermediate_size=size.hidden * 11 // 4,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        max_position_embeddings=8192,
        # Larger than a trained model's, so that different prompts get different answers even with
        # random weights.
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return LlamaForCausalLM(config).eval()
