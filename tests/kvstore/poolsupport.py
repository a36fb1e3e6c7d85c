"""Pools of several nodes in one process, and networks that fail between them and their clients."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvsupport import (
    DRAM_BLOCKS,
    assert_conserved,
    assert_right,
    fresh_prefix,
    is_quiet,
    payloads_of,
    wait_until,
)
from tcpsupport import Relay

from tiffin.kvstore import Client, KVSchema
from tiffin.kvstore.cli.daemon import DaemonOptions, in_a_pool, listening
from tiffin.kvstore.client.connection.node_link import LocalLink
from tiffin.kvstore.client.pool.many_nodes import ManyNodes
from tiffin.kvstore.client.pool.members import HomeNumber
from tiffin.kvstore.client.pool.peers import PoolOptions
from tiffin.kvstore.client.pool.verb_driver import VerbDriver
from tiffin.kvstore.credentials import Credentials
from tiffin.kvstore.directory import EmbeddedDirectory, host_id
from tiffin.kvstore.errors import DirectoryUnavailable
from tiffin.kvstore.node.core.node_core import CoreOptions
from tiffin.kvstore.node.node import Node, NodeOptions
from tiffin.kvstore.node.publisher import PublisherOptions

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from tiffin.kvstore import Prefix
    from tiffin.kvstore.client.pool.home.home import Home

# Blocks of a quarter of a MiB, so that the transfer of a few has a middle.
LARGE = KVSchema.gqa(
    model="large", layers=4, kv_heads=4, head_dim=64, dtype="bfloat16", block_tokens=64
)
PUBLISHING = PublisherOptions(poll_s=0.002, heartbeat_s=0.2)
# Longer than any delay: in these tests no live node counts as dead.
REGISTRATION_TTL_S = 60.0

_numbers = itertools.count(1)


class Network(Relay):
    """A relay that can stop forwarding after so many more bytes."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._left = {"from": float("inf"), "to": float("inf")}
        super().__init__(target)

    def stall_after(self, nbytes: int, direction: str = "from") -> None:
        """Stop forwarding after so many more bytes from the node, or to it; `resume` ends it."""
        self._left[direction] = nbytes

    def resume(self) -> None:
        """See `Relay.resume`."""
        self._left = {"from": float("inf"), "to": float("inf")}
        super().resume()

    def _pump(self, source: socket.socket, sink: socket.socket, counted: bool) -> None:
        watched: Any = _Counted(source, self, "from" if counted else "to")
        super()._pump(watched, sink, counted)

    def count(self, nbytes: int, direction: str) -> None:
        """Count bytes of one direction, and pause at the limit."""
        self._left[direction] -= nbytes
        if self._left[direction] <= 0:
            self.pause()


class _Counted:
    """A socket whose bytes are counted as they are received."""

    def __init__(self, source: socket.socket, network: Network, direction: str) -> None:
        self._source = source
        self._network = network
        self._direction = direction

    def recv(self, nbytes: int) -> bytes:
        data = self._source.recv(nbytes)
        self._network.count(len(data), self._direction)
        return data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)


class Flaky(EmbeddedDirectory):
    """A handle of a directory that a test can make unavailable."""

    away = False

    def _locked(self) -> Any:
        if self.away:
            raise DirectoryUnavailable("the directory is away")
        return super()._locked()

    def statistics(self) -> dict[str, Any]:
        return {"healthy": not self.away}  # which are asked of nobody


class Member:
    """One node of a `Cluster`."""

    def __init__(self, cluster: Cluster, name: str, node: Node, relayed: bool) -> None:
        self.cluster = cluster
        self.name = name
        self.node = node
        self.network: Network | None = None
        self.socket = f"/nowhere/{cluster.name}/{name}"
        self._stack = contextlib.ExitStack()
        self._stack.callback(node.close)
        options = DaemonOptions(
            node.options,
            name,
            Path(self.socket),
            listen=("127.0.0.1", 0),
            directory=f"embedded:{cluster.name}",
            credentials=cluster.credentials,
        )
        self._port = contextlib.ExitStack()
        self._stack.push(self._port)
        address = self._port.enter_context(listening(node, options))
        assert address is not None
        if relayed:
            host, _, port = address.rpartition(":")
            self.network = Network((host, int(port)))
            self._stack.callback(self.network.close)
            address = f"127.0.0.1:{self.network.address[1]}"
        self.address = address
        self._stack.enter_context(in_a_pool(node, options, address, PUBLISHING))
        self.number: int = wait_until(lambda: self._told()["number"], f"{name} registers")

    def _told(self) -> dict[str, Any]:
        told: dict[str, Any] = self.node.extra_numbers["directory"]()
        return told

    def put(self, prefix: Prefix) -> Prefix:
        """Store the right bytes in this node only."""
        with Client.attach(self.node) as client:
            assert client.put(prefix, payloads_of(prefix)).complete
        return prefix

    def has(self, prefix: Prefix) -> list[bool]:
        """Which blocks this node has."""
        return [bool(flag) for flag in self.node.exists(prefix.key_bytes)]

    def flip(self, prefix: Prefix, at: int = 100) -> None:
        """Damage one bit of the payload of the first block of `prefix`."""
        replica = self.node.core.index[prefix.keys[0]].dram
        assert replica is not None
        self.node.dram.region.array[replica.offset + prefix.schema.header_bytes + at] ^= 1

    def hang_up(self) -> None:
        """Close the node's port; the directory does not notice."""
        self._port.close()

    def stop(self) -> None:
        """Leave the pool, as a daemon does on SIGTERM."""
        self._stack.close()

    def counters(self) -> dict[str, int]:
        counters: dict[str, int] = self.node.statistics()["counters"]
        return counters


class Cluster:
    """Nodes in this process, and their directory."""

    def __init__(self, credentials: Credentials | None = None) -> None:
        self.name = f"cluster-{os.getpid()}-{next(_numbers)}"
        self.credentials = credentials or Credentials()
        self.directory = EmbeddedDirectory.named(
            f"default:{self.name}", registration_ttl_s=REGISTRATION_TTL_S
        )
        self.members: dict[str, Member] = {}
        self._stack = contextlib.ExitStack()
        self._stack.callback(self.directory.close)

    def start(
        self,
        name: str,
        blocks: int = DRAM_BLOCKS,
        *,
        schema: KVSchema = LARGE,
        relayed: bool = False,
        core: CoreOptions | None = None,
        awaits_peers: bool = False,
        **options: Any,
    ) -> Member:
        """Start one more node, with DRAM for so many blocks."""
        dram_bytes = blocks * schema.extent_bytes
        core = core or CoreOptions()
        node_options = NodeOptions(dram_bytes, prefault=False, core=core, **options)
        node = Node(node_options, name=name, awaits_peers=awaits_peers)
        member = Member(self, name, node, relayed)
        self._stack.callback(member.stop)
        self.members[name] = member
        return member

    def open(
        self,
        home: Member | None = None,
        *,
        admission: str = "never",
        verify: Any = "always",
        members: Any = None,
        credentials: Credentials | None = None,
        name: str = "client",
        **numbers: Any,
    ) -> Client:
        """A client; closed with the cluster if the test does not close it."""
        members = members or EmbeddedDirectory.named(f"default:{self.name}")
        driver = VerbDriver(members, credentials or self.credentials, name, PoolOptions(**numbers))
        link, number = None, None
        if home is not None:
            link = LocalLink(home.node, name, owns_node=False)
            number = HomeNumber(driver.nodes, host_id(), home.socket)
        number = number or (lambda: None)
        nodes = ManyNodes(driver, home=link, home_number=number, admission=admission)
        client = Client(nodes, verify)
        self._stack.callback(client.close)
        return client

    def flaky(self) -> Flaky:
        """A handle of the directory that can be made unavailable."""
        handle = Flaky.__new__(Flaky)
        handle._open(self.directory._state)
        return handle

    def forge(self, number: int, prefix: Prefix) -> None:
        """Publish to the directory that a node has these blocks."""
        self.directory.publish(number, list(prefix.keys), [], 1)

    def settle(self) -> None:
        """Wait until the directory has all of the nodes' blocks."""

        def told() -> bool:
            with self.directory._state.lock:
                found = {n: set(r.keys) for n, r in self.directory._state.registrations.items()}
            return all(
                found.get(member._told()["number"]) == set(member.node.core.index)
                for member in self.members.values()
            )

        wait_until(told, "the directory is told")

    def remember(self, *members: Member) -> None:
        """From now on `settle` and `quiet` cover only these nodes."""
        self.members = {member.name: member for member in members}

    def quiet(self) -> None:
        """Nothing is held or moved, and nothing is lost."""
        for member in self.members.values():
            with contextlib.suppress(AssertionError):
                wait_until(lambda m=member: is_quiet(m.node.statistics()), "it is at rest")
            numbers = member.node.statistics()
            assert is_quiet(numbers), f"{member.name} is not at rest: {numbers}"
            assert_conserved(numbers)
            member.node.check()

    def close(self) -> None:
        self._stack.close()


def holders(cluster: Cluster, prefix: Prefix) -> list[list[str]]:
    """Per block, the names of the nodes that have it."""
    found = {name: member.has(prefix) for name, member in cluster.members.items()}
    return [[n for n in found if found[n][i]] for i in range(len(prefix))]


class Held:
    """Holds a call in its middle: `reached` is set when the call is there, and `go` continues
    it."""

    def __init__(self, action: Callable[..., Any]) -> None:
        self._action = action
        self.reached, self.go = threading.Event(), threading.Event()

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        self.reached.set()
        assert self.go.wait(30)
        return self._action(*arguments, **keywords)


def check(client: Client, prefix: Prefix) -> None:
    """All blocks of the prefix are there, and right."""
    with client.get(prefix) as blocks:
        assert blocks.complete, blocks
        assert_right(blocks, prefix)


def fill(member: Member, blocks: int) -> list[Prefix]:
    """Take the room of so many blocks: prompts of one block, pinned."""
    prefixes = [member.put(fresh_prefix(1, LARGE)) for _ in range(blocks)]
    with Client.attach(member.node) as client:
        assert all(client.pin(prefix, hard=True) for prefix in prefixes)
    return prefixes


def state_of(client: Client) -> Home:
    """A client's state of its home node."""
    assert client.near_link is not None
    return client.near_link
