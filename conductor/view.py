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
        self._taken: dict[int, tuple[Rows, Rows]] = {}  # columns of such rows
        self._in_dram = self._on_nvme = 0  # holders of that tier, a bit each

    def rows(self, model: str, *, prefill: bool) -> Rows:
        """Rows ready to prefill (or decode) this model."""
        self._refresh()
        key = (model, prefill)
        found = self._rows.get(key)
        if found is None:
            found = self._rows[key] = self._cluster.rows_for(model, prefill=prefill)
            # With the array itself, so that its id is not another one's later.
            self._taken[id(found)] = found, np.ascontiguousarray(self._columns[:, found])
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
        hbm, dram, local = self._leading(match, rows)
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
        own_s = self._own_s(request, int(rows[local.argmax()]), question, int(local.max()))
        waits_s = queues.wait_s(rows, request.priority, own_s, now, request.tenant)
        question.queue_s = waits_s + self._cluster.others_s.take(rows)
        return question

    def _leading(self, match: Match, rows: Rows) -> tuple[Rows, Rows, Rows]:
        """Leading blocks that each row has in HBM; there or in its node's DRAM; and on its NVMe."""
        held = 0
        for run in match.runs:
            held |= run.holders
        if not held:
            none = np.zeros(len(rows), np.int64)
            return none, none, none
        found = self._taken.get(id(rows))
        columns = found[1] if found is not None else self._columns[:, rows]
        hbm = match.leading(columns[:1])
        dram = match.leading(columns[:2]) if held & self._in_dram else hbm
        local = match.leading(columns) if held & self._on_nvme else dram
        return hbm, dram, local

    def _own_s(self, request: Request, row: int, question: PlacedQuestion, blocks: int) -> float:
        """About how long its prefill takes, where most of it is cached: `Question.prefill_s`."""
        c, n = self._cluster, request.prompt_tokens
        p = float(min(blocks * question.block_tokens, n - 1))
        return float(c.c0[row] + c.c1[row] * (n - p) + c.c2[row] * (n * n - p * p))

    def _refresh(self) -> None:
        cluster, index = self._cluster, self._index
        if (cluster.version, index.layout) == self._seen:
            return
        self._rows.clear()
        self._taken.clear()
        self._in_dram = _mask(index, "dram")
        self._on_nvme = _mask(index, "nvme")
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


def _mask(index: PrefixIndex, tier: str) -> int:
    mask = 0
    for number in index.numbers():
        if index.label(number).endswith(f"/{tier}"):
            mask |= 1 << number
    return mask


def longest(match: Match) -> int:
    """Blocks of the longest leading part that one holder alone has."""
    blocks, holders = 0, -1
    for run in match.runs:
        holders &= run.holders
        if not holders:
            break
        blocks = run.stop
    return blocks
