"""Which engines and models the connector takes, and what decides the bytes of their pages.

Raises InvalidInput that names the setting or the layer, at the engine's start: a model that this
connector can't store must not be stored in part.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import InvalidInput
from .model_files import files_fingerprint
from .page_schema import CacheShape

if TYPE_CHECKING:
    from .settings import Settings

# Releases of vLLM that this connector was run with, by their first two numbers.
VERSIONS = ("0.32",)
_SPEC = "FullAttentionSpec"


def check_version(version: str) -> None:
    """Raise InvalidInput for a release of vLLM that this connector does not know."""
    if ".".join(version.split(".")[:2]) not in VERSIONS:
        raise InvalidInput(
            f"vLLM {version}; this release of tiffin works with {', '.join(VERSIONS)}: install "
            f"vllm=={VERSIONS[-1]}.* or another release of tiffin"
        )


def check_engine(config: Any, cache: Any) -> None:
    """Raise InvalidInput for an engine that can't share its cache; `config` is a VllmConfig,
    `cache` a KVCacheConfig."""
    parallel = config.parallel_config
    refused = {
        "pipeline_parallel_size": getattr(parallel, "pipeline_parallel_size", 1) > 1,
        "decode_context_parallel_size": getattr(parallel, "decode_context_parallel_size", 1) > 1,
        "prefill_context_parallel_size": getattr(parallel, "prefill_context_parallel_size", 1) > 1,
        "speculative_config": config.speculative_config is not None,
    }
    for name, wrong in refused.items():
        if wrong:
            raise InvalidInput(f"{name} is set: the connector does not store such caches yet")
    if len(cache.kv_cache_groups) != 1:
        raise InvalidInput(
            "the model has several kinds of KV cache: "
            + "; ".join(
                f"{type(group.kv_cache_spec).__name__} in {group.layer_names[0]}"
                for group in cache.kv_cache_groups
            )
            + ". The connector stores models whose layers all keep every token"
        )
    (group,) = cache.kv_cache_groups
    if type(group.kv_cache_spec).__name__ != _SPEC:
        raise InvalidInput(
            f"layer {group.layer_names[0]} has a {type(group.kv_cache_spec).__name__}; the "
            f"connector stores layers with a {_SPEC}: K and V of every token"
        )


def cache_shape(config: Any, cache: Any, settings: Settings, version: str) -> CacheShape:
    """What decides the bytes of this engine's pages. Raises InvalidInput if the model's files can't
    be read."""
    model = config.model_config
    (group,) = cache.kv_cache_groups
    spec = group.kv_cache_spec
    return CacheShape(
        weights=settings.model_fingerprint or files_fingerprint(_folder(model)),
        config=_config_text(model),
        backend=f"cpu {_cpu_capability()} vllm {version}",
        dtype=str(model.dtype),
        cache_dtype=str(config.cache_config.cache_dtype),
        layout=str(cache.kv_cache_layout),
        layers=len(group.layer_names),
        page_tokens=int(spec.block_size),
        page_bytes=int(spec.page_size_bytes),
        ranks=int(config.parallel_config.tensor_parallel_size),
    )


def _cpu_capability() -> str:
    import torch  # here, because the rest of this module needs neither torch nor vLLM

    return str(torch.backends.cpu.get_cpu_capability())


def _folder(model: Any) -> Path:
    """The folder with the model's files. Raises InvalidInput."""
    folder = Path(model.model)
    if folder.is_dir():
        return folder
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(model.model, revision=model.revision, local_files_only=True))
    except Exception as error:
        raise InvalidInput(
            f"the files of {model.model} are not on this machine ({error}); name the weights by "
            '"model_fingerprint" in kv_connector_extra_config'
        ) from error


def _config_text(model: Any) -> str:
    """The model's configuration with all overrides, without names of paths and releases."""
    values = model.hf_config.to_dict()
    for name in ("_name_or_path", "transformers_version"):
        values.pop(name, None)
    values["quantization"] = str(model.quantization)
    return json.dumps(values, sort_keys=True, default=str)
