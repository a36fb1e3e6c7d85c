"""Clients that vanish, many connections without a hello, descriptors that run out."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest
from faults.faultpool import FaultPool, Tally, read_for, read_once
from kvsupport import fresh_prefix, payloads_of, wait_until

from tiffin.kvstore import Client

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tiffin.kvstore import Prefix

RESERVE_AND_WAIT = """
import sys
from tiffin.kvstore.credentials import Credentials, parse_address
from tiffin.kvstore.node.core import messages
from tiffin.kvstore.client.pool.remote.peer import Peer
peer = Peer(parse_address(sys.argv[1]), Credentials(), "doomed")
key = bytes(15) + b"x"
reply = peer.call(messages.Reserve(0, key, bytes(16), 0, int(sys.argv[2]), 5.0), 5.0)
assert reply.lease
print("reserved", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def pool(commands_folder: Path, tmp_path: Path) -> Iterator[FaultPool]:
    with FaultPool(commands_folder, tmp_path, nodes=1) as pool:
        yield pool


def address_of(pool: FaultPool) -> tuple[str, int]:
    with Client.open(pool.url, name="looking") as client:
        (record,) = client.nodes().values()  # type: ignore[attr-defined]
    host, port = record.address.rsplit(":", 1)
    return host, int(port)


def seen_by_others(pool: FaultPool, prefix: Prefix) -> bool:
    """Whether a client that did not put them finds all blocks."""
    with pool.open() as other:
        return bool(other.match(prefix).blocks == len(prefix))


def reserved_bytes(pool: FaultPool) -> int:
    with Client.open(pool.nodes[0].url) as client:
        dram = client.statistics()["tiers"]["dram"]
    return int(dram["reserved_bytes"] + dram["quarantined_bytes"])


@pytest.mark.slow
def test_a_client_that_is_killed_after_reserving_leaves_nothing(pool: FaultPool) -> None:
    host, port = address_of(pool)
    arguments = [sys.executable, "-c", RESERVE_AND_WAIT, f"{host}:{port}", "8192"]
    with subprocess.Popen(
        arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as doomed:
        assert doomed.stdout is not None
        assert doomed.stdout.readline() == "reserved\n"
        assert reserved_bytes(pool) > 0
        doomed.send_signal(signal.SIGKILL)
    wait_until(lambda: reserved_bytes(pool) == 0, "the extent is free again")


@pytest.mark.slow
@pytest.mark.parametrize("count", [200, pytest.param(1000, marks=pytest.mark.slow)])
def test_half_open_connections_lock_nobody_out(pool: FaultPool, count: int) -> None:
    with pool.open() as client, contextlib.ExitStack() as crowd:
        prefix = fresh_prefix(4)
        assert client.put(prefix, payloads_of(prefix)).complete
        wait_until(lambda: seen_by_others(pool, prefix), "the blocks are published")
        address = address_of(pool)
        for _ in range(count):
            # The node resets the oldest ones above its limit; the rest stay silent for ever.
            with contextlib.suppress(OSError):
                crowd.enter_context(socket.create_connection(address, timeout=5))
        with pool.open() as newcomer:
            tally = Tally()
            read_once(newcomer, prefix, tally)
            read_once(client, prefix, tally)
            assert (tally.short, tally.failed, tally.wrong) == ([], [], 0)
    wait_until(lambda: threads_of(pool) < 60, "the strangers' threads have ended", 15.0)


def threads_of(pool: FaultPool) -> int:
    return len(os.listdir(f"/proc/{pool.nodes[0].process.pid}/task"))


@pytest.mark.slow
def test_running_out_of_descriptors_ends_nothing(pool: FaultPool) -> None:
    pid = pool.nodes[0].process.pid
    with pool.open() as client:
        prefix = fresh_prefix(4)
        assert client.put(prefix, payloads_of(prefix)).complete
        wait_until(lambda: seen_by_others(pool, prefix), "the blocks are published")
        address = address_of(pool)
        used = len(os.listdir(f"/proc/{pid}/fd"))
        old = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (used + 8, old[1]))
        with contextlib.ExitStack() as crowd:
            for _ in range(40):
                with contextlib.suppress(OSError):
                    crowd.enter_context(socket.create_connection(address, timeout=5))
            tally = read_for(client, [prefix], 0.5)
            assert (tally.short, tally.failed, tally.wrong) == ([], [], 0)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, old)
        deadline = time.monotonic() + 15
        while True:
            with contextlib.suppress(ConnectionError), pool.open() as newcomer:
                again = Tally()
                read_once(newcomer, prefix, again)
                if again.short == again.failed == []:
                    break
            assert time.monotonic() < deadline, "the node takes newcomers again"
        assert pool.nodes[0].alive()
