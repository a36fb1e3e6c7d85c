"""Which part of every block one of several writers writes: heads, layers, or both."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from ..errors import SchemaError
from ..text import shown
from .header import MAX_SEGMENTS
from .layer_spec import check_int

if TYPE_CHECKING:
    from .schema import KVSchema


class Shard(NamedTuple):
    """One writer's part of every block: the heads of tensor-parallel rank `rank` of `ranks`, in the
    layers of pipeline stage `stage`.

    `stages`: how many layers each stage has, in order; all writers of a block name the same ones.
    Empty: one stage with all layers. A block has a writer for each rank of each stage.
    """

    rank: int
    ranks: int
    stage: int = 0
    stages: tuple[int, ...] = ()

    @property
    def writer(self) -> int:
        """This writer's number among all of a block's."""
        return self.stage * self.ranks + self.rank

    @property
    def writers(self) -> int:
        """How many writers a block has."""
        return self.ranks * max(1, len(self.stages))

    def holds(self, layer: int) -> bool:
        """Whether the layer is one of this stage's."""
        if not self.stages:
            return True
        ends = tuple(accumulate(self.stages))
        return ends[self.stage] - self.stages[self.stage] <= layer < ends[self.stage]


AnyShard: TypeAlias = Shard | tuple[int, int]  # (rank, ranks): of all layers


def check_shard(schema: KVSchema, shard: AnyShard | None) -> Shard | None:
    """`shard`, if the writer's slice is whole segments; None for the only writer of a block.

    Raises SchemaError.
    """
    if shard is None:
        return None
    if not isinstance(shard, tuple) or len(shard) not in (2, len(Shard._fields)):
        raise SchemaError(f"shard is (rank, ranks) or a Shard, not {shown(shard)}")
    found = Shard(*shard)
    ranks = check_int("ranks", found.ranks, 1, MAX_SEGMENTS)
    rank = check_int("rank", found.rank, 0, ranks - 1)
    if schema.shards % ranks:
        raise SchemaError(
            f"{ranks} ranks can't each write whole segments of a schema with"
            f" shards={schema.shards}: make it with shards={ranks}, or a multiple"
        )
    stages = _checked_stages(schema, found.stages)
    stage = check_int("stage", found.stage, 0, max(1, len(stages)) - 1)
    found = Shard(rank, ranks, stage, stages)
    if found.writers == 1:
        return None
    mine = (layer for layer in range(len(schema.layers)) if found.holds(layer))
    if rank and not any(map(schema.splits, mine)):
        raise SchemaError(
            f"stage {stage} has no layer that shards={schema.shards} splits: rank {rank} would"
            " write nothing"
        )
    return found


def _checked_stages(schema: KVSchema, stages: object) -> tuple[int, ...]:
    """Layers of each of several stages; empty for one stage."""
    if not isinstance(stages, tuple):
        raise SchemaError(f"stages is a tuple with the layers of each stage, not {shown(stages)}")
    layers = len(schema.layers)
    checked = tuple(check_int("the layers of a stage", count, 1, layers) for count in stages)
    if checked and sum(checked) != layers:
        raise SchemaError(f"stages of {sum(checked)} layers; the schema has {layers}")
    return checked if len(checked) > 1 else ()
