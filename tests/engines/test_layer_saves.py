"""Whole vLLM engines that save layer by layer, and a reader beside them."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
from generationsupport import Engine, converse, loadable, random_tokens, transfer
from kvsupport import is_quiet, wait_until
from vllm.distributed.kv_transfer import get_kv_transfer_group

from tiffin.kvstore import Client
from tiffin.kvstore.connectors.vllm import TiffinConnector

if TYPE_CHECKING:
    from pathlib import Path

    from kvsupport import Daemon

    from tiffin.kvstore import Prefix, StreamedLayer

pytestmark = pytest.mark.timeout(600)

CHUNKED: dict[str, Any] = {"max_num_batched_tokens": 256, "block_size": 64}


@pytest.mark.parametrize("changes", [{}, CHUNKED], ids=["whole", "chunked"])
def test_a_second_engine_loads_what_was_saved_by_layer(
    model_folders: Path, node: Daemon, changes: dict[str, Any]
) -> None:
    options = {"enable_prefix_caching": False, **changes}
    with Engine(model_folders / "llama", **options) as engine:
        turns = converse(engine, seed=1)
    with Engine(
        model_folders / "llama", transfer(node.url, "", layerwise="always"), **options
    ) as engine:
        engine.play(turns)
        assert not engine.counter("save_failures")
    with Client.open(node.url) as client:
        wait_until(lambda: is_quiet(client.statistics()), "no reservation is left")
    with Engine(model_folders / "llama", transfer(node.url, ""), **options) as engine:
        cached = engine.play(turns)
    assert cached == [loadable(prompt) for turn in turns for prompt in turn.prompts]


class Reader:
    """Reads each layer of a prompt's blocks in the hook in which the engine has computed it."""

    def __init__(self, client: Client, prefix: Prefix) -> None:
        self._client = client
        self._prefix = prefix
        self._stream: Any = None
        self._layers: Any = None
        self.read: list[list[bytes]] = []  # of each layer, the bytes of each block

    def look(self, layer: int) -> None:
        """Read the layer, which is published now or soon; nothing is stored yet."""
        if self._stream is None:
            publisher = get_kv_transfer_group()._worker._layer_saves._publisher
            publisher.submit(int).result(30)  # it has reserved the blocks
            self._stream = self._client.stream(self._prefix, timeout_s=30.0).__enter__()
            self._layers = iter(self._stream)
        found: StreamedLayer = next(self._layers)
        assert (found.index, self._stream.complete) == (layer, True)
        self.read.append([block.k.tobytes() + block.v.tobytes() for block in found.blocks])
        assert self._client.match(self._prefix).blocks == 0

    def end(self) -> None:
        """Read up to the commit."""
        assert next(self._layers, None) is None
        self._stream.close()


def test_a_reader_has_layers_while_the_prefill_computes_the_next(
    model_folders: Path, node: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine computes layer i + 1 only after the reader has layer i."""
    prompt = random_tokens(random.Random(3), 1100)
    save_kv_layer = TiffinConnector.save_kv_layer
    pool = transfer(node.url, "", layerwise="always")
    options = {"max_num_batched_tokens": 8192, "enable_chunked_prefill": False}
    with (
        Engine(model_folders / "llama", pool, **options) as engine,
        Client.open(node.url) as client,
    ):
        prefix = engine.prefix(prompt)
        reader = Reader(client, prefix)

        def hook(self: TiffinConnector, layer_name: str, *arguments: Any, **named: Any) -> None:
            save_kv_layer(self, layer_name, *arguments, **named)
            layer = self._layers[layer_name]
            if layer == len(reader.read):
                reader.look(layer)

        monkeypatch.setattr(TiffinConnector, "save_kv_layer", hook)
        engine.generate([prompt])
        reader.end()
        assert len(reader.read) == len(prefix.schema.layers)
        with client.get(prefix) as blocks:
            assert blocks.complete
            for layer, read in enumerate(reader.read):
                stored = [block.layer(layer) for block in blocks]
                assert read == [one.k.tobytes() + one.v.tobytes() for one in stored]
