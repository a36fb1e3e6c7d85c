"""Rows beside Mooncake Store: blocks in memory of one host, at each place where both can have it.

Each size has a master and clients of its own. Mooncake's processes poll for work without sleeping,
so they are stopped while ours are measured; ours sleep. Its data port accepts connections on every
address of the machine without authentication: run this in a network namespace, as
`make bench-peers` does.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING

from tiffin.kvstore.cli.local.local_redis import free_port

from ..conductor.service import accepts
from ..network import mooncake_peer
from ..network.setting import LOOPBACK, await_answer
from ..store.setting import MIB
from ..vllm.engine_process import GroupProcess, service
from .blocks import PLACES, Theirs, compared

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ..store.rows import Row
    from .setting import Setting

_QUIET = {"GLOG_minloglevel": "2"}


def mooncake(setting: Setting) -> list[Row]:
    """Put and get at every place. Raises Missing, NodeUnavailable."""
    setting.python("mooncake")
    return [
        row
        for place in PLACES
        for row in compared(setting, "mooncake", place, partial(_side, setting, place))
    ]


@contextlib.contextmanager
def _side(setting: Setting, place: str, block_bytes: int, count: int) -> Iterator[Theirs]:
    # Mooncake allocates in pieces of its own sizes, and evicts at 95 %.
    segment_bytes = max(256 * MIB, 4 * block_bytes * count)
    programs = setting.python("mooncake").parent
    with contextlib.ExitStack() as stack:
        enter = stack.enter_context
        master, address = enter(_master(programs))
        servers: tuple[GroupProcess, ...] = (master,)
        server = "-"
        if place == "shared":
            holder, server = enter(_real_client(programs, address, segment_bytes))
            servers = (holder, master)
        elif place == "tcp":
            command = [str(setting.python("mooncake")), str(mooncake_peer.__file__)]
            command += ["holder", address, str(segment_bytes)]
            servers = (enter(_ready(command)), master)
        sizes = (block_bytes, count)
        command = setting.command("mooncake", "mooncake_store.py", place, address, server, *sizes)
        client = enter(_ready(command))
        # A stopped master would give its clients up: all are resumed before any is asked to end.
        theirs = Theirs(client, servers)
        stack.callback(theirs.resume)
        yield theirs


@contextlib.contextmanager
def _master(programs: Path) -> Iterator[tuple[GroupProcess, str]]:
    port = free_port(LOOPBACK)
    command = [
        *(str(programs / "mooncake_master"), f"--rpc_address={LOOPBACK}", f"--rpc_port={port}"),
        *(f"--metrics_host={LOOPBACK}", f"--metrics_port={free_port(LOOPBACK)}"),
        *("--enable_metric_reporting=false", "--minloglevel=2"),
    ]
    with service("mooncake_master", command, _QUIET) as process:
        await_answer(process.popen, lambda: accepts(port), "mooncake_master")
        yield process, f"{LOOPBACK}:{port}"


@contextlib.contextmanager
def _real_client(
    programs: Path, master: str, segment_bytes: int
) -> Iterator[tuple[GroupProcess, str]]:
    """Its process that owns memory and shares it with clients of this host."""
    port = free_port(LOOPBACK)
    command = [
        *(str(programs / "mooncake_client"), f"--host={LOOPBACK}", f"--port={port}"),
        *(f"--master_server_address={master}", "--metadata_server=P2PHANDSHAKE"),
        *(f"--global_segment_size={segment_bytes // MIB}MB", "--protocol=tcp", "--threads=2"),
    ]
    with service("mooncake_client", command, _QUIET) as process:
        await_answer(process.popen, lambda: accepts(port), "mooncake_client")
        yield process, f"{LOOPBACK}:{port}"


@contextlib.contextmanager
def _ready(command: list[str]) -> Iterator[GroupProcess]:
    """A process that is used once it has said that it is ready."""
    process = GroupProcess("Mooncake", command, _QUIET)
    try:
        process.ready()
        yield process
    finally:
        process.end()
