"""What copies between an engine's pages and blocks: the interface of both copiers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]


class EngineCopier(Protocol):
    """Copies pages of one rank. `pages`: of a block. `block_bytes`: of a block, this rank's.
    Thread-safe; calls return when the bytes are where they belong."""

    pages: int
    block_bytes: int

    def step_begins(self) -> None:
        """The engine has ordered loads. Call it in the engine's thread: later scatters write only
        when all steps that it had begun before have ended."""

    def close(self) -> None:
        """No call follows, and none is in progress."""

    def scatter(self, blocks: Sequence[Bytes], pages: Sequence[int], skipped: int = 0) -> None:
        """Fill `pages`, in order, from the blocks without their first `skipped` pages. A block is
        its whole payload, or only this rank's bytes."""

    def gather(self, blocks: Sequence[Bytes], pages: Sequence[int]) -> None:
        """Fill this rank's bytes of the blocks' whole payloads from `pages`, in order."""
