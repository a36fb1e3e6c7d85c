"""From what clients send to block keys: hex in bulk, or token ids of a model with a schema."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import msgspec
import numpy as np

from tiffin.kvstore.errors import InvalidInput
from tiffin.kvstore.keys import Prefix
from tiffin.kvstore.schema import SCHEMA_FORMAT, KVSchema, LayerKind, LayerSpec, Part
from tiffin.messenger.local import XXH3_64

from ..errors import Conflict, InvalidRequest
from ..records import KEY_BYTES, KEYS_MAX
from .models import KEY_HEX

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# Each has some hundred KiB at most, and a conductor serves some dozens.
MODELS_MAX = 1024

# Part, heads, dim and dtype, and of a quantised part scale_tokens: `Part` checks what they are.
_PartRow = list[Any]
_LayerRow = tuple[str, list[_PartRow], int, int, list[int], str]
_KEY = np.dtype((np.void, KEY_BYTES))  # bytes that end in zeros stay as long as they are
_canonical = msgspec.json.Decoder(list[Any])
_layers = list[_LayerRow]


def parse_keys(texts: Sequence[str]) -> tuple[bytes, ...]:
    """Keys of 16 bytes from 32 hex digits each. Raises InvalidRequest, with the first wrong one.

    All at once: 256 keys take 25 µs, one `fromhex` and one slice for each 80 µs.
    """
    if len(texts) > KEYS_MAX:
        raise InvalidRequest(f"block_keys has {len(texts)} keys; it takes {KEYS_MAX}")
    if not texts:
        return ()
    try:
        raw = bytes.fromhex("".join(texts))
    except ValueError as error:
        raise InvalidRequest(_complaint(texts)) from error
    # `fromhex` skips spaces, which makes it shorter; other lengths may add up to the right sum.
    if len(raw) != KEY_BYTES * len(texts) or set(map(len, texts)) != {KEY_HEX}:
        raise InvalidRequest(_complaint(texts))
    # numpy types what becomes of voids for those with fields too, which become tuples.
    return tuple(cast("list[bytes]", np.frombuffer(raw, _KEY).tolist()))


def parse_schema(canonical: str) -> KVSchema:
    """The schema whose `canonical_bytes()` these are. Raises InvalidRequest."""
    try:
        name, model, digest, block_tokens, rows, *rest = _canonical.decode(canonical)
        checksum: Any = rest.pop() if rest and isinstance(rest[-1], str) else XXH3_64
        if name != SCHEMA_FORMAT or len(rest) > 1:
            raise InvalidInput(f"it is not of the format {SCHEMA_FORMAT}")
        layers = [_layer(row) for row in msgspec.convert(rows, _layers)]
        schema = KVSchema.of(
            model,
            layers,
            block_tokens=block_tokens,
            hash=digest,
            shards=rest[0] if rest else 1,
            checksum=checksum,
        )
    except (InvalidInput, ValueError, TypeError, RecursionError) as error:
        # ValueError: also msgspec's, too few fields, and an unknown kind of layer.
        raise InvalidRequest(f"schema.canonical describes no schema: {error}") from error
    if schema.canonical_bytes() != canonical.encode():
        raise InvalidRequest(
            "schema.canonical is not what KVSchema.canonical_bytes() gives: its keys would differ"
        )
    return schema


class Models:
    """The schemas of models, as instances registered them: what turns token ids into keys."""

    def __init__(self) -> None:
        self._schemas: dict[str, KVSchema] = {}
        # Their canonical texts: who says the same again is known by it, without reading it.
        self._texts: dict[str, str] = {}

    def learn(self, model: str, schema: KVSchema, others: Callable[[], set[str]]) -> None:
        """An instance of `model` says how its blocks are keyed. `others` gives the models that
        other instances serve. Raises Conflict if one of those keys this model differently."""
        if schema.model != model:
            raise InvalidRequest(f"the schema is of {schema.model!r}, the instance of {model!r}")
        known = self._schemas.get(model)
        if known == schema:
            return
        served = others()
        if known is not None and model in served:
            raise Conflict(
                f"another instance of {model!r} keys its blocks by another schema "
                f"({known.fingerprint.hex()}, this is {schema.fingerprint.hex()})"
            )
        if len(self._schemas) >= MODELS_MAX:
            self._schemas = {name: one for name, one in self._schemas.items() if name in served}
            self._texts = {name: self._texts[name] for name in self._schemas}
        if len(self._schemas) >= MODELS_MAX:
            raise InvalidRequest(f"{MODELS_MAX} models have schemas, which is the limit")
        self._schemas[model] = schema
        self._texts[model] = schema.canonical_bytes().decode()

    def same(self, model: str, canonical: str) -> KVSchema | None:
        """The schema of a model, if this is its canonical text; else None. A comparison of texts:
        instances send theirs with every heartbeat, and reading 80 layers takes 1.5 ms."""
        return self._schemas[model] if self._texts.get(model) == canonical else None

    def schema(self, model: str) -> KVSchema | None:
        """The schema of a model, if any instance brought one."""
        return self._schemas.get(model)

    def keys(self, model: str, token_ids: list[int], namespace: str = "") -> tuple[bytes, ...]:
        """The keys of the full blocks of a prompt. Raises InvalidRequest.

        131,072 tokens take 1 ms. Pools with a secret are not served: it stays with the engines,
        which send keys.
        """
        schema = self._schemas.get(model)
        if schema is None:
            raise InvalidRequest(
                f"no instance of {model!r} was registered with a schema: send block_keys and "
                "prompt_tokens"
            )
        try:
            return Prefix(schema, token_ids, namespace).keys
        except InvalidInput as error:
            raise InvalidRequest(str(error)) from error


def _layer(row: _LayerRow) -> LayerSpec:
    kind, parts, window_tokens, tokens_per_entry, shape, packing = row
    return LayerSpec(
        LayerKind(kind),
        tuple(Part(*part) for part in parts),
        window_tokens,
        tokens_per_entry,
        tuple(shape),
        packing,
    )


def _complaint(texts: Sequence[str]) -> str:
    """Which key is wrong; it is not repeated, who knows what it is."""
    digits = frozenset("0123456789abcdefABCDEF")
    for index, text in enumerate(texts):
        if len(text) != KEY_HEX or not digits.issuperset(text):
            return f"block_keys[{index}] is not {KEY_HEX} hex digits"
    return f"block_keys are not {KEY_HEX} hex digits each"
