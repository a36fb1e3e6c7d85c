"""A conductor: a process `tiffin conductor` on a free port."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from tiffin.conductor.client import ConductorClient
from tiffin.conductor.cost import latency_profiles
from tiffin.conductor.errors import ConductorError
from tiffin.kvstore.cli.local.child_processes import ChildProcess
from tiffin.kvstore.cli.local.local_redis import free_port

from .errors import ProcessFailed

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from tiffin.conductor.cost.latency_profiles import Profile
    from tiffin.kvstore.cli.local.local_pool import LocalPool

HOST = "127.0.0.1"
PROFILE = "demo-llama.cpu"
STOP_S = 10.0
_LOOK_S = 0.05
# Another process may take the free port before the conductor does.
_PORT_ATTEMPTS = 5

# The command `tiffin conductor`, also where no `tiffin` is installed.
_PROGRAM = (
    "import typer; from tiffin.conductor.cli import commands; "
    "app = typer.Typer(); commands(app); app()"
)

# Rates for a block of 2 MiB from a node's memory, from its disk, and over TCP on this machine. The
# bandwidth between nodes is measured as soon as blocks are read over the network.
TRANSFERS = {
    "hbm_bandwidth_bytes_s": 1e9,
    "dram_bandwidth_bytes_s": 1e9,
    "nvme_bandwidth_bytes_s": 0.5e9,
    "link_bandwidth_bytes_s": 1e9,
}

# There are some hundred requests, not millions: the conductor has to learn from fewer of them.
SETTINGS = {
    "transfers": TRANSFERS,
    "calibration": {"step": 0.1, "window": 7},
    "admission": {"mode": "off"},
}


def fitted(
    prefill: Sequence[tuple[int, int, float]],
    decode: Sequence[tuple[int, int, float]],
    engine: str = "transformers",
) -> Profile:
    """The latency profile of this machine, from the measurements of its engines. Raises
    InvalidRequest if there are too few rows."""
    return latency_profiles.fit(
        PROFILE,
        prefill,
        decode,
        model="a small Llama",
        hardware="this machine",
        engine=engine,
        source="measured at the start",
    )


class ConductorProcess:
    """A running conductor; `url` is its address."""

    def __init__(self, child: ChildProcess, url: str) -> None:
        self._child = child
        self.url = url

    def look(self) -> None:
        """Raises ProcessFailed if it has ended."""
        if not self._child.alive:
            last = "\n".join(self._child.last_lines())
            raise ProcessFailed(
                f"the conductor {self._child.end_in_words()}; its last words:\n{last}"
            )


@contextlib.contextmanager
def conductor(
    pool: LocalPool,
    profile: Profile,
    folder: Path,
    timeout_s: float,
    record: Path | None = None,
    changes: Mapping[str, Any] = MappingProxyType({}),
) -> Iterator[ConductorProcess]:
    """A conductor that follows the pool's nodes by their directory, if there is one, and records
    requests to `record`. `changes`: groups of its settings. Raises ProcessFailed if it does not
    start."""
    (folder / "profiles").mkdir()
    (folder / "profiles" / f"{PROFILE}.json").write_bytes(profile.to_json())
    settings = folder / "conductor.json"
    settings.write_text(json.dumps({**SETTINGS, **changes}), encoding="utf-8")
    options = ["--profiles", str(folder / "profiles"), "--config", str(settings)]
    if pool.directory:
        options += ["--directory", pool.directory, "--pool-token-file", str(pool.token_file)]
    if record is not None:
        options += ["--record", str(record)]
    child, url = _started(options, folder / "conductor.log", timeout_s)
    try:
        yield ConductorProcess(child, url)
    finally:
        child.ask_to_stop()
        child.collect(STOP_S)


def _started(options: Sequence[str], log: Path, timeout_s: float) -> tuple[ChildProcess, str]:
    for attempt in range(1, _PORT_ATTEMPTS + 1):
        port = free_port(HOST)
        command = [sys.executable, "-c", _PROGRAM, "conductor", "--listen", f"{HOST}:{port}"]
        child = ChildProcess("conductor", [*command, *options], log)
        try:
            if _answers(child, f"http://{HOST}:{port}", timeout_s):
                return child, f"http://{HOST}:{port}"
            lines = child.last_lines()
        except BaseException:
            child.kill()
            raise
        child.kill()
        if attempt == _PORT_ATTEMPTS or not any("can't listen" in line for line in lines):
            raise ProcessFailed("the conductor did not start; its last words:\n" + "\n".join(lines))
    raise AssertionError("the last attempt returns or raises")


def _answers(child: ChildProcess, url: str, timeout_s: float) -> bool:
    """Wait until the conductor answers. False if it has ended, or after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    with ConductorClient(url, retries=0) as client:
        while child.alive and time.monotonic() < deadline:
            try:
                client.ready()
            except ConductorError:
                time.sleep(_LOOK_S)
            else:
                return True
    return False
