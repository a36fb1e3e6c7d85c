"""What the measurements share: how large a run is, and the device that is measured."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..store.setting import silent
from .device import surroundings

if TYPE_CHECKING:
    from collections.abc import Callable

    from .device import Machine


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much a run measures. The defaults are the run that `docs/benchmarks.md` shows.

    Llama-3-8B (32 layers of K and V, 8 heads of 128, bf16: blocks of 64 MiB), and latents as
    DeepSeek-V3 has them (61 layers, 512 + 64: 34 MiB).
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
class Setting:
    """One run: its sizes, its device, and whom to tell what is going on."""

    sizes: Sizes
    machine: Machine
    tell: Callable[[str], None] = field(default=silent)

    def surroundings(self) -> dict[str, Any]:
        """The device, for the report and for each row."""
        return surroundings(self.machine)
