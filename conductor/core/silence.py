"""Names instances that are silent, for errors and health checks. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..records import Role, Status

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ..records import InstanceSpec
    from ..state.instance_table import Cluster

# Whoever reads of more will look at a list.
NAMED_MAX = 10


def unmeasured(specs: Iterable[InstanceSpec | None]) -> list[str]:
    """What it means that instances have not said how large their blocks are."""
    unsized = [spec for spec in specs if spec is not None and not spec.block_bytes]
    notes = {
        "without block_bytes nothing is fetched or copied for {}": [
            spec.id for spec in unsized if spec.fetches
        ],
        "without block_bytes what {} hands over counts as sent in no time": [
            spec.id for spec in unsized if spec.role is Role.PREFILL
        ],
    }
    return [text.format(_named(ids)) for text, ids in notes.items() if ids]


def _named(ids: list[str]) -> str:
    more = f" and {len(ids) - NAMED_MAX} more" if len(ids) > NAMED_MAX else ""
    return ", ".join(ids[:NAMED_MAX]) + more


def silent(cluster: Cluster, now: float, model: str | None = None) -> list[str]:
    """The instances that are lost, of all models or of one, those that were heard last first, as
    "engine-1 is registered, silent for 12 s". At most `NAMED_MAX`, and then how many more."""
    lost = _lost_rows(cluster)
    if model is not None:
        wanted = cluster.model_number(model)
        lost = [row for row in lost if cluster.model[row] == wanted]
    lost.sort(key=lambda row: -float(cluster.heard_at[row]))
    found = [
        f"{cluster.name(row)} is registered, silent for {now - float(cluster.heard_at[row]):.0f} s"
        for row in lost[:NAMED_MAX]
    ]
    return found + ([f"and {more} more"] if (more := len(lost) - NAMED_MAX) > 0 else [])


def lost(cluster: Cluster) -> set[str]:
    """The ids of the instances that `silent` names, all of them."""
    return set(map(cluster.name, _lost_rows(cluster)))


def _lost_rows(cluster: Cluster) -> list[int]:
    rows = np.flatnonzero(cluster.used & ~cluster.ready & ~cluster.draining).tolist()
    return [row for row in rows if cluster.status[row] is Status.LOST]
