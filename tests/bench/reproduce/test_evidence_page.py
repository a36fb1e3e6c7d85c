"""docs/evidence.md is what `tiffin reproduce --all` has written, of the reproductions that there
are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tiffin.bench.reproduce.registry import Reproduction, reproductions

DOCS = Path(__file__).parents[3] / "docs"
PAGE = DOCS / "evidence.md"
REPRODUCTIONS = reproductions()


def section(one: Reproduction) -> str:
    """The page's text about one."""
    _, _, rest = PAGE.read_text().partition(f"## {one.title}\n")
    return rest.partition("\n## ")[0]


@pytest.mark.parametrize("name", REPRODUCTIONS)
def test_each_has_its_section_as_it_describes_itself(name: str) -> None:
    one = REPRODUCTIONS[name]
    said = section(one)
    assert f"`tiffin reproduce {name}`" in said
    assert one.about in said


@pytest.mark.parametrize("name", REPRODUCTIONS)
def test_what_deviates_or_does_not_hold_is_explained(name: str) -> None:
    """Bold is what deviates by more than 15%, or does not hold."""
    said = section(REPRODUCTIONS[name])
    tables, _, _ = said.rpartition("|\n")
    if re.search(r"\*\*(no|[+-]\d+%)\*\*", tables):
        after = re.sub(r"!\[.*?\]\(.*?\)", "", said.rpartition("|\n")[2])
        assert len(after.strip()) > 40, "a note below the table says why"


def test_every_plot_is_there() -> None:
    images = re.findall(r"\]\((images/evidence/.*?)\)", PAGE.read_text())
    assert len(images) > 15
    for image in images:
        assert (DOCS / image).read_bytes().startswith(b"\x89PNG")
