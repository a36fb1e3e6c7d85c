"""Nothing in the core grows with the number of requests that it has served."""

from __future__ import annotations

import random
from collections import Counter, deque
from itertools import chain
from types import FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
from coresupport import spec

from tiffin.conductor.core import decision_log
from tiffin.conductor.core.conductor import Conductor
from tiffin.conductor.core.settings import CoreSettings, Settings
from tiffin.conductor.pool.offered_demand import RETRY_S
from tiffin.conductor.records import (
    Decision,
    Load,
    Objectives,
    Request,
    RequestEvent,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pytest

STEP_S = 0.1
# As long as anything is remembered by time, twice.
REQUESTS = round(2 * RETRY_S / STEP_S)
PREFIXES = 20
_LEAVES = str | bytes | int | float | None | type | FunctionType | MethodType | ModuleType


class Traffic:
    """Requests with a few prefixes that end in every way, at instances of which one goes and comes
    back."""

    def __init__(self) -> None:
        dice = random.Random(1)
        settings = Settings(core=CoreSettings(log_max=200, decision_ttl_s=5.0, forget_s=20.0))
        self.core = Conductor(settings, dice=dice)
        self._dice, self._number, self._now = dice, 0, 0.0

    def go_on(self, requests: int) -> None:
        """Serve some more."""
        for _ in range(requests):
            self._now += STEP_S
            self._number += 1
            if self._number % 10 == 1:
                self._heartbeats()
            self.core.tick(self._now)
            self.core.dispatch.ended()
            self.core.put_out()
            self._serve(f"tenant/r{self._number}")

    def _heartbeats(self) -> None:
        for number in range(3):
            if number == 0 and self._number // 500 % 2:
                continue  # it is silent, and is forgotten
            self.core.register(spec(f"i{number}"), self._now)
            self.core.heartbeat(f"i{number}", Load(), self._now)

    def _serve(self, name: str) -> None:
        dice, core, now = self._dice, self.core, self._now
        prefix, fate = dice.randrange(PREFIXES), dice.random()
        if fate < 0.2:  # a prompt of its own, which nobody computes in time
            keys, objectives = (dice.randbytes(16),), Objectives(ttft_s=1e-6)
        else:
            keys, objectives = (bytes([prefix] * 16),), Objectives()
        parts = tuple(bytes([prefix, at] * 8) for at in range(8))
        request = Request(name, "m", 600, keys, objectives, tenant="tenant", part_keys=parts)
        if not isinstance(core.schedule(request, now), Decision):
            return
        if fate < 0.25:
            return  # nothing more is heard of it
        if fate < 0.3:
            self._say(name, "cancelled")
            return
        self._say(name, "first_token")
        for total in (2, 17, 33):
            self._say(name, "tokens", total)
        self._say(name, "finished", 40)

    def _say(self, name: str, kind: str, total: int | None = None) -> None:
        self.core.observe(RequestEvent(name, kind, total_tokens=total), self._now)


def sizes(root: object) -> Counter[str]:
    """How much all containers have that `root` leads to, by the attributes on the way."""
    found, seen, left = Counter[str](), {id(root)}, [(root, "")]
    while left:
        one, path = left.pop()
        if isinstance(one, np.ndarray):
            found[path] += one.nbytes
            continue
        if isinstance(one, dict | list | set | deque):
            found[path] += len(one)
        for inner, name in _inside(one):
            if not isinstance(inner, _LEAVES) and id(inner) not in seen:
                seen.add(id(inner))
                left.append((inner, f"{path}{name}"))
    return found


def _inside(one: Any) -> Iterator[tuple[Any, str]]:
    if isinstance(one, dict):
        yield from ((inner, "{}") for inner in chain(list(one), list(one.values())))
    elif isinstance(one, list | tuple | set | frozenset | deque):
        yield from ((inner, "[]") for inner in one)
    else:
        slots = chain.from_iterable(getattr(of, "__slots__", ()) for of in type(one).__mro__)
        for name in {*slots, *getattr(one, "__dict__", ())}:
            if hasattr(one, name):
                yield getattr(one, name), f".{name}"


def test_after_many_requests_it_has_no_more_than_after_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(decision_log, "KEPT_MAX", 20)  # or it takes an hour to fill
    traffic = Traffic()
    traffic.go_on(REQUESTS)
    before = sizes(traffic.core)
    traffic.go_on(REQUESTS)
    counts = traffic.core.statistics()
    assert counts["decided"] > REQUESTS
    assert counts["rejected"] > 0.3 * REQUESTS
    assert counts["expired"] > 0.05 * REQUESTS
    after = sizes(traffic.core)
    assert len(after) > 100
    # How many are in flight or late at a moment differs.
    grown = {path: (before[path], n) for path, n in after.items() if n > 1.2 * before[path] + 60}
    assert grown == {}
