"""What the core shows of its instances, and of who holds a prefix. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ..state.part_keys import PART_TOKENS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ..records import InstanceSpec, Role, Status
    from ..state.instance_table import Cluster
    from ..state.prefix_index import PrefixIndex


@dataclass(frozen=True, slots=True)
class InstanceView:
    """The current state of an instance. `load`: requests and tokens, both those that this conductor
    placed there and those from elsewhere. `heard_s`: seconds since its last heartbeat.
    `output_caps`: by class of priority, where its answers end for now. `key_space`: of its blocks,
    by name."""

    spec: InstanceSpec
    role: Role
    status: Status
    heard_s: float
    load: dict[str, float]
    output_caps: Mapping[str, int]
    key_space: str = ""


class Held(NamedTuple):
    """What a holder has of a prefix: leading blocks, or tokens below the first one. `age_s`:
    seconds since its last report."""

    holder: str
    blocks: int
    age_s: float
    part_tokens: int = 0


@dataclass(frozen=True, slots=True)
class MatchView:
    """The holders of a prefix. `blocks`: leading ones that all have together."""

    blocks: int
    holders: list[Held]


def instance_view(cluster: Cluster, name: str, caps: Mapping[str, int], now: float) -> InstanceView:
    """The current state of an instance, whose answers end at `caps`. Raises UnknownInstance."""
    row = cluster.row(name)
    columns = ("queued", "queued_tokens", "batch", "context_tokens", "kv_used_tokens")
    load = {column: float(getattr(cluster, column)[row]) for column in columns}
    heard_s = max(0.0, now - float(cluster.heard_at[row]))
    return InstanceView(
        *(cluster.spec(name), cluster.role(row), cluster.status[row], heard_s, load, caps),
        key_space=cluster.key_spaces[row],
    )


def match_view(
    index: PrefixIndex,
    keys: Sequence[bytes],
    parts: PrefixIndex,
    part_keys: Sequence[bytes],
    now: float,
) -> MatchView:
    """The holders of a prefix, the one with the longest leading part first."""
    match = index.match(keys)
    lengths = match.lengths(index.width).tolist()
    starts = _held_parts(parts, part_keys) if part_keys else {}
    holders = []
    for number in index.numbers():
        label = index.label(number)
        held = Held(label, lengths[number], index.age_s(number, now), starts.get(label, 0))
        if held.blocks or held.part_tokens:
            holders.append(held)
    return MatchView(match.blocks, sorted(holders, key=lambda one: (-one.blocks, -one.part_tokens)))


def _held_parts(parts: PrefixIndex, keys: Sequence[bytes]) -> dict[str, int]:
    """How many tokens each holder has of a prompt's first ones."""
    lengths = parts.match(keys).lengths(parts.width).tolist()
    return {parts.label(number): PART_TOKENS * lengths[number] for number in parts.numbers()}
