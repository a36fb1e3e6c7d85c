"""A plain install has every command: what one lacks is named, with one line that installs it."""

from __future__ import annotations

import re
import sys
import tempfile
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from examplesupport import ROOT, Stage, leaves, program
from plainsupport import Said, run_all

from tiffin.bench.conductor.suite import SUITE as CONDUCTOR
from tiffin.bench.gateway.suite import SUITE as GATEWAY
from tiffin.bench.network.suite import SUITE as NETWORK
from tiffin.bench.peers.suite import SUITE as PEERS
from tiffin.bench.store.suite import SUITE as STORE
from tiffin.bench.vllm.suite import SUITE as VLLM
from tiffin.kvstore.errors import MissingExtra
from tiffin.kvstore.extras import EXTRA_OF, missing_extra, need

OPTIONAL = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
# For tests, and one whose only line is another one: pip install --no-deps nixl-cu12.
ELSEWHERE = {"dev", "nixl"}

# What a plain install has nevertheless, with recent releases of typer.
OF_TYPER = {"pydantic"}

REDIS = "redis://127.0.0.1:1"
SERVICE = "aiohttp, fastapi, httptools, httpx, httpx_sse, prometheus_client, uvicorn, zmq"
# What each says in a plain install: its exit status, and its end.
LACKING = {
    f"status {REDIS}": (2, "a directory in Redis needs redis; ", "redis"),
    f"drain {REDIS} node-1": (2, "a directory in Redis needs redis; ", "redis"),
    "up --redis": (2, "a directory in Redis needs redis; ", "redis"),
    f"up --directory {REDIS}": (2, "a directory in Redis needs redis; ", "redis"),
    f"vllm-flags {REDIS}": (2, "a directory in Redis needs redis; ", "redis"),
    "conductor": (2, f"the conductor needs {SERVICE}; ", "conductor"),
    f"conductor --directory {REDIS} --otlp-endpoint http://127.0.0.1:1": (
        2, f"the conductor needs {SERVICE}, redis, opentelemetry; ", "conductor,redis,tracing",
    ),
    "conductor status": (2, f"the conductor's client needs {SERVICE}; ", "conductor"),
    "conductor add http://127.0.0.1:1 --profile llama-3.1-8b.h100.tp1.vllm": (
        2, f"the conductor's client needs {SERVICE}; ", "conductor",
    ),
    "profile http://127.0.0.1:1": (2, f"the profiler needs {SERVICE}; ", "conductor"),
    "gateway": (2, f"the gateway needs {SERVICE}; ", "conductor"),
    "gateway check gateway.toml": (2, f"the gateway needs {SERVICE}; ", "conductor"),
    "demo": (
        3, f"the demo needs torch, transformers, matplotlib, {SERVICE}, redis; ",
        "bench,conductor,engines,redis",
    ),
    "demo --nodes 1": (
        3, f"the demo needs torch, transformers, matplotlib, {SERVICE}; ",
        "bench,conductor,engines",
    ),
    "demo --engine vllm": (3, f"the demo needs {SERVICE}; ", "conductor"),
    "simulate trace.jsonl --plots plots": (2, "a plot needs matplotlib; ", "bench"),
    "reproduce mooncake-hit-rate --html x.html": (2, "a plot needs matplotlib; ", "bench"),
    "bench kernels": (2, "measuring kernels needs torch; ", "torch"),
    "bench hbm": (2, "measuring kernels needs torch; ", "torch"),
}  # fmt: skip
# Measurements of which something is missing are left out, and said.
LEFT_OUT = {
    "network --row locate": "redis",
    "conductor --row service": "conductor",
    "conductor --row busy": "conductor",
    "gateway --row requests": "conductor",
    "peers --row sglang": "conductor",
    "vllm --row split": "conductor",
}


@pytest.mark.parametrize("extra", sorted(OPTIONAL.keys() - ELSEWHERE))
def test_every_library_of_an_extra_has_its_line(extra: str) -> None:
    installed = packages_distributions()
    for requirement in OPTIONAL[extra]:
        (name,) = re.findall(r"^[\w-]+", requirement)
        modules = [top for top, owners in installed.items() if name in owners]
        if name != "tiffin" and modules:
            assert extra in {EXTRA_OF.get(module) for module in modules}, name


def test_extras_exist() -> None:
    assert set(EXTRA_OF.values()) == OPTIONAL.keys() - ELSEWHERE


def test_what_is_needed_is_named_with_one_line() -> None:
    need("nothing")
    absent = {"torch": "torch", "transformers": "engines", "redis": "redis"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tiffin.kvstore.extras.find_spec", lambda name: None)
        with pytest.raises(MissingExtra) as refused:
            need("it", *absent)
    assert str(refused.value) == (
        'it needs torch, transformers, redis; run: pip install "tiffin[engines,redis]"'
    )
    assert missing_extra(ModuleNotFoundError(name="tiffin.no_such_module")) is None
    assert missing_extra(ModuleNotFoundError("no name")) is None


@pytest.mark.slow
def test_every_measurement_is_there() -> None:
    """They are named by strings, and imported when they run."""
    for suite in (STORE, NETWORK, CONDUCTOR, GATEWAY, PEERS, VLLM):
        for name, measure in suite.measurements.items():
            with pytest.raises(AttributeError, match=r"'None'|NoneType"):
                measure(None)  # type: ignore[arg-type]
            assert name


def run_plainly(commands: list[list[str]]) -> dict[str, Said]:
    """What each says in a plain install."""
    absent = EXTRA_OF.keys() - OF_TYPER
    with tempfile.TemporaryDirectory(prefix="tiffin-x-") as folder:
        stage = Stage(Path(folder))
        for name in ("gateway.toml", "trace.jsonl"):
            stage.file(name, "\n")
        said, imported = run_all(
            sys.executable, commands, stage.environment, Path(folder), without=absent
        )
    assert not imported & absent
    return {" ".join(words): one for words, one in zip(commands, said, strict=True)}


def check_lacking(said: dict[str, Said], lacking: dict[str, tuple[int, str, str]]) -> None:
    for words, (status, lacks, extras) in lacking.items():
        assert said[words].status == status, said[words]
        assert said[words].text.count("\n") == 1, said[words]
        assert said[words].line.endswith(f'{lacks}run: pip install "tiffin[{extras}]"')


def test_a_plain_install_works() -> None:
    lacking = {words: LACKING[words] for words in (f"status {REDIS}", "conductor", "demo")}
    said = run_plainly([["--version"], ["--help"], *map(str.split, lacking)])
    assert said["--version"].line.startswith("tiffin ")
    assert (said["--help"].status, "Usage: tiffin" in said["--help"].text) == (0, True)
    check_lacking(said, lacking)


@pytest.mark.slow
def test_a_plain_install_has_every_command() -> None:
    helps = [[*name.split()[1:], "--help"] for name, _ in leaves(program())]
    bench = [f"bench {words}" for words in LEFT_OUT]
    said = run_plainly([*helps, *map(str.split, (*LACKING, *bench))])
    for words in helps:
        one = said[" ".join(words)]
        assert (one.status, "Usage: tiffin" in one.text) == (0, True), one
    check_lacking(said, LACKING)
    for words, extras in LEFT_OUT.items():
        line = rf'^left out {words.split()[-1]}: .* run: pip install "tiffin\[{extras}\]"$'
        assert re.search(line, said[f"bench {words}"].text, re.MULTILINE), said[f"bench {words}"]
        assert said[f"bench {words}"].status == 0
