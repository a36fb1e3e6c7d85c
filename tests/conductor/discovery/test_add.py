"""`tiffin conductor add`, and engines in the settings file, with a conductor in a process."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from clisupport import run
from directory.ports import free_port
from enginesupport import FakeEngine, server_info
from kvsupport import wait_until
from serversupport import Process

from tiffin.conductor.client import ConductorClient
from tiffin.conductor.errors import ConductorUnavailable, InvalidRequest, UnknownInstance

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PROFILE = "llama-3.1-8b.h100.tp1.vllm"


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    with FakeEngine() as engine:
        yield engine


@pytest.fixture
def url() -> str:
    return f"http://127.0.0.1:{free_port()}"


@pytest.mark.slow
def test_an_engine_is_added_and_followed(engine: FakeEngine, url: str) -> None:
    engine.routes["/server_info"] = json.dumps(server_info(live=free_port())).encode()
    with Process("--listen", url.removeprefix("http://")) as conductor:
        conductor.wait_until_it_answers(url)
        shown = run("add", engine.url, "--profile", PROFILE, "--id", "e1", "--url", url)
        assert shown.exit_code == 0, shown.output
        for words in ("e1: tiny, mixed", "room for 6,144 tokens", "KV events of tcp://127.0.0.1:"):
            assert words in shown.output
        with ConductorClient(url) as client:
            assert client.instance("e1").kv_capacity_tokens == 6144
            engine.running = 5
            wait_until(lambda: client.instance("e1").load["batch"] == 5, "its load is known")
            (one,) = client.engines().engines
            assert (one.url, one.instance, one.sources) == (engine.url, "e1", ["added"])
            with pytest.raises(InvalidRequest, match="option profile"):
                client.add_engine(engine.url)
            with pytest.raises(ConductorUnavailable, match="/metrics"):
                client.add_engine(f"http://127.0.0.1:{free_port()}", profile=PROFILE)
            client.remove("e1")
            with pytest.raises(UnknownInstance):
                client.instance("e1")
            assert client.engines().engines == []
        assert run("add", engine.url, "--profile", "none", "--url", url).exit_code == 2


@pytest.mark.slow
@pytest.mark.parametrize("where", ['url = "http://127.0.0.1:{}"', 'dns = "localhost:{}"'])
def test_engines_of_the_settings_file(
    engine: FakeEngine, url: str, tmp_path: Path, where: str
) -> None:
    config = tmp_path / "conductor.toml"
    config.write_text(
        f"[discovery]\nscrape_s = 0.2\n[[discovery.engines]]\n"
        f'{where.format(engine.port)}\nprofile = "{PROFILE}"\n'
    )
    options = ("--listen", url.removeprefix("http://"), "--config", str(config))
    with Process(*options) as conductor:
        conductor.wait_until_it_answers(url)
        with ConductorClient(url) as client:
            wait_until(lambda: client.ready().status == "ok", "the engine is known")
            assert [one.id for one in client.instances()] == [engine.where]
            assert client.settings()["core"]["heartbeat_timeout_s"] == 10.0
    config.write_text("[discovery]\nscrape = 2\n")
    refused = run("--config", str(config))
    assert refused.exit_code == 2
