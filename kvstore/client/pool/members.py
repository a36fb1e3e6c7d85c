"""The members of a pool: the interface of a directory that a client needs, a fixed list of nodes in
its place, the home node's number, and the client's own recent placements."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Protocol

from ...credentials import format_address
from ...directory import open_directory
from ...directory.base import NodeRecord
from ...errors import InvalidInput, NodeUnavailable
from ...url import Pool, parse_url

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

# How long a client remembers a placement. A node registers a new block in the directory within
# 50 ms, and clients may see the node's membership a second late. After this, the directory is up to
# date.
PLACED_S = 3.0
# The most placements that a client remembers: blocks of 33 million tokens, some 10 MiB.
PLACED_MAX = 65_536


def open_members(url: str, pool: str, token: bytes) -> Members:
    """The nodes of a `tiffin://host:port,host:port` URL, or those in the directory at `url`. Raises
    what `open_directory` raises, and InvalidInput for parameters of a client in the URL."""
    if not url.startswith("tiffin:"):
        return open_directory(url, pool=pool, token=token)
    if "?" in url:
        raise InvalidInput(
            f"{url}: here the URL has addresses alone, tiffin://host:7700,host:7700; token and TLS "
            "are options of their own"
        )
    target = parse_url(url)
    assert isinstance(target, Pool)
    return FixedMembers(target.addresses)


class Members(Protocol):
    """The interface of a directory that a client needs; every `Directory` has it. A query takes
    `patience_s` at most; 0 if it needs no I/O."""

    patience_s: float

    def nodes(self, *, fresh: bool = False) -> dict[int, NodeRecord]:
        """The live nodes by number. `fresh`: as they are now, and not some time ago."""
        ...

    def locate(self, keys: Sequence[bytes]) -> list[tuple[int, ...]]:
        """Per key, the numbers of the nodes to ask for it."""
        ...

    def statistics(self) -> dict[str, Any] | None:
        """See `Directory.statistics`; None without a directory."""
        ...

    def close(self) -> None:
        """Close the connections."""
        ...


class FixedMembers:
    """The nodes of a `tiffin://host:port,host:port` URL. Each may have every block, so the client
    asks all of them."""

    patience_s = 0.0

    def __init__(self, addresses: Sequence[tuple[str, int]]) -> None:
        self._records = {
            number: NodeRecord(
                name=format_address(address),
                address=format_address(address),
                host="",
                socket="",
                capacity_bytes=0,
                free_bytes=0,
                number=number,
            )
            for number, address in enumerate(addresses, start=1)
        }
        self._numbers = tuple(self._records)

    def nodes(self, *, fresh: bool = False) -> dict[int, NodeRecord]:
        """All nodes of the URL."""
        return self._records

    def locate(self, keys: Sequence[bytes]) -> list[tuple[int, ...]]:
        """All nodes of the URL, for every key."""
        return [self._numbers] * len(keys)

    def statistics(self) -> None:
        """There is no directory."""

    def close(self) -> None:
        """Does nothing: there are no connections."""


class HomeNumber:
    """The number, in the directory, of the node behind one unix socket of this host; each
    registration gives the node another number. None while the directory does not list the node, or
    has not answered yet. `nodes` is `VerbDriver.nodes`."""

    def __init__(self, nodes: Callable[[], dict[int, NodeRecord]], host: str, socket: str) -> None:
        self._nodes = nodes
        self._host = host
        self._socket = socket
        self._last = 0

    def __call__(self) -> int | None:
        """The current number."""
        try:
            records = self._nodes()
        except NodeUnavailable:
            return self._last or None
        if not self._is_home(records.get(self._last)):
            self._last = max((n for n, r in records.items() if self._is_home(r)), default=0)
        return self._last or None

    def _is_home(self, record: NodeRecord | None) -> bool:
        return record is not None and record.socket == self._socket and record.host == self._host


class FixedHomeNumber:
    """The number, in a fixed list, of the node behind one unix socket of this host; None until
    `find` has found it, and if the list lacks it. A restarted node keeps its address, and so its
    number."""

    def __init__(self) -> None:
        self._number: int | None = None

    def __call__(self) -> int | None:
        """The number."""
        return self._number

    def find(self, home: Mapping[str, Any], listed: Mapping[int, Mapping[str, Any]]) -> None:
        """Find the node whose statistics over the network (`listed`) are of the same process as
        those over the socket (`home`)."""
        for number, numbers in listed.items():
            if all(numbers.get(name) == home[name] for name in ("node", "pid", "started_at")):
                self._number = number

    def named(
        self, home: dict[str, Any] | None, names: dict[int, str], nodes: dict[str, Any]
    ) -> str | None:
        """The home node's name among `nodes`, to whose statistics its own (`home`, None if it did
        not answer) are added if the list lacks it."""
        if home is not None:
            self.find(home, {n: nodes[name] for n, name in names.items() if name in nodes})
            if self._number is None:
                nodes[home["node"]] = home
                return str(home["node"])
        return names.get(self._number or 0)


class Placements:
    """The recent placements of this client: it finds the blocks that it has just put before the
    directory lists them. Thread-safe. Pure, but for its lock."""

    def __init__(self) -> None:
        self._placed: OrderedDict[bytes, tuple[int, float]] = OrderedDict()  # oldest first
        self._lock = threading.Lock()

    def note(self, node: int, keys: Sequence[bytes], now: float) -> None:
        """Remember that node `node` has these blocks."""
        with self._lock:
            for key in keys:
                self._placed[key] = node, now + PLACED_S
                self._placed.move_to_end(key)
            while len(self._placed) > PLACED_MAX:
                self._placed.popitem(last=False)

    def forget(self, keys: Sequence[bytes]) -> None:
        """Forget blocks that were removed."""
        with self._lock:
            for key in keys:
                self._placed.pop(key, None)

    def added_to(
        self, located: list[tuple[int, ...]], keys: Sequence[bytes], now: float
    ) -> list[tuple[int, ...]]:
        """The directory's holders of `keys` (`located`), with the recent placements added."""
        if not self._placed:
            return located
        with self._lock:
            while self._placed and next(iter(self._placed.values()))[1] <= now:
                self._placed.popitem(last=False)
            found = list(located)
            for index, key in enumerate(keys):
                node, _ = self._placed.get(key, (0, 0.0))
                if node and node not in found[index]:
                    found[index] = *found[index], node
        return found


def names_of(records: dict[int, NodeRecord]) -> dict[int, str]:
    """A display name per node: its name, with its number if another node has the same name."""
    names = [record.name for record in records.values()]
    return {
        number: record.name if names.count(record.name) == 1 else f"{record.name} ({number})"
        for number, record in records.items()
    }
