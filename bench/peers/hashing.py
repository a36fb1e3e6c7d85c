"""Keys of a prompt's blocks, ours beside a peer's: a chain of hashes over the same list of ids."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..store.rows import MILLISECONDS, timed
from ..store.setting import MIB, prompt, schema_of
from .setting import BLOCK_TOKENS
from .turns import PeerRow, in_turns

if TYPE_CHECKING:
    from ..vllm.engine_process import GroupProcess
    from .setting import Setting


def hashed(
    setting: Setting, peer: str, process: GroupProcess, theirs: str, **more: object
) -> PeerRow:
    """A row of a prompt's keys; the peer's process has the verb `hash`."""
    sizes = setting.sizes
    count = sizes.prompt_blocks * BLOCK_TOKENS
    setting.tell(f"keys of {count} tokens")
    tokens = [int(token) for token in prompt(count)]
    schema = schema_of(MIB)

    def ours() -> list[float]:
        return timed(lambda: schema.prefix(tokens).keys, sizes.hashes)

    def other() -> list[float]:
        arguments = {"tokens": tokens, "calls": sizes.hashes, **more}
        seconds: list[float] = process.tell("hash", **arguments)
        return seconds

    turns = in_turns(ours, other, sizes.rounds)
    what = f"keys of {count} tokens in blocks of {BLOCK_TOKENS}, from a list, checked, by XXH3-128"
    return turns.row(peer, "keys", what, theirs, "ms", MILLISECONDS)
