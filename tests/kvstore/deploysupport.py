"""The files that operators copy: manifests as data, and the `tiffin` commands inside text."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
import yaml
from typer.main import get_command

from tiffin.bench import cli as bench_cli
from tiffin.conductor import cli as conductor_cli
from tiffin.conductor.gateway import cli as gateway_cli
from tiffin.kvstore import cli
from tiffin.kvstore.node.node import NodeOptions
from tiffin.kvstore.sizes import parse_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
DEPLOY = DOCS / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
COMPOSE = DEPLOY / "docker-compose.yaml"
MANIFESTS = [COMPOSE, *sorted(KUBERNETES.glob("*.yaml"))]

# Memory of a node beyond its DRAM tier: the process, its index, and the probe and drain commands.
NODE_BYTES = 512 << 20
FLUSH_S = NodeOptions(1 << 20).flush_s


# -- commands --------------------------------------------------------------------------------------


def program() -> Any:
    app = typer.Typer()
    cli.commands(app)
    bench_cli.commands(app)
    conductor_cli.commands(app)
    gateway_cli.commands(app)
    return get_command(app)


def check(words: Sequence[str]) -> None:
    """Raises a usage error unless `tiffin` accepts these words. Runs nothing."""
    command, rest = program(), list(words)
    while hasattr(command, "commands") and not (
        command.invoke_without_command and (not rest or rest[0].startswith("-"))
    ):
        name, rest = rest[0], rest[1:]
        assert name in command.commands, words
        command = command.commands[name]
    command.make_context("tiffin", rest)


def commands_of_shell(text: str) -> list[list[str]]:
    """The words after `tiffin` of every such command in shell text, comments cut off."""
    text = text.replace("\\\n", " ")
    words = r"""((?:"[^"\n]*"|'[^'\n]*'|[^&|#\n"'])+)"""  # a URL in quotes has its own & and #
    lines = re.findall(rf"(?:^|&& *)(?:\w+=\S+ )?tiffin {words}", text, re.MULTILINE)
    return [shlex.split(line) for line in lines]


def commands_in(value: Any) -> list[list[str]]:
    """Every `tiffin` command of a manifest: as a list of words, or inside one for a shell."""
    found = []
    for part in walk(value):
        if isinstance(part, list) and part and all(isinstance(word, str) for word in part):
            if part[0] == "node":
                found.append(part)
            elif part[0] == "tiffin":
                found.append(part[1:])
            elif part[:2] == ["sh", "-c"]:
                found += commands_of_shell(part[2])
    return found


def option(words: Sequence[str], name: str, default: str = "") -> str:
    """The value after `--name=` or `--name`."""
    for word, after in zip(words, [*words[1:], ""], strict=True):
        if word.startswith(f"{name}="):
            return word.removeprefix(f"{name}=")
        if word == name:
            return after
    return default


# -- manifests -------------------------------------------------------------------------------------


def documents(path: Path) -> list[Any]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def walk(value: Any) -> Iterator[Any]:
    """`value` and everything inside it."""
    yield value
    if isinstance(value, dict | list):
        for child in value.values() if isinstance(value, dict) else value:
            yield from walk(child)


@dataclass(frozen=True)
class Pod:
    """The pods of one Deployment, StatefulSet or DaemonSet."""

    document: Any

    @property
    def spec(self) -> Any:
        return self.document["spec"]["template"]["spec"]

    @property
    def containers(self) -> list[Any]:
        return [*self.spec.get("initContainers", []), *self.spec["containers"]]

    @property
    def main(self) -> Any:
        (container,) = self.spec["containers"]
        return container

    @property
    def claims(self) -> dict[str, Any]:
        found = self.document["spec"].get("volumeClaimTemplates", [])
        return {claim["metadata"]["name"]: claim["spec"] for claim in found}

    @property
    def volumes(self) -> dict[str, Any]:
        return {v["name"]: v for v in self.spec.get("volumes", [])} | self.claims

    def __str__(self) -> str:
        return f"{self.document['kind']}-{self.document['metadata']['name']}"


def resources() -> list[Any]:
    """All documents for Kubernetes."""
    return [document for path in sorted(KUBERNETES.glob("*.yaml")) for document in documents(path)]


def pods() -> list[Pod]:
    return [Pod(document) for document in resources() if "template" in document["spec"]]


def nodes() -> list[Pod]:
    """Those pods whose container runs `tiffin node`."""
    return [pod for pod in pods() if pod.main.get("args", [""])[0] == "node"]


def redis_pod() -> Pod:
    (found,) = [pod for pod in pods() if str(pod) == "Deployment-redis"]
    return found


def services() -> dict[str, Any]:
    """Services by the name under which pods find them."""
    found = [document for document in resources() if document["kind"] == "Service"]
    return {f"{s['metadata']['name']}.{s['metadata']['namespace']}.svc": s["spec"] for s in found}


def environment(container: Any) -> dict[str, str | None]:
    """A container's variables; None for one whose value only the cluster knows."""
    return {variable["name"]: variable.get("value") for variable in container.get("env", [])}


def words_of(container: Any) -> list[str]:
    """Command and arguments, with `$(NAME)` replaced where the manifest says by what."""
    known = {name: text for name, text in environment(container).items() if text is not None}
    pattern = re.compile(r"\$\((\w+)\)")
    given = [*container.get("command", []), *container.get("args", [])]
    return [pattern.sub(lambda found: known.get(found[1], found[0]), word) for word in given]


def compose() -> Any:
    (document,) = documents(COMPOSE)
    return document


def compose_nodes() -> dict[str, Any]:
    found = compose()["services"].items()
    return {name: service for name, service in found if service["command"][0] == "node"}


def memory_bytes(text: str) -> int:
    """The bytes of a size of Compose or Redis in `m`, `mb`, `g`, `gb`, which are powers of 1024."""
    number, unit = re.fullmatch(r"(\d+)([mg])b?", text).groups()  # type: ignore[union-attr]
    return parse_bytes(f"{number}{unit}iB")
