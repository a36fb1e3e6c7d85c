"""Parses a client's URL: `embedded:?dram=8GiB&nvme=/path:100GiB`, `unix:/run/tiffin.sock` or, for a
pool of many machines, `tiffin://host:7700` and `redis://host:6379`."""

from __future__ import annotations

import os
import re
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, parse_qsl, unquote, urlencode, urlsplit

from .credentials import parse_address
from .directory.url import PARAMETERS as OF_DIRECTORY
from .directory.url import check_pool
from .errors import InvalidInput
from .node.core.node_core import CoreOptions
from .node.node import NodeOptions
from .sizes import parse_bytes
from .text import shown

if TYPE_CHECKING:
    from collections.abc import Callable

EMBEDDED_DRAM_BYTES = 1 << 30
# With a `tiffin:` URL every call queries all addresses: more would be slower than a directory.
ADDRESSES_MAX = 16

_USER = re.compile("//.*@", re.DOTALL)
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


@dataclass(frozen=True, slots=True)
class Embedded:
    """A node in the client's own process."""

    options: NodeOptions


@dataclass(frozen=True, slots=True)
class Daemon:
    """A node daemon on this host."""

    path: Path


@dataclass(frozen=True, slots=True)
class Pool:
    """A pool of nodes on many machines: the nodes at `addresses`, or the nodes registered in the
    directory at `directory` (a URL for `open_directory`). `home`: "auto", "none", or the socket of
    the preferred node."""

    addresses: tuple[tuple[str, int], ...] = ()
    directory: str = field(default="", repr=False)  # may have a password in it
    pool: str = "default"
    home: str = "auto"
    admission: str = "second"
    credentials: dict[str, Any] = field(default_factory=dict)
    numbers: dict[str, float] = field(default_factory=dict)


def default_socket() -> Path:
    """The default socket path of `tiffin node`, in a directory that is private to the user."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and Path(runtime).is_dir():
        return Path(runtime) / "tiffin" / "node.sock"
    return Path(tempfile.gettempdir()) / f"tiffin-{os.getuid()}" / "node.sock"


def parse_url(url: str) -> Embedded | Daemon | Pool:
    """Parse a client's URL. Raises InvalidInput, whose message names the valid forms."""
    parts = _split(url)
    if parts.scheme == "embedded":
        return Embedded(_node_options(parts.query))
    if parts.scheme == "unix":
        if parts.netloc or parts.query:
            raise InvalidInput(
                f"{_shown(url)}: write unix:/path/to/socket, with three slashes or one"
            )
        path = Path(unquote(parts.path))
        return Daemon(path if parts.path else default_socket())
    if parts.scheme == "tiffin":
        options = _pool_options(parts.query, ())
        return Pool(_addresses(url, parts), **options)  # type: ignore[arg-type]
    if parts.scheme.startswith(("redis", "valkey")):
        given = parse_qsl(parts.query, keep_blank_values=True)
        kept = urlencode([(name, text) for name, text in given if name in OF_DIRECTORY])
        directory = parts._replace(query=kept).geturl()
        return Pool((), directory, **_pool_options(parts.query, OF_DIRECTORY))  # type: ignore[arg-type]
    raise InvalidInput(
        f"{_shown(url)} is not a Tiffin URL; write embedded:?dram=8GiB&nvme=/path:100GiB, "
        "unix:/path/to/socket, unix: for the default socket, tiffin://host:7700, or "
        "redis://host:6379"
    )


def _split(url: str) -> SplitResult:
    if not isinstance(url, str) or "\0" in unquote(url):
        raise InvalidInput(f"{_shown(url)} is not a Tiffin URL; it is text without null bytes")
    try:
        return urlsplit(url)
    except ValueError as error:  # its message may quote the host part, with a password in it
        why = error if "@" not in url else "what follows // is no host"
        raise InvalidInput(f"{_shown(url)} is not a URL: {why}") from None


def _shown(url: object) -> str:
    """A URL as text for an error message, without the part before an @, which may be a password."""
    return repr(_USER.sub("//***@", url)) if isinstance(url, str) else shown(url)


def _addresses(url: str, parts: SplitResult) -> tuple[tuple[str, int], ...]:
    """The addresses of a `tiffin:` URL: no duplicates, no port 0. Raises InvalidInput."""
    if parts.path.strip("/") or parts.fragment:
        raise InvalidInput(f"{_shown(url)}: write tiffin://host:7700,host:7700?name=value")
    if "@" in parts.netloc:
        raise InvalidInput(
            f"{_shown(url)}: nodes know no user and no password; they have a token, in a file: "
            "tiffin://host:7700?token_file=PATH"
        )
    addresses = tuple(parse_address(text) for text in parts.netloc.split(","))
    if len(addresses) > ADDRESSES_MAX:
        raise InvalidInput(
            f"{len(addresses)} nodes in one URL; the limit is {ADDRESSES_MAX}, because each is "
            "asked for everything. Use a directory: redis://host:6379"
        )
    for address in addresses:
        if addresses.count(address) > 1 or not address[1]:
            raise InvalidInput(
                f"{_shown(url)}: name each node once, with the port that it listens on"
            )
    return addresses


def parse_nvme(text: str) -> tuple[Path, int]:
    """`/path:100GiB` -> the directory and the size in bytes. Raises InvalidInput."""
    path, colon, size = text.rpartition(":")
    if not colon or not path:
        raise InvalidInput(f"nvme={text!r}: write a directory and a size, /path:100GiB")
    return Path(path), parse_bytes(size)


def _flag(text: str) -> bool:
    if text.lower() in _TRUE + _FALSE:
        return text.lower() in _TRUE
    raise InvalidInput(f"{text!r} is neither true nor false")


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise InvalidInput(f"{text!r} is not a whole number")
    return int(text)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise InvalidInput(f"{text!r} is not a number") from error


_NODE: dict[str, tuple[str, Callable[[str], object]]] = {
    "dram": ("dram_bytes", parse_bytes),
    "policy": ("policy", str),
    "hugepages": ("hugepages", _flag),
    "prefault": ("prefault", _flag),
    "nvme_queue_depth": ("nvme_queue_depth", _count),
    "flush_s": ("flush_s", _number),
}
_CORE: dict[str, tuple[str, Callable[[str], object]]] = {
    "high_watermark": ("high_watermark", _number),
    "low_watermark": ("low_watermark", _number),
    "write_lease_s": ("write_lease_s", _number),
    "demote_on_second_use": ("demote_on_second_use", _flag),
    "remote_lease_s": ("remote_lease_s", _number),
}


_CREDENTIALS = ("token_file", "tls_ca", "tls_cert", "tls_key", "authenticate")
_WORDS = ("pool", "home", "admission")
# Which blocks read from remote nodes are copied to the home node (`pool/home/read_through.py`).
ADMISSIONS = ("always", "second", "never")
_NUMBERS = {"hedge_s": _number, "hedge_share": _number, "streams": _count, "nixl": _flag}


def _pool_options(query: str, others: tuple[str, ...]) -> dict[str, object]:
    options: dict[str, object] = {}
    credentials: dict[str, str] = {}
    numbers: dict[str, float] = {}
    for name, text in parse_qsl(query, keep_blank_values=True):
        if name in _CREDENTIALS:
            credentials[name] = text
        elif name in _WORDS:
            options[name] = _word(name, text)
        elif name in _NUMBERS:
            numbers[name] = _NUMBERS[name](text)
        elif name not in others:
            known = ", ".join(sorted([*_CREDENTIALS, *_WORDS, *_NUMBERS, *others]))
            raise InvalidInput(f"unknown parameter {name!r} in the URL; known: {known}")
    return {**options, "credentials": credentials, "numbers": numbers}


def _word(name: str, text: str) -> str:
    if name == "pool":
        return check_pool(text)
    if name == "admission" and text not in ADMISSIONS:
        raise InvalidInput(f"admission={text!r}; choose one of {', '.join(ADMISSIONS)}")
    if not text:
        raise InvalidInput(f"{name}= is empty; write auto, none or the path of a node's socket")
    return text


def _node_options(query: str) -> NodeOptions:
    node: dict[str, object] = {"dram_bytes": EMBEDDED_DRAM_BYTES}
    core: dict[str, object] = {}
    for name, text in parse_qsl(query, keep_blank_values=True):
        if name == "nvme":
            node["nvme_path"], node["nvme_bytes"] = parse_nvme(text)
        elif name in _NODE:
            node[_NODE[name][0]] = _NODE[name][1](text)
        elif name in _CORE:
            core[_CORE[name][0]] = _CORE[name][1](text)
        else:
            known = ", ".join(sorted(["nvme", *_NODE, *_CORE]))
            raise InvalidInput(f"unknown parameter {name!r} in the URL; known: {known}")
    return NodeOptions(core=CoreOptions(**core), **node)  # type: ignore[arg-type]
