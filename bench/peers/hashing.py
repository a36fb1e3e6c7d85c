"""Keys of a prompt's blocks, ours beside a peer's: a chain of hashes over the same list of ids."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiffin.kvstore.format.schema import KVSchema

from ..store.rows import MILLISECONDS, timed
from ..store.setting import prompt
from .setting import BLOCK_TOKENS
from .turns import PeerRow, in_turns

if TYPE_CHECKING:
    from ..vllm.engine_process import GroupProcess
    from .setting import Setting


# What keys are made with if nothing else is said.
DEFAULT = "xxh3_128"


def hashed(
    setting: Setting,
    peer: str,
    process: GroupProcess,
    theirs: str,
    algorithm: str = DEFAULT,
    **more: object,
) -> PeerRow:
    """A row of a prompt's keys by one of our hashes; the peer's process has the verb `hash`."""
    sizes = setting.sizes
    count = sizes.prompt_blocks * BLOCK_TOKENS
    setting.tell(f"keys of {count} tokens")
    tokens = [int(token) for token in prompt(count)]
    schema = KVSchema.gqa(
        model="bench",
        layers=1,
        kv_heads=1,
        head_dim=8,
        dtype="bfloat16",
        block_tokens=BLOCK_TOKENS,
        hash=algorithm,
    )

    def ours() -> list[float]:
        return timed(lambda: schema.prefix(tokens).keys, sizes.hashes)

    def other() -> list[float]:
        arguments = {"tokens": tokens, "calls": sizes.hashes, **more}
        seconds: list[float] = process.tell("hash", **arguments)
        return seconds

    turns = in_turns(ours, other, sizes.rounds)
    name = "keys" if algorithm == DEFAULT else f"keys-{algorithm}"
    what = f"keys of {count} tokens in blocks of {BLOCK_TOKENS}, from a list, by {algorithm}"
    return turns.row(peer, name, what, theirs, "ms", MILLISECONDS)
