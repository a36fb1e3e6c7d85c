"""The store's benchmark runs and gives the rows that it promises. No timing is asserted."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import typer
from rowsupport import check
from typer.testing import CliRunner

from tiffin.bench.display import markdown, table
from tiffin.bench.environment import environment, environment_lines
from tiffin.bench.store import cli
from tiffin.bench.store.rows import Row, Side, Target, interleave, single
from tiffin.bench.store.setting import KIB, MIB, Setting, Sizes, schema_of
from tiffin.bench.store.suite import SUITE

if TYPE_CHECKING:
    from pathlib import Path

TINY = Sizes(
    rounds=2,
    calls=2,
    get_blocks=3,
    large_block_bytes=1 * MIB,
    copied_blocks=2,
    disk_block_bytes=(1 * MIB,),
    disk_bytes=4 * MIB,
    disk_rounds=1,
    disk_pause_s=0.0,
    prompt_tokens=4096,
    restart_blocks=20,
    restart_rounds=1,
    resident_blocks=20_000,  # memory is allocated by the MiB
    operations=2000,
)


@pytest.mark.parametrize("name", [name for name in SUITE.measurements if name != "allocator"])
def test_every_measurement_gives_rows_with_limits(name: str, tmp_path: Path) -> None:
    report = SUITE.run(Setting(TINY, tmp_path), [name], lambda _: None)

    assert not report.crashed
    check(report.rows)
    assert not list(tmp_path.iterdir())  # the slabs are removed


def test_names_of_rows_are_unique_and_the_report_is_json(tmp_path: Path) -> None:
    report = SUITE.run(Setting(TINY, tmp_path), ["keys", "put"], lambda _: None)
    names = [row.name for row in report.rows]
    assert len(set(names)) == len(names)

    plain = json.loads(report.write(tmp_path / "new" / "out").read_text())
    assert [row["name"] for row in plain["rows"]] == names
    assert plain["environment"]["cores"] >= 1
    assert plain["sizes"]["rounds"] == TINY.rounds
    assert table(report).row_count == len(names)
    assert all(f"`{name}`" in markdown(report) for name in names)


def test_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sizes, "quick", classmethod(lambda cls: TINY))
    app = typer.Typer()
    cli.commands(app)
    arguments = ["bench", "store", "--quick", "--json", "--row", "keys", "--out", str(tmp_path)]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    report: dict[str, Any] = json.loads((tmp_path / "bench-store.json").read_text())
    assert {row["name"] for row in report["rows"]} == {"keys-int64", "keys-uint32", "keys-list"}
    assert json.loads(done.stdout) == report

    done = CliRunner().invoke(app, ["bench", "store", "--row", "nothing"])
    assert done.exit_code == 2


def test_ratios_and_targets() -> None:
    row = Row("x", "what", "us", single(120.0), "limit", single(10.0), (Target("p50", "<=", 150),))
    assert row.ratio == 12
    assert row.met is True
    assert row.target_text == "p50 <= 150 us"
    assert Target("ratio", "<=", 11.9).holds(row) is False
    assert Target("ratio", ">=", 12).text("us") == "ratio >= 12"
    assert Row("x", "what", "us", single(1.0), "limit", single(1.0)).met is None


def test_sides_take_turns_and_resets_are_not_timed() -> None:
    order: list[str] = []
    first = Side(lambda: order.append("a"), lambda: order.append("reset"))
    second = Side(lambda: order.append("b"))
    seconds = interleave([first, second], rounds=2, batch=1)
    assert order == ["a", "reset", "b"] * 4  # two warm-up rounds, two measured ones
    assert [len(taken) for taken in seconds] == [2, 2]


@pytest.mark.parametrize("block_bytes", [64 * KIB, 16 * MIB, 64 * MIB])
def test_blocks_have_exactly_the_size_asked_for(block_bytes: int) -> None:
    assert schema_of(block_bytes).block_bytes == block_bytes
    with pytest.raises(ValueError, match="multiple"):
        schema_of(block_bytes + 1)


def test_the_environment_is_in_words_and_numbers() -> None:
    found = environment()
    assert json.loads(json.dumps(found)) == found
    assert len(environment_lines(found)) == 3
