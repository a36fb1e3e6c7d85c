"""An attacker that can write to a pool's Redis, and does not know its token."""

from __future__ import annotations

import secrets
import socket
import struct
import threading
from typing import TYPE_CHECKING, Self

import msgspec

from tiffin.kvstore.directory.node_records import encode_entry, identity_of
from tiffin.kvstore.directory.testing import record

if TYPE_CHECKING:
    import redis

    from tiffin.kvstore.directory import NodeRecord

NEVER = struct.pack(">Q", (1 << 63) - 1)


class Forger:
    """Writes into the membership and the locations of one pool."""

    def __init__(self, client: redis.Redis, pool: str) -> None:
        self.client = client
        self.pool = pool
        self.nodes = f"tiffin:{{{pool}:m}}:nodes"

    def entries(self) -> dict[bytes, bytes]:
        """The membership: number -> entry."""
        return dict(self.client.hgetall(self.nodes))

    def place(self, number: int | bytes, entry: bytes) -> None:
        """Put an entry under a number, for ever."""
        self.client.hset(self.nodes, number, NEVER + entry[8:])

    def claim(self, number: int, address: str, **fields: object) -> None:
        """Register a node with a new name at this address, in the previous version's format."""
        self.place(number, bytes(8) + _plain(_node(number, address, **fields)))

    def claim_stamped(self, number: int, address: str, **fields: object) -> None:
        """The same in this version's format, with another token than the pool's."""
        seconds, _ = self.client.time()
        made = _node(number, address, **fields)
        entry = encode_entry(made, seconds * 1000, self.pool, secrets.token_bytes(32))
        self.place(number, bytes(8) + entry)

    def flood(self, count: int, address: str) -> None:
        """Register so many nodes, of both versions, all with more room than any real node."""
        for number in range(1, count + 1):
            claim = self.claim if number % 2 else self.claim_stamped
            claim(number, address, free_bytes=1 << 60, capacity_bytes=1 << 60)

    def locate(self, keys: list[bytes], numbers: list[int]) -> None:
        """Write that these nodes have these blocks."""
        value = b"".join(struct.pack("<I", number) for number in numbers)
        for key in keys:
            self.client.set(f"tiffin:{{{self.pool}:0}}:b:".encode() + key, value)


def _node(number: int, address: str, **fields: object) -> NodeRecord:
    return record(f"forged-{number}", number=number, address=address, **fields)


def _plain(node: NodeRecord) -> bytes:
    return identity_of(node) + msgspec.msgpack.encode(node)


class Trap:
    """A port to which no correct process connects; counts its connections, and sends nothing."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._socket.getsockname()[1]}"
        self.caught = 0
        self._held: list[socket.socket] = []
        self._thread = threading.Thread(target=self._accept, name="trap", daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._socket.accept()
            except OSError:
                return
            self.caught += 1
            self._held.append(sock)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        for sock in (self._socket, *self._held):
            sock.close()
