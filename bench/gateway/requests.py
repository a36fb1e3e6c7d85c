"""Rows about short answers: requests per second, CPU time of each, added latency, refusals."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..store.rows import MICROSECONDS, MILLISECONDS, Row, Spread, Target, single, times
from .fleet import TEXT, TOKEN_IDS, fleet, short_body

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .fleet import Fleet
    from .processes.clients import Outcome
    from .setting import Setting

# Where its CPU time per request is measured: enough at a time that it never waits.
CPU_AT_ONCE = 64
# Of its most: the rate at which it is asked for the latency under load.
LOADED = 0.7
OVERLOAD = 3.0
# Answers at a time that the gateway takes in the overload, and how long the engine needs for one.
_PLACES = 64
_ANSWER_S = 0.5


def requests(setting: Setting) -> list[Row]:
    """Requests per second, by how many are under way at a time. Raises MissingExtra."""
    sizes = setting.sizes
    with fleet(setting) as it:
        warm(it)
        return [
            _rate(it, at_once, sizes.alone if at_once == 1 else sizes.requests, setting)
            for at_once in sizes.at_once
        ]


def _rate(it: Fleet, at_once: int, number: int, setting: Setting) -> Row:
    rates: dict[str, list[float]] = {name: [] for name in it.sides}
    outcomes: list[Outcome] = []
    for turn in range(setting.sizes.turns):
        for name, port in it.sides.items():
            setting.tell(f"{at_once} at a time, turn {turn + 1}, {name}")
            outcome = it.ask(port, short_body(), requests=number, at_once=at_once)
            rates[name].append(len(outcome.seconds) / outcome.took_s)
            if name == "gateway":
                outcomes.append(outcome)
    beside = it.beside
    alone = np.median(rates["engine"])
    target = (Target("ratio", ">=", 0.3), Target("p50", ">=", 1500.0)) if at_once > 1 else ()
    return Row(
        name=f"requests-{at_once}",
        what=f"short answers, {at_once} at a time",
        unit="requests/s",
        value=Spread.of(rates["gateway"], lower_is_better=False),
        limit_what=f"{beside} before the same engine",
        limit=Spread.of(rates[beside], lower_is_better=False),
        targets=target,
        note=f"{in_words(outcomes)}; the engine alone {alone:.0f}/s",
    )


def in_words(outcomes: Sequence[Outcome]) -> str:
    """Times, refusals and failures of some requests."""
    seconds = [one for outcome in outcomes for one in outcome.seconds]
    p50, p99 = (MILLISECONDS * float(p) for p in np.percentile(seconds or [np.nan], (50, 99)))
    refused = sum(len(outcome.refused_s) for outcome in outcomes)
    fallbacks = sum(outcome.fallbacks for outcome in outcomes)
    other = sum(
        count
        for outcome in outcomes
        for status, count in outcome.statuses.items()
        if status not in ("200", "429", "503")
    )
    return (
        f"p50 {p50:.1f}, p99 {p99:.1f} ms, {refused} refused, {other} failed, "
        f"{fallbacks} placed without the conductor"
    )


def cpu(setting: Setting) -> list[Row]:
    """CPU time per request. Raises MissingExtra."""
    number = setting.sizes.requests
    taken: dict[str, list[float]] = {}
    with fleet(setting) as it:
        warm(it)
        for _ in range(setting.sizes.turns):
            for name, port in it.sides.items():
                before = {one: it.cpu_s(one) for one in it.pids}
                it.ask(port, short_body(), requests=number, at_once=CPU_AT_ONCE)
                measured = (name, "conductor") if name == "gateway" else (name,)
                for one in measured:
                    taken.setdefault(one, []).append((it.cpu_s(one) - before[one]) / number)
        beside = it.beside
    what = f"CPU time per short answer, {CPU_AT_ONCE} at a time"
    limit_what, limit = f"of {beside}", times(taken[beside], MICROSECONDS)
    return [
        Row(
            name="cpu", what=what, unit="us", value=times(taken["gateway"], MICROSECONDS),
            limit_what=limit_what, limit=limit, targets=(Target("p50", "<=", 1e6 / 1500),),
        ),
        Row(
            name="cpu-conductor", what=f"{what}, of the conductor that places them", unit="us",
            value=times(taken["conductor"], MICROSECONDS), limit_what=limit_what, limit=limit,
        ),
    ]  # fmt: skip


def workers(setting: Setting) -> list[Row]:
    """CPU time per request with two workers. Raises MissingExtra."""
    number = setting.sizes.requests
    taken: dict[int, list[float]] = {1: [], 2: []}
    rates: dict[int, list[float]] = {1: [], 2: []}
    with fleet(setting) as one, fleet(setting, workers=2) as two:
        fleets = {1: one, 2: two}
        for it in fleets.values():
            warm(it)
        for turn in range(max(2, setting.sizes.turns)):  # each comes first at least once
            for count, it in sorted(fleets.items(), reverse=turn % 2 == 1):
                before_s = it.cpu_s("gateway")
                outcome = it.ask(it.gateway, short_body(), requests=number, at_once=CPU_AT_ONCE)
                taken[count].append((it.cpu_s("gateway") - before_s) / number)
                rates[count].append(number / outcome.took_s)
    return [
        Row(
            name="cpu-workers",
            what=f"CPU time per short answer with two workers, {CPU_AT_ONCE} at a time",
            unit="us",
            value=times(taken[2], MICROSECONDS),
            limit_what="with one",
            limit=times(taken[1], MICROSECONDS),
            targets=(Target("ratio", "<=", 1.1),),
            note=f"{np.median(rates[2]):.0f} requests/s, with one {np.median(rates[1]):.0f}",
        )
    ]


def latency(setting: Setting) -> list[Row]:
    """What the gateway adds to an answer's time. Raises MissingExtra."""
    sizes = setting.sizes
    with fleet(setting) as it:
        warm(it)
        alone = [
            _added(it, setting, name, prompt, bound_ms)
            for name, prompt, bound_ms in (("ids", TOKEN_IDS, 2.5), ("text", TEXT, 4.0))
        ]
        most = it.ask(it.gateway, short_body(), requests=sizes.requests, at_once=CPU_AT_ONCE)
        rate = LOADED * sizes.requests / most.took_s
        sides = {
            name: it.ask(port, short_body(), requests=sizes.requests, rate=rate).seconds
            for name, port in it.sides.items()
        }
        beside = it.beside
    return [
        *alone,
        Row(
            name="added-loaded",
            what=f"slowest hundredth of short answers at {LOADED:.0%} of its most requests/s",
            unit="ms",
            value=single(MILLISECONDS * _p99(sides["gateway"])),
            limit_what=f"of {beside} at as many",
            limit=single(MILLISECONDS * _p99(sides[beside])),
            targets=(Target("p50", "<=", 25.0),),
            note=f"{rate:.0f} requests/s",
        ),
    ]


def _added(it: Fleet, setting: Setting, name: str, prompt: list[int] | str, bound_ms: float) -> Row:
    seconds: dict[str, list[float]] = {side: [] for side in it.sides}
    for _ in range(setting.sizes.turns):
        for side, port in it.sides.items():
            body = short_body(prompt)
            seconds[side] += it.ask(port, body, requests=setting.sizes.alone, at_once=1).seconds
    engine_s = float(np.median(seconds["engine"]))
    added = {side: [max(one - engine_s, 1e-7) for one in seconds[side]] for side in it.sides}
    beside = it.beside
    return Row(
        name=f"added-{name}",
        what=f"time that the gateway adds to a short answer, one at a time, prompt as {name}",
        unit="ms",
        value=times(added["gateway"], MILLISECONDS),
        limit_what=f"that {beside} adds" if beside != "engine" else "the engine's own scatter",
        limit=times(added[beside], MILLISECONDS),
        targets=(Target("p50", "<=", bound_ms),),
        note=f"p99 {MILLISECONDS * _p99(added['gateway']):.1f} ms",
    )


def overload(setting: Setting) -> list[Row]:
    """How long a refusal takes. Raises MissingExtra."""
    number = setting.sizes.requests
    rate = OVERLOAD * _PLACES / _ANSWER_S
    with fleet(setting, {"limits": {"requests": _PLACES}}) as it:
        warm(it)
        body = short_body(gap_s=_ANSWER_S)
        outcome = it.ask(it.gateway, body, requests=number, rate=rate)
        short = it.ask(it.gateway, short_body(), requests=setting.sizes.alone, at_once=1)
    refused = outcome.refused_s or [np.nan]
    return [
        Row(
            name="refusal",
            what=f"slowest hundredth of refusals at {OVERLOAD:g} times the requests that it takes",
            unit="ms",
            value=single(MILLISECONDS * _p99(refused)),
            limit_what="an answer without the overload",
            limit=times(short.seconds, MILLISECONDS),
            targets=(Target("p50", "<=", 20.0),),
            note=f"{rate:.0f} requests/s, {outcome.statuses}",
        )
    ]


def _p99(seconds: Sequence[float]) -> float:
    return float(np.percentile(seconds, 99))


def warm(it: Fleet) -> None:
    """Open connections, fill caches."""
    for port in it.sides.values():
        it.ask(port, short_body(), requests=100, at_once=4)
