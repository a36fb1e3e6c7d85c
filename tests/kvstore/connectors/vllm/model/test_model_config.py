"""What a model's configuration says before an engine runs it, and which URLs settings refuse."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tiffin.kvstore.connectors.vllm.model.model_config import (
    bytes_per_token,
    check_config,
    read_config,
)
from tiffin.kvstore.connectors.vllm.settings import read
from tiffin.kvstore.errors import InvalidInput

if TYPE_CHECKING:
    from pathlib import Path

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "torch_dtype": "bfloat16",
}

# -- models ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        LLAMA,
        {"layer_types": ["full_attention"] * 4, "sliding_window": 4096},
        # vLLM gives all layers of such a model pages that keep every token.
        {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 512},
        {"model_type": "gemma2", "sliding_window": 4096},
        {"model_type": "any", "sliding_window": 4096, "sliding_window_pattern": 6},
        {"model_type": "qwen2", "sliding_window": 32768, "use_sliding_window": False},
        {"model_type": "mistral", "sliding_window": None},
        {"kv_lora_rank": None, "state_size": 0},
    ],
)
def test_models_that_the_connector_takes(config: dict[str, Any]) -> None:
    check_config(config)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"kv_lora_rank": 512}, "kv_lora_rank=512"),
        ({"model_type": "mistral", "sliding_window": 4096}, "sliding_window=4096"),
        ({"layer_types": ["sliding_attention"] * 2, "sliding_window": 8}, "only sliding_attention"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "linear_attention"),
        ({"model_type": "mamba", "state_size": 16}, "state_size=16"),
    ],
)
def test_models_that_it_refuses(config: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidInput, match=says) as refused:
        check_config(config)
    assert "K and V of every token" in str(refused.value)


def test_the_text_part_of_a_model_counts(tmp_path: Path) -> None:
    config = {"model_type": "both", "text_config": {**LLAMA, "kv_lora_rank": 64}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_config(tmp_path)["kv_lora_rank"] == 64


@pytest.mark.parametrize("content", [None, "{", "[]", "1"])
def test_a_folder_without_a_configuration(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(InvalidInput, match=r"config\.json"):
        read_config(tmp_path)


def test_bytes_per_token() -> None:
    assert bytes_per_token(LLAMA) == 2 * 32 * 8 * 128 * 2
    assert bytes_per_token({**LLAMA, "head_dim": 64, "dtype": "float32"}) == 2 * 32 * 8 * 64 * 4
    without = {name: value for name, value in LLAMA.items() if name != "num_key_value_heads"}
    assert bytes_per_token(without) == 2 * 32 * 32 * 128 * 2


@pytest.mark.parametrize(
    "change", [{"torch_dtype": "int3"}, {"num_attention_heads": 0}, {"num_hidden_layers": None}]
)
def test_bytes_per_token_of_an_unknown_kind(change: dict[str, Any]) -> None:
    assert bytes_per_token({**LLAMA, **change}) is None


# -- no secret in a URL ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "parameter"),
    [
        ("redis://:hunter2@10.0.0.1", "password_file"),
        ("rediss://user:hunter2@10.0.0.1:6380/0", "password_file"),
        ("redis+cluster://:hunter2@a:7000,b:7000", "password_file"),
        ("valkey://:hunter2@h", "password_file"),
        ("redis://:hun/ter2@h", "password_file"),
        ("redis://:hun#ter2@h", "password_file"),
        ("redis://:hun?ter2@h", "password_file"),
        ("redis://h?password=hunter2", "password_file"),
        ("redis://h?Token=hunter2", "token_file"),
        ("redis+sentinel://h/m?sentinel_password=hunter2", "sentinel_password_file"),
        ("tiffin://:hunter2@h:7700", "token_file"),
        ("tiffin://h:7700?token=hunter2", "token_file"),
    ],
)
def test_a_secret_in_the_url_is_refused(url: str, parameter: str) -> None:
    """vLLM logs its configuration, so the message must not have it either."""
    with pytest.raises(InvalidInput, match=rf"[?]{parameter}=PATH") as refused:
        read({"url": url})
    assert "ter2" not in str(refused.value)


@pytest.mark.parametrize(
    "url",
    [
        "unix:/run/a@b.sock",
        "redis://h:6379/0?password_file=/etc/a@b&token_file=/etc/c:d@e",
        "redis://user@h?password_file=/etc/redis",
        "tiffin://h:7700?token_file=/etc/tiffin/token",
        "embedded:?dram=64MiB",
    ],
)
def test_files_and_users_are_not_secrets(url: str) -> None:
    assert read({"url": url}).url == url


def test_what_is_no_url_is_still_refused() -> None:
    with pytest.raises(InvalidInput, match="not a URL"):
        read({"url": "redis://[hunter2@h"})
