"""The router of the demo: asks the conductor, sends prompts to the chosen workers, records times.

A request goes to its prefill worker with all of its tokens, and to its decode worker with all of
them and the first one of the answer: KV caches move through the pool, not through the router.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tiffin.conductor.records import Objectives, Rejection, Request

from .engines.model import NEW_TOKENS
from .engines.worker import MODEL

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tiffin.conductor.client import ConductorClient
    from tiffin.kvstore import KVSchema

    from .engines.children import Crew

STALL_S = 120.0  # the longest time without a message from workers that have requests


@dataclass(slots=True)
class ServedRequest:
    """The record of one request. Times are seconds since its arrival (`at_s`: since the first one
    arrived). `rejected`: the reason; then of the results only `predicted_ttft_s` is known."""

    id: str
    request: int
    at_s: float
    prompt_tokens: int
    prefill: str = ""
    decode: str = ""
    rejected: str = ""
    predicted_ttft_s: float = math.nan
    ttft_s: float = math.nan
    cached_tokens: int = 0  # expected by the conductor
    hit_tokens: int = 0  # loaded by prefill
    moved_tokens: int = 0  # loaded by decode
    load_s: float = 0.0
    save_s: float = 0.0
    move_s: float = 0.0
    not_saved: str = ""  # why not all that prefill computed is in the pool
    tokens: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Open:
    """A request that has not ended."""

    served: ServedRequest
    prompt: list[int]
    arrived_at: float


@dataclass(frozen=True, slots=True)
class DemoPrompt:
    """A prompt: the request's number in the slice and its tokens."""

    request: int
    tokens: list[int]


class Router:
    """Sends requests, one replay after the other. For one thread."""

    def __init__(self, crew: Crew, client: ConductorClient, schema: KVSchema) -> None:
        self._crew, self._client, self._schema = crew, client, schema
        self._open: dict[str, _Open] = {}
        self.failures: dict[str, int] = {}  # failures of the pool, per worker

    def replay(
        self,
        name: str,
        prompts: Sequence[DemoPrompt],
        *,
        clients: int = 0,
        arrivals_s: Sequence[float] = (),
        ttft_s: float | None = None,
        ended: Callable[[ServedRequest], None] = lambda _: None,
    ) -> list[ServedRequest]:
        """Send all prompts and wait until all have ended, in whatever order.

        Either by `clients` clients in a closed loop, each of which sends the next prompt when its
        last one is answered, or at the times `arrivals_s`, whether or not earlier requests have
        ended. `ttft_s` is the objective. Request ids begin with `name`. Raises ProcessFailed and
        ConductorError.
        """
        begun_at, sent = time.monotonic(), 0
        done: list[ServedRequest] = []

        def end(served: ServedRequest | None) -> None:
            if served is not None:
                done.append(served)
                ended(served)

        while len(done) < len(prompts):
            due_in_s = math.inf
            if sent < len(prompts):
                arrival = begun_at + arrivals_s[sent] if arrivals_s else time.monotonic()
                due_in_s = arrival - time.monotonic()
                if clients and len(self._open) >= clients:
                    due_in_s = math.inf
            if due_in_s <= 0:
                end(self._send(f"{name}-{sent}", prompts[sent], arrival, begun_at, ttft_s))
                sent += 1
            elif due_in_s < math.inf:
                said = self._crew.poll(due_in_s)
                end(self._hear(*said) if said is not None else None)
            else:
                end(self._hear(*self._crew.next(STALL_S)))
        return done

    def _send(
        self,
        name: str,
        prompt: DemoPrompt,
        arrived_at: float,
        begun_at: float,
        ttft_s: float | None,
    ) -> ServedRequest | None:
        """Ask the conductor, and send the request to the chosen worker. Returns the request if it
        was rejected."""
        keys = self._schema.prefix(prompt.tokens).keys
        request = Request(
            name,
            MODEL,
            len(prompt.tokens),
            keys,
            Objectives(ttft_s=ttft_s),
            output_tokens=NEW_TOKENS,
        )
        placed = self._client.schedule(request)
        served = ServedRequest(name, prompt.request, arrived_at - begun_at, len(prompt.tokens))
        predicted_s = placed.predicted_ttft_s
        served.predicted_ttft_s = math.nan if predicted_s is None else predicted_s
        if isinstance(placed, Rejection):
            served.rejected = placed.reason
            return served
        served.prefill, served.decode = placed.prefill, placed.decode
        served.cached_tokens = placed.cached_tokens
        self._open[name] = _Open(served, prompt.tokens, arrived_at)
        order = {"id": name, "tokens": prompt.tokens, "cached_tokens": placed.cached_tokens}
        self._crew.send(placed.prefill, {"prefill": order})
        return None

    def _hear(self, name: str, message: dict[str, Any]) -> ServedRequest | None:
        """Handle a worker's message. Returns the request if the message ends it."""
        if "prefilled" in message:
            self._prefilled(message["prefilled"])
            return None
        if "decoded" in message:
            return self._decoded(message["decoded"])
        raise self._crew.children[name].failed(f"said {message}")

    def _prefilled(self, said: dict[str, Any]) -> None:
        one = self._open[said["id"]]
        served = one.served
        served.ttft_s = said["first_token_at"] - one.arrived_at
        served.hit_tokens, served.load_s = said["hit_tokens"], said["load_s"]
        served.save_s, served.not_saved = said["save_s"], said["not_saved"]
        self.failures[served.prefill] = said["failures"]
        order = {
            "id": served.id,
            "tokens": one.prompt,
            "first_token": said["token"],
            "new_tokens": NEW_TOKENS,
            "handed_over": not served.not_saved,
        }
        self._crew.send(served.decode, {"decode": order})

    def _decoded(self, said: dict[str, Any]) -> ServedRequest:
        one = self._open.pop(said["id"])
        served = one.served
        served.moved_tokens, served.move_s = said["hit_tokens"], said["load_s"]
        self.failures[served.decode] = said["failures"]
        served.tokens = said["tokens"]
        return served
