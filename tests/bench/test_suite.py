"""The common part of all `tiffin bench` commands, tested with a suite of toy measurements."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from tiffin.bench.display import add_command, carry_out, legend, markdown, number, table
from tiffin.bench.store.rows import Row, Target, single
from tiffin.bench.suite import Missing, Suite
from tiffin.kvstore.errors import NodeUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from click.testing import Result
    from rich.console import RenderableType


@dataclass(frozen=True)
class Sizes:
    rounds: int = 3


@dataclass(frozen=True)
class Setting:
    sizes: Sizes
    tell: Callable[[str], None] = print


FAST, SLOW = (
    Row(name, "what", "us", single(value), "limit", single(10.0), (Target("ratio", "<=", 2),))
    for name, value in (("fast", 12.0), ("slow", 30.0))
)
# The last output of a process that died: its brackets are not markup, only its last line is short.
LAST_WORDS = """it has ended: Traceback (most recent call last):
  File "peer.py", line 7, in <module>
ValueError: no [red] paint
"""


def both(setting: Setting) -> list[Row]:
    setting.tell("mixing")
    return [FAST, SLOW]


def crash(_: Setting) -> list[Row]:
    raise NodeUnavailable(LAST_WORDS)


def lack(_: Setting) -> list[Row]:
    raise Missing("apt install paint")


TOYS: Suite[Setting] = Suite("toys", {"both": both, "crash": crash})
NEEDY: Suite[Setting] = Suite("needy", {"lack": lack, "both": both})


def program(suite: Suite[Setting], out: Path, names: list[str]) -> Callable[..., Result]:
    app = typer.Typer()

    def command(as_json: bool = False, as_markdown: bool = False) -> None:
        """Toys."""
        setting = partial(Setting, Sizes())
        carry_out(suite, setting, names, out, as_json=as_json, as_markdown=as_markdown)

    add_command(app, suite.name, command)
    return lambda *options: CliRunner().invoke(app, ["bench", suite.name, *options])


def test_rows_come_in_the_order_asked_for_and_the_report_is_json(tmp_path: Path) -> None:
    started: list[str] = []
    report = TOYS.run(Setting(Sizes()), ["both"], started.append)
    assert started == ["both"]
    assert report.rows == [FAST, SLOW]
    assert report.verdict() == "1 of 2 targets met"
    path = report.write(tmp_path / "new" / "out")
    assert path.name == "bench-toys.json"
    plain = json.loads(path.read_text())
    assert list(plain) == ["environment", "sizes", "rows", "crashed", "missing"]
    assert plain["sizes"] == asdict(Sizes())
    assert [row["met"] for row in plain["rows"]] == [True, False]


def test_a_crash_is_reported_and_the_others_still_run() -> None:
    report = TOYS.run(Setting(Sizes()), ["crash", "both"], lambda _: None)
    assert report.crashed == {"crash": f"NodeUnavailable: {LAST_WORDS}"}
    assert report.rows == [FAST, SLOW]
    assert report.verdict() == "1 of 2 targets met, 1 crashed"
    assert "`fast`" in markdown(report)


def test_what_a_measurement_lacks_is_named() -> None:
    report = NEEDY.run(Setting(Sizes()), ["lack", "both"], lambda _: None)
    assert report.plain()["missing"] == {"lack": "apt install paint"}
    assert report.rows == [FAST, SLOW]
    assert not report.crashed


def test_errors_that_are_nobodys_fault_but_ours_are_not_hidden() -> None:
    def wrong(_: Setting) -> list[Row]:
        raise TypeError("a mistake in the benchmark")

    suite: Suite[Setting] = Suite("wrong", {"wrong": wrong})
    with pytest.raises(TypeError, match="a mistake"):
        suite.run(Setting(Sizes()), ["wrong"], lambda _: None)


def test_a_run_that_is_cut_off_keeps_what_it_has_measured(tmp_path: Path) -> None:
    def cut_off(_: Setting) -> list[Row]:
        raise KeyboardInterrupt

    suite: Suite[Setting] = Suite("toys", {"both": both, "late": cut_off})
    program(suite, tmp_path, ["both", "late"])()
    rows = json.loads((tmp_path / "bench-toys.json").read_text())["rows"]
    assert [row["name"] for row in rows] == ["fast", "slow"]


def shown(*what: RenderableType) -> str:
    """The text as on a terminal of 80 columns."""
    console = Console(width=80)
    with console.capture() as captured:
        console.print(*what, sep="\n")
    return captured.get()


def test_of_a_crash_the_legend_has_the_last_line() -> None:
    report = TOYS.run(Setting(Sizes()), ["crash", "both"], lambda _: None)
    text = shown(legend(report))
    assert "crashed: ValueError: no [red] paint" in text
    assert "Traceback" not in text


def test_figures_are_whole_lines_of_a_terminal_and_their_words_stand_below() -> None:
    long = replace(SLOW, name="remote-get-64MiB-verified", what="a [word] in brackets")
    suite: Suite[Setting] = Suite("toys", {"both": lambda _: [FAST, long]})
    report = suite.run(Setting(Sizes()), ["both"], lambda _: None)
    lines = shown(table(report)).splitlines()
    assert len(lines) == 3  # a header, and a line per row
    assert lines[2].split()[:2] == [long.name, number(long.value.p50)]
    assert lines[2].rstrip().endswith(f"{long.target_text}: missed")
    assert "a [word] in brackets; limit: " in shown(legend(report))


def test_the_program_says_below_the_table_what_went_wrong(tmp_path: Path) -> None:
    done = program(TOYS, tmp_path, ["crash", "both"])()
    assert done.exit_code == 1
    # From the crashed measurement to the last output of the process that it depended on.
    assert "crash crashed:\nTraceback" in done.stderr
    assert "in crash" in done.stderr
    assert LAST_WORDS in done.stderr
    assert "1 of 2 targets met, 1 crashed" in done.stderr

    done = program(NEEDY, tmp_path, ["lack", "both"])("--as-json")
    assert done.exit_code == 0
    assert "left out lack: apt install paint" in done.stderr
    assert json.loads(done.stdout) == json.loads((tmp_path / "bench-needy.json").read_text())


def test_a_name_that_is_no_measurement_is_refused_before_anything_runs(tmp_path: Path) -> None:
    done = program(TOYS, tmp_path, ["both", "nothing"])("--as-markdown")
    assert done.exit_code == 2
    assert "'nothing'" in done.output
    assert not list(tmp_path.iterdir())


def test_commands_join_the_bench_that_is_there_already() -> None:
    app = typer.Typer()
    add_command(app, "first", lambda: None)
    add_command(app, "second", lambda: None)
    (group,) = app.registered_groups
    assert group.typer_instance is not None
    assert [one.name for one in group.typer_instance.registered_commands] == ["first", "second"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.001234, "0.00123"),
        (12.34, "12.3"),
        (999.4, "999"),
        (1000.0, "1000"),
        (123456.0, "123456"),
    ],
)
def test_numbers_are_for_people(value: float, text: str) -> None:
    assert number(value) == text
