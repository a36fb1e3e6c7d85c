"""Lets vLLM's own `OffloadingConnector` run on a CPU, to be compared with: its copies are torch's.

In vLLM the connector copies between a GPU and pinned memory, and refuses other platforms. Here its
scheduler and its manager are used as they are, with another worker, whose host memory is torch's.
Imported by vLLM, by the name in `spec_module_path`.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


class HostWorker(OffloadingWorker):  # type: ignore[misc]
    """Copies all pages of a job in one call of torch, as ours does."""

    def __init__(self, caches: Any, pages_per_chunk: int, chunks: int) -> None:
        self._groups = caches.group_data_refs
        self._pages_per_chunk = pages_per_chunk
        self._done: list[Any] = []
        self._engine = [
            tensor.tensor.view(torch.int8).view(-1, tensor.page_size_bytes)
            for tensor in caches.tensors
        ]
        self._host = [
            torch.zeros((chunks, tensor.page_size_bytes * pages_per_chunk), dtype=torch.int8)
            for tensor in caches.tensors
        ]

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Copy the engine's pages out."""
        return self._copy(job_id, src_spec, dst_spec, store=True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Copy pages back."""
        return self._copy(job_id, dst_spec, src_spec, store=False)

    def _copy(self, job_id: int, engine: Any, host: Any, *, store: bool) -> bool:
        began, nbytes = time.perf_counter(), 0
        inside: list[Any] = []
        outside: list[Any] = []
        page_at = chunk_at = 0
        for group, (size, first) in enumerate(
            zip(engine.group_sizes, engine.block_indices, strict=True)
        ):
            skipped = first % self._pages_per_chunk
            for index in range(size):
                chunk, position = divmod(index + skipped, self._pages_per_chunk)
                page = int(engine.block_ids[page_at + index])
                target = int(host.block_ids[chunk_at + chunk])
                for reference in self._groups[group]:
                    rows, chunks = (
                        self._engine[reference.tensor_idx],
                        self._host[reference.tensor_idx],
                    )
                    length = rows.shape[1]
                    inside.append(rows[page])
                    outside.append(chunks[target, position * length : (position + 1) * length])
                    nbytes += length
            page_at += size
            chunk_at += -(-(size + skipped) // self._pages_per_chunk) if size else 0
        if inside:
            torch._foreach_copy_(*((outside, inside) if store else (inside, outside)))
        taken_s = time.perf_counter() - began
        self._done.append(TransferResult(job_id, True, nbytes, taken_s))
        return True

    def get_finished(self) -> list[Any]:
        """The jobs that ended since the last call."""
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: Any) -> None:
        """Jobs have ended when they were submitted."""

    def shutdown(self) -> None:
        """Let the memory go."""
        self._host.clear()


class HostOffloadingSpec(CPUOffloadingSpec):  # type: ignore[misc]
    """vLLM's specification with `HostWorker`."""

    def get_worker(self, kv_caches: Any) -> Any:
        """The worker, made once."""
        if self._worker is None:
            self._worker: Any = HostWorker(kv_caches, self.blocks_per_chunk, self.num_chunks)
        return self._worker
