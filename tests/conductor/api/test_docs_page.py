"""The page `/docs`: all of it comes from the conductor; a browser without a network renders it."""

from __future__ import annotations

import base64
import hashlib
import re
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING
from urllib.parse import urljoin

import httpx
import pytest
from apisupport import Recorder
from serversupport import served
from starlette.testclient import TestClient

from tiffin.conductor.api.app import create_app
from tiffin.conductor.api.openapi import document

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CHROMIUM = shutil.which("chromium")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with served(Recorder()) as url:
        yield url


def test_all_of_it_comes_from_here(url: str) -> None:
    with httpx.Client(trust_env=False) as http:
        page = http.get(f"{url}/docs")
        assert page.status_code == 200
        parts = re.findall(r'(?:src|href)="([^"]*)"', page.text)
        assert len(parts) == 3
        for part in parts:
            there = urljoin(f"{url}/docs", part)
            assert there.startswith(f"{url}/docs/")
            found = http.get(there)
            assert found.status_code == 200
            assert found.content
        script = http.get(f"{url}/docs/files/swagger-ui-bundle.js")
        assert "SwaggerUIBundle" in script.text
        assert re.findall(r"url: '([^']*)'", page.text) == ["openapi.json"]


def test_browsers_ask_nobody_else(url: str) -> None:
    """By the page's content security policy: requests only to this host, only this inline script,
    no frames around it."""
    page = httpx.get(f"{url}/docs", trust_env=False)
    policy = page.headers["content-security-policy"]
    (script,) = re.findall(r"<script>(.*?)</script>", page.text, re.S)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    assert (rules["script-src"], rules["connect-src"]) == (f"'self' 'sha256-{digest}'", "'self'")
    assert rules["frame-ancestors"] == "'none'"
    assert not re.search(r"https?:", policy)


def test_its_files_are_no_way_to_others(url: str) -> None:
    with httpx.Client(trust_env=False) as http:
        for path in ("../main.py", "%2e%2e/main.py", "..%2fmain.py", "/etc/passwd", ""):
            assert http.get(f"{url}/docs/files/{path}").status_code in (404, 405)


def test_a_conductor_without_the_page_is_one_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fastapi_swagger", None)
    with TestClient(create_app(Recorder()), base_url="http://localhost") as http:
        said = http.get("/docs")
        assert (said.status_code, 'pip install "tiffin[conductor]"' in said.text) == (501, True)
        assert http.get("/openapi.json").status_code == 200


@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium: apt-get install chromium")
def test_a_browser_shows_it(url: str, tmp_path: Path) -> None:
    assert CHROMIUM is not None
    done = subprocess.run(
        [
            CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-sync",
            "--disable-background-networking", "--disable-component-update", "--no-first-run",
            # No name is resolved, neither for the page nor for the browser itself.
            "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
            f"--user-data-dir={tmp_path}", "--virtual-time-budget=20000", "--dump-dom",
            f"{url}/docs",
        ],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    shown = re.findall(r'data-path="([^"]*)"', done.stdout)
    assert sorted(shown) == sorted(path for path, own in document()["paths"].items() for _ in own)
    assert "OAS 3.1" in done.stdout
