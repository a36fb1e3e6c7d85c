"""Blocks of GPUs: the model decides their keys, the engine's pages and ranks do not."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tiffin.kvstore.connectors.vllm.pages.token_schema import (
    ModelShape,
    check_ranks,
    head_groups,
    token_schema,
)
from tiffin.kvstore.errors import InvalidInput

SHAPE = ModelShape(
    weights="w",
    config="{}",
    dtype="torch.bfloat16",
    cache_dtype="bfloat16",
    layers=2,
    kv_heads=8,
    head_dim=64,
    v_head_dim=64,
)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("weights", "other"),
        ("config", '{"rope_theta": 1}'),
        ("dtype", "torch.float16"),
        ("cache_dtype", "float8_e4m3"),
        ("layers", 3),
        ("kv_heads", 4),
        ("head_dim", 32),
        ("v_head_dim", 32),
    ],
)
def test_models_that_differ_in_anything_share_no_key(name: str, value: Any) -> None:
    other = dataclasses.replace(SHAPE, **{name: value})
    keys = [token_schema(shape, 64, 16).prefix(list(range(64))).keys for shape in (SHAPE, other)]
    assert keys[0] != keys[1]


def test_every_field_has_such_a_test() -> None:
    mark = test_models_that_differ_in_anything_share_no_key.pytestmark[0]  # type: ignore[attr-defined]
    assert [name for name, _ in mark.args[1]] == [f.name for f in dataclasses.fields(ModelShape)]


def test_pages_of_any_size_have_the_same_blocks() -> None:
    assert len({token_schema(SHAPE, 64, page_tokens) for page_tokens in (1, 16, 32, 64)}) == 1


def test_a_block_is_rows_of_k_and_v() -> None:
    schema = token_schema(dataclasses.replace(SHAPE, v_head_dim=32), 64, 16)
    assert schema.block_bytes == 2 * 8 * 64 * (64 + 32) * 2
    assert schema.shards == 8


@pytest.mark.parametrize(
    ("layers", "kv_heads", "groups"),
    [
        (80, 8, 8),  # Llama-3-70B
        (32, 32, 32),  # Llama-2-7B
        (40, 40, 40),  # Llama-2-13B: 3,200 segments
        (64, 40, 8),  # Qwen1.5-32B: 5,120 would be too many
        (96, 96, 16),  # GPT-3: 18,432; 32 groups would be 6,144
        (80, 1, 1),
        (3000, 2, 1),
    ],
)
def test_heads_have_checksums_of_their_own_as_far_as_a_header_has_room(
    layers: int, kv_heads: int, groups: int
) -> None:
    assert head_groups(layers, kv_heads) == groups


def test_ranks_that_would_share_a_checksum_are_refused() -> None:
    schema = token_schema(dataclasses.replace(SHAPE, layers=400), 64, 16)
    assert schema.shards == 4
    check_ranks(schema, 4)
    with pytest.raises(InvalidInput, match=r"tensor_parallel_size.*8 ranks.*divides 4"):
        check_ranks(schema, 8)


def test_pages_that_do_not_fill_a_block_are_refused() -> None:
    with pytest.raises(InvalidInput, match="pages of 48 tokens do not fill blocks of 64"):
        token_schema(SHAPE, 64, 48)
