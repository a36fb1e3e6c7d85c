"""Rows about streamed answers: tokens per second, CPU time of each, memory of an open stream."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from tiffin.kvstore.errors import NodeUnavailable

from ..store.rows import MICROSECONDS, Row, Spread, Target, single, times
from .fleet import fleet, stream_body

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .fleet import Fleet
    from .processes.clients import Outcome
    from .setting import Setting

# An answer, and the two refusals.
_EXPECTED = ("200", "429", "503")
# No second token comes while memory is measured.
_NEVER_S = 3600.0


def streams(setting: Setting) -> list[Row]:
    """Tokens per second, by the number of streams, and CPU time per token. Raises MissingExtra."""
    with fleet(setting) as it:
        it.ask(it.gateway, stream_body(5, 0.0), requests=20, at_once=4)
        return [row for number in setting.sizes.streams for row in _tokens(it, number, setting)]


def _tokens(it: Fleet, number: int, setting: Setting) -> list[Row]:
    sizes = setting.sizes
    sides = [name for name in it.sides if name == "gateway" or name == it.beside]
    rates: dict[str, list[float]] = {name: [] for name in sides}
    taken: dict[str, list[float]] = {name: [] for name in sides}
    ours: list[Outcome] = []
    for _ in range(sizes.turns):
        for name in sides:
            setting.tell(f"{number} streams, {name}")
            before_s = it.cpu_s(name)
            body = stream_body(sizes.stream_tokens, sizes.gap_s)
            outcome = it.ask(it.sides[name], body, requests=number, at_once=number)
            rates[name].append(outcome.tokens / outcome.took_s)
            taken[name].append((it.cpu_s(name) - before_s) / max(outcome.tokens, 1))
            if name == "gateway":
                ours.append(outcome)
    what = f"{number} streams of {sizes.stream_tokens} tokens, one each {sizes.gap_s * 1e3:g} ms"
    beside = it.beside
    offered = number / sizes.gap_s
    return [
        Row(
            name=f"tokens-{number}",
            what=f"streamed tokens: {what}",
            unit="tokens/s",
            value=Spread.of(rates["gateway"], lower_is_better=False),
            limit_what=f"through {beside}",
            limit=Spread.of(rates[beside], lower_is_better=False),
            targets=(Target("p50", ">=", 25_000.0),) if offered > 25_000.0 else (),
            note=shortfall(ours, sizes.stream_tokens),
        ),
        Row(
            name=f"cpu-token-{number}",
            what=f"CPU time per streamed token: {what}",
            unit="us",
            value=times(taken["gateway"], MICROSECONDS),
            limit_what=f"of {beside}",
            limit=times(taken[beside], MICROSECONDS),
            targets=(Target("p50", "<=", 1e6 / 25_000),),
        ),
    ]


def shortfall(outcomes: Iterable[Outcome], tokens: int) -> str:
    """What streams of so many tokens lack, in words: those that were refused, with the reason, and
    those that failed; tokens that are missing in answers that ended well. "" if all came."""
    refused, failed, lost = Counter[str](), Counter[str](), 0
    for outcome in outcomes:
        refused.update(outcome.reasons)
        failed.update({s: n for s, n in outcome.statuses.items() if s not in _EXPECTED})
        lost += len(outcome.seconds) * tokens - outcome.tokens
    said = [f"{count} streams refused ({why})" for why, count in refused.items()]
    said += [f"{count} streams failed ({what})" for what, count in failed.items()]
    return ", ".join([*said, f"{lost} tokens lost"] if lost else said)


def memory(setting: Setting) -> list[Row]:
    """Growth of the gateway per open stream. Raises MissingExtra."""
    held = setting.sizes.held
    grown: dict[str, float] = {}
    with fleet(setting, {"limits": {"requests": 2 * held}}) as it:
        beside = it.beside
        for name in ("gateway", beside):
            it.ask(it.sides[name], stream_body(2, 0.0), requests=100, at_once=4)
            before = it.resident_bytes(name)
            open_now = it.ask(it.sides[name], stream_body(2, _NEVER_S), hold=held)
            if len(open_now.seconds) < held:
                raise NodeUnavailable(f"{name}: {shortfall([open_now], tokens=1)}")
            grown[name] = (it.resident_bytes(name) - before) / held
            it.drop()
    return [
        Row(
            name="stream-memory",
            what=f"memory per open stream, {held} of them",
            unit="KB",
            value=single(grown["gateway"] / 1e3),
            limit_what=f"of {beside}",
            limit=single(max(grown[beside], 1.0) / 1e3),
            targets=(Target("p50", "<=", 60.0),),
        )
    ]
