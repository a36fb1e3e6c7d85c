"""The benchmark of vLLM, without a vLLM: what it says then, and how it makes rows of what engines
answer."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tiffin.bench.serving.completions import Answer
from tiffin.bench.suite import Missing
from tiffin.bench.vllm import decode_gaps, hooks
from tiffin.bench.vllm import split as apart
from tiffin.bench.vllm.engine.measurements import ATTEMPTS, DecodeGaps, FirstTokens
from tiffin.bench.vllm.engine_process import GroupProcess
from tiffin.bench.vllm.first_token import _in_turns
from tiffin.bench.vllm.setting import Setting, Sizes
from tiffin.bench.vllm.suite import SUITE
from tiffin.bench.vllm.times import Times, added
from tiffin.kvstore.errors import NodeUnavailable

BLOCK = 512


def times(loaded: float, own: float, repeated: int = 0) -> Times:
    found = Times()
    found.computed({"tokens": [7, 8, 9], "cold": [900.0, 1000.0, 1100.0]})
    found.add(
        {
            "tokens": [7, 8, 9],
            "loaded": [loaded] * 3,
            "own": [own] * 3,
            "cached": [4096] * 3,
            "repeated": repeated,
        }
    )
    return found


# -- without a vLLM --------------------------------------------------------------------------------


@pytest.mark.parametrize("row", ["remote", "split", "split-stream", "decode-gaps", "hooks"])
def test_without_a_vllm_every_row_is_left_out_and_says_how_to_get_one(row: str) -> None:
    report = SUITE.run(Setting(Sizes.quick()), [row], started=lambda _: None)
    assert (report.rows, report.crashed) == ([], {})
    assert report.missing is not None
    assert "make engines" in report.missing[row]


@pytest.mark.parametrize("row", ["lmcache", "mooncake"])
def test_without_its_peer_a_row_is_left_out_with_the_reason_and_the_script(row: str) -> None:
    setting = Setting(Sizes.quick(), Path(sys.executable), Path("/nowhere"))
    report = SUITE.run(setting, [row], started=lambda _: None)
    assert (report.rows, report.crashed) == ([], {})
    assert report.missing is not None
    assert f"No module named '{row}'" in report.missing[row]
    assert "install_peers.sh" in report.missing[row]


def test_a_peer_is_found_in_its_folder_of_peers(tmp_path: Path) -> None:
    package = tmp_path / "lunch" / "lunch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "box.py").write_text("print('a library that talks')")
    setting = Setting(Sizes.quick(), Path(sys.executable), tmp_path)
    peer = setting.peer("lunch", "lunch.box")
    assert peer.package == package
    assert peer.environment == {"PYTHONPATH": str(package.parent)}
    (package / "box.py").write_text("raise ImportError('libfork.so.1: cannot open')")
    with pytest.raises(Missing, match=r"libfork\.so\.1"):
        setting.peer("lunch", "lunch.box")


def test_an_engine_that_ends_is_named_with_the_end_of_its_log(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho no such module >&2\nexit 3\n")
    python.chmod(0o755)
    report = SUITE.run(Setting(Sizes.quick(), python), ["remote"], started=lambda _: None)
    assert "no such module" in report.crashed["remote"]


# -- processes -------------------------------------------------------------------------------------

ECHO = """
import json, sys
print('"ready"', flush=True)
for line in sys.stdin:
    name, arguments = json.loads(line)
    print(json.dumps(arguments[name]), flush=True)
"""


def test_a_process_answers_what_it_is_told_and_takes_no_time_while_it_is_stopped() -> None:
    process = GroupProcess("echo", [sys.executable, "-c", ECHO])
    try:
        assert process.answer() == "ready"
        assert process.tell("b", a=1, b=2) == 2
        process.stop()
        state = f"/proc/{process.popen.pid}/stat"
        until = time.monotonic() + 10
        while _state(state) != "T":
            assert time.monotonic() < until
        process.resume()
        assert process.tell("a", a=3) == 3
    finally:
        process.stop()  # `end` has to resume it
        process.end()
    assert process.popen.returncode == 0


def _state(path: str) -> str:
    with open(path) as file:
        return file.read().rpartition(")")[2].split()[0]


def test_a_process_that_ended_is_an_error_with_its_log() -> None:
    process = GroupProcess("echo", [sys.executable, "-c", "raise SystemExit('no more')"])
    try:
        with pytest.raises(NodeUnavailable, match="echo has ended: no more"):
            process.tell("turn")
    finally:
        process.end()


class Loader:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def __getattr__(self, verb: str) -> Any:
        def note() -> None:
            self.log.append(f"{self.name} {verb}")
            if verb == "turn" and self.name == "crashes":
                raise NodeUnavailable("gone")

        return note


def test_while_one_side_is_measured_the_other_is_stopped() -> None:
    log: list[str] = []
    sides: Any = [Loader("a", log), Loader("b", log)]
    _in_turns(sides, rounds=2)
    turn = ["a resume", "a turn", "a stop", "b resume", "b turn", "b stop"]
    assert log == ["a stop", "b stop", *turn, *turn, "a resume", "b resume"]


def test_after_a_crash_nobody_stays_stopped() -> None:
    log: list[str] = []
    sides: Any = [Loader("a", log), Loader("crashes", log)]
    with pytest.raises(NodeUnavailable):
        _in_turns(sides, rounds=2)
    assert log[-2:] == ["a resume", "crashes resume"]


# -- times to the first token ----------------------------------------------------------------------


class FakeEngine:
    """An engine whose loads find `found` tokens, one after the other, then everything."""

    def __init__(self, found: list[int]) -> None:
        self._found = found
        self._forgotten = False
        self._prompts = 0

    def prompt(self, tokens: int) -> list[int]:
        self._prompts += 1
        return [self._prompts] * tokens

    def forget(self) -> None:
        self._forgotten = True

    def first_token(self, prompt: list[int]) -> tuple[float, int, int]:
        loads, self._forgotten = self._forgotten, False
        if not loads:
            return 10.0, prompt[0], len(prompt)
        cached = self._found.pop(0) if self._found else len(prompt) // BLOCK * BLOCK
        return 30.0 if cached else 1000.0, prompt[0], cached


def first_tokens(found: list[int]) -> FirstTokens:
    engine: Any = FakeEngine(found)
    return FirstTokens(engine, tokens=BLOCK + 4, prompts=2)


def test_a_turn_measures_each_prompt_loaded_and_from_the_own_cache() -> None:
    turn = first_tokens([]).turn()
    assert turn["loaded"] == [30.0, 30.0]
    assert turn["own"] == [10.0, 10.0]
    assert turn["tokens"] == [1, 2]
    assert turn["repeated"] == 0


def test_a_sample_that_was_not_fully_loaded_is_measured_again_and_counted() -> None:
    warm = BLOCK
    turn = first_tokens([warm, 0, 128, BLOCK, 0]).turn()
    assert turn["loaded"] == [30.0, 30.0]
    assert turn["cached"] == [BLOCK, BLOCK]
    assert turn["repeated"] == 3


def test_a_prompt_that_is_never_loaded_is_an_error() -> None:
    with pytest.raises(AssertionError, match="not all was loaded, 5 times in a row: 0 of 512"):
        first_tokens([BLOCK] + [0] * ATTEMPTS).turn()


def test_computing_ends_when_all_can_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: None)
    measured = first_tokens([0, 0, BLOCK, 0, BLOCK])
    assert measured.compute() == {"cold": [10.0, 10.0], "tokens": [1, 2]}
    assert measured.turn()["repeated"] == 0


def test_a_row_compares_with_the_engines_own_cache_and_names_the_cold_time() -> None:
    row = times(32.0, 20.0).row(Sizes(), "remote", "from a node", bound=2.2)
    assert (row.value.p50, row.limit.p50, row.ratio) == (32.0, 20.0, 1.6)
    assert row.note == "computed: 1000 ms"
    assert "4096 of them loaded from a node" in row.what
    assert row.met


def test_a_row_says_how_many_samples_were_measured_again() -> None:
    row = times(32.0, 20.0, repeated=2).row(Sizes(), "home", "from a node", bound=1.4)
    assert row.note == "computed: 1000 ms; 2 of 5 measured again: not all was loaded"
    assert not row.met


def test_other_tokens_than_were_computed_are_an_error() -> None:
    found = times(30.0, 20.0)
    turn = {"tokens": [7, 8, 10], "loaded": [], "own": [], "cached": [], "repeated": 0}
    with pytest.raises(AssertionError, match="other tokens"):
        found.add(turn)


def test_what_loading_adds_stands_beside_what_a_peer_adds() -> None:
    row = added("lmcache", times(28.0, 20.0, 1), times(40.0, 20.0), "LMCache's server")
    assert (row.name, row.value.p50, row.limit.p50) == ("added-beside-lmcache", 8.0, 20.0)
    assert row.target_text == "ratio <= 0.7"
    assert row.met
    assert row.note == "ours: 1 of 4 measured again: not all was loaded"


# -- prefill and decode apart ----------------------------------------------------------------------


class FakeSplit:
    """A service whose instances answer with the prompt's first token, and what `split` says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **split: Any) -> None:
        self.prefill, self.gateway = SimpleNamespace(name="prefill-1"), SimpleNamespace()
        self.decode = SimpleNamespace(name="decode-1", counter=lambda _: self.loaded)
        self.loaded, self.asked, self.prompts = 0, 0, []
        self._split = {"prefill": "prefill-1", "decode": "decode-1", **split}
        monkeypatch.setattr(apart, "ask", self.ask)

    def ask(self, server: Any, prompt: list[int], answer: int, name: str, **fields: Any) -> Answer:
        self.asked += 1
        taken_s = self.asked / 1000
        if server is not self.gateway:
            self.prompts.append(prompt)
            assert fields["cache_salt"] in name
            return Answer([prompt[0]] * answer, [taken_s])
        assert not fields
        self.loaded += len(prompt) // BLOCK * BLOCK
        return Answer(**{"tokens": [prompt[0]] * answer, "arrivals_s": [taken_s], **self._split})


def test_fresh_prompts_are_asked_of_one_instance_and_split_in_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    service: Any = FakeSplit(monkeypatch)
    turns = apart.measured(service, tokens=1500, rounds=3)
    assert (turns.alone, turns.split) == ([0.003, 0.005, 0.007], [0.004, 0.006, 0.008])
    assert turns.loaded == [1024] * 3
    assert len({tuple(prompt) for prompt in service.prompts}) == 4
    row = turns.row("split", bound=1.1)
    assert (row.name, row.value.p50, row.limit.p50) == ("split-1500", 6.0, 5.0)
    assert (row.target_text, row.met) == ("ratio <= 1.1", False)
    assert row.note == "1024 tokens of each prompt loaded by the one that decodes"
    turns.loaded[1] = 0
    row = turns.row("split-stream", bound=None)
    assert (row.name, row.met) == ("split-stream-1500", None)
    assert row.note.startswith("0 to 1024 tokens")


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"tokens": [-1] * 4}, "other tokens"),
        ({"prefill": "decode-1"}, "not split: decode-1 prefilled"),
    ],
)
def test_a_split_with_other_tokens_or_on_one_instance_is_an_error(
    monkeypatch: pytest.MonkeyPatch, said: dict[str, Any], message: str
) -> None:
    service: Any = FakeSplit(monkeypatch, **said)
    with pytest.raises(AssertionError, match=message):
        apart.measured(service, tokens=1024, rounds=1)


# -- gaps between tokens ---------------------------------------------------------------------------


def test_gaps_are_judged_by_their_slowest_hundredth() -> None:
    quiet = turn_of_gaps([5.0] * 198 + [6.0, 7.0])
    pool = turn_of_gaps(
        [5.0] * 197 + [8.0, 9.0, 50.0], requests=20, computed=1, loaded=80_000, repeated=2
    )
    row, own = decode_gaps.rows(
        Sizes(), {"nothing": [quiet] * 3, "own": [quiet] * 3, "pool": [pool] * 3}
    )
    assert (row.name, row.value.p50, row.limit.p50) == ("decode-gaps", 9.0, 6.0)
    assert row.met
    assert "60 requests" in row.note
    assert "240000 tokens loaded" in row.note
    assert "6 turns measured again" in row.note
    assert "3 prompts computed all the same" in row.note
    assert row.note.endswith("median gaps 5.0 and 5.0 ms")
    assert (own.name, own.ratio, own.met) == ("decode-gaps-own-cache", 1.0, None)
    assert "computed" not in own.note


def test_prompts_that_came_from_the_engines_own_cache_are_an_error() -> None:
    pool = turn_of_gaps([5.0], requests=20, computed=1, loaded=18 * 4096)
    with pytest.raises(AssertionError, match="only 73728 of 77824 tokens were loaded"):
        decode_gaps.rows(Sizes(), {"nothing": [], "own": [], "pool": [pool]})


def turn_of_gaps(
    gaps: list[float], requests: int = 0, computed: int = 0, loaded: int = 0, repeated: int = 0
) -> dict[str, Any]:
    return {
        "gaps": gaps,
        "requests": requests,
        "computed": computed,
        "loaded": loaded,
        "repeated": repeated,
    }


class Turns:
    """An engine that computes so many prompts in one turn after the other."""

    def __init__(self, computed: list[int]) -> None:
        self._computed = computed

    def tell(self, name: str, beside: str) -> dict[str, Any]:
        assert (name, beside) == ("gaps", "pool")
        return turn_of_gaps([5.0], computed=self._computed.pop(0))


@pytest.mark.parametrize(
    ("computed", "kept", "repeated"), [([0], 0, 0), ([2, 1, 0], 0, 2), ([2, 1, 3, 0], 3, 2)]
)
def test_a_turn_in_which_a_prompt_was_computed_is_measured_again(
    computed: list[int], kept: int, repeated: int
) -> None:
    engine: Any = Turns(computed)
    turn = decode_gaps._turn(engine, "pool")
    assert (turn["computed"], turn["repeated"]) == (kept, repeated)


class Output:
    def __init__(self, name: str, finished: bool, cached: int) -> None:
        self.request_id, self.finished, self.num_cached_tokens = name, finished, cached


class FakeCore:
    """Answers every request with a token per step."""

    def __init__(self) -> None:
        self.left: dict[str, int] = {}
        self.most = 0

    def has_unfinished_requests(self) -> bool:
        return bool(self.left)

    def step(self) -> list[Output]:
        self.most = max(self.most, len(self.left))
        outputs = []
        for name in list(self.left):
            self.left[name] -= 1
            outputs.append(Output(name, self.left[name] == 0, BLOCK))
            if not self.left[name]:
                del self.left[name]
        return outputs


def test_requests_are_under_way_beside_an_answer_until_it_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine: Any = FakeEngine([])
    core = FakeCore()
    engine.llm = type("LLM", (), {"llm_engine": core, "get_metrics": lambda _: []})()

    def add(measured: DecodeGaps, prompt: list[int], tokens: int) -> str:
        measured._number += 1
        core.left[f"gaps-{measured._number}"] = tokens
        return f"gaps-{measured._number}"

    monkeypatch.setattr(DecodeGaps, "_add", add)
    measured = DecodeGaps(engine, gaps=20, tokens=BLOCK + 4, prompts=3, beside=2)
    alone = measured.gaps("nothing")
    assert (len(alone["gaps"]), alone["requests"], core.most) == (20, 0, 1)
    beside = measured.gaps("pool")
    assert (len(beside["gaps"]), beside["computed"], core.most) == (20, 0, 3)
    assert beside["requests"] >= 2 * 20


# -- hooks -----------------------------------------------------------------------------------------


def sample(at_s: float, steps: int, thread_s: float, **hook_s: float) -> dict[str, Any]:
    return {"at_s": at_s, "steps": steps, "thread_s": thread_s, "hook_s": hook_s}


def test_a_turns_share_is_what_both_sides_added_between_its_samples(tmp_path: Path) -> None:
    scheduler = [
        sample(1.0, 5, 0.5, matched=1.0),
        sample(2.0, 10, 1.0, matched=2.0),
        sample(3.0, 110, 1.25, matched=2.5, plan=0.5),
        sample(9.0, 900, 9.0, matched=9.0),
    ]
    worker = [sample(2.0, 10, 0.0), sample(3.0, 110, 0.25, begin=0.125)]
    for side, samples in (("scheduler", scheduler), ("worker", worker)):
        lines = "\n".join(json.dumps(one) for one in samples)
        (tmp_path / f"{side}-1.jsonl").write_text(lines + "\n")
    share = hooks._share(tmp_path, 1.5, 3.5)
    assert (share.steps, share.step_s, share.thread_s) == (100, 1.0, 0.5)
    assert share.hook_s == {"scheduler": {"matched": 0.5, "plan": 0.5}, "worker": {"begin": 0.125}}


def test_a_turn_without_two_samples_is_an_error() -> None:
    with pytest.raises(AssertionError, match="too short"):
        hooks.between([sample(1.0, 1, 0.0)], 0.5, 2.0)


def test_hooks_are_judged_per_step_and_the_costliest_are_named() -> None:
    hook_s = {"scheduler": {"plan": 0.004, "add": 0.001}, "worker": {"begin": 0.02}}
    share = hooks.Share(steps=100, step_s=1.0, hook_s=hook_s, thread_s=0.005)
    load = hooks.Load("short", "short prompts", 1, 200, 64)
    scheduler, worker, threads = hooks.rows(load, [share, share])
    assert (scheduler.name, scheduler.value.p50, scheduler.limit.p50) == (
        "hooks-short-scheduler",
        pytest.approx(50),
        10_000,
    )
    assert scheduler.note == "plan 40.0 us, add 10.0 us"
    assert (scheduler.met, worker.met, threads.met) == (True, False, True)
