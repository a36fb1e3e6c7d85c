"""The fingerprint of a model's files: the same for the same weights, at any path."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tiffin.kvstore.connectors.vllm.model.model_files import (
    SAMPLE_BYTES,
    SAMPLES,
    files_fingerprint,
)
from tiffin.kvstore.errors import InvalidInput
from tiffin.kvstore.testing import random_bytes

if TYPE_CHECKING:
    from pathlib import Path

SIZE = 3 * SAMPLES * SAMPLE_BYTES


def folder_of(root: Path, name: str, *, seed: int = 1, size: int = SIZE) -> Path:
    folder = root / name
    folder.mkdir()
    for part in range(2):
        data = random_bytes(size, seed + part)
        (folder / f"model-{part}.safetensors").write_bytes(data.tobytes())
    return folder


def test_the_same_files_have_the_same_fingerprint_at_any_path(tmp_path: Path) -> None:
    one, other = folder_of(tmp_path, "one"), folder_of(tmp_path, "other")
    (other / "config.json").write_text("{}")  # no weights
    assert files_fingerprint(one) == files_fingerprint(other)
    assert len(files_fingerprint(one)) == 32


@pytest.mark.parametrize("size", [0, 100, SAMPLE_BYTES, SIZE])
def test_files_of_any_size_have_one(tmp_path: Path, size: int) -> None:
    one, other = folder_of(tmp_path, "one", size=size), folder_of(tmp_path, "other", size=size)
    assert files_fingerprint(one) == files_fingerprint(other)


def test_other_weights_have_another(tmp_path: Path) -> None:
    prints = {
        files_fingerprint(folder_of(tmp_path, "one")),
        files_fingerprint(folder_of(tmp_path, "trained", seed=2)),
        files_fingerprint(folder_of(tmp_path, "longer", size=SIZE + 1)),
    }
    assert len(prints) == 3


@pytest.mark.parametrize("at", [0, SIZE - 1])
def test_the_first_and_the_last_byte_count(tmp_path: Path, at: int) -> None:
    folder = folder_of(tmp_path, "one")
    before = files_fingerprint(folder)
    path = folder / "model-1.safetensors"
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    assert files_fingerprint(folder) != before


def test_names_count(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "one")
    before = files_fingerprint(folder)
    (folder / "model-1.safetensors").rename(folder / "model-2.safetensors")
    assert files_fingerprint(folder) != before


def test_a_folder_without_weights_is_refused_with_what_would_work(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("none here")
    with pytest.raises(InvalidInput, match="model_fingerprint"):
        files_fingerprint(tmp_path)


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="can't be read"):
        files_fingerprint(tmp_path / "none")


def test_an_adapter_with_another_scale_is_another_adapter(tmp_path: Path) -> None:
    """The same weights with another `lora_alpha` compute other numbers."""
    folder = folder_of(tmp_path, "adapter")
    found = {files_fingerprint(folder)}
    for alpha in (8, 16):
        (folder / "adapter_config.json").write_text(f'{{"lora_alpha": {alpha}}}')
        found.add(files_fingerprint(folder))
    assert len(found) == 3
