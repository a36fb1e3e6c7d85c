"""Names of a prompt's first tokens."""

from __future__ import annotations

import random

import pytest

from tiffin.conductor.state.part_keys import PART_KEYS_MAX, part_keys, parts_of
from tiffin.kvstore import KVSchema
from tiffin.kvstore.format.keys import digest_of, root_key


def schema_of(block_tokens: int = 512, digest: str = "xxh3_128") -> KVSchema:
    return KVSchema.gqa(
        model="m",
        layers=1,
        kv_heads=1,
        head_dim=8,
        dtype="float16",
        block_tokens=block_tokens,
        hash=digest,
    )


@pytest.mark.parametrize("digest", ["xxh3_128", "sha256", "blake2b"])
def test_they_are_a_chain_from_the_root_of_the_block_keys(digest: str) -> None:
    schema, secret = schema_of(digest=digest), b"s" * 16
    prompt = random.Random(0).choices(range(1 << 32), k=48)
    key, expected = root_key(schema, "acme", secret), []
    for at in range(0, 48, 16):
        tokens = b"".join(token.to_bytes(4, "little") for token in prompt[at : at + 16])
        key = digest_of(digest, secret)(key + tokens)
        expected.append(key)
    assert part_keys(schema.prefix(prompt, "acme", secret), secret) == tuple(expected)


@pytest.mark.parametrize(
    ("tokens", "block_tokens", "parts"),
    [
        *((0, 512, 0), (15, 512, 0), (16, 512, 1), (200, 512, 12), (512, 512, 31), (5000, 512, 31)),
        *((100, 16, 0), (100, 17, 1), (100, 32, 1), (1 << 17, 1 << 16, PART_KEYS_MAX - 1)),
    ],
)
def test_they_end_before_the_first_block_does(tokens: int, block_tokens: int, parts: int) -> None:
    assert parts_of(tokens, block_tokens) == parts
    assert len(part_keys(schema_of(block_tokens).prefix([7] * tokens))) == parts


def test_prompts_share_the_keys_of_the_parts_that_they_share() -> None:
    dice, schema = random.Random(1), schema_of()
    prompt = dice.choices(range(100_000), k=700)
    whole = part_keys(schema.prefix(prompt))
    for shared in (0, 15, 16, 200, 495, 496, 600):
        other = prompt[:shared] + dice.choices(range(100_000, 200_000), k=300)
        keys = part_keys(schema.prefix(other))
        assert keys[: shared // 16] == whole[: shared // 16]
        assert not set(keys[shared // 16 :]) & set(whole)
