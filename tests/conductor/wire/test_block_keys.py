"""Keys from hex and from tokens, and schemas from their canonical bytes."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiffin.conductor.errors import Conflict, InvalidRequest
from tiffin.conductor.records import KEYS_MAX
from tiffin.conductor.wire.block_keys import MODELS_MAX, KeyedModels, parse_keys
from tiffin.conductor.wire.schema_text import parse_schema
from tiffin.kvstore import KVSchema, LayerSpec


def schema_of(model: str = "m", layers: int = 2) -> KVSchema:
    return KVSchema.gqa(
        model=model, layers=layers, kv_heads=2, head_dim=8, dtype="float16", block_tokens=16
    )


@given(st.lists(st.binary(min_size=16, max_size=16), max_size=40), st.booleans())
def test_keys_are_read_whatever_bytes_they_have(keys: list[bytes], upper: bool) -> None:
    texts = [key.hex().upper() if upper else key.hex() for key in keys]
    assert parse_keys(texts) == tuple(keys)


@given(st.lists(st.text(alphabet="0aF g\u00b2", min_size=31, max_size=33), min_size=1, max_size=4))
def test_what_is_not_32_digits_each_is_refused(texts: list[str]) -> None:
    good = all(len(text) == 32 and set(text) <= set("0aF") for text in texts)
    if good:
        assert len(parse_keys(texts)) == len(texts)
    else:
        with pytest.raises(InvalidRequest, match=r"block_keys\[\d\]"):
            parse_keys(texts)


def test_there_are_not_too_many() -> None:
    with pytest.raises(InvalidRequest, match=str(KEYS_MAX)):
        parse_keys(["0" * 32] * (KEYS_MAX + 1))


MIXED = KVSchema.of(
    "mixed",
    [
        LayerSpec.gqa(kv_heads=4, head_dim=8, dtype="bfloat16"),
        LayerSpec.mla(latent_dim=64, rope_dim=16, dtype="float8_e4m3"),
    ],
    block_tokens=32,
    hash="blake2b",
    shards=2,
)


PAGED = [
    KVSchema.of("p", MIXED.layers, block_tokens=32, shards=shards, checksum="xxh3_64_pages")
    for shards in (1, 2)
]


QUANTISED = KVSchema.gqa(
    model="q", layers=2, kv_heads=2, head_dim=8, dtype="int8", block_tokens=32, scale_tokens=16
)


@pytest.mark.parametrize("schema", [schema_of(), MIXED, *PAGED, QUANTISED])
def test_a_schema_survives_the_way(schema: KVSchema) -> None:
    parsed = parse_schema(schema.canonical_bytes().decode())
    assert parsed == schema
    assert parsed.fingerprint == schema.fingerprint


@pytest.mark.parametrize(
    "canonical",
    [
        "",
        "{}",
        "[]",
        "[" * 100_000,
        '["tiffin-schema-1","m","xxh3_128",16,[]]',
        '["tiffin-schema-2"' + schema_of().canonical_bytes().decode()[18:],
        schema_of().canonical_bytes().decode().replace("gqa", "gqb"),
        schema_of().canonical_bytes().decode().replace("16,", "-16,"),
        schema_of().canonical_bytes().decode().replace("xxh3_128", "md5"),
        schema_of().canonical_bytes().decode()[:-1] + ',"xxh3_64"]',
        schema_of().canonical_bytes().decode()[:-1] + ',"crc32"]',
        QUANTISED.canonical_bytes().decode().replace(",16]", ",16,1]"),
        QUANTISED.canonical_bytes().decode().replace(",16]", ',"16"]'),
        PAGED[1].canonical_bytes().decode().replace(',2,"xxh3_64_pages"]', ',"xxh3_64_pages",2]'),
        json.dumps(json.loads(schema_of().canonical_bytes())),
    ],
)
def test_what_is_no_schema_is_refused(canonical: str) -> None:
    with pytest.raises(InvalidRequest, match=r"schema\.canonical"):
        parse_schema(canonical)


def test_keys_are_those_of_the_store() -> None:
    models, schema = KeyedModels(), schema_of()
    models.learn("m", schema, set)
    tokens = list(range(100))
    assert models.keys("m", tokens, "acme")[0].blocks == schema.prefix(tokens, "acme").keys
    with pytest.raises(InvalidRequest, match="send block_keys"):
        models.keys("other", tokens)
    with pytest.raises(InvalidRequest, match="namespace"):
        models.keys("m", tokens, "ä" * 1024)


def test_one_model_has_one_schema_while_anybody_uses_it() -> None:
    models = KeyedModels()
    models.learn("m", schema_of(), set)
    models.learn("m", schema_of(), lambda: {"m"})
    with pytest.raises(Conflict, match="by another schema: layers differ"):
        models.learn("m", schema_of(layers=3), lambda: {"m"})
    models.learn("m", schema_of(layers=3), lambda: {"n"})
    assert models.schema("m") == schema_of(layers=3)
    models.learn("n", schema_of(), set)  # whatever the schema calls the model
    assert models.schema("n") == schema_of()


def test_the_same_text_is_known_without_being_read() -> None:
    models, text = KeyedModels(), schema_of().canonical_bytes().decode()
    assert models.same("m", text) is None
    models.learn("m", schema_of(), set)
    assert models.same("m", text) is models.schema("m")
    assert models.same("n", text) is None
    models.learn("m", schema_of(layers=3), set)
    assert models.same("m", text) is None


def test_models_that_nobody_serves_make_room() -> None:
    models = KeyedModels()
    names = [f"m{i}" for i in range(MODELS_MAX)]
    for name in names:
        models.learn(name, schema_of(name), lambda: set(names))
    with pytest.raises(InvalidRequest, match="limit"):
        models.learn("more", schema_of("more"), lambda: set(names))
    models.learn("more", schema_of("more"), lambda: {"m0"})
    assert models.schema("m0") is not None
    assert models.schema("m1") is None
