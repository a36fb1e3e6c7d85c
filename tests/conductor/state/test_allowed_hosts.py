"""Where instances may be, who may register one, and that no redirect leads anybody elsewhere."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

import httpx
import pytest
from apisupport import MODEL, spec_body
from directory.ports import free_port
from gatewaysupport import Engine, cluster, run
from serversupport import Process
from sharingsupport import Town, spec
from starlette.testclient import TestClient

from tiffin.conductor.api.app import create_app
from tiffin.conductor.client import ConductorClient
from tiffin.conductor.core import Conductor
from tiffin.conductor.core.settings import Settings, patched
from tiffin.conductor.errors import InvalidRequest
from tiffin.conductor.records import InstanceSpec, Role
from tiffin.conductor.state.allowed_hosts import AllowedHosts

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PROFILE = "llama-3.1-8b.h100.tp1.vllm"
BODY = spec_body(profile=PROFILE)


@contextmanager
def service(*allowed: str) -> Iterator[TestClient]:
    """The REST service; with its own setting unless hosts are given."""
    settings = patched(Settings(), {"instances": {"allowed_hosts": allowed}} if allowed else {})
    with TestClient(create_app(Conductor(settings)), base_url="http://localhost") as http:
        yield http


def put(http: TestClient, url: str = "", instance: str = "i1", **labels: str) -> tuple[int, str]:
    """The status, and the code of an error."""
    body = {**BODY, "url": url, "labels": labels}
    answer = http.put(f"/v1/instances/{instance}", json=body)
    return answer.status_code, answer.json()["error"]["code"] if answer.content else ""


GOOD, OUTSIDE = (204, ""), (400, "host_not_allowed")


class TestWhatMayBeNamed:
    @pytest.mark.parametrize(
        "url", ["", "http://127.0.0.1:8000", "http://localhost", "https://[::1]:8000/engine", "http://127.8.0.1:1"]
    )  # fmt: skip
    def test_this_machine_by_default(self, url: str) -> None:
        with service() as http:
            assert put(http, url) == GOOD

    @pytest.mark.parametrize(
        "url",
        [
            "http://10.0.0.13:8000",
            "http://169.254.169.254/latest/meta-data",
            "http://0.0.0.0:8000",
            "http://metadata.internal",
            "http://localhost.evil.example",
            "http://[::]:8000",
            "http://[fd00::1]:8000",
            "http://[::ffff:10.0.0.13]:8000",
        ],
    )
    def test_nothing_else(self, url: str) -> None:
        with service() as http:
            assert put(http, url) == OUTSIDE
            assert put(http, role_url=url) == OUTSIDE
            assert http.get("/v1/instances").json()["instances"] == []

    def test_nor_where_events_are_fetched_from(self) -> None:
        with service() as http:
            for label in ("kv_events", "kv_events_replay"):
                labels = {"kv_events": "tcp://127.0.0.1:9", label: "tcp://10.0.0.13:5557"}
                assert put(http, "", "i1", **labels) == OUTSIDE

    def test_the_answer_says_what_to_change(self) -> None:
        with service() as http:
            answer = http.put("/v1/instances/i1", json={**BODY, "url": "http://gpu-1:8000"})
            said = answer.json()["error"]["message"]
        for word in (
            "'i1'",
            "url",
            "gpu-1",
            "instances.allowed_hosts",
            "--allowed-hosts",
            "localhost",
        ):
            assert word in said

    @pytest.mark.parametrize(
        "url",
        [
            "http://127.1:8000",
            "http://2130706433/",
            "http://0x7f000001/",
            "http://0177.0.0.1/",
            "http://127.0.0.1@10.0.0.13:8000",
            "http://10.0.0.13\\@localhost/",
            "http://localhost\\.evil.example",
            "http://localhost:8000#@evil",
            "http://local\u212aost",
            "http\u017f://localhost",
            "http://\uff11\uff12\uff17.0.0.1",
            "http:/localhost",
            "//localhost",
            "file:///etc/passwd",
            "tcp://localhost:1",
            "http://localhost:0",
            "http://localhost:65536",
            "http://localhost:8000/ x",
            "http://[::1",
            "http://[127.0.0.1]",
            "http://a..b",
            "http://-a",
            "http://localhost\n",
            " http://localhost",
        ],
    )
    def test_what_libraries_read_differently_is_no_url_even_where_all_is_allowed(
        self, url: str
    ) -> None:
        with service("*") as http:
            assert put(http, url) == (400, "invalid_request")
            assert put(http, role_url=url) == (400, "invalid_request")

    def test_names_domains_addresses_and_networks(self) -> None:
        with service("gpu-1", "*.engines.svc", "10.1.0.9", "10.0.0.0/24", "fd00::/8") as http:
            for host in (
                "gpu-1", "GPU-1", "gpu-1.", "a.engines.svc", "a.b.Engines.svc", "10.1.0.9",
                "10.0.0.255", "[fd00::7]", "[::ffff:10.0.0.7]",
            ):  # fmt: skip
                assert put(http, f"http://{host}:8000") == GOOD, host
            for host in (
                "gpu-2", "gpu-1.evil", "engines.svc", "aengines.svc", "a.engines.svc.evil",
                "10.1.0.8", "10.0.1.0", "[fe80::7]", "localhost", "127.0.0.1",
            ):  # fmt: skip
                assert put(http, f"http://{host}:8000") == OUTSIDE, host

    def test_a_name_is_not_looked_up(self) -> None:
        """`localhost` is in 127.0.0.0/8 today; what a name points to tomorrow nobody knows."""
        with service("127.0.0.0/8") as http:
            assert put(http, "http://localhost:8000") == OUTSIDE
            assert put(http, "http://127.0.0.1:8000") == GOOD

    @pytest.mark.parametrize(
        "entry", ["10.0.0.1/8", "http://a", "a:8000", "", "*.*.svc", "a*", "127.1", "a b"]
    )
    def test_what_is_no_host_is_no_setting(self, entry: str) -> None:  # fmt: skip
        with service() as http:
            answer = http.patch("/v1/policy", json={"instances": {"allowed_hosts": [entry]}})
            assert answer.status_code == 400
            assert "allowed_hosts" in answer.json()["error"]["message"] or "host" in answer.text
            assert put(http, "http://localhost") == GOOD

    def test_whoever_is_not_allowed_any_more_leaves(self) -> None:
        with service("localhost", "gpu-1") as http:
            assert put(http, "http://gpu-1:1", "far") == GOOD
            assert put(http, "http://localhost:1", "near") == GOOD
            http.patch("/v1/policy", json={"instances": {"allowed_hosts": ["localhost"]}})
            names = [one["id"] for one in http.get("/v1/instances").json()["instances"]]
            assert names == ["near"]

    def test_the_module_says_so_without_a_service(self) -> None:
        """Discovery asks it, too."""
        allowed = AllowedHosts(["*.engines.svc"])
        assert allowed.has("a.engines.svc")
        assert not allowed.has("a.engines.svc:80")
        assert not AllowedHosts(["*"]).has("\u212a.svc")
        with pytest.raises(InvalidRequest, match=r"here is at b\.svc"):
            allowed.check("http://b.svc", "what we found here")


class TestWhatOthersSay:
    def test_an_instance_that_another_conductor_took_in(self) -> None:
        """It is neither asked its role nor sent prompts by one whose setting does not allow it."""
        town = Town.of("a", "b")
        town["a"].patch({"instances": {"allowed_hosts": ["*"]}}, town.now)
        town.register(spec("near", url="http://localhost:1"), spec("far", url="http://gpu-1:1"))
        town.pass_s(0.1)
        b = create_app(town["b"], clock=lambda: town.now)
        b.state.service.learn(town["b"].news())
        with TestClient(b, base_url="http://localhost") as http:
            names = [one["id"] for one in http.get("/v1/instances").json()["instances"]]
            metrics = http.get("/metrics").text
        assert names == ["near"]
        assert 'tiffin_conductor_news_left_out_total{kind="instance"} 1.0' in metrics


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.write_text(
        "operate operator-token-01234\n"
        "instance:i1 token-of-i1-0123456789\n"
        "instance:vllm-* token-of-vllms-012345\n"
        "schedule,read router-token-012345\n"
    )
    path.chmod(0o600)
    return path


class TestWhoSpeaksForAnInstance:
    """A conductor as its operator starts it."""

    @pytest.mark.slow
    def test_it_registers_beats_and_leaves_and_nothing_else(self, tokens: Path) -> None:
        url = f"http://127.0.0.1:{free_port()}"
        own = {"authorization": "Bearer token-of-i1-0123456789"}
        with (
            Process(
                "--listen", url.removeprefix("http://"), "--token-file", str(tokens)
            ) as process,
            httpx.Client(base_url=url, trust_env=False, headers=own) as http,
        ):
            process.wait_until_it_answers(url)
            assert http.put("/v1/instances/i1", json=BODY).status_code == 204
            assert http.put("/v1/instances/i1", json={"load": {"running": 3}}).status_code == 204
            for method, path, body in (
                ("PUT", "/v1/instances/i2", BODY),
                ("PUT", "/v1/instances/i1%2f..%2fi2", BODY),
                ("DELETE", "/v1/instances/i2", None),
                ("GET", "/v1/instances", None),
                ("GET", "/v1/instances/i1", None),
                ("POST", "/v1/instances/i1/role", {"role": "decode"}),
                ("PATCH", "/v1/policy", {"instances": {"allowed_hosts": ["*"]}}),
                ("GET", "/v1/policy", None),
                ("PUT", "/v1/nodes/n1/drain", {}),
                ("DELETE", "/v1/nodes/n1/drain", None),
                ("POST", "/v1/schedule", {"request_id": "r", "model": MODEL, "prompt_tokens": 1}),
                ("POST", "/v1/requests/r/finished", None),
                ("GET", "/metrics", None),
            ):
                answer = http.request(method, path, json=body)
                assert answer.status_code in (403, 404), (method, path, answer.text)
                if answer.status_code == 403:
                    assert "instance:i1" in answer.json()["error"]["message"]
            operator = {"authorization": "Bearer operator-token-01234"}
            vllm = {"authorization": "Bearer token-of-vllms-012345"}
            router = {"authorization": "Bearer router-token-012345"}
            assert http.put("/v1/instances/vllm-7", json=BODY, headers=vllm).status_code == 204
            assert http.put("/v1/instances/i1", json=BODY, headers=vllm).status_code == 403
            assert http.put("/v1/instances/i1", json=BODY, headers=router).status_code == 403
            assert http.put("/v1/instances/i2", json=BODY, headers=operator).status_code == 204
            assert http.delete("/v1/instances/i1").status_code == 204
            assert http.delete("/v1/instances/i1", params={"now": "true"}).status_code == 204
            status, log = process.end()
        assert status == 0, log
        assert "token-of" not in log

    @pytest.mark.slow
    def test_the_option_allows_hosts(self, tmp_path: Path) -> None:
        url = f"http://127.0.0.1:{free_port()}"
        config = tmp_path / "conductor.toml"
        config.write_text('[instances]\nallowed_hosts = ["gpu-1"]\n')
        for options, allowed in (
            (["--allowed-hosts", "10.0.0.0/24, *.svc"], ["10.0.0.0/24", "*.svc"]),
            (["--config", str(config)], ["gpu-1"]),
        ):
            with Process("--listen", url.removeprefix("http://"), *options) as process:
                process.wait_until_it_answers(url)
                found = httpx.get(f"{url}/v1/policy", trust_env=False).json()["instances"]
                assert found == {"allowed_hosts": allowed}


class Elsewhere(ThreadingHTTPServer):
    """Answers everything with a redirect to itself, and remembers what it was asked."""

    daemon_threads = True

    def __init__(self, endless: bool = False) -> None:
        super().__init__(("127.0.0.1", 0), _Redirecting)
        self.endless, self.asked, self.sent = endless, list[str](), 0
        self.url = f"http://127.0.0.1:{self.server_port}"

    def __enter__(self) -> Elsewhere:
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()


class _Redirecting(BaseHTTPRequestHandler):
    server: Elsewhere
    protocol_version = "HTTP/1.1"

    def answer(self) -> None:
        self.server.asked.append(self.path)
        self.rfile.read(int(self.headers.get("content-length", 0)))
        if self.server.endless and self.command == "GET":
            self.send_response(200)
            self.end_headers()
            try:
                while True:
                    self.server.sent += self.wfile.write(b" " * (1 << 20))
            except OSError:
                self.close_connection = True
            return
        self.send_response(204 if self.server.endless else 307)
        if not self.server.endless:
            self.send_header("location", f"{self.server.url}/elsewhere")
            self.send_header("content-length", "0")
        self.end_headers()

    do_GET = do_POST = do_PUT = do_DELETE = answer  # noqa: N815

    def log_message(self, *_: object) -> None:
        """Not on stderr."""


class TestRedirects:
    def test_of_an_engine(self) -> None:
        """The API key and the prompt stay here, and the client is not sent there either."""

        async def scenario() -> None:
            with Elsewhere() as elsewhere:
                async with cluster(Engine("m0")) as it:
                    there = InstanceSpec("m0", MODEL, Role.MIXED, PROFILE, url=elsewhere.url)
                    it.core.register(there, asyncio.get_running_loop().time())
                    await it.gateway.refresh()
                    for stream in (False, True):
                        answer = await it.post({"prompt": "a", "stream": stream})
                        assert answer.status_code == 502
                        assert answer.json()["error"]["code"] == "engine_failed"
                        assert "location" not in answer.headers
                    await it.idle()
                assert set(elsewhere.asked) <= {"/v1/completions", "/tokenize"}

        run(scenario)

    def test_of_a_conductor(self) -> None:
        with Elsewhere() as elsewhere, ConductorClient(elsewhere.url) as client:
            with pytest.raises(InvalidRequest, match="307"):
                client.register(InstanceSpec("i1", MODEL, Role.MIXED, PROFILE))
            assert elsewhere.asked == ["/v1/instances/i1"]

    @pytest.mark.slow
    @pytest.mark.parametrize("endless", [False, True])
    def test_of_an_instance_that_is_told_its_role(self, endless: bool) -> None:
        """Nor is an answer read that does not end."""
        url = f"http://127.0.0.1:{free_port()}"
        with (
            Elsewhere(endless) as elsewhere,
            Process("--listen", url.removeprefix("http://")) as process,
            httpx.Client(base_url=url, trust_env=False) as http,
        ):
            process.wait_until_it_answers(url)
            for name in ("i1", "i2"):
                body = {**BODY, "labels": {"role_url": f"{elsewhere.url}/role"}}
                assert http.put(f"/v1/instances/{name}", json=body).status_code == 204
            assert http.post("/v1/instances/i1/role", json={"role": "decode"}).status_code == 204
            give_up = time.monotonic() + 60
            while (
                not (flips := http.get("/v1/plans").json()["flips"]) or flips[0]["step"] != "failed"
            ):
                assert time.monotonic() < give_up, flips
                for name in ("i1", "i2"):
                    http.put(f"/v1/instances/{name}", json={"load": {}})
                time.sleep(0.05)
        assert set(elsewhere.asked) == {"/role"}
        assert elsewhere.sent < 64 << 20
