"""What operators copy is true: manifests are YAML, their commands parse, guides name options."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import typer
from typer.main import get_command

from tiffin.bench import cli as bench_cli
from tiffin.kvstore import cli
from tiffin.kvstore.directory import NodeRecord
from tiffin.kvstore.overview import _node, count_replicas

if TYPE_CHECKING:
    from collections.abc import Iterator

yaml = pytest.importorskip("yaml", reason="PyYAML comes with the engines extra")

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
DEPLOY = DOCS / "deploy"
MANIFESTS = sorted(DEPLOY.rglob("*.yaml"))
GUIDES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
FENCE = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def program() -> Any:
    app = typer.Typer()
    cli.commands(app)
    bench_cli.commands(app)
    return get_command(app)


def check(words: list[str]) -> None:
    """Raises what a usage error raises unless `tiffin` takes these words. Runs nothing."""
    command, rest = program(), words
    while hasattr(command, "commands"):
        name, rest = rest[0], rest[1:]
        assert name in command.commands, words
        command = command.commands[name]
    command.make_context("tiffin", list(rest))


# -- what stands in manifests ----------------------------------------------------------------------


def documents(path: Path) -> list[Any]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def walk(value: Any) -> Iterator[Any]:
    yield value
    children = value.values() if isinstance(value, dict) else value
    if isinstance(value, dict | list):
        for child in children:
            yield from walk(child)


def commands_in(path: Path) -> list[list[str]]:
    """Every `tiffin` command of a manifest: as a list of words, or inside one for a shell."""
    found = []
    for value in walk(documents(path)):
        if isinstance(value, list) and value and all(isinstance(word, str) for word in value):
            if value[0] == "node":
                found.append(value)
            elif value[0] == "tiffin":
                found.append(value[1:])
            elif value[:2] == ["sh", "-c"]:
                found += commands_of_shell(value[2])
    return found


def commands_of_shell(text: str) -> list[list[str]]:
    text = text.replace("\\\n", " ")
    lines = re.findall(r"(?:^|&& *)(?:UID=\S+ )?tiffin ([^&|#\n]+)", text, re.MULTILINE)
    return [shlex.split(line) for line in lines]


def test_there_are_manifests() -> None:
    names = {path.name for path in MANIFESTS}
    assert names == {"docker-compose.yaml", "redis.yaml", "daemonset.yaml", "statefulset.yaml"}


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_a_manifests_commands_have_only_options_that_exist(path: Path) -> None:
    commands = commands_in(path)
    assert commands or path.name == "redis.yaml"
    for words in commands:
        check(words)


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_containers_are_not_root_and_their_references_exist(path: Path) -> None:
    for document in documents(path):
        pods = [v for v in walk(document) if isinstance(v, dict) and "containers" in v]
        for pod in pods:
            assert pod["securityContext"]["runAsNonRoot"] is True
            containers = [*pod["containers"], *pod.get("initContainers", [])]
            claims = document["spec"].get("volumeClaimTemplates", [])
            volumes = {v["name"] for v in pod.get("volumes", [])}
            volumes |= {claim["metadata"]["name"] for claim in claims}
            mounted = {m["name"] for c in containers for m in c.get("volumeMounts", [])}
            assert mounted == volumes, "every volume is used, every mount has one"
            for container in pod["containers"]:
                drops = container["securityContext"]["capabilities"]["drop"]
                assert drops == ["ALL"]
                assert "limits" in container["resources"]
            labels = document["spec"]["template"]["metadata"]["labels"]
            assert document["spec"]["selector"]["matchLabels"] == labels


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_a_stop_has_time_to_write_back(path: Path) -> None:
    """30 s of --flush-s, after up to 240 s of draining where a pod is drained first."""
    for value in walk(documents(path)):
        if isinstance(value, dict) and "terminationGracePeriodSeconds" in value:
            assert value["terminationGracePeriodSeconds"] > 240 + 30
        if isinstance(value, dict) and "stop_grace_period" in value:
            assert int(value["stop_grace_period"].removesuffix("s")) > 30


def test_the_image_runs_commands_that_exist() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    (entry,) = re.findall(r"^ENTRYPOINT (\[.*\])$", text, re.MULTILINE)
    assert json.loads(entry) == ["tiffin"]
    health, default = map(json.loads, re.findall(r"^\s*CMD (\[.*\])$", text, re.MULTILINE))
    check(default)
    check(health[1:])
    assert re.search(r"^USER (?!root)\w+$", text, re.MULTILINE)


# -- what stands in guides -------------------------------------------------------------------------


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.name)
def test_commands_in_guides_have_only_options_that_exist(guide: Path) -> None:
    for block in FENCE.findall(guide.read_text(encoding="utf-8")):
        for words in commands_of_shell(block):
            check(words)


def test_a_wrong_option_is_noticed() -> None:
    """So that the tests above can fail."""
    (words,) = commands_of_shell("cd x && tiffin node --dram 1GiB --speed 9  # fast")
    assert words == ["node", "--dram", "1GiB", "--speed", "9"]
    with pytest.raises(Exception, match="--speed"):  # typer's own, whose place changes
        check(words)
    with pytest.raises(AssertionError):
        check(["nod"])


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
