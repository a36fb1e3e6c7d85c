"""The documentation is true: examples run, links have targets, no option or module is left out."""

from __future__ import annotations

import inspect
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import typer
from examplesupport import DOCS, FENCE, PAGES, ROOT, fences
from typer.main import get_command

from tiffin.bench import cli as bench_cli
from tiffin.bench.store import cli as bench_store_cli
from tiffin.kvstore import cli, errors, url
from tiffin.kvstore.client.verbs.arguments import VERIFY
from tiffin.kvstore.format.header import BlockState
from tiffin.kvstore.memory.eviction import POLICIES
from tiffin.kvstore.node.core import messages
from tiffin.kvstore.node.core.records import Reason
from tiffin.kvstore.node.node import Node, NodeOptions
from tiffin.messenger.wire.framing import encode_frame

if TYPE_CHECKING:
    from collections.abc import Iterator

README = ROOT / "README.md"

LINK = re.compile(r"(?<!!)\[[^\]\n]*\]\(([^)\s]+)\)")
KEY = bytes(range(16))
START_S = 60.0

NODE = "from tiffin.kvstore.cli.app import node; import typer; typer.run(node)"


def text(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def everything() -> str:
    return "\n".join(page.read_text(encoding="utf-8") for page in PAGES)


def python_blocks() -> list[str]:
    return fences(README, "python")


def mentions(page: str, name: str) -> bool:
    """Whether `name` stands in the page as code."""
    return re.search(rf"`[^`\n]*(?<![\w-]){re.escape(name)}(?![\w-])[^`\n]*`", page) is not None


# -- the README's examples -------------------------------------------------------------------------


@pytest.fixture
def home() -> Iterator[Path]:
    """A short path: unix sockets have names of 107 bytes at most."""
    with tempfile.TemporaryDirectory(prefix="tiffin-docs-") as folder:
        yield Path(folder)


@pytest.fixture
def environment(home: Path) -> Iterator[dict[str, str]]:
    """Where `unix:` finds a small node, as the README's reader has started one."""
    links = {"XDG_RUNTIME_DIR": str(home), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    env = {**os.environ, **links, "HF_HUB_OFFLINE": "1"}
    arguments = ["--dram", "64MiB", "--nvme", f"{home}/nvme:16MiB", "--log-level", "error"]
    with subprocess.Popen([sys.executable, "-c", NODE, *arguments], env=env) as node:
        try:
            wait_for(home / "tiffin" / "node.sock", node)
            yield env
        finally:
            node.terminate()


def wait_for(path: Path, node: subprocess.Popen[bytes]) -> None:
    give_up = time.monotonic() + START_S
    while not answers(path):
        assert node.poll() is None, "the node did not start"
        assert time.monotonic() < give_up, "the node is too slow"
        time.sleep(0.02)


def answers(path: Path) -> bool:
    """Whether a server accepts: the socket's file exists a moment before the server listens."""
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0


def run_python(code: str, env: dict[str, str], folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=env,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, f"{code}\n{done.stderr}"


def test_the_readme_runs(environment: dict[str, str], home: Path) -> None:
    blocks = python_blocks()
    assert len(blocks) >= 5
    shared: list[str] = []
    for code in blocks:
        if "torch" in code:
            continue
        if code.startswith("# another process"):
            run_python("\n".join(shared), environment, home)
            run_python(code, environment, home)
            shared.clear()
        else:
            shared.append(code)
    assert not shared, "blocks after the second process are not run"


@pytest.mark.slow
@pytest.mark.skipif(find_spec("transformers") is None, reason="the engines extra is not installed")
def test_the_readme_runs_with_transformers(environment: dict[str, str], home: Path) -> None:
    (code,) = (code for code in python_blocks() if "torch" in code)
    run_python(f"from tiffin.kvstore import Client\n{code}", environment, home)


# -- links -----------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """The ids that a renderer gives to headings: lower case, spaces to dashes, no punctuation."""
    prose = FENCE.sub("", page.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ +(.+)$", prose, re.MULTILINE)
    kept = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.replace(" ", "-") for heading in kept}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_lead_somewhere(page: Path) -> None:
    prose = FENCE.sub("", page.read_text(encoding="utf-8"))
    for target in LINK.findall(prose):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name}: {target}"
        if anchor:
            assert anchor in anchors(file), f"{page.name}: {target}"


def test_every_page_is_in_the_index() -> None:
    index = (DOCS / "README.md").read_text(encoding="utf-8")
    linked = {(DOCS / target).resolve() for target in LINK.findall(index) if ":" not in target}
    missing = [page for page in DOCS.rglob("*.md") if page.resolve() not in linked]
    assert missing == [DOCS / "README.md"]


def test_pages_that_the_code_names_exist() -> None:
    code = [*(ROOT / "kvstore").rglob("*.py"), *(ROOT / "messenger").rglob("*.py")]
    for module in [*code, *(ROOT / "bench").rglob("*.py")]:
        named = re.findall(r"docs/[\w/.-]+\.md", module.read_text(encoding="utf-8"))
        for page in named:
            assert (ROOT / page).exists(), f"{module.name} names {page}"


# -- nothing is left out ---------------------------------------------------------------------------


def test_every_command_and_option_is_documented() -> None:
    app = typer.Typer()
    cli.commands(app)
    bench_cli.commands(app)
    bench_store_cli.commands(app)
    program = get_command(app)
    pages = everything()
    for name, command in program.commands.items():  # type: ignore[attr-defined]
        for path in getattr(command, "commands", None) or [""]:
            assert f"tiffin {name} {path}".rstrip() in pages
    node = program.commands["node"]  # type: ignore[attr-defined]
    for parameter in node.params:
        names = [*parameter.opts, *parameter.secondary_opts]
        assert any(mentions(text("node.md"), name) for name in names), names


def test_every_url_parameter_is_documented() -> None:
    with pytest.raises(errors.InvalidInput) as refused:
        url.parse_url("embedded:?no_such_parameter=1")
    known = str(refused.value).partition("known: ")[2].split(", ")
    assert len(known) > 5
    for name in known:
        assert mentions(text("client.md"), name), name


def test_urls_of_examples_are_ones() -> None:
    shown = re.findall(r'Client\.open\("([^"]+)"', everything())
    assert len(shown) > 5
    for one in shown:
        url.parse_url(one)


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_is_documented(name: str) -> None:
    assert mentions(text("client.md"), name)
    assert mentions(text("decisions/eviction.md"), name)


def test_every_error_and_reason_is_documented() -> None:
    page = text("client.md")
    table = page[page.index("## Errors") :]
    for name, kind in inspect.getmembers(errors, inspect.isclass):
        if issubclass(kind, errors.TiffinError):
            assert f"| `{name}`" in table, name
    for reason in Reason:
        word = "NONE" if reason is Reason.NONE else reason.name.lower()
        assert mentions(page, word), reason
    assert mentions(page, "behind")
    for policy in VERIFY:
        assert f'`"{policy}"`' in page


def test_every_message_is_documented() -> None:
    page = text("protocol.md")
    for union in (messages.AnyRequest, messages.AnyReply):
        for kind in union.__args__:
            tag = kind.__struct_config__.tag
            (row,) = re.findall(rf"^\| `{tag}` \|.*$", page, re.MULTILINE)
            for field in kind.__struct_fields__[1:]:
                assert field in row or kind is messages.Numbers, (tag, field)
    assert f"# The protocol, version {messages.PROTOCOL_VERSION}\n" in page


def test_every_status_number_is_documented() -> None:
    node = Node(NodeOptions(dram_bytes=1 << 20, prefault=False))
    try:
        session = node.connect("docs", os.getpid())
        numbers = node.statistics()
        node.disconnect(session, fenced=True)
    finally:
        node.close()
    parts = [numbers, numbers["tiers"]["dram"], numbers["counters"], numbers["sessions"][0]]
    page = text("node.md")
    for name in (name for part in parts for name in part):
        assert mentions(page, name), name


def test_every_option_of_a_node_has_a_place() -> None:
    page = text("client.md")
    places = {"dram_bytes": "dram", "nvme_path": "nvme", "nvme_bytes": "nvme", "core": "policy"}
    for field in fields(NodeOptions):
        assert mentions(page, places.get(field.name, field.name)), field.name


def test_every_state_is_in_the_diagram() -> None:
    page = text("leases.md")
    for state in BlockState:
        assert state.name in page


# -- bytes -----------------------------------------------------------------------------------------


def test_the_protocol_example_is_what_the_code_sends() -> None:
    examples = {
        "hello": messages.Hello(0, 4, "vllm-0", 4242),
        "welcome": messages.Welcome(0, 4, "node-7", 1 << 30),
        "lease": messages.Lease(1, KEY * 2, 5.0),
        "leased": messages.Leased(1, int(Reason.MISS), 9, [8192], [7]),
        "release": messages.Release(2, 9),
        "done": messages.Done(2, 1),
    }
    found = re.findall(r"^```hex (\w+)\n(.*?)^```$", text("protocol.md"), re.MULTILINE | re.DOTALL)
    assert [name for name, _ in found] == list(examples)
    for name, dump in found:
        sent = encode_frame(messages.encoder.encode(examples[name]))
        assert bytes.fromhex(dump) == sent, name
