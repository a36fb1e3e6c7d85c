"""Rows beside LMCache: its pool in an engine's own process, its server over TCP, its hashing.

Its multiprocess server works with an engine's GPU memory, or its stand-in; it is measured inside
vLLM by `tiffin bench vllm --row lmcache`, and not here.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING

from tiffin.kvstore.cli.local.local_redis import free_port

from ..conductor.service import accepts
from ..network.setting import LOOPBACK, await_answer
from ..vllm.engine_process import GroupProcess, service
from .blocks import Theirs, compared
from .hashing import hashed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..store.rows import Row
    from .setting import Setting

# PYTHONHASHSEED has to be there when the interpreter starts.
_ENVIRONMENT = {
    "PYTHONHASHSEED": "0",
    "LMCACHE_LOG_LEVEL": "ERROR",
    "LMCACHE_TRACK_USAGE": "false",
    "DO_NOT_TRACK": "1",
}


def lmcache(setting: Setting) -> list[Row]:
    """Put, get and hash. Raises Missing, NodeUnavailable."""
    rows: list[Row] = [
        row
        for place in ("process", "tcp")
        for row in compared(setting, "lmcache", place, partial(_side, setting, place))
    ]
    with _process(setting, "process", "-", 0, 0) as process:
        what = "LMCache's TokenHasher with blake3, its server's default, from the same list"
        rows.append(hashed(setting, "lmcache", process, what))
        # blake3 is a cryptographic hash, and XXH3 is none: also by one that is.
        rows.append(hashed(setting, "lmcache", process, what, "sha256"))
    return rows


@contextlib.contextmanager
def _side(setting: Setting, place: str, block_bytes: int, count: int) -> Iterator[Theirs]:
    with contextlib.ExitStack() as stack:
        servers: tuple[GroupProcess, ...] = ()
        url = "-"
        if place == "tcp":
            server, url = stack.enter_context(_server(setting))
            servers = (server,)
        client = stack.enter_context(_process(setting, place, url, block_bytes, count))
        theirs = Theirs(client, servers)
        stack.callback(theirs.resume)
        yield theirs


@contextlib.contextmanager
def _server(setting: Setting) -> Iterator[tuple[GroupProcess, str]]:
    port = free_port(LOOPBACK)
    command = [str(setting.python("lmcache")), "-m", "lmcache.v1.server", LOOPBACK, str(port)]
    with service("LMCache's server", command, _ENVIRONMENT) as process:
        await_answer(process.popen, lambda: accepts(port), "LMCache's server")
        yield process, f"lm://{LOOPBACK}:{port}"


@contextlib.contextmanager
def _process(setting: Setting, *arguments: object) -> Iterator[GroupProcess]:
    command = setting.command("lmcache", "lmcache_store.py", *arguments)
    process = GroupProcess("LMCache", command, _ENVIRONMENT)
    try:
        process.ready()
        yield process
    finally:
        process.end()
