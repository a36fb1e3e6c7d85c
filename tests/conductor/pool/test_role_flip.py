"""Role flips: no request is cut, no role is left empty, and every failure ends in a known state."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiffin.conductor.errors import Conflict
from tiffin.conductor.pool.instance_orders import SaveBlocks
from tiffin.conductor.pool.role_flip import (
    ENDED,
    ENDED_MAX,
    Action,
    Assign,
    FleetMember,
    Flips,
    FlipSettings,
    SetRole,
    Step,
    Verify,
)
from tiffin.conductor.records import Role

P, D, M = Role.PREFILL, Role.DECODE, Role.MIXED


def fleet(**roles: Role) -> list[FleetMember]:
    return [FleetMember(name, role, ready=True) for name, role in roles.items()]


def changed(members: list[FleetMember], name: str, **change: object) -> list[FleetMember]:
    return [replace(m, **change) if m.id == name else m for m in members]  # type: ignore[arg-type]


def says(actions: list[Action]) -> list[str]:
    words = {Assign: "assign", SetRole: "set role", Verify: "verify"}
    return [
        f"{words[type(a)]} {a.instance} {a.on if isinstance(a, Assign) else a.role}"
        for a in actions
        if not isinstance(a, SaveBlocks)
    ]


THREE = fleet(p1=P, p2=P, d1=D)


class TestOneFlip:
    def test_the_whole_way(self) -> None:
        flips, members = Flips(), changed(THREE, "p1", requests=2)
        assert says(flips.begin("p1", D, members, 0.0, "more decode")) == ["assign p1 False"]
        members = changed(members, "p1", ready=False)
        assert flips.tick(members, 10.0) == []  # it still has two requests
        members = changed(members, "p1", requests=0)
        assert says(flips.tick(members, 20.0)) == ["set role p1 decode"]
        assert flips.tick(members, 21.0) == []
        assert says(flips.committed("p1", 25.0)) == ["verify p1 decode"]
        assert flips.tick(members, 26.0) == []
        assert says(flips.verified("p1", 30.0)) == ["assign p1 True"]
        (flip,) = flips.ended
        assert str(flip) == "p1: prefill -> decode, ready (more decode)"
        assert flip.until == 30.0
        assert flips.under_way == []

    def test_one_that_falls_silent_while_it_is_drained_goes_on_as_before(self) -> None:
        """As soon as it sends a heartbeat. It got no new role, so it still has the old one."""
        flips = Flips()
        flips.begin("p1", D, THREE, 0.0)
        silent = changed(THREE, "p1", ready=False, lost=True)
        assert says(flips.tick(silent, 1.0)) == ["assign p1 True"]
        (flip,) = flips.ended
        assert (flip.step, flip.why) == (Step.LOST, "it fell silent")

    def test_one_may_be_silent_while_it_takes_its_role(self) -> None:
        """It may have to reload its weights."""
        flips = Flips(FlipSettings(commit_s=60.0))
        flips.begin("p1", D, THREE, 0.0)
        assert says(flips.tick(THREE, 1.0)) == ["set role p1 decode"]
        silent = changed(THREE, "p1", ready=False, lost=True)
        assert flips.tick(silent, 30.0) == []
        assert flips.tick(silent, 61.0) == []
        assert [flip.step for flip in flips.ended] == [Step.FAILED]

    def test_requests_that_do_not_end_are_not_cut(self) -> None:
        flips, members = Flips(FlipSettings(drain_s=60.0)), changed(THREE, "p1", requests=1)
        flips.begin("p1", D, members, 0.0)
        assert flips.tick(members, 59.0) == []
        assert says(flips.tick(members, 60.0)) == ["assign p1 True"]
        assert flips.ended[0].step is Step.RETURNED
        assert "1 requests had not ended" in flips.ended[0].why

    def test_it_returns_when_it_is_needed(self) -> None:
        """The other prefill instance fails while this one drains."""
        flips, members = Flips(), changed(THREE, "p1", requests=1)
        flips.begin("p1", D, members, 0.0)
        members = changed(members, "p2", ready=False)
        assert says(flips.tick(members, 1.0)) == ["assign p1 True"]
        assert flips.ended[0].step is Step.RETURNED

    @pytest.mark.parametrize("at", ["committing", "verifying"])
    @pytest.mark.parametrize("how", ["error", "late", "gone"])
    def test_what_fails_after_draining_is_assigned_nothing(self, at: str, how: str) -> None:
        flips, members = Flips(), THREE
        flips.begin("p1", D, members, 0.0)
        flips.tick(members, 1.0)
        if at == "verifying":
            flips.committed("p1", 2.0)
        report = flips.committed if at == "committing" else flips.verified
        if how == "error":
            assert report("p1", 3.0, "no answer") == []
        elif how == "late":
            assert flips.tick(members, 1000.0) == []
        else:
            assert flips.tick([m for m in members if m.id != "p1"], 3.0) == []
        assert flips.ended[0].step is (Step.LOST if how == "gone" else Step.FAILED)
        assert report("p1", 1001.0) == []  # too late

    def test_blocks_are_saved_before_it_is_told(self) -> None:
        members = changed(THREE, "p1", saves=True)
        flips = Flips()
        flips.begin("p1", D, members, 0.0)
        assert flips.tick(members, 1.0) == [SaveBlocks("p1")]
        assert flips.tick(members, 2.0) == []
        assert says(flips.saved("p1", 3.0)) == ["set role p1 decode"]
        assert flips.saved("p1", 4.0) == [], "once"
        for spared, ways in ((members, FlipSettings(blocks="leave")), (THREE, None)):
            flips = Flips(ways)
            flips.begin("p1", D, spared, 0.0)
            assert says(flips.tick(spared, 1.0)) == ["set role p1 decode"]

    @pytest.mark.parametrize("how", ["error", "late", "needed", "silent", "drained"])
    def test_one_that_has_not_saved_its_blocks_keeps_its_role(self, how: str) -> None:
        members = changed(THREE, "p1", saves=True)
        flips = Flips(FlipSettings(save_s=30.0))
        flips.begin("p1", D, members, 0.0)
        flips.tick(members, 1.0)
        match how:
            case "error":
                actions = flips.saved("p1", 2.0, "3 are left")
            case "late":
                assert flips.tick(members, 30.0) == []
                actions = flips.tick(members, 31.0)
            case "needed":
                actions = flips.tick(changed(members, "p2", ready=False), 2.0)
            case "silent":
                actions = flips.tick(changed(members, "p1", lost=True), 2.0)
            case _:
                assert flips.cancel("p1", 2.0, "it is drained")
                actions = [Assign("p1", on=True)]
        assert says(actions) == ["assign p1 True"]
        assert flips.under_way == flips.saved("p1", 40.0) == []
        assert flips.ended[0].step is (Step.LOST if how == "silent" else Step.RETURNED)

    def test_one_that_was_not_told_can_be_given_up(self) -> None:
        flips = Flips()
        flips.begin("p1", D, THREE, 0.0)
        assert flips.cancel("p1", 1.0, "it is drained")
        assert flips.under_way == flips.tick(THREE, 2.0) == []
        assert str(flips.ended[0]) == "p1: prefill -> decode, returned (it is drained)"
        assert not flips.cancel("p1", 3.0, "twice")

    def test_one_that_was_told_goes_on(self) -> None:
        """If the flip were cancelled now, the instance's role would be unknown."""
        flips = Flips()
        flips.begin("p1", D, THREE, 0.0)
        assert says(flips.tick(THREE, 1.0)) == ["set role p1 decode"]
        assert not flips.cancel("p1", 2.0, "it is drained")
        assert says(flips.committed("p1", 3.0)) == ["verify p1 decode"]

    def test_reports_out_of_order_are_ignored(self) -> None:
        flips = Flips()
        assert flips.committed("p1", 0.0) == flips.verified("p1", 0.0) == []
        flips.begin("p1", D, THREE, 0.0)
        assert flips.committed("p1", 1.0) == flips.verified("p1", 1.0) == []
        assert flips.under_way[0].step is Step.DRAINING


class TestRefusals:
    @pytest.mark.parametrize(
        ("instance", "new", "members", "why"),
        [
            ("nobody", D, THREE, "not ready"),
            ("p1", D, changed(THREE, "p1", ready=False), "not ready"),
            ("p1", P, THREE, "already"),
            ("d1", P, THREE, "0 could decode without it, 1 have to"),
            ("p1", D, fleet(p1=P, d1=D), "0 could prefill without it"),
            ("p1", D, fleet(p1=P, m1=M), ""),  # the mixed one does both
            ("p1", D, fleet(p1=P, p2=P), ""),  # no instance decodes before this flip
            ("m1", P, fleet(m1=M, p1=P), "0 could decode"),
        ],
        ids=str,
    )
    def test_minimums(self, instance: str, new: Role, members: list[FleetMember], why: str) -> None:
        flips = Flips()
        assert why in flips.may_begin(instance, new, members)
        if why:
            with pytest.raises(Conflict, match="no flip"):
                flips.begin(instance, new, members, 0.0)
        else:
            assert flips.may_begin(instance, new, members) == ""

    def test_one_at_a_time(self) -> None:
        flips, members = Flips(), fleet(p1=P, p2=P, p3=P, d1=D)
        flips.begin("p1", D, members, 0.0)
        assert "already" in flips.may_begin("p1", D, members)
        assert "changing their roles" in flips.may_begin("p2", D, members)

    def test_what_has_ended_is_remembered_for_a_while(self) -> None:
        flips = Flips()
        for i in range(ENDED_MAX + 5):
            flips.begin("p1", D, THREE, float(i))
            flips.tick([], float(i))
        assert len(flips.ended) == ENDED_MAX
        assert flips.ended[-1].began_at == ENDED_MAX + 4.0


class TestProperties:
    @given(
        seed=st.integers(0, 1 << 32),
        least=st.tuples(st.integers(0, 2), st.integers(0, 2)),
        at_once=st.integers(1, 3),
    )
    @settings(max_examples=60)
    def test_no_flip_takes_a_role_below_its_minimum(
        self, seed: int, least: tuple[int, int], at_once: int
    ) -> None:
        """Random flips, in a fleet where only flips fail: a flip never reduces the instances of a
        role that get requests below the minimum."""
        dice = random.Random(seed)
        flips = Flips(FlipSettings(prefill_min=least[0], decode_min=least[1], at_once=at_once))
        names = [f"i{i}" for i in range(6)]
        roles = {name: dice.choice([P, D, M]) for name in names}
        on = dict.fromkeys(names, True)
        began = _able(roles, on)
        for second in range(120):
            now = float(second)
            members = [
                FleetMember(n, roles[n], on[n], dice.randint(0, 2), saves=n in names[:3])
                for n in names
            ]
            actions: list[Action] = []
            name, new = dice.choice(names), dice.choice([P, D])
            if not flips.may_begin(name, new, members):
                actions += flips.begin(name, new, members, now)
            actions += flips.tick(members, now)
            while actions:
                action = actions.pop(0)
                error = dice.choice(["", "", "broken"])
                if isinstance(action, Assign):
                    on[action.instance] = action.on
                elif isinstance(action, SaveBlocks):
                    actions += flips.saved(action.instance, now, error)
                elif isinstance(action, SetRole):
                    if not error:
                        roles[action.instance] = action.role
                    actions += flips.committed(action.instance, now, error)
                else:
                    actions += flips.verified(action.instance, now, error)
            for able, before, minimum in zip(_able(roles, on), began, least, strict=True):
                assert able >= min(before, minimum)
        assert all(flip.step in ENDED for flip in flips.ended)


def _able(roles: dict[str, Role], on: dict[str, bool]) -> tuple[int, int]:
    ready = [roles[name] for name in roles if on[name]]
    return sum(role is not D for role in ready), sum(role is not P for role in ready)
