"""What engines say of a chat's tokens, and of the images, sounds and videos in it. Pure."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from tiffin.kvstore.format.media import Media

from ...errors import InvalidRequest
from ...wire.block_keys import media_of
from ...wire.models import MediaList


class Tokens(NamedTuple):
    """A prompt's token ids. `media`: what is behind their placeholders; None if that isn't known,
    so that the tokens of a prompt with images make no keys."""

    ids: list[int]
    media: tuple[Media, ...] | None = None


class _Place(msgspec.Struct):
    offset: int
    length: int


class _Features(msgspec.Struct):
    mm_hashes: dict[str, list[str]] = {}
    mm_placeholders: dict[str, list[_Place]] = {}


class _Rendered(msgspec.Struct):
    token_ids: list[int]
    features: _Features | None = None


_rendered = msgspec.json.Decoder(_Rendered)


def rendered(body: bytes) -> Tokens | None:
    """The answer of vLLM's `/v1/chat/completions/render`; None if it is none, or of media that the
    conductor would refuse."""
    try:
        found = _rendered.decode(body)
        features = found.features or _Features()
        if features.mm_hashes.keys() != features.mm_placeholders.keys():
            return None
        media = [
            Media(name, place.offset, place.length)
            for kind, names in features.mm_hashes.items()
            for name, place in zip(names, features.mm_placeholders[kind], strict=True)
        ]
        media.sort(key=lambda one: one.offset)
        bodies = msgspec.convert([one._asdict() for one in media], MediaList)
        return Tokens(found.token_ids, media_of(bodies, len(found.token_ids)))
    except (msgspec.DecodeError, RecursionError, KeyError, ValueError, InvalidRequest):
        return None
