"""Engines and models that the connector can't store are refused, by the setting or the layer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")

from tiffin.kvstore.connectors.vllm.model.compatibility import (  # noqa: E402
    cache_shape,
    check_engine,
    check_hosts,
    check_layers,
    check_version,
)
from tiffin.kvstore.connectors.vllm.model.model_files import files_fingerprint  # noqa: E402
from tiffin.kvstore.connectors.vllm.settings import Settings  # noqa: E402
from tiffin.kvstore.errors import InvalidInput  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path


class FullAttentionSpec(SimpleNamespace):
    """As vLLM's, in what the connector reads."""


class SlidingWindowSpec(SimpleNamespace):
    pass


def group_of(spec: Any, *layers: str) -> Any:
    return SimpleNamespace(kv_cache_spec=spec, layer_names=list(layers))


def cache_of(*groups: Any) -> Any:
    return SimpleNamespace(kv_cache_groups=list(groups), kv_cache_layout="NHD")


FULL = group_of(FullAttentionSpec(block_size=16, page_size_bytes=4096), "layers.0", "layers.1")


class HFConfig:
    def __init__(self, **values: Any) -> None:
        self._values = values

    def to_dict(self) -> dict[str, Any]:
        return {"_name_or_path": "/some/path", "transformers_version": "5.0", **self._values}


def config_of(model: str = "model", **changes: Any) -> Any:
    parallel = {"tensor_parallel_size": 2, "pipeline_parallel_size": 1}
    others = {"speculative_config": None}
    for name, value in changes.items():
        (parallel if name.endswith("_size") else others)[name] = value
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**parallel),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        model_config=SimpleNamespace(
            model=model,
            revision=None,
            dtype=torch.bfloat16,
            quantization=None,
            hf_config=HFConfig(rope_theta=1.0),
        ),
        **others,
    )


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1", "0.32.0+cpu", "0.32.1rc1"])
def test_releases_that_were_run_are_taken(version: str) -> None:
    check_version(version)


@pytest.mark.parametrize("version", ["0.31.2", "0.33.0", "1.32.0", "dev"])
def test_another_release_is_refused_with_one_that_works(version: str) -> None:
    with pytest.raises(InvalidInput, match=rf"{version}.*vllm==0\.32"):
        check_version(version)


def test_full_attention_with_tensor_parallelism_is_taken() -> None:
    check_engine(config_of(), cache_of(FULL))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("decode_context_parallel_size", 2),
        ("prefill_context_parallel_size", 2),
        ("speculative_config", object()),
    ],
)
def test_settings_that_it_can_not_store_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidInput, match=name):
        check_engine(config_of(**{name: value}), cache_of(FULL))


def test_pipeline_stages_are_taken_but_no_scheduler_in_every_worker() -> None:
    config = config_of(pipeline_parallel_size=2)
    check_engine(config, cache_of(FULL))
    config.parallel_config.distributed_executor_backend = "external_launcher"
    with pytest.raises(InvalidInput, match="distributed_executor_backend is external_launcher"):
        check_engine(config, cache_of(FULL))


def test_workers_on_several_hosts_have_to_store_at_one_node() -> None:
    config = config_of(pipeline_parallel_size=2)
    check_hosts(config, "unix:/run/node.sock")
    config.parallel_config.nnodes_within_dp = 2
    check_hosts(config, "redis://10.0.0.1?home=none")
    for url in ("unix:/run/node.sock", "redis://10.0.0.1", "tiffin://10.0.0.1:7700"):
        with pytest.raises(InvalidInput, match=r"nnodes: .* on 2 hosts .* home=none"):
            check_hosts(config, url)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["model.layers.2.attn"], "1 layers; the blocks have 2 of this worker"),
        (["model.layers.2.attn", "model.layers.4.attn"], r"layers\.4\.attn is where layer 3"),
        (["model.layers.3.attn", "model.layers.2.attn"], r"layers\.3\.attn is where layer 2"),
        (["model.layers.2.attn", "model.attn"], r"model\.attn is where layer 3 .* 2 to 3"),
    ],
)
def test_layers_that_are_not_the_stages_are_refused_by_name(names: list[str], said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        check_layers(names, (2, 4), named=True)
    check_layers(["model.layers.2.attn", "model.layers.3.attn"], (2, 4), named=True)
    check_layers(["a", "b"], (0, 2), named=False)


def test_layers_that_forget_tokens_are_refused_by_name() -> None:
    window = group_of(SlidingWindowSpec(), "layers.7")
    with pytest.raises(InvalidInput, match=r"layers\.7 has a SlidingWindowSpec"):
        check_engine(config_of(), cache_of(window))
    with pytest.raises(InvalidInput, match=r"FullAttentionSpec in layers\.0; SlidingWindowSpec"):
        check_engine(config_of(), cache_of(FULL, window))


def test_the_shape_is_what_the_engine_says(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    shape = cache_shape(config_of(str(tmp_path)), cache_of(FULL), Settings(url="x"), "0.32.0")
    assert shape.weights == files_fingerprint(tmp_path)
    assert shape.backend.startswith("cpu ")
    assert shape.backend.endswith("vllm 0.32.0")
    assert (shape.dtype, shape.cache_dtype, shape.layout) == ("torch.bfloat16", "auto", "NHD")
    assert (shape.layers, shape.page_tokens, shape.page_bytes, shape.ranks) == (2, 16, 4096, 2)


def test_paths_and_releases_in_a_models_configuration_do_not_count(tmp_path: Path) -> None:
    settings = Settings(url="x", model_fingerprint="the same")
    one, other = config_of("a"), config_of("b")
    other.model_config.hf_config = HFConfig(
        rope_theta=1.0, _name_or_path="/other", transformers_version="5.1"
    )
    shapes = [cache_shape(config, cache_of(FULL), settings, "0.32.0") for config in (one, other)]
    assert shapes[0].fingerprint() == shapes[1].fingerprint()
    other.model_config.hf_config = HFConfig(rope_theta=2.0)
    changed = cache_shape(other, cache_of(FULL), settings, "0.32.0")
    assert changed.fingerprint() != shapes[0].fingerprint()


def test_a_fingerprint_in_the_settings_replaces_the_files() -> None:
    settings = Settings(url="x", model_fingerprint="named")
    assert cache_shape(config_of(), cache_of(FULL), settings, "0.32.0").weights == "named"


def test_a_model_whose_files_are_elsewhere_needs_a_fingerprint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(InvalidInput, match="model_fingerprint"):
        cache_shape(config_of("no/such-model"), cache_of(FULL), Settings(url="x"), "0.32.0")
