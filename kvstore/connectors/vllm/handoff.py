"""The hand-over of a prompt from an instance that prefills to one that decodes, through the pool.

`kv_transfer_params` of the request to prefill are `{"tiffin": {}}`, and of its answer
`{"tiffin": {"blocks": 8}}`: so many leading blocks are stored, or being stored. With that the
request to decode waits for them. There is no address in it, and a false number costs a wait.
"""

from __future__ import annotations

from typing import Any

from ...errors import InvalidInput

_NAME = "tiffin"
# What a prompt of a million tokens has in blocks of 16.
_BLOCKS_MAX = 1 << 16


def to_be_told(params: Any) -> bool:
    """Whether the answer of a request with these `kv_transfer_params` tells what is stored."""
    return isinstance(params, dict) and params.get(_NAME) == {}


def promise(blocks: int) -> dict[str, Any]:
    """The `kv_transfer_params` of an answer, whose first `blocks` blocks are in the pool soon."""
    return {_NAME: {"blocks": blocks}}


def promised_blocks(params: Any) -> int:
    """How many leading blocks a request with these `kv_transfer_params` may wait for. Raises
    InvalidInput for what is no such number."""
    told = params.get(_NAME) if isinstance(params, dict) else None
    blocks = told.get("blocks", 0) if isinstance(told, dict) else 0
    if isinstance(blocks, bool) or not isinstance(blocks, int) or not 0 <= blocks <= _BLOCKS_MAX:
        raise InvalidInput(f"kv_transfer_params: {blocks!r} are no number of blocks")
    return blocks
