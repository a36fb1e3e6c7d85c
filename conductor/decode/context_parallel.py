"""Context parallelism: a very long context is sharded over several decode instances. Pure.

NanoCP (arXiv 2605.21100) binds a request twice. Its *KV binding* is a set of instances, the
members, that hold shards of its context; each attends to its own shard. Its *MoE binding* is the
one member that runs everything but attention for its tokens. So a context of 512 thousand tokens
neither has to fit one instance, nor makes that one the slowest of a group that steps together.

The WaterFill algorithm gives the number of tokens for each member. With K_s, the tokens that they
hold already,

    minimise  max over s of (K_s + split_s),   sum of split_s = tokens

Tokens are poured onto the lowest member until all are at one level; members above it get none:

    level  - - - - - - - - - - - - - - - -
             :::                 :::           ::: poured
             :::  ###       :::  ###           ### K_s, held before
             ###  ###  ###  ###  ###
                       ###

Here members also have lids: no member gets more tokens than it has room for. And tokens come in
whole blocks. The least loaded candidates are the set with the lowest level, as long as no lid is
reached. Members should be joined by a link faster than the rest of the network (one pod, one NVLink
domain), so the caller passes candidates of one such group.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import msgspec
import numpy as np
from msgspec import Meta

from ..records import TOKENS_MAX
from .selection import NoDecode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from .selection import DecodeQuestion

    Floats = NDArray[np.float64]
    Tokens = NDArray[np.int64]

# Limit of members of one request. NanoCP captures one graph per (local queries, remote results)
# bucket, and the data that members exchange grows with each member.
MEMBERS_MAX = 32

Bucket = tuple[
    Annotated[int, Meta(ge=1, le=TOKENS_MAX)], Annotated[int, Meta(ge=1, le=MEMBERS_MAX)]
]


class SpreadSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """When a context is spread, and over how many. Raises ValueError for buckets out of order."""

    enabled: bool = False
    """Only engines that attend to remote shards can be asked for it."""

    buckets: Annotated[tuple[Bucket, ...], Meta(min_length=1, max_length=64)] = (
        (65_536, 1),
        (131_072, 2),
        (262_144, 4),
        (524_288, 8),
    )
    """(tokens up to which, members), ascending; longer ones take as many as the last. Profile them
    offline, as NanoCP does: the published ones begin with 4 thousand for one, and end with 512
    thousand for "several"."""

    instance_share: Annotated[float, Meta(gt=0.0, le=1.0)] = 0.5
    """Of one instance's KV capacity that one request may take, whatever the buckets say."""

    members_max: Annotated[int, Meta(ge=1, le=MEMBERS_MAX)] = 8
    """Over more than these nothing is spread."""

    exchange_s: Annotated[float, Meta(ge=0.0, le=1.0)] = 60e-6
    """What every step takes longer when members exchange results. NanoCP reports 60 µs."""

    rebind_s: Annotated[float, Meta(ge=0.0, le=10.0)] = 0.025
    """What it costs a group to move a request's binding to another member while it runs, as far as
    that was not measured: a decode step. NanoCP changes a table of routes, and moves no KV."""

    rebind_every_s: Annotated[float, Meta(ge=0.0, le=3600.0)] = 0.0
    """How often bindings are looked at, in seconds; 0: never. What a move costs has to be repaid
    until the next look."""

    def __post_init__(self) -> None:
        for (lower, fewer), (upper, more) in zip(self.buckets, self.buckets[1:], strict=False):
            if upper <= lower or more < fewer:
                raise ValueError("buckets: give tokens and members in ascending order")


@dataclass(frozen=True, slots=True)
class ContextSpread:
    """A context sharded over several instances. `members` are indices into `DecodeQuestion.rows`,
    `tokens` the size of each one's shard when the answer is complete, never 0. `binding` is the
    member that runs everything but attention."""

    members: tuple[int, ...]
    tokens: tuple[int, ...]
    binding: int
    tbt_s: float


def members_wanted(context_tokens: int, capacity_tokens: float, settings: SpreadSettings) -> int:
    """Over how many instances of this KV capacity a context is spread; 1: not at all."""
    if not settings.enabled:
        return 1
    last = settings.buckets[-1][1]
    wanted = next((k for upto, k in settings.buckets if context_tokens <= upto), last)
    share = max(settings.instance_share * capacity_tokens, 1.0)
    wanted = max(wanted, math.ceil(context_tokens / share))
    return min(wanted, settings.members_max)


def waterfill(
    held_tokens: Sequence[int] | Tokens,
    tokens: int,
    room_tokens: Sequence[int] | Tokens | None = None,
    block_tokens: int = 1,
) -> Tokens | None:
    """Split `tokens` so that the maximum of `held_tokens + split` is minimal.

    All arrays are [members]. Shards are whole blocks, except for a partial last block of the
    context, which the highest member gets. None when the tokens do not fit into `room_tokens`.
    """
    held = np.asarray(held_tokens, np.int64)
    blocks = -(-tokens // block_tokens)
    lids = np.full(len(held), blocks, np.int64)
    if room_tokens is not None:
        lids = np.clip(np.asarray(room_tokens, np.int64) // block_tokens, 0, blocks)
    if int(lids.sum()) < blocks:
        return None
    level = _level(held, lids * block_tokens, blocks * block_tokens)
    split = np.clip((level - held) // block_tokens, 0, lids)
    # Rounding to whole blocks leaves less than one block per member: they go to the lowest members.
    left = blocks - int(split.sum())
    assert 0 <= left < len(held)
    for _ in range(left):
        next_up = np.where(split < lids, held + (split + 1) * block_tokens, np.iinfo(np.int64).max)
        split[next_up.argmin()] += 1
    poured: Tokens = split * block_tokens
    over = blocks * block_tokens - tokens
    if over:
        poured[np.where(split > 0, held + poured, -1).argmax()] -= over
    return poured


def _level(held: Tokens, lids: Tokens, tokens: int) -> int:
    """The water level after `tokens` are poured, rounded down; they must fit under the lids.

    Each member is a vessel that fills from its bottom, `held`, to its lid. Between two such
    heights, the volume below a level is linear in the level: one token per height and open vessel.
    """
    heights = np.concatenate((held, held + lids))
    order = heights.argsort(kind="stable")
    heights = heights[order]
    open_vessels = np.where(order < len(held), 1, -1).cumsum()
    below = np.concatenate(([0], (np.diff(heights) * open_vessels[:-1]).cumsum()))
    at = int(np.searchsorted(below, tokens, side="right")) - 1
    if at == len(heights) - 1 or open_vessels[at] == 0:
        return int(heights[at])
    return int(heights[at] + (tokens - below[at]) // open_vessels[at])


def spread(question: DecodeQuestion, settings: SpreadSettings) -> ContextSpread | NoDecode:
    """Spread a context, including the whole answer, over several instances, or return the reason
    why that is not possible.

    The search starts with `members_wanted` members, and adds more when these have no room or would
    be too slow. The time between tokens is that of the slowest member.
    """
    if len(question.rows) == 0:
        return NoDecode("no_decode")
    capacity = question.cluster.kv_capacity_tokens.take(question.rows)
    context = question.request.prompt_tokens + question.output_tokens
    wanted = members_wanted(context, float(np.median(capacity)), settings)
    most = min(max(settings.members_max, wanted), len(question.rows))
    room = np.where(question.places(), question.room_tokens(), 0).clip(0).astype(np.int64)
    best: ContextSpread | None = None
    for count in range(min(wanted, most), most + 1):
        found = _over(question, settings, room, context, count)
        if found is not None and (best is None or found.tbt_s < best.tbt_s):
            best = found
        if best is not None and best.tbt_s <= question.limit_s:
            return best
    if best is None:
        return NoDecode("kv_room", int(room.argmax()))
    return NoDecode("tbt", best.binding, best.tbt_s)


def _over(
    question: DecodeQuestion, settings: SpreadSettings, room: Tokens, context: int, count: int
) -> ContextSpread | None:
    """Spread over `count` instances: the least loaded, or if the context does not fit, those with
    the most room."""
    held = question.context_now
    block_tokens = _block_tokens(question)
    able = np.flatnonzero(room >= block_tokens)
    for order in (held, -room):
        members = able[order.take(able).argsort(kind="stable")[:count]]
        split = waterfill(held.take(members), context, room.take(members), block_tokens)
        if split is not None:
            return _bound(question, settings, members[split > 0], split[split > 0])
    return None


def _bound(
    question: DecodeQuestion, settings: SpreadSettings, members: Tokens, split: Tokens
) -> ContextSpread:
    binding = int(question.batch_now.take(members).argmin())
    more_tokens = np.zeros(len(question.rows))
    more_tokens[members] = split
    more_requests = np.zeros(len(question.rows), np.int64)
    more_requests[members[binding]] = 1
    terms = question.step_terms(more_tokens, more_requests)
    step_s = (terms["base_s"] + terms["batch_s"] + terms["context_s"]).take(members)
    exchange_s = settings.exchange_s if len(members) > 1 else 0.0
    return ContextSpread(
        members=tuple(members.tolist()),
        tokens=tuple(split.tolist()),
        binding=int(members[binding]),
        tbt_s=float(step_s.max()) + exchange_s,
    )


def _block_tokens(question: DecodeQuestion) -> int:
    spec = question.cluster.specs[int(question.rows[0])]
    assert spec is not None
    return spec.block_tokens
