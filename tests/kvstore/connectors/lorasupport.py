"""LoRA adapters of random weights, in the files of PEFT."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file

if TYPE_CHECKING:
    from pathlib import Path

RANK = 8
# Of the tests' Llamas.
HIDDEN, LAYERS, KV_WIDTH = 128, 4, 2 * 32


def make_adapter(folder: Path, seed: int) -> None:
    """Write an adapter for a Llama of these sizes. It changes K and V, and much more than training
    would."""
    folder.mkdir()
    dice = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(LAYERS):
        for name in ("k_proj", "v_proj"):
            module = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{module}.lora_A.weight"] = torch.randn(RANK, HIDDEN, generator=dice)
            weights[f"{module}.lora_B.weight"] = torch.randn(KV_WIDTH, RANK, generator=dice)
    save_file(weights, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": RANK,
        "target_modules": ["k_proj", "v_proj"],
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
