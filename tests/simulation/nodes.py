"""Simulated nodes: the product's daemon without its unix socket, one process per life."""

from __future__ import annotations

import sys
import threading
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiffin.kvstore.cli import daemon
from tiffin.kvstore.cli.daemon import DaemonOptions, in_a_pool, listening
from tiffin.kvstore.client.connection.node_link import LocalLink
from tiffin.kvstore.errors import CorruptBlock, NodeUnavailable, VersionMismatch
from tiffin.kvstore.format.header import read_header
from tiffin.kvstore.memory.eviction import POLICIES
from tiffin.kvstore.node import node as node_module
from tiffin.kvstore.node.core.node_core import CoreOptions
from tiffin.kvstore.node.mover import extent_of
from tiffin.kvstore.node.node import Node, NodeOptions
from tiffin.kvstore.node.publisher import Publisher, PublisherOptions

from .blocks import EXTENT_BYTES, LIED_ABOUT, PASSING, is_right
from .directories import DirectoryService, SimulatedDirectory
from .disk import Disk, SimulatedNvme
from .threads import VExecutor, wait
from .world import Violation

if TYPE_CHECKING:
    from tiffin.kvstore.format.keys import Prefix
    from tiffin.kvstore.node.core.records import Replica, Session

    from .network import Network
    from .world import Process, World

WRITE_LEASE_S = 1.5
REMOTE_LEASE_S = 0.8
PUBLISHER = PublisherOptions(
    heartbeat_s=0.5, poll_s=0.2, batch_keys=8, republish_s=4.0, retry_max_s=0.4, pending_max=24
)


class SimulatedNode:
    """One node through all its lives; `disk` outlives them."""

    def __init__(self, cluster: Machinery, number: int) -> None:
        dice = cluster.world.random
        self.cluster = cluster
        self.name = f"node{number}"
        self.address = ("127.0.0.1", 7000 + number)
        self.disk = Disk(cluster.world, dice.randint(12, 40) * EXTENT_BYTES)
        self.options = NodeOptions(
            dram_bytes=dice.randint(8, 24) * EXTENT_BYTES,
            nvme_path=Path(self.name) if dice.random() < 0.7 else None,
            nvme_bytes=len(self.disk.bytes),
            policy=dice.choice(sorted(POLICIES)),
            prefault=False,
            flush_s=1.0,
            core=CoreOptions(
                write_lease_s=WRITE_LEASE_S,
                remote_lease_s=REMOTE_LEASE_S,
                demote_on_second_use=dice.random() < 0.3,
            ),
        )
        self.process: Process | None = None
        self.node: Node | None = None
        self.number = lambda: 0  # its number in the directory
        self.lives = 0

    @property
    def up(self) -> bool:
        """Whether it serves."""
        return self.node is not None and self.process is not None and not self.process.dead

    def start(self) -> None:
        """Start a new life."""
        assert self.process is None or self.process.dead
        self.lives += 1
        world = self.cluster.world
        self.process = world.process(self.name)
        self.cluster.network.forget(self.name)
        world.spawn(self.process, self._live, f"{self.name}.{self.lives}")

    def crash(self, *, silently: bool) -> None:
        """The process dies; `silently`: the whole machine does, so that no kernel closes its
        connections."""
        process, node = self.process, self.node
        assert process is not None
        self.node = None
        self.cluster.world.kill(process)
        if not silently:
            self.cluster.network.hang_up(process)
        for address, sock in list(self.cluster.network.listeners.items()):
            if sock.process is process and not silently:
                del self.cluster.network.listeners[address]
        if node is not None:
            node.dram.close()

    def _live(self) -> None:
        options = DaemonOptions(
            self.options, self.name, Path(self.name), listen=self.address, directory="simulated"
        )
        node = Node(self.options, name=self.name, awaits_peers=True)
        with listening(node, options) as address:
            assert address is not None
            with in_a_pool(node, options, address):
                self.number = node.extra_numbers["directory"]
                self.node = node
                threading.Event().wait()

    # -- checks, from outside all processes --------------------------------------------------------

    def published_number(self) -> int:
        """Its number in the directory; 0 if it has none yet."""
        return int(self.number()["number"]) if self.up else 0  # type: ignore[index]

    def check(self) -> None:
        """The invariants of one node at this moment. Raises Violation."""
        node = self.node
        if node is None:
            return
        try:
            node.core.check()
        except AssertionError as error:
            raise Violation("conservation", f"{self.name}: {error!r}") from error
        for block in list(node.core.index.values()):
            if block.dram is not None:
                self._check_bytes(node, block.dram)
        self._check_removed(node)

    def _check_removed(self, node: Node) -> None:
        """A node that is in the pool, and has heard of all removals, has nothing that was removed
        if any node remembers that."""
        back = self.cluster.removed & node.core.index.keys()
        record = self.cluster.directory.truth.nodes().get(self.published_number())
        if not back or record is None or not record.slab:
            return
        for other in self.cluster.nodes:
            if other.node is not None and back & set(other.node.core.removal_log.keys()):
                raise Violation("removed", f"{self.name} has {len(back)} removed blocks again")

    def _check_bytes(self, node: Node, replica: Replica) -> None:
        """A block that can be found has its own header and its own bytes."""
        view = node.dram.view(extent_of(replica))
        try:
            header = read_header(view, offset_expected=replica.offset)
        except (CorruptBlock, VersionMismatch) as error:
            raise Violation("findable", f"{self.name}: {replica}: {error}") from error
        if (header.key, header.generation) != (replica.key, replica.generation):
            raise Violation("findable", f"{self.name}: {replica} has the header of another block")
        if replica.key not in LIED_ABOUT and not is_right(replica.key, view[header.header_bytes :]):
            raise Violation("findable", f"{self.name}: {replica} has other bytes than its key's")

    def check_empty_handed(self) -> None:
        """After all clients have left: nothing is held, written or in flight."""
        node = self.node
        assert node is not None
        core = node.core
        left = [s for s in core.sessions.values() if s.leases or s.zombies]
        if left:
            raise Violation("leak", f"{self.name}: leases of {[s.name for s in left]} are left")
        if core.residency.moves or node._parked or node._tickets:
            raise Violation("leak", f"{self.name}: moves or waiting requests are left")
        for space in (core.residency.dram, core.residency.nvme):
            numbers = None if space is None else space.statistics()
            if numbers is not None and numbers.reserved_bytes + numbers.quarantined_bytes:
                raise Violation("leak", f"{self.name}: {numbers}")


class Machinery:
    """The environment of all simulated processes, and the patches that make the product use it."""

    def __init__(self, world: World, network: Network) -> None:
        self.world = world
        self.network = network
        self.directory = DirectoryService(world)
        self.nodes: list[SimulatedNode] = []
        # Prompts that are put once, read and copied by everybody, and removed; and what was.
        self.unused = list(PASSING)
        self.passing: list[Prefix] = []
        self.removed: set[bytes] = set()

    def patches(self) -> list[tuple[Any, str, Any]]:
        """The patches of all points where the product uses the outside world."""
        return [
            *self.network.patches(),
            (node_module, "NvmeTier", self._open_nvme),
            (daemon, "open_directory", self._open_directory),
            (daemon, "Publisher", _publisher),
            *_executors(),
        ]

    def _open_nvme(self, path: Path, nbytes: int, **_: Any) -> SimulatedNvme:
        return SimulatedNvme(next(n.disk for n in self.nodes if n.name == str(path)))

    def _open_directory(self, url: str, pool: str, token: bytes) -> SimulatedDirectory:
        assert self.world.current is not None
        return SimulatedDirectory(self.directory, self.world.current.process.name)


def _publisher(feed: Any, directory: Any, make_record: Any, *_: Any, **__: Any) -> Publisher:
    """A publisher with short intervals: seconds instead of minutes."""
    return Publisher(feed, directory, make_record, PUBLISHER)


def _executors() -> list[tuple[Any, str, Any]]:
    """Patches that replace the pool's thread pools by fibers, in every module that imports them."""
    stand_ins = {"ThreadPoolExecutor": VExecutor, "wait": wait}
    return [
        (module, name, stand_in)
        for name, stand_in in stand_ins.items()
        for title, module in sorted(sys.modules.items())
        if title.startswith("tiffin.kvstore.client.pool.") and hasattr(module, name)
    ]


class NodeOfAnotherProcess:
    """A node as its clients reach it: a request waits until the node's process, which may be
    stopped, takes it."""

    def __init__(self, home: SimulatedNode) -> None:
        assert home.node is not None
        assert home.process is not None
        self._node = home.node
        self._submitted: deque[tuple[Any, ...]] = deque()
        self._came = threading.Event()
        home.process.world.spawn(home.process, self._serve, f"{home.name}'s socket")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._node, name)

    def submit(self, *request: Any) -> None:
        """See `Node.submit`."""
        self._submitted.append(request)
        self._came.set()

    def disconnect(self, session: Session, *, fenced: bool) -> bool:
        """See `Node.disconnect`."""
        self._submitted.clear()
        return self._node.disconnect(session, fenced=fenced)

    def _serve(self) -> None:
        while True:
            while self._submitted:
                self._node.submit(*self._submitted.popleft())
            self._came.clear()
            self._came.wait()


class HomeLink:
    """A client's link to the node on its host: like `SocketLink`, without a socket.

    The node and the client are two processes. When the node dies, calls raise NodeUnavailable until
    it is up again; the memory stays mapped. When the client dies, the node learns it later.
    """

    def __init__(self, home: SimulatedNode, process: Process) -> None:
        self._home = home
        self._process = process
        self._link: LocalLink | None = None
        self._node: Node | None = None
        self.gate = self

    def _current(self) -> LocalLink:
        home = self._home
        if not home.up:
            raise NodeUnavailable(f"{home.name} is down")
        if self._link is None or self._node is not home.node:
            assert home.node is not None
            self._node = home.node
            node: Any = NodeOfAnotherProcess(home)
            self._link = LocalLink(node, self._process.name, owns_node=False)
        return self._link

    @property
    def mapping(self) -> Any:
        """See `NodeLink.mapping`."""
        return self._current().mapping

    def call(self, request: Any, timeout_s: float) -> Any:
        """See `NodeLink.call`."""
        world = self._process.world
        world.sleep(world.jitter())
        answer = self._current().call(request, timeout_s)
        world.sleep(world.jitter())
        return answer

    def post(self, request: Any) -> None:
        """See `NodeLink.post`. The leases of a dead node have ended with it."""
        if self._link is not None and self._home.up and self._node is self._home.node:
            self._link.post(request)

    def run(self, action: Any) -> Any:
        """See `CallGate.run`: copying a block takes time."""
        world = self._process.world
        world.sleep(world.random.uniform(0, 0.003))
        result = action()
        world.sleep(world.random.uniform(0, 0.003))
        return result

    def close(self) -> None:
        """See `NodeLink.close`."""
        if self._link is not None and self._home.up and self._node is self._home.node:
            self._link.close()

    def died(self) -> None:
        """The client was killed: the node's kernel reports it after a delay."""
        if self._link is None or self._node is not self._home.node:
            return
        node, session = self._link._node, self._link._session
        process = self._home.process
        assert process is not None
        process.world.spawn(process, lambda: _bury(process.world, node, session), "funeral")


def _bury(world: World, node: Node, session: Session) -> None:
    world.sleep(world.random.uniform(0, 0.5))
    if not node.disconnect(session, fenced=False):
        world.sleep(world.random.uniform(0, 1.0))
        node.fence(session)
