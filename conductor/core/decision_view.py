"""The scheduler's input: the instances able to serve a model, and the blocks cached on each. Pure.

The mapping from instance rows to index holders changes only when instances or nodes come and go,
thousands of times less often than requests arrive. So it is cached, and rebuilt when the cluster's
version or the index's layout has changed.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from ..prefill.block_sources import PlacedQuestion, Places
from ..prefill.disaggregation import overlapped
from ..records import Status
from ..state.part_keys import PART_TOKENS
from ..state.prefix_index import HolderRun, PrefixMatch

if TYPE_CHECKING:
    import random

    from numpy.typing import NDArray

    from ..cost.transfer_model import TransferModel
    from ..prefill.wait_estimate import Queues
    from ..records import Request
    from ..state.inflight_prefills import Computing
    from ..state.instance_table import Cluster
    from ..state.prefix_index import PrefixIndex
    from .settings import Settings

    Rows = NDArray[np.int64]

_NO_HOLDER = -1


# Cache size: sets of holders whose rows are cached, at 8 bytes per row each. Sets of up to `_FEW`
# holders are not cached: each holder is looked up by itself.
_REMEMBERED = 256
_FEW = 16


class _Ready:
    """The rows that are ready to serve a model, with their holder numbers in the index."""

    def __init__(self, rows: Rows, columns: Rows) -> None:
        self.rows = rows
        self.columns = np.ascontiguousarray(columns[:, rows])
        self._at = {number: at for at, number in enumerate(self.columns[0].tolist())}
        self._having: dict[int, Rows] = {}

    def device_blocks(self, match: PrefixMatch) -> Rows:
        """Leading blocks that each row has in its own HBM. The same as `PrefixMatch.leading` of one
        column, but faster for prompts whose first blocks have many holders (a shared system prompt)
        and whose last blocks have few."""
        blocks = np.zeros(len(self.rows), np.int64)
        holders = -1
        for run in match.runs:
            holders &= run.holders
            if not holders:
                break
            if holders.bit_count() > _FEW:
                blocks += self._who(holders) * (run.stop - run.start)
            else:
                self._few(blocks, holders, run.stop)
        return blocks

    def _few(self, blocks: Rows, holders: int, stop: int) -> None:
        while holders:
            number = holders.bit_length() - 1
            at = self._at.get(number)
            if at is not None:
                blocks[at] = stop
            holders ^= 1 << number

    def _who(self, holders: int) -> Rows:
        """1 for each row whose HBM is among the holders, else 0. Cached by the set of holders."""
        found = self._having.get(holders)
        if found is None:
            if len(self._having) >= _REMEMBERED:
                self._having.clear()
            found = PrefixMatch((HolderRun(0, 1, holders),)).leading(self.columns[:1])
            self._having[holders] = found
        return found


class View:
    """Index holders by instance row, kept up to date with cluster and index. Not thread-safe."""

    def __init__(self, cluster: Cluster, index: PrefixIndex, parts: PrefixIndex) -> None:
        self._cluster = cluster
        self._index, self._parts = index, parts
        self._seen = (-1, -1, -1)
        self._columns: Rows = np.empty((3, 0), np.int64)
        self._places = Places()
        self._ready: dict[tuple[str, str, bool], _Ready] = {}  # by model and key space
        self._spaces: dict[str, dict[str, None]] = {}  # by model: key spaces, in order
        self._part_columns: Rows = np.empty((1, 0), np.int64)
        self._part_tokens: Rows = np.empty(0, np.int64)
        self._part_holders: dict[tuple[str, str], _Ready] = {}  # the rows ready to prefill
        self._absent: dict[tuple[str, bool], dict[str, int]] = {}
        self._in_dram = self._on_nvme = 0  # bit masks of all holders of that tier
        self._at_decode = 0  # and of the HBM of instances that decode

    def rows(self, model: str, key_space: str = "", *, prefill: bool) -> Rows:
        """Rows ready to prefill (or decode) this model, all or those of a key space."""
        self._refresh()
        key = (model, key_space, prefill)
        found = self._ready.get(key)
        if found is None:
            rows = self._cluster.rows_for(model, prefill=prefill, key_space=key_space)
            found = _Ready(rows, self._columns)
            if len(found.rows):  # don't cache models without instances: requests name any number
                self._ready[key] = found
        return found.rows

    def key_spaces(self, model: str) -> tuple[str, ...]:
        """The key spaces that instances of this model have, by name."""
        self._refresh()
        return tuple(self._spaces.get(model, ()))

    def absent(self, model: str, *, prefill: bool) -> dict[str, int]:
        """How many instances of this model are no candidates to prefill (or decode), by why."""
        self._refresh()
        found = self._absent.get((model, prefill))
        if found is None:
            found = self._absent[model, prefill] = self._count_absent(model, prefill=prefill)
        return found

    def _count_absent(self, model: str, *, prefill: bool) -> dict[str, int]:
        cluster = self._cluster
        able = cluster.prefills if prefill else cluster.decodes
        counts: Counter[str] = Counter()
        for row, spec in enumerate(cluster.specs):
            if spec is not None and spec.model == model:
                status = cluster.status[row]
                if status is not Status.READY:
                    counts[status.value] += 1
                elif not able[row]:
                    counts["other_role"] += 1
        return dict(counts)

    def question(
        self,
        request: Request,
        rows: Rows,
        transfers: TransferModel,
        computing: Computing,
        queues: Queues,
        settings: Settings,
        dice: random.Random,
        now: float,
    ) -> PlacedQuestion:
        """The input of a prefill policy: candidates `rows`, their cached blocks and queue times."""
        self._refresh()
        match = self._index.match(request.keys)
        tiers = self._leading(match, request, rows)
        held = tiers[2]
        part_tokens = self._cached_part_tokens(request, tiers[0], rows)
        most = int((held if part_tokens is None or held.any() else part_tokens).argmax())
        known = int(held[most]), 0 if part_tokens is None else int(part_tokens[most])
        own_s = self._own_s(request, int(rows[most]), *known)
        queue_s = queues.wait_s(rows, request.priority, own_s, now, request.tenant)
        queue_s = queue_s + self._cluster.others_s.take(rows)
        hbm, dram, local = _with_queued(
            tiers, rows, computing, request, now, queue_s, self._cluster.prefix_caching
        )
        return PlacedQuestion(
            request=request,
            now=now,
            cluster=self._cluster,
            rows=rows,
            hbm_blocks=hbm,
            dram_blocks=dram,
            local_blocks=local,
            held_blocks=held,
            best_blocks=longest(match),
            pool_blocks=match.blocks,
            queue_s=queue_s,
            coming=queues.coming(rows, now),
            match=match,
            transfers=transfers,
            computing=computing,
            settings=settings.policy,
            dice=dice,
            overlapped=overlapped(settings.disaggregation, request.prompt_tokens),
            places=self._places,
            cached_part_tokens=part_tokens,
        )

    def device_blocks(self, match: PrefixMatch, request: Request, decode: Rows) -> Rows:
        """Leading blocks that each row that decodes has in its own HBM."""
        if not match.runs or not match.runs[0].holders & self._at_decode:
            return np.zeros(len(decode), np.int64)
        ready = self._ready.get((request.model, request.key_space, False))
        if ready is None or ready.rows is not decode:
            ready = _Ready(decode, self._columns)
        return ready.device_blocks(match)

    def _leading(self, match: PrefixMatch, request: Request, rows: Rows) -> tuple[Rows, Rows, Rows]:
        """Leading blocks that each row has in HBM; in HBM or its node's DRAM; and in either of them
        or on its node's NVMe."""
        held = 0
        for run in match.runs:
            held |= run.holders
        if not held:
            none = np.zeros(len(rows), np.int64)
            return none, none, none
        ready = self._ready.get((request.model, request.key_space, True))
        if ready is None or ready.rows is not rows:
            ready = _Ready(rows, self._columns)  # a subset of the ready rows: not cached
        columns = ready.columns
        hbm = ready.device_blocks(match)
        dram = match.leading(columns[:2]) if held & self._in_dram else hbm
        local = match.leading(columns) if held & self._on_nvme else dram
        return hbm, dram, local

    def _cached_part_tokens(self, request: Request, hbm: Rows, rows: Rows) -> Rows | None:
        """The prompt's first tokens that each row has in HBM, by part keys, of rows with all blocks
        before these; None if nobody is known to have any, and if all have the block of the parts
        in HBM."""
        after = request.parts_after
        if not request.part_keys or not len(rows) or (hbm > after).all():
            return None
        spec = self._cluster.specs[int(rows[0])]
        assert spec is not None
        before = after * spec.block_tokens
        # An engine computes the last token, and so the part that it is in.
        keys = request.part_keys[: max(0, request.prompt_tokens - 1 - before) // PART_TOKENS]
        match = self._parts.match(keys)
        if not match.runs:
            return None
        of = request.model, request.key_space
        held = self._part_holders.get(of)
        if held is None or held.rows is not rows:
            held = _Ready(rows, self._part_columns)
            ready = self._ready.get((*of, True))
            if ready is not None and ready.rows is rows:
                self._part_holders[of] = held
        tokens = held.device_blocks(match) * PART_TOKENS
        if self._part_tokens.size:
            tokens -= tokens % self._part_tokens.take(rows)
        return np.where((tokens > 0) & (hbm >= after), tokens + before, 0) if after else tokens

    def _own_s(self, request: Request, row: int, blocks: int, part_tokens: int) -> float:
        """Estimated prefill time on `row`, which has `blocks` of the prompt cached, or its first
        `part_tokens`: `PolicyQuestion.prefill_s`."""
        c, n = self._cluster, request.prompt_tokens
        spec = c.specs[row]
        assert spec is not None
        p = min(max(blocks * spec.block_tokens, part_tokens), n - 1)
        return c.c0.item(row) + c.c1.item(row) * (n - p) + c.c2.item(row) * (n * n - p * p)

    def _refresh(self) -> None:
        cluster, index, parts = self._cluster, self._index, self._parts
        if (cluster.version, index.layout, parts.layout) == self._seen:
            return
        self._ready.clear()
        self._part_holders.clear()
        self._absent.clear()
        self._spaces.clear()
        self._in_dram = _mask(index, "dram")
        self._on_nvme = _mask(index, "nvme")
        self._at_decode = 0
        columns = np.full((3, len(cluster.specs)), _NO_HOLDER, np.int64)
        part_columns = np.full((1, len(cluster.specs)), _NO_HOLDER, np.int64)
        part_tokens = np.full(len(cluster.specs), PART_TOKENS, np.int64)
        for row, spec in enumerate(cluster.specs):
            if spec is None:
                continue
            if space := cluster.key_spaces[row]:
                self._spaces.setdefault(spec.model, {})[space] = None
            holders = (spec.id, "hbm"), (spec.node, "dram"), (spec.node, "nvme")
            for tier, (name, kind) in enumerate(holders):
                number = index.find(name, kind) if name else None
                columns[tier, row] = _NO_HOLDER if number is None else number
            number = parts.find(spec.id, "hbm")
            part_columns[0, row] = _NO_HOLDER if number is None else number
            part_tokens[row] = spec.part_tokens
            if cluster.decodes[row] and columns[0, row] >= 0:
                self._at_decode |= 1 << int(columns[0, row])
        self._columns, self._part_columns = columns, part_columns
        # Empty where all engines re-use whole parts, as most do.
        whole = not (PART_TOKENS % part_tokens).any()
        self._part_tokens = part_tokens[:0] if whole else part_tokens
        self._places = Places.of(index, cluster)  # may allocate node numbers
        self._seen = (cluster.version, index.layout, parts.layout)


def _with_queued(
    tiers: tuple[Rows, Rows, Rows],
    rows: Rows,
    computing: Computing,
    request: Request,
    now: float,
    queue_s: NDArray[np.float64],
    prefix_caching: NDArray[np.bool_],
) -> tuple[Rows, Rows, Rows]:
    """The leading blocks of each row, by tier, with those that its queue will have computed before
    the request's turn: they will be in its HBM, or in its node's memory."""

    def turn_at(row: int) -> float:
        at = int(rows.searchsorted(row))  # rows are sorted
        return now + queue_s.item(at) if at < len(rows) and rows[at] == row else -np.inf

    queued = computing.by_row(request.keys, now, turn_at)
    if not queued:
        return tiers
    blocks = np.zeros(len(rows), np.int64)
    for row, count in queued.items():
        blocks[int(rows.searchsorted(row))] = count
    kept = np.where(prefix_caching.take(rows), blocks, 0)
    return np.maximum(kept, tiers[0]), np.maximum(blocks, tiers[1]), np.maximum(blocks, tiers[2])


def _mask(index: PrefixIndex, tier: str) -> int:
    mask = 0
    for number in index.numbers():
        if index.label(number).endswith(f"/{tier}"):
            mask |= 1 << number
    return mask


def longest(match: PrefixMatch) -> int:
    """The number of leading blocks that the single best holder has."""
    blocks, holders = 0, -1
    for run in match.runs:
        holders &= run.holders
        if not holders:
            break
        blocks = run.stop
    return blocks
