"""Requests with the same tokens that must not share blocks: adapters, salts, images."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from fakepool import BLOCK, SCHEMA

from tiffin.kvstore.connectors.vllm.model.request_identity import RequestIdentities
from tiffin.kvstore.connectors.vllm.model.weights_epoch import WeightsEpoch
from tiffin.kvstore.errors import InvalidInput
from tiffin.kvstore.format.key_space import ADAPTERS_MAX, NAME_MAX, KeySpace, announceable

if TYPE_CHECKING:
    from pathlib import Path

PROMPT = list(range(5 * BLOCK))
PLAIN = KeySpace(schema=SCHEMA.canonical_bytes().decode())


def request(**changes: Any) -> Any:
    fields: dict[str, Any] = {
        "prompt_embeds": None,
        "lora_request": None,
        "cache_salt": None,
        "mm_features": [],
    }
    return SimpleNamespace(**{**fields, **changes})


def image(name: str, offset: int, length: int = 6) -> Any:
    position = SimpleNamespace(offset=offset, length=length)
    return SimpleNamespace(identifier=name, mm_position=position)


def adapter(folder: Path, name: str, weights: bytes) -> Any:
    path = folder / name
    path.mkdir()
    (path / "adapter_model.safetensors").write_bytes(weights)
    return SimpleNamespace(lora_name=name, lora_path=str(path))


def identities_of(space: KeySpace = PLAIN) -> RequestIdentities:
    return RequestIdentities(BLOCK, space, WeightsEpoch())


def keys(one: Any) -> tuple[bytes, ...]:
    """The keys of the prompt's five blocks in this request."""
    identity = identities_of().of(one)
    assert identity is not None
    return SCHEMA.prefix(PROMPT, identity.namespace, extras=identity.extras).keys


def test_a_plain_request_has_no_identity_of_its_own() -> None:
    assert identities_of().of(request()) == ("", {})
    assert keys(request()) == SCHEMA.prefix(PROMPT).keys


def test_adapters_and_salts_share_no_block(tmp_path: Path) -> None:
    one, other = adapter(tmp_path, "one", b"1"), adapter(tmp_path, "other", b"2")
    found = [
        keys(request(**fields))
        for fields in (
            {},
            {"lora_request": one},
            {"lora_request": other},
            {"cache_salt": "a"},
            {"cache_salt": "b"},
            {"lora_request": one, "cache_salt": "a"},
        )
    ]
    assert len({key for one in found for key in one}) == 5 * len(found)


def test_an_adapter_is_its_files_and_not_its_name(tmp_path: Path) -> None:
    one, copy = adapter(tmp_path, "one", b"1"), adapter(tmp_path, "copy", b"1")
    identities = identities_of()
    assert identities.of(request(lora_request=one)) == identities.of(request(lora_request=copy))


def test_an_adapter_without_files_is_refused() -> None:
    nowhere = SimpleNamespace(lora_name="nowhere", lora_path="/none")
    with pytest.raises(InvalidInput):
        identities_of().of(request(lora_request=nowhere))


def test_a_request_is_what_it_was_until_its_adapter_changes(tmp_path: Path) -> None:
    identities = identities_of()
    plain, adapted = request(), request(lora_request=adapter(tmp_path, "one", b"1"))
    for one in (plain, adapted):
        identities.of(one)
        assert identities.holds(one)
    (tmp_path / "one" / "adapter_model.safetensors").write_bytes(b"longer")
    assert identities.holds(plain)
    assert not identities.holds(adapted)


def test_an_adapter_that_can_not_be_announced_keeps_back_nothing_else(tmp_path: Path) -> None:
    identities = identities_of()
    path = adapter(tmp_path, "one", b"1").lora_path
    for name in ("sql", "a\nb", "x" * (NAME_MAX + 1)):
        one = request(lora_request=SimpleNamespace(lora_name=name, lora_path=path))
        assert identities.of(one) is not None
    assert KeySpace.decoded(identities.space.encoded()).adapters.keys() == {"sql"}


def test_no_more_adapters_are_announced_than_a_space_may_have() -> None:
    many = {f"adapter {number}": "weights" for number in range(ADAPTERS_MAX + 1)}
    known = announceable(many)
    assert KeySpace.decoded(KeySpace(schema="", adapters=known).encoded()).adapters == known
    assert many.keys() - known.keys() == {"adapter 0"}  # it was used first


@pytest.mark.parametrize("version", ["x" * 1024, "a\nb"])
def test_the_name_of_a_version_may_be_any_that_weights_have(version: str) -> None:
    identities = RequestIdentities(BLOCK, PLAIN, WeightsEpoch(version))
    assert KeySpace.decoded(identities.space.encoded()) == identities.space


def test_embeddings_have_no_identity() -> None:
    assert identities_of().of(request(prompt_embeds=object())) is None


def test_text_before_an_image_is_shared_and_nothing_from_the_image_on() -> None:
    plain = keys(request())
    cat = keys(request(mm_features=[image("cat", 2 * BLOCK + 3)]))
    dog = keys(request(mm_features=[image("dog", 2 * BLOCK + 3)]))
    assert plain[:2] == cat[:2] == dog[:2]
    assert len({*plain[2:], *cat[2:], *dog[2:]}) == 9


def test_an_image_counts_in_every_block_that_has_a_part_of_it() -> None:
    long = [image("cat", BLOCK + 3, 2 * BLOCK)]
    identity = identities_of().of(request(mm_features=long))
    assert identity is not None
    assert sorted(identity.extras) == [1, 2, 3]


def test_an_image_that_ends_with_a_block_is_not_in_the_next() -> None:
    identity = identities_of().of(request(mm_features=[image("cat", BLOCK, BLOCK)]))
    assert identity is not None
    assert sorted(identity.extras) == [1]


def test_the_place_and_the_order_of_images_count() -> None:
    found = [
        keys(request(mm_features=features))
        for features in (
            [image("cat", 0, 2)],
            [image("cat", 1, 2)],
            [image("cat", 0, 2), image("dog", 3, 2)],
            [image("dog", 0, 2), image("cat", 3, 2)],
        )
    ]
    assert len({one[0] for one in found}) == 4


def test_a_later_turn_with_another_image_shares_the_turns_before() -> None:
    cat, dog = image("cat", 3), image("dog", 3 * BLOCK)
    assert keys(request(mm_features=[cat]))[:3] == keys(request(mm_features=[cat, dog]))[:3]
