"""Stores the KV caches of a Hugging Face causal language model in a pool, by prefix.

    schema = schema_of(model)
    with Client.open("unix:/run/tiffin/node.sock") as client:
        cached = PrefixCache(client, model, namespace="acme")
        output_ids = cached.generate(input_ids, max_new_tokens=100)
        cached.last.hit_tokens                     # how much of the prompt was not computed

Supported are models whose layers all have K and V of every token, in float32, bfloat16 or float16,
one prompt at a time; stored unchanged, or with `quantise` in half or a quarter of the bytes. Other
layers (sliding windows, linear attention, states, keys that depend on the length of the prompt) are
refused when the schema is made, and never stored in part. See docs/transformers.md for the costs
and the limits.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from transformers import Cache, DynamicCache, GenerationConfig

from tiffin.kernels.errors import KernelError
from tiffin.kernels.layout.engine_cache import PagedCache
from tiffin.kernels.layout.transfer_plan import PageMap

from ...client.verbs.arguments import check_timeout
from ...errors import InvalidInput, TiffinError
from ..cache_transfer import Carrier
from .cache_argument import with_cache
from .cache_schema import check_layer, schema_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tiffin.messenger.shm.host_copy import Algorithm

    from ...client.client import Client
    from ...format.keys import Prefix
    from ...hbm.store import HbmStore

log = logging.getLogger(__name__)

# How long a request waits for a pool that does not answer, in the load and again in the save.
DEFAULT_TIMEOUT_S = 1.0
RETRY_S = 5.0  # back-off after a failure of the pool, which would otherwise slow every request
SAVE_BYTES_AT_ONCE = 256 << 20  # limit of one reservation: a long prompt must not take all room

# `generate` arguments that change neither the tokens in the cache nor how their K and V are
# computed. Fields of GenerationConfig are allowed too; those in _GENERATE_VALUES only with these
# values.
_GENERATE_ARGUMENTS = {
    "attention_mask",
    "generation_config",
    "logits_processor",
    "prefix_allowed_tokens_fn",
    "stopping_criteria",
    "streamer",
}
_GENERATE_VALUES: Mapping[str, tuple[object, ...]] = {
    "num_beams": (None, 1),
    "num_return_sequences": (None, 1),
    "use_cache": (None, True),
    "cache_implementation": (None,),
    "prompt_lookup_num_tokens": (None,),
    "token_healing": (None, False),
}


@dataclass(frozen=True, slots=True)
class SaveResult:
    """The outcome of a save: the number of full blocks, and the positions `stored` by this save.
    The other blocks were resident, are being written by another writer, or could not be stored, and
    then `reason` names the cause: no room or no pool."""

    blocks: int
    stored: tuple[int, ...]
    reason: str | None


@dataclass(frozen=True, slots=True)
class LastCall:
    """Statistics of the last load, save or generate. `load_reason` is the reason why not more was
    loaded (see `Missing` and `HbmBlocks`), `save_reason` why not everything was saved, None if
    nothing failed."""

    prompt_tokens: int = 0
    hit_tokens: int = 0
    stored_blocks: int = 0
    load_s: float = 0.0
    save_s: float = 0.0
    load_reason: str | None = None
    save_reason: str | None = None


class PrefixCache:
    """A model's KV caches in a pool: load the longest stored prefix, save the computed caches.

    The constructor fingerprints the weights once: make another PrefixCache after changing them or
    switching adapters. Inference never fails because of the pool. When the pool does not answer, or
    is full, `load` returns an empty cache and `save` stores nothing; this logs one warning per
    outage, counts the failed calls in `failures`, and retries the pool after a back-off of RETRY_S.
    `client` may be replaced.

    `quantise`: "float8_e4m3" or "int8" stores K and V in one byte per number, with a float32 scale
    for each head and `scale_tokens` tokens (default: the whole block). A loaded cache is then close
    to the computed one, not equal (docs/transformers.md has the bounds). `checksum`: as in
    `KVSchema`; with "xxh3_64_pages" a GPU verifies blocks in place. Caches that differ in any of
    these, or in `block_tokens`, share no blocks.

    `hbm_bytes` of the model's device keep the hottest blocks in front of the pool, as an `HbmStore`
    (`hbm`). A background thread copies saved blocks down to the pool; `close` waits for that.

    Not thread-safe, as models are not. A context manager: with a GPU or `hbm_bytes`, `close` it,
    before the client. Raises InvalidInput as `schema_of` does, SchemaError for `scale_tokens` that
    do not divide a block, and the errors of `HbmStore`.
    """

    def __init__(
        self,
        client: Client,
        model: Any,
        *,
        namespace: str = "",
        secret: bytes = b"",
        block_tokens: int = 512,
        hash: str = "xxh3_128",
        checksum: Algorithm = "xxh3_64",
        quantise: str | None = None,
        scale_tokens: int | None = None,
        hbm_bytes: int = 0,
        hbm_device: str | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        self.model = model
        self.schema = schema_of(
            model,
            block_tokens=block_tokens,
            hash=hash,
            checksum=checksum,
            quantise=quantise,
            scale_tokens=scale_tokens,
        )
        self.namespace = namespace
        self.timeout_s = check_timeout(timeout_s)
        self.last = LastCall()
        self.failures = 0
        self._secret = secret
        self._down = False
        self._retry_at_s = 0.0
        self._refusal = ""  # the last refusal that was logged
        self._hbm_bytes = _check_hbm(hbm_bytes, hbm_device, model.device)
        spec = self.schema.layers[0].parts[0]
        self._heads, self._dim = spec.heads, spec.dim
        self._carrier = Carrier(client, self.schema, model.device, hbm_bytes=hbm_bytes)

    @property
    def client(self) -> Client:
        """The client of the pool. Assigning another one starts with an empty HBM tier."""
        return self._carrier.client

    @client.setter
    def client(self, client: Client) -> None:
        self._carrier.close()
        self._carrier = Carrier(client, self.schema, self.model.device, hbm_bytes=self._hbm_bytes)
        self._retry_at_s = 0.0

    @property
    def hbm(self) -> HbmStore | None:
        """The HBM tier, if there is one."""
        return self._carrier.hbm

    def close(self) -> None:
        """Copy the blocks that only HBM has down to the pool, and release memory and threads. Does
        not close the client."""
        self._carrier.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def load(self, input_ids: Any) -> tuple[Any, int]:
        """A DynamicCache with the longest stored prefix of `input_ids` [1, n], and its number of
        tokens.

        At least one token is left to compute: a model needs it to predict the next one. The cache
        is the caller's own copy. Raises InvalidInput for a batch and TokenError for bad ids.
        """
        started = time.perf_counter()
        tokens = _check_ids(input_ids)
        usable = max(0, tokens - 1) // self.schema.block_tokens
        prefix = self._prefix(input_ids)[:usable]
        cache = DynamicCache(config=self.model.config)
        reason = self._guard(lambda: self._load_into(cache, prefix)) if usable else None
        hit = cache.get_seq_length()
        load_s = time.perf_counter() - started
        self.last = LastCall(tokens, hit, load_s=load_s, load_reason=reason)
        return cache, hit

    def save(self, cache: Any, input_ids: Any) -> SaveResult:
        """Write the full blocks of `cache` that the pool lacks. `input_ids` [1, n] are the tokens
        in the cache, from the first on; tokens beyond those in the cache are ignored.

        Raises InvalidInput for a batch, for a cache that has not this model's shape, and while the
        model is in training mode, which would store the effects of dropout.
        """
        started = time.perf_counter()
        if not isinstance(cache, Cache):
            raise InvalidInput(f"a cache is transformers' DynamicCache, no {type(cache).__name__}")
        held = min(_check_ids(input_ids), cache.get_seq_length())
        if held:
            self._check_cache(cache)
        prefix = self._prefix(input_ids[:, :held])
        stored: list[int] = []
        reason = None
        try:
            if len(prefix):
                reason = self._guard(lambda: self._store(cache, prefix, stored))
        except KernelError as error:  # the caller's mistake; the pool is healthy
            raise InvalidInput(f"this cache can't be saved: {error}") from error
        save_s = time.perf_counter() - started
        self.last = replace(self.last, stored_blocks=len(stored), save_s=save_s, save_reason=reason)
        return SaveResult(len(prefix), tuple(stored), reason)

    def generate(self, inputs: Any = None, generation_config: Any = None, **kwargs: Any) -> Any:
        """Load the prompt's stored prefix, call `model.generate` with the same arguments, save the
        cache, generated tokens included, and return the model's output.

        `inputs`, or `input_ids` as tokenizers name it, are a tensor [1, n]. `attention_mask` is
        optional and must be all ones. Raises InvalidInput for batches, padding, beams and any
        argument that could change the cache without being in its keys (images, embeddings, position
        ids), TokenError for bad ids.
        """
        input_ids = _one_of(inputs, kwargs.pop("input_ids", None))
        tokens = _check_ids(input_ids)
        kwargs["attention_mask"] = _check_mask(kwargs.get("attention_mask"), input_ids, tokens)
        kwargs["generation_config"] = generation_config
        self._check_arguments(kwargs)
        cache, _ = self.load(input_ids)
        output = self.model.generate(input_ids, **with_cache(self.model, cache), **kwargs)
        self.save(cache, getattr(output, "sequences", output))
        return output

    # -- moving ----------------------------------------------------------------------------------

    def _load_into(self, cache: Any, prefix: Prefix) -> str | None:
        made: list[Any] = []

        def room(blocks: int) -> tuple[PagedCache, PageMap]:
            tokens = blocks * self.schema.block_tokens
            shape = (2, 1, self._heads, tokens, self._dim)
            dtype, device = self.model.dtype, self.model.device  # each walks over the parameters
            # One tensor for each layer: DynamicCache frees them one by one.
            made.extend(torch.empty(shape, dtype=dtype, device=device) for _ in self.schema.layers)
            paged = PagedCache.contiguous([kv[0] for kv in made], [kv[1] for kv in made])
            return paged, self._rows(range(blocks), tokens)

        _, reason = self._carrier.load(prefix, room, self.timeout_s)
        for layer, kv in zip(cache.layers, made, strict=False):  # none if nothing was found
            # Appending to an empty layer would copy it all; an empty append only sets the layer up.
            layer.update(kv[0, :, :, :0], kv[1, :, :, :0])
            layer.keys, layer.values = kv[0], kv[1]
        return None if reason == "miss" else reason

    def _store(self, cache: Any, prefix: Prefix, stored: list[int]) -> str | None:
        """Store the blocks that the pool lacks, a part at a time. Returns the reason why not more
        were stored."""
        tensors = [(_plain(layer.keys), _plain(layer.values)) for layer in cache.layers]
        tokens = int(tensors[0][0].shape[2])
        return self._carrier.save(
            PagedCache.contiguous(*zip(*tensors, strict=True)),
            lambda positions: self._rows(positions, tokens),
            prefix,
            stored,
            blocks_at_once=max(1, SAVE_BYTES_AT_ONCE // self.schema.extent_bytes),
            timeout_s=self.timeout_s,
        )

    def _rows(self, positions: Sequence[int], tokens: int) -> PageMap:
        """The page map of these blocks in a cache that is one page of `tokens` tokens."""
        step = self.schema.block_tokens
        begins = np.array(positions, np.int64) * step
        pages = np.zeros((len(begins), 1), np.int64)
        return PageMap(pages, page_tokens=tokens, tokens=step, first_slots=begins)

    # -- checks ----------------------------------------------------------------------------------

    def _prefix(self, input_ids: Any) -> Prefix:
        return self.schema.prefix(input_ids, namespace=self.namespace, secret=self._secret)

    def _check_cache(self, cache: Any) -> None:
        if self.model.training:
            raise InvalidInput("the model is in training mode; call model.eval() first")
        layers, heads, dim = len(self.schema.layers), self._heads, self._dim
        if len(cache.layers) != layers:
            raise InvalidInput(f"the cache has {len(cache.layers)} layers; the model has {layers}")
        for index, layer in enumerate(cache.layers):
            check_layer(index, layer)
            for tensor in (layer.keys, layer.values):
                shape = (tensor.shape[0], tensor.shape[1], tensor.shape[3], tensor.dtype)
                if shape != (1, heads, dim, self.model.dtype):
                    raise InvalidInput(
                        f"layer {index} of the cache has batch, heads, dim and dtype {shape}; "
                        f"its configuration says {(1, heads, dim, self.model.dtype)}"
                    )

    def _check_arguments(self, kwargs: Mapping[str, Any]) -> None:
        known = vars(GenerationConfig())
        for name in kwargs:
            if name not in known and name not in _GENERATE_ARGUMENTS:
                raise InvalidInput(f"{name} could change the KV cache, and is not in its keys")
        config = kwargs.get("generation_config") or self.model.generation_config
        if not isinstance(config, GenerationConfig):
            raise InvalidInput(
                f"generation_config is a {type(config).__name__}, no GenerationConfig"
            )
        for name, allowed in _GENERATE_VALUES.items():
            value = kwargs.get(name, getattr(config, name, None))
            if value not in allowed:
                raise InvalidInput(f"{name}={value!r}: the prefix cache serves one plain sequence")

    # -- a pool that fails -----------------------------------------------------------------------

    def _guard(self, action: Callable[[], str | None]) -> str | None:
        """Call `action`, which needs the pool, and continue without the pool if it fails. Returns
        the reason of the failure, or the result of `action`."""
        if time.monotonic() < self._retry_at_s:
            return "unavailable"
        try:
            reason = action()
        except InvalidInput as error:
            # The pool answers, but this request can never succeed, such as a block that is larger
            # than the pool's DRAM. Other requests need no back-off.
            self.failures += 1
            if str(error) != self._refusal:
                log.warning("the KV pool refuses: %s", error)
            self._refusal = str(error)
            return "refused"
        except TiffinError as error:
            self.failures += 1
            self._retry_at_s = time.monotonic() + RETRY_S
            if not self._down:
                log.warning("going on without the KV pool: %s: %s", type(error).__name__, error)
            self._down = True
            return "unavailable"
        if self._down:
            log.info("the KV pool answers again")
        self._down = False
        return reason


def _one_of(inputs: Any, input_ids: Any) -> Any:
    """The prompt of a `generate`, which has two names for it."""
    given = [ids for ids in (inputs, input_ids) if ids is not None]
    if len(given) != 1 or not isinstance(given[0], torch.Tensor):
        raise InvalidInput(
            "pass the prompt once, as `inputs` or `input_ids`: a tensor of token ids [1, n], as a "
            'tokenizer returns it with return_tensors="pt"'
        )
    return given[0]


def _check_ids(input_ids: Any) -> int:
    """The number of tokens in `input_ids` [1, n]."""
    shape = getattr(input_ids, "shape", None)
    if shape is None or len(shape) != 2 or shape[0] != 1:
        seen = type(input_ids).__name__ if shape is None else f"of shape {tuple(shape)}"
        raise InvalidInput(
            f"input_ids is {seen}; pass one prompt, a tensor [1, n]: padding and batches are not "
            "kept"
        )
    return int(shape[1])


def _check_mask(mask: Any, input_ids: Any, tokens: int) -> Any:
    if mask is None:
        return torch.ones_like(input_ids)
    if not isinstance(mask, torch.Tensor) or tuple(mask.shape) != (1, tokens):
        raise InvalidInput(f"attention_mask is a tensor [1, {tokens}], as input_ids is")
    if not bool((mask == 1).all()):
        raise InvalidInput(
            "attention_mask must be all ones, as the cache has no padding; pass the prompt alone: "
            "input_ids[:, attention_mask[0].bool()], without a mask"
        )
    return mask


def _check_hbm(nbytes: int, device: str | None, model_device: Any) -> int:
    """`nbytes`. Raises InvalidInput for an HBM tier on another device than the model's."""
    if device is not None and torch.device(device) != torch.device(model_device):
        raise InvalidInput(f"HBM on {device} for a model on {model_device}: kernels reach one")
    if isinstance(nbytes, bool) or not isinstance(nbytes, int) or nbytes < 0:
        raise InvalidInput(f"hbm_bytes={nbytes!r}; pass a number of bytes, 0 for no HBM tier")
    return nbytes


def _plain(tensor: Any) -> Any:
    """A tensor that the kernels accept: contiguous along the last axis, no overlapping elements."""
    strides = zip(tensor.stride(), tensor.shape, strict=True)
    apart = all(stride or size == 1 for stride, size in strides) and tensor.stride(-1) == 1
    return tensor.detach() if apart else tensor.detach().contiguous()
