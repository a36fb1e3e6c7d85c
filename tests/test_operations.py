"""The operators' guides are true: commands parse, and all options, numbers and tests are named."""

from __future__ import annotations

import configparser
import re
import shlex
from typing import TYPE_CHECKING

import pytest
from deploysupport import DOCS, ROOT, check, commands_of_shell, option, program

from tiffin.kvstore.cli.pool_status import _node, count_replicas
from tiffin.kvstore.directory import NodeRecord
from tiffin.kvstore.node.node import NodeOptions

if TYPE_CHECKING:
    from pathlib import Path

GUIDES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
FENCE = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.name)
def test_commands_in_guides_have_only_options_that_exist(guide: Path) -> None:
    for block in FENCE.findall(guide.read_text(encoding="utf-8")):
        for words in commands_of_shell(block):
            check(words)


def test_a_wrong_option_is_noticed() -> None:
    """The negative control of the tests above."""
    (words,) = commands_of_shell("cd x && tiffin node --dram 1GiB --speed 9  # fast")
    assert words == ["node", "--dram", "1GiB", "--speed", "9"]
    with pytest.raises(Exception, match="--speed"):  # typer's own, whose place changes
        check(words)
    with pytest.raises(AssertionError):
        check(["nod"])


def test_the_unit_of_systemd_starts_a_node_and_waits_for_its_flush() -> None:
    text = (DOCS / "operations.md").read_text(encoding="utf-8")
    (found,) = re.findall(r"^```ini\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read_string(found.replace("\\\n", " "))
    service = unit["Service"]
    program_path, *words = shlex.split(service["ExecStart"])
    assert program_path.endswith("/tiffin")
    check(words)
    assert words[0] == "node"
    assert option(words, "--socket").startswith(f"/run/{service['RuntimeDirectory']}/")
    assert option(words, "--nvme").startswith(f"/var/lib/{service['StateDirectory']}:")
    assert service["RuntimeDirectoryMode"] == service["StateDirectoryMode"] == "0700"
    flush_s = float(option(words, "--flush-s") or NodeOptions(1).flush_s)
    assert float(service["TimeoutStopSec"]) > flush_s


def test_every_command_and_client_of_the_guide_has_the_password_of_redis() -> None:
    text = (DOCS / "operations.md").read_text(encoding="utf-8")
    urls = re.findall(r"redis://10\.0\.0\.1[^\s\"`]*", text)
    assert len(urls) >= 5
    assert [url for url in urls if "password_file=/etc/tiffin/redis-password" not in url] == []


@pytest.mark.parametrize(
    ("command", "page"),
    [
        ("node", "node.md"),
        ("up", "operations.md"),
        ("status", "operations.md"),
        ("drain", "operations.md"),
        ("token", "operations.md"),
        ("demo", "demo.md"),
    ],
)
def test_every_option_is_in_its_guide(command: str, page: str) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    for parameter in program().commands[command].params:
        if parameter.param_type_name == "argument":
            assert parameter.name.upper() in text
            continue
        names = [*parameter.opts, *parameter.secondary_opts]
        pattern = "|".join(rf"`[^`\n]*(?<![\w-]){re.escape(n)}(?![\w-])[^`\n]*`" for n in names)
        assert re.search(pattern, text), names


def test_every_number_of_a_pool_is_in_the_guide() -> None:
    text = (DOCS / "operations.md").read_text(encoding="utf-8")
    record = NodeRecord("a", "h:1", "", "", 1, 1)
    for name in [*_node(record, None), *count_replicas([], {}, 0)]:
        assert re.search(rf"`[^`\n]*\b{name}\b[^`\n]*`|^\| `{name}`", text, re.MULTILINE), name


def test_tests_that_the_failure_page_names_exist() -> None:
    text = (DOCS / "failure.md").read_text(encoding="utf-8")
    named = re.findall(r"`(tests/[\w/.]+)`", text)
    assert len(named) > 20
    for path in named:
        assert (ROOT / path).exists(), path
