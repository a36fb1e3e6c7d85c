"""Toy engines with paged caches, attention over them, and one such engine as a separate process.

`python pagedworker.py FOLDER URL BACKEND [URL BACKEND ...]` reads a prompt's blocks from the node
at each URL into the caches of four tensor-parallel ranks, each with one head in HND pages of 48
tokens, and writes what their attention gives to FOLDER/outputs.npy.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tiffin.kernels.layout.block_layout import BlockLayout, BlockShape, PagedCache, rank_heads
from tiffin.kernels.layout.transfer_plan import PageMap
from tiffin.kernels.paged import gather_scatter
from tiffin.kvstore import Client, KVSchema
from tiffin.kvstore.connectors.kernel_tables import layout_of

if TYPE_CHECKING:
    from tiffin.kvstore import Prefix

LAYERS, KV_HEADS, HEAD_DIM, BLOCK_TOKENS, BLOCKS = 2, 4, 16, 32, 4
PROMPT_TOKENS = BLOCKS * BLOCK_TOKENS
SCHEMA = KVSchema.gqa(
    model="paged-toy",
    layers=LAYERS,
    kv_heads=KV_HEADS,
    head_dim=HEAD_DIM,
    dtype="bfloat16",
    block_tokens=BLOCK_TOKENS,
    shards=2,
)


class Rank:
    """One tensor-parallel rank of an engine: its heads of every layer, in pages that lie anywhere.

    `dims`: the axes of a layer's tensor, "2BNHD" (NHD) or "2BHND" (HND).
    """

    def __init__(self, rank: int, ranks: int, dims: str, page_tokens: int, seed: int) -> None:
        self.heads = range(*rank_heads(KV_HEADS, rank, ranks))
        used = -(-PROMPT_TOKENS // page_tokens)
        self.page_ids = np.random.default_rng(seed).permutation(2 * used)[:used]
        sizes = {"2": 2, "B": 2 * used, "N": page_tokens, "H": len(self.heads), "D": HEAD_DIM}
        shape = [sizes[axis] for axis in dims]
        # NaN: other rows must neither be read, which would spoil any result, nor change.
        self.tensors = [
            torch.full(shape, float("nan"), dtype=torch.bfloat16) for _ in range(LAYERS)
        ]
        self.cache = PagedCache.vllm(self.tensors, dims, first_head=self.heads.start)
        self.map = PageMap.of_sequence(
            self.page_ids,
            tokens=PROMPT_TOKENS,
            block_tokens=BLOCK_TOKENS,
            page_tokens=page_tokens,
        )

    def place(self, token: int) -> tuple[int, int]:
        """Page and slot of a token."""
        column, slot = divmod(token, self.map.page_tokens)
        return int(self.page_ids[column]), slot

    def write(self, layer: int, part: int, head: int, numbers: Any) -> None:
        """Put a head's numbers, [tokens, dim], where they belong: one token after the other."""
        view = self.cache.layers[layer][part]
        for token, row in enumerate(numbers):
            view[(*self.place(token), head - self.heads.start)] = row

    def read(self, layer: int, part: int, head: int) -> Any:
        """A head's numbers, [tokens, dim], one token after the other."""
        view = self.cache.layers[layer][part]
        at = head - self.heads.start
        return torch.stack([view[(*self.place(token), at)] for token in range(PROMPT_TOKENS)])


def queries() -> Any:
    """[layers, heads, queries, dim], the same in every process."""
    generator = torch.Generator().manual_seed(5)
    return torch.randn(LAYERS, KV_HEADS, 3, HEAD_DIM, generator=generator)


def attention(ranks: list[Rank]) -> Any:
    """What each layer's heads give for `queries`, float32 [layers, heads, queries, dim]."""
    asked, outputs = queries(), torch.empty(LAYERS, KV_HEADS, 3, HEAD_DIM)
    for rank in ranks:
        for layer in range(LAYERS):
            for head in rank.heads:
                keys, values = (rank.read(layer, part, head).float() for part in (0, 1))
                scores = asked[layer, head] @ keys.T / HEAD_DIM**0.5
                outputs[layer, head] = scores.softmax(-1) @ values
    return outputs


def prompt() -> Prefix:
    return SCHEMA.prefix(range(100, 100 + PROMPT_TOKENS), namespace="end-to-end")


def load(client: Client, rank: Rank, *, backend: str | None) -> None:
    """Scatter this rank's heads of all blocks, from where they lie in the pool."""
    with client.get(prompt(), timeout_s=10.0) as blocks:
        assert blocks.complete, blocks.reason
        memory = [block.memory for block in blocks]
        gather_scatter.scatter(rank.cache, rank.map, memory, layout_of(SCHEMA), backend=backend)


def load_slice(client: Client, rank: Rank, *, backend: str | None) -> None:
    """The same through buffers that hold this rank's heads only."""
    heads = (rank.heads.start, rank.heads.stop)
    layout = BlockLayout.slice(BlockShape.of_schema(SCHEMA), heads=heads)
    buffers = np.empty((BLOCKS, layout.nbytes), np.uint8)
    with client.get(prompt(), heads=heads, into=buffers, timeout_s=10.0) as blocks:
        assert blocks.complete, blocks.reason
    gather_scatter.scatter(rank.cache, rank.map, torch.from_numpy(buffers), layout, backend=backend)


def main(folder: str, *jobs: str) -> None:
    """Each job: a node's URL and a backend, in two arguments."""
    torch.set_num_threads(1)
    outputs = []
    for url, backend in zip(jobs[::2], jobs[1::2], strict=True):
        chosen = None if backend == "none" else backend
        ranks = [Rank(rank, 4, "2BHND", 48, seed=70 + rank) for rank in range(4)]
        with Client.open(url) as client:
            for index, rank in enumerate(ranks):
                (load_slice if index % 2 else load)(client, rank, backend=chosen)
        outputs.append(attention(ranks).numpy())
    np.save(Path(folder) / "outputs.npy", np.stack(outputs))


if __name__ == "__main__":
    main(*sys.argv[1:])
