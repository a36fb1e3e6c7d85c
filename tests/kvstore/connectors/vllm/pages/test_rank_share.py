"""Ranks divide the KV heads among them, or share them."""

from __future__ import annotations

import pytest

from tiffin.kvstore.connectors.vllm.pages.rank_share import rank_share
from tiffin.kvstore.errors import InvalidInput


@pytest.mark.parametrize("kv_heads", [1, 2, 8, 40])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 16, 40, 80])
def test_every_head_is_written_once_and_held_by_all_its_ranks(kv_heads: int, ranks: int) -> None:
    if kv_heads % ranks and ranks % kv_heads:
        with pytest.raises(InvalidInput, match=f"tensor_parallel_size is {ranks}: {kv_heads} KV"):
            rank_share(kv_heads, 0, ranks)
        return
    shares = [rank_share(kv_heads, rank, ranks) for rank in range(ranks)]
    written = [head for share in shares if share.writes for head in range(*share.heads)]
    assert written == list(range(kv_heads))
    held = sorted(head for share in shares for head in range(*share.heads))
    assert held == sorted(list(range(kv_heads)) * (ranks // min(ranks, kv_heads)))
    writers = [share.shard for share in shares if share.writes]
    each = min(ranks, kv_heads)
    assert writers == ([None] if each == 1 else [(writer, each) for writer in range(each)])


def test_neighbours_share_a_head() -> None:
    shares = [rank_share(2, rank, 4) for rank in range(4)]
    assert [share.heads for share in shares] == [(0, 1), (0, 1), (1, 2), (1, 2)]
    assert [share.writes for share in shares] == [True, False, True, False]
