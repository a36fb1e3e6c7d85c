"""Limits on a server's connections, and which of them are evicted for new ones. Pure.

A connection is a *stranger* until a request on it was authorised. Strangers have limits of their
own, in all and per peer, so that a client that opens idle connections takes no place from clients
with a token. A new connection is never refused, because it may belong to a client with a token:
when there are too many strangers, the one that was silent for longest is evicted.
"""

from __future__ import annotations

import ipaddress
from collections import OrderedDict
from dataclasses import dataclass
from typing import Generic, TypeVar

C = TypeVar("C")

# The ASGI extension by which an app reports that it has authorised a request.
PROOF = "tiffin.proof"

# The per-peer limit does not evict a connection this young. A client sends its request as soon as
# it is connected, but of thousands that connect at once the server accepts all before it reads the
# first request.
GRACE_S = 1.0
# Default limit per address. Behind a proxy all clients share one address, so operators can change
# it by an option and a setting.
PER_PEER = 256
# One host has such a network for itself, and any number of addresses in it.
_V6_PREFIX = 64


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """`connections`: the most authorised connections. `strangers`: the most strangers in all, and
    `per_peer` of one address (IPv6: of one /64). `head_s`: timeout for a request's head, and for
    anything else for which no handler waits."""

    connections: int = 4096
    strangers: int = 1024
    per_peer: int = PER_PEER
    head_s: float = 10.0


class Connections(Generic[C]):
    """The table of all connections of one server."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self.evicted = 0
        self._proven: set[C] = set()
        # Ordered by the time of the last request, the longest silent first: all, and per peer.
        self._strangers: OrderedDict[C, tuple[str, float]] = OrderedDict()
        self._of_peer: dict[str, OrderedDict[C, None]] = {}

    def __len__(self) -> int:
        return len(self._proven) + len(self._strangers)

    def came(self, connection: C, address: str, now: float) -> list[C]:
        """Add a new connection. Returns the connections to evict, which are removed here."""
        peer = peer_of(address)
        self._strangers[connection] = (peer, now)
        same = self._of_peer.setdefault(peer, OrderedDict())
        same[connection] = None
        gone = []
        while len(same) > self.limits.per_peer:
            oldest = next(iter(same))
            if now < self._strangers[oldest][1] + GRACE_S:
                break
            gone.append(oldest)
            self.left(oldest)
        if len(self._strangers) > self.limits.strangers:
            gone.append(next(iter(self._strangers)))
            self.left(gone[-1])
        self.evicted += len(gone)
        return gone

    def heard(self, connection: C, now: float) -> None:
        """Record that a connection sent a whole request."""
        if connection in self._strangers:
            peer, _ = self._strangers[connection]
            self._strangers[connection] = (peer, now)
            self._strangers.move_to_end(connection)
            self._of_peer[peer].move_to_end(connection)

    def prove(self, connection: C) -> bool:
        """Mark a connection as authorised; False if there are too many of those already. A
        connection that has ended meanwhile is not added."""
        if connection not in self._strangers:
            return True
        if len(self._proven) >= self.limits.connections:
            return False
        self.left(connection)
        self._proven.add(connection)
        return True

    def left(self, connection: C) -> None:
        """Remove a connection that has ended. Idempotent."""
        self._proven.discard(connection)
        peer, _ = self._strangers.pop(connection, ("", 0.0))
        same = self._of_peer.get(peer)
        if same is not None:
            same.pop(connection, None)
            if not same:
                del self._of_peer[peer]


def peer_of(address: str) -> str:
    """The peer of an address: an IPv4 address, also if written as IPv6, or an IPv6 /64."""
    if ":" not in address:
        return address
    try:
        found = ipaddress.IPv6Address(address.partition("%")[0])
    except ValueError:
        return address
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(ipaddress.IPv6Network((found, _V6_PREFIX), strict=False).network_address)
