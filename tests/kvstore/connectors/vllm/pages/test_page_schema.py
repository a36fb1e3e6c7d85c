"""What decides the bytes of a page decides the keys; pages that can't be blocks are refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tiffin.kvstore.connectors.vllm.pages.page_schema import CacheShape, page_schema
from tiffin.kvstore.errors import InvalidInput

SHAPE = CacheShape(
    weights="w",
    config="{}",
    backend="cpu avx512 vllm 0.32.0",
    dtype="torch.bfloat16",
    cache_dtype="auto",
    layout="NHD",
    layers=2,
    page_tokens=16,
    page_bytes=4096,
    ranks=1,
)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("weights", "other"),
        ("config", '{"rope_theta": 1}'),
        ("backend", "cpu avx2 vllm 0.32.0"),
        ("dtype", "torch.float16"),
        ("cache_dtype", "fp8"),
        ("layout", "HND"),
        ("layers", 3),
        ("page_tokens", 32),
        ("page_bytes", 8192),
        ("ranks", 2),
    ],
)
def test_engines_that_differ_in_anything_share_no_key(name: str, value: Any) -> None:
    other = dataclasses.replace(SHAPE, **{name: value})
    tokens = list(range(64))
    assert page_schema(SHAPE, 64).prefix(tokens).keys == page_schema(SHAPE, 64).prefix(tokens).keys
    assert page_schema(other, 64).prefix(tokens).keys != page_schema(SHAPE, 64).prefix(tokens).keys


def test_every_field_has_such_a_test() -> None:
    mark = test_engines_that_differ_in_anything_share_no_key.pytestmark[0]  # type: ignore[attr-defined]
    assert [name for name, _ in mark.args[1]] == [f.name for f in dataclasses.fields(CacheShape)]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_block_has_the_bytes_of_all_pages_of_all_ranks(ranks: int) -> None:
    schema = page_schema(dataclasses.replace(SHAPE, ranks=ranks), 64)
    assert schema.block_bytes == ranks * 2 * 4 * 4096
    assert schema.block_tokens == 64


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"page_tokens": 48}, "pages of 48 tokens do not fill blocks of 64"),
        ({"page_tokens": 64, "ranks": 2}, "blocks of 1 pages can't be halved"),
        ({"page_bytes": 4097}, "not two bytes per token"),
    ],
)
def test_pages_that_can_not_be_blocks_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        page_schema(dataclasses.replace(SHAPE, **changes), 64)
