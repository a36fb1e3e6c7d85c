"""Scenarios: readable scripts for a conductor, with its answers in between.

    # Comments, and empty lines.
    instance a mixed on n1                  an instance registers; also: prefill, decode
    set policy.name preble                  any setting
    0.0 ask r1 doc*8+mine*2 ttft=2          a request with 10 blocks, the first 8 of which are doc's
        -> a: 0 of 10 blocks, TTFT 1.06 s   the decision
    1.1 tell r1 first_token                 an event of a request
    2.0 holds n1/dram doc*8                 a feed reports a holder's blocks; also: drops
    3.0 alive a b                           heartbeats
    9.0 drain a                             also: leave, pass (time alone)
        -> a is draining                    changes since the line before

Lines with an arrow are answers: the test plays a script and compares the whole text.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
from typing import TYPE_CHECKING, Any

from tiffin.conductor.core import Conductor
from tiffin.conductor.cost.latency_profiles import DEFAULT
from tiffin.conductor.errors import ConductorError
from tiffin.conductor.events.index_updates import Added, Removed
from tiffin.conductor.records import (
    Decision,
    InstanceSpec,
    Load,
    Objectives,
    Rejection,
    Request,
    RequestEvent,
    Role,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BLOCK_TOKENS = 512
_BLOCK_BYTES = 160 << 20  # Llama-3-70B's 512 tokens, in 16 bits
# Beyond the full blocks of each prompt.
_TAIL_TOKENS = 100
_ARROW = "    -> "
_NUMBERS = ("ttft", "tbt", "answer", "most")


def keys_of(prompt: str) -> tuple[bytes, ...]:
    """The chained keys of `doc*8+mine*2`: prompts share the keys of a common beginning."""
    keys: list[bytes] = []
    for part in prompt.split("+"):
        name, _, count = part.partition("*")
        for _ in range(int(count)):
            before = keys[-1] if keys else b""
            keys.append(hashlib.blake2b(before + name.encode(), digest_size=16).digest())
    return tuple(keys)


def play(script: str) -> str:
    """The script with a conductor's answers, which replace those in the script."""
    stage = _Stage()
    lines: list[str] = []
    for line in script.splitlines():
        if line.startswith(_ARROW):
            continue
        lines.append(line)
        if line.strip() and not line.startswith("#"):
            lines += [_ARROW + answer for answer in stage.play(line.split())]
    return "\n".join(lines) + "\n"


class _Stage:
    """One conductor, and the last seen state of its instances."""

    def __init__(self) -> None:
        self.core = Conductor(dice=random.Random(1))
        self.now = 0.0
        self._seen: dict[str, str] = {}

    def play(self, words: list[str]) -> Iterator[str]:
        """Carry out one line; yields the answers."""
        if words[0][0].isdigit():
            self.now = float(words.pop(0))
        action: Callable[..., str] = getattr(self, f"_{words[0]}")
        try:
            answer = action(*words[1:])
        except ConductorError as error:
            answer = f"{type(error).__name__}: {error}"
        yield from filter(None, answer.split("\n"))
        yield from self._changes()

    # -- commands ----------------------------------------------------------------------------------

    def _instance(self, name: str, role: str, *more: str) -> str:
        given: dict[str, Any] = {key: int(value) for key, value in _pairs(*more)}
        node = more[more.index("on") + 1] if "on" in more else ""
        one = InstanceSpec(name, "m", Role(role), DEFAULT, node=node, block_bytes=_BLOCK_BYTES)
        spec = {field: getattr(one, field) for field in one.__slots__}
        self.core.register(InstanceSpec(**{**spec, **given}), self.now)
        self._seen[name] = f"{role}, ready"
        return ""

    def _set(self, path: str, value: str) -> str:
        changes: Any = value
        with contextlib.suppress(ValueError):  # a word needs no quotes
            changes = json.loads(value)
        for name in reversed(path.split(".")):
            changes = {name: changes}
        self.core.patch(changes, self.now)
        return ""

    def _ask(self, name: str, prompt: str, *more: str) -> str:
        keys = keys_of(prompt)
        given = dict(_pairs(*more))
        numbers = {key: float(given[key]) for key in _NUMBERS if key in given}
        request = Request(
            name, "m", BLOCK_TOKENS * len(keys) + _TAIL_TOKENS, keys,
            objectives=Objectives(numbers.get("ttft"), numbers.get("tbt")),
            priority=given.get("class", "normal"),
            tenant=given.get("tenant", ""),
            output_tokens=int(numbers["answer"]) if "answer" in numbers else None,
            output_tokens_max=int(numbers["most"]) if "most" in numbers else None,
            urgent="urgent" in more,
            exclude=tuple(given["exclude"].split(",")) if "exclude" in given else (),
        )  # fmt: skip
        outcome = self.core.schedule(request, self.now)
        put_out = [_rejected(one) for one in self.core.put_out()]
        said = _decided(outcome) if isinstance(outcome, Decision) else _rejected(outcome)
        return "\n".join([said, *put_out])

    def _tell(self, name: str, kind: str, tokens: str = "0") -> str:
        self.core.observe(RequestEvent(name, kind, int(tokens)), self.now)
        return ""

    def _holds(self, holder: str, prompt: str) -> str:
        name, tier = holder.split("/")
        self.core.apply(Added(name, tier, keys_of(prompt)), self.now)
        return ""

    def _drops(self, holder: str, prompt: str) -> str:
        name, tier = holder.split("/")
        self.core.apply(Removed(name, tier, keys_of(prompt)), self.now)
        return ""

    def _alive(self, *names: str) -> str:
        for name in names:
            self.core.heartbeat(name, Load(), self.now)
        return ""

    def _drain(self, name: str) -> str:
        self.core.drain(name, self.now)
        return ""

    def _leave(self, name: str) -> str:
        self.core.remove(name, self.now)
        return ""

    def _pass(self) -> str:
        expired = self.core.tick(self.now)
        return "\n".join(f"{name} is taken for lost" for name in expired)

    def _load(self) -> str:
        """The reservations of all instances that have any."""
        lines = []
        for view in self.core.instances(self.now):
            row = self.core.cluster.row(view.spec.id)
            waits, runs = view.load["queued"], view.load["batch"]
            room = self.core.cluster.kv_used_tokens[row]
            if waits or runs or room:
                lines.append(f"{view.spec.id}: {waits:g} prefill, {runs:g} decode, {room} tokens")
        return "\n".join(lines) or "nothing is reserved"

    # -- observations ------------------------------------------------------------------------------

    def _changes(self) -> Iterator[str]:
        views = self.core.instances(self.now)
        seen = {view.spec.id: f"{view.role}, {view.status}" for view in views}
        for name, was in self._seen.items():
            if name not in seen:
                yield f"{name} is gone"
            elif seen[name] != was:
                yield f"{name}: {seen[name]}"
        self._seen = seen


def _pairs(*words: str) -> Iterator[tuple[str, str]]:
    for word in words:
        name, is_pair, value = word.partition("=")
        if is_pair:
            yield name, value


def _decided(one: Decision) -> str:
    where = one.prefill if one.prefill == one.decode else f"{one.prefill}, then {one.decode}"
    parts = [f"{one.cached_tokens} tokens cached", f"TTFT {one.predicted_ttft_s:.2f} s"]
    parts += [
        f"fetches {fetch.start}:{fetch.stop} from {fetch.source}/{fetch.tier}"
        for fetch in one.fetches
    ]
    parts += [f"or {' then '.join(dict.fromkeys(route))}" for route in one.alternatives]
    parts += one.degraded
    return f"{where}: {', '.join(parts)}"


def _rejected(one: Rejection) -> str:
    again = "" if one.retry_after_s is None else f"; again in {one.retry_after_s:.1f} s"
    return f"{one.request_id} is rejected ({one.reason}): {one.message}{again}"
