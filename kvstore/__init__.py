"""Tiffin's store: KV cache blocks by prefix, over DRAM and NVMe, for the processes of a host."""

from .aio import AsyncClient
from .blocks import Block, Blocks, Missing
from .client import Client
from .errors import TiffinError
from .keys import Prefix
from .schema import KVSchema, LayerSpec
from .streaming import AsyncLayerStream, LayerStream, StreamedLayer
from .verbs import Hit, PutResult

__all__ = [
    "AsyncClient",
    "AsyncLayerStream",
    "Block",
    "Blocks",
    "Client",
    "Hit",
    "KVSchema",
    "LayerSpec",
    "LayerStream",
    "Missing",
    "Prefix",
    "PutResult",
    "StreamedLayer",
    "TiffinError",
]
