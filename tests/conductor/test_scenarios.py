"""Every script in `scenarios/` is played, and must be unchanged by the answers.

    python tests/conductor/test_scenarios.py        writes the present answers into the scripts

Read the difference before you commit it: each answer is a promise.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from scenariosupport import play

SCRIPTS = sorted((Path(__file__).parent / "scenarios").glob("*.txt"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_the_conductor_answers_as_it_is_written(script: Path) -> None:
    written = script.read_text()
    assert play(written).splitlines() == written.splitlines()


def test_there_are_scripts() -> None:
    assert len(SCRIPTS) >= 8


if __name__ == "__main__":
    for path in SCRIPTS:
        path.write_text(play(path.read_text()))
