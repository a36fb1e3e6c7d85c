"""A small model that answers at once: what it says has no meaning."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

VOCABULARY = 1024


def make_model(folder: Path) -> Path:
    """A Llama with 6.5 million random weights, and a tokenizer of the words w0, w1, ..."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = {"<pad>": 0, "<unk>": 1, "<bos>": 2, "<eos>": 3}
    words |= {f"w{number}": number for number in range(4, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"pad_token": "<pad>", "unk_token": "<unk>", "bos_token": "<bos>", "eos_token": "<eos>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder / "model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=768, num_hidden_layers=8,
        num_attention_heads=8, num_key_value_heads=2, head_dim=32, max_position_embeddings=8192,
        initializer_range=0.3,  # with the usual 0.02 all tokens of an answer are the same
        bos_token_id=2, eos_token_id=3, pad_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).float().save_pretrained(folder / "model")
    return folder / "model"


def make_prompt(tokens: int, seed: int) -> list[int]:
    """Token ids."""
    return random.Random(seed).choices(range(4, VOCABULARY), k=tokens)
