"""What engines store, by their device; GPUs whose pages can't be stored are refused by name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from tiffin.kvstore import LayerSpec  # noqa: E402
from tiffin.kvstore.connectors.vllm.model.compatibility import (  # noqa: E402
    check_engine,
    model_shape,
    page_format,
)
from tiffin.kvstore.connectors.vllm.pages.engine_blocks import (  # noqa: E402
    engine_blocks,
    engine_copier,
)
from tiffin.kvstore.connectors.vllm.pages.engine_pages import PageFormat  # noqa: E402
from tiffin.kvstore.connectors.vllm.pages.page_copier import PageCopier  # noqa: E402
from tiffin.kvstore.connectors.vllm.settings import Settings  # noqa: E402
from tiffin.kvstore.errors import InvalidInput, SchemaError  # noqa: E402

if TYPE_CHECKING:
    from tiffin.kvstore import KVSchema

LAYERS = ["layers.0", "layers.1"]
SETTINGS = Settings(url="x", model_fingerprint="w", block_tokens=64)


class FullAttentionSpec(SimpleNamespace):
    """As vLLM's, in what the connector reads."""


def cache_of(spec: Any) -> Any:
    group = SimpleNamespace(kv_cache_spec=spec, layer_names=LAYERS)
    return SimpleNamespace(kv_cache_groups=[group], kv_cache_layout="LBNHC")


def config_of(cache_dtype: str = "auto", ranks: int = 2) -> Any:
    return SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=ranks),
        speculative_config=None,
        cache_config=SimpleNamespace(cache_dtype=cache_dtype),
        model_config=SimpleNamespace(
            model="model",
            revision=None,
            dtype=torch.bfloat16,
            quantization=None,
            hf_config=SimpleNamespace(to_dict=lambda: {"rope_theta": 1.0}),
            get_total_num_kv_heads=lambda: 4,
            enable_sleep_mode=False,
        ),
    )


CPU_CACHE = cache_of(FullAttentionSpec(block_size=16, page_size_bytes=4096))


def gpu_spec(**changes: Any) -> FullAttentionSpec:
    """Of a rank of two, of a model of four KV heads."""
    fields = {
        "block_size": 16,
        "num_kv_heads": 2,
        "head_size": 64,
        "head_size_v": 64,
        "dtype": torch.bfloat16,
        "kv_quant_mode": 0,
        "num_head_slots": None,
        "state_content_bytes": None,
        "tokens_per_state": 1,
    }
    return FullAttentionSpec(**{**fields, **changes})


def gpu_cache(**changes: Any) -> Any:
    return cache_of(gpu_spec(**changes))


@pytest.mark.parametrize("device", ["xpu", "rocm", "tpu", ""])
def test_devices_whose_pages_can_not_be_copied_are_refused_by_name(device: str) -> None:
    with pytest.raises(InvalidInput, match=f"vLLM on {device}: .* cpu and cuda"):
        engine_blocks(device, config_of(), gpu_cache(), SETTINGS, "0.32.0")


def test_a_cpu_has_opaque_pages_and_a_gpu_rows_of_tokens() -> None:
    check_engine(config_of(), CPU_CACHE)
    cpu = engine_blocks("cpu", config_of(), CPU_CACHE, SETTINGS, "0.32.0")
    assert (cpu.form, cpu.kv_heads, cpu.page_tokens, cpu.ranks) == (None, 2, 16, 2)
    gpu = engine_blocks("cuda", config_of(), gpu_cache(), SETTINGS, "0.32.0")
    assert gpu.form == PageFormat(16, 2, 64, 64, 2)
    assert (gpu.kv_heads, gpu.page_tokens, gpu.ranks) == (4, 16, 2)
    (layer, other) = gpu.schema.layers
    assert layer == other == LayerSpec.gqa(kv_heads=4, head_dim=64, dtype="bfloat16")
    assert gpu.schema != cpu.schema


def test_gpus_share_blocks_whatever_their_pages_layouts_and_ranks_are() -> None:
    def schema(config: Any, cache: Any) -> KVSchema:
        return engine_blocks("cuda", config, cache, SETTINGS, "0.32.0").schema

    one = schema(config_of(), gpu_cache())
    other_layout = gpu_cache(block_size=64, num_head_slots=2, state_content_bytes=2 * 64 * 2)
    other_layout.kv_cache_layout = "BLHNC"
    assert schema(config_of(), other_layout) == one
    for ranks, heads in ((1, 4), (4, 1), (8, 1)):
        assert schema(config_of(ranks=ranks), gpu_cache(num_kv_heads=heads)) == one
    assert schema(config_of("fp8"), gpu_cache(dtype=torch.uint8, kv_quant_mode=1)) != one


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_stages_share_blocks_with_engines_that_have_other_ones(device: str) -> None:
    """vLLM says the layers of one stage only."""
    cache = {"cpu": CPU_CACHE, "cuda": gpu_cache()}[device]
    config = config_of()
    whole = engine_blocks(device, config, cache, SETTINGS, "0.32.0")
    one_layer = cache_of(cache.kv_cache_groups[0].kv_cache_spec)
    one_layer.kv_cache_groups[0].layer_names = LAYERS[:1]
    staged = engine_blocks(device, config, one_layer, SETTINGS, "0.32.0", (1, 1))
    assert (staged.schema, staged.shape) == (whole.schema, whole.shape)
    assert (whole.workers, staged.workers) == (2, 4)
    more = engine_blocks(device, config, one_layer, SETTINGS, "0.32.0", (1, 2))
    assert more.schema != whole.schema
    with pytest.raises(SchemaError, match="the layers of a stage is 0"):
        engine_blocks(device, config, one_layer, SETTINGS, "0.32.0", (2, 0))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_stages_copier_is_of_its_layers(device: str) -> None:
    cache = {"cpu": CPU_CACHE, "cuda": gpu_cache()}[device]
    pages = {
        "cpu": torch.zeros(9, 4096, dtype=torch.uint8),
        "cuda": torch.zeros(9, 2, 16, 128, dtype=torch.bfloat16),
    }[device]
    blocks = engine_blocks(device, config_of(), cache, SETTINGS, "0.32.0", (1, 1))
    copier = engine_copier(blocks, {"layers.1": pages}, 0, stage=1)
    assert copier.block_bytes == blocks.schema.block_bytes // 4
    payload = np.arange(blocks.schema.block_bytes, dtype=np.uint64).astype(np.uint8)
    copier.scatter([payload], [3, 8, 1, 0])
    back = np.zeros_like(payload)
    copier.gather([back], [3, 8, 1, 0])
    heads = blocks.share(0, 1).heads
    mine = np.concatenate(
        [np.arange(span.offset, span.end) for span in blocks.schema.ranges(1, heads)]
    )
    assert (back[mine] == payload[mine]).all()
    assert back.sum() == back[mine].sum()
    with pytest.raises(InvalidInput, match=r"layers\.0 is where layer 1 was expected"):
        engine_copier(blocks, {"layers.0": pages}, 0, stage=1)
    whole = engine_blocks(device, config_of(), cache, SETTINGS, "0.32.0")
    with pytest.raises(InvalidInput, match="1 layers; the blocks have 2"):
        engine_copier(whole, {"layers.0": pages}, 0)


@pytest.mark.parametrize(
    ("asked", "number", "mode", "stored"),
    [
        ("auto", torch.float16, 0, "float16"),
        ("bfloat16", torch.bfloat16, 0, "bfloat16"),
        ("auto", torch.float32, 0, "float32"),
        ("fp8", torch.uint8, 1, "float8_e4m3"),
        ("fp8_e4m3", torch.uint8, 1, "float8_e4m3"),
        ("fp8_e5m2", torch.uint8, 1, "float8_e5m2"),
        ("auto", torch.uint8, 1, "float8_e4m3"),
    ],
)
def test_rows_are_stored_as_they_are(asked: str, number: Any, mode: int, stored: str) -> None:
    cache = gpu_cache(dtype=number, kv_quant_mode=mode)
    shape = model_shape(config_of(asked), cache, SETTINGS)
    assert shape.cache_dtype == stored
    assert page_format(config_of(asked), cache).itemsize == number.itemsize


@pytest.mark.parametrize(
    ("asked", "number", "mode"),
    [
        ("fp8_per_token_head", torch.uint8, 3),
        ("int8_per_token_head", torch.int8, 2),
        ("nvfp4", torch.uint8, 5),
        ("fp8_inc", torch.float8_e4m3fn, 1),
        ("turboquant_k8v4", torch.uint8, 6),
    ],
)
def test_rows_with_scales_of_their_own_are_refused(asked: str, number: Any, mode: int) -> None:
    cache = gpu_cache(dtype=number, kv_quant_mode=mode)
    for ask in (page_format, lambda *engine: model_shape(*engine, SETTINGS)):
        with pytest.raises(InvalidInput, match=rf"layers\.0 .*--kv-cache-dtype {asked}.*scales"):
            ask(config_of(asked), cache)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_head_slots": 4, "state_content_bytes": 36},
        {"state_content_bytes": 264},
        {"num_head_slots": 2, "state_content_bytes": 512},
        {"num_head_slots": 2, "state_content_bytes": 256, "head_size_v": 32},
        {"tokens_per_state": 4},
    ],
)
def test_pages_that_a_backend_packs_in_its_own_way_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match=r"layers\.0: .*--attention-backend"):
        page_format(config_of(), gpu_cache(**changes))


def test_separate_planes_of_k_and_v_are_taken() -> None:
    cache = gpu_cache(num_head_slots=2, state_content_bytes=2 * 64 * 2)
    assert page_format(config_of(), cache).planes
    assert not page_format(config_of(), gpu_cache()).planes


def test_numbers_of_ranks_that_do_not_fit_the_heads_are_refused() -> None:
    with pytest.raises(InvalidInput, match="tensor_parallel_size is 3: 4 KV heads"):
        model_shape(config_of(ranks=3), gpu_cache(), SETTINGS)
    with pytest.raises(InvalidInput, match=r"layers\.0 has 2 KV heads on each of 1 ranks"):
        model_shape(config_of(ranks=1), gpu_cache(), SETTINGS)


def test_an_engine_that_may_sleep_is_refused() -> None:
    config = config_of()
    config.model_config.enable_sleep_mode = True
    with pytest.raises(InvalidInput, match="enable_sleep_mode"):
        engine_blocks("cuda", config, gpu_cache(), SETTINGS, "0.32.0")


def test_a_cpu_has_no_hbm_tier() -> None:
    wanted = msgspec.structs.replace(SETTINGS, hbm_bytes="1GiB")
    with pytest.raises(InvalidInput, match="hbm_bytes is set, and this engine has no GPU"):
        engine_blocks("cpu", config_of(), CPU_CACHE, wanted, "0.32.0")
    engine_blocks("cuda", config_of(), gpu_cache(), wanted, "0.32.0")


def test_an_engines_copier_is_of_its_device() -> None:
    blocks = engine_blocks("cuda", config_of(), gpu_cache(), SETTINGS, "0.32.0")
    layers = {name: torch.zeros(9, 2, 16, 128, dtype=torch.bfloat16) for name in LAYERS}
    copier = engine_copier(blocks, layers, 1)
    assert (copier.pages, copier.block_bytes) == (4, blocks.schema.block_bytes // 2)
    payload = np.arange(blocks.schema.block_bytes, dtype=np.uint64).astype(np.uint8)
    copier.scatter([payload], [3, 8, 1, 0])
    back = np.zeros_like(payload)
    copier.gather([back], [3, 8, 1, 0])
    mine = np.concatenate(
        [np.arange(span.offset, span.end) for span in blocks.schema.ranges(heads=(2, 4))]
    )
    assert (back[mine] == payload[mine]).all()
    assert back.sum() == back[mine].sum()
    cpu = engine_blocks("cpu", config_of(), CPU_CACHE, SETTINGS, "0.32.0")
    pages = {name: torch.zeros(9, 4096, dtype=torch.uint8) for name in LAYERS}
    assert isinstance(engine_copier(cpu, pages, 0), PageCopier)
