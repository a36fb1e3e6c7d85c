"""The ways to a pool behind one interface: a client's promises are tested once for all of them."""

from __future__ import annotations

import contextlib
import itertools
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvsupport import (
    Bytes,
    Daemon,
    LoopThread,
    PoolOptions,
    assert_conserved,
    is_quiet,
    payloads_of,
    wait_until,
)

from tiffin.kvstore import AsyncClient, Client, Prefix
from tiffin.kvstore.cli.daemon import DaemonOptions, in_a_pool, listening
from tiffin.kvstore.client.connection.node_link import LocalLink
from tiffin.kvstore.client.pool.many_nodes import ManyNodes
from tiffin.kvstore.client.pool.members import HomeNumber
from tiffin.kvstore.client.pool.verb_driver import VerbDriver
from tiffin.kvstore.credentials import Credentials
from tiffin.kvstore.directory import EmbeddedDirectory, host_id
from tiffin.kvstore.node.node import Node
from tiffin.kvstore.node.publisher import PublisherOptions
from tiffin.kvstore.node.server.tcp_server import RemoteService

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tiffin.kvstore.client.connection.region_mapping import Mapping

_numbers = itertools.count(1)

# Clients of a node in this process; of a daemon; of a node behind its network port; and of two
# nodes, one of which is home.
KINDS = ("embedded", "daemon", "network", "pool")
WAYS = tuple(f"{client}-{kind}" for client in ("sync", "asyncio") for kind in KINDS)
# Those of which `make test` has every test: a node's memory by its socket, without asyncio, and
# several nodes with it. `make test-all` has the others.
FAST_WAYS = ("sync-daemon", "asyncio-pool")
# The ways in which views and slots are the node's own memory, so that a client holds leases.
IN_PLACE_WAYS = tuple(way for way in WAYS if not way.endswith("network"))


class NetworkNode:
    """A node in this process and its network port."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self._service = RemoteService(node, ("127.0.0.1", 0))
        self.url = f"tiffin://127.0.0.1:{self._service.address[1]}"

    def close(self) -> None:
        self._service.close()
        self.node.close()


class TwoNodes:
    """A pool of two nodes in this process. `home` is read in place, and takes what is put; `far` is
    being drained, so that it takes nothing but what `put_far` gives it."""

    HEARTBEAT_S = 3600.0  # so that no heartbeat publishes the moments when `far` takes a put
    PUBLISHING = PublisherOptions(poll_s=0.002, heartbeat_s=HEARTBEAT_S)

    def __init__(self, options: PoolOptions, folder: Path) -> None:
        self._name = f"two-{os.getpid()}-{next(_numbers)}"
        self._stack = contextlib.ExitStack()
        self.directory = EmbeddedDirectory.named(
            f"default:{self._name}", registration_ttl_s=2 * self.HEARTBEAT_S
        )
        self._stack.callback(self.directory.close)
        self.home = self._start("home", options.start_node(folder / "home"))
        far = options.start_node(folder / "far")
        far.draining = True
        self.far = self._start("far", far)
        wait_until(lambda: len(self.directory.nodes()) == 2, "both nodes register")

    def _start(self, name: str, node: Node) -> Node:
        self._stack.callback(node.close)
        options = DaemonOptions(
            node.options,
            name,
            Path(f"/nowhere/{self._name}/{name}"),
            listen=("127.0.0.1", 0),
            directory=f"embedded:{self._name}",
        )
        address = self._stack.enter_context(listening(node, options))
        assert address is not None
        self._stack.enter_context(in_a_pool(node, options, address, self.PUBLISHING))
        return node

    def open(self, name: str, verify: Any = "always", admission: str = "never") -> Client:
        """A client whose home is `home`."""
        members = EmbeddedDirectory.named(f"default:{self._name}")
        driver = VerbDriver(members, Credentials(), f"{name} from afar")
        number = HomeNumber(driver.nodes, host_id(), f"/nowhere/{self._name}/home")
        link = LocalLink(self.home, name, owns_node=False)
        nodes = ManyNodes(driver, home=link, home_number=number, admission=admission)
        return Client(nodes, verify)

    def put_far(self, prefix: Prefix) -> None:
        """Store it in `far`."""
        self.far.draining = False
        try:
            with Client.attach(self.far) as client:
                assert client.put(prefix, payloads_of(prefix)).complete
        finally:
            self.far.draining = True
        self.settle()

    def settle(self) -> None:
        """Wait until the directory has all of the nodes' blocks."""

        def told() -> bool:
            registered = list(self.directory._state.registrations.values())
            named = {found.record.name: set(found.keys) for found in registered}
            return all(
                named[name] == set(node.core.index)
                for name, node in (("home", self.home), ("far", self.far))
            )

        wait_until(told, "the directory is told")

    def close(self) -> None:
        self._stack.close()


class Held:
    """Blocks or slots of an asyncio client, for `with`: their ends run in the loop."""

    def __init__(self, held: Any, loop: LoopThread) -> None:
        self._held = held
        self._loop = loop

    def __getattr__(self, name: str) -> Any:
        return getattr(self._held, name)

    def __getitem__(self, index: Any) -> Any:
        return self._held[index]

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._held)

    def release(self) -> None:
        self._loop.call(self._held.release)

    def commit(self) -> None:
        self._loop.call(self._held.commit)

    def abort(self) -> None:
        self._loop.call(self._held.abort)

    def __enter__(self) -> Held:
        return self

    def __exit__(self, *error: Any) -> None:
        self._loop.call(self._held.__aexit__, *error)


class PoolClient:
    """A client of either kind with the synchronous verbs; records what it put, for cleaning up."""

    def __init__(self, pool: Pool, raw: Any, loop: LoopThread | None) -> None:
        self.pool = pool
        self.raw = raw
        self._loop = loop

    def _run(self, verb: str, *arguments: Any, **keywords: Any) -> Any:
        method = getattr(self.raw, verb)
        if self._loop is None:
            return method(*arguments, **keywords)
        result = self._loop.run(method(*arguments, **keywords))
        return Held(result, self._loop) if verb in ("get", "reserve") else result

    def get(self, prefix: Prefix, **keywords: Any) -> Any:
        return self._run("get", prefix, **keywords)

    def put(self, prefix: Prefix, payloads: Any, **keywords: Any) -> Any:
        self.pool.touched.append(prefix)
        return self._run("put", prefix, payloads, **keywords)

    def reserve(self, prefix: Prefix, **keywords: Any) -> Any:
        self.pool.touched.append(prefix)
        return self._run("reserve", prefix, **keywords)

    def match(self, prefix: Prefix, **keywords: Any) -> Any:
        return self._run("match", prefix, **keywords)

    def exists(self, prefix: Prefix, **keywords: Any) -> Any:
        return self._run("exists", prefix, **keywords)

    def pin(self, prefix: Prefix, **keywords: Any) -> Any:
        return self._run("pin", prefix, **keywords)

    def unpin(self, prefix: Prefix, **keywords: Any) -> Any:
        return self._run("unpin", prefix, **keywords)

    def remove(self, prefix: Prefix, **keywords: Any) -> Any:
        removed = self._run("remove", prefix, **keywords)
        self.pool.settle()
        return removed

    def statistics(self, **keywords: Any) -> Any:
        """The statistics of the node that takes puts."""
        numbers = self._run("statistics", **keywords)
        if self.pool.kind == "pool":
            return numbers["nodes"]["home"]
        return next(iter(numbers["nodes"].values())) if self.pool.kind == "network" else numbers

    def call(self, request: Any, timeout_s: float = 5.0) -> Any:
        """Send a message directly, without the verbs."""
        return self._near.call(request, timeout_s)

    @property
    def mapping(self) -> Mapping:
        """The DRAM of the node that takes puts, as this client maps it."""
        mapping: Mapping = self._near.mapping
        return mapping

    @property
    def _near(self) -> Any:
        return getattr(self.raw, "_client", self.raw).near_link

    @property
    def memory(self) -> Bytes:
        """The same, to be damaged by tests; for a client that maps nothing, the node's own."""
        node = self.pool.node
        return self.mapping.writable() if node is None else node.dram.region.array

    def close(self) -> None:
        self._run("close")

    def __enter__(self) -> PoolClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


Host = Node | Daemon | NetworkNode | TwoNodes


class Pool:
    """A pool that is reached in one of several ways, and that every test finds empty."""

    def __init__(self, way: str, host: Host, options: PoolOptions, loop: LoopThread):
        self.way = way
        self.kind = way.partition("-")[2]
        # Whether views and slots are the node's memory, so that holding them holds a lease.
        self.in_place = way in IN_PLACE_WAYS
        self.host = host
        self.options = options
        self.loop = loop
        self.touched: list[Prefix] = []
        self._clients: list[Any] = []
        self._holder: Any = None
        self.client = self.open("main")

    @property
    def daemon(self) -> Daemon:
        assert isinstance(self.host, Daemon)
        return self.host

    @property
    def node(self) -> Node | None:
        """The node that takes puts, if it is in this process."""
        match self.host:
            case Node():
                return self.host
            case NetworkNode():
                return self.host.node
            case TwoNodes():
                return self.host.home
        return None

    def open_in_place(self, name: str = "in place") -> Any:
        """A client that holds leases and reservations in the node, whatever the way is."""
        if self.in_place:
            return self.open(name)
        assert self.node is not None
        client = Client.attach(self.node, name=name)
        self._clients.append(client)
        return client

    def open(self, name: str = "another", **keywords: Any) -> PoolClient:
        """One more client of this pool."""
        client = PoolClient(self, self._open(name, **keywords), self._loop_if_needed())
        self._clients.append(client)
        return client

    def _loop_if_needed(self) -> LoopThread | None:
        return self.loop if self.way.startswith("asyncio") else None

    def _open(self, name: str, **keywords: Any) -> Any:
        if isinstance(self.host, TwoNodes):
            client = self.host.open(name, **keywords)
            asynchronous = self.way.startswith("asyncio")
            return self.loop.call(AsyncClient, client) if asynchronous else client
        if self.way.startswith("asyncio"):
            if isinstance(self.host, Node):
                return self.loop.run(AsyncClient.attach(self.host, name=name, **keywords))
            return self.loop.run(AsyncClient.open(self.host.url, name=name, **keywords))
        if isinstance(self.host, Node):
            return Client.attach(self.host, name=name, **keywords)
        return Client.open(self.host.url, name=name, **keywords)

    def put(self, prefix: Prefix) -> Prefix:
        """Store a prefix with its right bytes."""
        result = self.client.put(prefix, payloads_of(prefix))
        assert result.complete, result
        return prefix

    def scatter(self, prefix: Prefix) -> Prefix:
        """Store a prefix, where there are two nodes half of it on each."""
        if not isinstance(self.host, TwoNodes) or len(prefix) < 2:
            return self.put(prefix)
        cut = (len(prefix) + 1) // 2
        self.put(prefix[:cut])
        self.touched.append(prefix[cut:])
        self.host.put_far(prefix[cut:])
        return prefix

    def settle(self) -> None:
        """Wait until the directory, if there is one, has all of its nodes' blocks."""
        if isinstance(self.host, TwoNodes):
            self.host.settle()

    def hold(self, prefix: Prefix) -> Any:
        """Store it and protect it from eviction until `release()`."""
        self.put(prefix)
        if self.in_place:
            return self.client.get(prefix)
        if self._holder is None:
            self._holder = self.open_in_place("holder")
        return self._holder.get(prefix)

    def offset_of(self, block: Any, client: PoolClient | None = None) -> int:
        """Where in the region the payload of a served block begins."""
        base = (client or self.client).mapping.memory.__array_interface__["data"][0]
        return int(block.memory.__array_interface__["data"][0]) - base

    def payload_offset(self, prefix: Prefix) -> int:
        """Where in the region the payload of a resident prefix of one block lies."""
        if self.node is not None:
            replica = self.node.core.index[prefix.keys[0]].dram
            assert replica is not None
            return replica.offset + prefix.schema.header_bytes
        with self.client.get(prefix) as blocks:
            return self.offset_of(blocks[0])

    def quiet(self) -> dict[str, Any]:
        """Statistics once nothing is held, written or moving."""
        found: dict[str, Any] = {}

        def settled() -> bool:
            found.update(self.client.statistics())
            return is_quiet(found)

        try:
            wait_until(settled, "the pool comes to rest")
        except AssertionError as error:
            raise AssertionError(f"{error}: {found}") from error
        assert_conserved(found)
        return found

    def finish(self) -> None:
        """After any test: nothing is lost, and the pool is as empty as before."""
        for client in self._clients[1:]:
            client.close()
        for prefix in self.touched:
            self.client.remove(prefix)
        numbers = self.quiet()
        for tier in numbers["tiers"].values():
            assert tier["free_bytes"] == tier["capacity_bytes"], tier
        if self.node is not None:
            self.node.check()
        if isinstance(self.host, TwoNodes):
            self.host.far.check()
            assert not self.host.far.core.index
        self.client.close()
