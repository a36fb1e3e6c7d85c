"""A greedy scheduler that knows the simulated cluster as it is: a mark for policies to be near.

For each prefill instance it takes the lowest TTFT of recomputing and of fetching from any other,

    TTFT = max(queue, transfer) + prefill

where the queue is what is really left to compute there, blocks are where they really are (or will
be, when those that wait before have been computed), and a transfer goes at the rate that both cards
would give it now. Of decode instances it takes the one with the shortest step, with all requests
that are on their way there. It is greedy: it does not know what comes next, and does not keep
anything free for that. So it is no bound; a policy can do better. With a `work_weight` it takes the
lowest

    TTFT + work_weight × prefill

as a second of computing is one that those who come later wait: where queues do not end, by as many
of them as there are.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from tiffin.conductor.cost import latency_profiles
from tiffin.conductor.records import Decision, Fetch

from ..instances.prefill_work import prefill_work

if TYPE_CHECKING:
    from tiffin.conductor.records import Request

    from ..instances.prefill_instance import PrefillInstance
    from .simulation import TrueState

POLICY = "oracle"


class Way(NamedTuple):
    """A way to prefill a prompt: `blocks` of it are found, after those from `source` ("": its own)
    have come in `transfer_s`. Of equal costs the one is less whose card sends less, as the prompt's
    KV has to leave it."""

    cost_s: float
    ttft_s: float
    sending: int
    instance: str
    blocks: int
    source: str = ""
    start: int = 0
    transfer_s: float = 0.0


class Oracle:
    """See the top of the file."""

    def __init__(self, state: TrueState, work_weight: float = 0.0) -> None:
        self._state, self._work_weight = state, work_weight
        self._block_tokens = state.trace.block_tokens
        self._block_bytes = self._block_tokens * state.options.token_bytes
        self._profile = latency_profiles.load(state.options.profile)
        # What is found is loaded from the node's memory.
        self._load_byte_s = 1 / state.options.settings().transfers.dram_bandwidth_bytes_s

    def schedule(self, request: Request, now: float) -> Decision:
        """The instances with the lowest true TTFT and step."""
        have = {name: one.cache.match(request.keys) for name, one in self._state.prefills.items()}
        ways = [way for name in have for way in self._ways(name, request, have, now)]
        best = min(ways)
        step_s, decode = min(self._steps(request.prompt_tokens))
        fetches: tuple[Fetch, ...] = ()
        if best.source:
            nbytes = (best.blocks - best.start) * self._block_bytes
            moving = (best.source, "dram", nbytes, best.transfer_s)
            fetches = (Fetch(best.start, best.blocks, *moving),)
        cached, available = (
            min(blocks * self._block_tokens, request.prompt_tokens - 1)
            for blocks in (best.blocks, max(have.values()))
        )
        return Decision(
            *(request.id, best.instance, decode, POLICY, best.ttft_s, step_s, cached, available),
            fetches=fetches,
            decided_at=now,
        )

    def _ways(self, name: str, request: Request, have: dict[str, int], now: float) -> list[Way]:
        """All ways to prefill on one instance."""
        instance, network = self._state.prefills[name], self._state.network
        tokens, queue_s = request.prompt_tokens, self._queue_s(instance, now)
        own = instance.will_have(request.keys)
        sending = network.sending(name)
        found = [self._way(queue_s, tokens, sending, name, own)]
        for source, blocks in have.items():
            if blocks > own:
                # The instance fetches what it does not have now.
                nbytes = (blocks - have[name]) * self._block_bytes
                rate = network.next_rate_bytes_s(source, name)
                moving_s = self._state.options.latency_s + nbytes / rate
                wait_s, start = max(queue_s, moving_s), have[name]
                found.append(
                    self._way(wait_s, tokens, sending, name, blocks, source, start, moving_s)
                )
        return found

    def _way(
        self,
        wait_s: float,
        tokens: int,
        sending: int,
        name: str,
        blocks: int,
        source: str = "",
        start: int = 0,
        transfer_s: float = 0.0,
    ) -> Way:
        prefill_s = self._prefill_s(tokens, blocks)
        ttft_s = wait_s + prefill_s
        cost_s = ttft_s + self._work_weight * prefill_s
        return Way(cost_s, ttft_s, sending, name, blocks, source, start, transfer_s)

    def _queue_s(self, instance: PrefillInstance, now: float) -> float:
        """Until all that waits there, and can be computed by then, has been."""
        ends_s = max(instance.free_at_s - now, 0.0)
        for job, fetching in instance.waiting:
            assert job.decision is not None
            if fetching:
                source = job.decision.fetches[0].source
                if self._state.network.left_s(source, instance.name) > ends_s:
                    continue  # it is skipped until its blocks have come
            planned = -(-job.decision.cached_tokens // self._block_tokens)
            blocks = max(planned, instance.cache.match(job.keys))
            ends_s += self._prefill_s(job.trace.prompt_tokens, blocks)
        return ends_s

    def _prefill_s(self, tokens: int, blocks: int) -> float:
        options = self._state.options
        cached = min(blocks * self._block_tokens, tokens - 1)
        load_s = cached * options.token_bytes * self._load_byte_s
        work = prefill_work(self._profile, tokens, cached, options.chunk_tokens, options.stages)
        return load_s + work.done_s

    def _steps(self, prompt_tokens: int) -> list[tuple[float, str]]:
        """Seconds of a step of each decode instance, with this request and all that go there."""
        batch, context = Counter[str](), Counter[str]()
        for job in self._state.running.values():
            assert job.decision is not None
            batch[job.decision.decode] += 1
            context[job.decision.decode] += job.trace.prompt_tokens
        d0, d1, d2 = self._profile.decode
        return [
            (d0 + d1 * (batch[name] + 1) + d2 * (context[name] + prompt_tokens), name)
            for name in self._state.decodes
        ]
