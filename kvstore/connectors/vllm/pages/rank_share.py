"""Which KV heads a tensor-parallel rank has, and which of them it writes."""

from __future__ import annotations

from dataclasses import dataclass

from ....errors import InvalidInput


@dataclass(frozen=True, slots=True)
class RankShare:
    """One rank's part of every block.

    `heads`: (first, end) of the model's KV heads. `shard`: what the rank writes, as
    `Client.reserve` takes it: (writer, writers); None if one writer has all heads. `writes`:
    whether it is the one of several ranks with the same heads that writes them.
    """

    heads: tuple[int, int]
    shard: tuple[int, int] | None
    writes: bool


def rank_share(kv_heads: int, rank: int, ranks: int) -> RankShare:
    """The share of `rank` of `ranks`. Neighbours have the same head if there are more ranks than
    heads, as in vLLM's QKVParallelLinear. Raises InvalidInput if neither number divides the other.
    """
    if kv_heads % ranks and ranks % kv_heads:
        raise InvalidInput(
            f"tensor_parallel_size is {ranks}: {kv_heads} KV heads can't be divided among {ranks} "
            "ranks"
        )
    writers = min(ranks, kv_heads)
    copies, each = ranks // writers, kv_heads // writers
    writer = rank // copies
    shard = (writer, writers) if writers > 1 else None
    return RankShare((writer * each, (writer + 1) * each), shard, rank % copies == 0)
