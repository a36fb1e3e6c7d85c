"""The words of the scheduling core: requests, instances, their load, decisions. No I/O, no clock.

Times are seconds on the caller's monotonic clock (`now`), sizes are bytes or tokens, as named.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

# Of a prompt: a million tokens in blocks of 16.
KEYS_MAX = 65_536
KEY_BYTES = 16
TOKENS_MAX = 16 << 20
# Instances that one request may name as not to be chosen.
EXCLUDE_MAX = 256


class Role(StrEnum):
    """What an instance does. MIXED does both, as engines without disaggregation do."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"


class Status(StrEnum):
    """Where an instance is in its life. Only READY ones are given new work."""

    READY = "ready"
    DRAINING = "draining"
    LOST = "lost"  # no heartbeat for too long


@dataclass(frozen=True, slots=True)
class Objectives:
    """What a request wants to be answered within. None: it does not care."""

    ttft_s: float | None = None
    tbt_s: float | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to be scheduled.

    `keys` name the prompt's full blocks, in order, 16 bytes each (`kvstore.keys`); empty if only
    the length is known. `priority` and `output_class` name classes of the settings. `tenant` is who
    shares fairly with others. `output_tokens` is how long the caller thinks that the answer will
    be; `output_tokens_max` is where it is cut. `exclude` are ids of instances that must not be
    chosen, such as one that has just refused it; those that are not known are ignored.
    """

    id: str
    model: str
    prompt_tokens: int
    keys: tuple[bytes, ...] = ()
    objectives: Objectives = Objectives()
    priority: str = "normal"
    tenant: str = ""
    output_tokens: int | None = None
    output_tokens_max: int | None = None
    output_class: str = ""
    urgent: bool = False  # may be raced over two routes
    exclude: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class InstanceSpec:
    """What an instance says of itself when it registers.

    `node` is the name of the kvstore node on its host ("" if none): what that node holds in DRAM or
    NVMe is local to the instance. `profile` names its latency profile. `kv_capacity_tokens` is how
    much context its HBM holds, `batch_max` how many requests it decodes at a time. `fetches`:
    whether its engine can bring blocks from elsewhere, by a connector of the pool; of one that can
    not, only what it has itself counts.
    """

    id: str
    model: str
    role: Role
    profile: str
    url: str = ""
    node: str = ""
    block_tokens: int = 512
    block_bytes: int = 0
    kv_capacity_tokens: int = 1_000_000
    batch_max: int = 256
    fetches: bool = True
    labels: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Load:
    """What an instance reports in a heartbeat; None where it does not know.

    `queued_prefill_tokens` wait or are being computed; `running` requests decode, with
    `context_tokens` of context together; `kv_used_tokens` are taken in HBM.
    """

    queued_prefill_tokens: int | None = None
    queued: int | None = None
    running: int | None = None
    context_tokens: int | None = None
    kv_used_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class RequestEvent:
    """What became of a request. "alive": it waits or runs still, and nothing else is known; so it
    keeps its place. `tokens` of a "tokens" event: how many more it has answered.
    `route` of a request that is raced: the ids of the prefill and the decode instance that this is
    about; without it, those of its decision."""

    request_id: str
    kind: str
    tokens: int = 0
    route: tuple[str, str] | None = None


EVENT_KINDS = ("alive", "prefill_done", "first_token", "tokens", "finished", "cancelled")


@dataclass(frozen=True, slots=True)
class Fetch:
    """Blocks [start, stop) of the prompt are brought from `source` before prefill reaches them.

    `source` is a holder's name ("node-a/dram", "prefill-3/hbm"); `seconds` is the estimate.
    """

    start: int
    stop: int
    source: str
    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Candidate:
    """Why an instance was, or was not, chosen: every term of its cost, in seconds or tokens."""

    instance: str
    cost: float
    terms: dict[str, float]


@dataclass(frozen=True, slots=True)
class Decision:
    """Where a request runs. It holds until `expires_at`; events of the request prolong it.

    `prefill` and `decode` are instances' ids, the same one for a local prefill. `cached_tokens` are
    used of the `available_tokens` that some holder has. `shards` says how many context tokens each
    instance of a spread request holds. `alternatives` are raced, if any.
    """

    request_id: str
    prefill: str
    decode: str
    policy: str
    predicted_ttft_s: float
    predicted_tbt_s: float
    cached_tokens: int
    available_tokens: int
    fetches: tuple[Fetch, ...] = ()
    layerwise: bool = False
    wait_for: str = ""  # a request in flight whose blocks this one waits for
    output_tokens_max: int | None = None
    degraded: tuple[str, ...] = ()
    shards: tuple[tuple[str, int], ...] = ()
    alternatives: tuple[tuple[str, str], ...] = ()
    candidates: Sequence[Candidate] = ()
    decode_candidates: Sequence[Candidate] = ()
    decided_at: float = 0.0
    expires_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Rejection:
    """Why a request is not taken now, and when to come back.

    `reason`: "ttft", "tbt", "kv_room", "queue_full", "preempted" (load: HTTP 429) or "no_prefill",
    "no_decode" (nothing schedulable: HTTP 503).
    """

    request_id: str
    reason: str
    message: str
    predicted_ttft_s: float | None = None
    predicted_tbt_s: float | None = None
    retry_after_s: float | None = None
    terms: dict[str, float] = field(default_factory=dict)
    candidates: Sequence[Candidate] = ()
    decided_at: float = 0.0

    @property
    def overloaded(self) -> bool:
        """Whether it is for load (429) and not because nothing could serve it (503)."""
        return self.reason not in ("no_prefill", "no_decode")
