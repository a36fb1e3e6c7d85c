"""The lines of a recording, as typed structs: the format. Pure.

Each line is a JSON object with a field `line` that says which of these it is. Times are seconds
since the recording began, by the conductor's clock. Fields that a reader does not know are skipped;
a change that it can not skip is a new `version`.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Sequence

VERSION = 1


class HeaderLine(Struct, frozen=True, kw_only=True, tag="header", tag_field="line"):
    """The first line of a file. `began_at` is Unix time; `settings` are all of the conductor."""

    tiffin_recording: int = VERSION
    began_at: float
    settings: dict[str, Any]


class SettingsLine(Struct, frozen=True, kw_only=True, tag="settings", tag_field="line"):
    """All settings, after they have changed."""

    at_s: float
    settings: dict[str, Any]


class InstanceLine(Struct, frozen=True, kw_only=True, tag="instance", tag_field="line"):
    """An instance that has come, or has changed. `latency` is (c0, c1, c2, d0, d1, d2) of its
    latency profile, in seconds (docs/conductor/cost.md)."""

    at_s: float
    id: str
    model: str
    role: str
    node: str
    profile: str
    latency: tuple[float, ...]
    block_tokens: int
    block_bytes: int
    kv_capacity_tokens: int
    batch_max: int
    fetches: bool


class LeftLine(Struct, frozen=True, kw_only=True, tag="left", tag_field="line"):
    """An instance that has gone."""

    at_s: float
    id: str


class RequestLine(
    Struct, frozen=True, kw_only=True, omit_defaults=True, tag="request", tag_field="line"
):
    """A request, written when it has ended, however: lines are not in order of arrival.

    `blocks` has an id for each full block of the prompt (`block_ids`). `outcome` is "finished",
    "cancelled", "expired" (nobody said how it ended), "unfinished" (the recording ended before it)
    or "rejected", with the rejection's reason.
    `decisions`: how often it was placed; fields of the decision are those of the last.
    `cached_tokens` is what the decision meant to use. `prefilled_s` and `ttft_s` are seconds from
    its arrival until the conductor heard of its prefill's end and of its first token, `tbt_s` is
    the mean time between its tokens as far as they were reported, `output_tokens` how many that
    were. None: it is not known, or did not happen.
    """

    arrival_s: float
    id: str
    tenant: str = ""
    model: str
    priority: str = "normal"
    prompt_tokens: int
    blocks: list[int] = []
    ttft_objective_s: float | None = None
    tbt_objective_s: float | None = None
    output_tokens_expected: int | None = None
    output_tokens_max: int | None = None
    outcome: str
    reason: str = ""
    decisions: int = 1
    policy: str = ""
    prefill: str = ""
    decode: str = ""
    cached_tokens: int = 0
    predicted_ttft_s: float | None = None
    predicted_tbt_s: float | None = None
    prefilled_s: float | None = None
    ttft_s: float | None = None
    tbt_s: float | None = None
    output_tokens: int = 0


Line = HeaderLine | SettingsLine | InstanceLine | LeftLine | RequestLine

encoder = msgspec.json.Encoder()
decoder = msgspec.json.Decoder(Line)


def block_ids(keys: Sequence[bytes], salt: bytes) -> list[int]:
    """Numbers of 63 bits that are equal for equal keys under one salt, of 16 to 64 bytes.

    Keys are hashes of prompts: whoever has them can check whether a prompt that he guesses was
    sent. With a salt that nobody keeps, these numbers tell nothing but which blocks are the same.
    """
    hashed = (blake2b(key, key=salt, digest_size=8).digest() for key in keys)
    return [int.from_bytes(digest) >> 1 for digest in hashed]
