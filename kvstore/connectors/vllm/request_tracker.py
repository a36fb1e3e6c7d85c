"""Decides what an engine loads from the pool and saves to it. Pure: no I/O, no clock, no vLLM.

What makes loads safe: the engine computes beside an asynchronous load, and shares its pages once it
has gone well. It would compute with the pages of a synchronous load that failed, so blocks are
loaded synchronously only if they are *held*: leased and verified, and readable by all workers.

What makes saves safe: a block is saved only when the engine has *confirmed* its tokens, which is
when the outputs of the steps that computed them have been processed. Tokens that a request had when
it began, from the engine's own cache or from another connector, are confirmed with the first token
that it computes itself: whoever computed or loaded them did so in the same step or before. A save
that goes layer by layer begins earlier (`layers/layer_save_plan.py`), and ends as the others do.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

from .layers.layer_save_plan import LayerSavePlan
from .orders import LoadOrder, SaveOrder, StepOrders, StepReport

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ...client.blocks.block_places import BlockPlaces
    from ...format.keys import Prefix


# How many blocks the policy "second" remembers: of 33 million tokens.
_SEEN_KEYS = 65_536

Tier: TypeAlias = Literal["dram", "nvme", "peer"]


@dataclass(slots=True)
class TrackedRequest:
    """A request that is in the engine. Positions of blocks count from the start of its prompt.

    `hit_blocks`: the pool's answer, None while it is awaited; `tiers`: where each of them is, in
    this host's DRAM, its NVMe or on another node. `streamed`: another engine is writing them, at
    the node with the number `node` if that is known. `hold`: whether they were asked to be held;
    `held`: where they lie, from block `held_from` on, while they are. `failed_from`: the first
    block that could not be loaded, which is not offered again. `next_save`: the first block to
    save; what is before it is in the pool, or is being saved. `began_with`: how many tokens the
    request had in its first step, None before.
    """

    prefix: Prefix
    lookup_until: float
    hit_blocks: int | None = None
    tiers: tuple[Tier, ...] = ()
    streamed: bool = False
    node: int | None = None
    hold: Literal["none", "asked", "answered"] = "none"
    held: BlockPlaces | None = None
    held_from: int = 0
    failed_from: float = math.inf
    local_tokens: int = 0
    synchronous: bool = False
    next_save: int = 0
    began_with: int | None = None
    pending_saves: set[int] = field(default_factory=set)


class EngineState(Protocol):
    """What the tracker asks the engine about a request when it orders a save."""

    def pages_of(self, request_id: str) -> Sequence[int]:
        """The pages of a request, in the order of its tokens."""

    def tokens_of(self, request_id: str) -> Sequence[int]:
        """The request's token ids, prompt and output."""

    def holds(self, request_id: str) -> bool:
        """Whether the request's pages still have what its blocks are named by."""


@dataclass(frozen=True, slots=True)
class TrackerOptions:
    """`ranks`: how many workers report the end of each save. `loads`, `saves`: the roles of this
    engine. `layerwise`: whether saves begin while blocks are computed. For the others see
    `Settings`."""

    block_tokens: int
    page_tokens: int
    ranks: int = 1
    loads: bool = True
    saves: bool = True
    loading: str = "auto"
    load_tokens_min: int = 1
    save_tokens_min: int = 0
    save: str = "always"
    layerwise: bool = False


class RequestTracker:
    """All requests of one engine, and the orders of its next step. Not thread-safe."""

    def __init__(self, options: TrackerOptions) -> None:
        self._options = options
        self._block_pages = options.block_tokens // options.page_tokens
        self._requests: dict[str, TrackedRequest] = {}
        self._loads: dict[str, LoadOrder] = {}
        self._last_saves: list[SaveOrder] = []  # of requests that finished since the last step
        self._finished: list[str] = []
        self._layers = LayerSavePlan()
        self._confirmed: list[int] = []  # saves by layer, since the last step
        self._given_up: list[int] = []
        self._unended: dict[int, tuple[str, int]] = {}  # by save: its request, ranks still at it
        self._seen: OrderedDict[bytes, None] = OrderedDict()  # keys that were used once
        self._reset = False  # since the last step
        self._saves_fail = False  # whether the saves that ended last have left blocks unstored
        self._number = 0
        self._step = 0
        self.decoding = False  # whether the last step decoded for any request

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    # -- looking up ------------------------------------------------------------------------------

    def add(self, request_id: str, prefix: Prefix, lookup_until: float) -> None:
        """Track a request whose lookup in the pool has begun."""
        self._requests[request_id] = TrackedRequest(prefix, lookup_until)

    def prefix_of(self, request_id: str) -> Prefix:
        """The prefix of a request that is in the engine."""
        return self._requests[request_id].prefix

    def answered(self, request_id: str, hit_blocks: int, tiers: tuple[Tier, ...] = ()) -> None:
        """The pool has the first `hit_blocks` blocks, in these tiers."""
        request = self._requests.get(request_id)
        if request is not None and request.hit_blocks is None:
            request.hit_blocks, request.tiers = hit_blocks, tiers

    def coming(
        self, request_id: str, blocks: int, tiers: tuple[Tier, ...], node: int | None = None
    ) -> None:
        """The first `blocks` blocks are in the pool, in these tiers, or another engine writes them
        now, at this node: they are to be streamed."""
        request = self._requests.get(request_id)
        if request is not None and request.hit_blocks is None:
            request.hit_blocks, request.tiers = blocks, tiers
            request.streamed, request.node, request.hold = True, node, "answered"

    def look_again(self, request_id: str, lookup_until: float) -> Prefix | None:
        """Forget the pool's answer, because the engine has given up the request's pages and will
        ask anew. Returns the prefix to look up, None if there is no such request."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        request.hit_blocks, request.lookup_until = None, lookup_until
        request.hold, request.held, request.streamed = "none", None, False
        return request.prefix

    def matched(
        self, request_id: str, local_tokens: int, total_tokens: int, now: float
    ) -> tuple[int | None, bool]:
        """How many tokens beyond `local_tokens` (of `total_tokens`) to load, and whether
        asynchronously; None while the lookup may still be answered. One token at least is left to
        compute, as the engine needs its output: it is loaded with its page, and written again."""
        request = self._requests.get(request_id)
        if request is None:
            return 0, False
        request.local_tokens = local_tokens
        if not self._options.loads:
            return 0, False
        waits = request.hit_blocks is None or request.hold == "asked"
        if waits and now < request.lookup_until:
            return None, False
        request.hit_blocks = request.hit_blocks or 0
        tokens = self._to_load(request, local_tokens, total_tokens)
        if not tokens:
            return 0, False
        request.synchronous = self._synchronous(request)
        return tokens, not request.synchronous

    def _to_load(self, request: TrackedRequest, local_tokens: int, total_tokens: int) -> int:
        usable = min(self._hit(request) * self._options.block_tokens, total_tokens - 1)
        tokens = usable - local_tokens
        return tokens if tokens >= max(1, self._options.load_tokens_min) else 0

    @staticmethod
    def _hit(request: TrackedRequest) -> int:
        """How many leading blocks can be had from the pool."""
        return int(min(request.hit_blocks or 0, request.failed_from))

    def _synchronous(self, request: TrackedRequest) -> bool:
        if self._held(request) is None or self._options.loading == "asynchronous":
            return False
        return self._options.loading == "synchronous" or not self.decoding

    def _held(self, request: TrackedRequest) -> BlockPlaces | None:
        """Where the blocks after the request's local tokens lie, if all of them are held."""
        skipped = request.local_tokens // self._options.block_tokens - request.held_from
        if request.held is None or skipped < 0:
            return None
        return request.held.part(skipped, len(request.held))

    # -- holding ---------------------------------------------------------------------------------

    def to_hold(self, request_id: str, local_tokens: int, total_tokens: int) -> Prefix | None:
        """The blocks that the request will load, if they are to be held: all lie in this host's
        DRAM, and were not asked for before."""
        request = self._requests.get(request_id)
        if request is None or request.hold != "none" or not self._options.loads:
            return None
        if not self._to_load(request, local_tokens, total_tokens):
            return None
        first, last = local_tokens // self._options.block_tokens, request.hit_blocks
        if request.failed_from < math.inf or any(tier != "dram" for tier in request.tiers[first:]):
            return None
        return request.prefix[first:last]

    def hold_asked(self, request_id: str, prefix: Prefix, until: float) -> None:
        """The blocks of `to_hold` are being leased; the request waits for that until then."""
        request = self._requests[request_id]
        request.hold, request.held_from, request.lookup_until = "asked", prefix.start, until

    def held(self, request_id: str, places: BlockPlaces | None) -> None:
        """The first of these blocks are held at these places and the others are gone; None: they
        can't be held."""
        request = self._requests[request_id]
        request.hold, request.held = "answered", places
        if places is not None:
            request.hit_blocks = request.held_from + len(places)

    def unheld(self, request_id: str) -> None:
        """The request's blocks are not held any more: they may be gone when they are loaded."""
        request = self._requests.get(request_id)
        if request is not None:
            request.held = None

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
        end_page = -(-(begin + external_tokens) // page)  # which is loaded whole
        request.next_save = min(end_page * page // block, self._hit(request))
        request.began_with = None
        if not external_tokens:
            return
        first, last = begin // block, -(-end_page * page // block)
        held = self._held(request)
        assert held is not None or not request.synchronous, "a synchronous load that may fail"
        self._loads[request_id] = LoadOrder(
            self._next_number(),
            request_id,
            request.prefix[first:last],
            (begin - first * block) // page,
            tuple(pages[begin // page : end_page]),
            held.part(0, last - first) if held is not None else None,
            request.synchronous,
            remote="peer" in request.tiers[first:last],
            streamed=request.streamed,
            node=request.node,
        )

    # -- a step ----------------------------------------------------------------------------------

    def plan(
        self,
        confirmed: Iterable[tuple[str, int]],
        engine: EngineState,
        preempted: Iterable[str] = (),
        computing: Sequence[tuple[str, int, int]] = (),
    ) -> StepOrders:
        """The orders of the next step. `confirmed`: for the requests in the step, how many of their
        leading tokens are confirmed. `computing`: which tokens of each it computes, from and up to;
        needed to save by layer."""
        self._step += 1
        orders = StepOrders(self._step, loads=list(self._loads.values()))
        self._loads.clear()
        orders.reset, self._reset = self._reset, False
        for request_id in preempted:
            self._given_up += self._layers.give_up(request_id)
            request = self._requests.get(request_id)
            if request is None:  # it has ended since, and the pages went before
                orders.preempted.append(request_id)
            elif request.pending_saves:
                orders.preempted.append(request_id)
                # Its pages are gone. Should it end while new ones are loaded, the end of that load
                # frees them, and the engine must not hear of the request's end once more.
                request.pending_saves.clear()
        for request_id, begin, _ in computing:
            # What it computes again was taken back, and is not what was saved.
            blocks = begin // self._options.block_tokens
            self._given_up += self._layers.give_up(request_id, blocks)
        orders.saves, self._last_saves = self._last_saves, []
        for request_id, tokens in confirmed:
            request = self._requests.get(request_id)
            if request is None:
                continue
            if request.began_with is None:
                request.began_with = tokens
            if tokens >= self._due(request):
                orders.saves += self._save(request_id, request, tokens, engine)
        if self._options.saves and self._options.layerwise:
            for request_id, begin, end in computing:
                orders.layer_saves += self._save_by_layer(request_id, begin, end, engine)
        for order in (*orders.saves, *orders.layer_saves):
            self._unended[order.number] = order.request_id, self._options.ranks
        orders.finished, self._finished = self._finished, []
        orders.confirmed, self._confirmed = self._confirmed, []
        orders.given_up, self._given_up = self._given_up, []
        return orders

    def promise(self, request_id: str, confirmed: int) -> int:
        """How many leading blocks of a request, which is about to finish, are in the pool then or
        are being saved. Of the policy "second" nobody knows; and while saves fail, who waited for
        these blocks would wait in vain."""
        request, options = self._requests.get(request_id), self._options
        if request is None or not options.saves or options.save != "always" or self._saves_fail:
            return 0
        if request.began_with is None or confirmed <= request.began_with:
            return 0
        return confirmed // options.block_tokens if confirmed >= options.save_tokens_min else 0

    def finished(self, request_id: str, confirmed: int, engine: EngineState) -> bool:
        """A request has left the engine. Returns whether the engine must keep its pages until a
        worker reports it in the answer to `StepOrders.finished`."""
        self._loads.pop(request_id, None)
        request = self._requests.pop(request_id, None)
        if request is None:
            return False
        if confirmed >= self._due(request):
            self._last_saves += self._save(request_id, request, confirmed, engine)
        self._given_up += self._layers.give_up(request_id)
        if request.pending_saves:
            self._finished.append(request_id)
        return bool(request.pending_saves)

    def reported(self, report: StepReport) -> None:
        """Take in what the workers report of the last steps."""
        for request_id, block in report.failed.items():
            request = self._requests.get(request_id)
            if request is not None:
                request.failed_from = min(request.failed_from, block)
        if report.ended_saves:
            self._saves_fail = bool(report.failed_saves)
        for number, ranks in report.ended_saves.items():
            request_id, left = self._unended.pop(number, ("", 0))
            if left > ranks:
                self._unended[number] = request_id, left - ranks
            elif request_id in self._requests:
                self._requests[request_id].pending_saves.discard(number)

    def reset(self) -> None:
        """Blocks are named anew: what is being loaded, or saved by layer, is given up. Whole blocks
        that are being saved were computed and named before."""
        self._reset = True
        for request_id in self._requests:
            self._given_up += self._layers.give_up(request_id)

    # -- saving ----------------------------------------------------------------------------------

    def _due(self, request: TrackedRequest) -> float:
        """The number of confirmed tokens at which the request has a block to save."""
        if not self._options.saves or request.began_with is None:
            return math.inf
        block_end = (request.next_save + 1) * self._options.block_tokens
        return max(block_end, self._options.save_tokens_min, request.began_with + 1)

    def _save(
        self, request_id: str, request: TrackedRequest, tokens: int, engine: EngineState
    ) -> list[SaveOrder]:
        """Order the blocks of the first `tokens` tokens that are not saved yet; none of them if
        they were not used before and that is asked for."""
        first, end = request.next_save, tokens // self._options.block_tokens
        request.next_save = end
        known = request.prefix.token_count
        if len(request.prefix) < end:
            request.prefix.extend(engine.tokens_of(request_id)[known:tokens])
        prefix = request.prefix[first:end]
        if self._options.save == "second":
            prefix = prefix[: self._used_before(prefix)]
        orders: list[SaveOrder] = []
        stop = first + len(prefix)
        for early in self._layers.confirm(request_id, stop):
            self._confirmed.append(early.number)
            orders += self._order(request_id, request, first, early.prefix.start, engine)
            first = early.prefix.start + len(early.prefix)
        return orders + self._order(request_id, request, first, stop, engine)

    def _save_by_layer(
        self, request_id: str, begin: int, end: int, engine: EngineState
    ) -> list[SaveOrder]:
        """Order the blocks of the prompt that are complete once the step has computed the tokens
        `begin` to `end`, unless they are saved already."""
        request, block = self._requests.get(request_id), self._options.block_tokens
        if request is None or request.prefix.token_count < self._options.save_tokens_min:
            return []
        first = max(request.next_save, begin // block, self._layers.end_of(request_id))
        stop = min(end // block, len(request.prefix))
        orders = self._order(request_id, request, first, stop, engine)
        for order in orders:
            self._layers.begin(order)
        return orders

    def _order(
        self, request_id: str, request: TrackedRequest, first: int, stop: int, engine: EngineState
    ) -> list[SaveOrder]:
        """A save of blocks `first` to `stop`, if there are any."""
        if first >= stop or not engine.holds(request_id):
            return []
        pages = engine.pages_of(request_id)[first * self._block_pages : stop * self._block_pages]
        order = SaveOrder(self._next_number(), request_id, request.prefix[first:stop], tuple(pages))
        request.pending_saves.add(order.number)
        return [order]

    def _used_before(self, prefix: Prefix) -> int:
        """How many leading blocks were used before; the others are from now on."""
        count = next((n for n, key in enumerate(prefix.keys) if key not in self._seen), len(prefix))
        for key in prefix.keys:
            self._seen[key] = None
            self._seen.move_to_end(key)
        while len(self._seen) > _SEEN_KEYS:
            self._seen.popitem(last=False)
        return count

    def _next_number(self) -> int:
        self._number += 1
        return self._number
