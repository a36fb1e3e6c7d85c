"""A node accepts only clients that meant to reach it, by address, and tells the rest why not."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from attacks.attacked import Attacked
from kvsupport import assert_right, fresh_prefix, payloads_of, wait_until

from tiffin.conductor.events.node_feed import NodesFeed
from tiffin.kvstore import AsyncClient, Client
from tiffin.kvstore.cli.local.token_file import make_secret_file
from tiffin.kvstore.client.pool.members import FixedMembers
from tiffin.kvstore.credentials import load_credentials
from tiffin.kvstore.errors import NotAuthenticated
from tiffin.kvstore.node.node import Node, NodeOptions
from tiffin.kvstore.node.server.tcp_server import RemoteService

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture
def attacked(tmp_path: Path) -> Iterator[Attacked]:
    """A node, and a relay at an address that is not the node's."""
    with contextlib.closing(Attacked(tmp_path, known=False)) as attacked:
        yield attacked


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., tuple[Node, int, Path]]]:
    """A function that starts a node with a token: the node, its port, and the token's file."""
    with contextlib.ExitStack() as stack:

        def start(host: str, advertise: tuple[str, int] | None = None) -> tuple[Node, int, Path]:
            token_file = make_secret_file(tmp_path / f"token-{host.replace(':', '-')}")
            node = Node(NodeOptions(1 << 20, prefault=False), name="node")
            stack.callback(node.close)
            credentials = load_credentials(token_file)
            service = RemoteService(node, (host, 0), credentials, advertise)
            stack.callback(service.close)
            return node, service.address[1], token_file

        yield start


def works(url: str) -> bool:
    prefix = fresh_prefix(2)
    with Client.open(url) as client:
        stored = client.put(prefix, payloads_of(prefix)).complete
        with client.get(prefix) as blocks:
            assert_right(blocks, prefix)
            return stored and len(blocks) == 2


def has_ipv6() -> bool:
    found = Path("/proc/net/if_inet6")
    return found.exists() and f"{1:032x}" in found.read_text()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.1.2.3"])
def test_every_way_that_leads_straight_to_the_node_is_its_own(serve: Any, host: str) -> None:
    """DNS names and further addresses of the machine need no option."""
    _, port, token_file = serve("0.0.0.0", ("node.example", 7700))
    assert works(f"tiffin://{host}:{port}?token_file={token_file}")


@pytest.mark.skipif(not has_ipv6(), reason="needs IPv6 on loopback")
def test_ipv4_and_ipv6_of_one_node(serve: Any) -> None:
    _, port, token_file = serve("::", ("node.example", 7700))
    assert works(f"tiffin://[::1]:{port}?token_file={token_file}")


def test_a_forwarded_address_is_compared_as_it_is_meant(tmp_path: Path) -> None:
    """The comparison of host names ignores case."""
    here = Attacked(tmp_path)
    with contextlib.closing(here):
        here.service.advertised = f"LocalHost:{here.middle.address[1]}"
        assert works(f"tiffin://localhost:{here.middle.address[1]}?token_file={here.token_file}")
        with pytest.raises(NotAuthenticated, match="LocalHost"):
            here.open()


def test_an_asyncio_client_is_as_careful(attacked: Attacked) -> None:
    url = f"tiffin://127.0.0.1:{attacked.middle.address[1]}?token_file={attacked.token_file}"

    async def attempt() -> None:
        async with await AsyncClient.open(url) as client:
            await client.match(fresh_prefix(1))

    with pytest.raises(NotAuthenticated, match="--advertise"):
        asyncio.run(attempt())


@pytest.mark.parametrize("command", [["status"], ["drain"]])
def test_commands_are_as_careful(attacked: Attacked, command: list[str]) -> None:
    address = f"127.0.0.1:{attacked.middle.address[1]}"
    url = f"tiffin://{address}?token_file={attacked.token_file}"
    names = [address] if command == ["drain"] else []
    ended = subprocess.run(
        [sys.executable, "-m", "tiffin.kvstore", *command, url, *names],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "COLUMNS": "400"},
    )
    assert ended.returncode
    assert f"--advertise {address}" in ended.stdout + ended.stderr
    assert not attacked.node.draining


def test_a_conductor_is_as_careful(attacked: Attacked) -> None:
    members = FixedMembers([attacked.middle.address])
    with NodesFeed(members, load_credentials(attacked.token_file), lambda _: None) as feed:

        def told() -> list[str]:
            return [node["error"] for node in feed.statistics()["nodes"].values() if node["error"]]

        (error,) = wait_until(told, "it says why the node is not followed")
    assert "NotAuthenticated" in error
    assert "--advertise" in error
