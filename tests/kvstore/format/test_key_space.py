"""Two parties with the same key space make the same keys; with different ones never."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiffin.kvstore import KVSchema
from tiffin.kvstore.errors import InvalidInput
from tiffin.kvstore.format.key_space import (
    ADAPTERS_MAX,
    SPACE_BYTES_MAX,
    KeySpace,
    request_namespace,
    secret_name,
)
from tiffin.kvstore.format.keys import Prefix

SCHEMAS = {
    model: KVSchema.gqa(
        model=model, layers=1, kv_heads=1, head_dim=2, dtype="float32", block_tokens=4
    )
    for model in ("one", "other")
}
WORDS = st.sampled_from(["", "a", "b", "a\0b"[:1], "äß", "[", '"', "version v"])
NAMES = st.sampled_from(["x", "y"])
SPACES = st.builds(
    KeySpace,
    schema=st.sampled_from([one.canonical_bytes().decode() for one in SCHEMAS.values()]),
    namespace=WORDS,
    version=WORDS,
    adapters=st.dictionaries(NAMES, st.sampled_from(["weights 1", "weights 2"])),
    models=st.sampled_from([("served",), ("served", "alias")]),
    engine=WORDS,
    page_tokens=st.sampled_from([2, 4]),
)
REQUESTS = st.tuples(st.sampled_from(["", "x", "y"]), WORDS)


def keys(space: KeySpace, adapter: str, salt: str) -> tuple[bytes, ...] | None:
    """Of one prompt; None for an adapter that the space does not name."""
    (schema,) = (s for s in SCHEMAS.values() if s.canonical_bytes().decode() == space.schema)
    try:
        return Prefix(schema, range(8), space.namespace_of(adapter, salt)).keys
    except InvalidInput:
        return None


def content(space: KeySpace, adapter: str, salt: str) -> tuple[Any, ...]:
    """What decides the bytes of a request's blocks."""
    weights = space.adapters.get(adapter, "")
    return space.schema, space.namespace, space.version, weights, salt


@given(SPACES, SPACES, REQUESTS, REQUESTS)
def test_keys_are_the_same_exactly_for_the_same_content(
    one: KeySpace, other: KeySpace, asked: tuple[str, str], again: tuple[str, str]
) -> None:
    ours, theirs = keys(one, *asked), keys(other, *again)
    assert (ours is None) == (asked[0] not in ("", *one.adapters))
    if ours is None or theirs is None:
        return
    assert (ours == theirs) == (content(one, *asked) == content(other, *again))
    if one.kind == other.kind and asked == again == ("", again[1]):
        assert ours == theirs


@given(SPACES)
def test_what_was_announced_is_what_is_heard(space: KeySpace) -> None:
    heard = KeySpace.decoded(space.encoded())
    assert heard == space


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff" * 20,
        msgspec.msgpack.encode(["schema"]),
        msgspec.msgpack.encode({"namespace": "n"}),
        msgspec.msgpack.encode({"schema": "s", "models": ["a\nb"]}),
        msgspec.msgpack.encode({"schema": "s", "ranks": -1}),
        msgspec.msgpack.encode(
            {"schema": "s", "adapters": dict.fromkeys(map(str, range(5000)), "")}
        ),
    ],
)
def test_what_is_no_space_is_refused(data: bytes) -> None:
    assert ADAPTERS_MAX < 5000
    with pytest.raises(InvalidInput, match="no key space"):
        KeySpace.decoded(data)


def test_a_space_that_is_too_large_is_not_sent() -> None:
    with pytest.raises(InvalidInput, match="bytes"):
        KeySpace(schema="s" * SPACE_BYTES_MAX).encoded()


def test_a_plain_request_has_the_spaces_own_namespace() -> None:
    assert request_namespace("tenant", "", "", "") == "tenant"
    assert KeySpace(schema="", namespace="tenant").namespace_of() == "tenant"


def test_a_secret_is_named_and_not_told() -> None:
    secret = b"0123456789abcdef"
    assert secret_name(b"") == ""
    assert secret_name(secret) == secret_name(bytes(secret))
    assert secret_name(secret) != secret_name(secret[::-1])
    space = KeySpace(schema="", secret=secret_name(secret))
    assert secret not in space.encoded()
    assert secret.hex() not in repr(space)
