"""A simulated network: byte pipes with delay, limited buffers, partitions and breaks.

The product's own `Listener`, `Stream`, `StreamPool` and frames run on it unchanged; only sockets
are replaced by `Endpoint`. Like TCP, a connection never reorders, loses or repeats bytes; different
connections overtake each other, and bytes that a partition delays arrive when it heals.
"""

from __future__ import annotations

import socket
from collections import deque
from typing import TYPE_CHECKING, Any

from tiffin.messenger.tcp import listener, tcp_client
from tiffin.messenger.tcp.stream import Stream

if TYPE_CHECKING:
    from collections.abc import Callable

    from .world import Fiber, Process, World

DELAY_S = (0.00005, 0.002)
# Small, so that a stopped reader soon blocks its writer in the middle of a block.
BUFFER_BYTES = (4096, 32768)
PIECE_BYTES = 4096
BYTES_S = (10e6, 200e6)
# How long the kernel tries to connect to a host that does not answer.
SILENCE_S = 1.0


class Pipe:
    """One direction of a connection."""

    def __init__(self, network: Network, source: Process, target: Process) -> None:
        self._world = network.world
        self._network = network
        self.source = source
        self.target = target
        dice = network.world.random
        self._delay_s = dice.uniform(*DELAY_S)
        self._room_bytes = dice.randint(*BUFFER_BYTES)
        self._bytes_s = dice.uniform(*BYTES_S)
        self._pieces: deque[tuple[float, memoryview]] = deque()  # (time of arrival, bytes)
        self._held: deque[memoryview] = deque()  # delayed by a partition
        self._last = 0.0
        self.ended = False  # the writer has closed it
        self.broken = False
        self._reader: Fiber | None = None
        self._writer: Fiber | None = None

    def send(self, views: list[memoryview], wait_s: float) -> int:
        """Bytes taken, 0 after `wait_s`. The bytes are copied now, and never read again."""
        deadline = self._world.now + wait_s
        while self._room_bytes <= 0 and not self.broken:
            left_s = deadline - self._world.now
            if left_s <= 0:
                return 0
            self._writer = self._world.current
            self._world.park(left_s)
            self._writer = None
        if self.broken:
            raise ConnectionResetError("the simulated connection broke")
        limit = min(PIECE_BYTES, self._room_bytes)
        data = bytearray()
        for view in views:
            data += view[: limit - len(data)]
            if len(data) >= limit:
                break
        self._room_bytes -= len(data)
        if len(data) == PIECE_BYTES:
            self._network.spring(self)
        self._put(memoryview(bytes(data)))
        # The wire is busy for this time; a writer is in the middle of its block meanwhile.
        self._world.sleep(len(data) / self._bytes_s)
        return len(data)

    def _put(self, data: memoryview) -> None:
        if self._network.blocked(self.source, self.target):
            self._held.append(data)
            return
        when = max(self._last, self._world.now + self._delay_s)
        self._last = when
        self._pieces.append((when, data))
        self._world.call_at(when, self._tell)

    def heal(self) -> None:
        """The partition is over: the delayed bytes are sent on."""
        held, self._held = self._held, deque()
        for data in held:
            self._put(data)

    def receive(self, views: list[memoryview], wait_s: float) -> int:
        """Bytes received, 0 after `wait_s`. Raises ConnectionError at the end."""
        deadline = self._world.now + wait_s
        while not self.ready():
            if self.broken:
                raise ConnectionResetError("the simulated connection broke")
            if self.ended and not self._pieces and not self._held:
                raise ConnectionResetError("the peer closed the simulated connection")
            left_s = deadline - self._world.now
            if left_s <= 0:
                return 0
            self._reader = self._world.current
            self._world.park(left_s)
            self._reader = None
        return self._take(views)

    def ready(self) -> bool:
        """Whether bytes have arrived."""
        return not self.broken and bool(self._pieces) and self._pieces[0][0] <= self._world.now

    def _take(self, views: list[memoryview]) -> int:
        taken = 0
        for view in views:
            at = 0
            while at < len(view) and self.ready():
                when, data = self._pieces.popleft()
                nbytes = min(len(data), len(view) - at)
                view[at : at + nbytes] = data[:nbytes]
                at += nbytes
                if nbytes < len(data):
                    self._pieces.appendleft((when, data[nbytes:]))
            taken += at
            if at < len(view):
                break
        self._room_bytes += taken
        self._wake(self._writer)
        return taken

    def end(self) -> None:
        """The writer closes it; the reader still gets the bytes in flight."""
        self.ended = True
        self._tell()

    def break_(self) -> None:
        """Break the pipe: the bytes in flight are lost."""
        self.broken = True
        self._pieces.clear()
        self._held.clear()
        self._tell()
        self._wake(self._writer)

    def _tell(self) -> None:
        self._wake(self._reader)

    def _wake(self, fiber: Fiber | None) -> None:
        if fiber is not None:
            self._world.wake(fiber)


class Endpoint(socket.socket):
    """One end of a simulated connection, in place of a socket; it has no descriptor."""

    def __init__(
        self, network: Network, incoming: Pipe, outgoing: Pipe, address: tuple[str, int]
    ) -> None:
        # Without `socket.__init__`, which would open a real one.
        self.network = network
        self.incoming = incoming
        self.outgoing = outgoing
        self._address = address

    def getpeername(self) -> tuple[str, int]:
        """The address that the connecting end connected to."""
        return self._address

    def getsockname(self) -> tuple[str, int]:
        """The address at which the accepted end was accepted."""
        return self._address

    def setsockopt(self, *_: Any) -> None:
        """Accepted and ignored."""

    def settimeout(self, timeout: float | None) -> None:
        """Ignored: streams pass a deadline with every wait."""

    def hang_up(self) -> None:
        """The other side can read the bytes in flight, and send no more. What the fibers of a dead
        process do while they unwind has no effect."""
        current = self.network.world.current
        if current is not None and current.process.dead:
            return
        self.outgoing.end()
        self.incoming.break_()

    def close(self) -> None:
        """See `socket.close`."""
        self.hang_up()


class SimulatedStream(Stream):
    """The product's framing on an `Endpoint`."""

    _socket: Endpoint
    # The pause of a slow client before every piece that it sends, or receives.
    pause_s = 0.0
    sip_s = 0.0

    def alive(self) -> bool:
        """See `Stream.alive`."""
        incoming = self._socket.incoming
        gone = incoming.broken or incoming.ended or self._socket.outgoing.broken
        return not gone and not incoming.ready()

    def cut(self) -> None:
        """See `Stream.cut`."""
        self._cut = True
        self._socket.hang_up()

    def close(self) -> None:
        """See `Stream.close`."""
        self._cut = True
        self._socket.hang_up()

    def _receive_some(self, views: list[memoryview], wait_s: float, *, whole: bool) -> int:
        try:
            if self.sip_s:
                self._socket.network.world.sleep(min(self.sip_s, wait_s))
                views = [views[0][:PIECE_BYTES]]
            return self._socket.incoming.receive(views, wait_s)
        except OSError as error:
            raise self._lost(error) from error

    def _send_some(self, views: list[memoryview], wait_s: float) -> int:
        try:
            if self.pause_s:
                self._socket.network.world.sleep(min(self.pause_s, wait_s))
            return self._socket.outgoing.send(views, wait_s)
        except OSError as error:
            raise self._lost(error) from error


class ListenSocket(socket.socket):
    """The socket on which `Listener` accepts connections."""

    def __init__(self, network: Network, process: Process, address: tuple[str, int]) -> None:
        self.process = process
        self.address = address
        self._network = network
        self._waiting: deque[Endpoint] = deque()
        self._open = True
        self._acceptor: Fiber | None = None

    def getsockname(self) -> tuple[str, int]:
        """See `socket.getsockname`."""
        return self.address

    def offer(self, endpoint: Endpoint) -> None:
        """Queue a new connection for `accept`."""
        self._waiting.append(endpoint)
        self._wake()

    def accept(self) -> tuple[socket.socket, Any]:
        """See `socket.accept`."""
        while not self._waiting and self._open:
            self._acceptor = self._network.world.current
            self._network.world.park()
        if not self._open:
            raise OSError("closed")
        return self._waiting.popleft(), ("peer", 0)

    def shutdown(self, how: int) -> None:
        """See `socket.shutdown`."""
        self.close()

    def close(self) -> None:
        """See `socket.close`."""
        self._open = False
        if self._network.listeners.get(self.address) is self:
            del self._network.listeners[self.address]
        self._wake()

    def _wake(self) -> None:
        if self._acceptor is not None:
            self._network.world.wake(self._acceptor)


class Network:
    """The open connections, and the partitions between processes."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.listeners: dict[tuple[str, int], ListenSocket] = {}
        self.connections: list[tuple[Endpoint, Endpoint]] = []
        # Pairs of names, so that a restarted process is cut off like the one before it.
        self._walls: set[tuple[str, str]] = set()
        self._traps: dict[str, Callable[[str], None]] = {}

    def patches(self) -> list[tuple[Any, str, Any]]:
        """The patches that make the product use this network."""
        return [
            (tcp_client, "_open_socket", self._connect),
            (tcp_client, "PlainStream", SimulatedStream),
            (listener, "_bind", self._bind),
            (listener, "PlainStream", SimulatedStream),
        ]

    def _bind(self, address: tuple[str, int]) -> ListenSocket:
        assert self.world.current is not None
        if address in self.listeners:
            raise OSError(f"{address} is taken")
        sock = ListenSocket(self, self.world.current.process, address)
        self.listeners[address] = sock
        return sock

    def _connect(self, address: tuple[str, int], deadline: float) -> Endpoint:
        """Connect, in one round trip, if the other side listens. Raises OSError."""
        assert self.world.current is not None
        me = self.world.current.process
        self.world.sleep(2 * self.world.random.uniform(*DELAY_S))
        found = self.listeners.get(address)
        if found is not None and self._silent(me, found.process):
            self.world.sleep(min(SILENCE_S, max(0.0, deadline - self.world.now)))
            raise TimeoutError("the simulated network is silent")
        if found is None:
            raise ConnectionRefusedError("nobody listens there")
        there, back = Pipe(self, me, found.process), Pipe(self, found.process, me)
        near, far = Endpoint(self, back, there, address), Endpoint(self, there, back, address)
        self.connections = [pair for pair in self.connections if not _over(pair)]
        self.connections.append((near, far))
        found.offer(far)
        return near

    def _silent(self, one: Process, other: Process) -> bool:
        # The kernel of a stopped process still accepts connections for it.
        return other.dead or self.blocked(one, other) or self.blocked(other, one)

    # -- faults ----------------------------------------------------------------------------------

    def blocked(self, source: Process, target: Process) -> bool:
        """Whether a partition keeps bytes of `source` from `target` now."""
        return (source.name, target.name) in self._walls

    def trap(self, name: str, action: Callable[[str], None]) -> None:
        """Call `action` with the sender's name when the next piece of a block is sent to `name`."""
        self._traps[name] = action

    def spring(self, pipe: Pipe) -> None:
        """Called when a piece of a block is sent through `pipe`."""
        action = self._traps.pop(pipe.target.name, None)
        if action is not None:
            action(pipe.source.name)

    def wall(self, source: str, target: str) -> None:
        """Partition in this direction, until `heal`."""
        self._walls.add((source, target))

    def heal(self, source: str = "", target: str = "") -> None:
        """End this partition, or all of them; the delayed bytes arrive."""
        if source:
            self._walls.discard((source, target))
        else:
            self._walls.clear()
        for pair in self.connections:
            for endpoint in pair:
                endpoint.outgoing.heal()

    def break_one(self, matches: Callable[[Endpoint], bool] = lambda _: True) -> bool:
        """Break one open connection, at random; False if there is none."""
        alive = [pair for pair in self.connections if not _over(pair) and matches(pair[0])]
        if not alive:
            return False
        _break(self.world.random.choice(alive))
        return True

    def forget(self, name: str) -> None:
        """A machine of this name has restarted: it resets connections of its previous life."""
        for pair in self.connections:
            if any(end.outgoing.source.name == name for end in pair):
                _break(pair)
        for address, sock in list(self.listeners.items()):
            if sock.process.name == name:
                del self.listeners[address]

    def hang_up(self, process: Process) -> None:
        """Close all connections of a dead process, as its kernel does."""
        for pair in self.connections:
            if process in (pair[0].incoming.source, pair[0].incoming.target):
                _break(pair)
        self.connections = [pair for pair in self.connections if not _over(pair)]


def _over(pair: tuple[Endpoint, Endpoint]) -> bool:
    return all(endpoint.incoming.broken for endpoint in pair)


def _break(pair: tuple[Endpoint, Endpoint]) -> None:
    for endpoint in pair:
        endpoint.incoming.break_()
