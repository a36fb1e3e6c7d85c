"""What a reproduction finds is shown as it is: as tables, JSON, Markdown, HTML and images."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from tiffin.bench.plots import Line, Plot, png
from tiffin.bench.reproduce import cli, registry
from tiffin.bench.reproduce.evidence import Comparison, Evidence, Statement
from tiffin.bench.reproduce.registry import Effort, Reproduction, reproductions
from tiffin.bench.reproduce.report import Finding, html_page, markdown

if TYPE_CHECKING:
    from pathlib import Path

PLOT = Plot(
    "waits",
    "Waits",
    "rate",
    "seconds",
    (Line("ours", (1.0, 2.0), (3.0, 4.0)), Line("paper", (1.0,), (3.5,), kind="dots")),
    log_x=True,
)
FOUND = Evidence(
    (
        Comparison("mean wait", 2.0, 2.2, "s", spread=0.1),
        Comparison("hits", 50.0, 30.0, "%"),
        Comparison("nothing", 0.0, 1.0),
    ),
    (Statement("A <beats> B", np.bool_(False), "A 3, B 2"),),  # type: ignore[arg-type]
    (PLOT,),
    ("Hits are fewer, as blocks are larger.",),
)


def run(effort: Effort, tell: registry.Tell) -> Evidence:
    tell("half")
    return FOUND


FINDING = Finding(Reproduction("waits", "Waits", "A paper, figure 1", run), FOUND, 1.25)


def invoke(monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[int, str]:
    monkeypatch.setattr(cli, "reproductions", lambda: {"waits": FINDING.reproduction})
    monkeypatch.setattr(registry, "reproductions", lambda: {"waits": FINDING.reproduction})
    app = typer.Typer()
    app.callback()(lambda: None)
    cli.commands(app)
    done = CliRunner().invoke(app, ["reproduce", *words])
    return done.exit_code, done.output


def test_a_deviation_is_a_share_of_the_papers_figure() -> None:
    near, far, nothing = FOUND.comparisons
    assert near.deviation == pytest.approx(0.1)
    assert near.near
    assert far.deviation == pytest.approx(-0.4)
    assert not far.near
    assert nothing.deviation == 0.0


def test_the_page_has_every_figure_and_marks_what_deviates() -> None:
    page = markdown([FINDING], "images")
    assert "of 3 published figures 2 are within 15%; of 1 statements 0 hold" in page
    assert "| mean wait | 2 s | 2.2 ± 0.1 s | +10% |" in page
    assert "| hits | 50.0% | 30.0% | **-40%** |" in page
    assert "| A <beats> B | **no** | A 3, B 2 |" in page
    assert "![Waits](images/waits.png)" in page
    assert "Hits are fewer, as blocks are larger." in page


@pytest.mark.slow
def test_a_report_is_one_file_with_its_images_and_no_markup_of_others() -> None:
    page = html_page([FINDING])
    assert "data:image/png;base64," in page
    assert "A &lt;beats&gt; B" in page
    assert "http" not in page


def test_an_image_is_a_png() -> None:
    assert png(PLOT).startswith(b"\x89PNG")


def test_the_command_shows_writes_and_lists(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert invoke(monkeypatch)[1].startswith("waits ")
    html, page = tmp_path / "report.html", tmp_path / "page.md"
    files = ("--html", str(html), "--plots", str(tmp_path / "plots"), "--markdown", str(page))
    code, shown = invoke(monkeypatch, "waits", *files)
    assert code == 0
    assert "-40%" in shown
    assert "Hits are fewer" in shown
    assert html.read_text().startswith("<!doctype html>")
    assert (tmp_path / "plots" / "waits.png").read_bytes().startswith(b"\x89PNG")
    assert page.read_text().startswith("# Evidence")
    code, shown = invoke(monkeypatch, "--all", "--json")
    (one,) = json.loads(shown)
    assert one["comparisons"][1]["deviation"] == -0.4
    code, shown = invoke(monkeypatch, "wait")
    assert code == 2
    assert "there are waits" in shown


def test_every_reproduction_says_what_it_compares() -> None:
    found = reproductions()
    assert len(found) > 15
    for one in found.values():
        assert one.about, one.name
        assert one.title
        assert one.source


def test_more_effort_is_more_seeds() -> None:
    assert set(Effort().seeds) < set(Effort.full().seeds)
