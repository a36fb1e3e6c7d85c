"""The schema of a Hugging Face model's KV cache, and the identity of the model.

Two models may share blocks only if they compute the same numbers, and their names do not show that:
a checkpoint may be retrained under its old name, and the same checkpoint may be at two paths. So
the identity of a model is a fingerprint of its configuration and weights in memory.
"""

from __future__ import annotations

import json
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from ...errors import InvalidInput
from ...format.layer_spec import QUANTISED
from ...format.schema import KVSchema

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import numpy as np
    from numpy.typing import NDArray

    from tiffin.messenger.shm.host_copy import Algorithm

DTYPES = ("float32", "bfloat16", "float16")
SAMPLES = 1024  # elements of each tensor that a fingerprint reads

# Configuration fields that may differ between machines or releases, but never change the numbers
# that a model computes. The dtype is in the schema.
_NOT_IDENTITY = {
    "_name_or_path",
    "architectures",
    "dtype",
    "id2label",
    "label2id",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
    "torch_dtype",
    "transformers_version",
    "use_cache",
}
# Rotary embeddings that rotate the same token differently in a longer prompt.
_LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope", "su"}


def schema_of(
    model: Any,
    *,
    block_tokens: int = 512,
    hash: str = "xxh3_128",
    checksum: Algorithm = "xxh3_64",
    quantise: str | None = None,
    scale_tokens: int | None = None,
) -> KVSchema:
    """The schema of `model`'s KV cache. Its model name is `identity(model)`.

    `quantise`: the dtype of the stored values, if not the model's, "float8_e4m3" or "int8", with a
    scale per head and `scale_tokens` tokens (default: a whole block).

    Raises InvalidInput, naming the layer and the reason, for a model whose cache can't be stored,
    and SchemaError for numbers that describe no block.
    """
    config = _keepable_config(model)
    dtype = str(model.dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise InvalidInput(f"the model computes in {dtype}; this connector keeps {DTYPES}")
    if quantise is not None and quantise not in QUANTISED:
        raise InvalidInput(f"quantise={quantise!r}; choose {' or '.join(QUANTISED)}, or None")
    if quantise is None and scale_tokens is not None:
        raise InvalidInput("scale_tokens goes with quantise")
    if quantise is not None and scale_tokens == 0:
        raise InvalidInput("scale_tokens=0: values without scales would be no numbers")
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if scale_tokens is None:
        scale_tokens = block_tokens if quantise is not None else 0
    return KVSchema.gqa(
        model=identity(model),
        layers=_layers(config),
        kv_heads=heads,
        head_dim=dim,
        dtype=quantise or dtype,
        block_tokens=block_tokens,
        hash=hash,
        checksum=checksum,
        scale_tokens=scale_tokens,
    )


def identity(model: Any) -> str:
    """`<model type>:<fingerprint>` of the configuration and the weights currently in memory.

    The fingerprint covers the configuration (without names of paths and releases) and, of every
    parameter and buffer, its name, shape, dtype and SAMPLES elements at even distances, the first
    and the last included. So it takes about 0.05 ms per tensor, whatever the sizes, plus page
    faults for weights that were not accessed yet. The fingerprint detects training, which changes
    almost every element. It does not detect an edit of a few elements between the samples, code
    that computes differently with the same weights, or a change after this call: put such things
    into the namespace. Raises InvalidInput for weights that are not in memory.
    """
    digest = blake2b(digest_size=16)
    config = model.config.to_dict()
    kept = {name: value for name, value in config.items() if name not in _NOT_IDENTITY}
    digest.update(json.dumps(kept, sort_keys=True, default=str).encode())
    for name, tensor in _tensors(model):
        digest.update(f"\n{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        digest.update(_sample(tensor).tobytes())
    return f"{model.config.model_type}:{digest.hexdigest()}"


def _tensors(model: Any) -> Iterator[tuple[str, Any]]:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise InvalidInput(f"{name} is on the meta device; load the weights first")
        yield name, tensor.detach()


def _sample(tensor: Any) -> NDArray[np.uint8]:
    count = tensor.numel()
    # reshape copies a non-contiguous tensor; weights are contiguous, except rare transposed views
    flat = tensor.reshape(-1)
    if count > SAMPLES:
        steps = torch.arange(SAMPLES, device=tensor.device)
        flat = flat[steps * (count - 1) // (SAMPLES - 1)]
    array: NDArray[np.uint8] = flat.cpu().contiguous().view(torch.uint8).numpy()
    return array


def _keepable_config(model: Any) -> Any:
    """The decoder's configuration. Raises InvalidInput if the tokens of a prefix do not determine
    its cache."""
    if model.config.is_encoder_decoder:
        raise InvalidInput("this connector keeps decoder-only models, not an encoder's output")
    config = model.config.get_text_config(decoder=True)
    for index, layer in enumerate(DynamicCache(config=config).layers):
        check_layer(index, layer)
    if getattr(config, "use_bidirectional_attention", None):
        raise InvalidInput("tokens attend to later ones, so a prefix does not decide their K and V")
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    for kind in _rope_types(rope):
        if kind in _LENGTH_DEPENDENT_ROPE:
            raise InvalidInput(f"rope type {kind!r} makes keys depend on the prompt's length")
    devices = {str(parameter.device) for parameter in model.parameters()}
    if len(devices) > 1:
        raise InvalidInput(f"the model is spread over {sorted(devices)}; it must be on one device")
    return config


def _layers(config: Any) -> int:
    return len(DynamicCache(config=config).layers) or int(config.num_hidden_layers)


def _rope_types(rope: Mapping[str, Any]) -> Iterator[str]:
    """Every rope type in a configuration: one for all layers, or one for each kind of layer."""
    for value in (rope, *rope.values()):
        if isinstance(value, dict):
            yield str(value.get("rope_type", value.get("type", "default")))


def check_layer(index: int, layer: Any) -> None:
    """Raise InvalidInput unless `layer` contains K and V of every token."""
    if type(layer) is not DynamicLayer:
        raise InvalidInput(
            f"layer {index} of the cache is a {type(layer).__name__}; this connector keeps only "
            "layers with K and V of every token (no sliding window, no linear attention, no state)"
        )
