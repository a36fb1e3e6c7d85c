"""Which engines and models the connector takes, and what decides the bytes of their pages.

Raises InvalidInput that names the setting or the layer, at the engine's start: a model that this
connector can't store must not be stored in part.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....errors import InvalidInput
from ....format.layer_spec import DTYPES
from ....url import Pool, parse_url
from ..pages.engine_pages import PageFormat
from ..pages.page_schema import CacheShape
from ..pages.rank_share import rank_share
from ..pages.token_schema import ModelShape
from .model_files import files_fingerprint

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..settings import Settings

# Releases of vLLM that this connector was run with, by their first two numbers.
VERSIONS = ("0.32",)
_SPEC = "FullAttentionSpec"
# Devices whose pages can be copied, as vLLM's platforms name them: opaque pages of a CPU, rows of
# K and V of a GPU. ROCm calls itself cuda too, but has other layouts, and no copies are written.
DEVICES = ("cpu", "cuda")
_UNSCALED, _SCALED_BY_LAYER = 0, 1  # vLLM's KVQuantMode: NONE, FP8_PER_TENSOR
_UNQUANTISED = ("float32", "bfloat16", "float16")
# `--kv-cache-dtype` by what the rows are then. Only fp8 with one scale for each layer, which is in
# the model's files or 1, so that equal bytes are equal numbers.
_FP8 = {"fp8": "float8_e4m3", "fp8_e4m3": "float8_e4m3", "fp8_e5m2": "float8_e5m2"}
_FP8_OF_MODEL = "float8_e4m3"  # where "auto" leaves it to the checkpoint, vLLM takes "fp8"


def check_version(version: str) -> None:
    """Raise InvalidInput for a release of vLLM that this connector does not know."""
    if ".".join(version.split(".")[:2]) not in VERSIONS:
        raise InvalidInput(
            f"vLLM {version}; this release of tiffin works with {', '.join(VERSIONS)}: install "
            f"vllm=={VERSIONS[-1]}.* or another release of tiffin"
        )


def check_device(device: str) -> None:
    """Raise InvalidInput for a device whose pages the connector can't copy."""
    if device not in DEVICES:
        raise InvalidInput(
            f"vLLM on {device}: this release of tiffin moves the pages of engines on "
            f"{' and '.join(DEVICES)}"
        )


def check_engine(config: Any, cache: Any) -> None:
    """Raise InvalidInput for an engine that can't share its cache; `config` is a VllmConfig,
    `cache` a KVCacheConfig."""
    parallel = config.parallel_config
    refused = {
        "decode_context_parallel_size": getattr(parallel, "decode_context_parallel_size", 1) > 1,
        "prefill_context_parallel_size": getattr(parallel, "prefill_context_parallel_size", 1) > 1,
        "speculative_config": config.speculative_config is not None,
    }
    for name, wrong in refused.items():
        if wrong:
            raise InvalidInput(f"{name} is set: the connector does not store such caches yet")
    if getattr(parallel, "distributed_executor_backend", None) == "external_launcher":
        raise InvalidInput(
            "distributed_executor_backend is external_launcher: every worker then has a scheduler "
            "of its own, and they would not load and save the same blocks in the same steps"
        )
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


def check_hosts(config: Any, url: str) -> None:
    """Raise InvalidInput if workers of one engine would store at the nodes of several hosts, where
    no block would ever have all its parts."""
    hosts, pool = getattr(config.parallel_config, "nnodes_within_dp", 1), parse_url(url)
    if hosts > 1 and not (isinstance(pool, Pool) and pool.home == "none"):
        raise InvalidInput(
            f"nnodes: workers of one engine on {hosts} hosts have to store at one node, not each "
            "at that of its host; add home=none to the pool's URL"
        )


def check_layers(names: Sequence[str], layers: tuple[int, int], *, named: bool) -> None:
    """Raise InvalidInput unless a worker has the model's `layers`, (first, end), in order. `named`:
    the number in each name says which it is, as it must where others have the other layers."""
    first, end = layers
    if len(names) != end - first:
        raise InvalidInput(f"{len(names)} layers; the blocks have {end - first} of this worker")
    for layer, name in zip(range(first, end), names, strict=True):
        if named and [int(part) for part in name.split(".") if part.isdigit()] != [layer]:
            raise InvalidInput(
                f"pipeline_parallel_size: {name} is where layer {layer} was expected; the "
                f"connector stores stages of which all layers, here {first} to {end - 1}, keep K "
                "and V"
            )


def cache_shape(
    config: Any, cache: Any, settings: Settings, version: str, stages: Sequence[int] = ()
) -> CacheShape:
    """What decides the bytes of this engine's pages; `stages`: the layers of each pipeline stage,
    if there are several. Raises InvalidInput if the model's files can't be read."""
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
        layers=sum(stages) or len(group.layer_names),
        page_tokens=int(spec.block_size),
        page_bytes=int(spec.page_size_bytes),
        ranks=_ranks(config),
    )


def model_shape(
    config: Any, cache: Any, settings: Settings, stages: Sequence[int] = ()
) -> ModelShape:
    """What decides the numbers in the cache of a CUDA engine; `stages` as in `cache_shape`. Raises
    InvalidInput for a cache whose rows are not plain K and V of the model's heads, for sleep mode,
    or if the model's files can't be read."""
    model = config.model_config
    (group,) = cache.kv_cache_groups
    spec = group.kv_cache_spec
    if model.enable_sleep_mode:
        raise InvalidInput(
            "enable_sleep_mode is set: a sleeping engine gives up its pages, perhaps while they "
            "are copied, and may wake with other weights"
        )
    kv_heads, ranks = int(model.get_total_num_kv_heads()), _ranks(config)
    _, held = rank_share(kv_heads, 0, ranks).heads
    if spec.num_kv_heads != held:
        raise InvalidInput(
            f"layer {group.layer_names[0]} has {spec.num_kv_heads} KV heads on each of {ranks} "
            f"ranks; of a model of {kv_heads}, {held} were expected"
        )
    return ModelShape(
        weights=settings.model_fingerprint or files_fingerprint(_folder(model)),
        config=_config_text(model),
        dtype=str(model.dtype),
        cache_dtype=_cache_dtype(config, group),
        layers=sum(stages) or len(group.layer_names),
        kv_heads=kv_heads,
        head_dim=int(spec.head_size),
        v_head_dim=int(spec.head_size_v),
    )


def page_format(config: Any, cache: Any) -> PageFormat:
    """The pages of one rank of a CUDA engine. Raises InvalidInput that names a layer, for pages
    that its attention backend packs in a way of its own."""
    (group,) = cache.kv_cache_groups
    spec = group.kv_cache_spec
    itemsize = DTYPES[_cache_dtype(config, group)].itemsize
    form = PageFormat(
        page_tokens=int(spec.block_size),
        heads=int(spec.num_kv_heads),
        head_dim=int(spec.head_size),
        v_head_dim=int(spec.head_size_v),
        itemsize=itemsize,
        planes=spec.num_head_slots == 2,
    )
    # A backend that packs its pages itself says so in these two fields (`customize_spec`).
    packed = spec.num_head_slots, spec.state_content_bytes
    plane_bytes = form.heads * form.head_dim * itemsize
    planes = (2, plane_bytes) if form.head_dim == form.v_head_dim else None
    if spec.tokens_per_state != 1 or packed not in ((None, None), planes):
        raise InvalidInput(
            f"layer {group.layer_names[0]}: its attention backend packs pages in a way of its own "
            f"({packed[0]} slots of {packed[1]} bytes per token); choose another "
            "--attention-backend"
        )
    return form


def _ranks(config: Any) -> int:
    return int(config.parallel_config.tensor_parallel_size)


def _cache_dtype(config: Any, group: Any) -> str:
    """The dtype of the cache's rows, as schemas name it. Raises InvalidInput."""
    spec, asked = group.kv_cache_spec, str(config.cache_config.cache_dtype)
    number, mode = str(spec.dtype).removeprefix("torch."), int(spec.kv_quant_mode)
    if mode == _UNSCALED and number in _UNQUANTISED:
        return number
    if mode == _SCALED_BY_LAYER and asked in (*_FP8, "auto"):
        return _FP8.get(asked, _FP8_OF_MODEL)
    raise InvalidInput(
        f"layer {group.layer_names[0]} has a cache of {number}, --kv-cache-dtype {asked}; the "
        f"connector stores {', '.join(_UNQUANTISED)} and {', '.join(_FP8)}: other rows have scales "
        "that are not part of the model"
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
