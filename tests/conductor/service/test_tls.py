"""TLS as operators set it up: a certificate of their own CA, and errors for other ones."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
import ssl
from typing import TYPE_CHECKING

import httpx
import msgspec
import pytest
import typer
from apisupport import MODEL
from certsupport import Authority, make_authority
from directory.ports import free_port
from gatewaysupport import CONFIG, Engine, cluster, serving
from serversupport import GatewayProcess, Process, served
from typer.testing import CliRunner

from tiffin.conductor.cli import commands as conductor_commands
from tiffin.conductor.client import ConductorClient
from tiffin.conductor.core import Conductor
from tiffin.conductor.errors import ConductorUnavailable, InvalidRequest
from tiffin.conductor.gateway.cli import commands as gateway_commands
from tiffin.conductor.gateway.config import GatewayConfig
from tiffin.conductor.records import InstanceSpec, Request, Role
from tiffin.conductor.service.web_server import tls_context
from tiffin.conductor.web.connection_limits import ConnectionLimits
from tiffin.kvstore.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PROFILE = "llama-3.1-8b.h100.tp1.vllm"


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return make_authority(tmp_path_factory.mktemp("ours"))


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return make_authority(tmp_path_factory.mktemp("theirs"))


@pytest.fixture(scope="module")
def conductor(ours: Authority) -> Iterator[str]:
    """The URL of a conductor that serves https."""
    port = free_port()
    url = f"https://127.0.0.1:{port}"
    with Process("--listen", f"127.0.0.1:{port}", *files(ours)) as process:
        process.wait_until_it_answers(url, trusting(ours))
        yield url
        status, log = process.end()
    assert status == 0, log
    assert f"the conductor answers at {url}" in log
    assert "Traceback" not in log


def files(authority: Authority) -> tuple[str, ...]:
    cert, key = authority.certificate("conductor")
    return ("--tls-cert", str(cert), "--tls-key", str(key))


def trusting(authority: Authority) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=authority.ca)


def refused(url: str, ca: Path | None) -> str:
    with ConductorClient(url, tls_ca=ca) as client, pytest.raises(ConductorUnavailable) as caught:
        client.instances()
    return str(caught.value)


class TestTheConductor:
    def test_a_body_that_is_too_large_gets_its_answer(
        self, conductor: str, ours: Authority
    ) -> None:
        """Over TLS as without: all of it is sent before the answer is read."""
        content = bytes(16 << 20)
        headers = {"content-type": "application/json"}
        with httpx.Client(base_url=conductor, verify=trusting(ours), trust_env=False) as http:
            for _ in range(2):
                response = http.post("/v1/schedule", content=content, headers=headers)
                assert response.status_code == 413

    def test_a_client_that_knows_its_ca(self, conductor: str, ours: Authority) -> None:
        with ConductorClient(conductor, tls_ca=ours.ca) as client:
            client.register(InstanceSpec("i0", MODEL, Role.MIXED, PROFILE))
            client.schedule(Request("r0", MODEL, 100))
            assert client.why("r0").prefill == "i0"
            client.remove("i0")

    def test_a_client_that_knows_another_ca(self, conductor: str, theirs: Authority) -> None:
        for ca in (theirs.ca, None):
            said = refused(conductor, ca)
            assert "certificate verify failed" in said
            assert "tls_ca" in said

    def test_a_certificate_for_another_host(self, conductor: str, ours: Authority) -> None:
        said = refused(conductor.replace("127.0.0.1", "localhost"), ours.ca)
        assert "not valid for 'localhost'" in said

    def test_http_where_there_is_https_and_the_other_way_round(
        self, conductor: str, ours: Authority
    ) -> None:
        assert "may not serve http but https" in refused(conductor.replace("https", "http"), None)
        with served(Conductor()) as plain:
            assert "may not serve https but http" in refused(
                plain.replace("http", "https"), ours.ca
            )
        with ConductorClient(conductor, tls_ca=ours.ca) as client:
            assert client.instances() == [], "it goes on for others"

    def test_a_handshake_that_does_not_end_is_given_up(self, ours: Authority) -> None:
        cert, key = ours.certificate("conductor")
        limits = ConnectionLimits(head_s=0.3)
        with served(Conductor(), connections=limits, tls=tls_context(cert, key)) as url:
            host, _, port = url.removeprefix("https://").partition(":")
            with socket.create_connection((host, int(port)), timeout=20) as client:
                client.sendall(b"\x16\x03\x01")
                assert client.recv(100) == b""
            with ConductorClient(url, tls_ca=ours.ca) as other:
                assert other.instances() == []

    def test_a_ca_that_is_none(self, ours: Authority, tmp_path: Path) -> None:
        for ca in (tmp_path / "none", ours.folder / "ca.key"):
            with pytest.raises(InvalidRequest, match="can't load the CA"):
                ConductorClient("https://127.0.0.1:1", tls_ca=ca)

    @pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
    def test_ciphers_are_of_today(
        self, conductor: str, ours: Authority, version: ssl.TLSVersion
    ) -> None:
        """The context of older versions of uvicorn has only SHA-1 and CBC for TLS 1.2."""
        context = trusting(ours)
        context.maximum_version = version
        address = ("127.0.0.1", int(conductor.rpartition(":")[2]))
        with (
            socket.create_connection(address, timeout=10) as plain,
            context.wrap_socket(plain, server_hostname="127.0.0.1") as secure,
        ):
            cipher = secure.cipher()
        assert cipher is not None
        assert "GCM" in cipher[0] or "CHACHA20" in cipher[0]


@pytest.mark.parametrize("what", ["missing", "another key", "no certificate"])
def test_files_that_are_no_certificate_and_key_are_said(
    what: str, ours: Authority, tmp_path: Path
) -> None:
    cert, key = ours.certificate("conductor")
    if what == "missing":
        cert = tmp_path / "none"
    elif what == "another key":
        key = ours.folder / "ca.key"
    else:
        cert = tmp_path / "cert"
        cert.write_text("no certificate")
    with pytest.raises(InvalidInput, match="can't load the TLS certificate"):
        tls_context(cert, key)
    app = typer.Typer()
    conductor_commands(app)
    gateway_commands(app)
    for command in ("conductor", "gateway"):
        options = ("--listen", "127.0.0.1:0", "--tls-cert", str(cert), "--tls-key", str(key))
        done = CliRunner().invoke(app, [command, *options])
        assert isinstance(done.exception, InvalidInput)
        assert "answers at" not in done.output


class TestTheGateway:
    @pytest.mark.slow
    def test_from_the_client_to_the_conductor(
        self, conductor: str, ours: Authority, theirs: Authority, tmp_path: Path
    ) -> None:
        """With the right CA it gets the instances; with another one it logs that it gets none."""
        config = tmp_path / "gateway.json"
        config.write_text('{"fallback": false, "refresh_s": 0.05, "reschedules": 0}')
        with ConductorClient(conductor, tls_ca=ours.ca) as client:
            spec = InstanceSpec("i0", MODEL, Role.MIXED, PROFILE, url="http://127.0.0.1:9")
            for authority, codes in (
                (ours, {"engine_failed"}),
                (theirs, {"not_placed", "no_instance"}),
            ):
                port = free_port()
                options = ("--listen", f"127.0.0.1:{port}", "--config", str(config))
                towards = ("--conductor", conductor, "--conductor-tls-ca", str(authority.ca))
                with GatewayProcess(*options, *towards, *files(ours)) as process:
                    url = f"https://127.0.0.1:{port}"
                    process.wait_until_it_answers(url, trusting(ours))
                    client.register(spec)  # only now: without heartbeats it is soon lost
                    with httpx.Client(base_url=url, trust_env=False, verify=trusting(ours)) as http:
                        body = {"model": MODEL, "prompt": "a"}
                        error = http.post("/v1/completions", json=body).json()["error"]
                        assert error["code"] in codes
                        assert conductor not in error["message"], "clients need not know it"
                    status, log = process.end()
                assert status == 0, log
                assert ("CERTIFICATE_VERIFY_FAILED" in log) == (authority is theirs)
            client.remove("i0")

    @pytest.mark.parametrize("known", [True, False])
    def test_instances_that_answer_at_https(
        self, known: bool, ours: Authority, theirs: Authority
    ) -> None:
        async def scenario() -> None:
            engine = Engine("m0")
            config = msgspec.structs.replace(
                CONFIG, engine_tls_ca=str((ours if known else theirs).ca), reschedules=0
            )
            async with (
                cluster(engine, config=config) as it,
                serving(engine, tls_context(*ours.certificate("engine"))) as url,
            ):
                spec = dataclasses.replace(it.core.cluster.spec("m0"), url=url)
                it.core.register(spec, asyncio.get_running_loop().time())
                await it.gateway.refresh()
                response = await it.post({"prompt": "a", "stream": True})
                assert response.status_code == (200 if known else 502)
                assert bool(engine.completions) == known

        asyncio.run(scenario())

    @pytest.mark.slow
    def test_a_ca_of_instances_that_is_none(self, tmp_path: Path) -> None:
        async def scenario() -> None:
            config = GatewayConfig(engine_tls_ca=str(tmp_path / "none"))
            with pytest.raises(InvalidRequest, match="can't load the CA"):
                async with cluster(config=config):
                    pass

        asyncio.run(scenario())
