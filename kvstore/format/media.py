"""What the keys of blocks have of images, sounds and videos: who they are, and where. Pure.

    extra of a block = blake2b-16 of the JSON [[identifier, begin - block's first token], ...] of
                       those with placeholders in it, in the order of their tokens

So engines and whoever places requests make the same keys (`Prefix`).
"""

from __future__ import annotations

import json
from collections import defaultdict
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable


class Media(NamedTuple):
    """An image, a sound or a video: what the engine's prefix cache knows it by, and the tokens
    [offset, offset + length) that are its placeholders."""

    identifier: str
    offset: int
    length: int


def media_extras(media: Iterable[Media], block_tokens: int) -> dict[int, bytes]:
    """The `extras` of a prompt's blocks. `media` are in the order of their tokens."""
    found: dict[int, list[tuple[str, int]]] = defaultdict(list)
    for name, begin, length in media:
        for block in range(begin // block_tokens, -(-(begin + length) // block_tokens)):
            found[block].append((name, begin - block * block_tokens))
    return {block: _digest(content) for block, content in found.items()}


def _digest(content: object) -> bytes:
    return blake2b(json.dumps(content).encode(), digest_size=16).digest()
