"""A NIXL agent: its registered memory, its connected peers, and its in-flight transfers.

NIXL (UCX underneath) moves bytes by one-sided reads: the reader names memory of both sides, and
with RDMA the peer's processor takes no part. This module and `nixl_transport.py` add
what NIXL lacks. Measured with nixl-cu12 1.5.1:

- It has no timeout. A transfer to a process that is stopped stays "in progress" for ever.
- It cannot cancel. Releasing an in-flight transfer, or removing its peer, returns success, and the
  bytes arrive all the same: all 64 MiB did after both. Removing the peer also makes the transfer's
  state unreadable. So the agent releases a handle, or removes a peer, only when none of its
  transfers is in flight.
- It does not close the connection to a peer that is removed while alive (ai-dynamo/nixl#2025): two
  sockets stayed open every time. So a peer stays connected until it is lost, in use or not.
- Its own Python wrapper fixes the pause of the progress thread at 0, which uses 100 % of a core for
  ever. With any pause the thread sleeps on events: 0.6 % of a core, and no slower. Hence this
  module uses the bindings below the wrapper.
- The wrapper serialises descriptor lists with pickle. Here the side that uses a descriptor list
  builds it from numbers, and never sends it. Only the agent's metadata, in NIXL's own format, is
  sent.
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

from ..errors import FrameError, PeerLost, RangeError
from ..shm.dontfork import keep_from_children
from ..usage_gate import UsageGate
from .bindings import NixlUnavailable, errors, load
from .staging import Staging

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from ..shm.host_copy import ByteArray

_log = logging.getLogger(__name__)

# The longest that the progress thread sleeps if no event wakes it: 0.6 % of a core. With 100 us and
# with 1 ms it was 3 %, and 64 KiB took as long.
_PROGRESS_PAUSE_US = 10_000
# Metadata of an agent with one registration is 300 to 500 bytes; network cards add to it.
METADATA_BYTES_MAX = 64 << 10
# Parts of a failed transfer may still move on other lanes: its memory stays in quarantine so long.
REST_S = 1.0
ADDRESS_MAX = 1 << 63
# NIXL's number of the device that host memory belongs to.
_DEVICE = 0
# UCX's syntax for every transport but tcp, which only emulates one-sided transfers. The emulation
# checks no bounds, and it aborts a process that is being read from when the reader dies: 6 times of
# 8 when that process was slow to answer. See docs/nixl.md.
_LANES = "^tcp"
# Limit of connected peers that no transport uses. Beyond it some are dead: the oldest are removed.
IDLE_MAX = 1024
# A wait polls so many times, yielding the core in between, and then sleeps with a growing back-off:
# 64 KiB come in 20 to 150 us, and a piece of 4 MiB in 0.2 to 4 ms.
LOOKS = 50
NAP_S_MIN, NAP_S_MAX = 20e-6, 1e-3


class Description(NamedTuple):
    """Registered memory as its owner describes it to a peer, over a channel that both trust.

    `metadata` opens the connection and is opaque.
    """

    metadata: bytes
    base_address: int
    nbytes: int

    def check(self) -> None:
        """Raise FrameError for a description that no agent makes."""
        if len(self.metadata) > METADATA_BYTES_MAX:
            raise FrameError(f"{len(self.metadata)} bytes of NIXL metadata are too many")
        if not 0 <= self.base_address <= ADDRESS_MAX - self.nbytes <= ADDRESS_MAX:
            raise FrameError("a peer described memory that no machine has")


class Registered:
    """Registered memory: bytes that a peer reads, or that a read here goes to. The agent keeps it
    alive until it is closed."""

    def __init__(self, agent: NixlAgent, array: ByteArray) -> None:
        """Private: use `NixlAgent.register`."""
        self._agent = agent
        self._array = array
        self.address = array.ctypes.data
        self.nbytes = array.nbytes

    def description(self) -> Description:
        """The description with which a peer can reach this memory, and no other memory of this
        process (but see docs/nixl.md for lanes that check nothing). Raises PeerLost after the
        agent's `close`."""
        return Description(self._agent.metadata_of(self), self.address, self.nbytes)


class Remote:
    """A connected agent of a peer. The local agent's lock guards all fields."""

    __slots__ = ("flights", "lost", "name", "users")

    def __init__(self, name: bytes) -> None:
        self.name = name
        self.users = 0
        self.flights = 0
        self.lost = False


class NixlTransfer:
    """One transfer; in flight from `post` until `poll` has returned True or raised."""

    def __init__(self, agent: NixlAgent, handle: int, remote: Remote) -> None:
        self._agent = agent
        self._handle = handle
        self._remote = remote
        self._lock = threading.Lock()
        self._ended_at: float | None = None
        self._failure: str | None = None

    def poll(self) -> bool:
        """Whether all bytes have arrived. Raises PeerLost when the transfer has failed."""
        with self._lock:
            if self._ended_at is None:
                self._look()
            if self._failure is not None:
                raise PeerLost(f"the transfer failed: {self._failure}")
            return self._ended_at is not None

    def quiet(self, now: float) -> bool:
        """Whether the transfer no longer accesses the memory: it has succeeded, or failed REST_S
        ago."""
        with self._lock:
            if self._ended_at is None:
                self._look()
            if self._ended_at is None:
                return False
            return self._failure is None or now >= self._ended_at + REST_S

    def post(self) -> None:
        """Start the transfer; call it once. A failure is kept for `poll`."""
        with self._lock:
            self._step(lambda raw: raw.postXferReq(self._handle, b""))

    def _look(self) -> None:
        self._step(lambda raw: raw.getXferStatus(self._handle))

    def _step(self, action: Callable[[Any], Any]) -> None:
        raw = self._agent.raw
        if raw is None:  # the agent is destroyed, and its transfers have ended with it
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
        self._agent.ended(self._handle, self._remote, failed=failure is not None)


class NixlAgent:
    """This process's end of NIXL. Make one per process, and close the transports that use it first.

    `name` is for display: the agent's real name is unique to this instance, so that a peer never
    confuses a restarted process with its predecessor. `lanes` limits the transports of UCX, as
    UCX_TLS does (for example "rc,ud"); empty means the value of that variable, or else everything
    but tcp. `staging_bytes` of memory, in pieces of `piece_bytes`, are registered at the first
    read; 64 MiB are sixteen transfers of a piece at a time.

    Raises NixlUnavailable. Not usable in a forked child: make a new agent there.
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
        self._gate = UsageGate(lambda: PeerLost("the NIXL agent is closed"))
        self._registered: list[Registered] = []
        self._remotes: dict[bytes, Remote] = {}
        self._staging: Staging | None = None
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
        """Register an array's bytes for transfers. Expensive with RDMA (it pins pages), so do it
        once, for a whole region. Raises RangeError for memory that is not contiguous, or empty;
        PeerLost."""
        if not array.flags.c_contiguous or not array.nbytes:
            raise RangeError("only contiguous memory of at least one byte can be registered")
        made = Registered(self, array)
        with self.use(), self._lock:
            try:
                self.raw.registerMem(_regions(made), [])
            except errors() as error:
                raise RangeError(
                    f"{array.nbytes} bytes could not be registered ({error}); with RDMA, the limit "
                    "of locked memory must allow it (ulimit -l)"
                ) from error
            self._registered.append(made)
        return made

    def metadata_of(self, one: Registered) -> bytes:
        """The metadata with which a peer can connect and use this memory. Raises RangeError,
        PeerLost."""
        with self.use():
            try:
                return bytes(self.raw.getLocalPartialMD(_regions(one), True, []))
            except errors() as error:
                raise RangeError(f"this memory can't be described: {error}") from error

    def staging(self) -> Staging:
        """The staging pieces; made at the first call."""
        with self._lock:
            if self._staging is None:
                memory = _pages(self._staging_bytes)
                self.register(memory)
                self._staging = Staging(memory, self._piece_bytes)
            return self._staging

    # -- peers -----------------------------------------------------------------------------------

    def connect(self, description: Description) -> Remote:
        """Connect to a peer; pair each call with a `leave`. Raises PeerLost, and FrameError for
        invalid metadata. The description has passed its `check`."""
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
        """End one use of a peer; the connection stays."""
        with self._lock:
            remote.users -= 1
            self.sweep()

    def sweep(self) -> None:
        """Remove lost peers, and idle peers beyond IDLE_MAX, unless they have transfers in
        flight."""
        with self._lock:
            idle = [one for one in self._remotes.values() if not one.users]
            spare = idle[: max(0, len(idle) - IDLE_MAX)]
            for remote in [one for one in self._remotes.values() if one.lost] + spare:
                if not remote.flights and self._remotes.pop(remote.name, None) is not None:
                    remote.lost = True  # a transport that still has this object must reconnect
                    self._quietly("invalidateRemoteMD", remote.name)

    def _quietly(self, method: str, *arguments: object) -> None:
        if self.raw is None:
            return
        try:
            getattr(self.raw, method)(*arguments)
        except errors() as error:
            _log.warning("NIXL failed to let go of something: %s: %s", method, error)

    # -- transfers -------------------------------------------------------------------------------

    def prepare(self, remote: Remote, rows: NDArray[np.int64]) -> NixlTransfer:
        """A transfer that reads `rows` [n, 3]: local address, remote address, bytes.

        The local addresses have to lie in registered memory, the remote ones inside what the peer
        described. Raises PeerLost.
        """
        near = _places(rows[:, 0], rows[:, 2])
        far = _places(rows[:, 1], rows[:, 2])
        with self._lock:
            if remote.lost or self.raw is None:
                raise PeerLost("the connection to the peer's NIXL agent was lost")
            try:
                handle = self.raw.createXferReq(load().NIXL_READ, near, far, remote.name, b"", [])
            except errors() as error:
                raise PeerLost(f"NIXL refused a transfer: {error}") from error
            remote.flights += 1
        return NixlTransfer(self, handle, remote)

    def ended(self, handle: int, remote: Remote, *, failed: bool) -> None:
        """Release an ended transfer's handle and its use of the peer. Called by the transfer."""
        with self._lock:
            remote.flights -= 1
            if failed:
                remote.lost = True
            self._quietly("releaseXferReq", handle)

    # -- life ------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        """Keep the agent alive during the block. Raises PeerLost when it is closed."""
        self.check()
        with self._gate:
            yield

    def check(self) -> None:
        """Raise PeerLost when the agent is closed, or belongs to the parent of this fork."""
        self._gate.check()
        if os.getpid() != self._pid:
            raise PeerLost("a NIXL agent does not survive a fork: make one in this process")

    def close(self) -> None:
        """End all transfers: in-flight calls raise PeerLost. Only destroying the agent stops
        transfers that hang, so their memory is released after it."""
        self._gate.close()
        with self._lock:
            self.raw = None
            self._staging = None
            self._registered.clear()
            self._remotes.clear()

    def __del__(self) -> None:
        # Destroy the agent before the memory that transfers may still write to: the garbage
        # collector frees the objects of a cycle in no particular order.
        self.raw = None


def _regions(one: Registered) -> Any:
    place = (one.address, one.nbytes, _DEVICE, "")
    return load().nixlRegDList(load().DRAM_SEG, [place])


def _places(addresses: NDArray[np.int64], lengths: NDArray[np.int64]) -> Any:
    devices = np.full(len(addresses), _DEVICE)
    rows = np.column_stack((addresses, lengths, devices)).astype(np.uint64)
    return load().nixlXferDList(load().DRAM_SEG, rows)


def _pages(nbytes: int) -> ByteArray:
    """Page-aligned memory that a forked child does not inherit: otherwise, after copy-on-write,
    the network card could go on writing to the child's copy."""
    mapping = mmap.mmap(-1, nbytes)
    keep_from_children(mapping)
    return np.frombuffer(mapping, np.uint8)
