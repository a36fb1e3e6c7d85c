"""Rows beside the routers of others: the same requests through ours and theirs, in turns.

Prompts are text, as SGLang's router refuses token ids, and ours places them by load alone: with
`tokenizer = "estimate"` it makes no tokens of them either. Of ours the CPU time of the conductor
counts too, as the others decide in the process that passes bytes on.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from ..peers.environments import PEERS
from ..store.rows import MICROSECONDS, MILLISECONDS, Row, Spread
from .fleet import MODEL, TEXT, fleet, short_body, stream_body
from .requests import warm
from .streams import shortfall

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from typing import Any

    from .fleet import Fleet
    from .processes.clients import Outcome
    from .setting import Setting

_CONFIG = {"models": {MODEL: {"tokenizer": "estimate"}}}
_OURS = ("gateway", "conductor")


@dataclass(slots=True)
class _Side:
    """What came of a side's turns, and the CPU time of each."""

    outcomes: list[Outcome] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)

    def spread(self, of: Callable[[Outcome], float], *, lower_is_better: bool = True) -> Spread:
        """A number of each turn."""
        return Spread.of([of(one) for one in self.outcomes], lower_is_better=lower_is_better)

    def cpu(self, of: Callable[[Outcome], int], scale: float) -> Spread:
        """CPU time per piece of each turn, in units of 1/`scale` seconds."""
        each = [
            scale * taken / max(of(one), 1)
            for taken, one in zip(self.cpu_s, self.outcomes, strict=True)
        ]
        return Spread.of(each, lower_is_better=True)


def beside(setting: Setting) -> list[Row]:
    """Short answers and streams; no rows if no router is installed. Raises MissingExtra,
    NodeUnavailable."""
    routers = setting.routers()
    if not routers:
        return []
    sizes = setting.sizes
    rows: list[Row] = []
    with fleet(setting, _CONFIG, routers=routers) as it:
        warm(it)
        for number in sizes.beside_at_once:
            requests = sizes.alone if number == 1 else sizes.requests
            taken = _turns(it, setting, short_body(TEXT), requests, number)
            for name in routers:
                rows += _short(name, number, taken, it.beside)
        for number in sizes.beside_streams:
            body = stream_body(sizes.stream_tokens, sizes.gap_s, TEXT)
            taken = _turns(it, setting, body, number, number)
            for name in routers:
                rows += _streamed(name, number, taken, it.beside, sizes.stream_tokens)
    return rows


def _turns(
    it: Fleet, setting: Setting, body: Mapping[str, Any], requests: int, at_once: int
) -> dict[str, _Side]:
    """All sides in turns, every other time in the opposite order."""
    ports = {name: port for name, port in it.sides.items() if name in _compared(it)}
    taken = {name: _Side() for name in ports}
    for turn in range(setting.sizes.turns):
        for name in sorted(ports, key=list(ports).index, reverse=turn % 2 == 1):
            setting.tell(f"{at_once} at a time, turn {turn + 1}, {name}")
            before_s = _cpu_s(it, name)
            outcome = it.ask(ports[name], body, requests=requests, at_once=at_once)
            taken[name].outcomes.append(outcome)
            taken[name].cpu_s.append(_cpu_s(it, name) - before_s)
    return taken


def _compared(it: Fleet) -> Iterable[str]:
    return (it.beside, "gateway", *it.routers)


def _cpu_s(it: Fleet, name: str) -> float:
    return sum(it.cpu_s(one) for one in (_OURS if name == "gateway" else (name,)))


def _short(name: str, number: int, taken: Mapping[str, _Side], limit: str) -> list[Row]:
    ours, theirs, plain = taken["gateway"], taken[name], taken[limit]
    what = f"short answers, {number} at a time"
    notes = [f"{limit} {median(_rate(one) for one in plain.outcomes):.0f}/s"]
    notes += _failures("ours", ours) + _failures("its", theirs)

    def row(kind: str, what: str, unit: str, mine: Spread, other: Spread) -> Row:
        title = f"{PEERS[name].title} before the same engines"
        return Row(f"{name}-{kind}-{number}", what, unit, mine, title, other, note="; ".join(notes))

    rate, p50, p99 = (
        [side.spread(of, lower_is_better=of is not _rate) for side in (ours, theirs)]
        for of in (_rate, _p50, _p99)
    )
    cpu = [side.cpu(_answered, MILLISECONDS) for side in (ours, theirs)]
    return [
        row("requests", what, "requests/s", *rate),
        row("p50", f"median time of {what}", "ms", *p50),
        row("p99", f"slowest hundredth of {what}", "ms", *p99),
        row("cpu", f"CPU time per answer with the conductor's, {what}", "ms", *cpu),
    ]


def _streamed(
    name: str, number: int, taken: Mapping[str, _Side], limit: str, tokens: int
) -> list[Row]:
    ours, theirs, plain = taken["gateway"], taken[name], taken[limit]
    what = f"{number} streams of {tokens} tokens"
    notes = [f"{limit} {median(_token_rate(one) for one in plain.outcomes):.0f} tokens/s"]
    for whose, side in (("ours", ours), ("its", theirs)):
        lack = shortfall(side.outcomes, tokens)
        notes += [f"{whose}: {lack}"] if lack else []
    title, note = f"{PEERS[name].title} before the same engines", "; ".join(notes)
    rates = [side.spread(_token_rate, lower_is_better=False) for side in (ours, theirs)]
    cpu = [side.cpu(_tokens, MICROSECONDS) for side in (ours, theirs)]
    return [
        Row(
            f"{name}-tokens-{number}", f"streamed tokens: {what}", "tokens/s",
            rates[0], title, rates[1], note=note,
        ),
        Row(
            f"{name}-cpu-token-{number}", f"CPU time per token with the conductor's: {what}", "us",
            cpu[0], title, cpu[1], note=note,
        ),
    ]  # fmt: skip


def _failures(whose: str, side: _Side) -> list[str]:
    """Answers that were none, by status."""
    found: Counter[str] = Counter()
    for outcome in side.outcomes:
        found.update(outcome.statuses)
    del found["200"]
    if not found:
        return []
    return [f"{whose}: " + ", ".join(f"{n} times {status}" for status, n in found.items())]


def _answered(outcome: Outcome) -> int:
    return len(outcome.seconds)


def _tokens(outcome: Outcome) -> int:
    return outcome.tokens


def _rate(outcome: Outcome) -> float:
    return len(outcome.seconds) / outcome.took_s


def _token_rate(outcome: Outcome) -> float:
    return outcome.tokens / outcome.took_s


def _p50(outcome: Outcome) -> float:
    return MILLISECONDS * float(np.percentile(outcome.seconds or [np.nan], 50))


def _p99(outcome: Outcome) -> float:
    return MILLISECONDS * float(np.percentile(outcome.seconds or [np.nan], 99))
