"""The sources that are compared for a prompt, and the stretches of it that each of them has. Pure.

A hot block has a thousand holders, and a prompt may be in a hundred parts. What a decision looks at
is limited: to the places that would help most, and to the stretches that matter.
"""

from __future__ import annotations

import heapq
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from .local import tier_block_s
from .plans import NEVER_S, Stretch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..index import Run
    from .base import Blocks, Floats, Question
    from .local import Compute
    from .places import Places

# Each costs some 30 us. Beyond it, the short ones between two long ones count as one, which a
# source has if it has all of them.
STRETCHES_MAX = 12

# Of a prompt in more parts than this, the longest count for who would help most.
_COUNTED_RUNS_MAX = 64

_MANY_BYTES = 1e12

# A part of the prompt: (start, stop, tiers), as below.
_Part = tuple[int, int, tuple[int, ...]]


def chosen_places(
    question: Question, places: Places, at: Blocks, base: int, compute: Compute, sources_max: int
) -> Blocks:
    """The places that would help the candidates `at` most with what is beyond block `base`: what
    their blocks take to compute, less what they take to send. [at most sources_max]"""
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
    # Equal ones in another order each time.
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
    # Who is on the same host as a candidate has no link to cross.
    near = np.isin(places.nodes[useful], cluster.node[rows]) & (places.nodes[useful] >= 0)
    first = compute.of(at[:1])
    saved = first.seconds(base)[0] - first.seconds((base + covered)[:, np.newaxis])[:, 0]
    score = saved - np.where(near, 0.0, seconds)
    return useful[np.argpartition(-score, sources_max - 1)[:sources_max]]


def _covered(runs: Sequence[Run], places: Places, base: int) -> Floats:
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


def lanes(question: Question, places: Places, chosen: Blocks, at: Blocks) -> tuple[Floats, Floats]:
    """(seconds to begin [places, candidates], seconds per block [tiers, places, candidates]) from
    the chosen places to the candidates `at`. A third tier, that of blocks that a place does not
    have, takes for ever."""
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
    # What an instance has in HBM behind a hole, its engine can not send to itself.
    block_s[:, places.rows[chosen][:, np.newaxis] == rows] = NEVER_S
    block_s[:, :, ~cluster.fetches[rows]] = NEVER_S
    return seconds[0], block_s


def stretches(
    question: Question, places: Places, chosen: Blocks, at: Blocks, base: int, block_s: Floats
) -> list[Stretch]:
    """All blocks beyond `base` that anybody has, in stretches, for the candidates `at`; `block_s`
    as `lanes` gives it. Source 0 is the candidate itself."""
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
        Stretch(start, stop, each_s, [0, *tiers])
        for (start, stop, tiers), each_s in zip(parts, all_s, strict=True)
    ]


def _parts(
    runs: Sequence[Run], columns: list[list[int]], base: int, bounds: set[int]
) -> list[_Part]:
    """Runs beyond `base`, cut at `bounds`, with the tier in which each place has them: 0, 1, or 2
    for neither. Neighbours with the same tiers are one, unless there is a bound between them."""
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
    """At most STRETCHES_MAX of them. The longest stay; those between two of them become one, which
    is where a source has it that has all of it, in the slowest of these tiers."""
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
