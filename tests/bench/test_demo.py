"""The demo: its prompts share the trace's prefixes, and the whole demo runs."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import psutil
import pytest
from childsupport import descendants, environment

from tiffin.bench.demo import decisions, overload, plot, report
from tiffin.bench.demo.engines import trace
from tiffin.bench.demo.engines.model import NEW_TOKENS
from tiffin.bench.demo.router import DemoPrompt, Router, ServedRequest
from tiffin.bench.demo.run import Alone, DemoOutcome, Options, objective_s
from tiffin.bench.serving.conducting import fitted
from tiffin.bench.traces.recordings import read_recording
from tiffin.conductor.errors import InvalidRequest
from tiffin.conductor.records import Rejection, Request
from tiffin.conductor.wire.models import CandidateReply, EntryReply
from tiffin.kvstore import KVSchema, LayerSpec

if TYPE_CHECKING:
    from tiffin.bench.demo.engines.children import Crew
    from tiffin.conductor.client import ConductorClient

DEMO = [sys.executable, "-m", "tiffin.bench.demo", "--quick"]
WORKERS = 4  # two prefill, two decode
ALL = 5 + WORKERS  # the demo, Redis, two nodes, the conductor


# -- the trace -------------------------------------------------------------------------------------


def request(ids: list[int], length: int, at: int = 0) -> trace.TraceRequest:
    return trace.TraceRequest(at, length, 1, tuple(ids))


def test_the_slice_is_what_its_readme_says() -> None:
    requests = trace.load_slice()
    assert len(requests) == 106
    assert max(r.input_length for r in requests) <= trace.MAX_PROMPT_TOKENS
    assert [r.timestamp for r in requests] == sorted(r.timestamp for r in requests)
    assert all(r.hash_ids[0] == 0 for r in requests)


def test_equal_ids_give_equal_tokens_and_others_do_not() -> None:
    one, two = request([0, 7, 8], 1400), request([0, 7, 9], 1200)
    a, b = (trace.tokens_of(r, seed=3, vocab=2048) for r in (one, two))
    assert (a.shape, b.shape) == ((1400,), (1200,))
    assert (a[:1024] == b[:1024]).all()
    assert (a[1024:1200] != b[1024:]).mean() > 0.9
    assert a.min() >= 0
    assert a.max() < 2048


def test_tokens_are_the_same_in_every_process_and_differ_by_seed() -> None:
    one = trace.tokens_of(request([0, 42], 600), seed=0, vocab=2048)
    assert one[[0, 1, 511, 512, 599]].tolist() == [1742, 1304, 865, 243, 1817]
    assert (one != trace.tokens_of(request([0, 42], 600), seed=1, vocab=2048)).mean() > 0.9


def test_lines_that_contradict_themselves_are_refused() -> None:
    line = json.dumps(asdict(request([0, 1], 1025)))
    with pytest.raises(ValueError, match="line 1"):
        trace.parse([line])


def test_selection_keeps_whole_short_conversations() -> None:
    conversations = [
        [request([0, c, 1000 + c], 1100, c), request([0, c], 900, c)]
        for c in range(1, 2 * trace.CONVERSATIONS_PER_KEPT)
    ]
    long = request([0, 1] + [5] * 20, 22 * 512)
    kept = trace.select([long, *(r for pair in conversations for r in pair)])
    assert {r.hash_ids[1] for r in kept} == {1, 1 + trace.CONVERSATIONS_PER_KEPT}
    assert len(kept) == 4


def test_reusable_tokens_stop_at_the_first_new_block_and_before_the_last_token() -> None:
    first = request([0, 1, 2], 1536)
    assert trace.reusable_tokens([first]) == 0
    assert trace.reusable_tokens([first, first]) == 1024
    assert trace.reusable_tokens([first, request([0, 9, 2, 3], 2000)]) == 512
    partial = request([0, 1], 700)  # its second block is not full, so it is not stored
    assert trace.reusable_tokens([partial, first]) == 512


# -- the overload ----------------------------------------------------------------------------------


def test_arrivals_are_the_same_each_time_and_as_many_as_the_rate_says() -> None:
    times_s = overload.arrivals(50.0, 20.0, seed=1)
    assert times_s == overload.arrivals(50.0, 20.0, seed=1)
    assert times_s == sorted(times_s)
    assert times_s[0] == 0.0
    assert times_s[-1] < 20.0
    assert 850 < len(times_s) < 1150  # 1000, and five standard deviations


def test_overloads_prompts_share_prefixes_within_a_pass_and_none_between_passes() -> None:
    one, two = overload.prompts(110, seed=1), overload.prompts(110, seed=2)
    assert [p.request for p in one] == [*range(106), *range(4)]
    assert one[0].tokens[:512] == one[105].tokens[:512]
    assert one[0].tokens[:512] != two[0].tokens[:512]
    assert one[0].tokens[:512] != one[106].tokens[:512]  # also when the slice repeats


def test_an_overload_counts_what_was_in_time_of_the_admitted_and_of_all() -> None:
    times_s = (0.5, 1.0, 1.5, None)
    served = [
        ServedRequest(f"r{number}", number, float(number), 100, rejected="" if time_s else "ttft")
        for number, time_s in enumerate(times_s)
    ]
    for one, time_s in zip(served, times_s, strict=True):
        one.ttft_s = time_s or math.nan
    found = overload.summarise(overload.Pass("off", served, {"admitted_met": 2}), 1.0)
    assert (found["arrived"], found["admitted"], found["rejected"], found["met"]) == (4, 3, 1, 2)
    assert found["met_share"] == pytest.approx(2 / 3)
    assert found["goodput"] == 0.5
    assert found["goodput_s"] == 0.5  # the last came after three seconds, and had one more
    assert found["ttft_p50_s"] == 1.0
    nobody = overload.summarise(overload.Pass("off", served[3:]), 1.0)
    assert (nobody["admitted"], nobody["met_share"], nobody["ttft_p90_s"]) == (0, 0.0, 0.0)


def test_the_objective_is_twice_what_nine_of_ten_need() -> None:
    assert objective_s([0.01 * n for n in range(1, 101)]) == 1.8
    assert objective_s([0.001]) == 0.1  # never zero


def test_a_profile_follows_the_measurements_and_stands_noise() -> None:
    def prefill_s(n: int, p: int) -> float:
        return 1e-3 + 2e-4 * (n - p) + 3e-8 * (n * n - p * p)

    lengths = [(128, 0), (1024, 0), (4096, 0), (2048, 1536), (4096, 3584)]
    prefill = [(n, p, prefill_s(n, p)) for n, p in lengths]
    exact = [(b, b * c, 0.004 * b + 1e-6 * b * c) for b in (1, 2, 4) for c in (256, 3072)]
    profile = fitted(prefill, exact)  # an engine whose steps have no fixed cost
    assert profile.prefill == pytest.approx((1e-3, 2e-4, 3e-8), rel=1e-6)
    assert profile.decode[1:] == pytest.approx((0.004, 1e-6), rel=1e-3)
    assert 0 < profile.decode[0] < 1e-4
    with pytest.raises(InvalidRequest, match="points"):
        fitted(prefill[:2], exact)


# -- the router ------------------------------------------------------------------------------------


@dataclass
class Workers:
    """A crew that answers at once, the last order first; `open` counts unanswered orders."""

    orders: list[tuple[str, str, str]] = field(default_factory=list)
    waiting: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    most: int = 0

    def send(self, name: str, message: dict[str, Any]) -> None:
        ((kind, order),) = message.items()
        self.orders.append((kind, name, order["id"]))
        at = time.monotonic()
        common = {"id": order["id"], "hit_tokens": 512, "load_s": 0.1, "failures": 1}
        if kind == "prefill":
            more = {"token": 7, "first_token_at": at, "save_s": 0.1, "not_saved": ""}
            self.waiting.append((name, {"prefilled": {**common, **more}}))
        else:
            assert order["first_token"] == 7
            answer = [7] * order["new_tokens"]
            self.waiting.append((name, {"decoded": {**common, "tokens": answer}}))
        self.most = max(self.most, len(self.waiting))

    def next(self, timeout_s: float) -> tuple[str, dict[str, Any]]:
        return self.waiting.pop()

    def poll(self, timeout_s: float) -> tuple[str, dict[str, Any]] | None:
        return self.waiting.pop() if self.waiting else None


@dataclass
class Decided:
    """A conductor with prepared decisions; `asked` are the requests that it got."""

    outcomes: dict[str, Rejection | dict[str, str]]
    asked: list[Request] = field(default_factory=list)

    def schedule(self, request: Request) -> Any:
        self.asked.append(request)
        outcome = self.outcomes.get(request.id, {})
        if isinstance(outcome, Rejection):
            return outcome
        fields = {"prefill": "prefill-1", "decode": "decode-1", **outcome}
        return SimpleNamespace(**fields, predicted_ttft_s=0.25, cached_tokens=512)


def routed(outcomes: dict[str, Any]) -> tuple[Router, Workers, Decided]:
    schema = KVSchema.of("m", [LayerSpec.gqa(kv_heads=1, head_dim=8, dtype="float32")])
    workers, conductor = Workers(), Decided(outcomes)
    router = Router(cast("Crew", workers), cast("ConductorClient", conductor), schema)
    return router, workers, conductor


PROMPTS = [DemoPrompt(number, [number] * 600) for number in range(5)]


def test_clients_have_one_request_each_in_flight_and_all_are_answered() -> None:
    router, workers, conductor = routed({})
    served = router.replay("a", PROMPTS, clients=2, ttft_s=1.5)
    assert sorted(one.request for one in served) == [0, 1, 2, 3, 4]
    assert workers.most == 2
    assert {one.objectives.ttft_s for one in conductor.asked} == {1.5}
    assert [len(one.keys) for one in conductor.asked] == [1] * 5
    assert all(len(one.tokens) == NEW_TOKENS and one.moved_tokens == 512 for one in served)
    assert router.failures == {"prefill-1": 1, "decode-1": 1}


def test_arrivals_do_not_wait_for_answers_and_times_run_from_the_arrival() -> None:
    router, workers, _ = routed({})
    served = router.replay("a", PROMPTS, arrivals_s=[0.0, 0.0, 0.0, 0.0, 0.01])
    assert workers.most >= 4
    assert [one[2] for one in workers.orders[:4]] == ["a-0", "a-1", "a-2", "a-3"]
    by_id = {one.id: one for one in served}
    assert by_id["a-4"].at_s == pytest.approx(0.01)
    assert all(one.ttft_s >= 0 for one in served)


def test_a_rejected_request_is_sent_to_nobody() -> None:
    refusal = Rejection("a-1", "ttft", "too late", predicted_ttft_s=9.0)
    router, workers, _ = routed({"a-1": refusal})
    served = {one.id: one for one in router.replay("a", PROMPTS[:2], clients=1)}
    assert (served["a-1"].rejected, served["a-1"].predicted_ttft_s) == ("ttft", 9.0)
    assert "a-1" not in {request for _, _, request in workers.orders}
    assert served["a-0"].tokens


# -- decisions in words ----------------------------------------------------------------------------


def entry(**changes: Any) -> EntryReply:
    candidates = [
        CandidateReply(instance="prefill-1", cost=1.0, terms={"queue_s": 0.5}),
        CandidateReply(instance="prefill-2", cost=1.2, terms={"queue_s": 0.0, "prefill_s": 1.2}),
    ]
    fields: dict[str, Any] = {
        "outcome": "decision", "request_id": "r", "decided_at": 0.0, "predicted_ttft_s": 1.0,
        "predicted_tbt_s": 0.1, "available_tokens": 512, "candidates": candidates,
    }  # fmt: skip
    return EntryReply(**{**fields, **changes})


@pytest.mark.parametrize(
    ("served", "logged", "words"),
    [
        ({"rejected": "ttft"}, {"outcome": "rejection"}, "rejected"),
        ({"cached_tokens": 0}, {}, "nothing is cached"),
        ({}, {}, "waits, because its blocks are there"),
        ({"prefill": "prefill-2"}, {}, "its blocks are there"),
        ({}, {"available_tokens": 1024}, "computes what it could fetch"),
    ],
)
def test_decisions_are_told_apart(
    served: dict[str, Any], logged: dict[str, Any], words: str
) -> None:
    fields = {"prefill": "prefill-1", "cached_tokens": 512, **served}
    one = ServedRequest("r", 0, 0.0, 1000, **fields)
    assert decisions.kind(one, entry(**logged)).startswith(words)
    assert decisions.chosen([one], {"r": entry(**logged)}) == [one]
    lines = list(decisions.words([one], {"r": entry(**logged)}))
    assert lines[0].startswith("r, 1,000 tokens: ")
    assert lines[-1] == "    prefill-2     1.2 s = prefill 1.2"


# -- the report ------------------------------------------------------------------------------------


@pytest.fixture
def outcome() -> DemoOutcome:
    alone = [Alone(n, "prefill-1", 1024, 0.4, [n]) for n in range(3)]
    served = [
        ServedRequest(f"chat-{n}", n, 0.1 * n, 1024, "prefill-1", "decode-1") for n in range(3)
    ]
    for one in served:
        one.ttft_s, one.predicted_ttft_s = 0.1, 0.2
        one.hit_tokens, one.moved_tokens, one.tokens = 512, 1024, [one.request]
    refused = ServedRequest("off-0", 0, 0.0, 1024, rejected="ttft")
    return DemoOutcome(
        Options(requests=3),
        alone,
        served,
        [overload.Pass("off", served), overload.Pass("predictive", [refused])],
        counters={"nvme_hits": 1, "nvme_hit_bytes": 2048},
        network={
            "prefill": {"blocks": 1, "bytes": 2048},
            "decode": {"blocks": 2, "bytes": 4096},
        },
        ttft_objective_s=1.0,
        pass_s={"without the pool": 2.0, "with the pool": 1.0},
    )


BESIDE = "of the 3.00 before the overload"


def test_summary_adds_up(outcome: DemoOutcome, tmp_path: Path) -> None:
    summary = report.summarise(outcome)
    assert summary["hit_rate"] == 0.5
    assert summary["ttft_ratio"]["p50"] == pytest.approx(4.0)
    assert summary["ttft_predicted_ratio"]["p50"] == pytest.approx(0.5)
    assert summary["identical"]
    assert summary["found_blocks"] == {"home": 2, "network": 1}
    assert summary["handed_blocks"] == {"home": 4, "network": 2}
    assert summary["network_bytes"] == 6144
    assert summary["overload"]["off"]["met_share"] == 1.0
    assert summary["goodput_before_s"] == 3.0
    json.dumps(report.rows(outcome, summary), allow_nan=False)
    report.table(summary)
    shown = report.overload_table(summary)
    beside = list(shown.columns[1].cells)[list(shown.columns[0].cells).index(BESIDE)]
    assert beside == f"{3 / 1.2 / 3.0:.0%}", "three in time in 1.2 seconds, and three in one before"
    plot.plot(outcome, summary, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes()[:4] == b"\x89PNG"


def test_a_differing_token_and_a_missing_answer_are_found(outcome: DemoOutcome) -> None:
    outcome.conducted[1].tokens = [99]
    del outcome.conducted[2]
    assert report.differing(outcome.alone, outcome.conducted) == [1, 2]
    assert not report.summarise(outcome)["identical"]


# -- the whole -------------------------------------------------------------------------------------


def command(process: int) -> str:
    """The command line of a process, separated by NULs; "" if it has ended."""
    try:
        return Path(f"/proc/{process}/cmdline").read_text()
    except OSError:
        return ""


def under_way(folder: Path) -> bool:
    """Whether all processes run, and every worker has registered with the conductor."""
    processes = {process: command(process) for process in descendants(folder)}
    connections = Counter(
        one.pid for one in psutil.net_connections("tcp") if one.status == psutil.CONN_ESTABLISHED
    )
    return len(processes) >= ALL and any(
        "tiffin.conductor" in words and connections[process] >= WORKERS
        for process, words in processes.items()
    )


def until_under_way(demo: subprocess.Popen[Any], folder: Path) -> None:
    give_up = time.monotonic() + 120
    while not under_way(folder):
        assert demo.poll() is None, "it has ended"
        assert time.monotonic() < give_up
        time.sleep(0.1)


@pytest.fixture
def engines() -> None:
    for name in ("torch", "transformers"):
        pytest.importorskip(name)


@pytest.mark.slow
@pytest.mark.usefixtures("engines")
@pytest.mark.parametrize("nodes", [1, 2])
def test_the_quick_demo_runs_and_agrees(tmp_path: Path, nodes: int) -> None:
    temporary, out = tmp_path / "tmp", tmp_path / "out"
    temporary.mkdir()
    done = subprocess.run(
        [
            *DEMO,
            "--json",
            "--requests",
            "16",
            "--overload",
            "1",
            "--nodes",
            str(nodes),
            "--out",
            str(out),
            "--record",
            str(tmp_path / "requests.jsonl"),
        ],
        capture_output=True,
        text=True,
        timeout=150,
        env=environment(temporary),
    )
    assert done.returncode == 0, done.stderr
    summary: dict[str, Any] = json.loads(done.stdout)
    assert summary["identical"]
    assert summary["pool_failures"] == 0
    assert 0 < summary["hit_rate"] <= summary["reusable_rate"]
    written = json.loads((out / "demo-ttft.json").read_text())
    rows = written["with_the_pool"]
    assert [r["request"] for r in rows] == [*range(16)]
    assert {r["prefill"] for r in rows} <= {"prefill-1", "prefill-2"}
    assert {r["decode"] for r in rows} <= {"decode-1", "decode-2"}
    # Prefill and decode are separate processes: all full blocks come from the pool, except those
    # for which it had no room, because readers held all of a pool of a few prompts.
    short = [r for r in rows if r["moved_tokens"] < r["prompt_tokens"] // 512 * 512]
    assert [r for r in short if not r["not_saved"]] == []
    assert len(short) <= 2, short
    recording = read_recording(tmp_path / "requests.jsonl")
    recorded = {one.id: one for one in recording.requests}
    for row in rows:
        assert recorded[row["id"]].ttft_s == pytest.approx(row["ttft_s"], abs=0.5)
        assert recorded[row["id"]].prefill == row["prefill"]
    found, handed = summary["found_blocks"], summary["handed_blocks"]
    assert sum(r["hit_tokens"] for r in rows) == 512 * sum(found.values())
    assert sum(r["moved_tokens"] for r in rows) == 512 * sum(handed.values())
    assert min(found["home"], handed["home"]) >= 0
    if nodes == 1:
        assert summary["network_bytes"] == found["network"] == handed["network"] == 0
    for mode, passed in summary["overload"].items():
        assert passed["arrived"] == passed["admitted"] + passed["rejected"] > 0
        assert sum(passed["shadow"].values()) == passed["arrived"], mode
    assert summary["overload"]["off"]["rejected"] == 0
    assert {d["request_id"] for d in written["decisions"]} >= {r["id"] for r in rows}
    assert (out / "demo-ttft.png").stat().st_size > 10_000
    assert list(temporary.iterdir()) == []
    assert descendants(temporary) == []


@pytest.mark.slow
@pytest.mark.usefixtures("engines")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_outlives_an_interrupted_demo(tmp_path: Path, number: signal.Signals) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    with subprocess.Popen(
        [*DEMO, "--out", str(tmp_path)], stdout=subprocess.DEVNULL, env=environment(temporary)
    ) as demo:
        until_under_way(demo, temporary)
        demo.send_signal(number)
        status = demo.wait(30)
    deadline = time.monotonic() + 20
    while descendants(temporary) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert descendants(temporary) == []
    if number != signal.SIGKILL:  # after SIGKILL the folder cannot be removed
        assert status == 130
        assert list(temporary.iterdir()) == []


@pytest.mark.slow
@pytest.mark.usefixtures("engines")
@pytest.mark.parametrize(
    ("victim", "words"),
    [
        ("bench.demo.engines.worker", "died and ended with status -9"),
        ("tiffin.kvstore\0node", "was killed by SIGKILL"),
    ],
    ids=["worker", "node"],
)
def test_a_child_that_dies_is_reported(tmp_path: Path, victim: str, words: str) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    with subprocess.Popen(
        [*DEMO, "--json", "--out", str(tmp_path)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(temporary),
    ) as demo:
        until_under_way(demo, temporary)
        os.kill(next(p for p in descendants(temporary) if victim in command(p)), signal.SIGKILL)
        _, stderr = demo.communicate(timeout=60)
    assert demo.returncode == 2, stderr
    assert words in stderr
    assert descendants(temporary) == []
    assert list(temporary.iterdir()) == []
