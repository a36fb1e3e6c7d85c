"""The connector in the engine's scheduler. Knows no vLLM class.

It looks prompts up in the pool, in the background, leases what the engine is about to load, and
hands the tracker's orders to the workers.
"""

from __future__ import annotations

import logging
import time
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from ...client.pool.many_nodes import IN_PEER
from ...client.verbs.block_verbs import Hit
from ...errors import InvalidInput, NodeUnavailable, StaleLease, TiffinError
from ...node.core.records import BEING_WRITTEN, IN_DRAM
from .handoff import NOTHING
from .held_leases import HeldBlocks, HeldLeases
from .pool_link import at_node
from .request_tracker import RequestTracker, TrackerOptions
from .transfer_counters import TransferCounters

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from concurrent.futures import Future

    from ...client.client import Client
    from ...format.keys import Prefix
    from ...format.schema import KVSchema
    from .handoff import Promise
    from .model.request_identity import Identity
    from .orders import StepOrders, StepReport
    from .pool_link import PoolLink
    from .request_tracker import EngineState, Tier
    from .settings import Settings

log = logging.getLogger(__name__)
T = TypeVar("T")

# Lookups and leases at a time: a lookup takes 0.3 ms at home, and waits for the network elsewhere.
_LOOKUPS = 2
# How long an idle scheduler waits for answers in a step. Without requests to run it would ask again
# at once, in a loop that leaves the GIL to the lookup only every 5 ms.
_IDLE_WAIT_S = 0.02
# How long until a lookup is repeated that did not find yet what was promised.
_AGAIN_S = 0.005
# The largest load whose blocks are leased before: one thread here verifies them, some 20 ms. Of a
# larger one each worker verifies what it reads.
_HELD_BYTES = 256 << 20
# At most this share of a node's memory is under leases: leased blocks can't be evicted.
_HELD_SHARE = 4


@dataclass(slots=True)
class _Awaited:
    """A request waits `until` its first `blocks` blocks are stored, or are being written if it was
    sent together with its prefill, or those that are elsewhere have been fetched. `again_at`: when
    they are to be looked up again."""

    promise: Promise
    blocks: int
    until: float
    again_at: float = 0.0

    def has_come(self, hit: Hit) -> bool:
        """Whether there is nothing more to wait for."""
        if self.promise.fetched:
            return not any(flag & IN_PEER for flag in hit.where[: self.blocks])
        return hit.stored >= self.blocks

    def match(self, client: Client, prefix: Prefix, timeout_s: float) -> Hit:
        """What is there now."""
        writing, there = self.promise.prefilling, at_node(client, self.promise.node)
        try:
            return client.match(prefix, writing=writing, timeout_s=timeout_s, **there)
        except NodeUnavailable:
            if not there:
                raise
            return client.match(prefix, timeout_s=timeout_s)  # that node is gone


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
        streams: bool = True,
    ) -> None:
        """`streams`: whether workers can load what is being written."""
        self._settings = settings
        self._schema = schema
        self._secret = settings.secret()
        self._link = link
        self._loads, self._streams = loads, streams
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
                settings.save,
                settings.saves_by_layer,
            )
        )
        self.idle = True  # whether this thread may wait: the last step ran no request
        self.counters = TransferCounters()
        self._leases = HeldLeases(ranks)
        self._lookups: dict[str, Future[Hit]] = {}
        self._awaited: dict[str, _Awaited] = {}
        self._holds: dict[str, Future[HeldBlocks | None]] = {}
        self._threads = ThreadPoolExecutor(_LOOKUPS, thread_name_prefix="tiffin-lookup")

    def add(
        self,
        request_id: str,
        tokens: Sequence[int],
        identity: Identity,
        promise: Promise = NOTHING,
    ) -> None:
        """A request has arrived: begin its lookup. Another instance has promised blocks, which are
        perhaps still being stored or computed."""
        prefix = self._schema.prefix(
            list(tokens), identity.namespace, self._secret, identity.extras
        )
        until = self._lookup_until()
        settings, blocks = self._settings, min(promise.blocks, len(prefix))
        wait_s = settings.handoff_timeout_s
        if promise.prefilling:
            blocks, wait_s = len(prefix), settings.prefill_timeout_s
        elif promise.fetched:
            blocks = min(promise.fetched, len(prefix))
            wait_s = min(promise.within_s, wait_s)
        if blocks and self._loads:
            self._awaited[request_id] = _Awaited(promise, blocks, time.monotonic() + wait_s)
            until += wait_s
        self.tracker.add(request_id, prefix, until)
        self._look_up(request_id, prefix)

    def matched(
        self, request_id: str, local_tokens: int, total_tokens: int
    ) -> tuple[int | None, bool]:
        """See `RequestTracker.matched`; sends nothing, as it is called in every step."""
        self._look_again(request_id)
        lookup = self._answer(self._lookups, request_id)
        if lookup is not None:
            self._note(request_id, lookup)
        to_hold = self.tracker.to_hold(request_id, local_tokens, total_tokens)
        if to_hold is not None and self._may_hold(to_hold):
            self._hold(request_id, to_hold)
        hold = self._answer(self._holds, request_id)
        if hold is not None:
            self._note_held(request_id, hold)
        return self.tracker.matched(request_id, local_tokens, total_tokens, time.monotonic())

    def _answer(self, asked: dict[str, Future[Any]], request_id: str) -> Future[Any] | None:
        """What a thread has found out for a request; None if it is not done."""
        answer = asked.get(request_id)
        if answer is None:
            return None
        if self.idle:
            wait([answer], _IDLE_WAIT_S)
            self.idle = answer.done()
        return asked.pop(request_id) if answer.done() else None

    def allocated(
        self, request_id: str, pages: Sequence[int], external_tokens: int, computed_tokens: int
    ) -> None:
        """See `RequestTracker.allocated`."""
        self._forget(request_id)  # too late: the engine computes, or loads
        self.tracker.allocated(request_id, pages, external_tokens, computed_tokens)
        if not external_tokens:
            self._leases.drop(request_id)
        else:
            for tier, tokens in self.tracker.hit_tokens(request_id, external_tokens).items():
                self.counters.add("hit_tokens", tokens, tier)

    def plan(
        self,
        confirmed: Iterable[tuple[str, int]],
        engine: EngineState,
        preempted: Iterable[str],
        computing: Sequence[tuple[str, int, int]] = (),
    ) -> StepOrders:
        """See `RequestTracker.plan`. Looks up again what was preempted."""
        preempted = list(preempted)
        orders = self.tracker.plan(confirmed, engine, preempted, computing)
        self._leases.ordered(orders.loads)
        for request_id in self._leases.expire(time.monotonic()):
            self.tracker.unheld(request_id)
        orders.left_regions = self._leases.leave_regions()
        for request_id in preempted:
            self._forget(request_id)
            self._leases.drop(request_id)
            prefix = self.tracker.look_again(request_id, self._lookup_until())
            if prefix is not None:
                self._look_up(request_id, prefix)
        return orders

    def finished(self, request_id: str, confirmed: int, engine: EngineState) -> bool:
        """See `RequestTracker.finished`."""
        self._forget(request_id)
        self._leases.drop(request_id)
        return self.tracker.finished(request_id, confirmed, engine)

    def reported(self, report: StepReport) -> None:
        """See `RequestTracker.reported`."""
        self._leases.mapped(report.mapped)
        self._leases.ended(report.ended_loads)
        self.tracker.reported(report)

    def close(self) -> None:
        """End the lookups and the connection."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for request_id in list(self._holds):
            self._forget(request_id)
        self._leases.close()
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
        awaited = self._awaited.get(request_id)

        def match(client: Client) -> Hit:
            if awaited is None:
                return client.match(blocks, timeout_s=timeout_s)
            return awaited.match(client, blocks, timeout_s)

        self._lookups[request_id] = self._threads.submit(self._matched, match)

    def _look_again(self, request_id: str) -> None:
        """Look up again what has not come yet, when it is time; an engine that has nothing else to
        do waits until then."""
        awaited = self._awaited.get(request_id)
        if awaited is None or request_id in self._lookups:
            return
        left_s = awaited.again_at - time.monotonic()
        if left_s > 0 and self.idle:
            time.sleep(left_s)
            left_s = 0.0
        if left_s <= 0:
            self._look_up(request_id, self.tracker.prefix_of(request_id))

    def _matched(self, match: Callable[[Client], Hit]) -> Hit:
        began = time.monotonic()
        try:
            return self._link.call(match, wait_s=self._settings.lookup_timeout_s)
        finally:
            self.counters.add("lookups")
            self.counters.add("lookup_seconds", time.monotonic() - began)

    def _note(self, request_id: str, lookup: Future[Hit]) -> None:
        found = self._result(request_id, lookup)
        hit = found or Hit(0, 0)
        tiers = tuple(_tier(flag) for flag in hit.where)
        awaited, now = self._awaited.pop(request_id, None), time.monotonic()
        if awaited is None or found is None or awaited.has_come(hit):
            self.tracker.answered(request_id, hit.stored, tiers[: hit.stored])
        elif self._streams and hit.stored < hit.blocks:
            tiers += tiers[-1:] * (awaited.blocks - hit.blocks)
            self.tracker.coming(request_id, awaited.blocks, tiers, awaited.promise.node)
        elif now >= awaited.until:
            self.tracker.answered(request_id, hit.stored, tiers[: hit.stored])
        else:
            # Many that wait ask more rarely, so that they do not keep other lookups waiting.
            awaited.again_at = now + _AGAIN_S * max(1.0, len(self._awaited) / _LOOKUPS)
            self._awaited[request_id] = awaited

    def _result(self, request_id: str, asked: Future[T]) -> T | None:
        """What a thread has found; None, and a count of the reason, if it has failed."""
        try:
            return asked.result()
        except Exception as error:
            self.counters.add("lookup_failures", label=type(error).__name__)
            level = logging.DEBUG if isinstance(error, TiffinError) else logging.ERROR
            log.log(level, "%s: not looked up", request_id, exc_info=error)
            return None

    # -- leases ----------------------------------------------------------------------------------

    def _may_hold(self, prefix: Prefix) -> bool:
        nbytes = len(prefix) * prefix.schema.block_bytes
        return self._leases.readable() and nbytes <= _HELD_BYTES

    def _hold(self, request_id: str, prefix: Prefix) -> None:
        self.tracker.hold_asked(request_id, prefix, self._lookup_until())
        held_bytes = self._leases.held_bytes
        lease = partial(self._lease, prefix, held_bytes)
        self._holds[request_id] = self._threads.submit(self._link.call, lease)

    def _lease(self, prefix: Prefix, held_bytes: int, client: Client) -> HeldBlocks | None:
        """Lease and verify the blocks; None if they are not to be held. Raises TiffinError."""
        region = client.region
        nbytes = held_bytes + len(prefix) * prefix.schema.block_bytes
        if region is None or nbytes > region.memory.nbytes // _HELD_SHARE:
            return None
        leased = client.get(prefix, timeout_s=self._settings.lookup_timeout_s)
        try:
            return HeldBlocks(leased, leased.places())
        except (InvalidInput, StaleLease):  # a part of them is elsewhere meanwhile
            leased.release()
            return None
        except BaseException:
            leased.release()
            raise

    def _note_held(self, request_id: str, hold: Future[HeldBlocks | None]) -> None:
        held = self._result(request_id, hold)
        kept = held is not None and self._leases.keep(request_id, held, time.monotonic())
        self.tracker.held(request_id, held.places if held is not None and kept else None)

    def _forget(self, request_id: str) -> None:
        """Drop the answers that a request waits for."""
        self._awaited.pop(request_id, None)
        self._lookups.pop(request_id, None)
        hold = self._holds.pop(request_id, None)
        if hold is not None:
            hold.add_done_callback(_released)


def _released(hold: Future[HeldBlocks | None]) -> None:
    """Release a lease that nobody waits for."""
    if not hold.cancelled() and hold.exception() is None:
        held = hold.result()
        if held is not None:
            held.leased.release()


def _tier(flag: int) -> Tier:
    """Where a block is, by its flag in a `Hit`."""
    if flag & IN_PEER:
        return "peer"
    return "dram" if flag & (IN_DRAM | BEING_WRITTEN) else "nvme"
