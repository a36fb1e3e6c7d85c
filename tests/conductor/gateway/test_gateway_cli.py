"""`tiffin gateway status`."""

from __future__ import annotations

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import TYPE_CHECKING

import typer
from directory.ports import free_port
from typer.testing import CliRunner

from tiffin.conductor.gateway.cli import commands

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import pytest

KEY = "k" * 32


@contextmanager
def gateway(reasons: list[str]) -> Iterator[str]:
    """Something that answers `/readyz` as a gateway does."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known = self.headers.get("authorization") == f"Bearer {KEY}"
            told = reasons if known or not reasons else ["who sends a token is told"]
            body = json.dumps({"status": "not ready" if reasons else "ok", "reasons": told})
            self.send_response(503 if reasons and self.path == "/readyz" else 200)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def status(url: str, *more: str) -> tuple[int, str]:
    app = typer.Typer()
    commands(app)
    app.command("other")(lambda: None)
    result = CliRunner().invoke(app, ["gateway", "status", "--url", url, *more])
    return result.exit_code, result.output


def test_it_says_whether_the_gateway_is_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key_file = tmp_path / "key"
    key_file.touch(0o600)
    key_file.write_text(KEY)
    # The conductor's token is no gateway's business.
    monkeypatch.setenv("TIFFIN_CONDUCTOR_TOKEN_FILE", str(key_file))
    with gateway([]) as url:
        assert status(url) == (0, "ready\n")
    with gateway(["no instance is known"]) as url:
        assert status(url) == (1, "not ready: who sends a token is told\n")
        code, said = status(url, "--token-file", str(key_file))
        assert (code, said) == (1, "not ready: no instance is known\n")
        code, said = status(url, "--token-file", str(key_file), "--json")
        assert (code, json.loads(said)) == (1, {"reasons": ["no instance is known"]})


def test_a_gateway_that_is_not_there_is_one_line() -> None:
    code, said = status(f"http://127.0.0.1:{free_port()}")
    assert code == 2
    assert "ConductorUnavailable" in said or "the gateway at" in said
