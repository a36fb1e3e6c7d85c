"""What requests tell of the hardware: like is compared with like."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests.conductor.coresupport import BLOCK, PROFILE, conductor, keys, prompt, spec, tell
from tiffin.conductor.cost import latency_profiles
from tiffin.conductor.cost.latency_model import decode_step_s, prefill_s
from tiffin.conductor.cost.transfer_model import TransferSettings
from tiffin.conductor.events.index_updates import Added, Cleared
from tiffin.conductor.records import Decision, Load, Request, RequestEvent, Role

if TYPE_CHECKING:
    from tiffin.conductor.core import Conductor

KNOWN = latency_profiles.load(PROFILE)
# 8 blocks of 512 tokens and 10 more.
PROMPT_TOKENS = 4106
PROMPT_S = float(prefill_s(*KNOWN.prefill, PROMPT_TOKENS, 0))


def apart() -> Conductor:
    """One instance that prefills, one that decodes; a factor may move fast."""
    return conductor(spec("p", Role.PREFILL), spec("d", Role.DECODE), calibration={"step": 0.1})


def factors(made: Conductor, name: str, now: float) -> tuple[float, float]:
    kinds = made.calibration.prefill, made.calibration.decode
    prefill, decode = (kind.factor(name, PROFILE, now) for kind in kinds)
    return prefill, decode


class TestPrefill:
    def serve(self, made: Conductor, at: int, wait_s: float, took_s: float, computed: int) -> float:
        """A request that waits, then is computed; returns when it is over."""
        name, now = f"r{at}", 100.0 * at
        assert isinstance(made.schedule(prompt(name), now), Decision)
        made.observe(RequestEvent(name, "prefill_began", computed), now + wait_s)
        now += wait_s + took_s
        tell(made, name, "prefill_done", "first_token", "finished", now=now)
        return now

    def test_waiting_is_not_work(self) -> None:
        made, now = apart(), 0.0
        for at in range(20):
            now = self.serve(made, at, wait_s=20.0, took_s=1.4 * PROMPT_S, computed=PROMPT_TOKENS)
        assert factors(made, "p", now)[0] == pytest.approx(1.4)

    def test_what_is_cached_is_not_work(self) -> None:
        """The engine found more of the prompt cached than was expected."""
        made, now = apart(), 0.0
        took_s = float(prefill_s(*KNOWN.prefill, PROMPT_TOKENS, PROMPT_TOKENS - 3000))
        for at in range(20):
            now = self.serve(made, at, wait_s=0.0, took_s=took_s, computed=3000)
        assert factors(made, "p", now)[0] == pytest.approx(1.0, abs=0.03)

    def test_short_and_long_prompts_are_told_apart(self) -> None:
        """Each takes some milliseconds more than by the profile, which no factor can tell."""
        made, now, dice, errors = apart(), 0.0, random.Random(1), []
        for at in range(150):
            name, tokens = f"r{at}", dice.choice([600, 1500, 6000, 20_000])
            took_s = 0.3 + float(prefill_s(*KNOWN.prefill, tokens, 0))
            decision = made.schedule(Request(name, "m", tokens), now)
            assert isinstance(decision, Decision)
            errors.append(abs(decision.predicted_ttft_s / took_s - 1))
            tell(made, name, "prefill_began", now=now)
            now += took_s
            tell(made, name, "prefill_done", "first_token", "finished", now=now)
            made.profiles.tick(now)
        assert max(errors[:20]) > 0.5
        assert max(errors[100:]) < 0.1

    @pytest.mark.parametrize("first", ["prefill_done", "first_token"])
    def test_events_count_once_in_any_order(self, first: str) -> None:
        made = apart()
        assert isinstance(made.schedule(prompt("r"), 0.0), Decision)
        tell(made, "r", "prefill_began", now=5.0)
        tell(made, "r", first, "prefill_done", "prefill_done", now=6.0)
        assert made.calibration.prefill.observations("p") == 1

    def test_a_first_token_ends_it_where_it_is_decoded(self) -> None:
        made = conductor(spec("a"))
        assert isinstance(made.schedule(prompt("r"), 0.0), Decision)
        tell(made, "r", "first_token", now=PROMPT_S)
        assert made.calibration.prefill.observations("a") == 1

    def test_a_first_token_of_another_instance_has_the_hand_over_in_it(self) -> None:
        made = apart()
        assert isinstance(made.schedule(prompt("r"), 0.0), Decision)
        tell(made, "r", "first_token", now=9.0)
        assert made.calibration.prefill.observations("p") == 0

    def test_without_a_begin_only_what_did_not_wait_tells(self) -> None:
        made = apart()
        for name in ("first", "second"):
            assert isinstance(made.schedule(prompt(name), 0.0), Decision)
        tell(made, "first", "prefill_done", now=PROMPT_S)
        tell(made, "second", "prefill_done", now=2 * PROMPT_S)
        assert made.calibration.prefill.observations("p") == 1

    def test_an_end_that_nobody_told_is_none(self) -> None:
        """The answer ends, and nothing was said of its prefill."""
        made = apart()
        assert isinstance(made.schedule(prompt("r"), 0.0), Decision)
        tell(made, "r", "prefill_began", now=0.0)
        tell(made, "r", "finished", now=50.0)
        assert made.calibration.prefill.observations("p") == 0


class TestLoads:
    """Prompts of which an instance computes the last 600 tokens, and has the others somewhere."""

    HEAD = keys("head", 16)
    TOKENS = 16 * BLOCK + 600
    COMPUTED_S = float(prefill_s(*KNOWN.prefill, TOKENS, 16 * BLOCK))
    LOAD_S = 16 * (160 << 20) / TransferSettings().dram_bandwidth_bytes_s

    def factor_after(self, made: Conductor, took_s: float) -> float:
        now = 1.0
        for at in range(20):
            name = f"r{at}"
            decision = made.schedule(Request(name, "m", self.TOKENS, self.HEAD), now)
            assert isinstance(decision, Decision)
            assert decision.cached_tokens == 16 * BLOCK
            made.observe(RequestEvent(name, "prefill_began", 600), now)
            now += took_s
            tell(made, name, "prefill_done", "first_token", "finished", now=now)
        return factors(made, "p", now)[0]

    @pytest.mark.parametrize("speaks", [True, False])
    def test_of_what_is_only_guessed_to_be_in_hbm_they_are_not_work(self, speaks: bool) -> None:
        """An engine without a cache of its own loads what the index guesses that it has."""
        made = apart()
        if speaks:
            made.apply(Cleared("p", ("hbm",)), 0.0)
        made.apply(Added("node-p", "dram", self.HEAD), 0.0)
        factor = self.factor_after(made, self.COMPUTED_S + self.LOAD_S)
        assert made.holdings.guessed_blocks
        assert factor == pytest.approx(1.0)

    @pytest.mark.parametrize("finished", [True, False])
    def test_they_are_predicted_where_an_engine_keeps_nothing(self, finished: bool) -> None:
        """What such an engine has computed, or will have, is in its node's memory."""
        without = replace(spec("p", Role.PREFILL, node="node-p"), prefix_caching=False)
        made = conductor(without, spec("d", Role.DECODE))
        first = made.schedule(Request("r", "m", self.TOKENS, self.HEAD), 0.0)
        assert isinstance(first, Decision)
        if finished:
            tell(made, "r", "prefill_began", "prefill_done", "first_token", "finished", now=9.0)
            made.apply(Added("node-p", "dram", self.HEAD), 9.0)
        assert not made.holdings.guessed_blocks
        now = 9.0 if finished else 0.0
        decision = made.schedule(Request("again", "m", self.TOKENS, self.HEAD), now)
        assert isinstance(decision, Decision)
        wait_s = 0.0 if finished else first.predicted_ttft_s
        assert decision.predicted_ttft_s == pytest.approx(wait_s + self.LOAD_S + self.COMPUTED_S)

    @pytest.mark.parametrize(("node", "reports"), [("node-p", True), ("", True), ("", False)])
    def test_none_is_assumed_of_what_can_only_be_in_hbm(self, node: str, reports: bool) -> None:
        """The engine has reported it, or has no node that could give it."""
        prefills = spec("p", Role.PREFILL, node=node)
        made = conductor(prefills, spec("d", Role.DECODE), calibration={"step": 0.1})
        if reports:
            made.apply(Added("p", "hbm", self.HEAD), 0.0)
        else:
            made.holdings.routed("p", self.HEAD, 0.0)
        assert self.factor_after(made, 1.4 * self.COMPUTED_S) == pytest.approx(1.4)


class TestDecode:
    def begun(self, made: Conductor, batch: int, context: int) -> None:
        """A request decodes, among others that its instance tells of."""
        assert isinstance(made.schedule(prompt("r"), 0.0), Decision)
        tell(made, "r", "prefill_done", "first_token", now=1.0)
        made.heartbeat("d", Load(running=batch, context_tokens=context), 1.0)

    def test_the_load_of_then_counts(self) -> None:
        """The batch changes between two reports: half of the time it is 4, then 64."""
        made = apart()
        self.begun(made, 4, 50_000)
        small_s = float(decode_step_s(*KNOWN.decode, 4, 50_000))
        large_s = float(decode_step_s(*KNOWN.decode, 64, 800_000))
        now = 1.0
        for _ in range(20):
            tell(made, "r", "tokens", now=now, tokens=0)
            made.heartbeat("d", Load(running=4, context_tokens=50_000), now)
            made.heartbeat("d", Load(running=64, context_tokens=800_000), now + 3.0)
            now += 6.0
            tell(made, "r", "tokens", now=now, tokens=round(3 / small_s / 1.2 + 3 / large_s / 1.2))
        assert factors(made, "d", now)[1] == pytest.approx(1.2, rel=0.01)

    def test_waiting_for_the_hand_over_is_not_work(self) -> None:
        made = apart()
        self.begun(made, 1, PROMPT_TOKENS)
        step_s, now = float(decode_step_s(*KNOWN.decode, 1, PROMPT_TOKENS)), 31.0
        tell(made, "r", "handed_over", now=now)
        for _ in range(10):
            now += 100 * step_s
            tell(made, "r", "tokens", now=now, tokens=100)
        assert made.calibration.decode.observations("d") == 10
        assert factors(made, "d", now)[1] == pytest.approx(1.0, abs=0.01)

    def test_a_first_report_of_an_unknown_begin_tells_nothing(self) -> None:
        made = apart()
        self.begun(made, 1, PROMPT_TOKENS)
        tell(made, "r", "tokens", now=31.0, tokens=100)
        assert made.calibration.decode.observations("d") == 0

    def test_one_time_counts_once(self) -> None:
        """Many requests tell of the same seconds."""
        made = apart()
        for at in range(20):
            assert isinstance(made.schedule(prompt(f"r{at}"), 0.0), Decision)
            tell(made, f"r{at}", "prefill_done", "first_token", "handed_over", now=1.0)
        for now in (5.0, 9.0):
            for at in range(20):
                tell(made, f"r{at}", "tokens", now=now, tokens=100)
        assert made.calibration.decode.observations("d") == 2


class ChunkedEngine:
    """An engine that computes prompts in chunks, each within a step of its decodes. The weights are
    read once per step, so that a chunk's own part is what grows with its tokens."""

    CHUNK = 512

    def __init__(self, made: Conductor, prefill: float, decode: float) -> None:
        self.made, self.prefill, self.decode = made, prefill, decode
        self.now = self.told_at = self.beat_at = 0.0
        self.untold: dict[str, int] = {}  # by request that decodes: tokens that were not told
        self.left: dict[str, int] = {}  # tokens of its answer

    def step(self, prompt_s: float = 0.0) -> None:
        batch = len(self.untold)
        context = batch * (PROMPT_TOKENS + 100)
        if batch:
            self.now += self.decode * float(decode_step_s(*KNOWN.decode, batch, context))
        self.now += self.prefill * prompt_s
        for name in list(self.untold):
            self.untold[name] += 1
            self.left[name] -= 1
            if not self.left[name]:
                tell(self.made, name, "tokens", now=self.now, tokens=self.untold.pop(name))
                tell(self.made, name, "finished", now=self.now)
        if self.now > self.beat_at + 0.5:
            self.beat_at = self.now
            load = Load(running=len(self.untold), context_tokens=len(self.untold) * 4206)
            self.made.heartbeat("a", load, self.now)
        if self.now > self.told_at + 2.0:
            self.told_at = self.now
            for name, tokens in self.untold.items():
                tell(self.made, name, "tokens", now=self.now, tokens=tokens)
                self.untold[name] = 0

    def compute(self, name: str, answer: int, cached: tuple[bytes, ...] = ()) -> None:
        """`cached` blocks it loads from its node first, and computes what is behind them."""
        tokens = len(cached) * BLOCK + PROMPT_TOKENS
        decision = self.made.schedule(Request(name, "m", tokens, cached), self.now)
        assert isinstance(decision, Decision)
        assert decision.cached_tokens == len(cached) * BLOCK
        self.made.observe(RequestEvent(name, "prefill_began", PROMPT_TOKENS), self.now)
        self.now += len(cached) * (160 << 20) / TransferSettings().dram_bandwidth_bytes_s
        prompt_s = float(prefill_s(*KNOWN.prefill, tokens, len(cached) * BLOCK))
        chunks = -(-PROMPT_TOKENS // self.CHUNK)
        for _ in range(chunks):
            self.step(prompt_s / chunks)
        tell(self.made, name, "prefill_done", "first_token", "handed_over", now=self.now)
        self.untold[name], self.left[name] = 0, answer


@pytest.mark.parametrize(("prefill", "decode"), [(1.0, 1.0), (1.4, 1.4), (1.4, 1.0), (1.0, 1.4)])
def test_chunks_of_prompts_within_steps_are_told_apart(prefill: float, decode: float) -> None:
    """Each takes longer for the other, and neither is taken for slow hardware."""
    made, dice = conductor(spec("a"), calibration={"step": 0.1}), random.Random(7)
    engine = ChunkedEngine(made, prefill, decode)
    for number in range(150):
        engine.compute(f"r{number}", dice.randint(20, 400))
        for _ in range(dice.randint(0, 60)):
            engine.step()
    found = factors(made, "a", engine.now)
    assert found == (pytest.approx(prefill, rel=0.05), pytest.approx(decode, rel=0.05))


def test_prompts_that_load_much_are_no_slow_hardware_beside_decodes_either() -> None:
    """Every second prompt loads blocks from its node for longer than it computes."""
    instance = replace(spec("a", node="node-a"), prefix_caching=False)
    made, dice = conductor(instance, calibration={"step": 0.1}), random.Random(7)
    cached = keys("head", 128)
    made.apply(Added("node-a", "dram", cached), 0.0)
    engine = ChunkedEngine(made, 1.4, 1.0)
    for number in range(150):
        engine.compute(f"r{number}", dice.randint(200, 800), cached if number % 2 else ())
        for _ in range(dice.randint(100, 400)):
            engine.step()
    found = factors(made, "a", engine.now)
    assert found == (pytest.approx(1.4, rel=0.05), pytest.approx(1.0, rel=0.05))
