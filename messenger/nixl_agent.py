"""One NIXL agent: the memory it registered, the peers it knows, and the transfers under way.

NIXL (UCX underneath) moves bytes by one-sided reads and writes: an initiator names memory of both
sides, and with RDMA the peer's processor takes no part. What it lacks is added here and in
`nixl.py`. Measured with nixl-cu12 1.5.1:

- It never gives up. A transfer to a process that is stopped stays "in progress" for ever.
- It cannot cancel. Releasing a transfer under way, or removing its peer, returns success, and the
  bytes arrive all the same: all 64 MiB did after both. Removing the peer also makes the state
  unreadable. So a handle is released, and a peer removed, only when nothing of it is under way.
- It does not close the connection to a peer that is removed while it lives (ai-dynamo/nixl#2025):
  two sockets stayed open every time. So a peer stays connected until it is lost, in use or not.
- Its own Python wrapper fixes the pause of the progress thread at 0, which is a core at 100 % for
  ever. With any pause the thread sleeps on events: 0.6 % of a core, and no slower. Hence the
  bindings below the wrapper.
- Descriptor lists are serialised with pickle there. Here they are built from numbers, by the side
  that uses them, and never travel. What travels is the agent's metadata, NIXL's own format.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import secrets
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .errors import FrameError, MessengerError, PeerLost, RangeError
from .gate import Gate
from .nixl_load import NixlUnavailable, errors, load
from .nixl_staging import Staging

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from .local import ByteArray

_log = logging.getLogger(__name__)

# The longest that the progress thread sleeps if no event wakes it: 0.6 % of a core. With 100 us and
# with 1 ms it was 3 %, and 64 KiB took as long.
_PROGRESS_PAUSE_US = 10_000
# Metadata of an agent with one registration is 300 to 500 bytes; network cards add to it.
METADATA_BYTES_MAX = 64 << 10
# A transfer that failed may have had parts on other lanes: so long its memory rests.
REST_S = 1.0
# Notifications that nobody fetched, beyond which the oldest are forgotten.
NOTIFICATIONS_MAX = 4096
ADDRESS_MAX = 1 << 63
_MEMORIES = ("DRAM", "VRAM")
# UCX's way to say everything but tcp, which only emulates one-sided transfers. The emulation checks
# no bounds, and it aborts a process that is being read from when the reader dies: 6 times of 8 when
# it was slow to answer. docs/nixl.md has more.
_LANES = "^tcp"
# Peers that are known and in nobody's use. Beyond it, some are dead: the oldest are removed.
IDLE_MAX = 1024
# A wait looks at once, so often yielding the core, and then with naps that grow: 64 KiB come in
# 20 to 150 us, and a piece of 4 MiB in 0.2 to 4 ms.
LOOKS = 50
NAP_S_MIN, NAP_S_MAX = 20e-6, 1e-3


class Description(NamedTuple):
    """Registered memory as its owner describes it to a peer, over a channel that both trust.

    `metadata` opens the connection and is opaque; `memory` is "DRAM" or "VRAM", on `device`.
    """

    metadata: bytes
    base_address: int
    nbytes: int
    memory: str = "DRAM"
    device: int = 0

    def check(self) -> None:
        """Raises FrameError for what no agent says of its memory."""
        if len(self.metadata) > METADATA_BYTES_MAX:
            raise FrameError(f"{len(self.metadata)} bytes of NIXL metadata are too many")
        if not 0 <= self.base_address <= ADDRESS_MAX - self.nbytes <= ADDRESS_MAX:
            raise FrameError("a peer described memory that no machine has")
        if self.memory not in _MEMORIES:
            raise FrameError(f"a peer described memory of kind {self.memory!r}")


class Registered:
    """Memory that the agent can move bytes from and to; kept alive until `close`, and then until
    no transfer uses it."""

    def __init__(
        self, agent: NixlAgent, owner: object, address: int, nbytes: int, memory: str, device: int
    ) -> None:
        """Not for callers: use `NixlAgent.register`."""
        self._agent = agent
        self._owner: object = owner
        self._closed = False
        self.flights = 0  # guarded by the agent's lock
        self.address = address
        self.nbytes = nbytes
        self.memory = memory
        self.device = device

    def description(self) -> Description:
        """What a peer needs to read and write this memory, and no other of this process's (but see
        docs/nixl.md for lanes that check nothing). Raises PeerLost after the agent's `close`."""
        metadata = self._agent.metadata_of(self)
        return Description(metadata, self.address, self.nbytes, self.memory, self.device)

    def holds(self, address: int, nbytes: int) -> bool:
        """Whether these bytes are all part of it."""
        return self.address <= address and address + nbytes <= self.address + self.nbytes

    def close(self) -> None:
        """Take it out of the agent, at once or when the last transfer that uses it has ended."""
        self._closed = True
        self._agent.sweep()

    @property
    def leaving(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def let_go(self) -> None:
        """The memory is the owner's again."""
        self._owner = None


class Remote:
    """A peer's agent, connected. All fields are guarded by the agent's lock."""

    __slots__ = ("flights", "lost", "name", "users")

    def __init__(self, name: bytes) -> None:
        self.name = name
        self.users = 0
        self.flights = 0
        self.lost = False


class Flight:
    """One transfer, from `post` on under way until `poll` has returned True or raised."""

    def __init__(self, agent: NixlAgent, handle: int, remote: Remote, memory: Registered) -> None:
        self._agent = agent
        self._handle = handle
        self._remote = remote
        self._memory = memory
        self._lock = threading.Lock()
        self._ended_at: float | None = None
        self._failure: str | None = None

    def poll(self) -> bool:
        """Whether all bytes are where they belong. Raises PeerLost when that will never be."""
        with self._lock:
            if self._ended_at is None:
                self._look()
            if self._failure is not None:
                raise PeerLost(f"the transfer failed: {self._failure}")
            return self._ended_at is not None

    def ended(self) -> bool:
        """Whether it has come to an end, good or bad."""
        with self._lock:
            if self._ended_at is None:
                self._look()
            return self._ended_at is not None

    def quiet(self, now: float) -> bool:
        """Whether nothing touches the memory any more."""
        with self._lock:
            if self._ended_at is None:
                self._look()
            if self._ended_at is None:
                return False
            return self._failure is None or now >= self._ended_at + REST_S

    def post(self, notification: bytes) -> None:
        """Begin; once. A failure is kept for `poll`."""
        with self._lock:
            self._step(lambda raw: raw.postXferReq(self._handle, notification))

    def _look(self) -> None:
        self._step(lambda raw: raw.getXferStatus(self._handle))

    def _step(self, action: Callable[[Any], Any]) -> None:
        raw = self._agent.raw
        if raw is None:  # destroyed, and what was under way with it
            self._end("the agent was closed")
            return
        try:
            status = action(raw)
        except errors() as error:
            self._end(str(error))
            return
        if status == load().NIXL_SUCCESS:
            self._end(None)
        elif status != load().NIXL_IN_PROG:
            self._end(str(status))

    def _end(self, failure: str | None) -> None:
        self._ended_at, self._failure = time.monotonic(), failure
        self._agent.ended(self._handle, self._remote, self._memory, failed=failure is not None)


class Quarantined:
    """Memory that a transfer may still touch, and what keeps it alive: this object."""

    def __init__(self, agent: NixlAgent, memory: Registered, flights: Sequence[Flight]) -> None:
        self._agent = agent
        self._flights = list(flights)
        self.memory = memory

    def wait(self, timeout_s: float) -> bool:
        """Whether nothing touches it any more, within so many seconds. The agent's `close` makes
        that certain."""
        return self._all(lambda flight: flight.quiet(time.monotonic()), timeout_s)

    def ended(self, timeout_s: float) -> bool:
        """Whether the transfers have ended; one that failed has a while to settle after that."""
        return self._all(Flight.ended, timeout_s)

    def _all(self, true: Callable[[Flight], bool], timeout_s: float) -> bool:
        give_up = time.monotonic() + timeout_s
        nap_s = NAP_S_MIN
        while True:
            try:
                with self._agent.use():
                    # All are looked at: how long one rests counts from when it was seen to fail.
                    if all([true(flight) for flight in self._flights]):  # noqa: C419
                        return True
            except PeerLost:  # closed: nothing moves any more
                return True
            if time.monotonic() >= give_up:
                return False
            time.sleep(nap_s)
            nap_s = min(2 * nap_s, NAP_S_MAX)


class StillMoving(MessengerError):
    """Given up, and not ended: the bytes of a write, or into memory read in place, may come at any
    time until `quarantined.wait` says otherwise. Not a TransferError, because another path must not
    be tried with the same memory."""

    def __init__(self, message: str, quarantined: Quarantined) -> None:
        super().__init__(message)
        self.quarantined = quarantined


class NixlAgent:
    """This process's end of NIXL; make one, and close the transports that use it first.

    `name` is for people: the agent's real name is unique to this incarnation, so that a peer never
    takes a restarted process for the one before it. `lanes` limits what UCX uses, as UCX_TLS does
    (for example "rc,ud"); empty is what that variable says, or else everything but tcp.
    `staging_bytes` of memory, in pieces of `piece_bytes`, are registered at the first transfer to
    memory that is not; 64 MiB are sixteen transfers of a piece at a time.

    Raises NixlUnavailable. Not for use in a forked child: make one there.
    """

    def __init__(
        self,
        name: str = "tiffin",
        *,
        lanes: str = "",
        staging_bytes: int = 64 << 20,
        piece_bytes: int = 4 << 20,
    ) -> None:
        if not 4096 <= piece_bytes <= staging_bytes:
            raise RangeError(f"{staging_bytes} bytes of staging in pieces of {piece_bytes}")
        bindings = load()
        self.name = f"{name}-{os.getpid()}-{secrets.token_hex(8)}"
        self.raw: Any = None
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._gate = Gate(lambda: PeerLost("the NIXL agent is closed"))
        self._registered: list[Registered] = []
        self._remotes: dict[bytes, Remote] = {}
        self._given_up: list[Flight] = []
        self._staging: tuple[Staging, Registered] | None = None
        self._staging_bytes, self._piece_bytes = staging_bytes, piece_bytes
        config = bindings.nixlAgentConfig()
        config.useProgThread = True
        config.pthrDelay = _PROGRESS_PAUSE_US
        config.syncMode = bindings.NIXL_THREAD_SYNC_STRICT
        try:
            self.raw = bindings.nixlAgent(self.name, config)
            options, _ = self.raw.getPluginParams("UCX")
            if lanes or "UCX_TLS" not in os.environ:
                options["engine_config"] = f"TLS={lanes or _LANES}"
            self.raw.createBackend("UCX", options)
        except errors() as error:
            self.raw = None
            raise NixlUnavailable(
                f"UCX found no way to move bytes here ({error}): it needs RDMA. Look at UCX_TLS "
                "and UCX_NET_DEVICES, and set UCX_LOG_LEVEL=error to hear more"
            ) from error

    # -- memory ----------------------------------------------------------------------------------

    def register(self, array: ByteArray) -> Registered:
        """Make an array's bytes reachable; expensive with RDMA (pages are pinned), so once, for a
        whole region. Raises RangeError for memory that is not contiguous, or empty; PeerLost."""
        if not array.flags.c_contiguous or not array.nbytes:
            raise RangeError("only contiguous memory of at least one byte can be registered")
        return self._register(array, array.ctypes.data, array.nbytes, "DRAM", 0)

    def register_tensor(self, tensor: Any) -> Registered:
        """As `register`, for a torch tensor in this machine's or a GPU's memory (GPUDirect)."""
        if not tensor.is_contiguous() or not tensor.nbytes:
            raise RangeError("only a contiguous tensor of at least one byte can be registered")
        memory, device = ("VRAM", tensor.get_device()) if tensor.is_cuda else ("DRAM", 0)
        return self._register(tensor, tensor.data_ptr(), tensor.nbytes, memory, device)

    def _register(
        self, owner: object, address: int, nbytes: int, memory: str, device: int
    ) -> Registered:
        made = Registered(self, owner, address, nbytes, memory, device)
        with self.use(), self._lock:
            try:
                self.raw.registerMem(_regions(made), [])
            except errors() as error:
                raise RangeError(
                    f"{nbytes} bytes of {memory} could not be registered ({error}); with RDMA, "
                    "the limit of locked memory must allow it (ulimit -l)"
                ) from error
            self._registered.append(made)
        return made

    def metadata_of(self, one: Registered) -> bytes:
        """What a peer needs to connect and to use this memory. Raises RangeError, PeerLost."""
        if one.leaving:
            raise RangeError("this memory is not registered any more")
        with self.use():
            try:
                return bytes(self.raw.getLocalPartialMD(_regions(one), True, []))
            except errors() as error:
                raise RangeError(f"this memory can't be described: {error}") from error

    def find(self, address: int, nbytes: int) -> Registered | None:
        """The registration that holds these bytes."""
        with self._lock:
            for one in self._registered:
                if not one.leaving and one.holds(address, nbytes):
                    return one
        return None

    def staging(self) -> tuple[Staging, Registered]:
        """Pieces of registered memory for bytes that go to or come from memory that is not."""
        with self._lock:
            if self._staging is None:
                memory = _pages(self._staging_bytes)
                self._staging = Staging(memory, self._piece_bytes), self.register(memory)
            return self._staging

    # -- peers -----------------------------------------------------------------------------------

    def connect(self, description: Description) -> Remote:
        """Know a peer; balanced by `leave`. Raises PeerLost, and FrameError for what is not
        metadata."""
        if len(description.metadata) > METADATA_BYTES_MAX:
            raise FrameError(
                f"{len(description.metadata)} bytes of NIXL metadata; that is too much"
            )
        if not 0 <= description.base_address <= ADDRESS_MAX - description.nbytes <= ADDRESS_MAX:
            raise FrameError("a peer described memory that no machine has")
        with self.use(), self._lock:
            self.sweep()
            name = self._load(description.metadata)
            remote = self._remotes.setdefault(name, Remote(name))
            if remote.lost:
                raise PeerLost("transfers of the connection that was lost have not ended yet")
            remote.users += 1
            return remote

    def _load(self, metadata: bytes) -> bytes:
        bindings = load()
        try:
            return bytes(self.raw.loadRemoteMD(metadata))
        except (bindings.nixlMismatchError, bindings.nixlInvalidParamError) as error:
            raise FrameError(
                f"a peer described itself with what is not metadata: {error}"
            ) from error
        except errors() as error:
            raise PeerLost(f"no connection to the peer's NIXL agent: {error}") from error

    def leave(self, remote: Remote) -> None:
        """The peer is not needed any more by who connected to it; the connection stays."""
        with self._lock:
            remote.users -= 1
            self.sweep()

    def sweep(self) -> None:
        """Remove what nothing is under way with: peers that are lost, memory that was closed."""
        with self._lock:
            idle = [one for one in self._remotes.values() if not one.users]
            spare = idle[: max(0, len(idle) - IDLE_MAX)]
            for remote in [one for one in self._remotes.values() if one.lost] + spare:
                if not remote.flights and self._remotes.pop(remote.name, None) is not None:
                    remote.lost = True  # for who still holds it: connect again
                    self._quietly("invalidateRemoteMD", remote.name)
            for one in [one for one in self._registered if one.leaving and not one.flights]:
                self._registered.remove(one)
                self._quietly("deregisterMem", _regions(one), [])
                one.let_go()

    def _quietly(self, method: str, *arguments: object) -> None:
        if self.raw is None:
            return
        try:
            getattr(self.raw, method)(*arguments)
        except errors() as error:
            _log.warning("NIXL failed to let go of something: %s: %s", method, error)

    # -- transfers -------------------------------------------------------------------------------

    def prepare(
        self,
        remote: Remote,
        description: Description,
        memory: Registered,
        rows: NDArray[np.int64],
        *,
        write: bool,
    ) -> Flight:
        """A transfer that reads (or writes) `rows` [n, 3]: address here, address there, bytes.

        They have to lie inside `memory` and `description`. Raises PeerLost.
        """
        bindings = load()
        operation = bindings.NIXL_WRITE if write else bindings.NIXL_READ
        near = _places(memory.memory, memory.device, rows[:, 0], rows[:, 2])
        far = _places(description.memory, description.device, rows[:, 1], rows[:, 2])
        with self._lock:
            if remote.lost or self.raw is None:
                raise PeerLost("the connection to the peer's NIXL agent was lost")
            try:
                handle = self.raw.createXferReq(operation, near, far, remote.name, b"", [])
            except errors() as error:
                raise PeerLost(f"NIXL refused a transfer: {error}") from error
            remote.flights += 1
            memory.flights += 1
        return Flight(self, handle, remote, memory)

    def keep(self, flights: Sequence[Flight]) -> None:
        """Look after transfers that their callers gave up, so that what they use is let go."""
        with self._lock:
            self._given_up += flights

    def reap(self) -> None:
        """Be done with those of them that have ended."""
        with self._lock:
            flights = list(self._given_up)
        ended = {flight for flight in flights if flight.ended()}
        if ended:
            with self._lock:
                self._given_up = [flight for flight in self._given_up if flight not in ended]

    def ended(self, handle: int, remote: Remote, memory: Registered, *, failed: bool) -> None:
        """A flight's last word."""
        with self._lock:
            remote.flights -= 1
            memory.flights -= 1
            if failed:
                remote.lost = True
            self._quietly("releaseXferReq", handle)
            if memory.leaving:
                self.sweep()

    def notifications(self) -> list[tuple[str, bytes]]:
        """Who announced the end of a write, and as what: all since the last call. An agent that
        expects them calls this regularly, because NIXL keeps all that come."""
        with self.use(), self._lock:
            found = self.raw.getNotifs({}, [])
        pairs = [(name, note) for name, notes in found.items() for note in notes]
        return pairs[-NOTIFICATIONS_MAX:]

    # -- life ------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        """The agent is not destroyed during the block. Raises PeerLost when it is closed."""
        self.check()
        with self._gate:
            yield

    def check(self) -> None:
        """Raises PeerLost when the agent is closed, or another process's."""
        self._gate.check()
        if os.getpid() != self._pid:
            raise PeerLost("a NIXL agent does not survive a fork: make one in this process")

    def close(self) -> None:
        """End everything: calls under way raise PeerLost. Destroying the agent is the one thing
        that stops transfers which do not end, so memory is let go after it."""
        self._gate.close()
        with self._lock:
            self.raw = None
            self._staging = None
            registered, self._registered = self._registered, []
            self._remotes.clear()
        for one in registered:
            one.let_go()

    def __del__(self) -> None:
        # Before the memory that transfers may still write to: cycles end in no order.
        self.raw = None


def _segment(memory: str) -> Any:
    return load().VRAM_SEG if memory == "VRAM" else load().DRAM_SEG


def _regions(one: Registered) -> Any:
    place = (one.address, one.nbytes, one.device, "")
    return load().nixlRegDList(_segment(one.memory), [place])


def _places(
    memory: str, device: int, addresses: NDArray[np.int64], lengths: NDArray[np.int64]
) -> Any:
    devices = np.full(len(addresses), device)
    rows = np.column_stack((addresses, lengths, devices)).astype(np.uint64)
    return load().nixlXferDList(_segment(memory), rows)


def _pages(nbytes: int) -> ByteArray:
    """Memory that begins at a page, and that a forked child does not get: its copy would be what
    the network card goes on writing to."""
    mapping = mmap.mmap(-1, nbytes)
    mapping.madvise(mmap.MADV_DONTFORK)
    return np.frombuffer(mapping, np.uint8)
