"""The blocks of the simulated world: few, small, and with bytes derived from their key."""

from __future__ import annotations

import functools
import hashlib
from typing import TYPE_CHECKING

import numpy as np

from tiffin.kvstore import KVSchema

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tiffin.kvstore.format.keys import Prefix

    Bytes = NDArray[np.uint8]

BLOCK_TOKENS = 16
# Payloads of 4 KiB after a header of one page.
SCHEMA = KVSchema.gqa(
    model="simulated",
    layers=2,
    kv_heads=2,
    head_dim=16,
    dtype="bfloat16",
    block_tokens=BLOCK_TOKENS,
)
EXTENT_BYTES = SCHEMA.extent_bytes
DEPTH = 5
CHAINS = 6


def _prefix(chain: int) -> Prefix:
    """Chains 0 and 1, 2 and 3, ... share their first two blocks."""
    tokens = [1000 * (chain // 2) + i for i in range(2 * BLOCK_TOKENS)]
    tokens += [1000 * chain + 500 + i for i in range((DEPTH - 2) * BLOCK_TOKENS)]
    return SCHEMA.prefix(tokens)


PREFIXES = [_prefix(chain) for chain in range(CHAINS)]
# Blocks that clients store with a false payload: only checksums detect it.
LIES = SCHEMA.prefix(range(90_000, 90_000 + DEPTH * BLOCK_TOKENS))
# Prompts that only strangers write, so that users do not find them resident.
ODD = [
    SCHEMA.prefix(range(base, base + 3 * BLOCK_TOKENS)) for base in range(100_000, 140_000, 1000)
]
# Prompts that are put once, and removed.
PASSING = [
    SCHEMA.prefix(range(base, base + 2 * BLOCK_TOKENS)) for base in range(200_000, 260_000, 1000)
]

KEYS = sorted({key for prefix in [*PREFIXES, *ODD, *PASSING, LIES] for key in prefix.keys})
LIED_ABOUT = frozenset(LIES.keys)


@functools.cache
def payload_of(key: bytes) -> Bytes:
    """The only right bytes of this key, uint8 [block_bytes], read-only."""
    return np.frombuffer(hashlib.shake_128(key).digest(SCHEMA.block_bytes), np.uint8)


def is_right(key: bytes, payload: Bytes) -> bool:
    """Whether these are the bytes of the key."""
    return payload.tobytes() == payload_of(key).tobytes()


def payloads_of(prefix: Prefix) -> list[Bytes]:
    """The right payload of each block."""
    return [payload_of(key) for key in prefix.keys]
