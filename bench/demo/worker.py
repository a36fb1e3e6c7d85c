"""One engine process: answers its share of the requests, with the pool or without.

The first line on stdin is a `Job`, each later one `{"pool": bool}`, a pass over the requests. On
stdout goes one JSON line per event: `{"ready": true}`, a `Row` per request, and after each pass
`{"done": {"bytes": int, "blocks": int}}`, what came over the network. It ends when stdin does.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from .model import VOCAB, ModelSize, build
from .trace import BLOCK_TOKENS, Request, load_slice, tokens_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TextIO

NEW_TOKENS = 8
# With a part of the prompt in the cache, transformers' attention on CPUs computes the masked half
# too, for all new tokens at once; in chunks it computes little of it. A prompt that starts from
# nothing is faster in one piece. So each pass runs as is best for it.
CHUNK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Job:
    """What a worker has to know: which share of the first `requests` requests is its own."""

    url: str
    worker: int
    workers: int
    requests: int
    seed: int
    size: ModelSize

    @classmethod
    def from_json(cls, line: str) -> Job:
        """The inverse of `json.dumps(asdict(job))`."""
        fields = json.loads(line)
        return cls(**{**fields, "size": ModelSize(**fields["size"])})


@dataclass(frozen=True, slots=True)
class Row:
    """One answered request. `ttft_s` runs from the request to its first token, loading included;
    `save_s` comes after the answer."""

    request: int
    worker: int
    pool: bool
    prompt_tokens: int
    hit_tokens: int
    ttft_s: float
    load_s: float
    save_s: float
    failures: int
    tokens: list[int]


class FirstTokenClock:
    """A streamer, as `generate` takes them, that only notes when the first new token came."""

    def __init__(self) -> None:
        self.first_token_s = 0.0
        self._prompt_seen = False

    def put(self, _: Any) -> None:
        """Called once with the prompt and then for every token."""
        if self._prompt_seen and not self.first_token_s:
            self.first_token_s = time.perf_counter()
        self._prompt_seen = True

    def end(self) -> None:
        """Part of the interface."""


def main() -> None:
    """Serve passes until stdin ends."""
    # Only events may reach the real stdout; whatever a library prints goes to stderr.
    events = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    job = Job.from_json(sys.stdin.readline())
    worker = Worker(job, events)
    worker.send({"ready": True})
    for line in sys.stdin:
        worker.send({"done": worker.replay(pool=json.loads(line)["pool"])})


class Worker:
    """A model and this worker's prompts."""

    def __init__(self, job: Job, events: TextIO) -> None:
        import torch

        torch.set_num_threads(1)
        self._job = job
        self._events = events
        self._model = build(job.size, job.seed)
        self._generate(self._model.generate, torch.zeros((1, 64), dtype=torch.long))  # warm up

    def send(self, event: dict[str, Any]) -> None:
        """One line for the orchestrator."""
        self._events.write(json.dumps(event) + "\n")

    def replay(self, *, pool: bool) -> dict[str, int]:
        """Answer this worker's share of the requests, in order; what came over the network."""
        from tiffin.kvstore import Client
        from tiffin.kvstore.connectors.transformers import PrefixCache

        job, own = self._job, slice(self._job.worker, self._job.requests, self._job.workers)
        share = list(enumerate(load_slice()))[own]
        if not pool:
            for index, request in share:
                self._answer(index, request, None)
            return {"bytes": 0, "blocks": 0}
        with Client.open(job.url, name=f"worker {job.worker}") as client:
            cached = PrefixCache(client, self._model, block_tokens=BLOCK_TOKENS)
            for index, request in share:
                self._answer(index, request, cached)
            # A client of a single node has no ways to others.
            ways = client.statistics().get("links", {}).values()
            nbytes = int(sum(way["bytes"] for way in ways))
            return {"bytes": nbytes, "blocks": nbytes // cached.schema.extent_bytes}

    def _answer(self, index: int, request: Request, cached: Any) -> None:
        import torch

        ids = torch.from_numpy(tokens_of(request, seed=self._job.seed, vocab=VOCAB))[None]
        if cached is None:
            ttft_s, tokens = self._generate(self._model.generate, ids)
        else:
            generate = partial(cached.generate, prefill_chunk_size=CHUNK_TOKENS)
            ttft_s, tokens = self._generate(generate, ids)
        last = cached and cached.last
        row = Row(
            request=index,
            worker=self._job.worker,
            pool=cached is not None,
            prompt_tokens=ids.shape[1],
            hit_tokens=last.hit_tokens if last else 0,
            ttft_s=ttft_s,
            load_s=last.load_s if last else 0.0,
            save_s=last.save_s if last else 0.0,
            failures=cached.failures if cached else 0,
            tokens=tokens,
        )
        self.send(asdict(row))

    def _generate(self, generate: Callable[..., Any], ids: Any) -> tuple[float, list[int]]:
        """Seconds to the first token, and all new tokens."""
        import torch

        clock, started_s = FirstTokenClock(), time.perf_counter()
        output = generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            pad_token_id=0,
            streamer=clock,
        )
        return clock.first_token_s - started_s, output[0, ids.shape[1] :].tolist()


if __name__ == "__main__":
    main()
