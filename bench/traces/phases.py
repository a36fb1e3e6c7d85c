"""Traces whose load or mix changes: phases of Poisson arrivals, each of kinds of requests."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from .trace import Trace, TraceRequest


@dataclass(frozen=True, slots=True)
class RequestKind:
    """Requests whose lengths are uniform between two numbers of tokens, both included."""

    prompt_tokens: tuple[int, int]
    output_tokens: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Phase:
    """So many seconds of `rate` requests per second, each of one of the kinds by equal chance."""

    seconds: float
    rate: float
    kinds: tuple[RequestKind, ...]


def in_phases(phases: tuple[Phase, ...], seed: int, *, name: str = "phases") -> Trace:
    """One phase after the other; the same for the same arguments. Prompts share nothing."""
    chance, requests, begin_s = Random(seed), list[TraceRequest](), 0.0
    for phase in phases:
        at_s, begin_s = begin_s, begin_s + phase.seconds
        while (at_s := at_s + chance.expovariate(phase.rate)) < begin_s:
            kind = chance.choice(phase.kinds)
            tokens = chance.randint(*kind.prompt_tokens), chance.randint(*kind.output_tokens)
            requests.append(TraceRequest(at_s, *tokens))
    return Trace(name, tuple(requests))
