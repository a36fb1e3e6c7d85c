"""A fake engine on loopback that speaks what vLLM speaks about itself: its `/metrics` is a text of
a real vLLM 0.32.0, with other numbers in it."""

from __future__ import annotations

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

METRICS = (Path(__file__).parent / "discovery/vllm_0_32_0_metrics.txt").read_text(encoding="utf-8")
MODELS = json.dumps(
    {"object": "list", "data": [{"id": "tiny", "parent": None, "max_model_len": 4096}]}
).encode()


def server_info(*, live: int = 0, replay: int = 0, role: str | None = None) -> dict[str, Any]:
    """What a vLLM in its development mode tells of its configuration, the parts that count."""
    return {
        "vllm_config": {
            "scheduler_config": {"max_num_seqs": 4},
            "kv_transfer_config": None if role is None else {"kv_role": role},
            "kv_events_config": {
                "enable_kv_cache_events": bool(live),
                "publisher": "zmq" if live else "null",
                "endpoint": f"tcp://*:{live}",
                "replay_endpoint": f"tcp://*:{replay}" if replay else None,
                "topic": "",
            },
        }
    }


class FakeEngine:
    """Answers until it is closed; `start` after `close` takes the same port again."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        self.routes: dict[str, bytes] = {"/v1/models": MODELS, "/version": b'{"version":"0.32.0"}'}
        self.running, self.waiting, self.usage, self.hits = 0, 0, 0.0, 0
        self.key = ""
        self.asked: list[str] = []
        self._host, self._port = host, port
        self.start()

    def start(self) -> None:
        engine = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                status, body = engine.answer(self.path, self.headers.get("authorization", ""))
                self.send_response(status)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_POST(self) -> None:
                engine.post(self)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer((self._host, self._port), Handler)
        self._server.daemon_threads = True
        self._port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    def post(self, http: BaseHTTPRequestHandler) -> None:
        """What it does with a request to be computed."""
        http.send_error(404)

    def answer(self, path: str, authorization: str) -> tuple[int, bytes]:
        path = path.partition("?")[0]
        self.asked.append(path)
        if self.key and path.startswith("/v1/") and authorization != f"Bearer {self.key}":
            return 401, b""
        if path == "/metrics":
            return 200, self._metrics().encode()
        return (200, self.routes[path]) if path in self.routes else (404, b"")

    def _metrics(self) -> str:
        text = METRICS
        for name, value in (
            ("num_requests_running", self.running),
            ("num_requests_waiting", self.waiting),
            ("kv_cache_usage_perc", self.usage),
            ("prefix_cache_hits_total", self.hits),
        ):
            text, count = re.subn(
                rf"^(vllm:{name}\{{[^}}]*\}}) .*$", rf"\g<1> {value}", text, flags=re.MULTILINE
            )
            assert count == 1, name
        return text

    @property
    def where(self) -> str:
        return f"{self._host}:{self._port}"

    @property
    def port(self) -> int:
        return self._port

    @property
    def url(self) -> str:
        return f"http://{self.where}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> FakeEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
