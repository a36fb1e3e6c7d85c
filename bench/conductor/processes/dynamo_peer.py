"""Dynamo's scheduler in a process, run by a Python with `ai-dynamo-runtime`; it imports no module
of Tiffin.

    python dynamo_peer.py WORKERS PROMPT_BLOCKS BLOCK_TOKENS

It prints `"ready"` and then reads lines: `select N` and `reserve N` make N calls, one after the
other, and print a JSON list of seconds; the reservations are then freed, untimed. `hold N` keeps N
reservations, of other prompts, from then on.

Its workers publish no events, so its index is empty: that saves it the walk through the index.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
from typing import Any, TextIO

_MODEL = "bench"


async def _run(answers: TextIO, workers: int, blocks: int, block_tokens: int) -> None:
    from dynamo import _core  # type: ignore[import-not-found]

    service = _core.SelectionService(indexer_threads=2)
    for number in range(workers):
        await service.upsert_worker(_worker(number, block_tokens))
    prompts = _Prompts(blocks, block_tokens)
    held = 0
    print('"ready"', file=answers, flush=True)
    for line in sys.stdin:
        word, text = line.split()
        number = int(text)
        seconds: list[float] = []
        if word == "hold":
            for index in range(held, number):
                await service.select_and_reserve({**prompts.new(), "selection_id": f"held-{index}"})
            for index in range(number, held):
                await service.free_reservation(f"held-{index}")
            held = number
        else:
            seconds = await _ask(service, word, [prompts.new() for _ in range(number)])
        print(json.dumps(seconds), file=answers, flush=True)
    service.shutdown()


class _Prompts:
    """Generates request bodies, each of a new prompt."""

    def __init__(self, blocks: int, block_tokens: int) -> None:
        self._blocks, self._block_tokens = blocks, block_tokens
        self._dice = random.Random(0)

    def new(self) -> dict[str, Any]:
        """The body of a new prompt."""
        return {
            "model_name": _MODEL,
            "block_hashes": [self._dice.getrandbits(63) for _ in range(self._blocks)],
            "sequence_hashes": [self._dice.getrandbits(63) for _ in range(self._blocks)],
            "isl_tokens": self._block_tokens * self._blocks + 100,
        }


async def _ask(service: Any, word: str, bodies: list[dict[str, Any]]) -> list[float]:
    call = {"select": service.select, "reserve": service.select_and_reserve}[word]
    if word == "reserve":
        for index, one in enumerate(bodies):
            one["selection_id"] = f"timed-{index}"
    seconds = []
    for one in bodies:
        start_s = time.perf_counter()
        await call(one)
        seconds.append(time.perf_counter() - start_s)
    if word == "reserve":
        for one in bodies:
            await service.free_reservation(one["selection_id"])
    return seconds


def _worker(number: int, block_tokens: int) -> dict[str, Any]:
    return {
        "worker_id": number,
        "model_name": _MODEL,
        "endpoint": f"http://127.0.0.1:{20_000 + number % 10_000}",
        "block_size": block_tokens,
        "total_kv_blocks": 4096,
        "max_num_batched_tokens": 65_536,
    }


def main() -> None:
    """Serve commands with the sizes in the arguments."""
    del sys.path[0]  # modules of this folder have common names: `load`, `peer`
    # The library logs to standard output, so answers go to a copy of that descriptor. The log level
    # suppresses its messages per request, which would take a part of its time.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    os.environ["DYN_LOG"] = "error"
    os.environ["DYN_ROUTER_USE_KV_EVENTS"] = "false"
    workers, blocks, block_tokens = map(int, sys.argv[1:])
    asyncio.run(_run(answers, workers, blocks, block_tokens))


if __name__ == "__main__":
    main()
