"""Tensors that are not the cache that the engine's configuration describes are refused by layer."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from gpusupport import HEAD_DIM, ITEM_BYTES, LAYOUTS, tensors  # noqa: E402

from tiffin.kvstore.connectors.vllm.pages.engine_pages import PageFormat, paged_cache  # noqa: E402
from tiffin.kvstore.errors import InvalidInput  # noqa: E402

FORM = PageFormat(8, 2, HEAD_DIM, HEAD_DIM, ITEM_BYTES)
SHAPE = (5, 2, 8, 2 * HEAD_DIM)  # of a layer's tensor


def named(*layers: Any) -> dict[str, Any]:
    return {f"layers.{index}": layer for index, layer in enumerate(layers)}


def good() -> Any:
    return torch.zeros(SHAPE, dtype=torch.bfloat16)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_k_and_v_are_views_of_the_engines_tensors(layout: str) -> None:
    layers = tensors(layout, FORM, pages=5)
    cache = paged_cache(named(*layers), FORM, first_head=2)
    assert (cache.pages, cache.page_tokens, cache.first_head) == (5, 8, 2)
    for layer, (k, v) in zip(layers, cache.layers, strict=True):
        assert k.shape == v.shape == (5, 8, 2, HEAD_DIM)
        rows = layer.transpose(1, 2).contiguous()
        assert torch.equal(torch.cat((k, v), -1).view(torch.int16), rows.view(torch.int16))
        assert k.data_ptr() == layer.data_ptr()


def test_k_and_v_may_have_rows_of_other_lengths() -> None:
    form = PageFormat(8, 2, HEAD_DIM, 4, ITEM_BYTES)
    cache = paged_cache(named(*tensors("BLNHC", form, pages=5)), form, 0)
    assert [view.shape[3] for view in cache.layers[0]] == [HEAD_DIM, 4]


def test_a_backend_may_have_smaller_pages_than_the_scheduler() -> None:
    cache = paged_cache(named(*tensors("LBNHC", FORM, pages=5, split=4)), FORM, 0)
    assert (cache.pages, cache.page_tokens) == (20, 2)


@pytest.mark.parametrize(
    "wrong",
    [
        torch.zeros(5, 4, 8, 2 * HEAD_DIM, dtype=torch.bfloat16),  # heads
        torch.zeros(5, 2, 16, 2 * HEAD_DIM, dtype=torch.bfloat16),  # tokens
        torch.zeros(5, 2, 3, 2 * HEAD_DIM, dtype=torch.bfloat16),
        torch.zeros(5, 2, 8, HEAD_DIM, dtype=torch.bfloat16),  # dim
        torch.zeros(*SHAPE, dtype=torch.float32),
        torch.zeros(2, 5, 8, 2, HEAD_DIM, dtype=torch.bfloat16),  # K and V apart, as to 0.21
        torch.zeros(0, *SHAPE[1:], dtype=torch.bfloat16),
        torch.zeros(5, 2, 2 * HEAD_DIM, 8, dtype=torch.bfloat16).transpose(2, 3),  # dim first
        torch.zeros(1, *SHAPE[1:], dtype=torch.bfloat16).expand(*SHAPE),  # pages over each other
    ],
    ids=str,
)
def test_other_tensors_are_refused_by_the_name_of_the_layer(wrong: Any) -> None:
    with pytest.raises(InvalidInput, match=r"layer layers\.1: "):
        paged_cache(named(good(), wrong, good()), FORM, 0)


def test_layers_that_share_a_tensor_or_differ_in_pages_are_refused() -> None:
    shared = good()
    with pytest.raises(InvalidInput, match=r"layers\.0, layers\.1 are not one cache.*same address"):
        paged_cache(named(shared, shared), FORM, 0)
    with pytest.raises(InvalidInput, match="not one cache"):
        paged_cache(named(good(), torch.zeros(6, *SHAPE[1:], dtype=torch.bfloat16)), FORM, 0)
