"""`kv_connector_extra_config`: what is wrong in it is refused by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from fakepool import SCHEMA

from tiffin.kvstore.connectors.vllm.settings import Settings, read
from tiffin.kvstore.errors import InvalidInput

if TYPE_CHECKING:
    from pathlib import Path

URL = "unix:/run/tiffin/node.sock"


def test_the_url_is_enough() -> None:
    assert read({"url": URL}) == Settings(url=URL)
    assert read({"url": URL}).secret() == b""


def test_all_settings_can_be_set() -> None:
    chosen: dict[str, Any] = {
        "url": URL,
        "engine": "vllm-0",
        "namespace": "tenant",
        "secret_file": "/run/secret",
        "model_fingerprint": "llama-3",
        "weights_version": "7",
        "weights_version_file": None,
        "block_tokens": 256,
        "verify": "sampled",
        "loading": "asynchronous",
        "save": "second",
        "layerwise": "always",
        "load_tokens_min": 64,
        "save_tokens_min": 128,
        "lookup_timeout_s": 0.1,
        "handoff_timeout_s": 0.5,
        "prefill_timeout_s": 4,
        "load_timeout_s": 2,
        "save_timeout_s": 3.5,
        "pin_memory": False,
        "hbm_bytes": "8GiB",
    }
    settings = read(chosen)
    assert {name: getattr(settings, name) for name in chosen} == chosen
    assert set(chosen) == set(Settings.__struct_fields__)
    assert settings.hbm_nbytes() == 8 << 30
    assert read({"url": URL, "hbm_bytes": 5000}).hbm_nbytes() == 5000


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({}, 'needs "url"'),
        ({"url": 5}, r"\$\.url"),
        ({"url": "nonsense"}, "nonsense"),
        ({"url": URL, "blok_tokens": 512}, "blok_tokens"),
        ({"url": URL, "block_tokens": "many"}, r"\$\.block_tokens"),
        ({"url": URL, "verify": "never"}, r"\$\.verify"),
        ({"url": URL, "loading": "eager"}, r"\$\.loading"),
        ({"url": URL, "hbm_bytes": "some"}, "hbm_bytes: 'some' is not a size"),
        ({"url": URL, "hbm_bytes": -1}, "hbm_bytes: .* negative"),
        (
            {"url": URL, "weights_version": "7", "weights_version_file": "/v"},
            "weights_version and weights_version_file",
        ),
        ({"url": URL, "load_tokens_min": -1}, "load_tokens_min=-1"),
        ({"url": URL, "save_tokens_min": -5}, "save_tokens_min=-5"),
        ({"url": URL, "block_tokens": 0}, "block_tokens=0"),
        ({"url": URL, "block_tokens": -512}, "block_tokens=-512"),
        ({"url": URL, "lookup_timeout_s": -1}, "lookup_timeout_s"),
        ({"url": URL, "load_timeout_s": float("nan")}, "load_timeout_s"),
        ({"url": URL, "save_timeout_s": -0.5}, "save_timeout_s"),
        ({"url": URL, "namespace": "x" * 1000}, r"namespace: .* at most 1024 bytes"),
        ({"url": URL, "namespace": "\ud800"}, "namespace"),
    ],
)
def test_what_is_wrong_is_named(extra: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        read(extra)


@pytest.mark.parametrize(
    ("layerwise", "save", "by_layer"),
    [
        ("always", "always", True),
        ("always", "second", False),
        ("auto", "always", False),
        ("never", "always", False),
    ],
)
def test_blocks_are_saved_by_layer_where_both_are_asked_for(
    layerwise: str, save: str, by_layer: bool
) -> None:
    assert read({"url": URL, "layerwise": layerwise, "save": save}).saves_by_layer is by_layer


def test_the_secret_is_read_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"0123456789abcdef\n")
    assert read({"url": URL, "secret_file": str(path)}).secret() == b"0123456789abcdef"


def test_a_secret_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    settings = read({"url": URL, "secret_file": str(tmp_path / "none")})
    with pytest.raises(InvalidInput, match=r"secret_file.*none"):
        settings.secret()


def test_a_secret_that_is_too_long_is_refused_at_the_start(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"x" * 65)
    settings = read({"url": URL, "secret_file": str(path)})
    with pytest.raises(InvalidInput, match=r"secret_file: .* at most 64 bytes"):
        settings.secret()


def test_an_adapter_and_a_salt_find_room_in_the_longest_namespace() -> None:
    namespace = read({"url": URL, "namespace": "x" * 991}).namespace
    SCHEMA.prefix([1], namespace=f"{namespace}\0{32 * 'f'}")
