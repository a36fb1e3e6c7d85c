"""Which KV heads and layers a worker has, and which of them it writes."""

from __future__ import annotations

from dataclasses import dataclass

from ....errors import InvalidInput
from ....format.schema import Shard


@dataclass(frozen=True, slots=True)
class RankShare:
    """One worker's part of every block.

    `heads`: (first, end) of the model's KV heads. `layers`: (first, end) of its layers; None: all.
    `shard`: what the worker writes, as `Client.reserve` takes it; None if one writer has all.
    `writes`: whether it is the one of several ranks with the same heads that writes them.
    """

    heads: tuple[int, int]
    layers: tuple[int, int] | None
    shard: Shard | None
    writes: bool


def rank_share(
    kv_heads: int, rank: int, ranks: int, stage: int = 0, stages: tuple[int, ...] = ()
) -> RankShare:
    """The share of tensor-parallel rank `rank` of `ranks` in one pipeline stage; `stages`: how many
    layers each has, empty for one stage.

    Neighbours have the same head if there are more ranks than heads, as in vLLM's
    QKVParallelLinear. Raises InvalidInput if neither number divides the other.
    """
    if kv_heads % ranks and ranks % kv_heads:
        raise InvalidInput(
            f"tensor_parallel_size is {ranks}: {kv_heads} KV heads can't be divided among {ranks} "
            "ranks"
        )
    writers = min(ranks, kv_heads)
    copies, each = ranks // writers, kv_heads // writers
    writer = rank // copies
    shard = Shard(writer, writers, stage, stages)
    first = sum(stages[:stage])
    return RankShare(
        heads=(writer * each, (writer + 1) * each),
        layers=(first, first + stages[stage]) if stages else None,
        shard=shard if shard.writers > 1 else None,
        writes=rank % copies == 0,
    )
