"""The service on a port: in a thread of this process, or in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from typing import TYPE_CHECKING

import httpx

from tiffin.conductor.api.app import create_app
from tiffin.conductor.service.web_server import listening, web_server
from tiffin.conductor.web.connection_limits import ConnectionLimits

if TYPE_CHECKING:
    import ssl
    from collections.abc import Iterator

    from tiffin.conductor.api.request_bodies import Limits
    from tiffin.conductor.core import Conductor
    from tiffin.conductor.web.auth import Tokens

START_S = 60.0


@contextlib.contextmanager
def served(
    core: Conductor,
    tokens: Tokens | None = None,
    limits: Limits | None = None,
    connections: ConnectionLimits | None = None,
    tls: ssl.SSLContext | None = None,
) -> Iterator[str]:
    """Serve a conductor from a thread, as its process does; yields its URL."""
    app = create_app(core, auth=tokens, limits=limits)
    server = web_server(app, connections or ConnectionLimits(), stop_s=2, tls=tls)
    with listening(("127.0.0.1", 0)) as door:
        loop = asyncio.new_event_loop()

        def run() -> None:
            with asyncio.Runner(loop_factory=lambda: loop) as runner:
                runner.run(server.serve([door]))

        def stop() -> None:
            app.state.service.stop()
            server.should_exit = True

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield f"http{'s' if tls else ''}://127.0.0.1:{door.getsockname()[1]}"
        finally:
            loop.call_soon_threadsafe(stop)
            thread.join()


class Process:
    """`tiffin conductor` with these options, in a process."""

    COMMAND = "conductor"
    CODE = (
        "import typer; from tiffin.conductor.cli import commands; app = typer.Typer();"
        "app.callback()(lambda: None); commands(app); app()"
    )

    def __init__(self, *options: str) -> None:
        self._options = options
        self._log = tempfile.TemporaryFile("a+", encoding="utf-8")  # noqa: SIM115 # a pipe would fill up
        self.process: subprocess.Popen[str]
        self.start()

    def start(self) -> None:
        """Start, or start again after `end`; returns at once."""
        path = os.pathsep.join(filter(None, sys.path))
        self.process = subprocess.Popen(
            [sys.executable, "-c", self.CODE, self.COMMAND, *self._options],
            env={**os.environ, "PYTHONPATH": path, "COLUMNS": "300", "TERM": "dumb"},
            stderr=self._log,
            text=True,
        )

    def log(self) -> str:
        """What it has logged so far, before it was started again too."""
        self._log.seek(0)
        return self._log.read()

    def wait_until_it_answers(self, url: str, tls: ssl.SSLContext | bool = True) -> float:
        """Wait until it answers; returns the seconds."""
        began = time.monotonic()
        live = f"{url}/livez"
        while True:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(live, trust_env=False, timeout=1, verify=tls).status_code == 200:
                    return time.monotonic() - began
            assert self.process.poll() is None, self.end()[1]
            assert time.monotonic() - began < START_S
            time.sleep(0.02)

    def end(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """Send a signal; returns the exit status and the log."""
        self.process.send_signal(number)
        return self.process.wait(timeout=START_S), self.log()

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._log.close()


class GatewayProcess(Process):
    """`tiffin gateway` with these options."""

    COMMAND = "gateway"
    CODE = Process.CODE.replace("tiffin.conductor.cli", "tiffin.conductor.gateway.cli")


def wait_for_follower(url: str) -> None:
    """Wait until a client follows the decisions."""
    with httpx.Client(trust_env=False) as http:
        while "tiffin_conductor_followers 1.0" not in http.get(f"{url}/metrics").text:
            time.sleep(0.01)
