"""What a get returns: blocks in the memory of the node on this host, under a lease, or copies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self, overload

from ...after_fork import OfOneProcess
from ...errors import ClientClosed, InvalidInput, StaleLease
from ...node.core import messages
from ..blocks.block_places import BlockPlaces
from ..blocks.block_views import Block, Blocks

if TYPE_CHECKING:
    from ..connection.node_link import NodeLink


class LeasedBlocks(OfOneProcess, Blocks):
    """`Blocks` in the pool's memory, under a lease until `release()` or the `with` block's end."""

    def __init__(self, blocks: Blocks, lease: int, link: NodeLink | None) -> None:
        super().__init__(blocks.prefix, len(blocks), blocks.reason, blocks._make)
        self._lease = lease
        self._link = link
        self._released = False

    @overload
    def __getitem__(self, index: int) -> Block: ...
    @overload
    def __getitem__(self, index: slice) -> list[Block]: ...
    def __getitem__(self, index: int | slice) -> Block | list[Block]:
        if self._released:
            raise ClientClosed("these blocks were released; use them inside the `with` block")
        if self._link is not None:
            self._check_process()
        return super().__getitem__(index)

    @property
    def released(self) -> bool:
        """Whether `release` was called."""
        return self._released

    def places(self) -> BlockPlaces:
        """Where the blocks lie, for other processes of this host that have mapped the same node's
        memory (`Client.region`); valid until `release`. Raises InvalidInput for copies, StaleLease
        if the node was restarted, and ClientClosed after `release`."""
        if self._link is None:
            raise InvalidInput("these blocks are copies in this process's own memory")
        mapped, block_bytes = self._link.mapping.mapped, self.prefix.schema.block_bytes
        base = _address(mapped.memory)
        offsets = tuple(_address(self[index].memory) - base for index in range(len(self)))
        if not mapped.has(offsets, block_bytes):
            raise StaleLease("these blocks are of a node that was restarted")
        return BlockPlaces(mapped.identity, offsets, block_bytes)

    def release(self) -> None:
        """Release the lease and invalidate its views. Raises StaleLease the second time."""
        if self._released:
            raise StaleLease("these blocks were released before")
        self._released = True
        for block in self._made.values():
            block.let_go()
        if self._lease and self._link is not None and not self._inherited:
            self._link.post(messages.Release(0, self._lease))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._released:
            self.release()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.__exit__()


def _address(memory: Any) -> int:
    return int(memory.__array_interface__["data"][0])
