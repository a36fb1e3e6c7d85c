"""The blocks of an engine, by its device: opaque pages of a CPU, rows of tokens of a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..model.compatibility import cache_shape, check_device, model_shape, page_format
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
    from .token_schema import ModelShape


@dataclass(frozen=True, slots=True)
class EngineBlocks:
    """What an engine stores. `shape`: all that decides a block's bytes; engines with equal ones
    share blocks. `ranks`: tensor-parallel ones. `form`: of the pages on a GPU, None on a CPU."""

    shape: CacheShape | ModelShape
    schema: KVSchema
    page_tokens: int
    ranks: int
    form: PageFormat | None

    @property
    def kv_heads(self) -> int:
        """Heads of a block, which the ranks divide among them."""
        return self.schema.layers[0].parts[0].heads


def engine_blocks(
    device: str, config: Any, cache: Any, settings: Settings, version: str
) -> EngineBlocks:
    """The blocks of an engine on `device`; `config` is a VllmConfig and `cache` a KVCacheConfig
    that `check_engine` has passed. Raises InvalidInput."""
    check_device(device)
    ranks = int(config.parallel_config.tensor_parallel_size)
    if device == "cpu":
        pages = cache_shape(config, cache, settings, version)
        schema = page_schema(pages, settings.block_tokens)
        return EngineBlocks(pages, schema, pages.page_tokens, ranks, None)
    shape, form = model_shape(config, cache, settings), page_format(config, cache)
    schema = token_schema(shape, settings.block_tokens, form.page_tokens)
    _, writers = rank_share(shape.kv_heads, 0, ranks).shard or (0, 1)
    check_ranks(schema, writers)
    return EngineBlocks(shape, schema, form.page_tokens, ranks, form)


def engine_copier(
    blocks: EngineBlocks, layers: Mapping[str, Any], rank: int, link: PoolLink | None = None
) -> EngineCopier:
    """What copies a rank's pages. `layers`: its tensors by name, in the order of the model's
    layers. `link`: to the pool whose memory is to be pinned, for a GPU. Raises InvalidInput for
    tensors that are not what the engine's configuration says."""
    # Here, as they need torch, which the scheduler's side can do without.
    if blocks.form is None:
        from .page_copier import PageCopier

        tensors = list(layers.values())
        return PageCopier(tensors, blocks.schema, blocks.page_tokens, rank, blocks.ranks)
    from .device_page_copier import DevicePageCopier
    from .device_queue import device_of
    from .engine_pages import paged_cache

    first_head, _ = rank_share(blocks.kv_heads, rank, blocks.ranks).heads
    cache = paged_cache(layers, blocks.form, first_head)
    device = device_of(cache.device)
    copier = DevicePageCopier(cache, blocks.schema, blocks.page_tokens, device)
    copier.warm_up()
    if link is not None:
        copier.pin(link)
    return copier
