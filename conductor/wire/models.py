"""Bodies of HTTP requests and answers, as typed structs.

The same structs validate requests and describe them in OpenAPI, so the two cannot differ. Unknown
fields are refused: a misspelt objective would be no objective. Times are seconds, sizes bytes or
tokens, as named; `..._at` are Unix times, because clients do not share the monotonic clock.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from tiffin.kvstore.text import PLAIN

from ..records import EXCLUDE_MAX, KEYS_MAX, TOKENS_MAX
from ..state.part_keys import PART_KEYS_MAX, PART_TOKENS

ID_MAX = 256
NAME_MAX = 1024  # as long as a model's name may be in a schema
# Fit for logs, and never a second segment of a path.
ID_PATTERN = r"^[^\x00-\x1f\x7f-\x9f/]+$"
KEY_HEX = 32
LABELS_MAX = 64
COUNT_MAX = 1 << 40
SECONDS_MAX = 86_400.0
MATCH_HOLDERS_MAX = 16_384
DECISIONS_MAX = 1000
CANDIDATES_MAX = 64
HOT_MAX = 1000
NEXT_MAX = 1024
MEDIA_MAX = 4096
RELEASE_WAIT_S_MAX = 60.0

Id = Annotated[
    str,
    Meta(
        description="1 to 256 printable characters, without a slash; not `.` or `..`.",
        examples=["chatcmpl-7f3a"],
        # Checked by `check_id` (conversions.py), whose message states the same limits.
        extra_json_schema={"minLength": 1, "maxLength": ID_MAX, "pattern": ID_PATTERN},
    ),
]
Name = Annotated[str, Meta(max_length=NAME_MAX)]
ModelName = Annotated[str, Meta(min_length=1, max_length=NAME_MAX, examples=["llama-3-8b"])]
Count = Annotated[int, Meta(ge=0, le=COUNT_MAX)]
Tokens = Annotated[int, Meta(ge=0, le=TOKENS_MAX)]
PromptTokens = Annotated[int, Meta(ge=1, le=TOKENS_MAX)]
Seconds = Annotated[float, Meta(gt=0, le=SECONDS_MAX)]
RoleName = Literal["prefill", "decode", "mixed"]

TokenIds = Annotated[
    list[Annotated[int, Meta(ge=0, lt=2**32)]],
    Meta(
        min_length=1,
        max_length=TOKENS_MAX,
        description="The prompt's token ids. Takes a model that was registered with a schema.",
        examples=[[128000, 9906, 1917]],
    ),
]


class MediaBody(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An image, a sound or a video of a prompt, whose placeholders are `length` tokens from token
    `offset` on."""

    identifier: Annotated[
        str,
        Meta(
            max_length=NAME_MAX,
            pattern=PLAIN,
            description="What the engine's prefix cache knows it by: vLLM's `mm_hashes`.",
        ),
    ]
    offset: Annotated[int, Meta(ge=0, le=TOKENS_MAX)]
    length: Annotated[int, Meta(ge=1, le=TOKENS_MAX)]


MediaList = Annotated[
    list[MediaBody],
    Meta(
        max_length=MEDIA_MAX,
        description="With token_ids: the images, sounds and videos behind their placeholders, in "
        "the order of their tokens.",
    ),
]
# The pattern is checked in bulk by `keying.parse_keys`: 256 regular expressions take 80 µs.
BlockKeys = Annotated[
    list[Annotated[str, Meta(extra_json_schema={"pattern": "^[0-9a-fA-F]{32}$"})]],
    Meta(
        max_length=KEYS_MAX,
        description="Keys of the prompt's full blocks, from the first one on: 32 hex digits each.",
        examples=[["6f1ed002ab5595859014ebf0951522d9"]],
    ),
]
PartKeys = Annotated[
    list[Annotated[str, Meta(extra_json_schema={"pattern": "^[0-9a-fA-F]{32}$"})]],
    Meta(
        max_length=PART_KEYS_MAX,
        description="Keys of the prompt's first tokens in parts of 16, up to its first full block, "
        "for prefixes shorter than a block; not with token_ids, from which they follow.",
        examples=[["0c9f0a5f5f0e7d1b3a5c2e8f6d4b1a90"]],
    ),
]
# Of an event, alone or in a batch.
EventAge = Annotated[
    float,
    Meta(
        ge=0,
        le=SECONDS_MAX,
        description="How long ago it happened, as the call was sent: so the time that it waited"
        " for others is not taken for the engine's.",
    ),
]
# Of a decision, in the answer and in the log.
Placement = Annotated[
    str,
    Meta(
        description="Why the prefill is where it is decoded, or elsewhere: `predicted`, or the "
        "rule that decided. Empty if there was nothing to choose."
    ),
]
LocalCost = Annotated[
    float | None, Meta(description="Predicted cost of the prefill where it is decoded.")
]
RemoteCost = Annotated[
    float | None, Meta(description="Of one elsewhere, with the transfer of the cache.")
]
OutputTokens = Annotated[int, Meta(description="Predicted length of the answer.")]
OutputSource = Annotated[
    str,
    Meta(
        description="Who knew it: `caller`, `class` or `model` (earlier answers of these), "
        "`default`."
    ),
]
ServedModel = Annotated[
    str, Meta(description="Who serves it, if another model than was asked; else empty.")
]


class Body(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a client sends."""


class Reply(Struct, frozen=True, kw_only=True):
    """What a client gets."""


# -- requests --------------------------------------------------------------------------------------


class ObjectivesBody(Body, frozen=True, kw_only=True):
    """What the request wants to be answered within; left out: it does not care."""

    ttft_s: Annotated[Seconds | None, Meta(description="Time to the first token.")] = None
    tbt_s: Annotated[Seconds | None, Meta(description="Time between tokens.")] = None


class TraceBody(Body, frozen=True, kw_only=True):
    """A trace context, as the W3C's headers of these names have it."""

    traceparent: str
    tracestate: str = ""


class ScheduleBody(Body, frozen=True, kw_only=True):
    """A prompt to be scheduled: as `token_ids`, as `block_keys` with `prompt_tokens`, or, for load
    only, as `prompt_tokens`."""

    request_id: Id
    model: ModelName
    token_ids: TokenIds | None = None
    block_keys: BlockKeys | None = None
    part_keys: PartKeys = []
    prompt_tokens: Annotated[
        PromptTokens | None, Meta(description="Its length; not with token_ids.", examples=[4096])
    ] = None
    namespace: Annotated[
        Name, Meta(description="With token_ids: what may share blocks, as in the store.")
    ] = ""
    cache_salt: Annotated[
        Name,
        Meta(description="With token_ids: of the engine's request, as it shares with no other."),
    ] = ""
    media: MediaList = []
    objectives: Annotated[
        ObjectivesBody, Meta(description="Without them nothing is rejected for time.")
    ] = ObjectivesBody()
    priority: Annotated[Name, Meta(description="A class of the settings.")] = "normal"
    tenant: Annotated[
        Name,
        Meta(description="Whose request it is: who shares fairly with others, and owns its ids."),
    ] = ""
    output_tokens: Annotated[
        PromptTokens | None, Meta(description="How long the caller thinks the answer will be.")
    ] = None
    output_tokens_max: Annotated[PromptTokens | None, Meta(description="Where it is cut.")] = None
    output_class: Annotated[Name, Meta(description="A class of the settings.")] = ""
    urgent: Annotated[bool, Meta(description="May be raced over two routes.")] = False
    exclude: Annotated[
        list[Id],
        Meta(
            max_length=EXCLUDE_MAX,
            description="Instances that must not be chosen: one that has refused it, say.",
        ),
    ] = []
    first_token_from: Annotated[
        Literal["prefill", "decode"],
        Meta(
            description="Which instance gives the first token that counts: from the one that "
            "decodes it comes after the prompt's KV was handed over."
        ),
    ] = "prefill"
    waiter: Annotated[
        Name,
        Meta(
            description="If it is held: the mailbox for its release, a name that nobody else has "
            "(`POST /v1/releases/{waiter}`)."
        ),
    ] = ""
    trace: Annotated[
        TraceBody | None, Meta(description="Its trace context, in place of the call's headers.")
    ] = None


class RouteBody(Body, frozen=True, kw_only=True):
    """One of the ways over which a request is raced."""

    prefill: Id
    decode: Id


class EventBody(Body, frozen=True, kw_only=True):
    """More about an event."""

    tokens: Annotated[
        Tokens,
        Meta(
            description='Of "tokens": how many more have been answered. Of "prefill_began": how '
            "many of the prompt are computed, as the others are cached; 0 if that is not known.",
            examples=[16],
        ),
    ] = 0
    total_tokens: Annotated[
        Tokens | None,
        Meta(
            description='Of "tokens", instead of `tokens`, and of an end: how many have been '
            "answered in all. Such an event may be sent twice, and of several the last one counts."
        ),
    ] = None
    found_tokens: Annotated[
        Tokens | None,
        Meta(
            description='Of "prefill_done" and "finished": how many tokens of the prompt the '
            "engine had or loaded, as it says itself (`usage`). `why` and the metrics show them "
            "beside those that the decision counted on."
        ),
    ] = None
    age_s: EventAge = 0.0
    route: Annotated[
        RouteBody | None,
        Meta(
            description='Of "prefill_began", "prefill_done", "handed_over" and "first_token" of a '
            "request that is raced: the route that has come so far. Else the decision's first."
        ),
    ] = None


class FetchReply(Reply, frozen=True, kw_only=True):
    """Blocks [start, stop) of the prompt are brought from `source` before prefill reaches them."""

    start: int
    stop: int
    source: Annotated[str, Meta(description='A node; of the tier "hbm" the id of an instance.')]
    tier: Annotated[str, Meta(description='Where they are there: "hbm", "dram" or "nvme".')]
    nbytes: int
    seconds: float | None


class ShardReply(Reply, frozen=True, kw_only=True):
    """How much context one instance of a spread request holds."""

    instance: str
    tokens: int


class RouteReply(Reply, frozen=True, kw_only=True):
    """A second way, to be raced."""

    prefill: str
    decode: str


class HeldReply(Reply, frozen=True, kw_only=True):
    """The request is held: send it to its instance after its release, which
    `GET /v1/requests/{request_id}/release` waits for."""

    place: Annotated[int, Meta(description="Among those held there, of its class and higher ones.")]
    release_s: Annotated[float, Meta(description="Until its release, as predicted.")]


class ReleaseReply(Reply, frozen=True, kw_only=True):
    """Whether a request may be sent to its instance now."""

    state: Annotated[
        Literal["held", "released", "moved"],
        Meta(
            description="`held`: ask again. `released`: send it. `moved`: its instance has gone or "
            "gets nothing new; ask for the decision again."
        ),
    ]
    place: Annotated[
        int, Meta(description="Of a held one: among those of its class and higher ones.")
    ] = 0
    release_s: Annotated[
        float, Meta(description="Of a held one: until its release, as predicted.")
    ] = 0.0
    first_token_s: Annotated[
        float, Meta(description="Of a released one: until its prefill should be done.")
    ] = 0.0


class ReleasedReply(Reply, frozen=True, kw_only=True):
    """A request that is held no more: its release, or the error if it had to leave its queue."""

    request_id: str
    tenant: str = ""
    status: Annotated[int, Meta(description="The status that its own call would have got.")] = 200
    release: ReleaseReply | None = None
    error: ErrorDetail | None = None


class ReleasesReply(Reply, frozen=True, kw_only=True):
    """All that was in a mailbox, in the order in which it came."""

    releases: list[ReleasedReply]


class DecisionReply(Reply, frozen=True, kw_only=True):
    """Where the request runs. Ask `/v1/decisions/{request_id}/why` for the candidates."""

    request_id: str
    prefill: Annotated[str, Meta(description="Id of the instance that computes the prompt.")]
    decode: Annotated[str, Meta(description="Id of the one that answers, perhaps the same.")]
    prefill_url: Annotated[str, Meta(description="As the instance registered it.")]
    decode_url: Annotated[str, Meta(description="As the instance registered it.")]
    policy: Annotated[str, Meta(description="Who chose.")]
    predicted_ttft_s: float | None
    predicted_tbt_s: float | None
    cached_tokens: Annotated[int, Meta(description="Used, of those that are available.")]
    available_tokens: Annotated[int, Meta(description="That some holder has.")]
    fetches: Annotated[list[FetchReply], Meta(description="To do before prefill.")]
    fetch_within_s: Annotated[
        float | None,
        Meta(
            description="The node of the instance that prefills was told to make these fetches, or "
            "will be when the request is released; after so many seconds its engine should wait no "
            "more. Null: fetching is the engine's."
        ),
    ] = None
    layerwise: Annotated[
        bool, Meta(description="Send the cache to decode layer by layer, while prefill computes.")
    ]
    output_tokens_max: Annotated[int | None, Meta(description="Cut the answer here.")]
    degraded: Annotated[list[str], Meta(description="What was given up to take the request.")]
    shards: Annotated[list[ShardReply], Meta(description="Of a context spread over instances.")]
    alternatives: Annotated[list[RouteReply], Meta(description="To be raced against this one.")]
    expires_in_s: Annotated[
        float | None, Meta(description="Unless an event of the request is heard before.")
    ]
    held: Annotated[
        HeldReply | None, Meta(description="Not to be sent before its turn. Null: send it now.")
    ] = None
    conductor: Annotated[
        str,
        Meta(
            description="URL of the conductor that decided, for the request's events; empty if "
            "it shares with no others."
        ),
    ] = ""
    placement: Placement = ""
    local_s: LocalCost = None
    remote_s: RemoteCost = None
    output_tokens: OutputTokens = 0
    output_source: OutputSource = ""
    model: ServedModel = ""


# -- instances -------------------------------------------------------------------------------------


class LoadBody(Body, frozen=True, kw_only=True):
    """What an instance counts; leave out what it does not know."""

    queued_prefill_tokens: Count | None = None
    queued: Count | None = None
    running: Count | None = None
    context_tokens: Count | None = None
    kv_used_tokens: Count | None = None
    age_s: Annotated[
        Annotated[float, Meta(ge=0, le=3600)] | None,
        Meta(description="Seconds since all of this was counted, when it is sent."),
    ] = None


# Of a model with one layer.
_SCHEMA = (
    '["tiffin-schema-1","llama-3-8b","xxh3_128",512,'
    '[["gqa",[["k",8,128,"bfloat16"],["v",8,128,"bfloat16"]],0,1,[],""]]]'
)


class SchemaBody(Body, frozen=True, kw_only=True):
    """How the store keys this model's blocks: `KVSchema.canonical_bytes()`, as text."""

    canonical: Annotated[
        str,
        Meta(
            max_length=1 << 20,
            description="Compact ASCII JSON, docs/schema.md.",
            examples=[_SCHEMA],
        ),
    ]


class InstanceBody(Body, frozen=True, kw_only=True):
    """An instance says what it is, with every heartbeat or once; later `load` alone will do.

    `model`, `role` and `profile` are needed for an instance that is not registered.
    """

    model: ModelName | None = None
    role: RoleName | None = None
    profile: Annotated[Name | None, Meta(description="Name of its latency profile.")] = None
    url: Annotated[Name, Meta(description="Where requests are sent to.")] = ""
    node: Annotated[Name, Meta(description="The kvstore node on its host.")] = ""
    block_tokens: Annotated[int, Meta(ge=1, le=1 << 16)] = 512
    block_bytes: Count = 0
    kv_capacity_tokens: Annotated[Count, Meta(description="How much context its HBM holds.")] = (
        1_000_000
    )
    batch_max: Annotated[int, Meta(ge=1, le=1 << 20)] = 256
    fetches: Annotated[
        bool, Meta(description="Whether its engine can bring blocks from elsewhere.")
    ] = True
    prefix_caching: Annotated[
        bool, Meta(description="Whether its engine keeps prompts' KV in HBM for later ones.")
    ] = True
    part_tokens: Annotated[
        int,
        Meta(ge=1, le=1 << 16, description="Tokens of its engine's own block, re-used as a whole."),
    ] = PART_TOKENS
    labels: Annotated[dict[Name, Name], Meta(max_length=LABELS_MAX)] = {}
    schema: SchemaBody | None = None
    load: LoadBody | None = None


class NextBody(Body, frozen=True, kw_only=True):
    """An instance asks which of its requests to compute next."""

    n: Annotated[int, Meta(ge=1, le=NEXT_MAX, description="How many at most.")] = 1
    idle: Annotated[
        bool, Meta(description="Whether it has computed all that it was given before.")
    ] = True


class NextReply(Reply, frozen=True, kw_only=True):
    """A request to be computed, and the tenant whose id this is."""

    request_id: str
    tenant: str = ""


class NextsReply(Reply, frozen=True, kw_only=True):
    """Requests in the order in which to compute them; none if the conductor knows of no more."""

    requests: list[NextReply]


class RoleBody(Body, frozen=True, kw_only=True):
    """What the instance shall do from now on."""

    role: RoleName


class InstanceReply(Reply, frozen=True, kw_only=True):
    """An instance as it registered, and what is known of it."""

    id: str
    model: str
    role: RoleName
    status: Literal["ready", "draining", "lost"]
    profile: str
    url: str
    node: str
    block_tokens: int
    block_bytes: int
    kv_capacity_tokens: int
    batch_max: int
    fetches: bool = True  # the default for answers of older conductors, which lack the field
    prefix_caching: bool = True  # likewise
    part_tokens: int = PART_TOKENS  # likewise
    keyed: Annotated[
        bool, Meta(description="Whether its model has a schema, and token ids so have keys.")
    ] = False
    key_space: Annotated[
        str,
        Meta(
            description="Of those that its model's engines announce: instances with the same name "
            "have the same keys."
        ),
    ] = ""
    labels: dict[str, str]
    heard_s: Annotated[float | None, Meta(description="Since its last heartbeat.")]
    load: dict[str, float | None]
    output_caps: Annotated[
        dict[str, int],
        Meta(description="By class of priority, after how many tokens its answers end for now."),
    ] = {}


class InstancesReply(Reply, frozen=True, kw_only=True):
    """All instances, oldest first."""

    instances: list[InstanceReply]


# -- blocks ----------------------------------------------------------------------------------------


class MatchBody(Body, frozen=True, kw_only=True):
    """A prefix: `block_keys`, or `token_ids` of a `model` that was registered with a schema."""

    block_keys: BlockKeys | None = None
    part_keys: PartKeys = []
    token_ids: TokenIds | None = None
    model: ModelName | None = None
    namespace: Name = ""
    media: MediaList = []


class HolderReply(Reply, frozen=True, kw_only=True):
    """`holder` has so many leading blocks of the prefix."""

    holder: Annotated[str, Meta(examples=["node-a/dram"])]
    blocks: int
    age_s: Annotated[float | None, Meta(description="Since it was last heard of.")] = None
    part_tokens: Annotated[
        int, Meta(description="Of the prompt's first tokens, up to its first full block.")
    ] = 0


class MatchReply(Reply, frozen=True, kw_only=True):
    """Who holds the prefix, the longest part first."""

    asked_blocks: int
    blocks: Annotated[int, Meta(description="Leading blocks that all holders have together.")]
    holders: list[HolderReply]


# -- decisions -------------------------------------------------------------------------------------


class CandidateReply(Reply, frozen=True, kw_only=True):
    """One instance and every term of its cost."""

    instance: str
    cost: Annotated[float | None, Meta(description="Lowest wins; null: impossible.")]
    terms: dict[str, float | None]


class BecameReply(Reply, frozen=True, kw_only=True):
    """What was observed of a request, beside what was predicted."""

    end: Annotated[
        str,
        Meta(
            description='"finished", "cancelled", "expired", "preempted", "rescheduled" or '
            '"rejected" (after its prefill). Empty while it is in flight.'
        ),
    ] = ""
    observed_ttft_s: float | None = None
    observed_tbt_s: Annotated[float | None, Meta(description="The mean of the answer.")] = None
    output_tokens: int = 0
    found_tokens: Annotated[
        int | None, Meta(description="Of the prompt: what the engine says it had or loaded.")
    ] = None
    ended_at: float | None = None


class EntryReply(Reply, frozen=True, kw_only=True):
    """A decision or a rejection, in the log."""

    outcome: Literal["decision", "rejection"]
    request_id: str
    tenant: str = ""
    decided_at: float
    predicted_ttft_s: float | None
    predicted_tbt_s: float | None
    policy: str = ""
    prefill: str = ""
    decode: str = ""
    cached_tokens: int = 0
    available_tokens: int = 0
    degraded: list[str] = []
    placement: Placement = ""
    local_s: LocalCost = None
    remote_s: RemoteCost = None
    output_tokens: OutputTokens = 0
    output_source: OutputSource = ""
    model: ServedModel = ""
    became: Annotated[
        BecameReply | None,
        Meta(description="What was observed of it, so far or at its end. Of a rejection nothing."),
    ] = None
    reason: Annotated[str, Meta(description="Of a rejection.")] = ""
    message: str = ""
    retry_after_s: float | None = None
    terms: dict[str, float | None] = {}
    left_out: Annotated[
        dict[str, int],
        Meta(
            description="Instances of the model that are not listed for prefill, by why: `lost`, "
            "`draining`, `other_role`, `excluded` by the request, `not_compared` (the way was "
            "decided first), `dearer` than those that are listed."
        ),
    ] = {}
    decode_left_out: Annotated[dict[str, int], Meta(description="The same for decode.")] = {}
    candidates_count: Annotated[int, Meta(description="For prefill, those that are kept.")] = 0
    candidates: Annotated[
        list[CandidateReply], Meta(description="For prefill, the cheapest first.")
    ] = []
    decode_candidates: list[CandidateReply] = []


class DecisionsReply(Reply, frozen=True, kw_only=True):
    """The log, latest first."""

    decisions: list[EntryReply]


# -- health, errors --------------------------------------------------------------------------------


class HealthReply(Reply, frozen=True, kw_only=True):
    """`reasons` say what is missing."""

    status: Literal["ok", "not ready"]
    reasons: list[str] = []
    notes: Annotated[
        list[str],
        Meta(description="Instances that are silent, engines that could not be registered."),
    ] = []


class RejectionDetail(Reply, frozen=True, kw_only=True):
    """Why a request is not taken, and every term of the prediction."""

    request_id: str
    reason: str
    predicted_ttft_s: float | None = None
    predicted_tbt_s: float | None = None
    retry_after_s: float | None = None
    terms: dict[str, float | None] = {}


class ErrorDetail(Reply, frozen=True, kw_only=True):
    """OpenAI's shape, so that clients of inference services understand it."""

    message: str
    type: str
    code: str
    param: Annotated[str | None, Meta(description="The field that it is about.")] = None
    tiffin: Annotated[RejectionDetail | None, Meta(description="Of a rejection.")] = None


class ErrorReply(Reply, frozen=True, kw_only=True):
    """Every answer that is not a success."""

    error: ErrorDetail
