"""`tiffin conductor` and its subcommands on the command line."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import msgspec
import pytest
from apisupport import KEY, MODEL, Recorder
from clisupport import run
from directory.ports import free_port
from rich.console import Console
from serversupport import served

from tiffin.conductor.cli import _instances_table, parse_changes
from tiffin.conductor.client import ConductorClient
from tiffin.conductor.records import InstanceSpec, Load, Rejection, Request, Role, Status
from tiffin.conductor.web.auth import load_tokens
from tiffin.conductor.wire.models import InstanceReply
from tiffin.kvstore.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from click.testing import Result


def said(result: Result) -> str:
    """The output of a command, and the error that `tiffin` prints in one line."""
    return f"{result.output} {result.exception or ''}"


@pytest.fixture
def core() -> Recorder:
    return Recorder()


@pytest.fixture
def url(core: Recorder) -> Iterator[str]:
    with served(core) as url:
        with ConductorClient(url) as client:
            client.register(
                InstanceSpec("i[1]", MODEL, Role.MIXED, "test", node="n1"), Load(running=3)
            )
            client.schedule(Request("r1", MODEL, 600, (KEY,)))
        yield url


def test_help_teaches() -> None:
    shown = run("--help").output
    for word in ("--listen", "--token-file", "--directory", "status", "why", "policy", "Examples"):
        assert word in shown


def test_status_lists_instances_and_what_is_missing(url: str, core: Recorder) -> None:
    shown = run("status", "--url", url)
    assert shown.exit_code == 0, said(shown)
    for word in ("1 instances", "i[1]", MODEL, "mixed", "ready", "n1", "3"):
        assert word in shown.output
    found = json.loads(run("status", "--url", url, "--json").output)
    assert found["instances"][0]["id"] == "i[1]"
    core.drain("i[1]", 0.0)
    draining = run("status", "--url", url)
    assert draining.exit_code == 1
    assert "draining" in draining.output


@pytest.mark.parametrize("width", [80, 100])
def test_a_narrow_terminal_shows_whole_ids(width: int) -> None:
    loads: dict[str, float | None] = {"queued_tokens": 12_345.0, "context_tokens": 99e3}
    shown = InstanceReply(
        id="127.0.0.1:58001",
        model="meta-llama/Llama-3.1-8B-Instruct",
        role="mixed",
        status="ready",
        profile="p",
        url="",
        node="node-1",
        block_tokens=16,
        block_bytes=0,
        kv_capacity_tokens=1,
        batch_max=1,
        labels={},
        heard_s=1.0,
        load=loads,
    )
    long = msgspec.structs.replace(shown, id="i" * 60)
    console = Console(width=width)
    with console.capture() as capture:
        console.print(_instances_table([shown, long]))
    text = capture.get()
    assert "127.0.0.1:58001" in text
    assert text.count("i" * 24) == 2, "a long id is whole too, in several lines"
    assert "…" not in text


def test_status_names_silent_instances(url: str, core: Recorder) -> None:
    core.register(InstanceSpec("engine-1", MODEL, Role.MIXED, "test"), 0.0)
    core.cluster.set_status("engine-1", Status.LOST)
    shown = run("status", "--url", url)
    assert shown.exit_code == 0, "another one is ready"
    assert re.search(r"engine-1 is registered, silent for \d+ s", said(shown))


def test_why_shows_the_candidates(url: str, core: Recorder) -> None:
    shown = run("why", "r1", "--url", url).output
    assert "prefill on i[1], decode on i[1]" in shown
    assert "the cheapest first" in shown
    assert json.loads(run("why", "r1", "--url", url, "--json").output)["prefill"] == "i[1]"
    core.reject = Rejection("", "ttft", "too [much]", 9.0)
    with ConductorClient(url) as client:
        client.schedule(Request("r2", MODEL, 600))
    assert "rejected, ttft: too [much] (predicted TTFT 9 s" in run("why", "r2", "--url", url).output
    missing = run("why", "r3", "--url", url)
    assert missing.exit_code == 2


def test_policy_shows_and_changes(url: str, core: Recorder) -> None:
    changed = run("policy", "core.log_max=7", "policy.name=random", "--url", url)
    assert json.loads(changed.output) == json.loads(run("policy", "--url", url).output)
    assert (core.settings.core.log_max, core.settings.policy.name) == (7, "random")
    assert run("policy", "core.log_max=-7", "--url", url).exit_code == 2
    assert core.settings.core.log_max == 7


def test_changes_are_json_or_text() -> None:
    assert parse_changes(["a.b=1", "a.c=x", 'd={"e": [1.5]}', "f==", "a.g.h=true"]) == {
        "a": {"b": 1, "c": "x", "g": {"h": True}},
        "d": {"e": [1.5]},
        "f": "=",
    }


@pytest.mark.parametrize("change", ["a", "=1", ".a=1", "a.=1", ""])
def test_a_change_has_a_name_and_a_value(change: str) -> None:
    with pytest.raises(InvalidInput, match="NAME=VALUE"):
        parse_changes([change])
    with pytest.raises(InvalidInput, match="a value before"):
        parse_changes(["a=1", "a.b=2"])


def test_tokens_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("t" * 32)
    path.chmod(0o600)
    with served(Recorder(), load_tokens(path)) as url:
        assert run("policy", "--url", url).exit_code == 2
        assert run("policy", "--url", url, "--token-file", str(path)).exit_code == 0


def test_nobody_there_is_one_line() -> None:
    result = run("status", "--url", f"http://127.0.0.1:{free_port()}")
    assert result.exit_code == 2


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--listen", "0.0.0.0:0"), "--token-file"),
        (("--listen", "nowhere"), "HOST:PORT"),
        (("--config", "/nonexistent.toml"), "can't read settings"),
        (("--token-file", "/nonexistent"), "can't read the token file"),
        (("--tls-cert", "/nonexistent"), "go together"),
        (("--pool-token-file", "/nonexistent"), "can't read the token file"),
    ],
)
def test_what_cannot_work_is_said_in_words(options: tuple[str, ...], why: str) -> None:
    result = run(*options)
    assert isinstance(result.exception, InvalidInput)
    assert why in str(result.exception)


def test_settings_that_cannot_be_are_said() -> None:
    assert run("--policy", "best").exit_code == 2
    assert run("--log-level", "loud").exit_code == 2


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiffin.kvstore.extras.find_spec", lambda name: None)
    result = run("status")
    assert isinstance(result.exception, InvalidInput)
    assert 'pip install "tiffin[conductor]"' in str(result.exception)


def test_a_redis_to_share_that_cannot_be_one() -> None:
    result = run("--listen", "127.0.0.1:0", "--share", "http://x")
    assert result.exit_code != 0
    assert "redis://" in said(result)
