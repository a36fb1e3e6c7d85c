"""Mooncake Store as a client in a process, run by a Python with `mooncake`.

    mooncake_store.py PLACEMENT MASTER SERVER BLOCK_BYTES BLOCKS

PLACEMENT says where the memory is: `tcp`, in another process, by its default; `shared`, in its
`mooncake_client` at SERVER, of which this process maps the memory; `process`, in this one.

Verbs: `put` and `get` time batches of all blocks.
"""

from __future__ import annotations

import ctypes
import sys
import time
from typing import Any

import numpy as np
from serving import serve, take_stdout, timed  # type: ignore[import-not-found]

_BUFFER_BYTES = 256 << 20
_ATTEMPTS = 100


class Store:
    """A client, with its own copy of the blocks in memory that it has registered."""

    def __init__(
        self, placement: str, master: str, server: str, block_bytes: int, blocks: int
    ) -> None:
        from mooncake.store import MooncakeDistributedStore  # type: ignore[import-not-found]

        self.store = MooncakeDistributedStore()
        nbytes = block_bytes * blocks
        if placement == "shared":
            # The blocks have to be in memory that both map, which this client allocates.
            code = self.store.setup_dummy(2 * _BUFFER_BYTES, _BUFFER_BYTES, server)
            _check(code, 0, "setup_dummy")
            start = self.store.alloc_from_mem_pool(nbytes)
            memory = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(start))
        else:
            # Mooncake allocates a segment in pieces of its own sizes and evicts at 95 %.
            segment_bytes = max(_BUFFER_BYTES, 4 * nbytes) if placement == "process" else 0
            code = self.store.setup(
                "127.0.0.1", "P2PHANDSHAKE", segment_bytes, _BUFFER_BYTES, "tcp", "", master
            )
            _check(code, 0, "setup")
            memory = np.empty(nbytes, np.uint8)
            start = memory.ctypes.data
        self.memory = memory.reshape(blocks, block_bytes)
        dice = np.random.default_rng(0)
        self.memory[:] = dice.integers(0, 256, self.memory.shape, np.uint8)
        self.keys = [f"bench-{index}" for index in range(blocks)]
        self.places = [start + index * block_bytes for index in range(blocks)]
        self.lengths = [block_bytes] * blocks
        _check(self.store.register_buffer(start, nbytes), 0, "register_buffer")
        self._verify()

    def put(self, calls: int) -> list[float]:
        """Put all blocks, none of which is there."""
        return timed(calls, self._put, self._remove)  # type: ignore[no-any-return]

    def get(self, calls: int) -> list[float]:
        """Get all blocks into this process's memory."""
        return timed(calls, self._get)  # type: ignore[no-any-return]

    def close(self) -> None:
        """Leave the pool."""
        self.store.close()

    def _put(self) -> None:
        codes = self.store.batch_put_from(self.keys, self.places, self.lengths)
        _check(list(codes), [0] * len(self.keys), "batch_put_from")

    def _get(self) -> None:
        found = self.store.batch_get_into(self.keys, self.places, self.lengths)
        _check(list(found), self.lengths, "batch_get_into")

    def _remove(self) -> None:
        """All blocks, though a get has given them leases of seconds."""
        for _ in range(_ATTEMPTS):
            if self.store.remove_all(True) >= 0:
                return
            time.sleep(0.02)
        raise SystemExit("remove_all failed")

    def _verify(self) -> None:
        """The bytes that come back are those that were put."""
        before = self.memory.copy()
        self._put()
        self.memory[:] = 0
        self._get()
        _check(np.array_equal(before, self.memory), True, "comparing the bytes")


def _check(result: Any, wanted: Any, what: str) -> None:
    if result != wanted:
        raise SystemExit(f"{what} failed with {result}")


def main() -> None:
    """Serve commands."""
    answers = take_stdout()
    placement, master, server, block_bytes, blocks = sys.argv[1:]
    store = Store(placement, master, server, int(block_bytes), int(blocks))
    serve(answers, {"put": store.put, "get": store.get})
    store.close()


if __name__ == "__main__":
    main()
