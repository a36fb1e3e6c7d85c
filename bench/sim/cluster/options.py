"""What is simulated: a cluster, its conductor, and how requests come."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from tiffin.conductor.core.settings import Settings, patched
from tiffin.conductor.cost import latency_profiles
from tiffin.conductor.prefill.queue import QueueSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ...traces.trace import TraceRequest

_QUEUE = QueueSettings()


@dataclass(frozen=True, slots=True)
class SimulationOptions:
    """A cluster and its conductor.

    The defaults are Mooncake's test-bed (FAST '25, section 5): Llama-3-70B on nodes of eight A800
    with four cards of 200 Gb/s, of which its transfer engine gets 87 GB/s (figure 12), 327,680
    bytes of KV per token, and 3 million tokens of memory per node (figure 10).

    **Prefill.** `order`: in that of arrival; as `Conductor.next_prefill` says, which instances ask;
    or "held": the gateway sends a prompt when the conductor has released it, `ahead_max` and
    `ahead_s` ahead. Both by the conductor's `queue_order`, and `priority`, the class of a request.
    A prompt is computed in chunks of `chunk_tokens` (0: whole), by `stages` nodes in a pipeline
    (section 4.1 of the paper: chunked pipeline parallelism). `layerwise`: loading blocks, fetching
    them and handing KV over overlap with computing, of which only one of `layers` is left to be
    waited for.

    **Tiers.** Tokens of KV that a prefill instance keeps in HBM, and its node in memory and on
    NVMe; 0: no such tier. Blocks are loaded at the bandwidths of `Settings.transfers`.
    `knows_nodes`: whether the conductor hears of what nodes have.

    **Decode.** `kv_capacity_tokens` and `batch_max` limit a batch. `preemption`: none, as a request
    joins only if there is room for its whole answer; or "recompute" and "swap": what is done with
    its KV if there is not (`DecodeInstance`).

    **The conductor.** `use_lengths`: whether its admission forecasts with predicted lengths of
    answers, else all take as long. `fetches`: whether instances fetch blocks from others' nodes.

    **What the conductor hears** comes `late_s` late, and up to `late_jitter_s` later. An event of a
    request says how old it is, as the gateway knows how long it has kept it. Loads come
    every `heartbeat_s`, and how many tokens were answered every `report_s`. Loads are those of
    `load_late_s` before, and their tokens have an error with `load_noise` as the standard deviation
    of its logarithm; `load_age_told`: whether the instances say how old they are. `noise`:
    computing and decoding take times with this standard deviation of their logarithm, and the
    profile's mean.
    `slowness`: by instance, how many times as long as its profile's its times are, if not as long.

    `replication`: whether nodes carry out the conductor's orders to copy hot blocks. What it takes
    to find these, every heartbeat, doubles the time of a simulation.

    `planner`: whether roles flip as the conductor plans ("act"), or stay; `flip_s`: from its call
    until an empty instance has its new role. An instance that comes to prefill has an empty cache,
    and the node of one that stops keeps its blocks, for others to fetch.

    **Requests** come when the trace says so; `closed`: the next turn of a conversation not before
    the answer to the one before.
    """

    prefill: int = 8
    decode: int = 8
    policy: str = "kvcache_centric"
    admission: str = "off"
    profile: str = latency_profiles.DEFAULT
    decode_profile: str = ""  # of instances that decode; empty for the same
    token_bytes: int = 327_680
    order: Literal["arrival", "conductor", "held"] = "arrival"
    queue_order: Literal["fcfs", "shortest-first", "longest-first"] = "fcfs"
    ahead_max: int = _QUEUE.ahead_max
    ahead_s: float = _QUEUE.ahead_s
    priority: Callable[[TraceRequest], str] = lambda request: "normal"
    chunk_tokens: int = 0
    stages: int = 1
    layerwise: bool = False
    layers: int = 80
    hbm_cache_tokens: int = 0
    cache_tokens: int = 3_000_000
    nvme_cache_tokens: int = 0
    knows_nodes: bool = True
    eviction: str = "lru"
    kv_capacity_tokens: int = 1_000_000
    batch_max: int = 256
    preemption: Literal["none", "recompute", "swap"] = "none"
    bandwidth_bytes_s: float = 87e9
    latency_s: float = 1e-3
    late_s: float = 0.1
    late_jitter_s: float = 0.0
    heartbeat_s: float = 1.0
    report_s: float = 4.0
    load_late_s: float = 0.0
    load_age_told: bool = True
    load_noise: float = 0.0
    noise: float = 0.0
    slowness: Mapping[str, float] = field(default_factory=dict, hash=False)
    use_lengths: bool = True
    fetches: bool = True
    closed: bool = False
    replication: bool = False
    planner: Literal["off", "act"] = "off"
    flip_s: float = 5.0
    ttft_s: float | None = None
    tbt_s: float | None = None
    seed: int = 0

    def settings(self) -> Settings:
        """Of the conductor. Raises InvalidRequest for a policy that does not exist."""
        admission = {"mode": self.admission, "use_lengths": self.use_lengths}
        changes = {"policy": {"name": self.policy}, "admission": admission}
        links = {"link_bandwidth_bytes_s": self.bandwidth_bytes_s, "link_latency_s": self.latency_s}
        ahead_max = self.ahead_max if self.order == "held" else 0
        queue = {"order": self.queue_order, "ahead_max": ahead_max, "ahead_s": self.ahead_s}
        layers = {"layerwise_tokens_min": 0, "overlapped": self.layerwise}
        more = {"transfers": links, "queue": queue, "disaggregation": layers}
        changes["planner"] = {"mode": self.planner}
        return patched(Settings(), {**changes, **more})

    @property
    def shown(self) -> str:
        """What of it decides when a prompt is sent, and whether it is taken, for tables."""
        ahead = f" with `ahead_max` {self.ahead_max} and `ahead_s` {self.ahead_s:g}"
        return (
            f"`order` {self.order}{ahead if self.order == 'held' else ''}, "
            f"`queue_order` {self.queue_order}, admission {self.admission}, all that the conductor "
            f"hears {self.late_s:g} s late"
        )


# With the settings that the conductor comes with, it holds prompts back until their turn.
SHIPPED = SimulationOptions(order="held")
