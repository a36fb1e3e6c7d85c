"""Shared by the measurements: the sizes of a run, and the measured device."""

from __future__ import annotations

from dataclasses import dataclass

from ..kernels.setting import DeviceSetting
from ..store.setting import KIB, MIB


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a run. The defaults are the run that `docs/benchmarks.md` shows."""

    rounds: int = 20
    block_bytes: int = 64 * MIB  # Llama-3-8B: 512 tokens of 32 layers
    blocks: int = 4
    layers: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    block_tokens: int = 512
    page_tokens: int = 16
    paged_blocks: int = 8
    piece_bytes: tuple[int, ...] = (4 * KIB, 8 * KIB, 16 * KIB)
    pieces_bytes: int = 256 * MIB
    # A decode step reads all weights for a few tokens: matrices of the size of Llama-3-8B's MLP,
    # more of them than fit into any cache.
    decode_batch: int = 32
    decode_shape: tuple[int, int] = (4096, 14_336)
    decode_layers: int = 16
    decode_steps: int = 4
    transfer_bytes: int = 1024 * MIB
    busy_edge: int = 8192  # edge of the square matrices that keep all SMs busy

    @classmethod
    def quick(cls) -> Sizes:
        """Fewer rounds and blocks; the same shapes."""
        return cls(rounds=5, blocks=2, paged_blocks=4, pieces_bytes=128 * MIB)


class Setting(DeviceSetting[Sizes]):
    """One run of the HBM tier's measurements."""

    __slots__ = ()
