"""vLLM's side of the connector: `TiffinConnector`, made by vLLM once for its scheduler and once in
each worker. It turns vLLM's objects into the plain ones of `scheduler_side` and `worker_side`."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
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
from .compatibility import cache_shape, check_engine, check_version, safe_loading
from .metrics import PromMetrics, Statistics
from .model_files import files_fingerprint
from .orders import StepOrders, StepReport
from .page_copier import PageCopier
from .page_schema import page_schema
from .pool_link import PoolLink
from .scheduler_side import SchedulerSide
from .settings import read
from .worker_side import WorkerSide

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

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

    def __init__(self) -> None:
        self._requests: dict[str, Any] = {}
        # Requests that were in no step since they got their pages.
        self._fresh: set[str] = set()
        self.block_state: Any = None
        self.finished_pages: dict[str, Sequence[int]] = {}

    def add(self, request: Any) -> None:
        self._requests[request.request_id] = request

    def remove(self, request_id: str) -> None:
        self._requests.pop(request_id, None)
        self._fresh.discard(request_id)
        self.finished_pages.pop(request_id, None)

    def allocated(self, request_id: str) -> None:
        """The engine has given pages to a request. It counts what is to be loaded into them as
        computed at once, and another connector beside this one may be what loads it."""
        self._fresh.add(request_id)

    def pages_of(self, request_id: str) -> Sequence[int]:
        """See `EngineState.pages_of`."""
        if request_id in self.finished_pages:
            return self.finished_pages[request_id]
        return self.block_state.get_block_ids(request_id)[0]  # type: ignore[no-any-return]

    def tokens_of(self, request_id: str) -> Sequence[int]:
        """See `EngineState.tokens_of`."""
        return list(self._requests[request_id].all_token_ids)

    def confirmed(self, request_ids: Iterable[str]) -> Iterator[tuple[str, int]]:
        """How many leading tokens of each request of a step are computed, without steps in flight
        and without what this step loads."""
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None:
                yield request_id, self.confirmed_of(request)
                self._fresh.discard(request_id)

    def confirmed_of(self, request: Any) -> int:
        """The same of one request."""
        if request.request_id in self._fresh:
            return 0
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
        if current_platform.device_type != "cpu":
            raise InvalidInput(
                f"vLLM on {current_platform.device_type}: this release of tiffin moves the pages "
                "of engines on a CPU"
            )
        check_engine(vllm_config, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        settings = safe_loading(vllm_config, read(transfer.kv_connector_extra_config))
        shape = cache_shape(vllm_config, kv_cache_config, settings, version)
        self._schema = page_schema(shape, settings.block_tokens)
        self._page_tokens, self._ranks = shape.page_tokens, shape.ranks
        (group,) = kv_cache_config.kv_cache_groups
        self._layers = list(group.layer_names)
        self._adapters: dict[str, str] = {}
        self._requests = _Requests()
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        link = PoolLink.shared(settings.url, settings.verify)
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerSide(
                settings,
                self._schema,
                self._page_tokens,
                self._ranks,
                link,
                loads=transfer.is_kv_consumer,
                saves=transfer.is_kv_producer,
            )
            log.info("KV blocks of %s", shape)
        else:
            self._worker = WorkerSide(settings, link, self._rank(), self._ranks)

    @staticmethod
    def _rank() -> int:
        from vllm.distributed import get_tensor_model_parallel_rank

        return int(get_tensor_model_parallel_rank())

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a cache; nobody waits for what it saves."""
        return False

    # -- in the scheduler ------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        """Begin the lookup of a request."""
        assert self._scheduler is not None
        namespace = self._namespace(request)
        if namespace is None:
            return
        self._requests.add(request)
        self._scheduler.add(request.request_id, request.all_token_ids, namespace)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """See `RequestTracker.matched`."""
        assert self._scheduler is not None
        return self._scheduler.matched(request.request_id, num_computed_tokens, request.num_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """See `RequestTracker.allocated`."""
        assert self._scheduler is not None
        self._requests.allocated(request.request_id)
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
            self._new_pages(scheduler_output),
        )
        self._requests.block_state = None
        self._scheduler.tracker.decoding = 1 in scheduled.values()
        self._scheduler.idle = orders.idle = not scheduled
        return Metadata(orders)

    def _new_pages(self, scheduler_output: Any) -> Iterator[int]:
        """The pages that the engine gives away in this step, to be computed. A request that begins
        or resumes names all its pages: what it has already is not new."""
        for new in scheduler_output.scheduled_new_reqs:
            yield from new.block_ids[0][-(-new.num_computed_tokens // self._page_tokens) :]
        cached = scheduler_output.scheduled_cached_reqs
        for request_id, groups, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            if groups is not None:
                known = -(-computed // self._page_tokens)
                yield from groups[0][known if request_id in cached.resumed_req_ids else 0 :]

    def update_connector_output(self, connector_output: Any) -> None:
        """See `RequestTracker.reported`."""
        assert self._scheduler is not None
        metadata = connector_output.kv_connector_worker_meta
        if metadata is not None:
            self._scheduler.reported(metadata.report)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """See `RequestTracker.finished`."""
        assert self._scheduler is not None
        request_id = request.request_id
        self._requests.finished_pages[request_id] = block_ids
        confirmed = self._requests.confirmed_of(request)
        keeps = self._scheduler.finished(request_id, confirmed, self._requests)
        self._requests.remove(request_id)
        return keeps, None

    # -- in a worker -----------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Take the engine's pages."""
        assert self._worker is not None
        layers = [kv_caches[name] for name in self._layers]
        rank = self._rank()
        self._worker.register(
            PageCopier(layers, self._schema, self._page_tokens, rank, self._ranks)
        )

    def handle_preemptions(self, kv_connector_metadata: Metadata) -> None:
        """See `WorkerSide.drain`."""
        assert self._worker is not None
        self._worker.drain(kv_connector_metadata.orders.preempted)

    def start_load_kv(self, forward_context: Any, **_: Any) -> None:
        """See `WorkerSide.begin`."""
        assert self._worker is not None
        self._worker.begin(self._get_connector_metadata().orders)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to do: loads are of whole blocks."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **_: Any) -> None:
        """Nothing to do: saves are of whole blocks, once they are confirmed."""

    def wait_for_save(self) -> None:
        """Nothing to do: a save reads pages that no step writes."""

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
        self._scheduler = self._worker = None

    # -- small -----------------------------------------------------------------------------------

    def _namespace(self, request: Any) -> str | None:
        """What beside its tokens decides a request's cache; None for a request that is not looked
        up or stored, as its tokens do not decide it or its adapter's files can't be read."""
        if request.mm_features or request.prompt_embeds is not None:
            return None
        adapter, salt = request.lora_request, request.cache_salt
        if adapter is None and not salt:
            return ""
        try:
            weights = "" if adapter is None else self._adapter(adapter)
        except InvalidInput as error:
            log.warning("%s is computed without the KV pool: %s", request.request_id, error)
            return None
        content = json.dumps([weights, salt or ""])
        return blake2b(content.encode(), digest_size=16).hexdigest()

    def _adapter(self, adapter: Any) -> str:
        """An adapter's fingerprint; its files are read once."""
        path = str(adapter.lora_path)
        if path not in self._adapters:
            self._adapters[path] = files_fingerprint(Path(path))
        return self._adapters[path]
