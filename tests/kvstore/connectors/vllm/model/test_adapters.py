"""Adapters whose files change: neither what was computed before nor what comes after is shared."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from tiffin.kvstore.connectors.vllm.model.adapters import Adapters
from tiffin.kvstore.connectors.vllm.model.model_files import ADAPTER
from tiffin.kvstore.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

WEIGHTS = "adapter_model.safetensors"


def adapter(folder: Path, *, name: str = "a", weights: bytes = b"1") -> Any:
    """vLLM's request for an adapter, and its files."""
    folder.mkdir(exist_ok=True)
    (folder / WEIGHTS).write_bytes(weights)
    return SimpleNamespace(lora_name=name, lora_path=str(folder))


def overwrite(folder: Path) -> None:
    """As many other bytes in the same file, at what claims to be the same time."""
    path = folder / WEIGHTS
    stat = path.stat()
    path.write_bytes(b"2")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def replace(folder: Path) -> None:
    (folder / "new").write_bytes(b"2")
    (folder / "new").rename(folder / WEIGHTS)


def remove(folder: Path) -> None:
    (folder / WEIGHTS).unlink()


def scale(folder: Path) -> None:
    (folder / ADAPTER).write_text('{"lora_alpha": 2}')


def test_files_that_stay_are_the_same_adapter(tmp_path: Path) -> None:
    adapters, one = Adapters(), adapter(tmp_path)
    first = adapters.fingerprint(one)
    assert adapters.unchanged(one)
    assert adapters.fingerprint(one) == first


@pytest.mark.parametrize("change", [overwrite, replace, remove, scale])
def test_an_adapter_whose_files_have_changed_is_refused_for_good(
    tmp_path: Path, change: Callable[[Path], None]
) -> None:
    adapters, one = Adapters(), adapter(tmp_path)
    adapters.fingerprint(one)
    change(tmp_path)
    assert not adapters.unchanged(one)
    with pytest.raises(InvalidInput, match="new path"):
        adapters.fingerprint(one)
    adapter(tmp_path)  # the bytes of before
    assert not adapters.unchanged(one)


def test_a_change_shows_to_the_next_request_as_well(tmp_path: Path) -> None:
    adapters, one = Adapters(), adapter(tmp_path)
    adapters.fingerprint(one)
    replace(tmp_path)
    with pytest.raises(InvalidInput, match="have changed"):
        adapters.fingerprint(one)


def test_a_change_while_the_files_are_read_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = adapter(tmp_path)

    def read(folder: Path) -> str:
        replace(folder)
        return "half of each"

    monkeypatch.setattr(f"{Adapters.__module__}.files_fingerprint", read)
    with pytest.raises(InvalidInput, match="have changed"):
        Adapters().fingerprint(one)


def test_changed_weights_at_a_new_path_are_another_adapter(tmp_path: Path) -> None:
    """And the requests of before, which have its weights from then on, are nobody's."""
    adapters, one = Adapters(), adapter(tmp_path / "1")
    first = adapters.fingerprint(one)
    two = adapter(tmp_path / "2", weights=b"2")
    assert adapters.fingerprint(two) != first
    assert adapters.unchanged(two)
    assert not adapters.unchanged(one)
    with pytest.raises(InvalidInput, match="new path"):
        adapters.fingerprint(one)


def test_changed_weights_under_a_new_name_are_another_adapter(tmp_path: Path) -> None:
    adapters, one = Adapters(), adapter(tmp_path)
    first = adapters.fingerprint(one)
    two = adapter(tmp_path, name="b", weights=b"2")
    assert adapters.fingerprint(two) != first
    assert not adapters.unchanged(one)


def test_an_adapter_that_could_not_be_read_has_no_content(tmp_path: Path) -> None:
    adapters, one = Adapters(), adapter(tmp_path)
    remove(tmp_path)
    with pytest.raises(InvalidInput, match="no weights"):
        adapters.fingerprint(one)
    assert not adapters.unchanged(one)
    adapter(tmp_path)
    assert adapters.fingerprint(one)
