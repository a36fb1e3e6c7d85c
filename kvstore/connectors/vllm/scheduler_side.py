"""The connector in the engine's scheduler: looks prompts up in the pool in the background, and
hands the tracker's orders to the workers. Knows no vLLM class."""

from __future__ import annotations

import logging
import time
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

from ...errors import TiffinError
from ...node.core.records import IN_DRAM
from ...pool.client import IN_PEER
from .request_tracker import RequestTracker, TrackerOptions
from .transfer_counters import TransferCounters

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from concurrent.futures import Future

    from ...client.client import Client
    from ...format.keys import Prefix
    from ...format.schema import KVSchema
    from ...verbs.block_verbs import Hit
    from .orders import StepOrders, StepReport
    from .pool_link import PoolLink
    from .request_tracker import EngineState, Tier
    from .settings import Settings

log = logging.getLogger(__name__)

# Lookups at a time: one takes 0.3 ms at home, and waits for the network elsewhere.
_LOOKUPS = 2
# How long an idle scheduler waits for an answer. Without requests to run it would ask again at
# once, in a loop that leaves the GIL to the lookup only every 5 ms.
_IDLE_WAIT_S = 0.002


class SchedulerSide:
    """Loads, saves and lookups of one engine. Called by the scheduler's thread only."""

    def __init__(
        self,
        settings: Settings,
        schema: KVSchema,
        page_tokens: int,
        ranks: int,
        link: PoolLink,
        *,
        loads: bool = True,
        saves: bool = True,
    ) -> None:
        self._settings = settings
        self._schema = schema
        self._secret = settings.secret()
        self._link = link
        self._loads = loads
        self.tracker = RequestTracker(
            TrackerOptions(
                settings.block_tokens,
                page_tokens,
                ranks,
                loads,
                saves,
                settings.loading,
                settings.load_tokens_min,
                settings.save_tokens_min,
            )
        )
        self.idle = True  # whether the last step ran no request
        self.counters = TransferCounters()
        self._lookups: dict[str, Future[Hit]] = {}
        self._threads = ThreadPoolExecutor(_LOOKUPS, thread_name_prefix="tiffin-lookup")

    def add(self, request_id: str, tokens: Sequence[int], namespace: str) -> None:
        """A request has arrived: begin its lookup. `namespace`: of its adapter and salt, within the
        engine's own."""
        name = self._settings.namespace
        if namespace:
            name = f"{name}\0{namespace}"
        prefix = self._schema.prefix(list(tokens), namespace=name, secret=self._secret)
        self.tracker.add(request_id, prefix, self._lookup_until())
        self._look_up(request_id, prefix)

    def matched(
        self, request_id: str, local_tokens: int, total_tokens: int
    ) -> tuple[int | None, bool]:
        """See `RequestTracker.matched`; sends nothing, as it is called in every step."""
        lookup = self._lookups.get(request_id)
        if lookup is not None:
            if self.idle:
                wait([lookup], _IDLE_WAIT_S)
            if lookup.done():
                del self._lookups[request_id]
                self._note(request_id, lookup)
        return self.tracker.matched(request_id, local_tokens, total_tokens, time.monotonic())

    def allocated(
        self, request_id: str, pages: Sequence[int], external_tokens: int, computed_tokens: int
    ) -> None:
        """See `RequestTracker.allocated`."""
        self._lookups.pop(request_id, None)  # too late: the engine computes, or loads
        self.tracker.allocated(request_id, pages, external_tokens, computed_tokens)
        if external_tokens:
            for tier, tokens in self.tracker.hit_tokens(request_id, external_tokens).items():
                self.counters.add("hit_tokens", tokens, tier)

    def plan(
        self,
        confirmed: Iterable[tuple[str, int]],
        engine: EngineState,
        preempted: Iterable[str],
        new_pages: Iterable[int],
    ) -> StepOrders:
        """See `RequestTracker.plan`. Looks up again what was preempted."""
        preempted = list(preempted)
        orders = self.tracker.plan(confirmed, engine, preempted, new_pages)
        for request_id in preempted:
            prefix = self.tracker.look_again(request_id, self._lookup_until())
            if prefix is not None:
                self._look_up(request_id, prefix)
        return orders

    def finished(self, request_id: str, confirmed: int, engine: EngineState) -> bool:
        """See `RequestTracker.finished`."""
        self._lookups.pop(request_id, None)
        return self.tracker.finished(request_id, confirmed, engine)

    def reported(self, report: StepReport) -> None:
        """See `RequestTracker.reported`."""
        self.tracker.reported(report)

    def close(self) -> None:
        """End the lookups and the connection."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._link.close()

    # -- lookups ---------------------------------------------------------------------------------

    def _lookup_until(self) -> float:
        return time.monotonic() + self._settings.lookup_timeout_s

    def _look_up(self, request_id: str, prefix: Prefix) -> None:
        if not self._loads or not len(prefix):
            self.tracker.answered(request_id, 0)
            return
        blocks = prefix[: len(prefix)]  # the tracker extends the prefix meanwhile
        timeout_s = self._settings.lookup_timeout_s

        def match(client: Client) -> Hit:
            return client.match(blocks, timeout_s=timeout_s)

        self._lookups[request_id] = self._threads.submit(self._matched, match)

    def _matched(self, match: Callable[[Client], Hit]) -> Hit:
        began = time.monotonic()
        try:
            return self._link.call(match, wait_s=self._settings.lookup_timeout_s)
        finally:
            self.counters.add("lookups")
            self.counters.add("lookup_seconds", time.monotonic() - began)

    def _note(self, request_id: str, lookup: Future[Hit]) -> None:
        try:
            hit = lookup.result()
        except TiffinError as error:
            log.debug("not looked up: %s", error)
            self.counters.add("lookup_failures", label=type(error).__name__)
            self.tracker.answered(request_id, 0)
            return
        except Exception as error:
            log.exception("%s: not looked up", request_id)
            self.counters.add("lookup_failures", label=type(error).__name__)
            self.tracker.answered(request_id, 0)
            return
        tiers = tuple(_tier(flag) for flag in hit.where)
        self.tracker.answered(request_id, hit.blocks, tiers)


def _tier(flag: int) -> Tier:
    """Where a block is, by its flag in a `Hit`."""
    if flag & IN_PEER:
        return "peer"
    return "dram" if flag & IN_DRAM else "nvme"
