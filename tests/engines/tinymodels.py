"""Models of a million random weights. Their tokens are w0 to w1019, as ids from 4 on, so that a
test names a prompt by its ids."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

if TYPE_CHECKING:
    from pathlib import Path

VOCABULARY = 1024
FIRST_TOKEN = 4
SPECIAL = {"<pad>": 0, "<unk>": 1, "<bos>": 2, "<eos>": 3}
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "bos_token_id": 2,
    "eos_token_id": 3,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "initializer_range": 0.3,  # the default gives the same token for ever
}


def make_models(folder: Path) -> None:
    """Write `llama`, `llama-other` (the same with other weights) and `qwen2` into `folder`."""
    _write(folder / "llama", LlamaForCausalLM, LlamaConfig(head_dim=32, **SIZES), seed=0)
    _write(folder / "llama-other", LlamaForCausalLM, LlamaConfig(head_dim=32, **SIZES), seed=1)
    _write(folder / "qwen2", Qwen2ForCausalLM, Qwen2Config(**SIZES), seed=0)


def _write(folder: Path, kind: Any, config: Any, seed: int) -> None:
    torch.manual_seed(seed)
    kind(config).to(torch.float32).save_pretrained(folder)
    _tokenizer().save_pretrained(folder)


def _tokenizer() -> Any:
    words = {f"w{index}": index + FIRST_TOKEN for index in range(VOCABULARY - FIRST_TOKEN)}
    tokenizer = Tokenizer(models.WordLevel({**SPECIAL, **words}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        unk_token="<unk>",
        bos_token="<bos>",
        eos_token="<eos>",
    )
