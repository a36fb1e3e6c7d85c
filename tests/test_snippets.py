"""Every Python example of docs/ runs, after what its page presupposes; or the reason is given.

Those of the README are run by test_docs.py, as one session. Here each page has a prelude, each
example a setup, and `...`, where an example leaves a value open, is 0. Numbers in an example's
comments are compared with its output.
"""

from __future__ import annotations

import ast
import json
import re
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from examplesupport import DOCS, PAGES, ROOT, Stage, fences

from tiffin.conductor.client import ConductorClient
from tiffin.conductor.records import InstanceSpec, Role

if TYPE_CHECKING:
    from collections.abc import Iterator

CLIENT = """
import itertools, time
import numpy as np
from tiffin.kvstore import AsyncClient, Client, KVSchema
from tiffin.kvstore.format.schema import LayerSpec

layers, numbers = 32, itertools.count()
schema = KVSchema.gqa(model="m", layers=layers, kv_heads=8, head_dim=4, dtype="bfloat16")
client = Client.open("unix:")

def fresh():
    global client, prefix, payloads
    client.close()
    client = Client.open("unix:")
    prefix = schema.prefix(list(range(512)), namespace=str(next(numbers)))
    payloads = [np.zeros(schema.block_bytes, np.uint8)]
"""
THERE = "fresh(); client.put(prefix, payloads)"
LLAMA = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from tiffin.kvstore import Client
from tiffin.kvstore.connectors.transformers import PrefixCache

config = LlamaConfig(vocab_size=2048, hidden_size=128, intermediate_size=256,
                     num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
model = LlamaForCausalLM(config).eval()
input_ids = torch.randint(3, 2048, (1, 600))
client = Client.open("unix:", name="engine")
"""
MEASURED = """
points = [(n, p) for n in (512, 2048, 8192, 32768) for p in (0, n // 2)]
prefill = [(n, p, 0.02 + 8e-5 * (n - p) + 1e-9 * (n * n - p * p)) for n, p in points]
decode = [(b, b * c, 0.02 + 1e-4 * b + 3e-8 * b * c) for b in (1, 8, 64) for c in (512, 4096)]
"""

# Optional packages that may not be installed.
EXTRAS = ("torch", "transformers")

# By page: its prelude, and for each of its examples the setup, or after "!" why it is not run.
RUN: dict[str, tuple[str, list[str]]] = {
    "client.md": (
        CLIENT,
        [
            THERE,
            THERE,
            THERE + "; other = client",
            "!of two ranks: tests/kvstore/client/test_shards.py",
            "fresh()",
            "fresh()",
            THERE,
            THERE,
        ],
    ),
    "conductor/cost.md": (MEASURED, [""]),
    "conductor/replication.md": ("", ["!a pool and a conductor: test_a_node_is_drained"]),
    "conductor/service.md": ("", ["!a conductor: tests/conductor/api/test_reference.py"]),
    "decisions/eviction.md": ("", [""]),
    "device-copies.md": ("", ["!a GPU: tests/messenger/gpu/test_copier.py"] * 2),
    "directory.md": ("token, keys = None, [bytes(16)]", [""]),
    "hbm.md": ("", ["!a GPU, or pages on the CPU: tests/kvstore/hbm"]),
    "kernels.md": ("", ["!an engine's pages: tests/kernels/test_paged.py"]),
    "nixl.md": ("", ["!NIXL: tests/messenger/nixl/test_nixl_transport.py"]),
    "quantisation.md": (
        "from tiffin.kvstore.format.schema import KVSchema",
        ["", "", "!an engine's pages: tests/kernels/test_quant.py", "!quantised blocks: the same"],
    ),
    "schema.md": (
        CLIENT,
        [
            "",
            "!ranks: tests/kvstore/client/test_shards.py",
            "!stages of ranks: tests/kvstore/client/test_stages.py",
            "",
            "",
        ],
    ),
    "slab-format.md": ("", [""]),
    "sizing.md": ("from tiffin.kvstore import KVSchema", [""]),
    "tiers.md": ("", ["!a tier of yours: tests/kvstore/tiers/test_contract.py"] * 2),
    "traces.md": ("", ["!a trace's file: tests/bench/traces/test_trace_scaling.py"]),
    "transformers.md": (
        LLAMA,
        ["", "cached = PrefixCache(client, model)", "", ""],
    ),
    "transports.md": (
        "",
        ["!two ends: tests/messenger/tcp/test_tcp_client.py, test_messenger.py"] * 3,
    ),
}

# Runs them in one process, one after the other, and looks at the numbers that they show.
DRIVER = r"""
import ast, asyncio, inspect, json, re, sys

SHOWN = re.compile(r"#\s*(\d+|[A-Z]\w+\([^#]*?\))(?::|$)")
names = {"__name__": "__main__"}
for code in json.load(open(sys.argv[1])):
    tree, lines = ast.parse(code), code.splitlines()
    for statement in tree.body:
        one = ast.Module([statement], [])
        shown = SHOWN.search(lines[statement.end_lineno - 1])
        if isinstance(statement, ast.Expr) and shown:
            value = eval(compile(ast.Expression(statement.value), "example", "eval"), names)
            assert repr(value) == shown[1], (lines[statement.end_lineno - 1], value)
            continue
        ran = eval(compile(one, "example", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names)
        if inspect.iscoroutine(ran):
            asyncio.run(ran)
if "client" in names:
    names["client"].close()
"""


@pytest.fixture
def stage() -> Iterator[Stage]:
    with tempfile.TemporaryDirectory(prefix="tiffin-s-") as folder:
        stage = Stage(Path(folder))
        yield stage
        stage.close()


def snippets(page: str) -> list[str]:
    return fences(DOCS / page, "python")


def test_every_page_with_examples_is_named() -> None:
    pages = {str(page.relative_to(DOCS)) for page in PAGES if page.is_relative_to(DOCS)}
    assert {page for page in pages if snippets(page)} == set(RUN)
    for page, (_, before) in RUN.items():
        assert len(before) == len(snippets(page)), page


def test_tests_that_run_an_example_elsewhere_are_there() -> None:
    for _, before in RUN.values():
        for reason in before:
            for named in re.findall(r"tests/[\w/.]+", reason if reason.startswith("!") else ""):
                assert (ROOT / named).exists(), named


@pytest.mark.parametrize("page", RUN)
def test_examples_are_python_and_what_they_import_exists(page: str) -> None:
    for code in snippets(page):
        flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT | ast.PyCF_ONLY_AST
        tree = compile(code, page, "exec", flags=flags)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tiffin"):
                if find_spec("torch") is None and re.search(
                    "kernels|hbm|connect", str(node.module)
                ):
                    continue
                for name in node.names:
                    exec(f"from {node.module} import {name.name}", {})


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [page for page, (_, before) in RUN.items() if not all(b[:1] == "!" for b in before)]
)
def test_examples_run(page: str, stage: Stage) -> None:
    prelude, before = RUN[page]
    missing = [name for name in EXTRAS if find_spec(name) is None]
    if any(name in "".join((prelude, *snippets(page))) for name in missing):
        pytest.skip(f"{', '.join(missing)}: not installed")
    codes = [prelude]
    for first, code in zip(before, snippets(page), strict=True):
        if not first.startswith("!"):
            codes += [first, re.sub(r"(?<== )\.\.\.", "0", small(stage, code))]
    file, driver = stage.folder / "codes.json", stage.folder / "driver.py"
    file.write_text(json.dumps(codes))
    driver.write_text(DRIVER)
    if "client" not in prelude:
        stage.run(f"python {driver} {file}")
        return
    with stage.running("tiffin node --dram 67108864", r"at unix:"):
        stage.run(f"python {driver} {file}")


def small(stage: Stage, code: str) -> str:
    """The code with the sizes of benchmarks and large machines replaced by sizes for tests."""
    for large, enough in (
        ("redis://10.0.0.5:6379/0", "redis://10.0.0.1"),
        ("500_000", "500"),
        ("8 << 30", "8 << 20"),
        ("(1, 16, 64)", "(1, 2)"),
        ("range(15)", "range(2)"),
        ("1GiB", "64MiB"),
        ("/var/tmp", str(stage.folder)),
    ):
        code = code.replace(large, enough)
    return stage.here(code) if "redis://" in code else code


@pytest.mark.slow
def test_a_node_is_drained(stage: Stage) -> None:
    """The example of replication.md, by a conductor that follows the pool."""
    stage.files()
    (code,) = snippets("conductor/replication.md")
    node = (
        "tiffin node --dram 1GiB --listen 10.0.0.5:7700 --directory redis://10.0.0.1 "
        "--token-file /etc/tiffin/token --name rack2-node7"
    )
    conductor = (
        "tiffin conductor --listen 10.0.0.9:7800 --token-file /etc/tiffin/operators "
        "--directory redis://10.0.0.1 --pool-token-file /etc/tiffin/token"
    )
    token = stage.file("etc/tiffin/operator").read_text().strip()
    stage.file("etc/tiffin/operators", f"operate,read {token}\n")
    stage.environment["TIFFIN_CONDUCTOR_TOKEN_FILE"] = str(stage.folder / "etc/tiffin/operator")
    with (
        stage.running(node, "registered as number|at unix:"),
        stage.running(conductor, "the conductor answers at"),
    ):
        script = stage.folder / "drain.py"
        script.write_text(WAIT + stage.here(code))
        assert "rack2-node7" in stage.run(f"python {script} 127.0.0.1:7800")


@pytest.mark.slow
def test_a_profile_is_one(stage: Stage) -> None:
    """The example of cost.md, with which an instance registers."""
    (profile,) = fences(DOCS / "conductor" / "cost.md", "json")
    stage.file("profiles/mine.json", profile)
    name = json.loads(profile)["name"]
    with (
        stage.running(
            f"tiffin conductor --listen 127.0.0.1:7800 --profiles {stage.folder}/profiles",
            "the conductor answers at",
        ),
        ConductorClient(f"http://127.0.0.1:{stage.port('7800')}") as client,
    ):
        client.register(InstanceSpec("i1", "mixtral", Role.MIXED, name))
        assert [one.profile for one in client.instances()] == [name]


# Until the conductor has heard of the node.
WAIT = """
import sys, time
from tiffin.conductor.client import ConductorClient
from tiffin.conductor.errors import UnknownNode

with ConductorClient(f"http://{sys.argv[1]}") as waiting:
    while True:
        try:
            waiting.drain_node("rack2-node7")
            break
        except UnknownNode:
            time.sleep(0.05)
"""
