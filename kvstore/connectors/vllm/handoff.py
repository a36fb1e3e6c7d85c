"""The hand-over of a prompt from an instance that prefills to one that decodes, through the pool.

`kv_transfer_params` of the request to prefill are `{"tiffin": {}}`, and of its answer
`{"tiffin": {"blocks": 8, "node": 3}}`: so many leading blocks are stored, or being stored, at the
node with this number in the directory, if the pool has one. With that the request to decode waits
for them. A request to decode that is sent together with the one to prefill has
`{"tiffin": {"prefilling": true, "node": 3}}`: it waits for what is being written. A request whose
blocks the engine's own node is fetching from others has `{"tiffin": {"fetched": 8, "within_s":
0.2}}`, and with `"tell": true` it is one to prefill: it waits so long until 8 leading blocks are at
this node, and takes what is elsewhere then. There is no address in it, and a false number costs a
wait.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...errors import InvalidInput

_NAME = "tiffin"
# What a prompt of a million tokens has in blocks of 16.
_BLOCKS_MAX = 1 << 16
_NODE_MAX = 1 << 31
_WITHIN_S_MAX = 3600.0


@dataclass(frozen=True, slots=True)
class Promise:
    """What a request to decode may wait for: `blocks` leading blocks; or, while another instance is
    `prefilling`, all whole blocks of its prompt. `node`: the number of the writer's node. Or
    `within_s` for `fetched` leading blocks that this engine's own node is fetching."""

    blocks: int = 0
    prefilling: bool = False
    node: int | None = None
    fetched: int = 0
    within_s: float = 0.0


NOTHING = Promise()


def to_be_told(params: Any) -> bool:
    """Whether the answer of a request with these `kv_transfer_params` tells what is stored."""
    told = params.get(_NAME) if isinstance(params, dict) else None
    return isinstance(told, dict) and (not told or told.get("tell") is True)


def promise(blocks: int, node: int | None = None) -> dict[str, Any]:
    """The `kv_transfer_params` of an answer, whose first `blocks` blocks are in the pool soon, at
    this node."""
    return {_NAME: {"blocks": blocks} | ({} if node is None else {"node": node})}


def promised(params: Any) -> Promise:
    """What a request with these `kv_transfer_params` may wait for. Raises InvalidInput for what is
    no such promise."""
    told = params.get(_NAME) if isinstance(params, dict) else None
    if not isinstance(told, dict):
        return NOTHING
    prefilling = told.get("prefilling", False)
    if not isinstance(prefilling, bool):
        raise InvalidInput(f"kv_transfer_params: prefilling is {prefilling!r}, not true or false")
    node = told.get("node")
    if node is not None:
        _check("node", node, _NODE_MAX)
    blocks = told.get("blocks", 0)
    _check("number of blocks", blocks, _BLOCKS_MAX)
    fetched, within_s = told.get("fetched", 0), told.get("within_s", 0.0)
    _check("number of blocks", fetched, _BLOCKS_MAX)
    if (
        isinstance(within_s, bool)
        or not isinstance(within_s, int | float)
        or not 0 <= within_s <= _WITHIN_S_MAX
    ):
        raise InvalidInput(f"kv_transfer_params: {within_s!r} is no time in seconds")
    return Promise(blocks, prefilling, node, fetched, float(within_s))


def _check(what: str, number: Any, most: int) -> None:
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number <= most:
        raise InvalidInput(f"kv_transfer_params: {number!r} is no {what}")
