"""What a decision looks at: the instances able to serve a model, and what is cached where. Pure.

Which row has which holders in the index changes when instances and nodes come and go, thousands of
times more seldom than requests come. So it is kept, and made again when either side has changed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .policies.places import PlacedQuestion, Places

if TYPE_CHECKING:
    import random

    from numpy.typing import NDArray

    from .cluster import Cluster
    from .computing import Computing
    from .index import Match, PrefixIndex
    from .queues import Queues
    from .records import Request
    from .settings import Settings
    from .transfers import Transfers

    Rows = NDArray[np.int64]

_NO_HOLDER = -1


class View:
    """Columns by row, as they are now. Not thread-safe."""

    def __init__(self, cluster: Cluster, index: PrefixIndex) -> None:
        self._cluster = cluster
        self._index = index
        self._seen = (-1, -1)
        self._columns: Rows = np.empty((3, 0), np.int64)
        self._places = Places()
        self._rows: dict[tuple[str, bool], Rows] = {}

    def rows(self, model: str, *, prefill: bool) -> Rows:
        """Rows ready to prefill (or decode) this model."""
        self._refresh()
        key = (model, prefill)
        found = self._rows.get(key)
        if found is None:
            found = self._rows[key] = self._cluster.rows_for(model, prefill=prefill)
        return found

    def question(
        self,
        request: Request,
        rows: Rows,
        transfers: Transfers,
        computing: Computing,
        queues: Queues,
        settings: Settings,
        dice: random.Random,
        now: float,
    ) -> PlacedQuestion:
        """What the policies are asked."""
        self._refresh()
        match = self._index.match(request.keys)
        columns = self._columns[:, rows]
        hbm, dram, local = (match.leading(columns[:tiers]) for tiers in (1, 2, 3))
        question = PlacedQuestion(
            request=request,
            now=now,
            cluster=self._cluster,
            rows=rows,
            hbm_blocks=hbm,
            dram_blocks=dram,
            local_blocks=local,
            best_blocks=longest(match),
            pool_blocks=match.blocks,
            queue_s=np.zeros(len(rows)),
            match=match,
            transfers=transfers,
            computing=computing,
            settings=settings.policy,
            dice=dice,
            places=self._places,
        )
        tokens = int(local.max(initial=0)) * question.block_tokens
        own_s = float(question.prefill_s(tokens).min())
        waits_s = queues.wait_s(rows, request.priority, own_s, now, request.tenant)
        question.queue_s = waits_s + self._cluster.others_s.take(rows)
        return question

    def _refresh(self) -> None:
        cluster, index = self._cluster, self._index
        if (cluster.version, index.layout) == self._seen:
            return
        self._rows.clear()
        columns = np.full((3, len(cluster.specs)), _NO_HOLDER, np.int64)
        for row, spec in enumerate(cluster.specs):
            if spec is None:
                continue
            holders = (spec.id, "hbm"), (spec.node, "dram"), (spec.node, "nvme")
            for tier, (name, kind) in enumerate(holders):
                number = index.find(name, kind) if name else None
                columns[tier, row] = _NO_HOLDER if number is None else number
        self._columns = columns
        self._places = Places.of(index, cluster)  # may give numbers to nodes
        self._seen = (cluster.version, index.layout)


def longest(match: Match) -> int:
    """Blocks of the longest leading part that one holder alone has."""
    blocks, holders = 0, -1
    for run in match.runs:
        holders &= run.holders
        if not holders:
            break
        blocks = run.stop
    return blocks
