"""Parses a directory's URL: `redis://host:6379/0`, `redis+cluster://a:7000,b:7000`, `embedded:`."""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from ..errors import InvalidInput
from .base import TIMEOUT_S

if TYPE_CHECKING:
    from collections.abc import Mapping

PASSWORD_VARIABLE = "TIFFIN_REDIS_PASSWORD"
PORT, SENTINEL_PORT = 6379, 26379

# A pool's name is part of every Redis key, in the braces of the hash tag that chooses the shard.
_POOL = re.compile(r"[A-Za-z0-9._-]{1,64}")

# valkey:// is redis://: the same protocol.
_SCHEMES = {
    "redis": ("single", False),
    "rediss": ("single", True),
    "valkey": ("single", False),
    "valkeys": ("single", True),
    "redis+sentinel": ("sentinel", False),
    "rediss+sentinel": ("sentinel", True),
    "redis+cluster": ("cluster", False),
    "rediss+cluster": ("cluster", True),
}
PARAMETERS = ("password_file", "sentinel_password_file", "timeout", "ca", "cert", "key")

# More servers than any cluster's seed list needs.
_HOSTS_MAX = 64

_PASSWORD_BYTES_MAX = 4096


@dataclass(frozen=True, slots=True)
class RedisOptions:
    """The addresses, credentials and TLS options of Redis. The password is in no `repr`."""

    kind: str  # single, sentinel or cluster
    hosts: tuple[tuple[str, int], ...]
    database: int = 0
    service: str = ""  # the sentinels' name of the master
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    sentinel_password: str | None = field(default=None, repr=False)
    tls: bool = False
    ca: str | None = None
    cert: str | None = None
    key: str | None = None
    timeout_s: float = TIMEOUT_S

    @property
    def address(self) -> str:
        """The hosts as text for messages, without secrets."""
        return ",".join(f"{host}:{port}" for host, port in self.hosts)

    def of_sentinels(self) -> RedisOptions:
        """These options for the sentinels themselves: they have their own password, mostly none."""
        return replace(self, username=None, password=self.sentinel_password, database=0)


def check_pool(pool: str) -> str:
    """`pool` if it is a valid name of a pool. Raises InvalidInput."""
    if not _POOL.fullmatch(pool):
        raise InvalidInput(
            f"a pool's name is 1 to 64 letters, digits, dots, dashes and underscores, not {pool!r}"
        )
    return pool


def parse_redis(url: str, environ: Mapping[str, str] = os.environ) -> RedisOptions:
    """Parse a `redis...://` URL. Raises InvalidInput, whose message never has the password."""
    scheme, _, _ = url.partition("://")
    if scheme not in _SCHEMES:
        raise InvalidInput(
            f"a directory's URL begins with embedded: or {'://, '.join(_SCHEMES)}://, "
            f"not with {scheme[:40]!r}"
        )
    kind, tls = _SCHEMES[scheme]
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise InvalidInput(f"{scheme}://: {error}") from None
    if parts.fragment:
        raise InvalidInput(f"{scheme}://: a '#' has no meaning here; write %23 in a password")
    parameters = _parameters(scheme, parts.query)
    username, password, hosts = _authority(scheme, parts, kind)
    path = unquote(parts.path).strip("/")
    _check_tls(scheme, tls, parameters)
    sentinel_file = parameters.get("sentinel_password_file")
    return RedisOptions(
        kind=kind,
        hosts=hosts,
        database=_database(scheme, path) if kind == "single" else 0,
        service=_service(scheme, path) if kind == "sentinel" else "",
        username=username,
        password=_password(password, parameters.get("password_file"), environ),
        sentinel_password=_read_password(sentinel_file) if sentinel_file else None,
        tls=tls,
        ca=parameters.get("ca"),
        cert=parameters.get("cert"),
        key=parameters.get("key"),
        timeout_s=_timeout(parameters.get("timeout")),
    )


def _parameters(scheme: str, query: str) -> dict[str, str]:
    pairs = parse_qsl(query, keep_blank_values=True)
    parameters = dict(pairs)
    if len(pairs) != len(parameters):
        raise InvalidInput(f"{scheme}://: a parameter is given twice")
    for name in parameters:
        if name not in PARAMETERS:
            raise InvalidInput(
                f"{scheme}://: unknown parameter {name!r}; known: {', '.join(PARAMETERS)}"
            )
    return parameters


def _check_tls(scheme: str, tls: bool, parameters: Mapping[str, str]) -> None:
    files = {name: parameters[name] for name in ("ca", "cert", "key") if name in parameters}
    if files and not tls:
        raise InvalidInput(f"{scheme}://: {', '.join(files)} are for TLS; write rediss")
    if ("cert" in files) != ("key" in files):
        raise InvalidInput(f"{scheme}://: cert and key go together: give both or neither")
    for name, file in files.items():
        if not os.access(file, os.R_OK):
            raise InvalidInput(f"{scheme}://: can't read {name}={file}")


def _authority(
    scheme: str, parts: SplitResult, kind: str
) -> tuple[str | None, str | None, tuple[tuple[str, int], ...]]:
    userinfo, at, listed = parts.netloc.rpartition("@")
    username, _, password = userinfo.partition(":")
    default = SENTINEL_PORT if kind == "sentinel" else PORT
    hosts = tuple(_host(scheme, host, default) for host in listed.split(","))
    if kind == "single" and len(hosts) > 1:
        raise InvalidInput(
            f"{scheme}://: several hosts are a cluster or sentinels; "
            "write redis+cluster:// or redis+sentinel://"
        )
    if len(hosts) > _HOSTS_MAX:
        raise InvalidInput(
            f"{scheme}://: {len(hosts)} hosts; {_HOSTS_MAX} are enough to begin with"
        )
    return unquote(username) or None if at else None, unquote(password) or None, hosts


def _host(scheme: str, text: str, default: int) -> tuple[str, int]:
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname, parts.port
        (host or "").encode("idna")  # as the system's resolver does; an empty label is a ValueError
    except ValueError:
        host, port = None, None
    if not host or port == 0:
        raise InvalidInput(f"{scheme}://: {text!r} is no host:port")
    return host, port or default


def _database(scheme: str, path: str) -> int:
    if not path:
        return 0
    if not (path.isascii() and path.isdigit() and len(path) <= 5):
        raise InvalidInput(f"{scheme}://: a database is a number, not {path!r}")
    return int(path)


def _service(scheme: str, path: str) -> str:
    if not _POOL.fullmatch(path):
        raise InvalidInput(
            f"{scheme}://: say how the sentinels call the master: {scheme}://host:26379/mymaster"
        )
    return path


def _timeout(text: str | None) -> float:
    if text is None:
        return TIMEOUT_S
    try:
        timeout_s = float(text)
    except ValueError:
        timeout_s = 0.0
    if not 0.01 <= timeout_s <= 60.0:  # also refuses nan
        raise InvalidInput(f"timeout is seconds from 0.01 to 60, not {text!r}")
    return timeout_s


def _password(in_url: str | None, file: str | None, environ: Mapping[str, str]) -> str | None:
    """The password in the URL, else in the file, else in the environment. Raises InvalidInput for a
    password in the URL and a file."""
    if in_url is not None and file is not None:
        raise InvalidInput("a password in the URL and password_file: choose one")
    if in_url is not None:
        return in_url
    if file is None:
        return environ.get(PASSWORD_VARIABLE) or None
    return _read_password(file)


def _read_password(file: str) -> str:
    try:
        with Path(file).open("rb") as opened:
            mode = os.fstat(opened.fileno()).st_mode
            content = opened.read(_PASSWORD_BYTES_MAX + 1)
        password = content.decode("utf-8").strip()
    except OSError as error:
        raise InvalidInput(f"can't read the password file {file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InvalidInput(f"the password file {file} is not text") from None
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise InvalidInput(f"{file} can be read by others; run: chmod 600 {file}")
    if not password or len(content) > _PASSWORD_BYTES_MAX:
        raise InvalidInput(f"{file} holds no password of 1 to {_PASSWORD_BYTES_MAX} bytes")
    return password
