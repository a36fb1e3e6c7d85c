"""Who is in the pool: what a client needs of a directory, and what it adds or does without it."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Protocol

from ..directory.base import NodeRecord
from ..errors import DirectoryUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# A node tells the directory of a new block within 50 ms, and clients may know its membership a
# second late. After this, what the directory says is right.
PLACED_S = 3.0
# Blocks of 33 million tokens, some 10 MiB.
PLACED_MAX = 65_536


class Members(Protocol):
    """What a client needs of a directory; every `Directory` has it."""

    def nodes(self) -> dict[int, NodeRecord]:
        """The live nodes by number."""
        ...

    def locate(self, keys: Sequence[bytes]) -> list[tuple[int, ...]]:
        """Per key, the numbers of the nodes to ask for it."""
        ...

    def close(self) -> None:
        """Give back connections."""
        ...


class FixedMembers:
    """The nodes of a `tiffin://host:port,host:port` URL. Each may have every block: ask."""

    def __init__(self, addresses: Sequence[tuple[str, int]]) -> None:
        self._records = {
            number: NodeRecord(
                name=_joined(address),
                address=_joined(address),
                host="",
                socket="",
                capacity_bytes=0,
                free_bytes=0,
                number=number,
            )
            for number, address in enumerate(addresses, start=1)
        }
        self._numbers = tuple(self._records)

    def nodes(self) -> dict[int, NodeRecord]:
        """All of them."""
        return self._records

    def locate(self, keys: Sequence[bytes]) -> list[tuple[int, ...]]:
        """All of them, for every key."""
        return [self._numbers] * len(keys)

    def close(self) -> None:
        """Nothing to give back."""


class HomeNumber:
    """What the directory calls the node behind one unix socket of this host: it gets another number
    with each registration. None while the directory does not know it, or does not answer."""

    def __init__(self, nodes: Callable[[], dict[int, NodeRecord]], host: str, socket: str) -> None:
        self._nodes = nodes
        self._host = host
        self._socket = socket
        self._last = 0

    def __call__(self) -> int | None:
        """The number now."""
        try:
            records = self._nodes()
        except DirectoryUnavailable:
            return self._last or None
        if not self._is_home(records.get(self._last)):
            self._last = max((n for n, r in records.items() if self._is_home(r)), default=0)
        return self._last or None

    def _is_home(self, record: NodeRecord | None) -> bool:
        return record is not None and record.socket == self._socket and record.host == self._host


class Placements:
    """Where this client has put blocks just now: it finds them though the directory does not know
    them yet. Thread-safe. Pure, but for its lock."""

    def __init__(self) -> None:
        self._placed: OrderedDict[bytes, tuple[int, float]] = OrderedDict()  # oldest first
        self._lock = threading.Lock()

    def note(self, node: int, keys: Sequence[bytes], now: float) -> None:
        """Node `node` has these blocks."""
        with self._lock:
            for key in keys:
                self._placed[key] = node, now + PLACED_S
                self._placed.move_to_end(key)
            while len(self._placed) > PLACED_MAX:
                self._placed.popitem(last=False)

    def forget(self, keys: Sequence[bytes]) -> None:
        """They were removed."""
        with self._lock:
            for key in keys:
                self._placed.pop(key, None)

    def added_to(
        self, located: list[tuple[int, ...]], keys: Sequence[bytes], now: float
    ) -> list[tuple[int, ...]]:
        """What a directory said of `keys`, and what is known here."""
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
    """What to call each node: its name, with its number if others are called the same."""
    names = [record.name for record in records.values()]
    return {
        number: record.name if names.count(record.name) == 1 else f"{record.name} ({number})"
        for number, record in records.items()
    }


def _joined(address: tuple[str, int]) -> str:
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
