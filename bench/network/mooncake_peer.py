"""A process of Mooncake Store, run by a Python with `mooncake`; it imports no module of Tiffin.

    python mooncake_peer.py holder MASTER SEGMENT_BYTES
    python mooncake_peer.py reader MASTER BLOCK_BYTES BLOCKS

A holder provides memory until its standard input ends. A reader puts blocks and then reads lines
`COUNT TIMES`: it gets the first COUNT blocks, one `get_into` after the other, TIMES times, and
answers with a JSON list of seconds. Both print `ready` first.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any, TextIO

_LOCAL_BUFFER_BYTES = 256 << 20


def _connect(master: str, segment_bytes: int) -> Any:
    from mooncake.store import MooncakeDistributedStore  # type: ignore[import-not-found]

    store = MooncakeDistributedStore()
    code = store.setup(
        "127.0.0.1", "P2PHANDSHAKE", segment_bytes, _LOCAL_BUFFER_BYTES, "tcp", "", master
    )
    if code:
        raise SystemExit(f"MooncakeDistributedStore.setup failed with {code}")
    return store


def _hold(answers: TextIO, master: str, segment_bytes: int) -> None:
    store = _connect(master, segment_bytes)
    print("ready", file=answers, flush=True)
    sys.stdin.read()
    store.close()


def _read(answers: TextIO, master: str, block_bytes: int, blocks: int) -> None:
    import numpy as np

    store = _connect(master, 0)
    memory = np.empty(blocks * block_bytes, np.uint8)
    memory.reshape(blocks, -1)[:] = np.random.default_rng(0).integers(0, 256, block_bytes, np.uint8)
    start = memory.ctypes.data
    places = [start + index * block_bytes for index in range(blocks)]
    keys = [f"bench-{block_bytes}-{index}" for index in range(blocks)]
    _check(store.register_buffer(start, memory.nbytes), 0, "register_buffer")
    for key, place in zip(keys, places):  # noqa: B905 - runs on any Python
        _check(store.put_from(key, place, block_bytes), 0, f"put_from {key}")
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        count, times = map(int, line.split())
        seconds = []
        for _ in range(times):
            start_s = time.perf_counter()
            for key, place in zip(keys[:count], places):  # noqa: B905
                _check(store.get_into(key, place, block_bytes), block_bytes, f"get_into {key}")
            seconds.append(time.perf_counter() - start_s)
        print(json.dumps(seconds), file=answers, flush=True)
    store.unregister_buffer(start)
    store.close()


def _check(result: int, wanted: int, what: str) -> None:
    if result != wanted:
        raise SystemExit(f"{what} failed with {result}")


def main() -> None:
    """Run a holder or a reader, as the arguments say."""
    del sys.path[0]  # this folder, which has a module `mooncake` of its own
    # The library writes to standard output too, so answers go to a copy of that descriptor.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    role, master, *numbers = sys.argv[1:]
    if role == "holder":
        _hold(answers, master, int(numbers[0]))
    else:
        _read(answers, master, int(numbers[0]), int(numbers[1]))


if __name__ == "__main__":
    main()
