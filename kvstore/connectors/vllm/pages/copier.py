"""What copies between an engine's pages and blocks: the interface of both copiers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]


class PageLoad(NamedTuple):
    """`pages` to fill, in order, from the blocks without their first `skipped` pages."""

    blocks: Sequence[Bytes]
    pages: Sequence[int]
    skipped: int = 0


class EngineCopier(Protocol):
    """Copies pages of one rank. `pages`: of a block. `block_bytes`: of a block, this rank's.
    `layerwise_bytes`: from how many bytes on it pays to copy loads beside a forward pass.
    Thread-safe; calls return when the bytes are where they belong."""

    pages: int
    block_bytes: int
    layerwise_bytes: float

    def step_begins(self) -> None:
        """The engine has ordered loads. Call it in the engine's thread: later scatters write only
        when all steps that it had begun before have ended."""

    def close(self) -> None:
        """No call follows, and none is in progress."""

    def scatter(self, blocks: Sequence[Bytes], pages: Sequence[int], skipped: int = 0) -> None:
        """Fill `pages`, in order, from the blocks without their first `skipped` pages. A block is
        its whole payload, or only this rank's bytes."""

    def scatter_layers(self, loads: Sequence[PageLoad]) -> Iterator[tuple[int, Any]]:
        """`scatter` all of these, layer after layer. Yields how many leading layers are in the
        pages, for all loads, once an event has come: `await_layers` takes it. At its end all of
        them are."""

    def scatter_layer(
        self, layer: int, blocks: Sequence[Bytes], pages: Sequence[int], skipped: int = 0
    ) -> None:
        """`scatter` of one layer; `blocks` have only this rank's bytes of it."""

    def await_layers(self, event: Any) -> None:
        """Call it in the engine's thread: what the engine launches there later comes after `event`,
        of `scatter_layers`."""

    def mark(self) -> Any:
        """What the engine has computed so far, for `gather_layer`. Call it in the engine's
        thread."""

    def gather_layer(
        self, layer: int, blocks: Sequence[Bytes], pages: Sequence[int], computed: Any
    ) -> None:
        """`gather` of one layer, once the device has done what was `computed` at that mark."""

    def gather(self, blocks: Sequence[Bytes], pages: Sequence[int]) -> None:
        """Fill this rank's bytes of the blocks' whole payloads from `pages`, in order."""
