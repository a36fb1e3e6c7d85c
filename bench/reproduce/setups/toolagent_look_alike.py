"""A look-alike of Mooncake's trace of tools and agents, which does not ship with Tiffin.

Three kinds of sessions run at once, in the shares that some hundred published requests of that
trace have: an agent whose prompts begin with the same 12 blocks, another one with 5 blocks, and
chats, which share the first block only and go on over several turns. Block 0 begins every prompt.

What is known of the whole trace is published in statistics: 23,608 requests in an hour, prompts of
7,590 tokens and answers of 182 in the mean (arXiv 2407.00079, section 4), and the hits of an LRU
cache over its capacity (FAST '25, figure 9, tool & agent). The lengths and pauses below follow from
these and from nothing else; `tests/bench/reproduce/test_toolagent_look_alike.py` says how near they
come. Arrivals are on a grain of three seconds, as in all traces of that release.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from heapq import merge
from itertools import islice
from random import Random
from typing import TYPE_CHECKING

from ...traces.generator import LogNormal, Sessions, WorkloadParameters
from ...traces.trace import Trace, TraceRequest

if TYPE_CHECKING:
    from collections.abc import Iterator

REQUESTS = 23_608
GRAIN_S = 3.0
# Requests per second: 23,608 in an hour, and a little more, as the first chats have no later turns.
RATE = 6.75
_NO_PREFIX = LogNormal(1, 0)  # of less than a block: only the system prompt's blocks are shared

KINDS = (
    # 33% of requests: 6.2 to 8.2 thousand tokens, of which 12 blocks are the same; 3 to 80 back.
    WorkloadParameters(
        rate=0.33 * RATE,
        system_blocks=12,
        prefixes=1,
        prefix=_NO_PREFIX,
        popularity=0,
        turns=1,
        opening=LogNormal(700, 0.7),
        addition=_NO_PREFIX,
        answer=LogNormal(20, 0.8),
        pause=_NO_PREFIX,
    ),
    # 12%: some 3.1 thousand, of which 5 blocks; some 20 back.
    WorkloadParameters(
        rate=0.12 * RATE,
        system_blocks=5,
        prefixes=1,
        prefix=_NO_PREFIX,
        popularity=0,
        turns=1,
        opening=LogNormal(500, 0.4),
        addition=_NO_PREFIX,
        answer=LogNormal(18, 0.5),
        pause=_NO_PREFIX,
    ),
    # 55%: chats of 0.9 to 32 thousand; 10 to 1,000 back. Both means fix the mean lengths of a chat,
    # the hits without limit how many of its requests are later turns, the growth of hits with
    # capacity how long these take to come.
    WorkloadParameters(
        rate=0.55 * RATE,
        system_blocks=1,
        prefixes=1,
        prefix=_NO_PREFIX,
        popularity=0,
        turns=1.75,
        opening=LogNormal(5_150, 0.9),
        addition=LogNormal(600, 1.0),
        answer=LogNormal(200, 0.95),
        pause=LogNormal(150, 1.0),
        longest=65_536,
    ),
)


@cache
def toolagent(seed: int = 0, requests: int = REQUESTS) -> Trace:
    """The look-alike; the same for the same seed."""
    chance = Random(seed)
    kinds = [Sessions(kind, Random(chance.random())).requests() for kind in KINDS]
    streams = [_numbered(kind, source) for kind, source in enumerate(kinds)]
    together = merge(*streams, key=lambda request: request.arrival_s)
    found = [_on_grain(request) for request in islice(together, requests)]
    return Trace("tool & agent look-alike", tuple(found))


def _numbered(kind: int, requests: Iterator[TraceRequest]) -> Iterator[TraceRequest]:
    """Ids of their own for the blocks of each kind, but for the first one, which is common."""
    for request in requests:
        head, *rest = request.blocks
        blocks = (head, *(block * len(KINDS) + kind for block in rest))
        yield replace(request, blocks=blocks)


def _on_grain(request: TraceRequest) -> TraceRequest:
    return replace(request, arrival_s=request.arrival_s // GRAIN_S * GRAIN_S)
