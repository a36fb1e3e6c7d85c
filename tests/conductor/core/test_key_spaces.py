"""Engines of one model whose blocks have different keys: each group is asked for its own."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tiffin.conductor.core.conductor import Conductor
from tiffin.conductor.core.settings import Settings, patched
from tiffin.conductor.cost.latency_profiles import DEFAULT
from tiffin.conductor.errors import Conflict
from tiffin.conductor.events.index_updates import Added
from tiffin.conductor.records import (
    Decision,
    InstanceSpec,
    Objectives,
    PromptKeys,
    Rejection,
    Request,
    RequestEvent,
    Role,
)

OLD = PromptKeys(tuple(bytes([n]) * 16 for n in range(4)), space="old")
NEW = PromptKeys(tuple(bytes([n]) * 16 for n in range(10, 14)), space="new")


def conductor(*instances: tuple[str, Role, str], **settings: object) -> Conductor:
    """Instances by id, role and key space, each at a node of its own."""
    core = Conductor(patched(Settings(), settings), dice=random.Random(0))
    for name, role, space in instances:
        spec = InstanceSpec(name, "m", role, DEFAULT, node=f"of-{name}", block_bytes=1 << 16)
        core.register(spec, 0.0)
        core.cluster.set_key_space(name, space)
    return core


def asked(name: str, tokens: int = 2100, **more: object) -> Request:
    return replace(
        Request(name, "m", tokens, OLD.blocks, key_space="old", others=(NEW,)),
        **more,  # type: ignore[arg-type]
    )


def placed(core: Conductor, request: Request, now: float = 0.0) -> Decision:
    outcome = core.schedule(request, now)
    assert isinstance(outcome, Decision), outcome
    return outcome


MIXED = (("a", Role.MIXED, "old"), ("b", Role.MIXED, "new"))


@pytest.mark.parametrize(("holder", "keys", "found"), [("a", OLD, "a"), ("b", NEW, "b")])
def test_a_prompt_goes_to_the_group_that_has_its_blocks(
    holder: str, keys: PromptKeys, found: str
) -> None:
    core = conductor(*MIXED)
    core.apply(Added(f"of-{holder}", "dram", keys.blocks), 0.0)
    decision = placed(core, asked("r"))
    assert (decision.prefill, decision.cached_tokens) == (found, 2048)
    flight = core.ledger.get("r")
    assert flight is not None
    assert flight.request.keys == keys.blocks
    assert placed(core, asked("r")) is decision  # the same answer to who asks again
    core.observe(RequestEvent("r", "prefill_done"), 1.0)
    core.observe(RequestEvent("r", "finished"), 2.0)
    assert placed(core, asked("again"), 3.0).prefill == found


def test_blocks_of_one_space_count_for_nobody_in_another() -> None:
    core = conductor(*MIXED)
    core.apply(Added("of-b", "dram", OLD.blocks), 0.0)  # an engine that was updated
    core.apply(Added("b", "hbm", OLD.blocks), 0.0)
    shut = placed(core, asked("r", exclude=("a",)))
    assert (shut.prefill, shut.cached_tokens, shut.fetches) == ("b", 0, ())
    at_its_own = placed(core, asked("s", exclude=("b",)))
    assert at_its_own.prefill == "a"
    assert at_its_own.fetches[0].source in ("of-b", "b")  # where they still are


def test_kv_is_handed_over_in_one_space_alone() -> None:
    core = conductor(*APART)
    found = ways(core, [asked(f"r{n}") for n in range(20)])
    assert found == {("p-old", "d-old"), ("p-new", "d-new")}
    core.drain("d-new", 0.0)
    assert ways(core, [asked(f"s{n}") for n in range(20)]) == {("p-old", "d-old")}


def test_a_group_that_would_be_late_leaves_the_request_to_another_one() -> None:
    core = conductor(*MIXED, admission={"mode": "predictive"})
    alone_s = placed(conductor(*MIXED), asked("alone")).predicted_ttft_s
    core.apply(Added("of-b", "dram", NEW.blocks), 0.0)
    hurried = Objectives(ttft_s=alone_s / 2)
    assert placed(core, asked("r", objectives=hurried)).prefill == "b"
    refused = core.schedule(asked("s", objectives=hurried, exclude=("b",)), 0.0)
    assert isinstance(refused, Rejection)
    assert refused.predicted_ttft_s is not None  # of the group that could, not "no instance"


def test_an_update_of_all_engines_one_by_one() -> None:
    """Prompts go on being found by the engines that still have the old keys."""
    names = [f"i{number}" for number in range(4)]
    core = conductor(*((name, Role.MIXED, "old") for name in names))
    core.apply(Added("of-i3", "dram", OLD.blocks), 0.0)
    for number, name in enumerate(names):
        core.cluster.set_key_space(name, "new")
        decision = placed(core, asked(f"r{number}"))
        assert decision.cached_tokens == (2048 if number < 3 else 0)
        core.observe(RequestEvent(f"r{number}", "cancelled"), 0.0)


def ways(core: Conductor, requests: list[Request]) -> set[tuple[str, str]]:
    return {(d.prefill, d.decode) for d in (placed(core, one) for one in requests)}


APART = (
    *(("p-old", Role.PREFILL, "old"), ("d-old", Role.DECODE, "old")),
    *(("p-new", Role.PREFILL, "new"), ("d-new", Role.DECODE, "new")),
)


def test_prompts_without_keys_stay_in_one_group_as_well() -> None:
    core = conductor(*APART)
    without = [Request(f"r{n}", "m", 2100) for n in range(40)]
    assert ways(core, without) == {("p-old", "d-old"), ("p-new", "d-new")}


def test_a_group_without_any_to_prefill_decodes_alone_if_nobody_else_can() -> None:
    core = conductor(APART[0], APART[3])
    assert ways(core, [asked("r")]) == {("d-new", "d-new")}
    core = conductor(*APART[1:])  # there are others who can
    assert ways(core, [asked(f"r{n}") for n in range(10)]) == {("p-new", "d-new")}


def test_round_robin_goes_round_in_each_group() -> None:
    six = [(f"{space}-{n}", Role.MIXED, space) for space in ("old", "new") for n in range(3)]
    core = conductor(*six, policy={"name": "round_robin"})
    found = [
        prefill for prefill, _ in (one for n in range(60) for one in ways(core, [asked(f"r{n}")]))
    ]
    assert {name: found.count(name) > 4 for name, *_ in six} == {name: True for name, *_ in six}


def test_it_is_the_same_request_when_other_spaces_have_come() -> None:
    core = conductor(*MIXED)
    decision = placed(core, asked("r"))
    alone = Request("r", "m", 2100, NEW.blocks, key_space="new")  # those of the old one are gone
    assert placed(core, alone) is decision
    third = PromptKeys((bytes([77]) * 16,) * 4, space="third")
    assert placed(core, alone.in_space(third)) is decision
    with pytest.raises(Conflict):
        core.schedule(replace(alone, keys=third.blocks), 0.0)


def test_an_idle_fleet_is_used_by_how_many_there_are_in_each_group() -> None:
    core = conductor(("a", Role.MIXED, "old"), *((f"b{n}", Role.MIXED, "new") for n in range(3)))
    found = []
    for number in range(200):
        found.append(placed(core, asked(f"r{number}"), float(number)).prefill)
        core.observe(RequestEvent(f"r{number}", "cancelled"), float(number))
    assert 20 < found.count("a") < 80


def test_keys_in_a_space_that_nobody_has_any_more_count_for_nobody() -> None:
    core = conductor(("a", Role.MIXED, "new"))
    core.apply(Added("of-a", "dram", OLD.blocks), 0.0)
    late = Request("r", "m", 2100, OLD.blocks, key_space="old")
    assert placed(core, late).cached_tokens == 0
    core.apply(Added("of-a", "dram", NEW.blocks), 0.0)
    assert placed(core, asked("s")).cached_tokens == 2048
