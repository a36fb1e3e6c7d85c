"""vLLM's side of the connector: `TiffinConnector`, made by vLLM once for its scheduler and once in
each worker. It turns vLLM's objects into the plain ones of `scheduler_side` and `worker_side`."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.platforms import current_platform
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from ...errors import InvalidInput
from ...format.key_space import KeySpace, secret_name
from .handoff import promise, promised, to_be_told
from .hbm_front import open_front
from .metrics import PromMetrics, Statistics
from .model.compatibility import check_engine, check_hosts, check_version
from .model.request_identity import RequestIdentities
from .model.weights_epoch import WeightsEpoch
from .orders import StepOrders, StepReport
from .pages.engine_blocks import engine_blocks, engine_copier
from .pool_link import PoolLink
from .scheduler_side import SchedulerSide
from .settings import read
from .worker_side import WorkerSide

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from .pages.copier import EngineCopier
    from .settings import Settings

log = logging.getLogger(__name__)

_SOURCES = {
    "dram": CacheHitSource.HOST,
    "nvme": CacheHitSource.DISK,
    "peer": CacheHitSource.P2P,
}


@dataclass
class Metadata(KVConnectorMetadata):  # type: ignore[misc]
    """One step's orders."""

    orders: StepOrders = field(default_factory=StepOrders)


@dataclass
class WorkerMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """One worker's report, or several workers' together."""

    report: StepReport = field(default_factory=StepReport)

    def aggregate(self, other: WorkerMetadata) -> WorkerMetadata:
        """Both reports together."""
        return WorkerMetadata(self.report.joined(other.report))


class _Requests:
    """The requests that vLLM's scheduler has, as the tracker asks about them."""

    def __init__(self, identities: RequestIdentities) -> None:
        self._identities = identities
        self._requests: dict[str, Any] = {}
        self._outdated: set[str] = set()  # of an epoch that has ended
        self.block_state: Any = None
        self.finished_pages: dict[str, Sequence[int]] = {}

    def add(self, request: Any) -> None:
        self._requests[request.request_id] = request

    def remove(self, request_id: str) -> None:
        self._requests.pop(request_id, None)
        self._outdated.discard(request_id)
        self.finished_pages.pop(request_id, None)

    def outdate(self) -> None:
        """None of the requests has what its blocks are named by: the weights may be others."""
        self._outdated.update(self._requests)

    def pages_of(self, request_id: str) -> Sequence[int]:
        """See `EngineState.pages_of`."""
        if request_id in self.finished_pages:
            return self.finished_pages[request_id]
        return self.block_state.get_block_ids(request_id)[0]  # type: ignore[no-any-return]

    def tokens_of(self, request_id: str) -> Sequence[int]:
        """See `EngineState.tokens_of`."""
        return list(self._requests[request_id].all_token_ids)

    def holds(self, request_id: str) -> bool:
        """See `EngineState.holds`."""
        request = self._requests.get(request_id)
        if request is None or request_id in self._outdated:
            return False
        return self._identities.holds(request)

    def confirmed(self, request_ids: Iterable[str]) -> Iterator[tuple[str, int]]:
        """How many leading tokens of each request are computed, without steps in flight."""
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None:
                yield request_id, _confirmed(request)

    def computing(self, scheduled: Mapping[str, int]) -> list[tuple[str, int, int]]:
        """Which tokens of each request a step computes: from and up to."""
        found = []
        for request_id, count in scheduled.items():
            request = self._requests.get(request_id)
            if request is not None:
                begin = int(request.num_computed_tokens)
                found.append((request_id, begin, begin + count))
        return found


def _device() -> str:
    """The device of vLLM's platform; ROCm's platform calls it cuda."""
    return "rocm" if current_platform.is_rocm() else str(current_platform.device_type)


def _stages(config: Any) -> tuple[int, ...]:
    """How many layers each pipeline stage has; empty if there is one."""
    count = config.parallel_config.pipeline_parallel_size
    if count == 1:
        return ()
    from vllm.distributed.utils import get_pp_indices

    layers = config.model_config.get_total_num_hidden_layers()
    spans = [get_pp_indices(layers, stage, count) for stage in range(count)]
    return tuple(end - first for first, end in spans)


def _layers_wait(forward_context: Any) -> bool:
    """Whether vLLM calls `wait_for_layer_load` before each layer of this step. It does not in a
    step without a forward pass, nor in a full CUDA graph."""
    mode = forward_context.cudagraph_runtime_mode
    return forward_context.attn_metadata is not None and not mode.has_full_cudagraphs()


def _confirmed(request: Any) -> int:
    return int(request.num_computed_tokens - request.num_in_flight_tokens)


class TiffinConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """Loads prefixes from a pool and saves them there (docs/vllm.md).

    Raises InvalidInput, at the engine's start, for settings, versions and models that it does not
    take. A pool that does not answer is no error: the engine computes until it does.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        version = str(vllm.__version__)
        check_version(version)
        check_engine(vllm_config, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        settings = read(transfer.kv_connector_extra_config)
        check_hosts(vllm_config, settings.url)
        stages = _stages(vllm_config)
        blocks = engine_blocks(_device(), vllm_config, kv_cache_config, settings, version, stages)
        self._blocks, self._schema, self._page_tokens = blocks, blocks.schema, blocks.page_tokens
        (group,) = kv_cache_config.kv_cache_groups
        self._layers = {name: index for index, name in enumerate(group.layer_names)}
        self._epoch = WeightsEpoch(settings.weights_version, settings.weights_version_file)
        self._identities = RequestIdentities(
            settings.block_tokens, self._space(vllm_config, settings), self._epoch
        )
        self._requests = _Requests(self._identities)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._copier: EngineCopier | None = None
        self._settings = settings
        # A stage has some layers of a block, and nobody streams a part.
        self._saves_by_layer = settings.saves_by_layer and not stages
        hooked = settings.layerwise == "always" and not stages  # whatever it saves
        if hooked and vllm_config.parallel_config.use_ubatching:
            raise InvalidInput(
                'layerwise is "always": a layer would be published after the first of several '
                "micro-batches; turn these off (--enable-dbo, --ubatch-size)"
            )
        self._link = link = PoolLink.shared(settings.url, settings.verify)
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerSide(
                settings,
                self._schema,
                self._page_tokens,
                blocks.workers,
                link,
                loads=transfer.is_kv_consumer,
                saves=transfer.is_kv_producer,
                streams=not stages,
            )
            link.announce(lambda: self._identities.space)
            log.info("KV blocks of %s", blocks.shape)
        else:
            rank, stage = self._place()
            self._worker = WorkerSide(
                settings, link, rank, blocks.ranks, blocks.kv_heads, stage, stages
            )

    def _space(self, config: Any, settings: Settings) -> KeySpace:
        """What the keys of this engine's blocks are made of."""
        named = config.model_config.served_model_name
        return KeySpace(
            schema=self._schema.canonical_bytes().decode(),
            namespace=settings.namespace,
            secret=secret_name(settings.secret()),
            models=(named,) if isinstance(named, str) else tuple(named),
            engine=settings.engine,
            page_tokens=self._page_tokens,
            ranks=self._blocks.ranks,
            loads=config.kv_transfer_config.is_kv_consumer,
            saves=config.kv_transfer_config.is_kv_producer,
        )

    @staticmethod
    def _place() -> tuple[int, int]:
        """This worker's tensor-parallel rank and pipeline stage."""
        from vllm.distributed import get_pp_group, get_tensor_model_parallel_rank

        return int(get_tensor_model_parallel_rank()), int(get_pp_group().rank_in_group)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Whether no step may be a full CUDA graph, in which the hooks of layers are not called.
        By default some may: what such a step needs is loaded before it."""
        return extra_config.get("layerwise") == "always"

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a cache; nobody waits for what it saves."""
        return False

    # -- in the scheduler ------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        """Begin the lookup of a request."""
        assert self._scheduler is not None
        try:
            identity = self._identities.of(request)
            awaited = promised(request.kv_transfer_params)
        except InvalidInput as error:
            log.warning("%s is computed without the KV pool: %s", request.request_id, error)
            return
        if identity is not None:
            self._requests.add(request)
            self._scheduler.add(request.request_id, request.all_token_ids, identity, awaited)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """See `RequestTracker.matched`."""
        assert self._scheduler is not None
        tokens, later = self._scheduler.matched(
            request.request_id, num_computed_tokens, request.num_tokens
        )
        # Asked only of what would be loaded: it looks at an adapter's files.
        if tokens and not self._requests.holds(request.request_id):
            return 0, False
        return tokens, later

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """See `RequestTracker.allocated`."""
        assert self._scheduler is not None
        pages = blocks.get_block_ids()[0]
        computed = int(request.num_computed_tokens)
        self._scheduler.allocated(request.request_id, pages, num_external_tokens, computed)

    def build_connector_meta(self, scheduler_output: Any) -> Metadata:
        """See `RequestTracker.plan`."""
        assert self._scheduler is not None
        scheduled = scheduler_output.num_scheduled_tokens
        self._requests.block_state = scheduler_output.kv_connector_block_state
        orders = self._scheduler.plan(
            self._requests.confirmed(scheduled),
            self._requests,
            scheduler_output.preempted_req_ids or (),
            self._requests.computing(scheduled) if self._saves_by_layer else (),
        )
        self._requests.block_state = None
        self._scheduler.tracker.decoding = 1 in scheduled.values()
        self._scheduler.idle = orders.idle = not scheduled
        return Metadata(orders)

    def update_connector_output(self, connector_output: Any) -> None:
        """See `RequestTracker.reported`."""
        assert self._scheduler is not None
        metadata = connector_output.kv_connector_worker_meta
        if metadata is not None:
            self._scheduler.reported(metadata.report)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """See `RequestTracker.finished`. Tells what is stored, if that is asked for."""
        assert self._scheduler is not None
        request_id, confirmed = request.request_id, _confirmed(request)
        told = None
        if to_be_told(request.kv_transfer_params):
            blocks = 0  # what is not saved any more is not promised either
            if self._requests.holds(request_id):
                blocks = self._scheduler.tracker.promise(request_id, confirmed)
            told = promise(blocks, self._link.home_number())
        self._requests.finished_pages[request_id] = block_ids
        keeps = self._scheduler.finished(request_id, confirmed, self._requests)
        self._requests.remove(request_id)
        return keeps, told

    def reset_cache(self) -> bool:
        """Begin a new epoch of the weights: nothing that was stored before is found from now on.
        Requests that the engine has load and save nothing any more, and loads that have not ended
        count as failed. False if the version's name can't be read; the epoch has begun anyway."""
        assert self._scheduler is not None
        self._requests.outdate()
        self._scheduler.tracker.reset()
        try:
            self._epoch.reset()
        except InvalidInput as error:
            log.error("the cache is reset, and shared with no other engine: %s", error)
            return False
        return True

    # -- in a worker -----------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Take the engine's pages."""
        assert self._worker is not None
        layers = {name: kv_caches[name] for name in self._layers}
        pinned = self._link if self._settings.pin_memory else None
        rank, stage = self._place()
        self._copier = engine_copier(self._blocks, layers, rank, pinned, stage)
        hbm = open_front(self._copier, self._settings.hbm_nbytes())
        self._worker.register(self._copier, tuple(self._layers), hbm)

    def handle_preemptions(self, kv_connector_metadata: Metadata) -> None:
        """See `WorkerSide.drain`."""
        assert self._worker is not None
        self._worker.drain(kv_connector_metadata.orders.preempted)

    def bind_connector_metadata(self, connector_metadata: Metadata) -> None:
        """See `WorkerSide.begin_layer_saves`: vLLM calls `start_load_kv` behind the forward pass,
        unless there are synchronous loads."""
        super().bind_connector_metadata(connector_metadata)
        if self._saves_by_layer and self._worker is not None:
            self._worker.begin_layer_saves(connector_metadata.orders)

    def start_load_kv(self, forward_context: Any, **_: Any) -> None:
        """See `WorkerSide.begin`."""
        assert self._worker is not None
        orders = self._get_connector_metadata().orders
        if orders.loads and self._copier is not None:
            self._copier.step_begins()  # in this thread: its stream has the engine's steps
        layers_wait = bool(orders.loads) and _layers_wait(forward_context)
        self._worker.begin(orders, layers_wait=layers_wait)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """See `WorkerSide.wait_for_layer`."""
        assert self._worker is not None
        self._worker.wait_for_layer(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **_: Any) -> None:
        """See `WorkerSide.computed`. Layers that share the cache of another have none to save."""
        if self._saves_by_layer and layer_name in self._layers:
            assert self._worker is not None
            self._worker.computed(self._layers[layer_name])

    def wait_for_save(self) -> None:
        """See `WorkerSide.finish_loads`. A save reads pages that no step writes."""
        assert self._worker is not None
        self._worker.finish_loads()
        if self._saves_by_layer:
            self._worker.end_layers()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """See `WorkerSide.ended`."""
        assert self._worker is not None
        saved, loaded = self._worker.ended()
        return saved or None, loaded or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """See `WorkerSide.take_bad_pages`."""
        assert self._worker is not None
        return self._worker.take_bad_pages()

    def build_connector_worker_meta(self) -> WorkerMetadata | None:
        """See `WorkerSide.take_report`."""
        assert self._worker is not None
        report = self._worker.take_report()
        return WorkerMetadata(report) if report else None

    # -- statistics ------------------------------------------------------------------------------

    def get_external_cache_hit_sources(
        self, request: Any, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        """Where the tokens to load are: this host's memory, its disk, or another node."""
        assert self._scheduler is not None
        found = self._scheduler.tracker.hit_tokens(request.request_id, num_external_tokens)
        return {_SOURCES[tier]: tokens for tier, tokens in found.items()}

    def get_kv_connector_stats(self) -> Statistics | None:
        """The counts of this side since the last call."""
        side = self._scheduler or self._worker
        counts = side.counters.take() if side is not None else {}
        return Statistics(data=counts) if counts else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Statistics:
        """Statistics with these counts."""
        return Statistics(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> PromMetrics:
        """The counts as Prometheus metrics."""
        return PromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """End threads and connections."""
        for side in (self._scheduler, self._worker):
            if side is not None:
                side.close()
        if self._copier is not None:
            self._copier.close()
        self._scheduler = self._worker = self._copier = None
