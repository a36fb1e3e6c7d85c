"""What the core shows of its instances, and of who holds a prefix. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ..records import InstanceSpec, Role, Status
    from ..state.instance_table import Cluster
    from ..state.prefix_index import PrefixIndex


@dataclass(frozen=True, slots=True)
class InstanceView:
    """The current state of an instance. `load`: requests and tokens, both those that this conductor
    placed there and those from elsewhere. `heard_s`: seconds since its last heartbeat.
    `output_caps`: by class of priority, where its answers end for now."""

    spec: InstanceSpec
    role: Role
    status: Status
    heard_s: float
    load: dict[str, float]
    output_caps: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class MatchView:
    """The holders of a prefix: (label, leading blocks, seconds since its last report) for each."""

    blocks: int
    holders: list[tuple[str, int, float]]


def instance_view(cluster: Cluster, name: str, caps: Mapping[str, int], now: float) -> InstanceView:
    """The current state of an instance, whose answers end at `caps`. Raises UnknownInstance."""
    row = cluster.row(name)
    columns = ("queued", "queued_tokens", "batch", "context_tokens", "kv_used_tokens")
    load = {column: float(getattr(cluster, column)[row]) for column in columns}
    heard_s = max(0.0, now - float(cluster.heard_at[row]))
    return InstanceView(
        cluster.spec(name), cluster.role(row), cluster.status[row], heard_s, load, caps
    )


def match_view(index: PrefixIndex, keys: Sequence[bytes], now: float) -> MatchView:
    """The holders of a prefix, the one with the most leading blocks first."""
    match = index.match(keys)
    lengths = match.lengths(index.width).tolist()
    holders = [
        (index.label(number), lengths[number], index.age_s(number, now))
        for number in index.numbers()
        if number < len(lengths) and lengths[number]
    ]
    return MatchView(match.blocks, sorted(holders, key=lambda one: -one[1]))
