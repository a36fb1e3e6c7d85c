"""The shipped slice of a real trace, and prompts made from it.

A trace line has no text, only a hash id for each 512 tokens of the prompt. Equal ids mean equal
tokens (and equal tokens before them), and nothing else matters to a prefix cache. So each id seeds
the tokens of its block, and the prompts share exactly the prefixes that the real ones shared.

    python -m tiffin.bench.demo.engines.trace conversation_trace.jsonl > conversation_slice.jsonl

makes the shipped slice again from the full trace.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ...traces.readers import parse_mooncake
from ...traces.trace import BLOCK_TOKENS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

MAX_PROMPT_TOKENS = 4096
CONVERSATIONS_PER_KEPT = 40
SLICE = "conversation_slice.jsonl"


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One line of the trace; `timestamp` is milliseconds after the trace's start."""

    timestamp: int
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


def parse(lines: Iterable[str]) -> list[TraceRequest]:
    """Requests from JSON lines. Raises InvalidInput for a line that contradicts itself."""
    return [
        TraceRequest(round(r.arrival_s * 1000), r.prompt_tokens, r.output_tokens, r.blocks)
        for r in parse_mooncake(lines, "trace")
    ]


def load_slice() -> list[TraceRequest]:
    """The shipped requests, in the order in which they arrived."""
    text = (files("tiffin.bench.data") / SLICE).read_text(encoding="ascii")
    return parse(text.splitlines())


def select(trace: Iterable[TraceRequest]) -> list[TraceRequest]:
    """Every 40th conversation of the whole trace, with all its requests of at most 4,096 tokens.

    Whole conversations, because consecutive requests of a busy service are of many users, and a
    slice of a minute has almost no second question of the same user. Conversations are identified
    by their first two blocks (the first is a system prompt that all share) and counted in order of
    appearance; only that position and the length decide.
    """
    short = [request for request in trace if request.input_length <= MAX_PROMPT_TOKENS]
    order: dict[tuple[int, ...], int] = {}
    for request in short:
        order.setdefault(request.hash_ids[:2], len(order))
    return [r for r in short if order[r.hash_ids[:2]] % CONVERSATIONS_PER_KEPT == 0]


def tokens_of(request: TraceRequest, *, seed: int, vocab: int) -> NDArray[np.int64]:
    """The prompt's token ids, int64 [input_length]: the same for the same ids and seed."""
    blocks = [
        np.random.default_rng((seed, hash_id)).integers(0, vocab, BLOCK_TOKENS)
        for hash_id in request.hash_ids
    ]
    return np.concatenate(blocks)[: request.input_length]


def reusable_tokens(requests: Sequence[TraceRequest]) -> int:
    """Prompt tokens that a pool without limits would save if requests came one after the other:
    full blocks seen before, except the last token of a prompt, which always has to be computed."""
    seen: set[int] = set()
    reused = 0
    for request in requests:
        for hash_id in request.hash_ids[: (request.input_length - 1) // BLOCK_TOKENS]:
            if hash_id not in seen:
                break
            reused += BLOCK_TOKENS
        seen.update(request.hash_ids[: request.input_length // BLOCK_TOKENS])
    return reused


def main() -> None:
    """Print the slice of a full trace."""
    parser = argparse.ArgumentParser(description=select.__doc__)
    parser.add_argument("trace", type=Path)
    with parser.parse_args().trace.open(encoding="ascii") as lines:
        for request in select(parse(lines)):
            print(json.dumps(asdict(request)))


if __name__ == "__main__":
    main()
