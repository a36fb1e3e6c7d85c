"""Decodes block keys from requests: hex digits in bulk, or token ids of a model with a schema."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import numpy as np

from tiffin.kvstore.errors import InvalidInput
from tiffin.kvstore.format.keys import Prefix
from tiffin.kvstore.format.media import Media, media_extras

from ..errors import Conflict, InvalidRequest
from ..records import KEY_BYTES, KEYS_MAX, PromptKeys
from ..state.part_keys import PART_TOKENS, part_keys
from .announced_spaces import AnnouncedSpaces
from .models import KEY_HEX

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from tiffin.kvstore.format.schema import KVSchema

    from .models import MediaBody

# A schema has some hundred KiB at most, and a conductor serves some dozens of models.
MODELS_MAX = 1024

_KEY = np.dtype((np.void, KEY_BYTES))  # void, as numpy's bytes type would strip trailing zeros


def parse_keys(texts: Sequence[str], field: str = "block_keys") -> tuple[bytes, ...]:
    """Keys of 16 bytes from 32 hex digits each. Raises InvalidRequest, which names the first
    invalid key of `field`.

    Decodes all keys at once: 256 keys take 25 µs; with one `fromhex` and one slice per key, 80 µs.
    """
    if len(texts) > KEYS_MAX:
        raise InvalidRequest(f"{field} has {len(texts)} keys; it takes {KEYS_MAX}")
    if not texts:
        return ()
    try:
        raw = bytes.fromhex("".join(texts))
    except ValueError as error:
        raise InvalidRequest(_complaint(texts, field)) from error
    # `fromhex` skips spaces, so the result would be too short; and keys of wrong lengths may add up
    # to the right total.
    if len(raw) != KEY_BYTES * len(texts) or set(map(len, texts)) != {KEY_HEX}:
        raise InvalidRequest(_complaint(texts, field))
    # The cast is needed because numpy's type also covers voids with fields, which become tuples.
    return tuple(cast("list[bytes]", np.frombuffer(raw, _KEY).tolist()))


def media_of(bodies: Sequence[MediaBody], prompt_tokens: int) -> tuple[Media, ...]:
    """The images, sounds and videos of a prompt. Raises InvalidRequest unless they are in the order
    of their tokens, one behind the other, and within the prompt."""
    end = 0
    for index, one in enumerate(bodies):
        if one.offset < end:
            raise InvalidRequest(
                f"media[{index}] begins at token {one.offset}, where others are up to {end}: send "
                "them in the order of their tokens"
            )
        end = one.offset + one.length
        if end > prompt_tokens:
            raise InvalidRequest(
                f"media[{index}] is up to token {end} of a prompt of {prompt_tokens}"
            )
    return tuple(Media(one.identifier, one.offset, one.length) for one in bodies)


class KeyedModels:
    """The schemas of models, as instances registered them, with which token ids become keys; and
    instead of them the key spaces that engines have `announced`."""

    def __init__(self) -> None:
        self.announced = AnnouncedSpaces()
        self._schemas: dict[str, KVSchema] = {}
        # Their canonical texts: a repeated registration is recognised by its text, unparsed.
        self._texts: dict[str, str] = {}

    def learn(self, model: str, schema: KVSchema, others: Callable[[], set[str]]) -> None:
        """Set the schema with which instances of `model` key their blocks. `others` returns the
        models that other instances serve. The schema's own model is only a part of its keys. Raises
        Conflict if another instance of this model uses a different schema, InvalidRequest for too
        many models. Key spaces that engines announce go before it; one that no engine announces any
        more does not."""
        self.announced.forget(model)
        known = self._schemas.get(model)
        if known == schema:
            return
        served = others()
        if known is not None and model in served:
            raise Conflict(
                f"another instance of {model!r} keys its blocks by another schema: "
                f"{_differing(known, schema)} differ"
            )
        if len(self._schemas) >= MODELS_MAX:
            self._schemas = {name: one for name, one in self._schemas.items() if name in served}
            self._texts = {name: self._texts[name] for name in self._schemas}
        if len(self._schemas) >= MODELS_MAX:
            raise InvalidRequest(f"{MODELS_MAX} models have schemas, which is the limit")
        self._schemas[model] = schema
        self._texts[model] = schema.canonical_bytes().decode()

    def same(self, model: str, canonical: str) -> KVSchema | None:
        """The schema of a model, if `canonical` is its canonical text; else None. Compares texts
        because instances send theirs with every heartbeat, and parsing 80 layers takes 1.5 ms."""
        return self._schemas[model] if self._texts.get(model) == canonical else None

    def canonical(self, model: str) -> str:
        """The canonical text of a model's schema, which has to be known."""
        return self._texts[model]

    def schema(self, model: str) -> KVSchema | None:
        """The schema of a model; None if no engine has announced and no instance registered one."""
        keyed = self.announced.of(model)
        return self._schemas.get(model) if keyed is None else keyed.schema

    def keys(
        self,
        model: str,
        token_ids: NDArray[np.uint32],
        namespace: str = "",
        held: Callable[[Sequence[bytes]], int] = lambda _: 0,
        *,
        salt: str = "",
        media: Sequence[Media] = (),
    ) -> tuple[PromptKeys, ...]:
        """The keys of a prompt in each key space of its model's engines, in that of most engines
        first; none where a space has a secret that is not known, and for an adapter or a salt where
        no engine has announced what becomes of them. `held` gives how many of the leading blocks
        somebody has: part keys begin there. `media` are in the order of their tokens (`media_of`).
        Raises InvalidRequest.

        131,072 tokens take 0.2 ms, for each space.
        """
        spaces = self.announced.all_of(model)
        if not spaces and model not in self._schemas:
            raise InvalidRequest(
                f"no instance of {model!r} was registered with a schema: send block_keys and "
                "prompt_tokens"
            )
        if not spaces and salt:  # nobody says what becomes of it
            return (PromptKeys(),)
        ways = [
            (one.name, one.schema, one.namespace_of(namespace, salt), one.secret) for one in spaces
        ]
        found = []
        for space, schema, name, secret in ways or [("", self._schemas[model], namespace, b"")]:
            if name is None or secret is None:
                found.append(PromptKeys(space=space))
                continue
            try:
                extras = media_extras(media, schema.block_tokens)
                prefix = Prefix(schema, token_ids, name, secret, extras)
            except InvalidInput as error:
                raise InvalidRequest(str(error)) from error
            after = held(prefix.keys)
            parts = part_keys(prefix, secret, after)
            begin = after * schema.block_tokens
            # They say nothing of media, so they end before the first of their block.
            first = next((one.offset for one in media if one.offset + one.length > begin), None)
            if first is not None:
                parts = parts[: max(0, first - begin) // PART_TOKENS]
            found.append(PromptKeys(prefix.keys, parts, after, space))
        return tuple(found)


def _differing(one: KVSchema, other: KVSchema) -> str:
    """The fields in which two schemas differ."""
    names = ("model", "layers", "block_tokens", "hash", "shards", "checksum")
    return ", ".join(name for name in names if getattr(one, name) != getattr(other, name))


def _complaint(texts: Sequence[str], field: str) -> str:
    """An error message with the index of the first invalid key. It does not repeat the text, which
    could be anything."""
    digits = frozenset("0123456789abcdefABCDEF")
    for index, text in enumerate(texts):
        if len(text) != KEY_HEX or not digits.issuperset(text):
            return f"{field}[{index}] is not {KEY_HEX} hex digits"
    return f"{field} are not {KEY_HEX} hex digits each"
