"""LMCache's storage backends in a process, run by a Python with `lmcache`.

    lmcache_store.py PLACEMENT URL BLOCK_BYTES BLOCKS

PLACEMENT `process` is its LocalCPUBackend, the pool of an engine's own process; `tcp` is its
RemoteBackend before the server of `lmcache.v1.server` at URL.

Verbs: `put` and `get` time batches of all blocks; `hash` times the keys of a prompt's chunks.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from typing import Any

from serving import serve, take_stdout, timed  # type: ignore[import-not-found]

_LAYERS, _TOKENS = 32, 512
_VALUE_BYTES = 2  # of bfloat16
_TIMEOUT_S = 120.0


class Store:
    """A backend, with the blocks in tensors of this process."""

    def __init__(self, placement: str, url: str, block_bytes: int, blocks: int) -> None:
        import torch
        from lmcache.utils import CacheEngineKey  # type: ignore[import-not-found]
        from lmcache.v1.config import LMCacheEngineConfig  # type: ignore[import-not-found]
        from lmcache.v1.memory_management import MemoryFormat  # type: ignore[import-not-found]
        from lmcache.v1.metadata import LMCacheMetadata  # type: ignore[import-not-found]
        from lmcache.v1.storage_backend.local_cpu_backend import (  # type: ignore[import-not-found]
            LocalCPUBackend,
        )

        torch.set_num_threads(1)  # our copies have one thread too
        width = block_bytes // (2 * _LAYERS * _TOKENS * _VALUE_BYTES)
        self.shape = torch.Size([2, _LAYERS, _TOKENS, width])
        self.dtype, self.format = torch.bfloat16, MemoryFormat.KV_2LTD
        self.sources = [torch.randn(self.shape).to(self.dtype) for _ in range(blocks)]
        self.targets = [torch.zeros(self.shape, dtype=self.dtype) for _ in range(blocks)]
        self.keys = [CacheEngineKey("bench", 1, 0, index, self.dtype) for index in range(blocks)]
        # Its pool rounds up; four times the blocks, so that it evicts nothing.
        gigabytes = max(0.25, 4 * blocks * block_bytes / (1 << 30))
        remote = {"remote_url": url, "remote_serde": "naive", "blocking_timeout_secs": 60}
        config = LMCacheEngineConfig.from_defaults(
            chunk_size=_TOKENS,
            local_cpu=True,
            max_local_cpu_size=gigabytes,
            lmcache_instance_id="bench",
            **(remote if placement == "tcp" else {}),
        )
        config.extra_config = {}
        metadata = LMCacheMetadata(
            model_name="bench",
            world_size=1,
            local_world_size=1,
            worker_id=0,
            local_worker_id=0,
            kv_dtype=self.dtype,
            kv_shape=(_LAYERS, 2, _TOKENS, 1, width),
            chunk_size=_TOKENS,
        )
        self.pool = LocalCPUBackend(config, metadata, dst_device="cpu")
        self.pool.memory_allocator.buffer.zero_()  # touched, as our node's is
        self.remote = _remote(config, metadata, self.pool) if placement == "tcp" else None
        # What an engine would have in the pool already: the remote backend sends from there.
        self.staged = [self._allocate(one) for one in self.sources] if self.remote else []
        self._verify()

    def put(self, calls: int) -> list[float]:
        """Put all blocks."""
        if self.remote is not None:
            return timed(calls, self._put_remote)  # type: ignore[no-any-return]
        return timed(calls, self._put, self._remove)  # type: ignore[no-any-return]

    def get(self, calls: int) -> list[float]:
        """Get all blocks into this process's memory."""
        action = self._get if self.remote is None else self._get_remote
        return timed(calls, action)  # type: ignore[no-any-return]

    def _allocate(self, source: Any) -> Any:
        held = self.pool.allocate(self.shape, self.dtype, self.format)
        held.tensor.copy_(source)
        return held

    def _put(self) -> None:
        for key, source in zip(self.keys, self.sources):  # noqa: B905 - runs on any Python
            held = self._allocate(source)
            self.pool.submit_put_task(key, held)
            held.ref_count_down()

    def _get(self) -> None:
        for held, target in zip(self.pool.batched_get_blocking(self.keys), self.targets):  # noqa: B905
            target.copy_(held.tensor)
            held.ref_count_down()

    def _remove(self) -> None:
        for key in self.keys:
            self.pool.remove(key)

    def _put_remote(self) -> None:
        """A put returns before the server has the bytes, so a look-up follows: the server answers
        one connection in order."""
        assert self.remote is not None
        for key, held in zip(self.keys, self.staged):  # noqa: B905
            self.remote.submit_put_task(key, held).result(_TIMEOUT_S)
        _check(self.remote.contains(self.keys[-1]), "contains")

    def _get_remote(self) -> None:
        assert self.remote is not None
        for held in self.remote.batched_get_blocking(self.keys):
            _check(held is not None, "batched_get_blocking")
            held.ref_count_down()

    def _verify(self) -> None:
        """The bytes that come back are those that were put."""
        import torch

        if self.remote is None:
            self._put()
            self._get()
            found = self.targets
        else:
            self._put_remote()
            held = self.remote.batched_get_blocking(self.keys)
            found = [one.tensor.clone() for one in held]
            for one in held:
                one.ref_count_down()
        for one, source in zip(found, self.sources):  # noqa: B905
            same = torch.equal(one.view(torch.uint8).flatten(), source.view(torch.uint8).flatten())
            _check(same, "comparing the bytes")


def _remote(config: Any, metadata: Any, pool: Any) -> Any:
    from lmcache.v1.storage_backend.remote_backend import (  # type: ignore[import-not-found]
        RemoteBackend,
    )

    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    remote = RemoteBackend(config, metadata, loop, pool, dst_device="cpu")
    _check(remote.connection is not None, "connecting to the server")
    return remote


def _hash(tokens: list[int], calls: int) -> list[float]:
    """The chain of hashes of a prompt's chunks, as LMCache's server makes it by default."""
    from lmcache.v1.multiprocess.token_hasher import TokenHasher  # type: ignore[import-not-found]

    hasher = TokenHasher(_TOKENS, "blake3")
    hasher.compute_chunk_hashes(tokens)
    return timed(calls, lambda: hasher.compute_chunk_hashes(tokens))  # type: ignore[no-any-return]


def _check(holds: bool, what: str) -> None:
    if not holds:
        raise SystemExit(f"{what} failed")


def main() -> None:
    """Serve commands; with no blocks, only `hash`."""
    answers = take_stdout()
    os.environ.update(
        PYTHONHASHSEED="0", LMCACHE_LOG_LEVEL="ERROR", LMCACHE_TRACK_USAGE="false", DO_NOT_TRACK="1"
    )
    placement, url, block_bytes, blocks = sys.argv[1:]
    verbs: dict[str, Any] = {"hash": _hash}
    if int(blocks):
        store = Store(placement, url, int(block_bytes), int(blocks))
        verbs.update(put=store.put, get=store.get)
    serve(answers, verbs)
    answers.flush()
    os._exit(0)  # its threads do not end by themselves


if __name__ == "__main__":
    main()
