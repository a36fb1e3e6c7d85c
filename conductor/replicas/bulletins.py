"""Messages between conductors: words, and bulletins of many words. Pure.

A bulletin is MessagePack, of bounded size; `docs/conductor/several.md` says what each word is for.
Every number is absolute, so words are idempotent, and a lost word is sent again. A reader ignores a
bulletin that does not decode.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from ..records import KEY_BYTES, KEYS_MAX, TOKENS_MAX, Fetch, InstanceSpec, Load

# Conductors of different versions ignore each other: each works as if it were alone.
VERSION = 1

# Some hundred decisions. A server appends this much in less than 0.1 ms.
BULLETIN_BYTES_MAX = 64 * 1024
# Limit of the encoded words, so that a bulletin with its head stays within BULLETIN_BYTES_MAX.
_WORDS_BYTES_MAX = BULLETIN_BYTES_MAX - 2048
# The most rows of one `Rows` word, and ids of one `EndedRequest`: 16 KB of rows.
ROWS_MAX = 256
# A schema is some hundred bytes.
SCHEMA_BYTES_MAX = 16 * 1024

Name = Annotated[str, Meta(min_length=1, max_length=1024)]
# A tenant's name, a slash and an id (`request_ids`).
RequestName = Annotated[str, Meta(min_length=1, max_length=1024 + 1 + 256)]
Count = Annotated[int, Meta(ge=0, le=1 << 40)]
Tokens = Annotated[int, Meta(ge=0, le=TOKENS_MAX)]
# A day: longer than any queue, and than the lifetime of any request.
SECONDS_MAX = 86_400.0
Seconds = Annotated[float, Meta(ge=0, le=SECONDS_MAX)]
# Unix time in seconds; the limit is in the year 2286.
UnixTime = Annotated[float, Meta(ge=-1e10, le=1e10)]


class LoadRow(Struct, array_like=True, frozen=True):
    """The load of one conductor's in-flight requests on one instance.

    `queued_s` are the seconds of prefill left in this conductor's queue there. `coming` requests,
    with `coming_tokens` of context, will decode there once their prefill is done.
    """

    instance: Name
    queued: Count = 0
    queued_tokens: Count = 0
    batch: Count = 0
    context_tokens: Count = 0
    kv_used_tokens: Count = 0
    coming: Count = 0
    coming_tokens: Count = 0
    queued_s: Seconds = 0.0


class Rows(Struct, array_like=True, frozen=True, tag="rows"):
    """Load rows that have changed."""

    rows: Annotated[list[LoadRow], Meta(max_length=ROWS_MAX)]


class Placed(Struct, array_like=True, frozen=True, tag="placed"):
    """An in-flight request: its decision, and what a conductor that takes it over has to reserve.

    In place of the prompt's keys there are their number and the last key, which identifies all of
    them. `claim` counts how often a conductor took the request over. `shares` are tokens reserved
    per instance.
    """

    request_id: RequestName
    claim: Annotated[int, Meta(ge=0, le=1 << 31)]
    decided_at: UnixTime
    ttl_s: Seconds
    blocks: Annotated[int, Meta(ge=0, le=KEYS_MAX)]
    last_key: Annotated[bytes, Meta(max_length=KEY_BYTES)]
    model: Name
    prompt_tokens: Annotated[int, Meta(ge=1, le=TOKENS_MAX)]
    priority: Name
    tenant: Annotated[str, Meta(max_length=1024)]
    output_class: Annotated[str, Meta(max_length=1024)]
    objective_ttft_s: float | None
    objective_tbt_s: float | None
    prefill: Name
    decode: Name
    policy: Name
    predicted_ttft_s: Seconds
    predicted_tbt_s: Seconds
    cached_tokens: Tokens
    available_tokens: Tokens
    fetches: tuple[Fetch, ...]
    layerwise: bool
    wait_for: str
    output_tokens_max: Tokens | None
    degraded: tuple[str, ...]
    shards: tuple[tuple[str, int], ...]
    alternatives: tuple[tuple[str, str], ...]
    own_s: Seconds
    prefill_s: Seconds
    prefill_tokens: Tokens
    shares: Annotated[dict[Name, Count], Meta(min_length=1, max_length=4096)]
    heavy: bool
    prefilled: bool


class EndedRequest(Struct, array_like=True, frozen=True, tag="ended"):
    """Requests that are no longer in flight."""

    request_ids: list[RequestName]


class Happened(Struct, array_like=True, frozen=True, tag="happened"):
    """An event (`RequestEvent`) of a request that another conductor owns, passed on to it."""

    request_id: RequestName
    kind: Name
    tokens: Tokens
    route: tuple[Name, Name] | None = None


class HeardBulletin(Struct, array_like=True, frozen=True, tag="heard"):
    """A heartbeat of an instance."""

    instance: Name
    load: Load


class Instance(Struct, array_like=True, frozen=True, tag="instance"):
    """The state of an instance since `changed_at`, the time of its last change. Without a `spec` it
    was removed. `flip` is its new role if the conductor `flip_by` is flipping it."""

    instance: Name
    changed_at: UnixTime
    spec: InstanceSpec | None
    role: Annotated[str, Meta(max_length=16)] = ""
    draining: bool = False
    flip: Annotated[str, Meta(max_length=16)] = ""
    flip_by: Annotated[str, Meta(max_length=1024)] = ""


class SentSchema(Struct, array_like=True, frozen=True, tag="schema"):
    """A model's schema, which determines its blocks' keys, as canonical text."""

    model: Name
    canonical: Annotated[str, Meta(max_length=SCHEMA_BYTES_MAX)]


Word = Rows | Placed | EndedRequest | Happened | HeardBulletin | Instance | SentSchema


class Bulletin(Struct, array_like=True, frozen=True):
    """Words of conductor `by`, its `seq`-th bulletin. `asks` requests the full state of every
    conductor. `whole`: this bulletin and those that follow are the full state of `by`; its earlier
    rows are void."""

    version: int
    by: Name
    seq: Annotated[int, Meta(ge=0)]
    asks: bool
    whole: bool
    words: list[Word]


class _Packed(Struct, array_like=True, frozen=True):
    """A bulletin whose words are encoded already."""

    version: int
    by: str
    seq: int
    asks: bool
    whole: bool
    words: list[msgspec.Raw]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Bulletin)

# The decoder's exceptions: broken or of another type, no UTF-8, nested too deeply.
_NOT_OURS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def pack(
    by: str, seq: int, words: list[Word], *, asks: bool = False, whole: bool = False
) -> tuple[list[bytes], int]:
    """Encode words as bulletins from number `seq` on: one even without words, more if they don't
    fit into one. Also returns how many words were left out, because each alone is too large for a
    bulletin."""
    bulletins: list[bytes] = []
    left_out, size, group = 0, 0, list[msgspec.Raw]()

    def close() -> None:
        first = not bulletins
        packed = _Packed(VERSION, by, seq + len(bulletins), asks and first, whole and first, group)
        bulletins.append(_encoder.encode(packed))

    for word in words:
        encoded = _encoder.encode(word)
        if len(encoded) > _WORDS_BYTES_MAX:
            left_out += 1
            continue
        if size + len(encoded) > _WORDS_BYTES_MAX:
            close()
            size, group = 0, []
        size += len(encoded)
        group.append(msgspec.Raw(encoded))
    close()
    return bulletins, left_out


def unpack(raw: bytes) -> Bulletin | None:
    """Decode a bulletin; None for anything that `pack` of this version would not have made."""
    if len(raw) > BULLETIN_BYTES_MAX:
        return None
    try:
        bulletin = _decoder.decode(raw)
    except _NOT_OURS:
        return None
    return bulletin if bulletin.version == VERSION else None
