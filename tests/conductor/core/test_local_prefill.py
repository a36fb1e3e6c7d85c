"""Whether the instance that decodes a prompt prefills it as well: by predicted seconds."""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest
from coresupport import BLOCK, PROFILE, conductor, keys, prompt, spec, tell

from tiffin.conductor.cost.latency_profiles import load
from tiffin.conductor.events.index_updates import Added
from tiffin.conductor.records import Decision, Load, Objectives, Request, Role

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tiffin.conductor.core import Conductor

BLOCK_BYTES = 160 << 20  # as `spec` says
SHORT_TOKENS = 200  # the rule prefills it where it is decoded


def decided(made: Conductor, request: Request, now: float = 1.0) -> Decision:
    decision = made.schedule(request, now)
    assert isinstance(decision, Decision)
    return decision


def pair(form: str = "predicted") -> Conductor:
    """An instance that prefills, and one that does both."""
    return conductor(spec("p", Role.PREFILL), spec("both"), disaggregation={"form": form})


@pytest.mark.parametrize(("form", "where"), [("rule", "both"), ("predicted", "p")])
def test_a_short_prompt_does_not_wait_in_a_queue_beside_an_idle_instance(
    form: str, where: str
) -> None:
    made = pair(form)
    made.heartbeat("both", Load(queued_prefill_tokens=200_000, queued=20), 1.0)
    made.heartbeat("p", Load(), 1.0)
    decision = decided(made, Request("x", "m", SHORT_TOKENS))
    assert (decision.prefill, decision.decode) == (where, "both")
    assert (decision.predicted_ttft_s > 10.0) is (form == "rule")
    if form == "predicted":
        assert decision.placement == "predicted"
        assert decision.local_s is not None
        assert decision.remote_s is not None
        assert decision.remote_s < 0.1 * decision.local_s


def busy(made: Conductor, requests: int) -> None:
    """Let `both` decode so many requests."""
    for number in range(requests):
        assert decided(made, prompt(f"busy-{number}", 1)).decode == "both"
        tell(made, f"busy-{number}", "prefill_done", "first_token", now=1.0)


def test_a_long_prompt_leaves_those_that_decode_alone() -> None:
    made = pair()
    idle = decided(made, prompt("a", 16))
    assert (idle.prefill, idle.decode) == ("both", "both")
    tell(made, "a", "finished", now=1.0)
    busy(made, 4)
    long = decided(made, prompt("b", 16))
    assert (long.prefill, long.decode, long.placement) == ("p", "both", "predicted")


@pytest.mark.parametrize(("form", "where"), [("remote", "p"), ("rule", "p"), ("local", "both")])
def test_a_form_holds_wherever_the_policy_would_prefill(form: str, where: str) -> None:
    """Also if the policy itself chooses the instance that decodes: here the other has a queue."""
    made = pair(form)
    made.heartbeat("p", Load(queued_prefill_tokens=20_000, queued=2), 1.0)
    long = decided(made, prompt("b", 16))
    assert (long.prefill, long.decode) == (where, "both")


def test_a_cached_prompt_is_prefilled_where_its_blocks_are() -> None:
    made = pair()
    busy(made, 2)
    made.apply(Added("both", "hbm", keys("c", 16)), 1.0)
    cached = decided(made, prompt("c", 16))
    assert (cached.prefill, cached.decode) == ("both", "both")
    assert cached.cached_tokens == 16 * BLOCK


def test_a_decision_says_how_long_the_answer_will_be_and_who_knew() -> None:
    made = pair()
    told = decided(made, Request("a", "m", SHORT_TOKENS, output_tokens=40))
    assert (told.output_tokens, told.output_source) == (40, "caller")
    guessed = decided(made, Request("b", "m", SHORT_TOKENS, output_tokens_max=100))
    assert (guessed.output_tokens, guessed.output_source) == (100, "default")


def test_an_instance_that_decodes_other_requests_is_not_disturbed_for_a_short_queue() -> None:
    """Also if the request itself will decode elsewhere, because there is no room beside them."""
    made = conductor(
        spec("p", Role.PREFILL), spec("both", kv_capacity_tokens=70_000), spec("d", Role.DECODE)
    )
    made.heartbeat("both", Load(running=30, context_tokens=60_000, kv_used_tokens=60_000), 1.0)
    made.heartbeat("p", Load(queued_prefill_tokens=500, queued=1), 1.0)
    long = decided(made, prompt("b", 16))
    assert (long.prefill, long.decode, long.placement) == ("p", "d", "predicted")


def test_delays_within_the_objective_do_no_harm() -> None:
    """One queue and eight decodes: with half a second to spare for each token they can
    be held up, with next to nothing they can not."""

    def prefills(tbt_s: float) -> str:
        made = pair()
        busy(made, 8)
        made.heartbeat("p", Load(queued_prefill_tokens=4_000, queued=1), 3.0)
        objectives = Objectives(ttft_s=5.0, tbt_s=tbt_s)
        short = Request("x", "m", 2_000, objectives=objectives, output_tokens=200)
        return decided(made, short, 3.0).prefill

    assert prefills(0.5) == "both"
    assert prefills(0.045) == "p"


# -- against a fleet that answers ------------------------------------------------------------------


@dataclass
class Fleet:
    """Two instances that prefill and two that do both, as they would answer the decisions: prefills
    one after the other, and a prefill delays what decodes beside it."""

    form: str
    free_at: dict[str, float] = field(default_factory=dict)
    decoding: dict[str, dict[str, tuple[float, float]]] = field(default_factory=dict)
    waited_s: list[float] = field(default_factory=list)
    held_up_s: float = 0.0

    def __post_init__(self) -> None:
        roles = {"p0": Role.PREFILL, "p1": Role.PREFILL, "b0": Role.MIXED, "b1": Role.MIXED}
        self.made = conductor(
            *(spec(name, role) for name, role in roles.items()),
            disaggregation={"form": self.form},
            calibration={"enabled": False},
        )
        self.free_at = dict.fromkeys(roles, 0.0)
        self.decoding = {name: {} for name in roles}

    def run(self, requests: Sequence[tuple[float, Request, float]]) -> float:
        """`requests`: when each comes, and how long its answer takes. Returns seconds per request:
        its TTFT, and by how long its prefill delayed others."""
        events: list[tuple[float, int, str, str]] = []
        number = 0
        for now, request, answer_s in requests:
            self._until(events, now)
            decision = decided(self.made, request, now)
            began = max(now, self.free_at[decision.prefill])
            taken_s = self._prefill_s(request, decision)
            self.free_at[decision.prefill] = began + taken_s
            done = began + taken_s + self._transfer_s(request, decision)
            self._hold_up(decision.prefill, began, began + taken_s)
            self.decoding[decision.decode][request.id] = (done, done + answer_s)
            self.waited_s.append(done - now)
            for at, kind in ((done, "prefill_done"), (done, "first_token"), (done + answer_s, "")):
                heapq.heappush(events, (at, number, request.id, kind or "finished"))
                number += 1
        return (sum(self.waited_s) + self.held_up_s) / len(requests)

    def _hold_up(self, name: str, began: float, ended: float) -> None:
        """A prefill there: what decodes meanwhile stands still."""
        for request_id, (first, last) in self.decoding[name].items():
            if first < ended and last > began:
                delay_s = ended - max(first, began)
                self.held_up_s += delay_s
                self.decoding[name][request_id] = (first, last + delay_s)

    def _until(self, events: list[tuple[float, int, str, str]], now: float) -> None:
        while events and events[0][0] <= now:
            at, _, name, kind = heapq.heappop(events)
            tell(self.made, name, kind, now=at)
            if kind == "finished":
                for running in self.decoding.values():
                    running.pop(name, None)

    def _transfer_s(self, request: Request, decision: Decision) -> float:
        """Of the KV to the instance that decodes, over a link of the default's speed."""
        if decision.prefill == decision.decode:
            return 0.0
        ways = self.made.settings.transfers
        nbytes = BLOCK_BYTES * request.prompt_tokens / BLOCK
        return ways.link_latency_s + nbytes / ways.link_bandwidth_bytes_s

    @staticmethod
    def _prefill_s(request: Request, decision: Decision) -> float:
        c0, c1, c2 = load(PROFILE).prefill
        n, cached = request.prompt_tokens, decision.cached_tokens
        return c0 + c1 * (n - cached) + c2 * (n * n - cached * cached)


def traffic(seed: int, requests_s: float, count: int = 300) -> list[tuple[float, Request, float]]:
    """Prompts of 100 to 16,000 tokens, a third of which share their first 4,096."""
    dice, now, found = random.Random(seed), 1.0, []
    for number in range(count):
        now += dice.expovariate(requests_s)
        blocks = int(2 ** dice.uniform(0, 5))
        named = keys("shared", 8) + keys(f"{seed}-{number}", blocks)
        own = keys(f"{seed}-{number}", blocks)
        block_keys = named if dice.random() < 1 / 3 else own
        tokens = BLOCK * len(block_keys) + dice.randrange(BLOCK)
        request = Request(f"r{number}", "m", tokens, block_keys)
        found.append((now, request, dice.uniform(0.5, 4.0)))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("requests_s", [1.0, 4.0, 8.0])
def test_predictions_cost_no_more_than_any_fixed_way(requests_s: float) -> None:
    """Seconds of TTFT and of delay, over three seeds of a fleet that does as it was told."""

    def cost_s(form: str) -> float:
        return sum(Fleet(form).run(traffic(seed, requests_s)) for seed in range(3))

    others = {form: cost_s(form) for form in ("rule", "remote", "local")}
    assert cost_s("predicted") < min(others.values()), others
