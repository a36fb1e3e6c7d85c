"""How many tokens of KV an instance has room for. Pure.

A GPU's memory holds its share of the weights, and KV in the rest of what an engine may use.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tiffin.conductor.errors import InvalidRequest

if TYPE_CHECKING:
    from tiffin.conductor.cost.latency_profiles import Profile

# Share of a GPU's memory that an engine may use; vLLM's default.
UTILISATION = 0.9


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Of a model: its weights, and the KV of one token, over all GPUs."""

    weights_bytes: float
    token_bytes: float

    def kv_tokens(self, gpus: int, usable_bytes: float) -> int:
        """Room of an instance on so many GPUs with so many usable bytes each; 0 if the weights do
        not fit."""
        left_bytes = gpus * usable_bytes - self.weights_bytes
        return max(0, int(left_bytes / self.token_bytes))


def mha(parameters: float, layers: int, hidden: int) -> ModelSize:
    """A model with two bytes per number that keeps K and V of all heads."""
    return ModelSize(2 * parameters, 2 * 2 * layers * hidden)


# Weights in two bytes per parameter. Keys are how a profile's `model` begins, in lower case.
MODELS = {
    "opt-13b": mha(12.85e9, 40, 5120),
    "opt-66b": mha(65.7e9, 64, 9216),
    "llama-2-70b": ModelSize(2 * 69e9, 327_680),
    "llama-3-70b": ModelSize(2 * 70.6e9, 327_680),
    "llama-3.1-70b": ModelSize(2 * 70.6e9, 327_680),
    "llama-3.1-8b": ModelSize(2 * 8.03e9, 131_072),
    "qwen3-32b": ModelSize(2 * 32.8e9, 262_144),
    "bloom-176b": mha(176.2e9, 70, 14_336),
}

# Memory of a GPU in bytes, by what a profile's `hardware` says.
GPUS = {"a100": 80 << 30, "a800": 80 << 30, "h100": 80 << 30, "h200": 141e9, "b200": 180e9}


def kv_room(profile: Profile) -> int:
    """Tokens of KV of an instance with this profile; 0 if the weights do not fit. Raises
    InvalidRequest for a model or GPU whose size is not known here."""
    model = next((name for name in MODELS if profile.model.lower().startswith(name)), None)
    gpu = next((name for name in GPUS if name in profile.hardware.lower()), None)
    if model is None or gpu is None:
        raise InvalidRequest(
            f"profile {profile.name}: no sizes are known of {profile.model} on {profile.hardware}: "
            "say how many tokens of KV an instance has room for"
        )
    return MODELS[model].kv_tokens(profile.tensor_parallel, UTILISATION * GPUS[gpu])


def token_bytes(profile: Profile) -> float | None:
    """Bytes of KV of a token; None for a model that is not known here."""
    model = next((name for name in MODELS if profile.model.lower().startswith(name)), None)
    return None if model is None else MODELS[model].token_bytes
