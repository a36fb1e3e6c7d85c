"""The conductor as a process: it starts, refuses wrong options, stops cleanly, and restarts."""

from __future__ import annotations

import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import psutil
import pytest
from apisupport import MODEL, Recorder
from directory.ports import free_port
from serversupport import Process, served, wait_for_follower

from tiffin.conductor.api.request_bodies import Limits
from tiffin.conductor.client import ConductorClient
from tiffin.conductor.errors import (
    ConductorUnavailable,
    InvalidRequest,
    UnknownModel,
    UnknownRequest,
)
from tiffin.conductor.records import InstanceSpec, Load, Request, RequestEvent, Role
from tiffin.conductor.service.forecast_process import FORECAST_S
from tiffin.conductor.service.server import ConductorOptions, read_settings
from tiffin.conductor.service.web_server import listening, web_server
from tiffin.conductor.web.auth import Grant, Tokens
from tiffin.conductor.web.connection_limits import ConnectionLimits
from tiffin.kvstore.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Callable

SPEC = InstanceSpec("i1", MODEL, Role.MIXED, "llama-3.1-8b.h100.tp1.vllm")


class TestOptions:
    def test_the_network_takes_tokens(self) -> None:
        with pytest.raises(InvalidInput, match="--token-file"):
            ConductorOptions(listen=("0.0.0.0", 0))
        ConductorOptions(listen=("0.0.0.0", 0), tokens=Tokens({b"digest": Grant()}))

    def test_one_of_several_has_a_url(self) -> None:
        everywhere = {"listen": ("0.0.0.0", 0), "tokens": Tokens({b"digest": Grant()})}
        with pytest.raises(InvalidInput, match="--advertise"):
            ConductorOptions(share="redis://a", **everywhere)  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest, match="--advertise"):
            ConductorOptions(share="redis://a", advertise="10.0.0.9:7800")
        url = "http://10.0.0.9:7800"
        ConductorOptions(share="redis://a", advertise=url, **everywhere)  # type: ignore[arg-type]

    def test_a_certificate_has_a_key(self, tmp_path: Path) -> None:
        with pytest.raises(InvalidInput, match="go together"):
            ConductorOptions(tls_cert=tmp_path / "cert")

    def test_a_port_that_is_taken_is_said(self) -> None:
        with listening(("127.0.0.1", 0)) as door, pytest.raises(InvalidInput, match="in use"):
            listening(door.getsockname()[:2]).__enter__()

    @pytest.mark.parametrize(
        ("name", "text"),
        [("s.toml", "[core]\nlog_max = 7\n"), ("s.json", '{"core": {"log_max": 7}}')],
    )
    def test_settings_come_from_toml_and_json(self, tmp_path: Path, name: str, text: str) -> None:
        path = tmp_path / name
        path.write_text(text)
        assert read_settings(path) == {"core": {"log_max": 7}}

    @pytest.mark.parametrize(
        ("name", "content"),
        [
            ("s.toml", b"[core"),
            ("s.json", b"[1]"),
            ("s.json", b"[" * 100_000),
            ("s.toml", b"\xff"),
            ("s.toml", b"#" * (2 << 20)),
            ("none.toml", None),
        ],
    )
    def test_what_is_no_settings_is_said(
        self, tmp_path: Path, name: str, content: bytes | None
    ) -> None:
        path = tmp_path / name
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(InvalidInput):
            read_settings(path)

    def test_there_are_files_for_all_connections(self) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = 3000
        if hard != resource.RLIM_INFINITY and hard < 2 * wanted:
            pytest.skip("this process may not open as many")
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
            web_server(object(), ConnectionLimits(connections=wanted), stop_s=1, tls=None)
            assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > wanted
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class TestOnAPort:
    """Tests that need a real port."""

    def test_a_huge_body_is_refused_before_it_is_sent(self) -> None:
        with served(Recorder()) as url:
            host, port = url.removeprefix("http://").split(":")
            with socket.create_connection((host, int(port)), timeout=10) as client:
                client.sendall(
                    b"POST /v1/schedule HTTP/1.1\r\nHost: localhost\r\n"
                    b"Content-Type: application/json\r\nContent-Length: 100000000\r\n\r\n"
                )
                answer = b""
                while more := client.recv(65536):
                    answer += more
            assert answer.startswith(b"HTTP/1.1 413 ")
            assert b'"too_large"' in answer

    def test_the_body_of_a_slow_sender_is_given_up(self) -> None:
        with served(Recorder(), limits=Limits(body_s=0.05)) as url:
            host, port = url.removeprefix("http://").split(":")
            with socket.create_connection((host, int(port)), timeout=10) as client:
                client.sendall(
                    b"POST /v1/schedule HTTP/1.1\r\nHost: localhost\r\n"
                    b"Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
                )
                assert client.recv(65536).startswith(b"HTTP/1.1 408 ")

    @pytest.mark.parametrize(
        "request_", [b"\x00" * 100, b"GET / HTTP/9.9\r\n\r\n", b"GET /livez HTTP/1.1\r\n\r\n"]
    )
    def test_what_is_not_http_ends_with_an_answer(self, request_: bytes) -> None:
        with served(Recorder()) as url:
            host, port = url.removeprefix("http://").split(":")
            with socket.create_connection((host, int(port)), timeout=10) as client:
                client.sendall(request_)
                client.shutdown(socket.SHUT_WR)
                answer = client.recv(65536)
            assert not answer or answer.split()[1][:1] == b"4"
            assert httpx.get(f"{url}/livez", trust_env=False).status_code == 200


def is_answered(plan: dict[str, Any]) -> bool:
    """Made with the other process's forecast or, on a machine too busy for it, for want of one."""
    why = plan["reasons"][0]["why"]
    return why.startswith("holt-winters over") or f"no forecast within {FORECAST_S:g} s" in why


class TestProcess:
    @pytest.mark.slow
    def test_what_serving_does_not_need_is_not_loaded(self) -> None:
        """Imports are most of the time until a restarted conductor serves."""
        code = "import sys; import tiffin.conductor.service.server; print(*sys.modules)"
        done = subprocess.run(
            [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60
        )
        loaded = {name.partition(".")[0] for name in done.stdout.split()}
        assert "fastapi" in loaded
        assert not loaded & {"statsmodels", "scipy", "pandas", "torch", "redis", "zmq", "nixl"}

    def test_it_answers_and_stops_cleanly(self, tmp_path: Path) -> None:
        config = tmp_path / "settings.toml"
        config.write_text("[core]\nlog_max = 7\n")
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        options = ("--listen", f"127.0.0.1:{port}", "--config", str(config))
        with Process(*options, "--policy", "random", "--peer-connections", "64") as process:
            process.wait_until_it_answers(url)
            said = httpx.get(f"{url}/livez", headers={"x": "y" * (64 << 10)}, trust_env=False)
            assert said.status_code == 431
            with ConductorClient(url) as client:
                settings = client.settings()
                assert settings["core"]["log_max"] == 7
                assert settings["policy"]["name"] == "random"
                client.register(SPEC, Load())
                assert client.schedule(Request("r", MODEL, 100)).prefill == "i1"
                follower = threading.Thread(target=lambda: list(client.follow()))
                follower.start()
                wait_for_follower(url)
                status, log = process.end(signal.SIGTERM)
                follower.join(timeout=10)
            assert status == 0, log
            assert "stopping" in log
            assert "Traceback" not in log

    @pytest.mark.slow
    def test_forecasts_are_made_in_another_process(self, tmp_path: Path) -> None:
        """Importing and fitting statsmodels would delay all decisions by seconds."""
        pytest.importorskip("statsmodels")
        config = tmp_path / "settings.toml"
        config.write_text('[planner]\npredictor = "holt-winters"\ninterval_s = 1\n')
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        with Process("--listen", f"127.0.0.1:{port}", "--config", str(config)) as process:
            process.wait_until_it_answers(url)
            with ConductorClient(url) as client, httpx.Client(trust_env=False) as http:
                client.register(SPEC, Load())
                client.schedule(Request("r", MODEL, 100))
                plans: list[dict[str, Any]] = []
                give_up = time.monotonic() + 2 * FORECAST_S
                while not any(is_answered(plan) for plan in plans):
                    assert time.monotonic() < give_up, plans
                    time.sleep(0.05)
                    client.heartbeat(SPEC.id, Load())  # a silent one is in no plan
                    plans = http.get(f"{url}/v1/plans").json()["plans"]
            mapped = Path(f"/proc/{process.process.pid}/maps").read_text()
            assert "/numpy/" in mapped
            assert "/scipy/" not in mapped
            status, log = process.end()
        assert status == 0, log
        assert "Traceback" not in log

    @pytest.mark.slow
    def test_a_directory_that_cannot_work_ends_it(self) -> None:
        with Process("--listen", "127.0.0.1:0", "--directory", "ftp://x") as process:
            process.process.wait(timeout=30)
            log = process.log()
            assert process.process.returncode != 0
            assert "ftp" in log


@pytest.mark.slow
class TestUnderLoad:
    CONNECTIONS = 16

    def test_killed_and_restarted_it_serves_again(
        self, tmp_path: Path, record_property: Callable[[str, object], None]
    ) -> None:
        """Kill -9 under 16 connections: every call ends with an answer or ConductorUnavailable, and
        a new process answers and schedules. How long that took, on the clock from the kill on and
        of its CPU, depends on the machine: it is recorded, and shown by `pytest -s`."""
        port, config = free_port(), tmp_path / "settings.toml"
        # The instance sends one heartbeat only; it is not lost however long this takes.
        config.write_text("[core]\nheartbeat_timeout_s = 600\n")
        url = f"http://127.0.0.1:{port}"
        options = ("--listen", f"127.0.0.1:{port}", "--config", str(config))
        stop, errors, done = threading.Event(), list[BaseException](), [0] * self.CONNECTIONS

        def client_of(number: int) -> None:
            try:
                with ConductorClient(url, timeout_s=5) as client:
                    while not stop.is_set():
                        done[number] += self._one_request(client, f"c{number}-{done[number]}")
            except Exception as error:  # noqa: BLE001 - the test shows any exception
                errors.append(error)

        clients = [
            threading.Thread(target=client_of, args=(number,)) for number in range(self.CONNECTIONS)
        ]
        with Process(*options) as first:
            first.wait_until_it_answers(url)
            with ConductorClient(url) as operator:
                operator.register(SPEC, Load())
            for thread in clients:
                thread.start()
            self._until(lambda: min(done) >= 5)
            killed_at = time.monotonic()
            first.process.kill()
            first.process.wait()
        with Process(*options) as second:
            second.wait_until_it_answers(url)
            with ConductorClient(url) as operator:
                operator.register(SPEC, Load())  # the instance's next heartbeat
                assert operator.schedule(Request("after", MODEL, 100)).prefill == "i1"
            wall_s = time.monotonic() - killed_at
            used = psutil.Process(second.process.pid).cpu_times()
            before = list(done)
            self._until(lambda: all(n > b for n, b in zip(done, before, strict=True)))
            stop.set()
            for thread in clients:
                thread.join()
            assert second.end()[0] == 0
        for name, seconds in (("wall_s", wall_s), ("cpu_s", used.user + used.system)):
            record_property(f"restart_{name}", round(seconds, 3))
            print(f"restart {name}: {seconds:.2f}")
        assert errors == []

    @staticmethod
    def _one_request(client: ConductorClient, name: str) -> int:
        """Run one request from its decision to its end; 1, or 0 if the conductor lost it."""
        try:
            placed: Any = client.schedule(Request(name, MODEL, 100))
            if not hasattr(placed, "prefill"):
                return 0
            client.observe(RequestEvent(name, "first_token"))
            client.observe(RequestEvent(name, "finished"))
        except ConductorUnavailable:
            time.sleep(0.05)
            return 0
        except (UnknownModel, UnknownRequest):  # after a restart, until the instance is back
            time.sleep(0.05)
            return 0
        return 1

    @staticmethod
    def _until(true: Any) -> None:
        give_up = time.monotonic() + 60
        while not true():
            assert time.monotonic() < give_up
            time.sleep(0.01)
