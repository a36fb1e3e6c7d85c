"""Names instances that are silent, for errors and health checks. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..records import Status

if TYPE_CHECKING:
    from ..state.instance_table import Cluster

# Whoever reads of more will look at a list.
NAMED_MAX = 10


def unmeasured(cluster: Cluster) -> list[str]:
    """What it means that instances which could fetch have not said how large their blocks are."""
    rows = np.flatnonzero(cluster.used & (cluster.block_bytes == 0)).tolist()
    specs = [spec for row in rows if (spec := cluster.specs[row]) is not None and spec.fetches]
    if not specs:
        return []
    names = ", ".join(spec.id for spec in specs[:NAMED_MAX])
    more = f" and {len(specs) - NAMED_MAX} more" if len(specs) > NAMED_MAX else ""
    return [f"without block_bytes nothing is fetched or copied for {names}{more}"]


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
