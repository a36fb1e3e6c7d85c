"""The connector in a worker: fills the engine's pages from the pool and stores them there.

What a GPU's HBM tier has, if there is one, comes from there. Blocks that the scheduler side holds
are copied from this process's own mapping of the node's memory, without a word to the node: before
the forward pass, or beside it (`layer_loads`).
Asynchronous loads and all saves run in threads of their own. A save copies pages whose tokens are
confirmed, so that no forward pass writes them any more, until the engine gives them to another
request: `drain` comes before that.
"""

from __future__ import annotations

import logging
import time
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import TiffinError
from .layers.layer_loads import LayerLoads, beside_forward
from .layers.layer_saves import LayerSaves
from .layers.layer_streams import LayerStreams
from .orders import StepReport
from .pages.copier import PageLoad
from .pages.rank_share import rank_share
from .save import Save
from .transfer_counters import TransferCounters

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from concurrent.futures import Future

    from numpy.typing import NDArray

    from ...client.blocks.block_places import MappedRegion, RegionId
    from ...client.client import Client
    from .hbm_front import HbmFront
    from .orders import LoadOrder, StepOrders
    from .pages.copier import EngineCopier
    from .pool_link import PoolLink
    from .settings import Settings

log = logging.getLogger(__name__)

_LOADERS = 2
# Loads from engines that are computing: they wait most of the time.
_STREAMERS = 8
_SAVERS = 1
# How long a step without a forward pass waits for a load or save to end. Otherwise the engine would
# step again at once, in a loop that leaves the GIL to these threads only every 5 ms: a load of
# 32 MiB over TCP then took 400 ms. A request that arrives meanwhile waits as well.
_IDLE_WAIT_S = 0.02
# How long the end of an engine waits for its saves.
CLOSE_S = 3.0
# Memory of one load from other nodes at a time; each loading thread has such a stage.
_STAGE_BYTES = 64 << 20


_NOTHING = StepReport()


class WorkerSide:
    """Loads and saves of one worker. Its methods are called by the worker's thread only.

    `kv_heads`: of the blocks, which the ranks divide among them; by default one for each rank.
    `stage`, `stages`: see `rank_share`.
    """

    def __init__(
        self,
        settings: Settings,
        link: PoolLink,
        rank: int = 0,
        ranks: int = 1,
        kv_heads: int | None = None,
        stage: int = 0,
        stages: tuple[int, ...] = (),
    ) -> None:
        self._settings = settings
        self._link = link
        share = rank_share(kv_heads or ranks, rank, ranks, stage, stages)
        self._shard, self._writes = share.shard, share.writes
        self._heads = share.heads if share.shard else None
        self._layers = share.layers
        self._copier: EngineCopier | None = None
        self._layer_loads: LayerLoads | None = None
        self._layer_streams: LayerStreams | None = None
        self._hbm: HbmFront | None = None
        self._loaders = ThreadPoolExecutor(_LOADERS, thread_name_prefix="tiffin-load")
        self._streamers = ThreadPoolExecutor(_STREAMERS, thread_name_prefix="tiffin-stream")
        self._savers = ThreadPoolExecutor(_SAVERS, thread_name_prefix="tiffin-save")
        self._loading: dict[str, list[tuple[LoadOrder, Future[int]]]] = {}
        self._saving: dict[str, list[tuple[Save, Future[None]]]] = {}
        self._finished: set[str] = set()
        self._outdated: set[int] = set()  # loads of before a reset
        self._bad_pages: set[int] = set()
        self._regions: dict[RegionId, MappedRegion] = {}
        self._left: set[RegionId] = set()
        self._region: MappedRegion | None = None  # the link's, in the last step
        self._report = StepReport()
        self._idle = False
        self._stages: SimpleQueue[NDArray[np.uint8]] = SimpleQueue()
        self.counters = TransferCounters()
        # `reserve` of a pool has more arguments than a node's; these both have.
        self._reserving: dict[str, Any] = {"shard": self._shard}
        options = self._reserving if self._writes else None
        timeout_s = settings.save_timeout_s
        self._layer_saves = LayerSaves(link, self.counters, options, timeout_s, self._save)

    def register(
        self, copier: EngineCopier, layers: Sequence[str] = (), hbm: HbmFront | None = None
    ) -> None:
        """Set what copies the engine's pages, once they exist. `layers`: the model's, by name.
        `hbm`: the HBM tier if there is one, which is closed with this side."""
        self._copier, self._hbm = copier, hbm
        self._layer_loads = LayerLoads(copier, layers)
        timeout_s = self._settings.handoff_timeout_s
        self._layer_streams = LayerStreams(self._link, copier, self._heads, timeout_s)

    # -- a step ----------------------------------------------------------------------------------

    def drain(self, request_ids: Iterable[str]) -> None:
        """Return when no save reads pages of these requests any more."""
        for request_id in request_ids:
            for save, _ in self._saving.get(request_id, ()):
                save.drain()

    def begin_layer_saves(self, orders: StepOrders) -> None:
        """Start the saves by layer of what the step's forward pass will compute, and end those that
        the engine has confirmed or given up. Comes before `begin`."""
        self._layer_saves.confirm(orders.confirmed)
        self._layer_saves.give_up(orders.given_up)
        saves = [Save(order) for order in orders.layer_saves]
        for one in self._layer_saves.begin(saves, self._copier):
            saving = self._saving.setdefault(one.save.order.request_id, [])
            saving.append((one.save, one.ended))

    def computed(self, layer: int) -> None:
        """The step has computed the layer."""
        self._layer_saves.computed(layer)

    def end_layers(self) -> None:
        """The step has computed all layers."""
        self._layer_saves.end_step()

    def begin(self, orders: StepOrders, *, layers_wait: bool = False) -> None:
        """Start the saves of whole blocks and the asynchronous loads of a step, and do its
        synchronous loads, or start them. `layers_wait`: every layer of the step's forward pass
        calls `wait_for_layer`."""
        self.finish_loads()
        self._idle = orders.idle
        if orders.reset:
            self._outdated = {load.number for one in self._loading.values() for load, _ in one}
        self._finished.update(orders.finished)
        for order in orders.saves:
            save = Save(order)
            saving = self._savers.submit(self._save, save)
            self._saving.setdefault(order.request_id, []).append((save, saving))
        self._map_region(orders.left_regions)
        for load in orders.loads:
            if not load.synchronous:
                loaders = self._streamers if load.streamed else self._loaders
                loading = loaders.submit(self._load, load)
                self._loading.setdefault(load.request_id, []).append((load, loading))
        synchronous = [load for load in orders.loads if load.synchronous]
        if layers_wait and self._beside_forward(synchronous):
            self._begin_layer_loads(synchronous)
            return
        for load in synchronous:
            self._note_load(load, self._load(load))

    def wait_for_layer(self, layer: str) -> None:
        """See `LayerLoads.wait`."""
        if self._layer_loads is not None:
            self._layer_loads.wait(layer)

    def finish_loads(self) -> None:
        """Return when all synchronous loads have ended. See `LayerLoads.finish`."""
        if self._layer_loads is None:
            return
        orders, taken_s = self._layer_loads.finish()
        for order in orders:
            self._count_load(order, len(order.prefix), taken_s / len(orders))
            self._note_load(order, len(order.prefix))

    def _map_region(self, left: Sequence[RegionId]) -> None:
        """Keep the memory of the node on this host, once it is known, and report that held blocks
        can be read in it. It outlives the connection, until the scheduler side has `left` it."""
        region = self._link.region()
        if region is self._region and not left:  # as in most steps
            return
        self._region = region
        for identity in left:
            self._regions.pop(identity, None)
        self._left.update(left)
        if region is not None and region.identity not in self._regions.keys() | self._left:
            self._regions[region.identity] = region
            self._report.mapped[region.identity] += 1

    def ended(self) -> tuple[set[str], set[str]]:
        """Requests whose pages the engine may free, as all their saves have ended, and requests
        whose asynchronous loads have ended; each is returned once."""
        self.finish_loads()
        if self._idle:
            self._wait_a_little()
        for request_id, saves in list(self._saving.items()):
            for save, saving in list(saves):
                if saving.done():
                    saves.remove((save, saving))
                    self._report.ended_saves[save.order.number] += 1
                    if save.failed:
                        self._report.failed_saves |= {save.order.number}
            if not saves:
                del self._saving[request_id]
        saved = self._finished - self._saving.keys()
        self._finished -= saved
        loaded = set()
        for request_id, loads in list(self._loading.items()):
            if all(loading.done() for _, loading in loads):
                for load, loading in self._loading.pop(request_id):
                    outdated = load.number in self._outdated
                    self._note_load(load, 0 if outdated else loading.result())
                loaded.add(request_id)
        return saved, loaded

    def _wait_a_little(self) -> None:
        jobs: list[Future[Any]] = [job for jobs in self._loading.values() for _, job in jobs]
        jobs += [job for saves in self._saving.values() for _, job in saves]
        if jobs:
            wait(jobs, _IDLE_WAIT_S, FIRST_COMPLETED)

    def take_bad_pages(self) -> set[int]:
        """Pages that were to be loaded and are not, of loads that have ended."""
        bad, self._bad_pages = self._bad_pages, set()
        return bad

    def take_report(self) -> StepReport:
        """The report since the last one."""
        if not self._report:  # as in most steps
            return _NOTHING
        report, self._report = self._report, StepReport()
        return report

    def close(self) -> None:
        """End the saves, as far as that is done in `CLOSE_S`, and close the connection: an engine
        that ends after a prompt leaves its blocks behind. No step writes pages any more."""
        self._layer_saves.give_up_all()
        wait([saving for saves in self._saving.values() for _, saving in saves], CLOSE_S)
        for saves in self._saving.values():
            for save, _ in saves:
                save.drain()
        self._layer_saves.close()
        self._savers.shutdown(wait=True, cancel_futures=True)
        for loaders in (self._loaders, self._streamers):
            loaders.shutdown(wait=True, cancel_futures=True)
        if self._layer_loads is not None:
            self._layer_loads.close()
        if self._hbm is not None:
            self._hbm.close()
        self._link.close()

    # -- loading ---------------------------------------------------------------------------------

    def _note_load(self, order: LoadOrder, blocks: int) -> None:
        """Note that only the first `blocks` blocks were loaded."""
        if order.held is not None:
            self._report.ended_loads[order.number] += 1
        if blocks == len(order.prefix):
            return
        assert self._copier is not None
        first = max(0, blocks * self._copier.pages - order.skipped_pages)
        self._bad_pages.update(order.pages[first:])
        position = order.prefix.start + blocks
        known = self._report.failed.get(order.request_id, position)
        self._report.failed[order.request_id] = min(position, known)

    def _load(self, order: LoadOrder) -> int:
        """How many leading blocks of the order are in the pages now. What it can't load
        asynchronously, the engine computes; for a synchronous load, which is of held blocks, it
        raises: the engine ends rather than computes with anything else."""
        assert self._copier is not None
        began, loaded = time.monotonic(), 0
        try:
            loaded = self._copy_from_hbm(order)
            if loaded < len(order.prefix):
                rest = order.rest(loaded, self._copier.pages)
                if rest.held is not None:
                    loaded += self._copy_held(rest)
                elif rest.streamed:
                    loaded += self._stream(rest)
                else:
                    loaded += self._get_all(rest, began + self._settings.load_timeout_s)
        except Exception as error:
            if order.synchronous:
                raise
            self.counters.add("load_failures", label=type(error).__name__)
            expected = isinstance(error, TiffinError)
            log.warning("%s: not loaded: %s", order.request_id, error, exc_info=not expected)
        self._count_load(order, loaded, time.monotonic() - began)
        return loaded

    def _count_load(self, order: LoadOrder, blocks: int, taken_s: float) -> None:
        self.counters.add("loaded_tokens", blocks * order.prefix.schema.block_tokens)
        self.counters.add("load_seconds", taken_s)

    def _copy_from_hbm(self, order: LoadOrder) -> int:
        """How many leading blocks of the order the HBM tier had; they are in the pages now."""
        if self._hbm is None:
            return 0
        blocks = self._hbm.load(order.prefix, order.pages, order.skipped_pages)
        if blocks:
            self.counters.add("hit_tokens", blocks * order.prefix.schema.block_tokens, "hbm")
        return blocks

    def _copy_held(self, order: LoadOrder) -> int:
        blocks = self._page_load(order).blocks
        self._scatter(order, blocks)
        return len(blocks)

    def _stream(self, order: LoadOrder) -> int:
        assert self._layer_streams is not None
        blocks = self._layer_streams.load(order)
        self.counters.add("streamed_tokens", blocks * order.prefix.schema.block_tokens)
        if blocks < len(order.prefix):
            self.counters.add("load_failures", label="writer")
        return blocks

    def _page_load(self, order: LoadOrder) -> PageLoad:
        assert order.held is not None
        blocks = self._regions[order.held.region].views(order.held)
        return PageLoad(blocks, order.pages, order.skipped_pages)

    def _beside_forward(self, orders: Sequence[LoadOrder]) -> bool:
        """Whether these loads are copied beside the forward pass. Not with an HBM tier, which has
        and keeps whole blocks."""
        if self._copier is None or self._hbm is not None or not orders:
            return False
        nbytes = sum(len(order.prefix) for order in orders) * self._copier.block_bytes
        return beside_forward(self._settings.layerwise, nbytes, self._copier.layerwise_bytes)

    def _begin_layer_loads(self, orders: Sequence[LoadOrder]) -> None:
        assert self._layer_loads is not None
        loads = [self._page_load(order) for order in orders]
        blocks = [len(load.blocks) for load in loads]
        assert blocks == [len(order.prefix) for order in orders], "held blocks are missing"
        self._layer_loads.begin(orders, loads)

    def _scatter(self, order: LoadOrder, blocks: Sequence[NDArray[np.uint8]]) -> None:
        """Fill the order's pages from its leading blocks, which the HBM tier keeps."""
        assert self._copier is not None
        self._copier.scatter(blocks, order.pages, order.skipped_pages)
        if self._hbm is not None:
            self._hbm.keep(order.prefix[: len(blocks)], order.pages, order.skipped_pages)

    def _get_all(self, order: LoadOrder, deadline: float) -> int:
        left_s = max(0.0, deadline - time.monotonic())
        if order.remote:
            return self._load_staged(order, deadline)
        return self._link.call(partial(self._get, order, None, left_s), left_s)

    def _load_staged(self, order: LoadOrder, deadline: float) -> int:
        """`_load` through memory that is used again: memory from the system costs more than the
        transfer, as each page of it is first cleared."""
        assert self._copier is not None
        block_bytes, loaded = self._copier.block_bytes, 0
        try:
            stage = self._stages.get_nowait()
        except Empty:
            blocks = max(1, _STAGE_BYTES // block_bytes)
            stage = np.empty((blocks, block_bytes), np.uint8)
        try:
            for part in order.parts(len(stage), self._copier.pages):
                left_s = max(0.0, deadline - time.monotonic())
                get = partial(self._get, part, stage[: len(part.prefix)], left_s)
                got = self._link.call(get, left_s)
                loaded += got
                if got < len(part.prefix):
                    break
        finally:
            self._stages.put(stage)
        return loaded

    def _get(self, order: LoadOrder, into: Any, timeout_s: float, client: Client) -> int:
        """Fill the order's pages; returns how many of its leading blocks are in them."""
        part: dict[str, Any] = {"layers": self._layers, "heads": self._heads}
        with client.get(order.prefix, into=into, timeout_s=timeout_s, **part) as blocks:
            memories = [blocks[index].memory for index in range(len(blocks))]
            self._scatter(order, memories)
            if not blocks.complete:
                reason = blocks.reason or "miss"
                self.counters.add("load_failures", label=reason)
                log.warning("%s: a block could not be loaded: %s", order.request_id, reason)
            return len(blocks)

    # -- saving ----------------------------------------------------------------------------------

    def _save(self, save: Save) -> None:
        """Store the blocks of the order that the pool lacks. Raises nothing."""
        if not self._writes:  # another rank has the same heads
            save.drain()
            return
        copier, order = self._copier, save.order
        assert copier is not None
        timeout_s = self._settings.save_timeout_s

        def put(client: Client) -> None:
            slots = client.reserve(order.prefix, timeout_s=timeout_s, **self._reserving)
            try:
                if not save.begin_copy():
                    slots.abort()
                    return
                try:
                    views = [slot.view for slot in slots]
                    pages = save.pages_of([slot.index for slot in slots], copier.pages)
                    copier.gather(views, pages)
                    if self._hbm is not None:
                        self._hbm.keep(order.prefix, order.pages)
                finally:
                    save.end_copy()
            except BaseException:
                slots.abort()
                raise
            slots.commit()
            tokens = len(slots.stored) * order.prefix.schema.block_tokens
            self.counters.add("saved_tokens", tokens)
            there = {*slots.stored, *slots.pending, *slots.resident, *slots.busy}
            save.failed = len(there) < len(order.prefix)

        began = time.monotonic()
        try:
            self._link.call(put)
        except Exception as error:
            save.failed = True
            self.counters.add("save_failures", label=type(error).__name__)
            if isinstance(error, TiffinError):
                log.debug("%s: not saved: %s", order.request_id, error)
            else:
                log.exception("%s: not saved", order.request_id)
        finally:
            save.drain()
        self.counters.add("save_seconds", time.monotonic() - began)
