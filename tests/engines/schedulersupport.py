"""vLLM's own scheduler and cache manager with both sides of `TiffinConnector`, and `arithmetic` as
the model: an engine without weights, one step at a time.

Every block that the connector stores is looked at: its key must be that of the prompt and of what
the model really says to it.
"""

from __future__ import annotations

import random
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from arithmetic import LAYERS, WORD_BYTES, Pages, answer, extend, next_token
from vllm import SamplingParams
from vllm.config import (
    CacheConfig,
    CUDAGraphMode,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from tiffin.kvstore import Client
from tiffin.kvstore.connectors.vllm import TiffinConnector
from tiffin.kvstore.errors import DeadlineExceeded

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from tiffin.kvstore import Prefix
    from tiffin.kvstore.connectors.vllm.orders import LoadOrder, SaveOrder

PAGE_TOKENS = 4
BLOCK_TOKENS = 16
NAMES = [f"layer.{index}" for index in range(LAYERS)]

init_none_hash(sha256)


@dataclass(frozen=True)
class Options:
    """Of an engine. `ahead`: asynchronous scheduling, a step is scheduled before the last one's
    output is known. `caching`: vLLM's own prefix cache. `holds`: blocks are leased before they are
    loaded."""

    url: str
    namespace: str
    model: Path
    policy: str = "recompute"
    loading: str = "auto"
    ahead: bool = False
    caching: bool = True
    holds: bool = True
    pages: int = 400
    batch_tokens: int = 512
    seed: int = 0
    settings: dict[str, Any] = field(default_factory=dict)


# -- what the tests hold in their hands ------------------------------------------------------------


class HeldTasks:
    """In place of a ThreadPoolExecutor: tasks run at once, or while `held`, when `run` says so."""

    def __init__(self) -> None:
        self.held = False
        self._waiting: deque[tuple[Future[Any], Callable[[], Any]]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def submit(self, call: Callable[..., Any], *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._waiting.append((future, lambda: call(*arguments)))
        if not self.held:
            self.run(1)
        return future

    def run(self, count: int = 1 << 30) -> None:
        """Run up to so many waiting tasks, the oldest first."""
        for _ in range(min(count, len(self._waiting))):
            future, call = self._waiting.popleft()
            try:
                future.set_result(call())
            except Exception as error:  # noqa: BLE001 - of whoever asks for the result
                future.set_exception(error)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        if cancel_futures:
            self._waiting.clear()
        self.run()


class Faults:
    """Which gets and reserves of the connector fail: `chance` of them, or the next ones."""

    def __init__(self, seed: int) -> None:
        self.chance = 0.0
        self.next_gets: deque[int] = deque()  # how many blocks each of the next gets returns
        self._dice = random.Random(seed)

    def blocks_of_get(self, asked: int) -> int:
        """How many of the blocks that are asked for the next get returns."""
        if self.next_gets:
            return min(asked, self.next_gets.popleft())
        if self._dice.random() < self.chance:
            return self._dice.randrange(asked)
        return asked

    def reserve_fails(self) -> bool:
        return self._dice.random() < self.chance


class _FaultyClient:
    def __init__(self, client: Client, faults: Faults) -> None:
        self._client = client
        self._faults = faults

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def get(self, prefix: Prefix, **options: Any) -> Any:
        count = self._faults.blocks_of_get(len(prefix))
        if not count:
            raise DeadlineExceeded("a test wanted this get to fail")
        return self._client.get(prefix[:count], **options)

    def reserve(self, prefix: Prefix, **options: Any) -> Any:
        if self._faults.reserve_fails():
            raise DeadlineExceeded("a test wanted this reserve to fail")
        return self._client.reserve(prefix, **options)


class _FaultyLink:
    """A link to the pool with faults behind it: the link itself sees none."""

    def __init__(self, link: Any, faults: Faults) -> None:
        self._link = link
        self._faults = faults

    def call(self, action: Callable[[Any], Any], wait_s: float = 0.0) -> Any:
        def tried(client: Client) -> tuple[Any, Exception | None]:
            try:
                return action(_FaultyClient(client, self._faults)), None
            except DeadlineExceeded as error:
                return None, error

        result, error = self._link.call(tried, wait_s)
        if error is not None:
            raise error
        return result

    def region(self) -> Any:
        return self._link.region()

    def close(self) -> None:
        self._link.close()


# -- the engine ------------------------------------------------------------------------------------


def _configs(options: Options) -> tuple[VllmConfig, KVCacheConfig]:
    extra = {
        "url": options.url,
        "namespace": options.namespace,
        "block_tokens": BLOCK_TOKENS,
        "loading": options.loading,
        "lookup_timeout_s": 60.0,
        **options.settings,
    }
    cache = CacheConfig(block_size=PAGE_TOKENS, enable_prefix_caching=options.caching)
    cache.kv_cache_layout = "LBHNC"
    cache.num_gpu_blocks = options.pages
    config = VllmConfig(
        model_config=ModelConfig(model=str(options.model), dtype="float32", seed=0),
        cache_config=cache,
        device_config=DeviceConfig("cpu"),
        scheduler_config=SchedulerConfig(
            max_num_seqs=8,
            max_num_batched_tokens=options.batch_tokens,
            max_model_len=4096,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
        ),
        kv_transfer_config=KVTransferConfig(
            kv_connector="TiffinConnector",
            kv_connector_module_path="tiffin.kvstore.connectors.vllm",
            kv_role="kv_both",
            kv_connector_extra_config=extra,
            kv_load_failure_policy=options.policy,
        ),
    )
    config.scheduler_config.async_scheduling = options.ahead  # vLLM has it off on a CPU
    # One word per token: K and V of one head with one number of 32 bits.
    spec = FullAttentionSpec(
        block_size=PAGE_TOKENS, num_kv_heads=1, head_size=1, dtype=torch.float32
    )
    groups = [KVCacheGroupSpec(NAMES, spec)]
    return config, KVCacheConfig(options.pages, kv_cache_tensors=[], kv_cache_groups=groups)


@dataclass
class Told:
    """What a client of the engine knows about a request. `namespace`: of its blocks."""

    prompt: tuple[int, ...]
    count: int
    namespace: str = ""
    tokens: list[int] = field(default_factory=list)
    reason: str | None = None
    cached: int = 0

    def check(self) -> None:
        """The tokens are those that the model says."""
        expected = answer(self.prompt, self.count)[: len(self.tokens)]
        assert tuple(self.tokens) == expected
        assert self.reason != "length" or len(self.tokens) == self.count


class Engine:
    """An engine without weights. `told`: all requests. `lookups`, `loads`, `saves`: the connector's
    threads, in the test's hands. `ordered`: all loads. `by_layer`: all saves by layer, by number.
    `preempted`: how often that happened."""

    def __init__(self, options: Options) -> None:
        self.options = options
        config, cache = _configs(options)
        scheduler = config.scheduler_config.get_scheduler_cls()
        self.scheduler = scheduler(
            vllm_config=config,
            kv_cache_config=cache,
            structured_output_manager=StructuredOutputManager(config),
            block_size=PAGE_TOKENS,
            log_stats=True,
        )
        self.told: dict[str, Told] = {}
        self.faults = Faults(options.seed)
        self.lookups, self.loads, self.saves = HeldTasks(), HeldTasks(), HeldTasks()
        self.layers = HeldTasks()  # the thread that publishes layers
        self.saved: dict[bytes, str] = {}  # keys of blocks, and the request that saved them
        self.ordered: list[LoadOrder] = []
        self.by_layer: dict[int, SaveOrder] = {}
        self.preempted = 0
        worker = TiffinConnector(config, KVConnectorRole.WORKER, cache)
        self.pages = Pages(options.pages, PAGE_TOKENS)
        self.runner = Runner(worker, self.pages)
        self._steps: deque[tuple[Any, ModelRunnerOutput]] = deque()
        self._connector = self.scheduler.connector
        self._take_in_hand(self._connector._scheduler, worker._worker)
        self.answer([1])  # from now on the scheduler knows which memory the worker can read

    def _take_in_hand(self, scheduler: Any, worker: Any) -> None:
        """Let the test decide when the connector's threads run and what fails."""
        worker._link.call(lambda client: None, wait_s=30.0)  # it is connected now
        layers = worker._layer_saves
        for executor in (scheduler._threads, worker._loaders, worker._savers, layers._publisher):
            executor.shutdown()
        scheduler._threads = self.lookups
        worker._loaders, worker._savers, layers._publisher = self.loads, self.saves, self.layers
        for side in (scheduler, worker, layers):
            side._link = _FaultyLink(side._link, self.faults)
        if not self.options.holds:
            scheduler._may_hold = lambda prefix: False

    def add(self, prompt: Sequence[int], count: int = 2) -> str:
        """Start a request for `count` tokens; returns its id."""
        request_id = f"r{len(self.told)}"
        self.told[request_id] = Told(tuple(prompt), count)
        parameters = SamplingParams(max_tokens=count, ignore_eos=True)
        parameters.update_from_generation_config({}, 3)
        hasher = get_request_block_hasher(PAGE_TOKENS, sha256)
        request = Request(
            request_id=request_id,
            prompt_token_ids=list(prompt),
            sampling_params=parameters,
            pooling_params=None,
            mm_features=None,
            block_hasher=hasher,
        )
        self.told[request_id].namespace = self._connector._identities.of(request).namespace
        self.scheduler.add_request(request)
        return request_id

    def reset(self, *, running: bool = False) -> bool:
        """Pause, and reset vLLM's prefix cache and the connector; `running` requests are preempted
        for it."""
        while self._steps:
            self._process(*self._steps.popleft())
        return bool(self.scheduler.reset_prefix_cache(running, reset_connector=True))

    def abort(self, request_id: str) -> None:
        """As if the client went away."""
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)
        self.told[request_id].reason = "abort"

    def status(self, request_id: str) -> str:
        """Its name in vLLM; "" once the engine has forgotten the request."""
        request = self.scheduler.requests.get(request_id)
        return "" if request is None else str(request.status.name)

    def step(self) -> None:
        """Schedule and run a step if there is something to do, and process the oldest output, which
        is that of this step or, with asynchronous scheduling, of the one before."""
        if self.scheduler.has_requests():
            scheduled = self.scheduler.schedule()
            self._note(scheduled)
            self._steps.append((scheduled, self.runner.step(scheduled)))
            if self.options.ahead and len(self._steps) < 2 and scheduled.num_scheduled_tokens:
                return
        if self._steps:
            self._process(*self._steps.popleft())

    def _process(self, scheduled: Any, output: ModelRunnerOutput) -> None:
        for outputs in self.scheduler.update_from_output(scheduled, output).values():
            for one in outputs.outputs:
                told = self.told[one.request_id]
                told.tokens += one.new_token_ids
                if one.prefill_stats is not None:
                    told.cached = one.prefill_stats.num_cached_tokens
                if one.finish_reason is not None:
                    told.reason = str(one.finish_reason)

    def hold(self, held: bool = True) -> None:
        """Whether lookups, loads and saves wait for the test."""
        for tasks in self.tasks:
            tasks.held = held

    @property
    def tasks(self) -> tuple[HeldTasks, ...]:
        """All that waits for the test."""
        return self.lookups, self.loads, self.saves, self.layers

    def free_pages(self) -> int:
        """How many pages no request has."""
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def finish(self) -> None:
        """Let everything end; then check what was told, what was stored, and that no request left
        a page behind."""
        self.hold(False)
        for _ in range(10_000):
            for tasks in self.tasks:
                tasks.run()
            if not self.scheduler.has_requests() and not self._steps:
                break
            self.step()
        assert not self.scheduler.has_requests(), "requests that never end"
        assert all(told.reason for told in self.told.values())
        assert self.free_pages() == self.options.pages - 1  # one is vLLM's null page
        assert not self._connector._scheduler._leases.held_bytes
        for told in self.told.values():
            told.check()
        self._check_saved()

    def answer(self, prompt: Sequence[int], count: int = 2) -> Told:
        """Run one request to its end."""
        request_id = self.add(prompt, count)
        self.finish()
        return self.told[request_id]

    def close(self) -> None:
        self.runner.connector.shutdown()
        self.scheduler.shutdown()

    # -- what is in the pool ---------------------------------------------------------------------

    def prefix(self, tokens: Sequence[int], namespace: str = "") -> Prefix:
        """The blocks of these tokens, as this engine names them before any reset, or those of a
        request with this namespace."""
        name = namespace or self.options.namespace
        return self._connector._schema.prefix(list(tokens), namespace=name)

    def _note(self, scheduled: Any) -> None:
        orders = scheduled.kv_connector_metadata.orders
        self.preempted += len(scheduled.preempted_req_ids or ())
        self.ordered += orders.loads
        self.by_layer |= {order.number: order for order in orders.layer_saves}
        confirmed = [self.by_layer[number] for number in orders.confirmed]
        for order in (*orders.saves, *confirmed):
            self.saved.update(dict.fromkeys(order.prefix.keys, order.request_id))

    def _check_saved(self) -> None:
        """Every block that was ordered to be saved is one of its request's true tokens, and what
        the pool has of these is right."""
        true = {name: self._true_prefix(told) for name, told in self.told.items()}
        for key, request_id in self.saved.items():
            assert key in true[request_id].keys, f"{request_id} saved what the model never says"
        with Client.open(self.options.url, verify="always") as client:
            for told, prefix in zip(self.told.values(), true.values(), strict=True):
                check_stored(client, prefix, told)

    def _true_prefix(self, told: Told) -> Prefix:
        return self.prefix(told.prompt + answer(told.prompt, told.count), told.namespace)


def check_stored(client: Client, prefix: Prefix, told: Told) -> None:
    """What the pool has of a request is what the model computes."""
    _, words = extend(0, told.prompt + answer(told.prompt, told.count))
    block_words = BLOCK_TOKENS * WORD_BYTES
    with client.get(prefix) as blocks:
        for index in range(len(blocks)):
            expected = words[:, index * BLOCK_TOKENS : (index + 1) * BLOCK_TOKENS].tobytes()
            assert len(expected) == LAYERS * block_words
            assert blocks[index].memory.tobytes() == expected, f"block {index} of the pool is wrong"


# -- the worker ------------------------------------------------------------------------------------


class Runner:
    """A worker: its state of the requests, as vLLM's model runners keep it, and the connector's
    hooks, in the order in which they call them."""

    def __init__(self, connector: Any, pages: Pages) -> None:
        self.connector = connector
        self._pages = pages
        self._tokens: dict[str, list[int]] = {}
        self._prompts: dict[str, int] = {}
        self._tables: dict[str, list[int]] = {}
        connector.register_kv_caches(dict(zip(NAMES, pages.layers, strict=True)))

    def step(self, scheduled: Any) -> ModelRunnerOutput:
        """Run a scheduled step."""
        connector, metadata = self.connector, scheduled.kv_connector_metadata
        connector.handle_preemptions(metadata)
        connector.bind_connector_metadata(metadata)
        for load in metadata.orders.loads:
            self._pages.spoil(load.pages)  # what they have before a load is anything
        forward = _forward_context(scheduled)
        if scheduled.has_sync_kv_loads:
            connector.start_load_kv(forward)
        if scheduled.num_scheduled_tokens:
            for name in NAMES:
                connector.wait_for_layer_load(name)
        computed = self._update(scheduled)
        sampled = [
            self._compute(request_id, computed[request_id], count)
            for request_id, count in scheduled.num_scheduled_tokens.items()
        ]
        if scheduled.num_scheduled_tokens:
            for name in NAMES:
                connector.save_kv_layer(name, None, None)
        if not scheduled.has_sync_kv_loads:
            connector.start_load_kv(forward)
        connector.wait_for_save()
        return _output(scheduled, sampled, self._connector_output(scheduled))

    def _connector_output(self, scheduled: Any) -> KVConnectorOutput:
        results = self.connector.get_transfer_results(scheduled.finished_req_ids)
        output = KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            invalid_block_ids=self.connector.get_block_ids_with_load_errors(),
            kv_connector_worker_meta=self.connector.build_connector_worker_meta(),
        )
        self.connector.clear_connector_metadata()
        return output

    def _update(self, scheduled: Any) -> dict[str, int]:
        """Take in what the scheduler says; returns the computed tokens of each request."""
        for request_id in scheduled.finished_req_ids:
            self._tokens.pop(request_id, None)
        computed = {}
        for new in scheduled.scheduled_new_reqs:
            tokens = new.prefill_token_ids or new.prompt_token_ids
            self._tokens[new.req_id] = list(tokens)
            self._prompts[new.req_id] = len(new.prompt_token_ids)
            self._tables[new.req_id] = list(new.block_ids[0])
            computed[new.req_id] = new.num_computed_tokens
        cached = scheduled.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            self._update_cached(cached, index, request_id)
            computed[request_id] = cached.num_computed_tokens[index]
        return computed

    def _update_cached(self, cached: Any, index: int, request_id: str) -> None:
        pages = cached.new_block_ids[index]
        if request_id in cached.resumed_req_ids:
            self._tables[request_id] = list(pages[0])
        elif pages is not None:
            self._tables[request_id] += pages[0]
        if request_id in cached.all_token_ids:
            self._tokens[request_id] = list(cached.all_token_ids[request_id])
        # Outputs of steps with a failed load are taken back.
        del self._tokens[request_id][self._prompts[request_id] + cached.num_output_tokens[index] :]

    def _compute(self, request_id: str, begin: int, count: int) -> list[int]:
        """Compute tokens of a request; returns the next one, if these are the last."""
        tokens, table = self._tokens[request_id], self._tables[request_id]
        mine = tokens[begin : begin + count]
        assert len(mine) == count, f"{request_id}: step over tokens that nobody has said"
        total = self._pages.total(table[: -(-begin // PAGE_TOKENS)], begin)
        total, words = extend(total, mine)
        self._pages.write(table, begin, words)
        if begin + count < len(tokens):
            return []
        tokens.append(next_token(total))
        return tokens[-1:]


def _forward_context(scheduled: Any) -> Any:
    """What vLLM's context of this step says of a forward pass and its graph."""
    computes = {} if scheduled.num_scheduled_tokens else None
    return SimpleNamespace(attn_metadata=computes, cudagraph_runtime_mode=CUDAGraphMode.NONE)


def _output(
    scheduled: Any, sampled: list[list[int]], connector: KVConnectorOutput
) -> ModelRunnerOutput:
    names = list(scheduled.num_scheduled_tokens)
    return ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: index for index, name in enumerate(names)},
        sampled_token_ids=sampled,
        logprobs=None,
        prompt_logprobs_dict={},
        pooler_output=None,
        kv_connector_output=connector,
    )
