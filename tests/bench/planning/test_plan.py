"""The ratio, and `tiffin plan`."""

from __future__ import annotations

import json
from importlib.resources import as_file, files
from typing import TYPE_CHECKING, Any

import pytest
import typer
from planningsupport import profile, stream
from typer.testing import CliRunner

from tiffin.bench.planning.attainment import Goals, Unit, pair_share
from tiffin.bench.planning.cli import commands, objectives
from tiffin.bench.planning.ratio import Fleet, Search, fleet_share, neighbours
from tiffin.kvstore.errors import InvalidInput

if TYPE_CHECKING:
    from click.testing import Result

UNIT = Unit(profile(), 100_000)
GOALS = Goals(1.0, 0.03, batch_tokens=0)
WORKLOAD = stream(1500, output=200)


def fleet(prefills: int, decodes: int) -> Fleet:
    return Fleet(UNIT, UNIT, prefills, decodes)


def test_one_instance_of_each_role_is_a_pair() -> None:
    busy = WORKLOAD.faster(8)
    assert fleet_share(busy, fleet(1, 1), GOALS) == pair_share(busy, UNIT, UNIT, GOALS)


def test_neighbours_use_all_that_is_there() -> None:
    wide = Fleet(UNIT, Unit(profile(2), 100_000), 3, 2)
    assert [(one.prefills, one.decodes) for one in neighbours(wide, 7)] == [(2, 2), (4, 1)]
    assert [(one.prefills, one.decodes) for one in neighbours(fleet(1, 1), 2)] == []


def test_the_search_finds_what_trying_all_ratios_finds() -> None:
    search = Search(lambda prefills: WORKLOAD, GOALS)
    found = search.best([UNIT], 8)[0]
    every = [search.estimate(fleet(count, 8 - count)).goodput for count in range(1, 8)]
    assert found.goodput == pytest.approx(max(every), rel=0.05)


def test_more_gpus_serve_more_and_longer_prompts_less() -> None:
    few, many = (Search(lambda prefills: WORKLOAD, GOALS).best([UNIT], n)[0] for n in (4, 8))
    longer = Search(lambda prefills: WORKLOAD.longer(1.5), GOALS).best([UNIT], 8)[0]
    assert few.goodput < longer.goodput < many.goodput


def test_two_instances_have_to_fit() -> None:
    assert Search(lambda prefills: WORKLOAD, GOALS).best([Unit(profile(4), 10**6)], 7) == []


# -- the command -----------------------------------------------------------------------------------


def tiffin(*arguments: object) -> Result:
    app = typer.Typer()
    commands(app)
    app.callback()(lambda: None)
    with as_file(files("tiffin.bench.data") / "conversation_slice.jsonl") as path:
        asked = ["plan", "--trace", str(path), *map(str, arguments)]
        return CliRunner().invoke(app, asked, catch_exceptions=False)


def planned(*arguments: object) -> dict[str, Any]:
    done = tiffin("--ttft", 10, "--tbt", 0.1, *arguments, "--json")
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.slow
def test_a_plan_is_confirmed_in_the_whole_simulation() -> None:
    found = planned("--gpus", 24, "--confirm", 1, "--requests", 50)
    (best,) = found["fleets"]
    assert best["prefill"] + best["decode"] == 3
    assert best["gpus"] == 24
    assert best["goodput"] > 0
    assert best["per_gpu"] == pytest.approx(best["goodput"] / 24)
    changes = [one["change"] for one in found["what_if"]]
    assert changes[:3] == ["as it is", "objectives 20% tighter", "prompts 20% longer"]
    base, tighter, longer = (one["goodput"] for one in found["what_if"][:3])
    assert tighter <= base
    assert longer <= base


def test_parallelism_is_chosen_for_each_role() -> None:
    found = planned("--gpus", 16, "--profile", "llama-3.1-70b.h100.vllm", "--confirm", 0)
    best = found["fleets"][0]
    assert best["goodput"] is None
    assert best["estimated"] > 0
    assert best["gpus"] <= 16
    used = {best["prefill_profile"], best["decode_profile"]}
    family = {f"llama-3.1-70b.h100.tp{degree}.vllm" for degree in (4, 8)}
    assert used <= family, "on two GPUs, the longest prompt has no room beside the weights"


def test_the_table_names_the_best_and_the_runner_up() -> None:
    done = tiffin("--slo", "ttft=10,tbt=0.1", "--gpus", 32, "--confirm", 0)
    assert done.exit_code == 0
    for word in ("best", "goodput", "prompts 20% longer", "one instance less"):
        assert word in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--gpus", 32, "--ttft", 1), "an objective is missing: --tbt"),
        (("--gpus", 32, "--slo", "ttft=1,tpot=2"), "ttft and tbt, not 'tpot'"),
        (("--gpus", 32, "--slo", "ttft=soon"), "not a number of seconds"),
        (("--gpus", 8, "--slo", "ttft=9,tbt=1"), "two instances need 16 GPUs"),
        (("--gpus", 32, "--slo", "ttft=9,tbt=0.001"), "no fleet serves 90%"),
        (("--gpus", 8, "--slo", "ttft=9,tbt=1", "--profile", "gpt"), "no profile 'gpt'"),
        (("--gpus", 32, "--slo", "ttft=9,tbt=1", "--kv-tokens", 99), "no instance has room"),
    ],
)
def test_what_can_not_be_planned_is_said_in_one_line(
    arguments: tuple[object, ...], said: str
) -> None:
    done = tiffin(*arguments)
    assert done.exit_code == 2
    assert said in " ".join(done.output.split())


def test_an_objective_is_given_once() -> None:
    assert objectives(None, 0.1, "ttft=2") == (2.0, 0.1)
    with pytest.raises(InvalidInput, match="twice"):
        objectives(1.0, None, "ttft=2,tbt=1")
    with pytest.raises(InvalidInput, match="above 0"):
        objectives(None, None, "ttft=0,tbt=1")
