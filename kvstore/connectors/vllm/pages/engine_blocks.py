"""The blocks of an engine, by its device: opaque pages of a CPU, rows of tokens of a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ....errors import InvalidInput
from ..model.compatibility import (
    cache_shape,
    check_device,
    check_layers,
    model_shape,
    page_format,
)
from .page_schema import page_schema
from .rank_share import rank_share
from .token_schema import check_ranks, token_schema

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ....format.schema import KVSchema
    from ..pool_link import PoolLink
    from ..settings import Settings
    from .copier import EngineCopier
    from .engine_pages import PageFormat
    from .page_schema import CacheShape
    from .rank_share import RankShare
    from .token_schema import ModelShape


@dataclass(frozen=True, slots=True)
class EngineBlocks:
    """What an engine stores. `shape`: all that decides a block's bytes; engines with equal ones
    share blocks. `ranks`: tensor-parallel ones. `form`: of the pages on a GPU, None on a CPU.
    `stages`: the layers of each pipeline stage; empty if there is one."""

    shape: CacheShape | ModelShape
    schema: KVSchema
    page_tokens: int
    ranks: int
    form: PageFormat | None
    stages: tuple[int, ...] = ()

    @property
    def kv_heads(self) -> int:
        """Heads of a block, which the ranks divide among them."""
        return self.schema.layers[0].parts[0].heads

    @property
    def workers(self) -> int:
        """How many workers the engine has, each of which loads its part of every block."""
        return self.ranks * max(1, len(self.stages))

    def share(self, rank: int, stage: int = 0) -> RankShare:
        """The part of one worker."""
        return rank_share(self.kv_heads, rank, self.ranks, stage, self.stages)


def engine_blocks(
    device: str,
    config: Any,
    cache: Any,
    settings: Settings,
    version: str,
    stages: tuple[int, ...] = (),
) -> EngineBlocks:
    """The blocks of an engine on `device`; `config` is a VllmConfig and `cache` a KVCacheConfig
    that `check_engine` has passed: with pipeline stages, which have so many layers each, it has the
    layers of one of them. Raises InvalidInput, SchemaError."""
    check_device(device)
    if device == "cpu" and settings.hbm_nbytes():
        raise InvalidInput("hbm_bytes is set, and this engine has no GPU: the tier is its memory")
    ranks = int(config.parallel_config.tensor_parallel_size)
    if device == "cpu":
        pages = cache_shape(config, cache, settings, version, stages)
        schema = page_schema(pages, settings.block_tokens)
        blocks = EngineBlocks(pages, schema, pages.page_tokens, ranks, None, stages)
    else:
        shape, form = model_shape(config, cache, settings, stages), page_format(config, cache)
        schema = token_schema(shape, settings.block_tokens, form.page_tokens)
        check_ranks(schema, min(ranks, shape.kv_heads))
        blocks = EngineBlocks(shape, schema, form.page_tokens, ranks, form, stages)
    schema.check_shard(blocks.share(0).shard)
    return blocks


def engine_copier(
    blocks: EngineBlocks,
    layers: Mapping[str, Any],
    rank: int,
    link: PoolLink | None = None,
    stage: int = 0,
) -> EngineCopier:
    """What copies a worker's pages. `layers`: its tensors by name, in the order of the model's
    layers. `link`: to the pool whose memory is to be pinned, for a GPU. Raises InvalidInput for
    tensors that are not what the engine's configuration says."""
    share = blocks.share(rank, stage)
    first_layer, _ = mine = share.layers or (0, len(blocks.schema.layers))
    check_layers(list(layers), mine, named=bool(blocks.stages))
    # Here, as they need torch, which the scheduler's side can do without.
    if blocks.form is None:
        from .page_copier import PageCopier

        tensors = list(layers.values())
        return PageCopier(
            tensors, blocks.schema, blocks.page_tokens, rank, blocks.ranks, first_layer
        )
    from .device_page_copier import DevicePageCopier
    from .device_queue import device_of
    from .engine_pages import paged_cache

    cache = paged_cache(layers, blocks.form, share.heads[0], first_layer)
    device = device_of(cache.device)
    copier = DevicePageCopier(cache, blocks.schema, blocks.page_tokens, device)
    copier.warm_up()
    if link is not None:
        copier.pin(link)
    return copier
