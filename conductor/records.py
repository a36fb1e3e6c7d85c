"""Data types of the scheduler: requests, instances, their load, decisions. No I/O, no clock.

Times are seconds on the caller's monotonic clock (`now`), sizes are bytes or tokens, as named.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# Limit of keys of a prompt: a million tokens in blocks of 16.
KEYS_MAX = 65_536
KEY_BYTES = 16
TOKENS_MAX = 16 << 20
# Limit of instances that one request may exclude.
EXCLUDE_MAX = 256


class Role(StrEnum):
    """The work of an instance: prefill, decode, or (MIXED) both, as engines without disaggregation
    do."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"


class Status(StrEnum):
    """The life cycle of an instance. Only READY instances get new requests."""

    READY = "ready"
    DRAINING = "draining"
    LOST = "lost"  # no heartbeat for too long


@dataclass(frozen=True, slots=True)
class Objectives:
    """The latency objectives of a request in seconds: TTFT (time to first token) and TBT (time
    between tokens). None: no objective."""

    ttft_s: float | None = None
    tbt_s: float | None = None


class PromptKeys(NamedTuple):
    """The keys of a prompt's full blocks, and of its tokens behind the first `after` blocks in
    parts, 16 bytes each; and the name of their key space, empty if nobody has announced it."""

    blocks: tuple[bytes, ...] = ()
    parts: tuple[bytes, ...] = ()
    after: int = 0
    space: str = ""


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to be scheduled.

    `id` is unique among all in-flight requests at the core; the service composes it of the tenant
    and the tenant's id (`request_ids`). `keys` name the prompt's full blocks, in order, 16 bytes
    each (kvstore/format/keys.py); empty if only the length is known. `part_keys` name its tokens
    behind the first `parts_after` blocks, below a block (state/part_keys.py). They are the keys in
    the space `key_space` (empty if nobody has announced any), and `others` those in the other ones
    that the engines of its model have. `priority` names a class of the settings, `output_class` the
    caller's class for output length prediction. `tenant` is the unit of fair queueing.
    `output_tokens` is the caller's estimate of the answer's length; `output_tokens_max` is the
    length where it is cut. `exclude` are ids of instances that must not
    be chosen, such as one that has just refused the request; unknown ids are ignored.
    `first_token_from`: which instance gives the first token that counts. From "decode" it comes
    after the hand-over of the prompt's KV, from "prefill" before it.
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
    urgent: bool = False  # may be hedged: raced over two routes
    exclude: tuple[str, ...] = ()
    first_token_from: Literal["prefill", "decode"] = "prefill"
    part_keys: tuple[bytes, ...] = ()
    parts_after: int = 0
    key_space: str = ""
    others: tuple[PromptKeys, ...] = ()

    @property
    def keys_by_space(self) -> dict[str, PromptKeys]:
        """Its keys in each space."""
        own = PromptKeys(self.keys, self.part_keys, self.parts_after, self.key_space)
        return {one.space: one for one in (own, *self.others)}

    def in_space(self, keys: PromptKeys) -> Request:
        """The request with its keys in one of the spaces, and no others."""
        return replace(
            self,
            keys=keys.blocks,
            part_keys=keys.parts,
            parts_after=keys.after,
            key_space=keys.space,
            others=(),
        )


@dataclass(frozen=True, slots=True)
class InstanceSpec:
    """The specification that an instance registers with.

    `node` is the name of the kvstore node on its host ("" if none): that node's blocks in DRAM or
    NVMe are local to the instance. `profile` names its latency profile. `kv_capacity_tokens` is the
    number of context tokens that its HBM has room for, `batch_max` how many requests it decodes at
    a time. `fetches`: whether its engine can fetch blocks from other instances and nodes, by a
    connector of the pool; without it, or without `block_bytes`, by which the time of a fetch is
    predicted, only the instance's own blocks count. `prefix_caching`:
    whether its engine keeps prompts' KV in HBM for later ones; one that does not has what its node
    has. `part_tokens`: the tokens of its engine's own block, of which it re-uses whole ones only.
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
    prefix_caching: bool = True
    labels: dict[str, str] = field(default_factory=dict)
    part_tokens: int = 16

    @property
    def host(self) -> str:
        """The node that it is on. Without a kvstore node it has a network card nevertheless: then
        it is a node of its own, by a name that no kvstore node has."""
        return self.node or f"\0{self.id}"


@dataclass(frozen=True, slots=True)
class Load:
    """The load that an instance reports in a heartbeat; None for unknown values.

    `queued_prefill_tokens` wait to be computed, or are: without those that caches are expected to
    have, as the conductor counts its own requests; `running` requests decode, with
    `context_tokens` of context together; `kv_used_tokens` are in use in HBM. `age_s`: seconds since
    all of this was counted, when the report is sent; None if that is not known.
    """

    queued_prefill_tokens: int | None = None
    queued: int | None = None
    running: int | None = None
    context_tokens: int | None = None
    kv_used_tokens: int | None = None
    age_s: float | None = None


class RequestEvent(msgspec.Struct, frozen=True, gc=False):
    """An event of an in-flight request. "alive": it is still queued or running; the event only
    prolongs its reservations. "fetched": all blocks that its decision fetches have come, or were
    given up. "prefill_began": the engine starts to compute the prompt. "handed_over": all of the
    prompt's KV is where it is decoded, before or after "first_token", depending on which of both
    instances gives that. `tokens` of a "tokens" event: how many more tokens were generated; or
    `total_tokens`, also of an end: how many in all, the first one included, which may be told
    twice. `tokens` of "prefill_began": how many of the prompt are computed, as the others are
    cached (0: not known). `found_tokens` of "prefill_done" and "finished": how many of the prompt
    the engine had, or loaded, as it says itself.
    `route` of a hedged request: the ids of the prefill and the decode instance that the event is
    about; without it, those of its decision. For clients of the service: `tenant` is the tenant of
    the request, `conductor` the URL in its decision of the conductor that decided. `age_s`: how
    long ago it happened, when it is told.

    A struct of msgspec, as a frozen dataclass takes 2 us to make: two of them for each event that
    comes were a sixth of its cost."""

    request_id: str
    kind: str
    tokens: int = 0
    route: tuple[str, str] | None = None
    tenant: str = ""
    conductor: str = ""
    total_tokens: int | None = None
    age_s: float = 0.0
    found_tokens: int | None = None


EVENT_KINDS = (
    "alive",
    "fetched",
    "prefill_began",
    "prefill_done",
    "handed_over",
    "first_token",
    "tokens",
    "finished",
    "cancelled",
)
# Those that may name the route of a hedged request.
FOUND_EVENT_KINDS = ("prefill_done", "finished")
ROUTED_EVENT_KINDS = ("prefill_began", "prefill_done", "handed_over", "first_token")


@dataclass(frozen=True, slots=True)
class Fetch:
    """A fetch of blocks [start, stop) of the prompt from `source`, before prefill reaches them.

    `source` is the name of a node, or the id of an instance for the `tier` "hbm"; `seconds` is the
    estimated time.
    """

    start: int
    stop: int
    source: str
    tier: str
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
    """The instances that a request runs on. Its reservations expire at `expires_at`; events of the
    request prolong them.

    `prefill` and `decode` are instances' ids, the same one for a local prefill. `cached_tokens` are
    used of the `available_tokens` that some holder has. `shards` has the number of context tokens
    of each instance that a request's context is spread over. `alternatives` are the other routes of
    a hedged request. `placement` is why the prefill is where it is decoded, or elsewhere; it is
    empty where there was nothing to choose. `local_s`, `remote_s`: the predicted costs of both.
    `output_tokens` is the predicted length of the answer, `output_source` who knew it. `model` is
    the one that serves the request, if that is another than was asked for. `degraded` says what was
    given up to take it.
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
    output_tokens_max: int | None = None
    degraded: tuple[str, ...] = ()
    shards: tuple[tuple[str, int], ...] = ()
    alternatives: tuple[tuple[str, str], ...] = ()
    candidates: Sequence[Candidate] = ()
    decode_candidates: Sequence[Candidate] = ()
    left_out: Mapping[str, int] = field(default_factory=dict)
    decode_left_out: Mapping[str, int] = field(default_factory=dict)
    decided_at: float = 0.0
    expires_at: float = 0.0
    placement: str = ""
    local_s: float | None = None
    remote_s: float | None = None
    output_tokens: int = 0
    output_source: str = ""
    model: str = ""


@dataclass(frozen=True, slots=True)
class Rejection:
    """Why a request is rejected, and after how many seconds to retry.

    `reason`: "ttft", "tbt", "kv_room", "queue_full", "preempted" (overload: HTTP 429) or
    "no_prefill", "no_decode" (no instance is ready: HTTP 503).
    """

    request_id: str
    reason: str
    message: str
    predicted_ttft_s: float | None = None
    predicted_tbt_s: float | None = None
    retry_after_s: float | None = None
    terms: dict[str, float] = field(default_factory=dict)
    candidates: Sequence[Candidate] = ()
    decode_candidates: Sequence[Candidate] = ()
    left_out: Mapping[str, int] = field(default_factory=dict)
    decode_left_out: Mapping[str, int] = field(default_factory=dict)
    placement: str = ""
    output_tokens: int = 0
    output_source: str = ""
    decided_at: float = 0.0

    @property
    def overloaded(self) -> bool:
        """Whether the reason is overload (429), not that no instance could serve it (503)."""
        return self.reason not in ("no_prefill", "no_decode")
