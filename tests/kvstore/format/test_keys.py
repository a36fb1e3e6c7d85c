"""Keys are compared with a ten-line reference, with published vectors, and with each other."""

import hashlib
import json
import pickle
from array import array
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from xxhash import xxh3_128_digest

from tiffin.kvstore.errors import InvalidInput, SchemaError, TokenError
from tiffin.kvstore.format.keys import Prefix, namespace_fingerprint, root_key
from tiffin.kvstore.format.schema import KVSchema

HASHES = ("xxh3_128", "sha256", "blake2b")
DOCS = Path(__file__).resolve().parents[3] / "docs"
token = st.integers(0, 2**32 - 1)


def tiny(**fields: Any) -> KVSchema:
    chosen = {"model": "tiny", "layers": 2, "kv_heads": 2, "head_dim": 4, "dtype": "float16"}
    return KVSchema.gqa(**{**chosen, "block_tokens": 4, **fields})


def reference_keys(
    schema: KVSchema, tokens: list[int], namespace: str, secret: bytes
) -> list[bytes]:
    """The root and every key, from the description in docs/key-format.md."""

    def digest(data: bytes) -> bytes:
        if schema.hash == "xxh3_128":
            return xxhash.xxh3_128(data).intdigest().to_bytes(16, "big")
        if schema.hash == "sha256":
            return hashlib.sha256(data).digest()[:16]
        return hashlib.blake2b(data, digest_size=16, key=secret).digest()

    root = b""
    version = (1).to_bytes(4, "little")
    fields = [b"tiffin-key", version, schema.model.encode(), schema.fingerprint]
    for field in [*fields, namespace.encode(), secret]:
        root += len(field).to_bytes(4, "little") + field
    keys = [digest(root)]
    for first in range(0, len(tokens) - schema.block_tokens + 1, schema.block_tokens):
        block = tokens[first : first + schema.block_tokens]
        keys.append(digest(keys[-1] + b"".join(t.to_bytes(4, "little") for t in block)))
    return keys


@given(
    tokens=st.lists(token, max_size=40),
    namespace=st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    secret=st.binary(max_size=64),
    name=st.sampled_from(HASHES),
    block_tokens=st.integers(1, 9),
)
def test_keys_equal_the_reference(
    tokens: list[int], namespace: str, secret: bytes, name: str, block_tokens: int
) -> None:
    schema = tiny(hash=name, block_tokens=block_tokens)
    prefix = schema.prefix(tokens, namespace, secret)
    root, *keys = reference_keys(schema, tokens, namespace, secret)
    assert (prefix.root, list(prefix.keys)) == (root, keys)
    assert prefix.key_bytes == b"".join(keys)
    assert prefix.token_count == len(tokens)
    full = len(keys) * block_tokens
    assert (prefix.tokens.tolist(), prefix.tail.tolist()) == (tokens[:full], tokens[full:])


def published_vectors() -> list[dict[str, Any]]:
    text = (DOCS / "key-format.md").read_text()
    vectors: list[dict[str, Any]] = json.loads(text.split("```json\n")[1].split("```")[0])
    return vectors


@pytest.mark.parametrize("vector", published_vectors(), ids=lambda vector: vector["name"])
def test_published_vectors(vector: dict[str, Any]) -> None:
    schema = KVSchema.gqa(**vector["schema"])
    secret = bytes.fromhex(vector["secret"])
    prefix = schema.prefix(vector["tokens"], vector["namespace"], secret)
    assert schema.canonical_bytes().decode() == vector["canonical_schema"]
    assert schema.fingerprint.hex() == vector["schema_fingerprint"]
    assert prefix.namespace_fingerprint.hex() == vector["namespace_fingerprint"]
    assert prefix.root.hex() == vector["root"]
    assert [key.hex() for key in prefix.keys] == vector["keys"]


def test_the_vectors_cover_every_hash() -> None:
    assert {vector["schema"]["hash"] for vector in published_vectors()} == set(HASHES)


@pytest.mark.parametrize("name", HASHES)
def test_every_identity_field_changes_the_keys(name: str) -> None:
    tokens = list(range(8))
    prefixes = [
        tiny(hash=name).prefix(tokens),
        tiny(hash=name).prefix(tokens, "a"),
        tiny(hash=name).prefix(tokens, "", b"a"),
        tiny(hash=name).prefix(tokens, "a", b"a"),
        tiny(hash=name).prefix(tokens, "aa"),
        tiny(hash=name).prefix(tokens, "", b"a\0"),
        tiny(hash=name, model="tinya").prefix(tokens),
        tiny(hash=name, layers=3).prefix(tokens),
        tiny(hash=name, kv_heads=1).prefix(tokens),
        tiny(hash=name, head_dim=8).prefix(tokens),
        tiny(hash=name, dtype="bfloat16").prefix(tokens),
        tiny(hash=name, block_tokens=8).prefix(tokens),
    ]
    roots = [prefix.root for prefix in prefixes]
    keys = [key for prefix in prefixes for key in prefix.keys]
    assert len(set(roots + keys)) == len(roots) + len(keys)
    assert all(len(key) == 16 for key in roots + keys)


@given(data=st.data(), tokens=st.lists(token, min_size=4, max_size=24))
def test_a_changed_token_changes_its_key_and_all_later_ones(
    data: st.DataObject, tokens: list[int]
) -> None:
    index = data.draw(st.integers(0, len(tokens) // 4 * 4 - 1))
    changed = tokens.copy()
    changed[index] ^= 1 << data.draw(st.integers(0, 31))
    before, after = tiny().prefix(tokens).keys, tiny().prefix(changed).keys
    first = index // 4
    assert before[:first] == after[:first]
    assert not set(before[first:]) & set(after[first:])


@given(
    tokens=st.lists(token, min_size=4, max_size=24),
    cut=st.integers(0, 24),
    extras=st.dictionaries(st.integers(0, 7), st.binary(min_size=1, max_size=20), max_size=3),
)
def test_an_extra_changes_its_key_and_all_later_ones(
    tokens: list[int], cut: int, extras: dict[int, bytes]
) -> None:
    plain, prefix = tiny().prefix(tokens), tiny().prefix(tokens[:cut], extras=extras)
    prefix.extend(tokens[cut:])
    key = plain.root
    for index, chunk in enumerate(plain.token_chunks()):
        key = xxh3_128_digest(key + chunk + extras.get(index, b""))
        assert prefix.keys[index] == key
    first = min(extras, default=len(plain))
    assert prefix.keys[:first] == plain.keys[:first]
    assert not set(prefix.keys[first:]) & set(plain.keys)


def test_an_extra_is_that_of_its_block() -> None:
    one = tiny().prefix(range(12), extras={1: b"a"})
    assert one.keys == tiny().prefix(range(12), extras={1: b"a", 2: b""}).keys
    others = [{0: b"a"}, {2: b"a"}, {1: b"b"}, {1: b"aa"}, {1: b"a", 2: b"a"}]
    assert all(tiny().prefix(range(12), extras=other).keys != one.keys for other in others)


@pytest.mark.parametrize(
    "extras", [{-1: b"a"}, {"0": b"a"}, {True: b"a"}, {0: "a"}, {0: bytes(65537)}]
)
def test_bad_extras_are_refused(extras: Any) -> None:
    with pytest.raises(InvalidInput, match="extras"):
        tiny().prefix(range(4), extras=extras)


def test_fields_cannot_run_into_each_other() -> None:
    roots = {root_key(tiny(), name, secret) for name, secret in (("ab", b"c"), ("a", b"bc"))}
    assert len(roots) == 2


def test_namespace_fingerprints() -> None:
    names = [("", b""), ("a", b""), ("", b"a"), ("a", b"a"), ("a", b"a\0"), ("b", b"")]
    assert len({namespace_fingerprint(*name) for name in names}) == len(names)
    prefix = tiny().prefix([1] * 4, "a", b"s3cret")
    assert prefix.namespace_fingerprint == namespace_fingerprint("a", b"s3cret")
    assert "s3cret" not in repr(prefix)
    assert prefix.schema_fingerprint == tiny().fingerprint


@pytest.mark.parametrize(
    ("namespace", "secret"),
    [
        (None, b""),
        (b"a", b""),
        ("\ud800", b""),
        ("n" * 1025, b""),
        ("é" * 513, b""),
        ("", None),
        ("", "s"),
        ("", b"s" * 65),
        ("", bytearray(b"s")),
    ],
    ids=repr,
)
def test_bad_namespaces_and_secrets(namespace: Any, secret: Any) -> None:
    for name in HASHES:
        with pytest.raises(InvalidInput):
            tiny(hash=name).prefix([1, 2, 3, 4], namespace, secret)
    with pytest.raises(InvalidInput):
        namespace_fingerprint(namespace, secret)


# Tokens


def accepted() -> list[Any]:
    values = [3, 0, 1, 100]
    arrays = [np.array(values, dtype=code) for code in "bBhHiIlLqQ"]
    return [
        values,
        tuple(values),
        deque(values),
        array("l", values),
        [np.int64(value) for value in values],
        np.array(values, dtype=object),
        np.array(values, dtype=">i8"),
        np.array(values, dtype=">u4"),
        np.array([values]),
        np.array(values * 2).reshape(2, 4).T[:, 0],
        *arrays,
    ]


def tokens_of(token_ids: Any) -> NDArray[np.uint32]:
    """All tokens of a prefix of these."""
    prefix = tiny().prefix(token_ids)
    return np.concatenate([prefix.tokens, prefix.tail])


@pytest.mark.parametrize("token_ids", accepted(), ids=lambda given: f"{type(given).__name__}")
def test_what_holds_integers_is_taken(token_ids: Any) -> None:
    tokens = tokens_of(token_ids)
    assert tokens.tolist() == [3, 0, 1, 100]
    assert tokens.dtype == np.dtype("<u4")


@pytest.mark.parametrize("span", [range(0), range(7), range(9, 2, -3), range(2**32 - 2, 2**32)])
def test_ranges_are_taken(span: range) -> None:
    assert tokens_of(span).tolist() == list(span)


def test_extremes_and_nothing() -> None:
    extremes = [0, 1, 2**31 - 1, 2**31, 2**32 - 1]
    for given_tokens in (extremes, np.array(extremes), np.array(extremes, dtype=np.uint32)):
        assert tokens_of(given_tokens).tolist() == extremes
    for nothing in ([], (), np.array([], dtype=np.int64), range(5, 5)):
        assert tokens_of(nothing).shape == (0,)


@pytest.mark.parametrize(
    ("token_ids", "message"),
    [
        ([1, 2, -1], r"token_ids\[2\] = -1"),
        ([1, 2**32], r"token_ids\[1\] = 4294967296"),
        ([1, 10**30], r"token_ids\[1\]"),
        ([1, 2.0], r"token_ids\[1\] is a float"),
        ([1, True], r"token_ids\[1\] is a bool"),
        ([False], r"token_ids\[0\] is a bool"),
        ([5, np.True_], r"token_ids\[1\] is a bool"),
        ([1, "2"], r"token_ids\[1\] is a str"),
        ([1, None], r"token_ids\[1\] is a NoneType"),
        ([[1, 2]], r"token_ids\[0\] is a list"),
        ((1, -5), r"token_ids\[1\] = -5"),
        (range(-1, 4), r"token_ids\[0\] = -1"),
        (range(2**32 - 1, 2**32 + 1), r"token_ids\[1\]"),
        (range(0, 2**80, 2**70), r"token_ids\[1023\]"),
        (np.array([1, -1]), r"token_ids\[1\] = -1"),
        (np.array([1, -1], dtype=np.int8), r"token_ids\[1\] = -1"),
        (np.array([1, -1], dtype=">i4"), r"token_ids\[1\] = -1"),
        (np.array([7, 2**32, -1]), r"token_ids\[1\] = 4294967296"),
        (np.array([7, 2**64 - 1], dtype=np.uint64), r"token_ids\[1\]"),
        (np.array([1.0]), "dtype float64"),
        (np.array([True]), "dtype bool"),
        (np.array(["1"]), "dtype <U1"),
        (np.array([1, None]), r"token_ids\[1\] is a NoneType"),
        (np.array([[1], [2]]), r"shape \(2, 1\)"),
        (np.array(1), r"shape \(\)"),
        (np.zeros((1, 1, 4), dtype=int), "shape"),
        ("1234", "is a str"),
        (b"1234", "is a bytes"),
        (bytearray(4), "is a bytearray"),
        (None, "is a NoneType"),
        (7, "is a int"),
        ({1, 2}, "is a set"),
        (iter([1]), "pass a list"),
        (array("d", [1.0]), "dtype float64"),
    ],
)
def test_what_is_no_prompt_is_refused(token_ids: Any, message: str) -> None:
    with pytest.raises(TokenError, match=message):
        tiny().prefix(token_ids)
    prefix = tiny().prefix([1, 2, 3, 4, 5])
    with pytest.raises(TokenError, match=message):
        prefix.extend(token_ids)
    assert prefix == tiny().prefix([1, 2, 3, 4, 5]), "a refused extension changed the prefix"


def test_text_is_not_repeated_in_messages() -> None:
    with pytest.raises(TokenError) as raised:
        tiny().prefix([1, "a user's words"])  # type: ignore[list-item]
    assert "words" not in str(raised.value)


def test_masked_arrays_are_refused() -> None:
    """Also where nothing is masked: whether it is would differ from prompt to prompt."""
    for mask in (False, [False, True]):
        with pytest.raises(TokenError, match="masked array"):
            tiny().prefix(np.ma.masked_array([1, 2], mask=mask))
    with pytest.raises(TokenError, match=r"token_ids\[1\] is a Masked"):
        tiny().prefix([1, np.ma.masked])


def test_torch_tensors() -> None:
    torch = pytest.importorskip("torch")
    for dtype in (torch.int64, torch.int32, torch.uint8, torch.int16):
        for shape in ((4,), (1, 4)):
            tensor = torch.tensor([3, 0, 1, 100], dtype=dtype).reshape(shape)
            assert tokens_of(tensor).tolist() == [3, 0, 1, 100]
    for wrong in (
        torch.tensor([1.0]),
        torch.tensor([1.0], requires_grad=True),
        torch.tensor([1.0], dtype=torch.bfloat16),
        torch.tensor([True]),
        torch.tensor([-1]),
        torch.tensor([[1], [2]]),
        torch.tensor(1),
        torch.tensor([1, 2]).to_sparse(),
        torch._neg_view(torch.tensor([-1, -2])),
    ):
        with pytest.raises(TokenError):
            tiny().prefix(wrong)


@pytest.mark.parametrize("dtype", [np.uint32, np.int64])
def test_the_input_is_not_aliased(dtype: Any) -> None:
    tokens = np.arange(8, dtype=dtype)
    prefix = tiny().prefix(tokens)
    tokens[:] = 9
    assert prefix.tokens.tolist() == list(range(8))
    assert prefix == tiny().prefix(range(8))
    assert not prefix.tokens.flags.writeable


# Prefixes as sequences


@given(
    tokens=st.lists(token, max_size=40),
    first=st.none() | st.integers(-12, 12),
    last=st.none() | st.integers(-12, 12),
)
def test_slices_are_like_those_of_lists(
    tokens: list[int], first: int | None, last: int | None
) -> None:
    prefix = tiny().prefix(tokens)
    part = prefix[first:last]
    start = slice(first, last).indices(len(prefix))[0]
    blocks = [tokens[i : i + 4] for i in range(0, len(tokens) // 4 * 4, 4)][first:last]
    assert part.keys == prefix.keys[first:last]
    assert len(part) == len(blocks)
    assert part.start == start
    assert part.parent == (prefix.keys[start - 1] if start else prefix.root)
    assert part.tokens.tolist() == [token for block in blocks for token in block]
    assert [part.token_bytes(i) for i in range(len(part))] == [
        np.array(block, dtype="<u4").tobytes() for block in blocks
    ]
    assert (part.tail.size, part.token_count) == (0, 4 * len(blocks))


def test_slices_of_slices_and_single_blocks() -> None:
    prefix = tiny().prefix(range(24))
    assert prefix[1:5][1:3] == prefix[2:4]
    assert prefix[2] == prefix[2:3]
    assert prefix[-1].keys == prefix.keys[-1:]
    assert [block.keys[0] for block in prefix] == list(prefix.keys)
    assert prefix[2].parent == prefix.keys[1]
    assert prefix.token_bytes(-1) == prefix[5].token_bytes(0)


def test_indices_that_do_not_exist() -> None:
    prefix = tiny().prefix(range(8))
    for index in (2, -3):
        with pytest.raises(IndexError):
            prefix[index]
        with pytest.raises(IndexError):
            prefix.token_bytes(index)
    for step in (2, -1):
        with pytest.raises(InvalidInput, match="step"):
            prefix[::step]
    with pytest.raises(IndexError):
        prefix[:1].token_bytes(1)


@given(st.lists(st.lists(token, max_size=11), max_size=8))
def test_extending_equals_building_at_once(parts: list[list[int]]) -> None:
    schema = tiny()
    prefix, tokens = schema.prefix([], "n", b"s"), list[int]()
    slices = []
    for part in parts:
        before = len(prefix)
        slices.append((prefix[:], schema.prefix(tokens[: before * 4], "n", b"s")))
        tokens += part
        completed = prefix.extend(np.array(part, dtype=np.int64))
        assert len(prefix) == before + completed == len(tokens) // 4
        assert prefix == schema.prefix(tokens, "n", b"s")
        assert prefix.token_count == len(tokens)
        assert prefix.key_bytes == b"".join(prefix.keys)
        assert prefix.tokens.tolist() + prefix.tail.tolist() == tokens
    assert all(taken == expected for taken, expected in slices), "an earlier slice changed"


def test_a_slice_cannot_be_extended() -> None:
    prefix = tiny().prefix(range(8))
    with pytest.raises(InvalidInput, match="slice"):
        prefix[:].extend([1])


@pytest.mark.parametrize("count", [0, 1, 3])
def test_prompts_shorter_than_a_block(count: int) -> None:
    prefix = tiny().prefix(range(count))
    assert (len(prefix), prefix.keys, prefix.key_bytes, prefix.tokens.size) == (0, (), b"", 0)
    assert prefix.tail.tolist() == list(range(count))
    assert prefix.parent == prefix.root
    assert not prefix


# -- in another process ----------------------------------------------------------------------------


@pytest.mark.parametrize("part", [slice(None), slice(0, 2), slice(1, 3), slice(2, 2), slice(2, 9)])
@pytest.mark.parametrize("name", HASHES)
def test_a_slice_arrives_in_another_process_as_it_was(name: str, part: slice) -> None:
    prefix = tiny(hash=name).prefix(range(17), "tenant", b"secret")[part]
    found = pickle.loads(pickle.dumps(prefix))
    assert found == prefix
    assert (found.keys, found.key_bytes) == (prefix.keys, prefix.key_bytes)
    assert (found.parent, found.root, found.start) == (prefix.parent, prefix.root, prefix.start)
    assert (found.namespace, found.schema) == (prefix.namespace, prefix.schema)
    assert found.tokens.tolist() == prefix.tokens.tolist()
    assert found.token_count == prefix.token_count
    assert repr(found) == repr(prefix)


def test_parts_of_what_arrived_are_those_of_what_was_sent() -> None:
    prefix = tiny().prefix(range(20))
    found = pickle.loads(pickle.dumps(prefix[1:]))
    for first in range(4):
        assert found[first:] == prefix[1 + first :]
        assert found[first:].parent == prefix.keys[first]
        assert found[first].token_bytes(0) == prefix[1 + first].token_bytes(0)
    assert [part.start for part in found] == [1, 2, 3, 4]
    again = pickle.loads(pickle.dumps(found[2:]))
    assert again == prefix[3:]
    assert again.parent == prefix.keys[2]


def test_what_arrived_has_no_tail_and_can_not_be_extended() -> None:
    found = pickle.loads(pickle.dumps(tiny().prefix(range(7))))
    assert (len(found), found.token_count, found.tail.tolist()) == (1, 4, [])
    with pytest.raises(InvalidInput, match="slice"):
        found.extend([1])


def test_a_prompt_shorter_than_a_block_arrives_empty() -> None:
    prefix = tiny().prefix(range(3))
    found = pickle.loads(pickle.dumps(prefix))
    assert (len(found), found.parent, found.root) == (0, prefix.root, prefix.root)


def test_a_secret_is_not_sent() -> None:
    for name in HASHES:
        prefix = tiny(hash=name).prefix(range(8), "tenant", b"a secret of sixteen")
        assert b"a secret of sixteen" not in pickle.dumps(prefix)


def test_only_the_slices_blocks_are_sent() -> None:
    prefix = tiny().prefix(range(4000))
    one, two = (len(pickle.dumps(prefix[first : first + 1])) for first in (1, 900))
    assert abs(one - two) <= 8
    assert one < 1000


def test_what_was_sent_is_not_changed_by_extending_its_origin() -> None:
    prefix = tiny().prefix(range(8))
    sent = pickle.dumps(prefix)
    prefix.extend(range(8))
    assert pickle.loads(sent) == tiny().prefix(range(8))[:2]


def test_equality() -> None:
    prefix = tiny().prefix(range(9))
    assert prefix == tiny().prefix(list(range(9)))
    assert prefix != prefix[:], "the tail counts"
    assert prefix != tiny().prefix(range(9), "n")
    assert prefix[:0] != prefix[1:1], "the place counts"
    assert prefix != prefix.keys
    with pytest.raises(TypeError):
        hash(prefix)


def test_repr_tells_where_it_is() -> None:
    prefix = tiny().prefix(range(9), "acme")
    last = prefix.keys[-1].hex()
    assert repr(prefix) == (
        f"<Prefix 'tiny' namespace='acme' blocks 0:2, 9 tokens, last key {last}>"
    )
    assert repr(tiny().prefix([])) == "<Prefix 'tiny' blocks 0:0, 0 tokens, last key none>"


def test_a_prefix_keeps_what_it_was_made_of() -> None:
    schema = tiny()
    prefix = Prefix(schema, range(4), namespace="n")
    assert prefix.schema is schema
    assert prefix.namespace == "n"


def test_hashes_are_known() -> None:
    with pytest.raises(SchemaError, match="xxh3_128, sha256, blake2b"):
        tiny(hash="xxh64")
