"""A schema decides which bytes mean what, so its arithmetic is compared with plain loops."""

import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiffin.kvstore.errors import SchemaError
from tiffin.kvstore.format.header import PAGE_BYTES
from tiffin.kvstore.format.schema import DTYPES, ByteRange, KVSchema, LayerKind, LayerSpec, Part

MIB = 1 << 20
ODD = LayerSpec.opaque(nbytes=7, format="odd")


def llama(layers: int = 32, **fields: object) -> KVSchema:
    chosen: dict[str, object] = {"kv_heads": 8, "head_dim": 128, "dtype": "bfloat16", **fields}
    return KVSchema.gqa(model="llama-3", layers=layers, **chosen)  # type: ignore[arg-type]


def hybrid() -> KVSchema:
    """One layer of every kind; 16 tokens."""
    specs = [
        LayerSpec.gqa(kv_heads=4, head_dim=8, dtype="bfloat16", v_head_dim=6, v_dtype="int8"),
        LayerSpec.mla(latent_dim=16, rope_dim=4, dtype="float8_e4m3"),
        LayerSpec.window(kv_heads=4, head_dim=8, dtype="float16", window_tokens=5),
        LayerSpec.compressed(kv_heads=4, head_dim=8, dtype="float32", tokens_per_entry=4),
        LayerSpec.state(shape=(3, 5), dtype="float64"),
        LayerSpec.opaque(nbytes=77, format="engine-x/1"),
    ]
    return KVSchema.of("hybrid", specs, block_tokens=16)


def quantised() -> KVSchema:
    """Every kind that has scales, beside parts that have none; 16 tokens."""
    specs = [
        LayerSpec.gqa(kv_heads=4, head_dim=8, dtype="float8_e4m3", scale_tokens=16),
        LayerSpec.gqa(kv_heads=4, head_dim=6, dtype="bfloat16", v_dtype="int8", scale_tokens=4),
        LayerSpec.mla(latent_dim=16, rope_dim=4, dtype="float8_e4m3", scale_tokens=1),
        LayerSpec.window(kv_heads=4, head_dim=8, dtype="int8", window_tokens=6, scale_tokens=3),
        LayerSpec.compressed(
            kv_heads=4, head_dim=3, dtype="int8", tokens_per_entry=4, scale_tokens=2
        ),
        LayerSpec.state(nbytes=12),
    ]
    return KVSchema.of("quantised", specs, block_tokens=16, shards=2)


def test_published_models_have_the_published_sizes() -> None:
    assert llama(32).block_bytes == 64 * MIB
    assert llama(80).block_bytes == 160 * MIB
    deepseek = KVSchema.mla(
        model="deepseek-v3", layers=61, latent_dim=512, rope_dim=64, dtype="bfloat16"
    )
    assert deepseek.block_bytes == 61 * 512 * 576 * 2
    assert round(deepseek.block_bytes / MIB, 1) == 34.3


def test_sizes_of_every_kind() -> None:
    schema = hybrid()
    lengths = [segment.length for segment in schema.segments]
    assert lengths == [
        16 * 4 * (8 * 2 + 6 * 1),
        16 * 20 * 1,
        2 * 5 * 4 * 8 * 2,
        2 * (16 // 4) * 4 * 8 * 4,
        3 * 5 * 8,
        77,
    ]
    assert [layer.entries(16) for layer in schema.layers] == [16, 16, 5, 4, 1, 1]
    assert schema.extent_bytes % PAGE_BYTES == 0
    slack_bytes = schema.extent_bytes - schema.header_bytes - schema.block_bytes
    assert 0 <= slack_bytes < PAGE_BYTES


def test_a_window_wider_than_a_block_keeps_the_whole_block() -> None:
    spec = LayerSpec.window(kv_heads=1, head_dim=2, dtype="int8", window_tokens=1024)
    assert spec.entries(512) == 512


def test_a_state_given_in_bytes() -> None:
    assert LayerSpec.state(nbytes=40).segment_bytes(512) == 40
    assert LayerSpec.state(nbytes=40) == LayerSpec.state(shape=[40], dtype="uint8")


def test_numpy_agrees_on_every_dtype() -> None:
    sizes = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
    for name, dtype in DTYPES.items():
        part = Part("k", 1, 3, name)
        assert part.numpy_dtype == dtype
        assert part.row_bytes == 3 * sizes.get(name, 1) == np.zeros(3, dtype).nbytes


SCHEMAS = {"llama": llama(3), "hybrid": hybrid(), "quantised": quantised()}


@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS)
def test_segments_and_parts_tile_the_payload(schema: KVSchema) -> None:
    parts = [
        schema.range(index, part.name)
        for index, layer in enumerate(schema.layers)
        for part in layer.parts
    ]
    for spans in (schema.segments, parts):
        assert spans[0].offset == 0
        assert spans[-1].end == schema.block_bytes
        assert all(left.end == right.offset for left, right in pairwise(spans))
    assert schema.ranges() == (ByteRange(0, schema.block_bytes),)


def positions(schema: KVSchema) -> list[tuple[int, str, int | None]]:
    """The owner of each byte of a payload, (layer, part, head), by the documented order."""
    owners: list[tuple[int, str, int | None]] = []
    for index, layer in enumerate(schema.layers):
        for part in layer.parts:
            for head in range(part.heads):
                entries = layer.entries(schema.block_tokens)
                length = entries * part.row_bytes
                if part.scale_tokens:
                    length += entries // part.scale_tokens * 4
                owners += [(index, part.name, head if layer.has_heads else None)] * length
    return owners


def covered(spans: tuple[ByteRange, ...]) -> list[int]:
    return [offset for span in spans for offset in range(span.offset, span.end)]


@pytest.mark.parametrize("name", ["hybrid", "quantised"])
@given(data=st.data())
def test_ranges_equal_the_walk(name: str, data: st.DataObject) -> None:
    schema = SCHEMAS[name]
    first = data.draw(st.integers(0, 5))
    end = data.draw(st.integers(first + 1, 6))
    low = data.draw(st.integers(0, 3))
    high = data.draw(st.integers(low + 1, 4))
    spans = schema.ranges(layers=(first, end), heads=(low, high))
    expected = [
        offset
        for offset, (layer, _, head) in enumerate(positions(schema))
        if first <= layer < end and (head is None or low <= head < high)
    ]
    assert covered(spans) == expected
    assert all(left.end < right.offset for left, right in pairwise(spans)), "not coalesced"


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_ranks_of_any_degree_share_a_block_between_them(ranks: int) -> None:
    schema = llama(2, block_tokens=4)
    step = 8 // ranks
    spans = [schema.ranges(heads=(rank * step, (rank + 1) * step)) for rank in range(ranks)]
    offsets = sorted(offset for rank in spans for offset in covered(rank))
    assert offsets == list(range(schema.block_bytes))


def test_layers_without_heads_are_given_whole_to_every_rank() -> None:
    schema = hybrid()
    for layer, part in ((1, "latent"), (4, "state"), (5, "data")):
        assert schema.range(layer, part, (1, 2)) == schema.segments[layer]


def test_selections_can_be_written_in_four_ways() -> None:
    schema = llama(4)
    expected = schema.ranges((1, 3), (2, 4))
    assert schema.ranges(slice(1, 3), slice(2, 4)) == expected
    assert schema.ranges(range(1, 3), range(2, 4)) == expected
    assert schema.ranges(slice(-3, -1), slice(2, 4)) == expected
    assert schema.ranges(2) == schema.ranges((2, 3)) == (schema.segments[2],)
    assert schema.ranges(slice(2, None)) == schema.ranges((2, 4))


@pytest.mark.parametrize("layers", [-1, 4, (2, 2), (3, 1), (0, 5), slice(9, None), range(0, 4, 2)])
def test_selections_that_do_not_exist(layers: object) -> None:
    with pytest.raises(SchemaError):
        llama(4).ranges(layers)  # type: ignore[arg-type]


@pytest.mark.parametrize("heads", [(0, 9), (3, 3), (-1, 2), slice(0, 9), slice(8, None), "k"])
def test_heads_that_do_not_exist(heads: object) -> None:
    with pytest.raises(SchemaError):
        llama(4).range(0, "k", heads)  # type: ignore[arg-type]


def test_parts_and_layers_that_do_not_exist() -> None:
    with pytest.raises(SchemaError, match=r"\('k', 'v'\), not 'latent'"):
        llama(4).range(0, "latent")
    with pytest.raises(SchemaError, match="layer is 4"):
        llama(4).range(4, "k")


@pytest.mark.parametrize(
    "wrong",
    [
        {"layers": 0},
        {"layers": 4097},
        {"layers": True},
        {"layers": 1.0},
        {"kv_heads": 0},
        {"kv_heads": -8},
        {"head_dim": 0},
        {"head_dim": "128"},
        {"v_head_dim": 0},
        {"dtype": "bf16"},
        {"dtype": None},
        {"v_dtype": "float"},
        {"block_tokens": 0},
        {"block_tokens": 65537},
        {"hash": "md5"},
        {"layers": 4096, "head_dim": 65536},  # 16 TiB
    ],
    ids=str,
)
def test_wrong_fields_are_refused_at_once(wrong: dict[str, object]) -> None:
    with pytest.raises(SchemaError):
        llama(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("model", ["", None, 7, "\ud800", "m" * 1025])
def test_model_names(model: object) -> None:
    with pytest.raises(SchemaError):
        KVSchema.of(model, [LayerSpec.state(nbytes=1)])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "make",
    [
        lambda: KVSchema(model="m", layers=()),
        lambda: KVSchema(model="m", layers=3),
        lambda: KVSchema(model="m", layers=("gqa",)),
        lambda: LayerSpec("gqa", ()),
        lambda: LayerSpec(LayerKind.GQA, (Part("k", 1, 1, "int8"),)),
        lambda: LayerSpec(LayerKind.MLA, (Part("latent", 2, 1, "int8"),)),
        lambda: LayerSpec(LayerKind.MLA, (Part("latent", 1, 1, "int8"),), shape=(1,)),
        lambda: LayerSpec(LayerKind.MLA, (Part("latent", 1, 1, "int8"),), format="x"),
        lambda: LayerSpec(LayerKind.MLA, (Part("latent", 1, 1, "int8"),), window_tokens=1),
        lambda: LayerSpec(LayerKind.STATE, (Part("state", 1, 4, "int8"),), shape=(3,)),
        lambda: LayerSpec.window(kv_heads=1, head_dim=1, dtype="int8", window_tokens=0),
        lambda: LayerSpec.compressed(kv_heads=1, head_dim=1, dtype="int8", tokens_per_entry=0),
        lambda: LayerSpec.mla(latent_dim=0, dtype="int8"),
        lambda: LayerSpec.mla(latent_dim=1, rope_dim=-1, dtype="int8"),
        lambda: LayerSpec.state(),
        lambda: LayerSpec.state(shape=(1,), nbytes=1),
        lambda: LayerSpec.state(shape=(0,)),
        lambda: LayerSpec.state(nbytes=4, dtype="float32"),
        lambda: LayerSpec.opaque(nbytes=0, format="x"),
        lambda: LayerSpec.opaque(nbytes=1, format=""),
    ],
)
def test_specs_that_describe_nothing(make: object) -> None:
    with pytest.raises(SchemaError):
        make()  # type: ignore[operator]


def test_an_entry_must_not_span_blocks() -> None:
    spec = LayerSpec.compressed(kv_heads=1, head_dim=1, dtype="int8", tokens_per_entry=3)
    with pytest.raises(SchemaError, match="layer 0: one entry per 3 tokens"):
        KVSchema.of("m", [spec])


def test_equal_schemas_are_equal_and_hash_alike() -> None:
    assert llama() == llama()
    assert len({llama(), llama(), llama(31)}) == 2
    assert KVSchema(model="m", layers=[LayerSpec.state(nbytes=1)]) == KVSchema.of(  # type: ignore[arg-type]
        "m", (LayerSpec.state(nbytes=1),)
    )


def test_every_field_is_in_the_fingerprint() -> None:
    changed = [
        llama(),
        llama(31),
        llama(kv_heads=4),
        llama(head_dim=64),
        llama(v_head_dim=64),
        llama(dtype="float16"),
        llama(v_dtype="float16"),
        llama(block_tokens=256),
        llama(hash="sha256"),
        KVSchema.of("other", llama().layers),
        KVSchema.of("m", [LayerSpec.opaque(nbytes=8, format="a")]),
        KVSchema.of("m", [LayerSpec.opaque(nbytes=8, format="b")]),
        KVSchema.of("m", [LayerSpec.state(shape=(2, 4))]),
        KVSchema.of("m", [LayerSpec.state(shape=(4, 2))]),
        KVSchema.of("m", [LayerSpec.state(nbytes=8)]),
        hybrid(),
        KVSchema.of("hybrid", hybrid().layers[::-1], block_tokens=16),
        *(
            KVSchema.of(
                "m",
                [LayerSpec.window(kv_heads=1, head_dim=1, dtype="int8", window_tokens=tokens)],
            )
            for tokens in (512, 1024)  # the same bytes in number, not in meaning
        ),
    ]
    assert len({schema.fingerprint for schema in changed}) == len(changed)
    assert all(len(schema.fingerprint) == 16 for schema in changed)


def test_a_quantised_block_has_its_scales_behind_each_head() -> None:
    schema = quantised()
    assert [segment.length for segment in schema.spans] == [
        2 * 4 * (16 * 8 + 1 * 4),
        4 * 16 * 6 * 2 + 4 * (16 * 6 + 4 * 4),
        16 * 20 + 16 * 4,
        2 * 4 * (6 * 8 + 2 * 4),
        2 * 4 * (4 * 3 + 2 * 4),
        12,
    ]
    head_bytes = 16 * 8 + 4
    assert schema.range(0, "v", heads=(1, 3)) == ByteRange(5 * head_bytes, 2 * head_bytes)
    assert [segment.length for segment in schema.segments[:4]] == [2 * head_bytes] * 4
    halved = KVSchema.gqa(
        model="m", layers=32, kv_heads=8, head_dim=128, dtype="float8_e4m3", scale_tokens=512
    )
    assert halved.block_bytes == 32 * MIB + 32 * 2 * 8 * 4


def test_how_values_are_quantised_is_in_the_fingerprint() -> None:
    schemas = [
        llama(),
        llama(dtype="int8"),
        llama(dtype="float8_e4m3"),
        *(llama(dtype="int8", scale_tokens=tokens) for tokens in (1, 16, 512)),
        *(llama(dtype="float8_e4m3", scale_tokens=tokens) for tokens in (1, 16, 512)),
        llama(dtype="float8_e4m3", v_dtype="int8", scale_tokens=16),
        llama(v_dtype="int8"),
        llama(v_dtype="int8", scale_tokens=16),
    ]
    assert len({schema.fingerprint for schema in schemas}) == len(schemas)
    assert llama(scale_tokens=0).fingerprint == llama().fingerprint
    assert b'[["k",8,128,"int8",16],["v",8,128,"int8",16]]' in schemas[4].canonical_bytes()
    assert b'[["k",8,128,"bfloat16"],["v",8,128,"int8",16]]' in schemas[-1].canonical_bytes()


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: llama(scale_tokens=16), "k is bfloat16, which has no scales"),
        (lambda: llama(dtype="uint8", scale_tokens=1), "k is uint8"),
        (lambda: llama(dtype="float8_e5m2", scale_tokens=1), "k is float8_e5m2"),
        (lambda: llama(dtype="int8", scale_tokens=3), "layer 0: k: one scale per 3 entries"),
        (lambda: llama(dtype="int8", scale_tokens=1024), "one scale per 1024 entries"),
        (lambda: llama(dtype="int8", scale_tokens=-1), "scale_tokens is -1"),
        (lambda: llama(dtype="int8", scale_tokens=True), "scale_tokens is an int"),
        (lambda: llama(dtype="int8", scale_tokens=None), "scale_tokens is an int"),
        (
            lambda: llama(dtype="int8", scale_tokens=1, head_dim=3, block_tokens=6),
            "layer 0: a head of k has 18 bytes; .* multiple of 4",
        ),
        (
            lambda: KVSchema.of("m", [*llama(1, dtype="int8", scale_tokens=1).layers, ODD]),
            "layer 1: data has 7 bytes; .* pad it",
        ),
        (
            lambda: LayerSpec(LayerKind.STATE, (Part("state", 1, 4, "int8", 1),), shape=(4,)),
            "no entries that could share a scale",
        ),
        (
            lambda: LayerSpec(LayerKind.OPAQUE, (Part("data", 1, 4, "int8", 1),), format="x"),
            "no entries that could share a scale",
        ),
        (
            lambda: KVSchema.mla(
                model="m", layers=1, latent_dim=6, dtype="int8", block_tokens=6, scale_tokens=4
            ),
            "one scale per 4 entries does not divide the 6",
        ),
    ],
)
def test_scales_that_cannot_be(make: Callable[[], object], why: str) -> None:
    with pytest.raises(SchemaError, match=why):
        make()


def test_scales_lie_at_multiples_of_four_in_every_selection() -> None:
    schema = quantised()
    for layer, spec in enumerate(schema.layers):
        for part in spec.parts:
            for head in range(part.heads if spec.has_heads else 1):
                span = schema.range(layer, part.name, (head, head + 1))
                assert span.offset % 4 == span.length % 4 == 0


def test_the_fingerprint_is_the_same_in_another_process() -> None:
    script = (
        "from tiffin.kvstore.format.schema import KVSchema;"
        "print(KVSchema.gqa(model='llama-3', layers=32, kv_heads=8, head_dim=128,"
        " dtype='bfloat16').fingerprint.hex())"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.stdout.strip() == llama().fingerprint.hex(), result.stderr


def test_reprs_tell_what_it_is() -> None:
    fingerprint = llama().fingerprint.hex()
    assert repr(llama()) == (
        f"<KVSchema 'llama-3' layers: 32 gqa; 512 tokens = 64.0 MiB; {fingerprint}>"
    )
    assert "1 gqa, 1 mla, 1 window, 1 compressed, 1 state, 1 opaque" in repr(hybrid())
