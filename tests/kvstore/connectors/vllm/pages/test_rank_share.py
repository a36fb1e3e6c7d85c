"""Ranks divide the KV heads among them, or share them."""

from __future__ import annotations

import pytest

from tiffin.kvstore.connectors.vllm.pages.rank_share import rank_share
from tiffin.kvstore.errors import InvalidInput
from tiffin.kvstore.format.schema import Shard


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
    assert writers == ([None] if each == 1 else [Shard(writer, each) for writer in range(each)])
    assert {share.layers for share in shares} == {None}


def test_neighbours_share_a_head() -> None:
    shares = [rank_share(2, rank, 4) for rank in range(4)]
    assert [share.heads for share in shares] == [(0, 1), (0, 1), (1, 2), (1, 2)]
    assert [share.writes for share in shares] == [True, False, True, False]


def test_stages_have_their_layers_and_each_of_their_ranks_its_heads() -> None:
    stages = (10, 11, 11)
    places = [(rank, stage) for stage in range(3) for rank in range(4)]
    shares = [rank_share(2, rank, 4, stage, stages) for rank, stage in places]
    assert [share.layers for share in shares[::4]] == [(0, 10), (10, 21), (21, 32)]
    writing = [share.shard for share in shares if share.writes]
    assert writing == [Shard(rank, 2, stage, stages) for stage in range(3) for rank in range(2)]
    assert [shard.writer for shard in writing if shard] == list(range(6))


def test_a_stage_with_all_heads_writes_them_as_one_of_several() -> None:
    share = rank_share(8, 0, 1, 1, (2, 2))
    assert (share.heads, share.layers, share.writes) == ((0, 8), (2, 4), True)
    assert share.shard == Shard(0, 1, 1, (2, 2))
