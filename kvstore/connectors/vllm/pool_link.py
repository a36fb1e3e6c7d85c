"""A connection to the pool that engines can rely on: it opens in the background, and a pool that
does not answer costs a request nothing until the next probe."""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from tiffin.messenger.health import Health

from ...client.client import Client
from ...errors import (
    ClientBusy,
    ClientClosed,
    DeadlineExceeded,
    InvalidInput,
    NodeUnavailable,
    ProtocolError,
    TiffinError,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from ...client.blocks.block_places import MappedRegion
    from ...client.verbs.arguments import Verify
    from ...format.key_space import KeySpace

log = logging.getLogger(__name__)
T = TypeVar("T")

# Rests of a pool that failed. The first is short: an engine may start before its node.
FIRST_REST_S = 0.5
LONGEST_REST_S = 5.0
# How often the key space is announced again: a node that was started again does not have it. And
# within which time if it has changed: an adapter has keys soon after its first use.
_ANNOUNCE_S, _LOOK_S = 2.0, 0.1
# Failures of the pool, after which it gets a rest. Others are answers: no room, a corrupt block.
_FAILURES = (NodeUnavailable, DeadlineExceeded, ProtocolError, ClientClosed, ConnectionError)


def at_node(client: Client, node: int | None) -> dict[str, Any]:
    """The argument of `match` and `stream` for the node with this number, if it is known; a client
    of one node has none."""
    return {"node": node} if node is not None and client.is_pool else {}


class PoolLink:
    """One client of the pool for all of a process. Thread-safe; open it with `shared`.

    `call` raises NodeUnavailable at once while the pool is not connected or has a rest.
    """

    _links: ClassVar[dict[tuple[int, str, str], PoolLink]] = {}
    _guard: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, url: str, verify: Verify) -> None:
        self._url = url
        self._verify = verify
        self._lock = threading.Lock()
        self._health = Health(FIRST_REST_S, LONGEST_REST_S)
        self._client: Client | None = None
        self._opening: threading.Thread | None = None
        self._users = 0
        self._said = ""  # the last failure that was logged
        self._refused = ""  # and why a key space was refused
        self._closed = threading.Event()

    @classmethod
    def shared(cls, url: str, verify: Verify) -> PoolLink:
        """The process's link to this pool: the scheduler and the worker of one process have one
        client, whose mapping of the node's memory costs 0.3 s and page tables. Close it once for
        each call."""
        with cls._guard:
            link = cls._links.setdefault((os.getpid(), url, verify), cls(url, verify))
            link._users += 1
        link._open_soon()
        return link

    def call(self, action: Callable[[Client], T], wait_s: float = 0.0) -> T:
        """`action(client)`; waits up to `wait_s` for a connection that is being opened. Raises what
        it raises, and NodeUnavailable while there is no pool to ask."""
        client = self._connected(wait_s)
        try:
            result = action(client)
        except ClientBusy:  # this process's own threads: one miss
            raise
        except _FAILURES as error:
            self._failed(client, error)
            raise
        with self._lock:
            self._health.answered()
        return result

    def region(self) -> MappedRegion | None:
        """The memory of the node on this host, if the pool is connected and has one; does not
        wait."""
        client = self._client
        if client is None:
            return None
        try:
            return client.region
        except ClientClosed:
            return None

    def home_number(self) -> int | None:
        """The number of the node on this host in the pool's directory; None if it has none, or is
        not known yet."""
        client = self._client
        return None if client is None else client.home_number

    def announce(self, space: Callable[[], KeySpace]) -> None:
        """Keep the pool told of `space()`, from a thread, until the last `close`."""
        threading.Thread(
            target=self._repeat, args=(space,), name="tiffin-announce", daemon=True
        ).start()

    def _repeat(self, space: Callable[[], KeySpace]) -> None:
        told, again_at = None, 0.0
        while not self._closed.is_set():
            now = space()
            if now != told or time.monotonic() >= again_at:
                told, again_at = now, time.monotonic() + _ANNOUNCE_S
                self._tell(now)
            self._closed.wait(_LOOK_S)

    def _tell(self, space: KeySpace) -> None:
        try:
            self.call(lambda client: client.announce(space), wait_s=_ANNOUNCE_S)
        except InvalidInput as error:
            if str(error) != self._refused:
                log.warning("the key space is not announced: %s", error)
            self._refused = str(error)
        except TiffinError as error:  # `call` has said so, and gives a pool that failed a rest
            log.debug("the key space is not announced: %s", error)

    def close(self) -> None:
        """Close the client when no user of the process is left."""
        with PoolLink._guard:
            self._users -= 1
            if self._users > 0:
                return
            self._closed.set()
            PoolLink._links = {
                key: link for key, link in PoolLink._links.items() if link is not self
            }
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    def _connected(self, wait_s: float) -> Client:
        with self._lock:
            client, resting = self._client, self._health.rests(time.monotonic())
        if client is not None and not resting:
            return client
        if resting:
            raise NodeUnavailable("the pool did not answer; it is asked again after a rest")
        self._open_soon()
        if wait_s > 0:
            opening = self._opening
            if opening is not None:
                opening.join(wait_s)
            with self._lock:
                if self._client is not None:
                    return self._client
        raise NodeUnavailable("the pool is not connected yet")

    def _open_soon(self) -> None:
        """Open the client in a thread, unless there is one or another thread does."""
        with self._lock:
            if self._client is not None or self._opening is not None or self._users <= 0:
                return
            self._opening = threading.Thread(target=self._open, name="tiffin-open", daemon=True)
            self._opening.start()  # here, because others may join it from now on

    def _open(self) -> None:
        try:
            client = Client.open(self._url, verify=self._verify, name="vllm", populate=True)
        except Exception as error:  # noqa: BLE001 - whatever it is, the engine goes on without
            with self._lock:
                self._opening = None
                self._health.failed(time.monotonic())
            self._say(error)
            return
        with self._lock:
            self._opening = None
            closed = self._users <= 0
            if not closed:
                self._client = client
                self._health.answered()
        if closed:
            client.close()
            return
        self._said = ""
        log.info("connected to the KV pool at %s", self._url)

    def _failed(self, client: Client, error: Exception) -> None:
        """Give the pool a rest, and drop a client that lost its node: only a pool's client connects
        again by itself."""
        with self._lock:
            now = time.monotonic()
            if not self._health.rests(now):  # calls that fail together are one failure
                self._health.failed(now)
            gone = isinstance(error, ConnectionError | ClientClosed)
            lost = gone and self._client is client and type(client) is Client
            if lost:
                self._client = None
        self._say(error)
        if lost:
            threading.Thread(target=client.close, name="tiffin-close", daemon=True).start()

    def _say(self, error: Exception) -> None:
        text = f"{type(error).__name__}: {error}"
        if text != self._said:
            log.warning("the KV pool does not answer, its blocks are computed: %s", text)
        self._said = text
