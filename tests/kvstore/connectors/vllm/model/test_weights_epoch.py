"""The epochs of an engine's weights."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from tiffin.kvstore.connectors.vllm.model.request_identity import RequestIdentities
from tiffin.kvstore.connectors.vllm.model.weights_epoch import WeightsEpoch
from tiffin.kvstore.errors import InvalidInput
from tiffin.kvstore.format.key_space import KeySpace

if TYPE_CHECKING:
    from pathlib import Path


def namespace(epoch: WeightsEpoch) -> str:
    request = SimpleNamespace(
        prompt_embeds=None, lora_request=None, cache_salt=None, mm_features=None
    )
    identity = RequestIdentities(16, KeySpace(schema=""), epoch).of(request)
    assert identity is not None
    return identity.namespace


def test_before_a_reset_engines_share_and_after_it_none_does() -> None:
    one, other = WeightsEpoch(), WeightsEpoch()
    assert namespace(one) == namespace(other) == ""
    names = set()
    for epoch in (one, one, other):
        epoch.reset()
        names.add(namespace(epoch))
    assert len(names | {""}) == 4


def test_engines_with_the_same_version_share() -> None:
    names = [namespace(WeightsEpoch(version)) for version in ("", "7", "7", "8")]
    assert names[1] == names[2]
    assert len(set(names)) == 3


def test_a_version_is_left_with_a_reset() -> None:
    epoch = WeightsEpoch("7")
    epoch.reset()
    assert namespace(epoch) not in ("", namespace(WeightsEpoch("7")))


def test_a_reset_takes_the_version_from_the_file(tmp_path: Path) -> None:
    file = tmp_path / "version"
    file.write_text("7\n")
    one = WeightsEpoch(file=str(file))
    assert namespace(one) == namespace(WeightsEpoch("7"))
    file.write_text("8\n")
    one.reset()
    assert namespace(one) == namespace(WeightsEpoch("8"))


def test_a_reset_to_the_same_version_shares_nothing(tmp_path: Path) -> None:
    """Somebody wants everything forgotten, or has forgotten to write the new version."""
    file = tmp_path / "version"
    file.write_text("7")
    epoch = WeightsEpoch(file=str(file))
    epoch.reset()
    assert namespace(epoch) != namespace(WeightsEpoch("7"))


@pytest.mark.parametrize("content", [None, b"", b" \n", b"\xff", b"x" * 1025])
def test_a_file_without_a_version_is_refused_and_ends_the_epoch(
    tmp_path: Path, content: bytes | None
) -> None:
    file = tmp_path / "version"
    file.write_text("7")
    epoch = WeightsEpoch(file=str(file))
    file.unlink()
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(InvalidInput, match="weights_version_file"):
        WeightsEpoch(file=str(file))
    with pytest.raises(InvalidInput, match="weights_version_file"):
        epoch.reset()
    assert namespace(epoch) not in ("", namespace(WeightsEpoch("7")))
