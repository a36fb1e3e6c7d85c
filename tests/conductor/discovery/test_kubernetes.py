"""Endpoints of a service, by a small API server that lists and watches as Kubernetes' does. A real
cluster was not run."""

from __future__ import annotations

import asyncio
import contextlib
import json
import queue
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

import pytest

from tiffin.conductor.discovery.discovery import Place
from tiffin.conductor.discovery.endpoint_slices import EndpointSlices, Expired
from tiffin.conductor.discovery.kubernetes import ApiServer
from tiffin.conductor.discovery.settings import KubernetesSettings, SourceSettings
from tiffin.conductor.errors import ConductorUnavailable, InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TOKEN = "t" * 40
PATIENCE_S = 30.0
PORTS = [{"name": "http", "port": 8000}, {"name": "events", "port": 5557}]


def endpoint(address: str, pod: str, ready: bool | None = True) -> dict[str, Any]:
    return {
        "addresses": [address],
        "conditions": {} if ready is None else {"ready": ready, "serving": True},
        "targetRef": {"kind": "Pod", "name": pod},
        "nodeName": "gpu-1",
    }


def slice_of(name: str, *endpoints: dict[str, Any], version: str = "7", **more: Any) -> Any:
    return {
        "metadata": {"name": name, "namespace": "ml", "resourceVersion": version},
        "addressType": "IPv4",
        "endpoints": list(endpoints) or None,
        "ports": PORTS,
        **more,
    }


def listed(*slices: Any, version: str = "10") -> bytes:
    return json.dumps({"metadata": {"resourceVersion": version}, "items": slices}).encode()


def event(kind: str, what: Any) -> bytes:
    return json.dumps({"type": kind, "object": what}).encode()


A = endpoint("10.0.0.1", "engine-0")
B = endpoint("10.0.0.2", "engine-1")
PLACE_A = Place("http://10.0.0.1:8000", "engine-0")
PLACE_B = Place("http://10.0.0.2:8000", "engine-1")


def followed(*slices: Any, port: str = "http") -> EndpointSlices:
    found = EndpointSlices("http", port)
    found.take_list(listed(*slices))
    return found


def test_events_change_the_list() -> None:
    slices = followed(slice_of("s1", A))
    assert (slices.places(), slices.version) == ([PLACE_A], "10")
    assert slices.take_event(event("ADDED", slice_of("s2", B, version="11")))
    assert (slices.places(), slices.version) == ([PLACE_A, PLACE_B], "11")
    assert slices.take_event(event("MODIFIED", slice_of("s1", version="12")))
    assert slices.places() == [PLACE_B]
    assert slices.take_event(event("DELETED", slice_of("s2", B, version="13")))
    assert slices.places() == []
    assert not slices.take_event(event("BOOKMARK", {"metadata": {"resourceVersion": "99"}}))
    assert slices.version == "99"
    with pytest.raises(Expired):
        slices.take_event(event("ERROR", {"code": 410, "message": "too old"}))
    with pytest.raises(ConductorUnavailable, match="500 broken"):
        slices.take_event(event("ERROR", {"code": 500, "message": "broken"}))
    with pytest.raises(ConductorUnavailable, match="no answer of an API server"):
        slices.take_event(b"<html>")


def test_which_endpoints_count() -> None:
    later = endpoint("10.0.0.3", "engine-2", ready=False)
    unknown = endpoint("10.0.0.4", "engine-3", ready=None)
    names = slice_of("s2", endpoint("gpu.example", "x"), addressType="FQDN")
    six = slice_of("s3", endpoint("fd00::1", "engine-6"), addressType="IPv6")
    slices = followed(slice_of("s1", A, later, unknown), names, six)
    assert [place.name for place in slices.places()] == ["engine-0", "engine-3", "engine-6"]
    assert slices.places()[-1].url == "http://[fd00::1]:8000"


def test_which_port() -> None:
    assert followed(slice_of("s", A), port="5557").places()[0].url == "http://10.0.0.1:5557"
    one = slice_of("s", A, ports=[{"name": None, "port": 80}])
    assert followed(one, port="").places()[0].url == "http://10.0.0.1:80"
    with pytest.raises(InvalidRequest, match=r"http \(8000\), events \(5557\): name one"):
        followed(slice_of("s", A), port="").places()
    with pytest.raises(InvalidRequest, match="option port"):
        followed(slice_of("s", A), port="grpc").places()


class FakeApi:
    """Lists what `slices` has, and sends what is put into `events`; None ends a watch."""

    def __init__(self) -> None:
        self.slices: list[Any] = []
        self.version = "10"
        self.events: queue.Queue[bytes | None] = queue.Queue()
        self.watched: list[str] = []
        self.statuses: list[int] = []  # of the next answers, before ones that work
        api = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                api.serve(self)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def serve(self, http: BaseHTTPRequestHandler) -> None:
        url = urlsplit(http.path)
        asked = {name: values[0] for name, values in parse_qs(url.query).items()}
        if self.statuses:
            return self._answer(http, self.statuses.pop(0), b"{}")
        if http.headers["authorization"] != f"Bearer {TOKEN}":
            return self._answer(http, 401, b"{}")
        if (
            url.path != "/apis/discovery.k8s.io/v1/namespaces/ml/endpointslices"
            or asked.get("labelSelector") != "kubernetes.io/service-name=engines"
        ):
            return self._answer(http, 404, b"{}")
        if "watch" not in asked:
            return self._answer(http, 200, listed(*self.slices, version=self.version))
        self.watched.append(asked["resourceVersion"])
        http.send_response(200)
        http.send_header("transfer-encoding", "chunked")
        http.end_headers()
        while (line := self.events.get()) is not None:
            # In two pieces, as lines need not come whole.
            for piece in (line[:9], line[9:] + b"\n"):
                http.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        with contextlib.suppress(OSError):
            http.wfile.write(b"0\r\n\r\n")

    def _answer(self, http: BaseHTTPRequestHandler, status: int, body: bytes) -> None:
        http.send_response(status)
        http.send_header("content-length", str(len(body)))
        http.end_headers()
        http.wfile.write(body)

    def close(self) -> None:
        self.events.put(None)
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def api() -> Iterator[FakeApi]:
    api = FakeApi()
    try:
        yield api
    finally:
        api.close()


@pytest.fixture
def account(tmp_path: Path) -> Path:
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    (tmp_path / "namespace").write_text("ml")
    return tmp_path


SOURCE = SourceSettings(kubernetes="engines", port="http", profile="p")


def test_a_service_is_followed(api: FakeApi, account: Path) -> None:
    async def check() -> None:
        server = ApiServer(KubernetesSettings(api_url=api.url, account_folder=str(account)))
        found = server.follow(SOURCE)
        api.slices = [slice_of("s1", A)]
        async with asyncio.timeout(PATIENCE_S):
            assert await anext(found) == [PLACE_A]
            api.events.put(event("MODIFIED", slice_of("s1", A, B, version="11")))
            assert await anext(found) == [PLACE_A, PLACE_B]
            api.events.put(event("BOOKMARK", {"metadata": {"resourceVersion": "20"}}))
            api.events.put(None)  # the server ends a watch after a while
            api.events.put(event("MODIFIED", slice_of("s1", B, version="21")))
            assert await anext(found) == [PLACE_B]
            assert api.watched == ["10", "20"], "it goes on where it was"
            api.slices, api.version = [slice_of("s9", A)], "500"
            api.events.put(event("ERROR", {"code": 410, "message": "too old"}))
            assert await anext(found) == [PLACE_A], "it lists again"
            api.events.put(None)
        await found.aclose()
        await server.close()

    asyncio.run(check())


def test_a_token_that_was_renewed_is_used(api: FakeApi, account: Path) -> None:
    async def check() -> None:
        (account / "token").write_text("an old one")
        server = ApiServer(KubernetesSettings(api_url=api.url, account_folder=str(account)))
        with pytest.raises(ConductorUnavailable, match="401: the service account has to be"):
            await anext(server.follow(SOURCE))
        (account / "token").write_text(TOKEN)
        assert await anext(server.follow(SOURCE)) == []
        await server.close()

    asyncio.run(check())


def test_a_server_that_fails_is_told(api: FakeApi, account: Path) -> None:
    async def check() -> None:
        server = ApiServer(KubernetesSettings(api_url=api.url, account_folder=str(account)))
        api.statuses = [500]
        with pytest.raises(ConductorUnavailable, match="answered 500"):
            await anext(server.follow(SOURCE))
        api.statuses = [200]  # and no list
        with pytest.raises(ConductorUnavailable, match="no answer of an API server"):
            await anext(server.follow(SOURCE))
        await server.close()

    asyncio.run(check())


def test_where_there_is_no_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(InvalidRequest, match=r"give discovery\.kubernetes"):
        ApiServer(KubernetesSettings(account_folder=str(tmp_path)))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "6443")

    async def check() -> None:
        server = ApiServer(KubernetesSettings(account_folder=str(tmp_path)))
        with pytest.raises(InvalidRequest, match="NAMESPACE/SERVICE"):
            await anext(server.follow(SOURCE))
        await server.close()

    asyncio.run(check())
