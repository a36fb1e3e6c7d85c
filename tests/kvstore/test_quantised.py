"""Quantised blocks through a pool: values and scales by the schema, never those of another schema.

Blocks are quantised here in plain NumPy, so that the tests do not depend on the kernels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
from kvsupport import fresh_prefix

from tiffin.kvstore import Client, KVSchema
from tiffin.kvstore.errors import SchemaError
from tiffin.kvstore.format.schema import LayerSpec

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tiffin.kvstore.format.keys import Prefix

TOKENS = 16
FORMATS = {"float8_e4m3": (ml_dtypes.float8_e4m3fn, 448), "int8": (np.int8, 127)}
SCHEMAS = {
    "per head": KVSchema.gqa(
        model="q",
        layers=3,
        kv_heads=4,
        head_dim=6,
        dtype="float8_e4m3",
        block_tokens=TOKENS,
        scale_tokens=TOKENS,
        shards=4,
    ),
    "per group": KVSchema.gqa(
        model="q",
        layers=3,
        kv_heads=4,
        head_dim=8,
        dtype="bfloat16",
        v_dtype="int8",
        block_tokens=TOKENS,
        scale_tokens=4,
        shards=2,
    ),
    "latent": KVSchema.of(
        "q",
        [
            LayerSpec.mla(latent_dim=8, rope_dim=4, dtype="int8", scale_tokens=1),
            LayerSpec.window(
                kv_heads=4, head_dim=4, dtype="float8_e4m3", window_tokens=6, scale_tokens=2
            ),
        ],
        block_tokens=TOKENS,
    ),
}


@pytest.fixture
def client() -> Iterator[Client]:
    with Client.open("embedded:?dram=1MiB&prefault=no") as client:
        yield client


def numbers_of(schema: KVSchema, layer: int, name: str, seed: int) -> np.ndarray:
    """The right numbers of a part, [heads, entries, dim]."""
    part = next(part for part in schema.layers[layer].parts if part.name == name)
    shape = (part.heads, schema.layers[layer].entries(TOKENS), part.dim)
    drawn = np.random.default_rng([seed, layer, ord(name[0])])
    return drawn.normal(0, 5, shape).astype(np.float32)


def quantised(numbers: np.ndarray, dtype: str, scale_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Values [heads, entries, dim] and scales [heads, groups]."""
    kind, limit = FORMATS[dtype]
    grouped = numbers.reshape(len(numbers), -1, scale_tokens, numbers.shape[2])
    scales = (np.abs(grouped).max(axis=(2, 3)) / np.float32(limit)).astype("<f4")
    values = grouped / scales[:, :, None, None]
    values = np.rint(values) if dtype == "int8" else values
    return values.astype(kind).reshape(numbers.shape), scales


def payload(schema: KVSchema, seed: int) -> np.ndarray:
    """A block, assembled head by head."""
    pieces = []
    for layer, spec in enumerate(schema.layers):
        for part in spec.parts:
            numbers = numbers_of(schema, layer, part.name, seed)
            if not part.scale_tokens:
                pieces.append(numbers.astype(part.numpy_dtype).tobytes())
                continue
            values, scales = quantised(numbers, part.dtype, part.scale_tokens)
            for head in range(part.heads):
                pieces += [values[head].tobytes(), scales[head].tobytes()]
    return np.frombuffer(b"".join(pieces), np.uint8)


def stored(client: Client, schema: KVSchema, blocks: int = 2) -> Prefix:
    prefix = fresh_prefix(blocks, schema)
    client.put(prefix, [payload(schema, seed) for seed in range(blocks)])
    return prefix


def check(layer: Any, schema: KVSchema, seed: int, heads: slice) -> None:
    for part in schema.layers[layer.index].parts:
        right = numbers_of(schema, layer.index, part.name, seed)
        chosen = heads if schema.layers[layer.index].has_heads else slice(None)
        if not part.scale_tokens:
            expected = right.astype(part.numpy_dtype)[chosen]
            assert np.array_equal(layer.part(part.name), expected)
            with pytest.raises(SchemaError, match="is not quantised, it has no scales"):
                layer.scales(part.name)
            with pytest.raises(SchemaError, match="is not quantised, it has no scales"):
                layer.dequantised(part.name)
            continue
        values, scales = quantised(right, part.dtype, part.scale_tokens)
        assert layer.part(part.name).dtype == part.numpy_dtype
        assert np.array_equal(layer.part(part.name), values[chosen])
        assert np.array_equal(layer.scales(part.name), scales[chosen])
        spread = np.repeat(scales, part.scale_tokens, axis=1)[:, :, None]
        got = layer.dequantised(part.name)
        assert got.dtype == np.float32
        assert np.array_equal(got, (values.astype(np.float32) * spread)[chosen])
        assert (np.abs(got - right[chosen]) <= np.maximum(abs(right) / 15, spread)[chosen]).all()


@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.parametrize("into", [False, True], ids=["view", "copy"])
@pytest.mark.parametrize("heads", [None, (1, 3)], ids=["all", "two"])
def test_values_and_scales_come_back(
    client: Client, name: str, into: bool, heads: tuple[int, int] | None
) -> None:
    schema = SCHEMAS[name]
    prefix = stored(client, schema)
    nbytes = sum(span.length for span in schema.ranges(heads=heads))
    target = np.zeros((2, nbytes), np.uint8) if into else None
    with client.get(prefix, heads=heads, into=target) as blocks:
        assert blocks.complete
        for seed, block in enumerate(blocks):
            for layer in range(len(schema.layers)):
                check(block.layer(layer), schema, seed, slice(*(heads or (None,))))


def test_values_are_views_of_the_pool(client: Client) -> None:
    schema = SCHEMAS["per head"]
    prefix = fresh_prefix(1, schema)
    values, scales = quantised(numbers_of(schema, 0, "k", 0), "float8_e4m3", TOKENS)
    with client.reserve(prefix) as slots:
        slots[0].view[:] = payload(schema, 1)
        for layer in range(3):
            slots[0].layer(layer).k[:] = values
            slots[0].layer(layer).scales("k")[:] = scales
        assert np.shares_memory(slots[0].layer(0).k, slots[0].view)
    with client.get(prefix) as blocks:
        assert np.array_equal(blocks[0].layer(2).k, values)
        assert np.array_equal(blocks[0].layer(2).scales("k"), scales)
        right, _ = quantised(numbers_of(schema, 2, "v", 1), "float8_e4m3", TOKENS)
        assert np.array_equal(blocks[0].layer(2).v, right)


def test_ranks_write_their_heads_with_their_scales(client: Client) -> None:
    schema = SCHEMAS["per head"]
    prefix = fresh_prefix(1, schema)
    whole = payload(schema, 0)
    for rank in range(2):
        runs = schema.ranges(heads=(2 * rank, 2 * rank + 2))
        own = np.concatenate([whole[run.offset : run.end] for run in runs])
        client.put(prefix, [own], shard=(rank, 2))
    with client.get(prefix) as blocks:
        assert np.array_equal(blocks[0].bytes, whole)
        for layer in range(3):
            check(blocks[0].layer(layer), schema, 0, slice(None))
    with client.get(prefix, heads=(3, 4), layers=(1, 2)) as blocks:
        assert blocks[0].layer(1).scales("v").shape == (1, 1)
        check(blocks[0].layer(1), schema, 0, slice(3, 4))


def test_a_block_is_a_miss_for_every_other_way_to_quantise(client: Client) -> None:
    shape = {"model": "q", "layers": 1, "kv_heads": 2, "head_dim": 8, "block_tokens": TOKENS}
    ways = [
        {"dtype": "float8_e4m3", "scale_tokens": 4},
        {"dtype": "float8_e4m3", "scale_tokens": 8},
        {"dtype": "int8", "scale_tokens": 4},
        {"dtype": "int8", "v_dtype": "float8_e4m3", "scale_tokens": 4},
        {"dtype": "float8_e4m3"},
        {"dtype": "int8"},
        {"dtype": "bfloat16"},
    ]
    schemas = [KVSchema.gqa(**shape, **way) for way in ways]  # type: ignore[arg-type]
    tokens = list(range(TOKENS))
    for written in schemas:
        prefix = written.prefix(tokens, f"by {written.fingerprint.hex()}")
        client.put(prefix, [np.zeros(written.block_bytes, np.uint8)])
        for read in schemas:
            hit = client.match(read.prefix(tokens, f"by {written.fingerprint.hex()}"))
            assert hit.blocks == (read == written)


def test_sizes_that_are_not_the_schemas(client: Client) -> None:
    schema = SCHEMAS["per head"]
    prefix = fresh_prefix(1, schema)
    without_scales = np.zeros((3, 2, 4, TOKENS, 6), np.int8)
    with pytest.raises(SchemaError, match="bytes; a block has"):
        client.put(prefix, [without_scales.view(np.uint8)])
    assert client.match(prefix).blocks == 0
