"""Tiffin's store: KV cache blocks by prefix, over DRAM and NVMe, for the processes of a host."""

from .client.async_client import AsyncClient
from .client.blocks.block_views import Block, Blocks, Missing
from .client.client import Client
from .client.streaming.layer_source import StreamedLayer
from .client.streaming.layer_stream import AsyncLayerStream, LayerStream
from .client.verbs.block_verbs import Hit, PutResult
from .client.verbs.prefetch_handles import AsyncPrefetch, Prefetch
from .errors import TiffinError
from .format.keys import Prefix
from .format.schema import KVSchema, LayerSpec, Shard

__all__ = [
    "AsyncClient",
    "AsyncLayerStream",
    "AsyncPrefetch",
    "Block",
    "Blocks",
    "Client",
    "Hit",
    "KVSchema",
    "LayerSpec",
    "LayerStream",
    "Missing",
    "Prefetch",
    "Prefix",
    "PutResult",
    "Shard",
    "StreamedLayer",
    "TiffinError",
]
