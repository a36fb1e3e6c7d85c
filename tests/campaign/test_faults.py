"""The campaign of kills and stops detects broken promises; a short run of it finds none."""

from __future__ import annotations

import time
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest
from faults.faultpool import Watch
from kvsupport import EXTENT, payloads_of

from tiffin.kvstore import Client

from . import everything, faults
from .visitor import BLOCKS_MAX, PROMPTS, VERBS, Account, Visitor, prompt

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# A tenth of the gets of `make test-campaign` would take too long here.
GETS = 5_000
URL = f"embedded:?dram={PROMPTS * BLOCKS_MAX * EXTENT}"


@pytest.fixture
def visitor() -> Iterator[Visitor]:
    with (
        closing(Watch()) as watch,
        closing(Visitor([URL], 1, watch, Account(), over_s=0.0)) as made,
    ):
        yield made


def calls(number: int) -> Callable[[], bool]:
    """A condition that ends a visit after `number` evaluations."""
    left = iter(range(number))
    return lambda: next(left, None) is None


def test_a_visit_of_a_store_that_keeps_its_promises(visitor: Visitor) -> None:
    visitor._over_s = 60.0  # this machine's speed is not tested
    visitor.visit(calls(300))
    assert visitor.account.findings == []
    assert visitor.account.gets > 0
    assert visitor.account.checked_blocks > 0


def test_wrong_bytes_are_found(visitor: Visitor) -> None:
    prefix = prompt(1, 2)
    wrong = payloads_of(prefix)
    wrong[1] = wrong[0]
    with Client.open(URL) as client:
        client.put(prefix, wrong)
        for verb in list(VERBS)[:2]:
            verb(visitor, client, prefix, 60.0)
    assert visitor.account.wrong == [f"wrong bytes for {prefix.keys[1].hex()}"] * 2


def test_a_late_call_is_found_and_one_during_which_the_process_stood_still_is_not(
    visitor: Visitor,
) -> None:
    def sleeper(timeout_s: float) -> None:
        time.sleep(timeout_s + 0.2)

    visitor.timed(sleeper, timeout_s=0.1)
    (said,) = visitor.account.late
    assert "took 0." in said
    assert "in sleeper" in said
    visitor._watch._last -= 1.0  # as if the watch's thread had not run either
    visitor._watch.close()
    visitor._watch._still.append((time.monotonic(), time.monotonic() + 60.0))
    visitor.timed(sleeper, timeout_s=0.1)
    assert len(visitor.account.late) == 1


def test_an_error_without_a_type_of_ours_is_found(visitor: Visitor) -> None:
    class Client:
        def __getattr__(self, name: str) -> Any:
            raise KeyError(name)

    for _ in range(20):
        visitor._call(Client())
    assert len(visitor.account.untyped) == 20


@pytest.mark.parametrize("kind", everything.KINDS)
def test_whatever_one_part_finds_fails_the_whole(
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Any,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(everything, "OUT", tmp_path / "out" / "campaign.json")
    found: dict[str, Any] = {"part": "faults", "gets": 12_345, "faults": {"kill_a_node": 2}}
    monkeypatch.setattr(everything.Part, "run", lambda part: [dict(found)])
    assert everything.main([]) == 0
    assert "37,035" in capsys.readouterr().out
    found[kind] = ["this and that"]
    assert everything.main([]) == 1
    assert "this and that" in capsys.readouterr().err


@pytest.mark.slow
def test_a_part_that_dies_is_a_finding() -> None:
    (report,) = everything.Part("no such part", ()).run()
    assert everything.findings(report) == 1


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_mixture_of_faults_costs_more_than_blocks() -> None:
    run = faults.Campaign(seed=1)
    try:
        run.run(GETS, lambda _: None)
    finally:
        run.close()
    assert run.tally.findings == [], run.tally.refused
    # Some calls are refused, because no node answers; most are not.
    assert all(run.tally.done[verb.__name__] for verb in VERBS), run.tally
    assert run.tally.done.total() > 2 * run.tally.refused.total(), run.tally
