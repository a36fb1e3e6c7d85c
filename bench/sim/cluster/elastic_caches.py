"""What the instances of a cluster that changes have of prompts, in HBM and in their nodes' memory.

An engine here keeps blocks in HBM alone, and writes them to its node's memory only when the
conductor orders it to save them. Whoever takes a new role loses its HBM. Loading from memory takes
no time, fetching from another node does.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from tiffin.conductor.events.index_updates import Added, Removed

from ..nodes.node_cache import NodeCache

if TYPE_CHECKING:
    from collections.abc import Callable

    from tiffin.conductor.core import Conductor

    from ...traces.trace import Trace, TraceRequest
    from ..clock import VirtualClock
    from ..instances.sim_request import SimRequest
    from ..nodes.network import Network
    from ..nodes.node_cache import TierChange
    from .request_reports import RequestReports


class ElasticCaches:
    """Of all instances, by name; `hbm_tokens` and `dram_tokens` each; without HBM there are none.
    `lost`: blocks that were nowhere else when their instance changed its role."""

    def __init__(
        self,
        core: Conductor,
        clock: VirtualClock,
        network: Network,
        reports: RequestReports,
        trace: Trace,
        hbm_tokens: int,
        dram_tokens: int,
        token_bytes: int,
    ) -> None:
        self._core, self._clock, self._network = core, clock, network
        self._reports, self._trace = reports, trace
        self._hbm_tokens, self._dram_tokens = hbm_tokens, dram_tokens
        self._block_bytes = trace.block_tokens * token_bytes
        self._of: dict[str, NodeCache] = {}
        self.lost: set[bytes] = set()

    def add(self, name: str) -> None:
        """An instance has started."""
        tokens = self._trace.block_tokens
        self._of[name] = NodeCache(
            hbm_blocks=self._hbm_tokens // tokens,
            dram_blocks=self._dram_tokens // tokens,
            write_through=False,
            changed=partial(self._changed, name),
        )

    def keys(self, request: TraceRequest) -> tuple[bytes, ...]:
        """The keys of a prompt's full blocks."""
        if not self._hbm_tokens:
            return ()
        return tuple(block.to_bytes(16) for block in self._trace.full_blocks(request))

    def fetch(self, job: SimRequest, there: Callable[[], None]) -> None:
        """Fetch what the conductor has decided for a prompt, as far as it is still there; `there`
        is called when it has come."""
        assert job.decision is not None
        name = job.decision.prefill
        cache = self._of[name]
        own = have = cache.match(job.keys)
        parts: list[tuple[str, int]] = []
        for fetch in sorted(job.decision.fetches, key=lambda fetch: fetch.start):
            stop = min(fetch.stop, self._of[fetch.source].match(job.keys))
            if fetch.start <= have < stop:
                parts.append((fetch.source, stop - have))
                have = stop
        job.fetched_blocks, coming = have - own, len(parts)
        if not coming:
            there()

        def arrived() -> None:
            nonlocal coming
            coming -= 1
            if not coming:
                cache.put(job.keys[:have])
                self._reports.event(job, "fetched")
                there()

        for source, blocks in parts:
            self._network.send(source, name, blocks * self._block_bytes, arrived)

    def begin(self, job: SimRequest) -> int:
        """A prompt is computed: without the tokens that are cached. Returns how many are not; 0
        without caches, where nobody tells."""
        if not job.keys:
            return 0
        assert job.decision is not None
        cached = self._of[job.decision.prefill].match(job.keys) * self._trace.block_tokens
        job.cached_tokens = min(cached, job.trace.prompt_tokens - 1)
        return job.trace.prompt_tokens - job.cached_tokens

    def put(self, name: str, job: SimRequest) -> None:
        """An instance has a prompt's blocks."""
        self._of[name].put(job.keys)

    def save(self, name: str, saved: Callable[[int], None]) -> None:
        """Write what is in an instance's HBM alone to its node's memory; `saved` is told how many
        such blocks there still are."""
        cache = self._of[name]
        nbytes = len(cache.only_in_hbm()) * self._block_bytes
        seconds = nbytes / self._core.settings.transfers.dram_bandwidth_bytes_s

        def written() -> None:
            cache.save()
            saved(len(cache.only_in_hbm()))

        self._clock.after(seconds, written)

    def change_role(self, name: str) -> None:
        """An instance loses its HBM."""
        gone = self._of[name].only_in_hbm()
        self._of[name].clear_hbm()
        self.lost |= {key for key in gone if not any(key in one for one in self._of.values())}

    def _changed(self, name: str, change: TierChange) -> None:
        for kind, keys in ((Added, change.added), (Removed, change.removed)):
            if keys:
                self._reports.later(partial(self._core.apply, kind(name, change.tier, keys)))
