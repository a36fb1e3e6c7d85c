"""Some decisions of the conductor with their reasons, as text."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from tiffin.conductor.wire.models import CandidateReply, EntryReply

    from .router import ServedRequest


def chosen(served: Sequence[ServedRequest], log: Mapping[str, EntryReply]) -> list[ServedRequest]:
    """One request for each kind of decision, the one with the longest prompt. Kinds differ in how
    the prompt's blocks get to the instance that computes it, and whether it is computed at all."""
    best: dict[str, ServedRequest] = {}
    for one in sorted(served, key=lambda one: one.prompt_tokens):
        entry = log.get(one.id)
        if entry is not None:
            best[kind(one, entry)] = one
    return list(best.values())


def kind(served: ServedRequest, entry: EntryReply) -> str:
    """The kind of a decision, in words."""
    if served.rejected:
        return "rejected"
    if not served.cached_tokens:
        return "nothing is cached: where it starts first"
    best = {one.instance: one for one in entry.candidates}[served.prefill]
    if best.terms.get("transfer_s"):
        return "fetches blocks from the other node"
    if served.cached_tokens < entry.available_tokens:
        return "computes what it could fetch"
    if len(entry.candidates) > 1 and _queue_s(best) > min(map(_queue_s, entry.candidates)):
        return "waits, because its blocks are there"
    return "its blocks are there"


def words(served: Sequence[ServedRequest], log: Mapping[str, EntryReply]) -> Iterator[str]:
    """The text, line by line: each decision with its candidates and the terms of their cost, the
    cheapest first."""
    for one in served:
        entry = log[one.id]
        yield f"{one.id}, {one.prompt_tokens:,} tokens: {_decided(one, entry)}"
        yield f"    {_times(one, entry)}"
        for candidate in (*entry.candidates, *entry.decode_candidates):
            yield f"    {_candidate(candidate)}"


def _decided(served: ServedRequest, entry: EntryReply) -> str:
    if served.rejected:
        return f"rejected: {entry.message}"
    return f"{served.prefill} → {served.decode}; {kind(served, entry)}"


def _times(served: ServedRequest, entry: EntryReply) -> str:
    if served.rejected:
        if entry.retry_after_s is None:
            return "it is not told when to come back: waiting would not help"
        return f"it is told to come back in {entry.retry_after_s:.1f} s"
    cached = f"{served.cached_tokens:,} of {entry.available_tokens:,} cached tokens are used"
    observed = "" if math.isnan(served.ttft_s) else f", {served.ttft_s:.2f} s observed"
    return f"first token in {served.predicted_ttft_s:.2f} s predicted{observed}; {cached}"


def _candidate(candidate: CandidateReply) -> str:
    """Seconds to the first token, or per further token. Terms that are zero are left out."""
    terms = [f"{name.removesuffix('_s')} {v:.3g}" for name, v in candidate.terms.items() if v]
    cost = "impossible" if candidate.cost is None else f"{candidate.cost:.3g} s"
    return f"{candidate.instance:10} {cost:>8} = {' + '.join(terms)}"


def _queue_s(candidate: CandidateReply) -> float:
    return candidate.terms.get("queue_s") or 0.0
