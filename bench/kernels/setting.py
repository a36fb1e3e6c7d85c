"""Shared by the measurements: the sizes of a run, and the measured device."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

from ..store.setting import silent

if TYPE_CHECKING:
    from collections.abc import Callable

    from .device import Machine

S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a run. The defaults are the run that `docs/benchmarks.md` shows.

    Llama-3-8B (32 layers of K and V, 8 heads of 128, bf16: blocks of 64 MiB), and the latents of
    DeepSeek-V3 (61 layers, 512 + 64: 34 MiB).
    """

    rounds: int = 20
    blocks: int = 8
    block_tokens: int = 512
    page_tokens: tuple[int, ...] = (16, 128)
    layers: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    ranks: int = 8
    latent_layers: int = 61
    latent_dim: int = 576
    scale_tokens: int = 64
    quantised_blocks: int = 4
    calls: int = 200
    call_blocks: int = 64

    @classmethod
    def quick(cls) -> Sizes:
        """Fewer rounds and blocks; the same shapes."""
        return cls(rounds=5, blocks=2, quantised_blocks=1, calls=50)


@dataclass(frozen=True, slots=True)
class DeviceSetting(Generic[S]):
    """One run on a device: its sizes, the device, and a callback for progress."""

    sizes: S
    machine: Machine
    tell: Callable[[str], None] = field(default=silent)


class Setting(DeviceSetting[Sizes]):
    """One run of the kernels' measurements."""

    __slots__ = ()
