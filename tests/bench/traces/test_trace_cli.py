"""`tiffin trace`."""

from __future__ import annotations

import json
from importlib.resources import as_file, files
from typing import TYPE_CHECKING

import pytest
import typer
from typer.testing import CliRunner

from tiffin.bench.traces.cli import commands
from tiffin.kvstore.errors import InvalidInput

if TYPE_CHECKING:
    from pathlib import Path


def tiffin(*arguments: object) -> str:
    app = typer.Typer()
    commands(app)
    app.callback()(lambda: None)
    done = CliRunner().invoke(app, ["trace", *map(str, arguments)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_info_prints_the_figures_or_json() -> None:
    with as_file(files("tiffin.bench.data") / "conversation_slice.jsonl") as path:
        assert "hit without limit" in tiffin("info", path)
        described = json.loads(tiffin("info", path, "--json"))
    assert described["requests"] == 106
    assert described["sharing"]["lru_hit"].keys() == {"1000", "8000", "32000"}


def test_what_is_generated_can_be_shown_and_imitated(tmp_path: Path) -> None:
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    tiffin("generate", "tool-agent", "--requests", 50, "--seed", 7, "--bursts", 4, "--out", one)
    assert json.loads(tiffin("info", one, "--json"))["requests"] == 50
    assert "ratio" in tiffin("look-alike", one, "--seed", 1, "--out", two)
    assert len(two.read_text().splitlines()) == 50


def test_a_place_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="cannot write"):
        tiffin("generate", "multi-turn", "--requests", 1, "--out", tmp_path / "no" / "file")
