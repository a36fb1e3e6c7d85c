"""One engine's pages read by another, through a real node: other pages, another order and degree.

Without an engine: a small Llama's K and V fill a toy paged cache as vLLM lays it out.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import pagedworker as toy
from kvsupport import Daemon, damage
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from tiffin.kernels.paged import gather_scatter
from tiffin.kvstore import Client
from tiffin.kvstore.connectors.kernel_tables import layout_of
from tiffin.kvstore.connectors.transformers.cache_argument import with_cache

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

WORKER = Path(__file__).with_name("pagedworker.py")


@pytest.fixture(scope="module")
def llama_cache() -> Any:
    """K and V of the prompt, [1, heads, tokens, dim] bfloat16 per layer."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=toy.LAYERS,
        num_attention_heads=toy.KV_HEADS,
        num_key_value_heads=toy.KV_HEADS,
        head_dim=toy.HEAD_DIM,
        initializer_range=0.3,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    cache = DynamicCache(config=config)
    with torch.no_grad():
        model(torch.arange(100, 100 + toy.PROMPT_TOKENS)[None], **with_cache(model, cache))
    return cache


@pytest.fixture
def daemons(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Daemon]]:
    started: list[Daemon] = []

    def start() -> Daemon:
        started.append(Daemon(tmp_path_factory.mktemp("commands"), dram=1 << 20))
        return started[-1]

    yield start
    for one in started:
        one.close()


@pytest.fixture
def daemon(daemons: Callable[[], Daemon]) -> Daemon:
    return daemons()


def triton() -> str | None:
    """The backend: Triton where its interpreter can run on a CPU."""
    return "triton" if os.environ.get("TRITON_INTERPRET") == "1" else None


def engine(llama_cache: Any) -> list[toy.Rank]:
    """Two ranks with two heads each, in NHD pages of 16 tokens, filled with the Llama's numbers."""
    ranks = [toy.Rank(rank, 2, "2BNHD", 16, seed=rank) for rank in range(2)]
    for rank in ranks:
        for index, layer in enumerate(llama_cache.layers):
            for part, tensor in enumerate((layer.keys, layer.values)):
                for head in rank.heads:
                    rank.write(index, part, head, tensor[0, head])
    return ranks


def save(client: Client, ranks: list[toy.Rank], *, backend: str | None) -> None:
    """Each rank writes its heads into the same slots."""
    for number, rank in enumerate(ranks):
        with client.reserve(toy.prompt(), shard=(number, len(ranks))) as slots:
            memory = [slot.view for slot in slots]
            gather_scatter.gather(
                rank.cache, rank.map, memory, layout_of(toy.SCHEMA), backend=backend
            )
        done = slots.stored if number == len(ranks) - 1 else slots.pending
        assert done == tuple(range(toy.BLOCKS))


def plain_attention(llama_cache: Any) -> Any:
    """Attention over the model's own tensors, without pages."""
    asked, outputs = toy.queries(), []
    for index, layer in enumerate(llama_cache.layers):
        for head in range(toy.KV_HEADS):
            keys, values = (t[0, head].float().contiguous() for t in (layer.keys, layer.values))
            scores = asked[index, head] @ keys.T / toy.HEAD_DIM**0.5
            outputs.append(scores.softmax(-1) @ values)
    return torch.stack(outputs).view(toy.LAYERS, toy.KV_HEADS, 3, toy.HEAD_DIM)


@pytest.mark.slow
def test_another_engine_computes_the_same(
    llama_cache: Any, daemons: Callable[[], Daemon], tmp_path: Path
) -> None:
    """The reference reads blocks that a kernel wrote, and a kernel those of the reference."""
    jobs = []
    for writer, reader in ((triton(), "reference"), ("reference", triton())):
        daemon = daemons()
        with Client.open(daemon.url) as client:
            save(client, engine(llama_cache), backend=writer)
        jobs += [daemon.url, reader or "none"]
    subprocess.run([sys.executable, str(WORKER), str(tmp_path), *jobs], check=True, timeout=150)
    expected = plain_attention(llama_cache)
    assert torch.isfinite(expected).all()
    for outputs in torch.from_numpy(np.load(tmp_path / "outputs.npy")):
        assert torch.equal(outputs, expected)


@pytest.mark.slow
def test_pages_that_were_not_named_stay_as_they_were(llama_cache: Any, daemon: Daemon) -> None:
    rank = toy.Rank(1, 4, "2BHND", 48, seed=9)
    with Client.open(daemon.url) as client:
        save(client, engine(llama_cache), backend=None)
        toy.load(client, rank, backend=None)
    others = np.setdiff1d(np.arange(2 * len(rank.page_ids)), rank.page_ids)
    last, end = rank.page_ids[-1], toy.PROMPT_TOKENS % 48
    for layer, (keys, values) in enumerate(rank.cache.layers):
        tensors = llama_cache.layers[layer].keys, llama_cache.layers[layer].values
        for part, view in enumerate((keys, values)):
            assert torch.equal(rank.read(layer, part, 1), tensors[part][0, 1])
            assert view[others].isnan().all()
            assert view[last, end:].isnan().all()


def test_a_wrong_byte_in_the_pool_is_never_attended_to(llama_cache: Any, daemon: Daemon) -> None:
    with Client.open(daemon.url) as client:
        save(client, engine(llama_cache), backend=None)
        with client.get(toy.prompt()) as blocks:
            damage(blocks[2].memory, 5)
        with client.get(toy.prompt(), timeout_s=10.0) as blocks:
            assert (len(blocks), blocks.reason) == (2, "corrupt")
