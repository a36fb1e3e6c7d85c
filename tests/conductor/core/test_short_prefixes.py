"""Prefixes shorter than a block: what a decision knows of them, and the hits that follow."""

from __future__ import annotations

import random
from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiffin.conductor.core import Conductor
from tiffin.conductor.core.settings import Settings, patched
from tiffin.conductor.cost.latency_profiles import DEFAULT
from tiffin.conductor.events.block_regrouper import EngineChain, EngineRemoved, EngineStored, Folder
from tiffin.conductor.events.index_updates import Added, Cleared, Removed
from tiffin.conductor.events.routed_blocks import PREDICTED_S, ROUTED_S
from tiffin.conductor.records import Decision, InstanceSpec, Load, Request, RequestEvent, Role
from tiffin.conductor.state.part_keys import PART_TOKENS, part_keys
from tiffin.kvstore import KVSchema

SCHEMA = KVSchema.gqa(model="m", layers=1, kv_heads=1, head_dim=8, dtype="bfloat16")
# Those that look at the cache at all.
BY_CACHE = (
    *("kvcache_centric", "algorithm_1", "kv_cost", "prefix_aware", "preble"),
    "weighted_factors",
)


def conductor(instances: int, policy: str = "kvcache_centric", **spec: int) -> Conductor:
    core = Conductor(patched(Settings(), {"policy": {"name": policy}}), dice=random.Random(0))
    for number in range(instances):
        core.register(InstanceSpec(f"i{number}", "m", Role.MIXED, DEFAULT, **spec), 0.0)
    return core


def asked(name: str, tokens: list[int], *, parts: bool = True) -> Request:
    prefix = SCHEMA.prefix(tokens)
    named = part_keys(prefix) if parts else ()
    return Request(name, "m", len(tokens), prefix.keys, part_keys=named)


def placed(core: Conductor, request: Request, now: float) -> Decision:
    decision = core.schedule(request, now)
    assert isinstance(decision, Decision)
    return decision


def text(dice: random.Random, tokens: int) -> list[int]:
    return dice.choices(range(100_000), k=tokens)


# -- one decision ----------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_cached_tokens_are_those_of_a_look_up_of_each_part(seed: int) -> None:
    """The index against sets of keys, of any prompts, instances and sizes of their blocks."""
    dice = random.Random(seed)
    core, having = Conductor(), list[set[bytes]]()
    prompts = [text(dice, 40), text(dice, 600)]
    prompts += [prompts[1][: dice.randrange(600)] + text(dice, dice.randrange(1, 300))]
    for number in range(20):
        size = dice.choice((1, 16, 16, 64, 128))
        spec = InstanceSpec(f"i{number}", "m", Role.MIXED, DEFAULT, part_tokens=size)
        core.register(spec, 0.0)
        having.append(set())
    for _ in range(40):
        number, keys = dice.randrange(20), list(asked("r", dice.choice(prompts)).part_keys)
        some = keys[: dice.randrange(len(keys) + 1)]
        if dice.random() < 0.2:
            some = keys[dice.randrange(len(keys) + 1) :]
            core.apply(Removed(f"i{number}", "hbm", some, parts=True), 0.0)
            having[number] -= set(some)
        elif dice.random() < 0.1:
            core.apply(Cleared(f"i{number}"), 0.0)
            having[number].clear()
        else:
            core.apply(Added(f"i{number}", "hbm", some, parts=True), 0.0)
            having[number] |= set(some)
    parts = core._parts
    rows = parts.view.rows("m", prefill=True)
    if dice.random() < 0.3:
        rows = rows[::3].copy()
    request = asked("r", dice.choice(prompts))
    question = parts.view.question(
        request, rows, core.transfers, core.computing, core.queues, core.settings, parts.dice, 0.0
    )
    expected = []
    for row in rows.tolist():
        usable = request.part_keys[: (request.prompt_tokens - 1) // 16]
        count = next((n for n, key in enumerate(usable) if key not in having[row]), len(usable))
        size = core.cluster.spec(f"i{row}").part_tokens
        expected.append(16 * count // size * size)
    found = question.cached_part_tokens
    assert (np.zeros(len(rows), int) if found is None else found).tolist() == expected


@pytest.mark.parametrize("policy", BY_CACHE)
def test_two_prompts_with_a_system_prompt_of_200_tokens_go_to_one_instance(policy: str) -> None:
    core, dice = conductor(8, policy), random.Random(1)
    system = text(dice, 200)
    known = asked("known", system + text(dice, 60)).part_keys
    core.apply(Added("i5", "hbm", known, parts=True), 0.0)
    request = asked("r", system + text(dice, 100))
    before = placed(conductor(8, policy), request, 0.0)
    decision = placed(core, request, 0.0)
    assert (decision.prefill, decision.cached_tokens, decision.available_tokens) == ("i5", 192, 192)
    assert decision.predicted_ttft_s < before.predicted_ttft_s
    assert before.cached_tokens == before.available_tokens == 0
    flight = core.ledger.get("r")
    assert flight is not None
    assert flight.prefill_tokens == 108
    shown = {one.instance: one.terms["cached_part_tokens"] for one in decision.candidates}
    assert shown == {f"i{number}": 192.0 * (number == 5) for number in range(8)}


def test_blocks_count_more_than_parts_and_parts_where_there_are_no_blocks() -> None:
    core, dice = conductor(3), random.Random(2)
    prompt = text(dice, 1200)
    request = asked("r", prompt)
    core.apply(Added("i0", "hbm", request.part_keys, parts=True), 0.0)
    assert placed(core, request, 0.0).cached_tokens == 31 * PART_TOKENS
    core.apply(Added("i1", "hbm", request.keys), 0.0)
    decision = placed(core, asked("r2", prompt), 0.0)
    assert (decision.prefill, decision.cached_tokens) == ("i1", 1024)


def test_parts_behind_the_last_block_that_is_held_count_where_that_is() -> None:
    """A conversation's next prompt: the engine has the last one to within its own block."""
    core, dice = conductor(3, part_tokens=128), random.Random(4)
    prompt = text(dice, 2000)
    prefix = SCHEMA.prefix(prompt)
    parts = part_keys(prefix, after=2)
    for name, blocks in (("i0", 2), ("i1", 1)):
        core.apply(Added(name, "hbm", prefix.keys[:blocks]), 0.0)
        core.apply(Added(name, "hbm", parts[:20], parts=True), 0.0)
    request = Request("r", "m", len(prompt), prefix.keys, part_keys=parts, parts_after=2)
    decision = placed(core, request, 0.0)
    assert (decision.prefill, decision.cached_tokens) == ("i0", 1024 + 256)
    assert decision.available_tokens == 1024 + 256
    shown = {one.instance: one.terms["cached_part_tokens"] for one in decision.candidates}
    assert shown == {"i0": 1280.0, "i1": 0.0, "i2": 0.0}
    flight = core.ledger.get("r")
    assert flight is not None
    assert (flight.prefill_tokens, flight.reported_tokens) == (720, 1280)
    core.observe(RequestEvent("r", "prefill_done"), 1.0)
    assert core.parts.index.match(parts).runs[0].stop == 20, "no parts are guessed there"


def test_a_larger_block_of_the_engine_is_reused_as_a_whole() -> None:
    core, dice = conductor(1, part_tokens=128), random.Random(3)
    prompt = text(dice, 300)
    request = asked("r", prompt)
    core.apply(Added("i0", "hbm", request.part_keys[:12], parts=True), 0.0)
    assert placed(core, request, 0.0).cached_tokens == 128


def test_the_part_with_the_last_token_is_computed() -> None:
    core, dice = conductor(1), random.Random(4)
    request = asked("r", text(dice, 64))
    core.apply(Added("i0", "hbm", request.part_keys, parts=True), 0.0)
    assert placed(core, request, 0.0).cached_tokens == 48


@pytest.mark.parametrize(("speaks", "lasts_s"), [(False, ROUTED_S), (True, PREDICTED_S)])
def test_what_was_computed_is_assumed_to_be_there_for_a_while(speaks: bool, lasts_s: float) -> None:
    core, dice = conductor(4), random.Random(5)
    system = text(dice, 200)
    if speaks:
        for number in range(4):
            core.apply(Cleared(f"i{number}"), 0.0)
    decision = placed(core, asked("r1", system + text(dice, 50)), 0.0)
    core.observe(RequestEvent("r1", "finished"), 1.0)
    later = placed(core, asked("r2", system + text(dice, 50)), 2.0)
    assert (later.prefill, later.cached_tokens) == (decision.prefill, 192)
    core.observe(RequestEvent("r2", "cancelled"), 2.0)
    for number in range(4):
        core.heartbeat(f"i{number}", Load(), 1.0 + lasts_s)
    core.tick(1.0 + lasts_s)
    assert placed(core, asked("r3", system + text(dice, 50)), 1.0 + lasts_s).cached_tokens == 0


def test_an_instance_that_leaves_takes_its_parts_along() -> None:
    core, dice = conductor(2), random.Random(6)
    request = asked("r", text(dice, 300))
    core.apply(Added("i0", "hbm", request.part_keys, parts=True), 0.0)
    core.remove("i0", 0.0)
    assert len(core.parts.index) == 0
    assert placed(core, request, 0.0).cached_tokens == 0


# -- closed: engines with caches of their own ------------------------------------------------------


@dataclass
class Engine:
    """A prefix cache as vLLM's: blocks of 16 tokens, the least recently used one leaves, of one
    prompt the last one first. What it stores and removes it publishes."""

    name: str
    core: Conductor
    blocks_max: int
    folder: Folder = field(default_factory=lambda: Folder(EngineChain.of(SCHEMA)))
    cache: OrderedDict[int, None] = field(default_factory=OrderedDict)

    def serve(self, tokens: list[int]) -> int:
        """Compute a prompt; returns how many of its tokens were cached."""
        names = [hash(tuple(tokens[: at + 16])) for at in range(0, len(tokens) - 15, 16)]
        usable = names[: (len(tokens) - 1) // 16]
        hits = next((n for n, name in enumerate(usable) if name not in self.cache), len(usable))
        start = next((n for n, name in enumerate(names) if name not in self.cache), len(names))
        for name in reversed(names):
            self.cache[name] = None
            self.cache.move_to_end(name)
        gone = [self.cache.popitem(last=False)[0] for _ in range(len(self.cache) - self.blocks_max)]
        for change in self.folder.removed(EngineRemoved(gone)):
            self.core.apply(Removed(self.name, change.tier, change.keys, parts=change.parts), 0.0)
        data = np.array(tokens[16 * start : 16 * len(names)], "<u4").tobytes()
        parent = names[start - 1] if start else None
        for change in self.folder.stored(EngineStored(names[start:], parent, data, 16), 0.0):
            self.core.apply(Added(self.name, change.tier, change.keys, parts=change.parts), 0.0)
        return 16 * hits


def hit_rates(policy: str, *, parts: bool) -> tuple[float, float]:
    """Shares of the prompts' tokens that were predicted to be cached, and that were: of 600 short
    requests with 24 system prompts of 200 tokens, on 4 engines with room for 8 of them each."""
    dice, core = random.Random(7), conductor(4, policy)
    systems = [text(dice, 200) for _ in range(24)]
    engines = {name: Engine(name, core, 8 * 20) for name in core.cluster.names}
    predicted = actual = total = 0
    for number in range(600):
        tokens, now = dice.choice(systems) + text(dice, dice.randrange(10, 120)), 0.2 * number
        decision = placed(core, asked(f"r{number}", tokens, parts=parts), now)
        predicted += decision.cached_tokens
        actual += engines[decision.prefill].serve(tokens)
        total += len(tokens)
        core.observe(RequestEvent(f"r{number}", "finished"), now + 0.1)
        if number % 10 == 0:
            for name in engines:
                core.heartbeat(name, Load(), now)
    return predicted / total, actual / total


def test_short_system_prompts_are_found_where_they_are() -> None:
    blind, blind_hits = hit_rates("kvcache_centric", parts=False)
    seen, hits = hit_rates("kvcache_centric", parts=True)
    assert blind == 0.0
    assert seen == pytest.approx(hits, abs=0.01)  # what is predicted is what the engines find
    assert blind_hits < 0.35  # 8 of 24 system prompts
    assert hits > 0.65  # 192 of 265 tokens, once they are spread
