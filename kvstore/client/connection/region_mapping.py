"""A client's mapping of a node's DRAM region: read-only and, once the client writes, writable too.

A client that only reads has no writable mapping. A client that reserves maps the region a second
time, and only slots are views of that mapping; arrays that a get or a stream hands out never are.
So one operation in place on a leased block, from whatever code, ends the process that made it and
damages no block. docs/decisions/shared-memory.md has what a mapping for each reservation would
cost.
"""

from __future__ import annotations

import contextlib
import os
import threading
from typing import TYPE_CHECKING

from tiffin.messenger.errors import RegionError
from tiffin.messenger.shm.region import Region
from tiffin.messenger.signal_safe import uninterrupted

from ...errors import TierUnavailable
from ...node.core import messages
from ..blocks.block_places import MappedRegion, RegionId

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]


class Mapping:
    """`region`, a read-only mapping, and a writable mapping of the same memory beside it.
    Thread-safe. `mapped`: the read-only one as it may be kept after `close`.

    `owned`: the node's own writable mapping, where the node runs in this process; a client there
    never needs a third mapping.
    """

    def __init__(self, region: Region, owned: Region | None = None) -> None:
        self.memory: Bytes = region.array
        status = os.fstat(region.fd)
        self.mapped = MappedRegion(RegionId(status.st_dev, status.st_ino), self.memory)
        self._region = region
        self._owned = owned
        self._second: Region | None = None  # the client's own writable mapping
        self._written: Bytes | None = None
        self._lock = threading.Lock()

    @classmethod
    def beside(cls, region: Region) -> Mapping:
        """A mapping for a client of a node in this process; `region` is the node's writable
        mapping. Raises TierUnavailable."""
        with _refusals():
            return cls(_again(region), owned=region)

    def of(self, request: messages.Request) -> Bytes:
        """The array that the offsets in the reply to `request` are for: writable for slots,
        read-only for all else. Called before the request is sent, so that an error leaves nothing
        reserved.

        Raises TierUnavailable if the region can't be mapped once more.
        """
        if not isinstance(request, messages.Reserve):
            return self.memory
        return uninterrupted(self.writable) if self._written is None else self._written

    def writable(self) -> Bytes:
        """The same bytes, writable; mapped at the first call. Raises TierUnavailable."""
        with self._lock:
            if self._written is None:
                with _refusals():
                    if self._owned is None:
                        self._second = _again(self._region, writable=True)
                        self._written = self._second.array
                    else:
                        self._written = self._owned.array
            return self._written

    @property
    def all(self) -> tuple[Bytes, ...]:
        """The arrays that are mapped now, the same ones each time: the read-only one and, once the
        client has reserved, the writable one."""
        written = self._written
        return (self.memory,) if written is None else (self.memory, written)

    def populate(self) -> None:
        """Fill the page tables for reading: about 0.05 s per GiB, instead of a fault per 64 KiB.
        Raises TierUnavailable."""
        with _refusals():
            self._region.populate()

    def close(self) -> None:
        """Unmap once the last view is gone."""
        with self._lock:
            self._region.close()
            if self._second is not None:
                self._second.close()


def _again(region: Region, *, writable: bool = False) -> Region:
    return Region.attach(os.dup(region.fd), region.nbytes, writable=writable)


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """Turn mapping errors into TierUnavailable: the process is out of descriptors, memory or
    address space, or the node was closed."""
    try:
        yield
    except (RegionError, OSError) as error:
        raise TierUnavailable(f"the node's memory can't be mapped here: {error}") from error
