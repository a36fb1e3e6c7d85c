"""What a model's `config.json` says about its KV cache, before an engine runs it.

The engine itself decides (`compatibility.py`, on what vLLM makes of the configuration); this finds
the common reasons for a refusal, and the size of a cache, without torch and without vLLM.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from ....errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_KEEPS = "The connector stores models whose layers keep K and V of every token"
# Layers of these types keep every token if one of the model's layers is of the first type: vLLM
# then gives all of them pages of the same kind.
_FULL = ("full_attention", "attention")
_LOCAL = ("sliding_attention", "chunked_attention")
# Fields of models with states instead of K and V, of which `layer_types` may say nothing.
_STATES = ("state_size", "mamba_d_state", "mamba_state_dim", "ssm_state_size")
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def read_config(folder: Path) -> dict[str, Any]:
    """The configuration of the model in `folder`; of its text part, if it has several. Raises
    InvalidInput if there is none."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidInput(
            f"{path} can't be read ({error.strerror}); give the folder with the model's files"
        ) from error
    except ValueError as error:
        raise InvalidInput(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise InvalidInput(f"{path} is not the configuration of a model")
    text = config.get("text_config")
    return {**config, **text} if isinstance(text, dict) else config


def check_config(config: Mapping[str, Any]) -> None:
    """Raise InvalidInput, which names the field, for a model that the connector would refuse."""
    if config.get("kv_lora_rank"):
        raise InvalidInput(f"kv_lora_rank={config['kv_lora_rank']} (MLA). {_KEEPS}")
    for name in _STATES:
        if config.get(name):
            raise InvalidInput(f"{name}={config[name]}: layers with states. {_KEEPS}")
    types = config.get("layer_types")
    if isinstance(types, list) and types:
        _check_types([str(one) for one in types])
    elif _slides_everywhere(config):
        raise InvalidInput(f"sliding_window={config['sliding_window']} in all layers. {_KEEPS}")


def _check_types(types: list[str]) -> None:
    others = sorted({one for one in types if one not in _FULL + _LOCAL})
    if others:
        raise InvalidInput(f"layer_types has {', '.join(others)}. {_KEEPS}")
    if not any(one in _FULL for one in types):
        raise InvalidInput(f"layer_types has only {', '.join(sorted(set(types)))}. {_KEEPS}")


def _slides_everywhere(config: Mapping[str, Any]) -> bool:
    """Whether a model without `layer_types` has the window in every layer: of the families that
    alternate, the older configurations do not say which layers have it."""
    alternates = any("sliding_window_pattern" in name for name in config)
    family = str(config.get("model_type", ""))
    if alternates or family.startswith(("gemma", "cohere2", "gpt_oss")):
        return False
    return bool(config.get("sliding_window")) and config.get("use_sliding_window") is not False


def bytes_per_token(config: Mapping[str, Any]) -> int | None:
    """2 (K and V) x layers x KV heads x head size x bytes of a number, in the dtype of the
    configuration; None if it does not say."""
    try:
        heads = int(config["num_attention_heads"])
        kv_heads = int(config.get("num_key_value_heads") or heads)
        head_dim = int(config.get("head_dim") or int(config["hidden_size"]) // heads)
        number = _DTYPE_BYTES[str(config.get("dtype") or config["torch_dtype"])]
        return 2 * int(config["num_hidden_layers"]) * kv_heads * head_dim * number
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return None
