"""Names and messages of other clients are shown as text, never as control codes of a terminal."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from tiffin.kvstore.cli import main
from tiffin.kvstore.cli.status import pool_tables
from tiffin.kvstore.errors import InvalidInput
from tiffin.kvstore.node.node import Node, NodeOptions
from tiffin.kvstore.text import NAME_MAX, check_name, printable

GOOD = ["n", "rack2-node7", "10.0.0.5:7700", "nöde 7", "節点", "n" * NAME_MAX]
BAD = [
    "",
    "n" * (NAME_MAX + 1),
    "a\nb",
    "a\tb",
    "\x1b[2J",
    "\x9b31m",
    "\x7f",
    "\u202egnp",
    "\udcff",
]
EVIL = "\x1b]0;title\a\x1b[2J\r\x9b1m\u202e"


@pytest.mark.parametrize("name", GOOD)
def test_names_of_nodes(name: str) -> None:
    assert check_name(name) == name


@pytest.mark.parametrize("name", BAD, ids=ascii)
def test_what_is_no_name_is_refused_in_words_that_can_be_shown(name: str) -> None:
    with pytest.raises(InvalidInput, match="a node's name is 1 to 200") as raised:
        check_name(name)
    assert str(raised.value).isprintable()
    with pytest.raises(InvalidInput):
        Node(NodeOptions(1 << 20), name=name)


def test_a_daemon_with_a_bad_name_does_not_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    arguments = ["node", "--name", EVIL, "--dram", "1MiB", "--socket", str(tmp_path / "s")]
    monkeypatch.setattr(sys, "argv", ["tiffin", *arguments])
    with pytest.raises(SystemExit) as ended:
        main(installed=False)
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert "a node's name is" in told
    assert told.replace("\n", "").isprintable()


nested = st.recursive(
    st.none() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)


def strings_of(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    inside = [*value, *value.values()] if isinstance(value, dict) else value
    return [s for one in inside for s in strings_of(one)] if isinstance(inside, list) else []


@given(nested)
def test_whatever_is_in_it_can_be_printed(value: Any) -> None:
    for text in strings_of(printable(value)):
        assert text.replace("\n", "").replace("\t", "").isprintable()


def test_what_can_be_printed_stays_as_it_is() -> None:
    value = {"a": [1, 2.5, None, True, "nöde"], "b": {"c": "two\nlines"}}
    assert printable(value) == value
    assert printable("a\x1bb") == "a?b"


def test_status_of_a_pool_whose_nodes_and_directory_lie() -> None:
    tier = {"capacity_bytes": 1 << 30, "used_bytes": 1 << 20, "free_bytes": 0}
    node = {"number": 1, "name": EVIL, "address": EVIL, "state": "up", "error": EVIL}
    node |= {"uptime_s": 1.0, "blocks": 3, "lag_events": 0, "tiers": {"dram": tier}}
    found = {
        "pool": "p",
        "directory": {"healthy": False, "kind": EVIL, "address": EVIL, "down": [EVIL]},
        "nodes": [node],
        "links": {EVIL: {EVIL: [1e9, 0.1]}},
    }
    console = Console(width=250)
    with console.capture() as capture:
        console.print(pool_tables(found))
    assert capture.get().replace("\n", "").isprintable()
    assert "title" in capture.get()
