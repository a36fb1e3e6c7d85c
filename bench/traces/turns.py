"""Which requests go on with an earlier one: the turns of conversations."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .trace import Trace

REMEMBERED = 64  # ends at one block: many prompts may end with the same document
SYSTEM_BLOCKS = 1  # a prompt of no more full blocks may be nothing but what all have in common


def previous_turns(trace: Trace) -> list[int | None]:
    """For each request the number of the one that it goes on with, or None.

    A trace does not say it. A request goes on with an earlier one if it begins with all full blocks
    of that (more than `SYSTEM_BLOCKS`) and has room for its prompt and its answer. Of several it
    takes the one with most blocks, and of these the latest; each is gone on with once, and of those
    that end at the same block only the last `REMEMBERED` are looked at.
    """
    open_turns: dict[int, deque[int]] = {}  # by the last full block; ids are chained
    return [_join(trace, number, open_turns) for number in range(len(trace.requests))]


def _join(trace: Trace, number: int, open_turns: dict[int, deque[int]]) -> int | None:
    chain = trace.full_blocks(trace.requests[number])
    previous = None
    for block in reversed(chain[SYSTEM_BLOCKS:]):
        earlier = open_turns.get(block, deque[int]())
        previous = next((e for e in reversed(earlier) if _fits(trace, e, number)), None)
        if previous is not None:
            earlier.remove(previous)
            break
    if len(chain) > SYSTEM_BLOCKS:
        open_turns.setdefault(chain[-1], deque(maxlen=REMEMBERED)).append(number)
    return previous


def _fits(trace: Trace, earlier: int, number: int) -> bool:
    before = trace.requests[earlier]
    return trace.requests[number].prompt_tokens > before.prompt_tokens + before.output_tokens


def depths(previous: list[int | None]) -> list[int]:
    """The turn that each request is, from 1."""
    found: list[int] = []
    for one in previous:
        found.append(1 if one is None else found[one] + 1)
    return found
