"""Decides what an engine loads from the pool and saves to it. Pure: no I/O, no clock, no vLLM.

What makes saves safe: a block is saved only when the engine has *confirmed* its tokens, which is
when the outputs of the steps that computed them have been processed. A load that failed shows in
the output of its own step, so nothing that was computed behind it is ever confirmed: the engine
takes the tokens back first. Pages that other requests may have computed with stay *tainted* until
the engine gives them to another request, and no block of a request with a tainted page is saved.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

from .orders import LoadOrder, SaveOrder, StepOrders, StepReport

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ...format.keys import Prefix


Tier: TypeAlias = Literal["dram", "nvme", "peer"]


@dataclass(slots=True)
class TrackedRequest:
    """A request that is in the engine. Positions of blocks count from the start of its prompt.

    `hit_blocks`: the pool's answer, None while it is awaited; `tiers`: where each of them is, in
    this host's DRAM, its NVMe or on another node. `failed_from`: the first block that could not be
    loaded, which is not offered again. `next_save`: the first block to save; what is before it came
    from the pool or the engine's cache, or is saved.
    """

    prefix: Prefix
    lookup_until: float
    hit_blocks: int | None = None
    tiers: tuple[Tier, ...] = ()
    failed_from: float = math.inf
    local_tokens: int = 0
    synchronous: bool = False
    next_save: int = 0
    pending_saves: set[int] = field(default_factory=set)


class EngineState(Protocol):
    """What the tracker asks the engine about a request when it orders a save."""

    def pages_of(self, request_id: str) -> Sequence[int]:
        """The pages of a request, in the order of its tokens."""

    def tokens_of(self, request_id: str) -> Sequence[int]:
        """The request's token ids, prompt and output."""


@dataclass(frozen=True, slots=True)
class TrackerOptions:
    """`ranks`: how many workers report the end of each save. `loads`, `saves`: the roles of this
    engine. For the others see `Settings`."""

    block_tokens: int
    page_tokens: int
    ranks: int = 1
    loads: bool = True
    saves: bool = True
    loading: str = "auto"
    load_tokens_min: int = 1
    save_tokens_min: int = 0


class RequestTracker:
    """All requests of one engine, and the orders of its next step. Not thread-safe."""

    def __init__(self, options: TrackerOptions) -> None:
        self._options = options
        self._block_pages = options.block_tokens // options.page_tokens
        self._requests: dict[str, TrackedRequest] = {}
        self._tainted: set[int] = set()
        self._loads: dict[str, LoadOrder] = {}
        # Saves of requests that finished since the last step, with all pages that they depend on.
        self._last_saves: list[tuple[SaveOrder, tuple[int, ...]]] = []
        self._finished: list[str] = []
        self._unended: dict[int, tuple[str, int]] = {}  # by save: its request, ranks still at it
        self._number = 0
        self._step = 0
        self.decoding = False  # whether the last step decoded for any request

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    # -- looking up ------------------------------------------------------------------------------

    def add(self, request_id: str, prefix: Prefix, lookup_until: float) -> None:
        """Track a request whose lookup in the pool has begun."""
        self._requests[request_id] = TrackedRequest(prefix, lookup_until)

    def answered(self, request_id: str, hit_blocks: int, tiers: tuple[Tier, ...] = ()) -> None:
        """The pool has the first `hit_blocks` blocks, in these tiers."""
        request = self._requests.get(request_id)
        if request is not None and request.hit_blocks is None:
            request.hit_blocks, request.tiers = hit_blocks, tiers

    def look_again(self, request_id: str, lookup_until: float) -> Prefix | None:
        """Forget the pool's answer, because the engine has given up the request's pages and will
        ask anew. Returns the prefix to look up, None if there is no such request."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        request.hit_blocks, request.lookup_until = None, lookup_until
        return request.prefix

    def matched(
        self, request_id: str, local_tokens: int, total_tokens: int, now: float
    ) -> tuple[int | None, bool]:
        """How many tokens beyond `local_tokens` (of `total_tokens`) to load, and whether
        asynchronously; None while the lookup may still be answered. At least one token is left to
        compute: the engine needs its output."""
        request = self._requests.get(request_id)
        if request is None:
            return 0, False
        request.local_tokens = local_tokens
        if not self._options.loads:
            return 0, False
        if request.hit_blocks is None:
            if now < request.lookup_until:
                return None, False
            request.hit_blocks = 0
        usable = int(min(request.hit_blocks, request.failed_from)) * self._options.block_tokens
        page = self._options.page_tokens
        usable = min(usable, (total_tokens - 1) // page * page)
        if usable - local_tokens < max(1, self._options.load_tokens_min):
            return 0, False
        request.synchronous = self._synchronous(request)
        return usable - local_tokens, not request.synchronous

    def _synchronous(self, request: TrackedRequest) -> bool:
        if self._options.loading != "auto":
            return self._options.loading == "synchronous"
        return not self.decoding and all(tier == "dram" for tier in request.tiers)

    def hit_tokens(self, request_id: str, external_tokens: int) -> dict[Tier, int]:
        """In which tiers the `external_tokens` tokens after the request's local ones are."""
        request = self._requests.get(request_id)
        found: dict[Tier, int] = {}
        if request is None:
            return found
        block, begin = self._options.block_tokens, request.local_tokens
        end = begin + external_tokens
        for index in range(begin // block, -(-end // block)):
            if index < len(request.tiers):
                tokens = min(end, (index + 1) * block) - max(begin, index * block)
                tier = request.tiers[index]
                found[tier] = found.get(tier, 0) + tokens
        return found

    def allocated(
        self, request_id: str, pages: Sequence[int], external_tokens: int, computed_tokens: int
    ) -> None:
        """The engine gave `pages` to a request: `external_tokens` of them are to be loaded, after
        the request's local tokens. `computed_tokens`: what the engine counts as computed; it counts
        the loaded ones after an asynchronous load only."""
        request = self._requests.get(request_id)
        if request is None:
            return
        page, block = self._options.page_tokens, self._options.block_tokens
        begin = request.local_tokens
        if not external_tokens:
            begin = max(begin, computed_tokens)
        # Pages beyond the engine's own prefix are new to this request.
        self._tainted.difference_update(pages[begin // page :])
        end = begin + external_tokens
        request.next_save = end // block
        if not external_tokens:
            return
        first, last = begin // block, -(-end // block)
        self._loads[request_id] = LoadOrder(
            request_id,
            request.prefix[first:last],
            (begin - first * block) // page,
            tuple(pages[begin // page : end // page]),
            request.synchronous,
            remote="peer" in request.tiers[first:last],
        )

    # -- a step ----------------------------------------------------------------------------------

    def plan(
        self,
        confirmed: Iterable[tuple[str, int]],
        engine: EngineState,
        preempted: Iterable[str] = (),
        new_pages: Iterable[int] = (),
    ) -> StepOrders:
        """The orders of the next step.

        `confirmed`: for the requests in the step, how many of their leading tokens are confirmed.
        `new_pages`: pages that the engine gives to running requests in this step, to be computed.
        """
        self._step += 1
        orders = StepOrders(self._step, loads=list(self._loads.values()))
        self._loads.clear()
        for request_id in preempted:
            request = self._requests.get(request_id)
            if request is not None and request.pending_saves:
                orders.preempted.append(request_id)
                # Its pages are gone. Should it end while new ones are loaded, the end of that load
                # frees them, and the engine must not hear of the request's end once more.
                request.pending_saves.clear()
        orders.saves = [order for order, pages in self._last_saves if self._clean(pages)]
        self._last_saves.clear()
        for request_id, tokens in confirmed:
            request = self._requests.get(request_id)
            if request is not None and tokens >= self._due(request):
                ordered = self._save(request_id, request, tokens, engine)
                if ordered is not None:
                    orders.saves.append(ordered[0])
        self._tainted.difference_update(new_pages)
        for order in orders.saves:
            self._unended[order.number] = order.request_id, self._options.ranks
        orders.finished, self._finished = self._finished, []
        return orders

    def finished(self, request_id: str, confirmed: int, engine: EngineState) -> bool:
        """A request has left the engine. Returns whether the engine must keep its pages until a
        worker reports it in the answer to `StepOrders.finished`."""
        self._loads.pop(request_id, None)
        request = self._requests.pop(request_id, None)
        if request is None:
            return False
        order = None
        if confirmed >= self._due(request):
            order = self._save(request_id, request, confirmed, engine)
        if order is not None:
            self._last_saves.append(order)
        keeps = order is not None or bool(request.pending_saves)
        if keeps:
            self._finished.append(request_id)
        return keeps

    def reported(self, report: StepReport) -> None:
        """Take in what the workers report of the last steps."""
        for request_id, block in report.failed.items():
            request = self._requests.get(request_id)
            if request is not None:
                request.failed_from = min(request.failed_from, block)
        self._tainted |= report.tainted_pages
        for number, ranks in report.ended_saves.items():
            request_id, left = self._unended.pop(number, ("", 0))
            if left > ranks:
                self._unended[number] = request_id, left - ranks
            elif request_id in self._requests:
                self._requests[request_id].pending_saves.discard(number)

    # -- saving ----------------------------------------------------------------------------------

    def _due(self, request: TrackedRequest) -> float:
        """The number of confirmed tokens at which the request has a block to save."""
        if not self._options.saves:
            return math.inf
        block_end = (request.next_save + 1) * self._options.block_tokens
        return max(block_end, self._options.save_tokens_min)

    def _save(
        self, request_id: str, request: TrackedRequest, tokens: int, engine: EngineState
    ) -> tuple[SaveOrder, tuple[int, ...]] | None:
        """Order the blocks of the first `tokens` tokens that are not saved yet; returns the order
        and all pages that their content depends on. None if one of them is tainted."""
        first, end = request.next_save, tokens // self._options.block_tokens
        request.next_save = end
        pages = tuple(engine.pages_of(request_id)[: end * self._block_pages])
        if not self._clean(pages):
            return None
        known = request.prefix.token_count
        if len(request.prefix) < end:
            request.prefix.extend(engine.tokens_of(request_id)[known:tokens])
        self._number += 1
        mine = pages[first * self._block_pages :]
        order = SaveOrder(self._number, request_id, request.prefix[first:end], mine)
        request.pending_saves.add(order.number)
        return order, pages

    def _clean(self, pages: Iterable[int]) -> bool:
        return not self._tainted or self._tainted.isdisjoint(pages)
