"""Listeners, clients and certificates for the messenger's tests, and a check that nothing leaks."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tiffin.messenger.tcp import tcp_client
from tiffin.messenger.testing import eventually

# As in tests/conftest.py: helpers of these tests, under module names that are used nowhere else.
sys.path.insert(0, str(Path(__file__).parent))

from netsupport import Server, descriptors, serving

if TYPE_CHECKING:
    from collections.abc import Iterator

# Threads that serve the whole process, started when they are first needed.
STAYS = ("tiffin-copy", "tiffin-uninterrupted")


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as server:
        yield server


@pytest.fixture
def transport(server: Server) -> Iterator[tcp_client.TcpTransport]:
    transport = tcp_client.TcpTransport(server.opener())
    yield transport
    transport.close()


@pytest.fixture(autouse=True)
def nothing_leaks() -> Iterator[None]:
    """As many threads and descriptors after a test as before."""
    threads, fds = set(threading.enumerate()), descriptors()
    yield

    def left() -> list[threading.Thread]:
        new = set(threading.enumerate()) - threads
        return [one for one in new if not one.name.startswith(STAYS)]

    assert eventually(lambda: not left()), left()
    assert eventually(lambda: descriptors() <= fds), os.listdir("/proc/self/fd")


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CA, and what it signed: server.pem for localhost and client.pem; stranger.pem signed
    itself. Keys beside them."""
    folder = tmp_path_factory.mktemp("certificates")

    def openssl(*arguments: str) -> None:
        command = ["openssl", *arguments]
        subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=30)

    def request(name: str) -> list[str]:
        key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        return ["req", *key, "-keyout", f"{name}.key", "-subj", f"/CN={name}"]

    for name in ("ca", "stranger"):
        openssl(*request(name), "-x509", "-days", "2", "-out", f"{name}.pem")
    (folder / "names").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
    for name in ("server", "client"):
        openssl(*request(name), "-out", f"{name}.csr")
        signer = ["-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "names"]
        openssl("x509", "-req", "-in", f"{name}.csr", *signer, "-days", "2", "-out", f"{name}.pem")
    return folder
