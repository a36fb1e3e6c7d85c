"""The sources that are compared for a prompt, and the ranges of blocks that each has. Pure.

A hot block has a thousand holders, and a prompt's blocks may be in a hundred ranges. So a decision
compares a limited number of places and ranges: the places that save most, and the longest ranges.
"""

from __future__ import annotations

import heapq
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from .fetch_plan import NEVER_S, SourceRange
from .local_cost import tier_block_s

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..state.prefix_index import HolderRun
    from .block_sources import Places
    from .local_cost import Compute
    from .policy_registry import Blocks, Floats, PolicyQuestion

# Each range costs some 30 us. Beyond this number, the short ranges between two long ones are merged
# into one, which a source has if it has all of them.
STRETCHES_MAX = 12

# Of a prompt in more ranges than this, only the longest count when places are ranked.
_COUNTED_RUNS_MAX = 64

_MANY_BYTES = 1e12

# A range of the prompt: (start, stop, tiers); see `_parts`.
_Part = tuple[int, int, tuple[int, ...]]


def chosen_places(
    question: PolicyQuestion,
    places: Places,
    at: Blocks,
    base: int,
    compute: Compute,
    sources_max: int,
) -> Blocks:
    """The places that would save the candidates `at` most beyond block `base`: the seconds to
    compute the place's blocks, less the seconds to send them. [at most sources_max]"""
    runs = [run for run in question.match.runs if run.stop > base]
    if not runs or not len(places):
        return np.empty(0, np.int64)
    everybody = 0
    for run in runs:
        everybody |= run.holders
    if everybody.bit_count() <= sources_max:
        return np.array(places.having(everybody), np.int64)
    blocks = _covered(runs, places, base)
    useful = np.flatnonzero(blocks > 0)
    if len(useful) <= sources_max:
        return useful
    # Rotate at random, so that ties are broken differently each time.
    turn = question.dice.randrange(len(useful))
    useful = np.concatenate((useful[turn:], useful[:turn]))
    cluster, rows = question.cluster, question.rows[at]
    covered = blocks[useful]
    seconds = question.transfers.seconds(
        places.nodes[useful],
        places.tiers[0, useful],
        -1,
        covered * cluster.block_bytes[rows[0]],
        question.now,
    )
    # A place on a candidate's own host needs no network transfer.
    near = np.isin(places.nodes[useful], cluster.node[rows]) & (places.nodes[useful] >= 0)
    first = compute.of(at[:1])
    saved = first.seconds(base)[0] - first.seconds((base + covered)[:, np.newaxis])[:, 0]
    score = saved - np.where(near, 0.0, seconds)
    return useful[np.argpartition(-score, sources_max - 1)[:sources_max]]


def _covered(runs: Sequence[HolderRun], places: Places, base: int) -> Floats:
    """Blocks beyond `base` that each place has, in either tier. [places]"""
    if len(runs) > _COUNTED_RUNS_MAX:
        runs = heapq.nlargest(_COUNTED_RUNS_MAX, runs, key=lambda run: run.stop - run.start)
    nbytes = max(int(places.columns.max(initial=0)) // 8 + 1, 1)
    mask = (1 << (8 * nbytes)) - 1
    raw = b"".join((run.holders & mask).to_bytes(nbytes, "little") for run in runs)
    held = np.frombuffer(raw, np.uint8).reshape(len(runs), nbytes)
    bits = np.unpackbits(held, axis=1, bitorder="little")
    sizes = np.array([run.stop - max(run.start, base) for run in runs], np.float64)
    blocks = np.zeros((len(runs), places.columns.shape[1]))
    for column in places.columns:
        has = np.flatnonzero(column >= 0)
        blocks[:, has] = np.maximum(blocks[:, has], bits[:, column[has]])
    covered: Floats = sizes @ blocks
    return covered


def lanes(
    question: PolicyQuestion, places: Places, chosen: Blocks, at: Blocks
) -> tuple[Floats, Floats]:
    """(seconds to start [places, candidates], seconds per block [tiers, places, candidates]) from
    the chosen places to the candidates `at`. The third tier stands for blocks that a place does not
    have, and takes `NEVER_S`."""
    cluster, rows = question.cluster, question.rows[at]
    fast, slow = places.tiers[:, chosen]
    # Seconds are linear in bytes, so that two numbers of bytes give both coefficients.
    seconds = question.transfers.seconds(
        places.nodes[chosen][:, np.newaxis],
        np.stack((fast, fast, slow))[:, :, np.newaxis],
        cluster.node[rows],
        np.array([1.0, _MANY_BYTES, _MANY_BYTES]).reshape(3, 1, 1),
        question.now,
    )
    block_s = np.full_like(seconds, NEVER_S)
    block_s[:2] = (seconds[1:] - seconds[0]) / _MANY_BYTES * cluster.block_bytes[rows]
    # An engine can not fetch from itself the blocks that it has in HBM behind a gap.
    block_s[:, places.rows[chosen][:, np.newaxis] == rows] = NEVER_S
    block_s[:, :, ~cluster.fetches[rows]] = NEVER_S
    return seconds[0], block_s


def stretches(
    question: PolicyQuestion, places: Places, chosen: Blocks, at: Blocks, base: int, block_s: Floats
) -> list[SourceRange]:
    """All cached leading blocks beyond `base`, as ranges, for the candidates `at`; `block_s` is the
    result of `lanes`. Source 0 is the candidate itself."""
    own_blocks = (question.hbm_blocks[at], question.dram_blocks[at], question.local_blocks[at])
    bounds = {base, *np.concatenate(own_blocks).tolist()}
    columns = places.columns[:, chosen].T.tolist()
    parts = _coarse(_parts(question.match.runs, columns, base, bounds))
    if not parts:
        return []
    stops = np.array([stop for _, stop, _ in parts])[:, np.newaxis]
    own_s = np.full((len(parts), len(at)), NEVER_S)
    dram_s, nvme_s = tier_block_s(question)
    tiers_s = (np.zeros(len(at)), dram_s[at], nvme_s[at])
    for blocks, tier_s in reversed(list(zip(own_blocks, tiers_s, strict=True))):
        own_s = np.where(stops <= blocks, tier_s, own_s)
    tiers = np.array([tiers for _, _, tiers in parts], np.int64).reshape(len(parts), -1)
    theirs_s = block_s[tiers, np.arange(len(chosen))]
    all_s = np.concatenate((own_s[:, np.newaxis], theirs_s), axis=1)
    return [
        SourceRange(start, stop, each_s, [0, *tiers])
        for (start, stop, tiers), each_s in zip(parts, all_s, strict=True)
    ]


def _parts(
    runs: Sequence[HolderRun], columns: list[list[int]], base: int, bounds: set[int]
) -> list[_Part]:
    """Runs beyond `base`, cut at `bounds`, with the tier in which each place has them: 0, 1, or 2
    for neither. Neighbours with the same tiers are merged, unless there is a bound between them."""
    parts: list[_Part] = []
    inner = sorted(bounds)
    for start, stop, holders in runs:
        if stop <= base:
            continue
        tiers = tuple(_tier(holders, fast, slow) for fast, slow in columns)
        cuts = [bound for bound in inner if max(start, base) < bound < stop]
        edges = [max(start, base), *cuts, stop]
        for first, last in pairwise(edges):
            if parts and parts[-1][2] == tiers and first not in bounds:
                parts[-1] = (parts[-1][0], last, tiers)
            else:
                parts.append((first, last, tiers))
    return parts


def _tier(holders: int, fast: int, slow: int) -> int:
    if fast >= 0 and holders >> fast & 1:
        return 0
    return 1 if slow >= 0 and holders >> slow & 1 else 2


def _coarse(parts: list[_Part]) -> list[_Part]:
    """Reduce to at most STRETCHES_MAX parts. The longest stay; those between two of them are merged
    into one, which a source has if it has all of them, in the slowest of their tiers."""
    if len(parts) <= STRETCHES_MAX:
        return parts
    sizes = [stop - start for start, stop, _ in parts]
    kept = set(heapq.nlargest((STRETCHES_MAX - 1) // 2, range(len(parts)), key=sizes.__getitem__))
    coarse: list[_Part] = []
    open_part = False
    for index, (start, stop, tiers) in enumerate(parts):
        if index not in kept and open_part:
            first, _, before = coarse[-1]
            coarse[-1] = (first, stop, tuple(map(max, before, tiers)))
        else:
            coarse.append((start, stop, tiers))
        open_part = index not in kept
    return coarse
