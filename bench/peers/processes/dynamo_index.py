"""Dynamo's prefix index in a process, run by a Python with `ai-dynamo-runtime`.

    dynamo_index.py WORKERS PROMPT_BLOCKS SHARED_BLOCKS

Verbs: `match` times look-ups in a tree in which every worker has the shared blocks and a private
tail, and all have one hot prompt; `apply` times events into a new tree; `resident` is the memory of
a new tree; `hash` times the keys of a prompt's blocks.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time

from serving import serve, take_stdout, timed  # type: ignore[import-not-found]


class Index:
    """A filled tree, and its prompts."""

    def __init__(self, workers: int, prompt_blocks: int, shared_blocks: int) -> None:
        from dynamo import _core  # type: ignore[import-not-found]

        self.core, self.workers = _core, workers
        self.dice = random.Random(0)
        self.tree = _core.RadixTree()
        shared = self._blocks(shared_blocks)
        self.prompts = [
            shared + self._blocks(prompt_blocks - shared_blocks) for _ in range(workers)
        ]
        hot = self._blocks(prompt_blocks)
        for worker, prompt in enumerate(self.prompts):
            self.tree.apply_event(worker, _stored(0, prompt))
            self.tree.apply_event(worker, _stored(1, hot))
        self.hot = [tokens for _, tokens in hot]
        # The tree has a thread of its own; it answers once it has applied what came before.
        self.tree.find_matches([0])

    def match(self, kind: str, calls: int, scores: bool) -> list[float]:
        """Look-ups of one prompt after the other. `scores`: and read the matched blocks of each
        worker, as a dict."""
        if kind == "private":
            asked = [self.dice.choice(self.prompts) for _ in range(calls)]
            lists = [[tokens for _, tokens in prompt] for prompt in asked]
        elif kind == "hot":
            lists = [list(self.hot) for _ in range(calls)]
        else:
            lists = [[tokens for _, tokens in self._blocks(len(self.hot))] for _ in range(calls)]
        left = iter(lists)
        if scores:
            return timed(calls, lambda: self.tree.find_matches(next(left)).scores)  # type: ignore[no-any-return]
        return timed(calls, lambda: self.tree.find_matches(next(left)))  # type: ignore[no-any-return]

    def apply(self, events: int, blocks: int) -> float:
        """Seconds until a new tree has applied so many events of so many new blocks each."""
        batch = [_stored(number, self._blocks(blocks)) for number in range(events)]
        tree = self.core.RadixTree()
        start_s = time.perf_counter()
        for number, event in enumerate(batch):
            tree.apply_event(number % self.workers, event)
        tree.find_matches([0])
        return time.perf_counter() - start_s

    def resident(self, blocks: int, each: int) -> float:
        """Bytes per block that this process grows by when a new tree gets so many, `each` in an
        event."""
        batch = [_stored(number, self._blocks(each)) for number in range(blocks // each)]
        before = _resident_bytes()
        tree = self.core.RadixTree()
        for number, event in enumerate(batch):
            tree.apply_event(number % self.workers, event)
        tree.find_matches([0])
        return (_resident_bytes() - before) / (blocks // each * each)

    def hash(self, tokens: list[int], block_tokens: int, calls: int) -> list[float]:
        """The hashes of a prompt's blocks."""
        return timed(calls, lambda: self.core.compute_block_hash_for_seq(tokens, block_tokens))  # type: ignore[no-any-return]

    def _blocks(self, count: int) -> list[tuple[int, int]]:
        return [(self.dice.getrandbits(63), self.dice.getrandbits(63)) for _ in range(count)]


def _stored(number: int, blocks: list[tuple[int, int]]) -> bytes:
    listed = [{"block_hash": chain, "tokens_hash": tokens} for chain, tokens in blocks]
    stored = {"stored": {"parent_hash": None, "blocks": listed}}
    return json.dumps({"event_id": number, "dp_rank": 0, "data": stored}).encode()


def _resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    """Serve commands."""
    answers = take_stdout()
    os.environ["DYN_LOG"] = "error"
    index = Index(*map(int, sys.argv[1:]))
    serve(
        answers,
        {
            "match": index.match,
            "apply": index.apply,
            "resident": index.resident,
            "hash": index.hash,
        },
    )


if __name__ == "__main__":
    main()
