"""One engine process: it answers requests alone, or does prefill or decode under a conductor.

The first line on stdin is a `Job`. Each later one is an order, an object with one key:

    {"alone": [INDEX, ...]}     answer these requests without pool or conductor: an "alone" each
    {"measure": ROLE}           seconds of prefills, or of decode steps, as rows
    {"join": Membership}        open the pool, register with the conductor
    {"prefill": Order}          compute a prompt, put its blocks into the pool: a "prefilled"
    {"decode": Order}           get the blocks, compute the rest, answer: a "decoded"
    {"network": null}           blocks and bytes read over the network so far

It writes one JSON object per line to stdout, with the key in quotes above, else "done". It ends
when stdin does.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...traces.trace import BLOCK_TOKENS
from .model import VOCAB, ModelSize
from .trace import load_slice, tokens_of

if TYPE_CHECKING:
    from typing import TextIO

    from tiffin.conductor.records import Load

MODEL = "demo-llama"
# The most that the conductor lets wait at one instance; beyond it stdin is not read.
WAITING_MAX = 1024
# Here prefill and decode share the cores of one machine; in production they have separate machines.
# So prefill has priority: its times then do not depend on decode, as its profile assumes.
DECODE_NICENESS = 10
# How long decode waits for blocks that prefill has handed over, before it computes them: nodes
# publish new blocks to the directory with a delay, and another prefill may still be writing some.
HANDOVER_S = 5.0
HANDOVER_POLL_S = 0.025


@dataclass(frozen=True, slots=True)
class Job:
    """The task of a worker: its name, role and model."""

    name: str
    role: str  # "prefill" or "decode"
    seed: int
    size: ModelSize

    @classmethod
    def from_json(cls, line: str) -> Job:
        """The inverse of `json.dumps(asdict(job))`."""
        fields = json.loads(line)
        return cls(**{**fields, "size": ModelSize(**fields["size"])})


@dataclass(frozen=True, slots=True)
class Membership:
    """The addresses of a worker's pool, node and conductor."""

    pool: str
    node: str
    conductor: str
    profile: str


@dataclass(frozen=True, slots=True)
class Order:
    """A request to prefill or to decode. `cached_tokens` is the conductor's estimate of the tokens
    that need no computing. `first_token` is the result of prefill; `handed_over` says that its
    blocks are in the pool, or soon will be."""

    id: str
    tokens: list[int]
    cached_tokens: int = 0
    first_token: int = -1
    handed_over: bool = True
    new_tokens: int = 1


@dataclass(slots=True)
class Decoding:
    """A request that is being answered: its cache, and all of its tokens so far."""

    order: Order
    cache: Any
    ids: Any
    hit_tokens: int
    load_s: float
    tokens: list[int]


def main() -> None:
    """Serve until stdin ends."""
    # Only events may reach the real stdout; the output of libraries goes to stderr.
    events = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    job = Job.from_json(sys.stdin.readline())
    if job.role == "decode":
        os.nice(DECODE_NICENESS)
    with ExitStack() as stack:
        worker = Worker(job, events, stack)
        worker.send({"ready": True})
        worker.serve()


class Worker:
    """A model and its queue of orders."""

    def __init__(self, job: Job, events: TextIO, stack: ExitStack) -> None:
        from .engine import TransformersEngine

        self._job, self._events, self._stack = job, events, stack
        self._driver = TransformersEngine(job.size, job.seed)
        self._orders: queue.Queue[dict[str, Any] | None] = queue.Queue(WAITING_MAX)
        self._queued: dict[str, int] = {}  # tokens to compute, per request to prefill
        self._running: dict[str, Decoding] = {}
        self._handed: dict[str, int] = {}  # tokens, per request to decode
        self._client: Any = None
        self._cached: Any = None
        self._presence: Any = None

    def send(self, event: dict[str, Any]) -> None:
        """Send one line to the demo."""
        self._events.write(json.dumps(event) + "\n")

    def serve(self) -> None:
        """Carry out orders: prefills one after the other, decodes one token of each in turn."""
        threading.Thread(target=self._read, daemon=True).start()
        while True:
            try:
                order = self._orders.get(block=not self._running)
            except queue.Empty:
                self._step()
                continue
            if order is None:
                return
            ((kind, content),) = order.items()
            getattr(self, f"_{kind}")(content)
            self._step()

    def _read(self) -> None:
        """Read orders and count the waiting ones, for heartbeats while the engine computes."""
        for line in sys.stdin:
            order = json.loads(line)
            if "prefill" in order:
                request = order["prefill"] = Order(**order["prefill"])
                computed = len(request.tokens) - request.cached_tokens
                self._queued[request.id] = max(computed, 1)
            elif "decode" in order:
                request = order["decode"] = Order(**order["decode"])
                self._handed[request.id] = len(request.tokens)
            self._orders.put(order)
        self._orders.put(None)

    # -- alone -------------------------------------------------------------------------------------

    def _alone(self, indices: list[int]) -> None:
        requests = load_slice()
        for index in indices:
            tokens = tokens_of(requests[index], seed=self._job.seed, vocab=VOCAB).tolist()
            ttft_s, answer = self._driver.answer(tokens)
            row = {"request": index, "worker": self._job.name, "prompt_tokens": len(tokens)}
            self.send({"alone": {**row, "ttft_s": ttft_s, "tokens": answer}})
        self.send({"done": True})

    def _measure(self, role: str) -> None:
        prefill = role == "prefill"
        measure = self._driver.measure_prefill if prefill else self._driver.measure_decode
        self.send({"done": measure()})

    # -- in the pool, under a conductor ------------------------------------------------------------

    def _join(self, fields: dict[str, Any]) -> None:
        from tiffin.conductor.records import InstanceSpec, Role
        from tiffin.kvstore import Client
        from tiffin.kvstore.connectors.transformers import PrefixCache

        from ...serving.presence import Presence

        to, job = Membership(**fields), self._job
        self._client = self._stack.enter_context(Client.open(to.pool, name=job.name))
        self._cached = PrefixCache(self._client, self._driver.model, block_tokens=BLOCK_TOKENS)
        schema = self._cached.schema
        spec = InstanceSpec(
            job.name,
            MODEL,
            Role(job.role),
            to.profile,
            node=to.node,
            block_tokens=BLOCK_TOKENS,
            block_bytes=schema.extent_bytes,
            prefix_caching=False,  # each prompt begins with an empty cache
        )
        presence = Presence(to.conductor, spec, self._load)
        self._presence = self._stack.enter_context(presence)
        self.send({"done": schema.canonical_bytes().decode("ascii")})

    def _prefill(self, order: Order) -> None:
        """Compute a prompt and the first token of the answer. Blocks that the pool has are read
        from it, full ones that it lacks are put into it."""
        from .engine import as_ids

        self._presence.say(order.id, "prefill_began")
        ids = as_ids(order.tokens)
        cache, hit = self._cached.load(ids)
        self._presence.say(order.id, "prefill_began", max(len(order.tokens) - hit, 1))
        token = self._driver.extend(cache, ids)
        first_token_at = time.monotonic()
        self._presence.say(order.id, "prefill_done")
        self._cached.save(cache, ids)
        del self._queued[order.id]
        self._presence.say(order.id, "first_token")
        last = self._cached.last
        self.send(
            {
                "prefilled": {
                    "id": order.id,
                    "token": token,
                    "first_token_at": first_token_at,
                    "hit_tokens": last.hit_tokens,
                    "load_s": last.load_s,
                    "save_s": last.save_s,
                    "not_saved": last.save_reason or "",
                    "failures": self._cached.failures,
                }
            }
        )

    def _decode(self, order: Order) -> None:
        """Begin to answer: load the blocks that prefill put into the pool, compute the rest."""
        from .engine import as_ids

        ids = as_ids([*order.tokens, order.first_token])
        full = len(order.tokens) // BLOCK_TOKENS * BLOCK_TOKENS
        deadline = time.monotonic() + (HANDOVER_S if order.handed_over else 0.0)
        cache, hit = self._cached.load(ids)
        while hit < full and time.monotonic() < deadline:
            time.sleep(HANDOVER_POLL_S)
            cache, hit = self._cached.load(ids)
        self._presence.say(order.id, "handed_over")
        last = self._cached.last
        tokens = [order.first_token]
        one = Decoding(order, cache, ids, last.hit_tokens, last.load_s, tokens)
        self._running[order.id] = one
        del self._handed[order.id]

    def _step(self) -> None:
        """Compute one token of each running request."""
        import torch

        for one in list(self._running.values()):
            if len(one.tokens) < one.order.new_tokens:
                token = self._driver.extend(one.cache, one.ids)
                one.tokens.append(token)
                one.ids = torch.cat((one.ids, torch.tensor([[token]])), dim=1)
            if len(one.tokens) == one.order.new_tokens:
                self._answered(one)

    def _answered(self, one: Decoding) -> None:
        del self._running[one.order.id]
        self._presence.say(one.order.id, "tokens", len(one.tokens) - 1)
        self._presence.say(one.order.id, "finished")
        self.send(
            {
                "decoded": {
                    "id": one.order.id,
                    "tokens": one.tokens,
                    "hit_tokens": one.hit_tokens,
                    "load_s": one.load_s,
                    "failures": self._cached.failures,
                }
            }
        )

    def _network(self, _: None) -> None:
        # A client of a single node has no links.
        ways = self._client.statistics().get("links", {}).values()
        nbytes = int(sum(way["bytes"] for way in ways))
        self.send({"done": {"bytes": nbytes, "blocks": nbytes // self._cached.schema.extent_bytes}})

    def _load(self) -> Load:
        """The load, for heartbeats; called from their thread."""
        from tiffin.conductor.records import Load

        if self._job.role == "prefill":
            queued = list(self._queued.values())
            return Load(sum(queued), len(queued), age_s=0.0)
        context = list(self._handed.values())
        context += [one.ids.shape[1] for one in list(self._running.values())]
        return Load(running=len(context), context_tokens=sum(context), age_s=0.0)


if __name__ == "__main__":
    main()
