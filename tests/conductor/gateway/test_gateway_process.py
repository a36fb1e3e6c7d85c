"""`tiffin gateway` as users start it: a process with options, ended by signals."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import httpx
import typer
from apisupport import MODEL
from directory.ports import free_port
from serversupport import GatewayProcess, served
from typer.testing import CliRunner

from tiffin.conductor.client import ConductorClient
from tiffin.conductor.core import Conductor
from tiffin.conductor.gateway.cli import commands
from tiffin.conductor.records import InstanceSpec, Role

if TYPE_CHECKING:
    from pathlib import Path


def test_it_serves_until_it_is_told_to_stop(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("client-key-0123456789")
    keys.chmod(0o600)
    config = tmp_path / "gateway.json"
    config.write_text('{"refresh_s": 0.05}')
    url = f"http://127.0.0.1:{free_port()}"
    with served(Conductor()) as conductor, ConductorClient(conductor) as client:
        listen = url.removeprefix("http://")
        with GatewayProcess(
            *("--listen", listen, "--conductor", conductor),
            *("--config", str(config), "--token-file", str(keys)),
        ) as process:
            process.wait_until_it_answers(url)
            headers = {"authorization": "Bearer client-key-0123456789"}
            said = httpx.get(f"{url}/livez", headers={"x": "y" * (64 << 10)}, trust_env=False)
            assert said.status_code == 431
            said = httpx.get(f"{url}/readyz", trust_env=False)
            assert (said.status_code, said.json()["reasons"]) == (
                503,
                ["who sends a token is told"],
            )
            with httpx.Client(base_url=url, trust_env=False, headers=headers) as http:
                assert http.get("/readyz").status_code == 503
                profile = "llama-3.1-8b.h100.tp1.vllm"
                nowhere = "http://127.0.0.1:9"
                client.register(InstanceSpec("m0", MODEL, Role.MIXED, profile, url=nowhere))
                while http.get("/readyz").status_code != 200:
                    pass
                assert http.get("/v1/models").json()["data"][0]["id"] == MODEL
                body = {"model": MODEL, "prompt": "a"}
                assert http.post("/v1/completions", json=body).status_code == 503
            status, log = process.end(signal.SIGTERM)
    assert status == 0, log
    assert f"the gateway answers at {url}/v1" in log
    assert "Traceback" not in log
    assert "client-key" not in log


def test_options_that_can_not_work(tmp_path: Path) -> None:
    app = typer.Typer()
    app.callback()(lambda: None)
    commands(app)
    config = tmp_path / "gateway.toml"
    config.write_text("[limits]\nrequests = 0\n")
    for options, named in (
        (["--listen", "0.0.0.0:0"], "--token-file"),
        (["--config", str(config)], "limits.requests"),
        (["--conductor", "ftp://there"], "http://HOST:PORT"),
        (["--tls-cert", "x"], "certificate"),
    ):
        done = CliRunner().invoke(app, ["gateway", *options])
        assert done.exit_code != 0
        assert named in done.output + str(done.exception)
