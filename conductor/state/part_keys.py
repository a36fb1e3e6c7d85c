"""Names of a block's first tokens, in parts of 16: for what ends within a block. Pure.

    part_key[-1] = the key before the block, or the root          (kvstore/format/keys.py)
    part_key[i]  = H(part_key[i-1] ‖ tokens of part i)            i < (block_tokens - 1) // 16

A part key names everything up to its part's end, as a block key does. None reaches the block's end:
that has the block's key. A request has those of one block: the first one that nobody is known to
have. The size of a part is the same for all engines, so callers need
not know theirs: an engine with blocks of 64 tokens has four parts or none.

A wrong name finds nothing, or tokens that the engine then does not find itself: it costs a prefill
and changes no answer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiffin.kvstore.format.header import TOKEN_BYTES
from tiffin.kvstore.format.keys import digest_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from tiffin.kvstore.format.keys import Prefix

# The block size of vLLM on GPUs. 31 keys name a block of 512 tokens.
PART_TOKENS = 16
_PART_BYTES = PART_TOKENS * TOKEN_BYTES

# Part keys of one prompt: of the largest block that an instance may have, 65,536 tokens.
PART_KEYS_MAX = 4096

# All part keys of an index: half a million prompts of 500 tokens that share a start of 480. At 130
# bytes each, 130 MB at most.
INDEXED_PARTS_MAX = 1_000_000


def parts_of(tokens: int, block_tokens: int) -> int:
    """How many part keys so many tokens of a block have."""
    return min(tokens, block_tokens - 1) // PART_TOKENS


def extend_part_keys(
    keys: list[bytes],
    count: int,
    root: bytes,
    tokens: bytes,
    follow: Callable[[bytes, bytes], bytes],
) -> None:
    """Append to `keys`, the first ones of a block, until they are `count`. `tokens` are the block's
    first ones as little-endian uint32, `follow` gives the key of tokens after a key."""
    key = keys[-1] if keys else root
    for at in range(len(keys) * _PART_BYTES, count * _PART_BYTES, _PART_BYTES):
        key = follow(key, tokens[at : at + _PART_BYTES])
        keys.append(key)


def part_keys(prefix: Prefix, secret: bytes = b"", after: int = 0) -> tuple[bytes, ...]:
    """The part keys of a prompt behind its first `after` blocks, 16 bytes each. `prefix` is the
    whole prompt, and was made with this secret."""
    first = prefix.token_bytes(after) if after < len(prefix) else prefix.tail.tobytes()
    root = prefix.keys[after - 1] if after else prefix.root
    digest = digest_of(prefix.schema.hash, secret)
    count = parts_of(len(first) // TOKEN_BYTES, prefix.schema.block_tokens)
    keys: list[bytes] = []
    extend_part_keys(keys, count, root, first, lambda key, tokens: digest(key + tokens))
    return tuple(keys)
