"""What conductors tell each other: words, and bulletins of many words. Pure.

A bulletin is MessagePack, of bounded size; `docs/conductor/several.md` says what each word is for.
Every number is absolute: a word that comes twice changes nothing, and one that is lost is said
again. What does not decode is not ours, and is ignored by whoever reads it.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from .records import KEY_BYTES, KEYS_MAX, TOKENS_MAX, Fetch, InstanceSpec, Load

# Conductors of different versions ignore each other: each is as if it were alone.
VERSION = 1

# Some hundred decisions. A server appends this much in less than 0.1 ms.
BULLETIN_BYTES_MAX = 64 * 1024
# Of the words, so that their bulletin, with its head, stays within that.
_WORDS_BYTES_MAX = BULLETIN_BYTES_MAX - 2048
# Rows of one word: 16 KB.
ROWS_MAX = 256
# A schema is some hundred bytes.
SCHEMA_BYTES_MAX = 16 * 1024

Name = Annotated[str, Meta(min_length=1, max_length=1024)]
Count = Annotated[int, Meta(ge=0, le=1 << 40)]
Tokens = Annotated[int, Meta(ge=0, le=TOKENS_MAX)]
# A day: longer than any queue, and than any request lives.
SECONDS_MAX = 86_400.0
Seconds = Annotated[float, Meta(ge=0, le=SECONDS_MAX)]
# Of Unix time in seconds; in the year 2286.
UnixTime = Annotated[float, Meta(ge=-1e10, le=1e10)]


class Row(Struct, array_like=True, frozen=True):
    """What one conductor has promised to one instance, and has not seen end.

    `queued_s` are the seconds of prefill that are left in its queue there. `coming` requests, with
    `coming_tokens` of context, will decode there once their prefill is done.
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
    """Rows that have changed."""

    rows: Annotated[list[Row], Meta(max_length=ROWS_MAX)]


class Placed(Struct, array_like=True, frozen=True, tag="placed"):
    """A request is in flight: its decision, and what whoever takes it over reserves for it.

    Instead of the prompt's keys there are their number and the last one, which names all of them.
    `claim` counts how often it was taken over. `shares` are tokens reserved per instance.
    """

    request_id: Name
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


class Ended(Struct, array_like=True, frozen=True, tag="ended"):
    """Requests that are in flight no more."""

    request_ids: list[Name]


class Happened(Struct, array_like=True, frozen=True, tag="happened"):
    """An event of a request that another conductor has in flight: `RequestEvent`."""

    request_id: Name
    kind: Name
    tokens: Tokens
    route: tuple[Name, Name] | None = None


class Heard(Struct, array_like=True, frozen=True, tag="heard"):
    """A heartbeat of an instance."""

    instance: Name
    load: Load


class Instance(Struct, array_like=True, frozen=True, tag="instance"):
    """What is known of an instance since `changed_at`, the time of its last change. Without a
    `spec` it was removed. `flip` is the role that it is being given, by the conductor `flip_by`."""

    instance: Name
    changed_at: UnixTime
    spec: InstanceSpec | None
    role: Annotated[str, Meta(max_length=16)] = ""
    draining: bool = False
    flip: Annotated[str, Meta(max_length=16)] = ""
    flip_by: Annotated[str, Meta(max_length=1024)] = ""


class Schema(Struct, array_like=True, frozen=True, tag="schema"):
    """How a model's blocks are keyed, as canonical text."""

    model: Name
    canonical: Annotated[str, Meta(max_length=SCHEMA_BYTES_MAX)]


Word = Rows | Placed | Ended | Happened | Heard | Instance | Schema


class Bulletin(Struct, array_like=True, frozen=True):
    """Words of conductor `by`, its `seq`-th bulletin. `asks`: everybody is to tell all. `whole`:
    this, and those that follow, is all; rows that were told before are void."""

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

# What the decoder raises: broken or of another type, no UTF-8, nested too deeply.
_NOT_OURS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def pack(
    by: str, seq: int, words: list[Word], *, asks: bool = False, whole: bool = False
) -> tuple[list[bytes], int]:
    """Bulletins from number `seq` on: one even without words, more if they don't fit into one.
    Also how many words were left out, because each alone is too large for any."""
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
    """The bulletin, or None for anything that `pack` of this version would not have made."""
    if len(raw) > BULLETIN_BYTES_MAX:
        return None
    try:
        bulletin = _decoder.decode(raw)
    except _NOT_OURS:
        return None
    return bulletin if bulletin.version == VERSION else None
