"""Plans: which flips to make, why, and above all when to make none."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plannersupport import INTERVAL_S, LATENCY, D, P, fleet, interval, planner

from tiffin.conductor.errors import InvalidRequest
from tiffin.conductor.pool.capacity_model import Goals, Workload, capacity, fleet_rate
from tiffin.conductor.pool.demand_forecast import PREDICTORS
from tiffin.conductor.pool.planner import FleetPlan, Meter, ObservedDemand, Planner, PlannerSettings
from tiffin.conductor.pool.prompt_sums import PromptSums
from tiffin.conductor.pool.role_flip import Assign, FleetMember, FlipSettings, SetRole, Verify


def carry_out(
    one: Planner, plan: FleetPlan | None, members: list[FleetMember], now: float
) -> list[FleetMember]:
    """The fleet after a flip that succeeds within the interval."""
    actions = list(plan.actions) if plan else []
    by_id = {m.id: m for m in members}
    while actions:
        action = actions.pop(0)
        member = by_id[action.instance]
        change: dict[str, object] = {"role": member.role, "ready": member.ready}
        if isinstance(action, Assign):
            change["ready"] = action.on
        elif isinstance(action, SetRole):
            change["role"] = action.role
            actions += one.flips.committed(action.instance, now)
        elif isinstance(action, Verify):
            actions += one.flips.verified(action.instance, now)
        by_id[member.id] = FleetMember(
            member.id,
            change["role"],
            change["ready"],
            latency=LATENCY,
            batch_max=64,  # type: ignore[arg-type]
        )
        actions += one.flips.tick(list(by_id.values()), now)
    return list(by_id.values())


class TestScenarios:
    def test_too_little_prefill(self) -> None:
        """3 requests/s, 2:4. Prefill serves 1.8, decode 40: after the third interval that says so
        one instance is flipped, after the cooldown another, and then it is enough."""
        one, members = planner(), fleet(2, 4)
        story = []
        for minute in range(20):
            now = minute * INTERVAL_S
            one.observe(interval(3.0))
            plan = one.plan(members, now)
            assert plan is not None
            story.append(
                f"{minute} min  {plan.prefill}:{plan.decode} load {plan.load:.2f} "
                + (f"{plan.flip[0]} to {plan.flip[1]} " if plan.flip else "")
                + (plan.held_back or ("flip" if plan.flip_now else ""))
            )
            members = carry_out(one, plan, members, now)
        assert story[:4] == [
            "0 min  2:4 load 1.67 i02 to prefill asked for 1 of 3 times",
            "1 min  2:4 load 1.67 i02 to prefill asked for 2 of 3 times",
            "2 min  2:4 load 1.67 i02 to prefill flip",
            "3 min  3:3 load 1.11 i03 to prefill asked for 1 of 3 times",
        ]
        assert story[6].endswith("the last flip was too short ago")
        assert story[7].endswith("flip")
        assert story[8] == "8 min  4:2 load 0.83 i04 to prefill asked for 1 of 3 times"
        assert story[12].endswith("flip")
        assert story[13:] == [f"{m} min  5:1 load 0.67 " for m in range(13, 20)]

    def test_too_little_decode(self) -> None:
        """Answers of 200 tokens: decode serves 0.5 requests/s per instance, prefill 0.9."""
        one, members = planner(), fleet(5, 1)
        for minute in range(3):
            one.observe(interval(2.0, output=200.0))
            plan = one.plan(members, minute * INTERVAL_S)
        assert plan is not None
        assert plan.flip == ("i00", D)
        assert plan.flip_now
        assert plan.best_prefill == 2

    def test_advice_says_the_same_and_does_nothing(self) -> None:
        act, advise = planner(), planner(mode="advise")
        for minute in range(5):
            plans = []
            for one in (act, advise):
                one.observe(interval(3.0))
                plans.append(one.plan(fleet(2, 4), minute * INTERVAL_S))
            if minute == 2:
                done, said = plans
                assert done is not None
                assert said is not None
                assert done.flip == said.flip
                assert done.reasons == said.reasons
                assert (done.flip_now, said.flip_now) == (True, False)
                assert said.held_back == "only advice is asked for"
                assert said.actions == ()
                assert advise.flips.under_way == []

    def test_every_number_is_explained(self) -> None:
        one = planner(mode="advise")
        one.observe(interval(3.0))
        plan = one.plan(fleet(2, 4), 0.0)
        assert plan is not None
        text = str(plan)
        assert "P:D 2:4, best 5:1" in text
        assert "would flip (asked for 1 of 3 times): i02 to prefill" in text
        assert "rate = 3 requests/s: constant over 1 intervals" in text
        assert "prefill = 1 s: one prompt, x 1" in text
        assert "decode_rate = 10 requests/s: one instance at 0.1 s between tokens" in text
        assert "load = 1.667 : expected over served; flips begin at 0.8" in text

    def test_an_objective_that_even_an_idle_instance_misses_is_said(self) -> None:
        one = planner(ttft_s=0.5)
        one.observe(interval(1.0))
        assert "an idle instance misses it" in str(one.plan(fleet(1, 1), 0.0))

    def test_the_instance_with_the_fewest_requests_is_flipped(self) -> None:
        one = planner(confirm=1)
        members = [
            FleetMember(m.id, m.role, True, requests, LATENCY, batch_max=64)
            for m, requests in zip(fleet(2, 4), [0, 0, 5, 1, 3, 1], strict=True)
        ]
        one.observe(interval(3.0))
        plan = one.plan(members, 0.0)
        assert plan is not None
        assert plan.flip == ("i03", P)

    def test_nothing_to_plan_by(self) -> None:
        one = planner()
        assert one.plan(fleet(1, 1), 0.0) is None  # no interval yet
        one.observe(interval(0.0))
        assert one.plan(fleet(1, 1), 0.0) is None  # no request yet
        one.observe(interval(1.0))
        assert one.plan([], 0.0) is None
        assert planner(mode="off").plan(fleet(1, 1), 0.0) is None

    def test_an_idle_hour_forgets_no_request(self) -> None:
        one = planner(mode="advise")
        one.observe(interval(3.0))
        one.observe(interval(0.0))
        plan = one.plan(fleet(2, 4), 0.0)
        assert plan is not None
        assert plan.load == 0.0
        assert "needs no flip" in plan.held_back

    def test_a_predictor_that_sees_growth_plans_for_it(self) -> None:
        loads = []
        for predictor in ("constant", "linear"):
            one = planner(predictor=predictor)
            for rate in (1.0, 1.5, 2.0, 2.5):
                one.observe(interval(rate))
            plan = one.plan(fleet(4, 2), 0.0)
            assert plan is not None
            loads.append(plan.load)
        assert loads[1] == pytest.approx(loads[0] * 3.0 / 2.5, rel=0.01)


class TestScale:
    def test_as_many_as_are_needed_at_the_wanted_load(self) -> None:
        """4 requests/s: 4 / 0.9 / 0.8 = 5.6 prefill, 0.5 decode."""
        one = planner()
        one.observe(interval(4.0))
        plan = one.plan(fleet(2, 2), 0.0)
        assert plan is not None
        assert plan.instances_wanted == 6 + 1

    def test_fewer_only_after_a_while(self) -> None:
        one = planner()
        wanted = []
        for minute in range(4):
            one.observe(interval(0.5))
            plan = one.plan(fleet(4, 4), minute * INTERVAL_S)
            assert plan is not None
            wanted.append(plan.instances_wanted)
        assert wanted == [8, 8, 2, 2]

    def test_fewer_only_as_far_as_all_of_these_intervals_agree(self) -> None:
        """One quiet minute after two in which six were enough: not two instances, but six."""
        one = planner()
        for rate in (3.4, 3.4, 0.5):
            one.observe(interval(rate))
            plan = one.plan(fleet(6, 2), 0.0)
        assert plan is not None
        assert plan.instances_wanted == 5 + 1

    def test_mixed_ones_share_their_time(self) -> None:
        """One request per second is 1.11 of prefill and 0.1 of decode; at 0.8, 1.5 instances."""
        one = planner()
        one.observe(interval(1.0))
        plan = one.plan(fleet(0, 0, 1), 0.0)
        assert plan is not None
        assert (plan.instances_wanted, plan.flip) == (2, None)

    @given(
        rate=st.floats(0.1, 50),
        budget=st.integers(1, 12),
        least=st.tuples(st.integers(0, 3), st.integers(0, 3)),
        counts=st.tuples(st.integers(0, 6), st.integers(0, 6), st.integers(0, 3)),
    )
    @settings(max_examples=60)
    def test_never_above_the_budget_nor_below_what_roles_keep(
        self,
        rate: float,
        budget: int,
        least: tuple[int, int],
        counts: tuple[int, int, int],
    ) -> None:
        one = planner(
            instances_max=budget, flips=FlipSettings(prefill_min=least[0], decode_min=least[1])
        )
        one.observe(interval(rate))
        plan = one.plan(fleet(*counts), 0.0)
        if plan is not None:
            assert plan.instances_wanted <= budget
            assert plan.instances_wanted >= min(budget, max(least))


class TestStability:
    @pytest.mark.parametrize("seed", range(5))
    def test_noise_around_the_threshold_does_not_flap(self, seed: int) -> None:
        """For two days the load is at the threshold, plus or minus a third, and answers vary as
        much. The fleet is at its best split within a margin: no flip would gain anything, so there
        is none."""
        dice = random.Random(seed)
        one, members = planner(cooldown_s=0.0, confirm=2), fleet(5, 1)
        flips = 0
        for minute in range(2880):
            now = minute * INTERVAL_S
            one.observe(interval(3.6 * dice.uniform(2 / 3, 4 / 3), output=dice.uniform(8, 14)))
            plan = one.plan(members, now)
            flips += bool(plan and plan.flip_now)
            members = carry_out(one, plan, members, now)
        assert flips == 0

    @pytest.mark.parametrize("seed", range(3))
    def test_when_both_roles_are_about_full_it_settles(self, seed: int) -> None:
        at = _flips_of_a_shift(seed, margin=0.2)
        assert 1 <= len(at) <= 3
        assert at[-1] < 20

    def test_without_a_margin_it_would_not(self) -> None:
        """Shows that the test above can fail."""
        assert len(_flips_of_a_shift(0, margin=0.0)) > 10

    @given(seed=st.integers(0, 1 << 32))
    @settings(max_examples=20)
    def test_whatever_comes_roles_keep_their_minimum(self, seed: int) -> None:
        dice = random.Random(seed)
        least = dice.randint(1, 2), dice.randint(1, 2)
        own = FlipSettings(prefill_min=least[0], decode_min=least[1])
        one = planner(cooldown_s=0.0, confirm=1, flips=own)
        members = fleet(dice.randint(2, 4), dice.randint(2, 4))
        for minute in range(60):
            output = dice.choice([1.0, 10.0, 1000.0])
            one.observe(interval(dice.choice([0.0, 1.0, 20.0]), output=output))
            members = carry_out(one, one.plan(members, minute * 60.0), members, minute * 60.0)
            roles = [m.role for m in members if m.ready]
            assert roles.count(P) >= least[0]
            assert roles.count(D) >= least[1]


def _flips_of_a_shift(seed: int, margin: float) -> list[int]:
    """The times of flips in a fleet of six that begins as 1:5. With answers of 150 to 185 tokens
    3:3 and 2:4 serve about the same."""
    dice = random.Random(seed)
    one, members = planner(cooldown_s=0.0, confirm=1, margin=margin, flip_above=0.5), fleet(1, 5)
    at = []
    for minute in range(500):
        one.observe(interval(dice.uniform(2, 4), output=dice.uniform(150, 185)))
        plan = one.plan(members, minute * INTERVAL_S)
        if plan and plan.flip_now:
            at.append(minute)
        members = carry_out(one, plan, members, minute * INTERVAL_S)
    return at


@pytest.mark.parametrize(
    "error", [InvalidRequest("no library"), np.linalg.LinAlgError("singular"), ZeroDivisionError()]
)
def test_where_a_predictor_fails_the_last_interval_stands_in(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fails(series: object, season: int) -> float:
        raise error

    one, members = planner(predictor="holt-winters"), fleet(2, 2)
    one.observe(interval(1.0))
    with monkeypatch.context() as patch:
        patch.setitem(PREDICTORS, "holt-winters", fails)
        plan = one.plan(members, 60.0)
    assert plan is not None
    rate = next(reason for reason in plan.reasons if reason.name == "rate")
    assert rate.value == pytest.approx(1.0)
    assert one.forecast_error in (str(error), "ZeroDivisionError")
    assert rate.why == f"the last interval; holt-winters failed: {one.forecast_error}"
    one.configure(PlannerSettings(predictor="linear"))
    one.observe(interval(2.0))
    assert one.plan(members, 120.0) is not None
    assert one.forecast_error == ""


class TestAThousandInstances:
    """Each is calibrated differently, so each has a capacity of its own."""

    @staticmethod
    def members(count: int) -> list[FleetMember]:
        speeds = random.Random(1)
        return [
            replace(m, latency=tuple(speeds.uniform(1, 2) * one for one in LATENCY))
            for m in fleet(count // 2, count // 2)
        ]

    def test_they_are_planned_in_pieces(self) -> None:
        """So that no decision waits for a whole plan."""
        one, members = planner(mode="advise"), self.members(1000)
        one.observe(interval(100.0))
        pieces = sum(1 for _ in one.planning(members, 60.0))
        assert pieces > len(members) / 50
        one.observe(interval(100.0))
        assert one.plan(members, 120.0) is not None

    def test_the_best_flip_is_that_of_all(self) -> None:
        members = self.members(20)
        one = planner(mode="advise")
        one.observe(interval(20.0))
        plan = one.plan(members, 60.0)
        assert plan is not None
        assert plan.flip is not None
        moments = PromptSums.of(1000, 1000).moments()
        work, goals = Workload(1000, 1000, 10, moments=moments), Goals(100.0, 0.1)

        def served(flipped: str = "") -> float:
            other = {P: D, D: P}
            return fleet_rate(
                (other[m.role] if m.id == flipped else m.role, capacity(m, work, goals))
                for m in members
            )

        best = max(members, key=lambda m: served(m.id))
        assert plan.flip[0] == best.id
        assert plan.serves_rate == pytest.approx(served())
        (after,) = [one.value for one in plan.reasons if one.name == "serves_after_flip"]
        assert after == pytest.approx(served(best.id))


class TestMeter:
    def test_it_adds_up_and_begins_anew(self) -> None:
        meter = Meter(10.0)
        meter.came(PromptSums.of(100, 60)), meter.came(PromptSums.of(300, 20)), meter.answered(7)
        squares = 100.0**2 - 40**2, 300.0**2 - 280**2
        prompts = PromptSums(
            2, 400, 80, sum(squares), 4000, 60 * squares[0] + 20 * squares[1],
            squares[0] ** 2 + squares[1] ** 2,
        )  # fmt: skip
        assert meter.close(40.0, prefill_factor=1.5) == ObservedDemand(
            30.0, prompts, 7.0, 1, 1.5, 1.0
        )
        assert meter.close(50.0) == ObservedDemand(10.0)

    def test_a_long_tail_takes_more_than_its_mean(self) -> None:
        """One prompt in ten of 100,000 tokens, the others of 1,000: a plan for the mean prompt of
        10,900 tokens believes that an instance serves nearly twice of what it does."""
        quadratic = (0.1, 1e-4, 1e-8, 0.0, 0.01, 0.0)
        rates = []
        for prompts in ([1000] * 9 + [100_000], [10_900] * 10):
            one, meter = planner(mode="advise"), Meter(0.0)
            for tokens in prompts:
                meter.came(PromptSums.of(tokens, tokens)), meter.answered(10)
            one.observe(meter.close(1000.0))
            plan = one.plan([replace(m, latency=quadratic) for m in fleet(1, 9)], 1000.0)
            assert plan is not None
            rates.append(plan.serves_rate)
        total_s = 10 * 0.1 + 1e-4 * 109_000 + 1e-8 * (9 * 1000**2 + 100_000**2)
        assert rates[0] < 0.9 * 10 / total_s, "more cannot be served, whatever the queue does"
        assert rates[1] > 1.5 * rates[0]

    def test_factors_make_instances_slower(self) -> None:
        rates = []
        for factor in (1.0, 2.0):
            one = planner(mode="advise")
            meter = Meter(0.0)
            meter.came(PromptSums.of(1000, 1000)), meter.answered(10)
            one.observe(meter.close(1.0, prefill_factor=factor, decode_factor=factor))
            plan = one.plan(fleet(1, 1), 0.0)
            assert plan is not None
            rates.append(plan.serves_rate)
        assert rates[1] == pytest.approx(rates[0] / 2, rel=0.01)

    def test_settings_change_live(self) -> None:
        one = planner()
        for _ in range(5):
            one.observe(interval(3.0))
        one.configure(PlannerSettings(window=2, mode="advise"))
        plan = one.plan(fleet(2, 4), 0.0)
        assert plan is not None
        assert plan.mode == "advise"
        assert "over 2 intervals" in str(plan)

    def test_an_unknown_predictor_is_named_and_stood_in_for(self) -> None:
        one = planner(predictor="oracle")
        one.observe(interval(1.0))
        assert one.plan(fleet(1, 1), 0.0) is not None
        assert "'oracle'" in one.forecast_error
