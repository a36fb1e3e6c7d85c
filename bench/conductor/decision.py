"""Rows about one decision: of the core alone, without a service around it.

A decision is `pipeline.decide`, which changes nothing; `Conductor.schedule` also makes the
decision's reservations, counts and logs it. They are timed one after the other for the same
request, each with keys of its own: a bytes object caches its hash after the first use, and keys
that arrive with a request have no cached hash.

Requests arrive 10 ms apart on a simulated clock, and proceed as predicted: after the predicted TTFT
their prefill is done, and some seconds later they are finished. So decisions are made with hundreds
of requests in flight, as in production.
"""

from __future__ import annotations

import heapq
import random
from itertools import count
from typing import TYPE_CHECKING

from tiffin.conductor.core import Conductor
from tiffin.conductor.core.pipeline import Accepted, decide
from tiffin.conductor.cost.latency_profiles import DEFAULT
from tiffin.conductor.events.index_updates import Added
from tiffin.conductor.prefill.policy_registry import names as policy_names
from tiffin.conductor.records import Decision, InstanceSpec, Load, Request, RequestEvent, Role

from ..store.rows import MICROSECONDS, Row, Side, Target, interleave, times
from .index import keys_of
from .setting import BLOCK_TOKENS

if TYPE_CHECKING:
    from .setting import Setting, Sizes

MODEL = "bench"
PRIVATE, HOT, SHORT = "private", "hot", "short"
# Targets for whole decisions; a prompt whose blocks are on all instances needs no search for a
# source to fetch them from.
_TARGETS_US = {PRIVATE: 200.0, HOT: 120.0, SHORT: 120.0}
_LIMIT = "a plain loop: the keys' holders in a dict of bit sets, joined until none is left"

# 70 billion parameters, 80 layers of 8 heads: 160 MiB for 512 tokens.
_BLOCK_BYTES = 160 << 20
_HOST_INSTANCES = 8
_CAPACITY_TOKENS = 2_000_000
# A system prompt of 200 tokens in a prompt below a block, in parts of 16.
_SHORT_TOKENS, _SHARED_PARTS, _SHORT_PARTS = 400, 12, 24
_APART_S = 0.01
_ANSWER_TOKENS = 128
# Intervals as in the service, or longer.
_TICK_S = 0.1
_HEARTBEAT_S = 2.0


class Traffic:
    """A conductor with its instances and blocks, and requests to it. `next` makes the next request;
    `decide`, `schedule` and `loop` are the measured actions for it.

    `kind` is PRIVATE: all instances have 16 of a prompt's blocks, and one instance the other 240;
    or HOT: all instances have all blocks; or SHORT: no blocks, but all instances have 12 of 24
    parts of the first one, and one instance the others.
    """

    def __init__(self, sizes: Sizes, kind: str) -> None:
        self._dice = random.Random(0)
        self.core = Conductor(dice=random.Random(1))
        self._now = 0.0
        self._ticked = self._heard = 0.0
        self._numbers = count()
        self._due: list[tuple[float, int, RequestEvent]] = []
        self._short = kind == SHORT
        shared, keys = _counts(sizes, kind)
        self._shared = keys_of(shared)
        self._tails: list[list[bytes]] = []
        self._bits: dict[bytes, int] = dict.fromkeys(self._shared, (1 << sizes.instances) - 1)
        self._names = [f"instance-{number}" for number in range(sizes.instances)]
        for number, name in enumerate(self._names):
            self.core.register(spec(name, number), self._now)
            tail = keys_of(keys - shared)
            self._tails.append(tail)
            self._bits.update(dict.fromkeys(tail, 1 << number))
            held = [*self._shared, *tail]
            self.core.apply(Added(name, "hbm", held, parts=self._short), self._now)
        self.next()
        for _ in range(sizes.warm_decisions):
            self.go_on()

    @property
    def in_flight(self) -> int:
        """The number of requests that were scheduled and are not finished."""
        return int(self.core.statistics()["in_flight"])

    def next(self) -> None:
        """Advance the clock, handle the events due by then, and make the next request."""
        self._now += _APART_S
        while self._due and self._due[0][0] <= self._now:
            at, _, event = heapq.heappop(self._due)
            self.core.observe(event, at)
        if self._now - self._heard >= _HEARTBEAT_S:
            self._heard = self._now
            for name in self._names:
                self.core.heartbeat(name, Load(), self._now)
        if self._now - self._ticked >= _TICK_S:
            self._ticked = self._now
            self.core.tick(self._now)
        self._keys = self._shared + self._dice.choice(self._tails)
        self._asked = [self._request(f"request-{next(self._numbers)}") for _ in range(2)]
        self._looked_up = _fresh(self._keys)

    def go_on(self) -> None:
        """Schedule this request, and make the next one."""
        self.schedule()
        self.next()

    def decide(self) -> Accepted:
        """The decision alone."""
        decided = decide(self.core._parts, self._asked[0], self._now)
        assert isinstance(decided, Accepted), decided
        return decided

    def schedule(self) -> Decision:
        """Decide, and make the decision's reservations."""
        decision = self.core.schedule(self._asked[1], self._now)
        assert isinstance(decision, Decision), decision
        self._follow(decision)
        return decision

    def loop(self) -> int:
        """The simplest loop that finds the instances with the longest prefix; returns the prefix's
        blocks."""
        bits, held, blocks = self._bits, -1, 0
        for key in self._looked_up:
            held &= bits.get(key, 0)
            if not held:
                break
            blocks += 1
        return blocks

    def choose(self, policy: str) -> None:
        """Change the policy of the next decisions."""
        self.core.patch({"policy": {"name": policy}}, self._now)

    def again(self) -> None:
        """Renew the request for `decide`, with key objects of its own."""
        self._asked[0] = self._request(self._asked[0].id)

    def _request(self, name: str) -> Request:
        if self._short:
            return Request(name, MODEL, _SHORT_TOKENS, part_keys=tuple(_fresh(self._keys)))
        tokens = BLOCK_TOKENS * len(self._keys) + 100
        return Request(name, MODEL, tokens, tuple(_fresh(self._keys)))

    def _follow(self, decision: Decision) -> None:
        """Queue the request's future events, at the predicted times."""
        prefilled = self._now + decision.predicted_ttft_s
        answered = prefilled + _ANSWER_TOKENS * decision.predicted_tbt_s
        for at, kind, tokens in (
            (prefilled, "prefill_done", 0),
            (prefilled, "first_token", 0),
            (answered, "tokens", _ANSWER_TOKENS),
            (answered, "finished", 0),
        ):
            event = RequestEvent(decision.request_id, kind, tokens)
            heapq.heappush(self._due, (at, next(self._numbers), event))


def _counts(sizes: Sizes, kind: str) -> tuple[int, int]:
    """How many keys all instances have, and how many a prompt has."""
    if kind == SHORT:
        return _SHARED_PARTS, _SHORT_PARTS
    whole = sizes.prompt_blocks
    return (sizes.shared_blocks if kind == PRIVATE else whole), whole


def spec(name: str, number: int) -> InstanceSpec:
    """The spec of the instance `name`, the `number`-th one."""
    return InstanceSpec(
        id=name,
        model=MODEL,
        role=Role.MIXED,
        profile=DEFAULT,
        node=f"node-{number // _HOST_INSTANCES}",
        block_tokens=BLOCK_TOKENS,
        block_bytes=_BLOCK_BYTES,
        kv_capacity_tokens=_CAPACITY_TOKENS,
    )


def _fresh(keys: list[bytes]) -> list[bytes]:
    """The same bytes in new objects, without a cached hash."""
    return [bytes(bytearray(key)) for key in keys]


def scene(sizes: Sizes, kind: str) -> str:
    """A description of which instances have which blocks."""
    if kind == SHORT:
        parts = f"{_SHORT_TOKENS} tokens, {_SHORT_PARTS} parts of 16, {sizes.instances} instances"
        return f"{parts}, all but {_SHARED_PARTS} on one of them"
    blocks = f"{sizes.prompt_blocks} blocks, {sizes.instances} instances"
    if kind == HOT:
        return f"{blocks}, all on all"
    return f"{blocks}, all but {sizes.shared_blocks} on one of them"


# -- rows ------------------------------------------------------------------------------------------


def decisions(setting: Setting) -> list[Row]:
    """The decision alone, and with its reservations, for prompts of all kinds."""
    return [row for kind in (PRIVATE, HOT, SHORT) for row in _decisions(setting, kind)]


def _decisions(setting: Setting, kind: str) -> list[Row]:
    sizes = setting.sizes
    setting.tell(scene(sizes, kind))
    traffic = Traffic(sizes, kind)
    sides = [Side(traffic.decide), Side(traffic.schedule), Side(traffic.loop, traffic.next)]
    decided, scheduled, limit = interleave(sides, rounds=sizes.rounds)
    return [
        Row(
            name=f"{name}-{kind}",
            what=f"{what}: {scene(sizes, kind)}",
            unit="us",
            value=times(taken, MICROSECONDS),
            limit_what=_LIMIT,
            limit=times(limit, MICROSECONDS),
            targets=(Target("p50", "<=", _TARGETS_US[kind]),),
        )
        for name, what, taken in (
            ("decision", "one decision, which changes nothing", decided),
            ("schedule", "one decision, reserved and logged", scheduled),
        )
    ]


def policies(setting: Setting) -> list[Row]:
    """The decision alone, by each policy, for prompts with a private tail."""
    sizes = setting.sizes
    traffic = Traffic(sizes, PRIVATE)
    first, *others = policy_names()
    traffic.choose(first)
    sides = []
    for after in (*others, None):

        def reset(after: str | None = after) -> None:
            traffic.again()
            if after is not None:
                traffic.choose(after)

        sides.append(Side(traffic.decide, reset))

    def begin() -> None:
        traffic.go_on()
        traffic.choose(first)

    sides.append(Side(traffic.loop, begin))
    *taken, limit = interleave(sides, rounds=sizes.policy_rounds)
    return [
        Row(
            name=f"policy-{name}",
            what=f"one decision by {name}: {scene(sizes, PRIVATE)}",
            unit="us",
            value=times(seconds, MICROSECONDS),
            limit_what=_LIMIT,
            limit=times(limit, MICROSECONDS),
        )
        for name, seconds in zip((first, *others), taken, strict=True)
    ]
