"""A client's mapping of its node's memory, pinned for a GPU as long as it is the client's."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from tiffin.messenger.device_driver import DeviceUnavailable
from tiffin.messenger.pinning import Pinned, PinningError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ..client import Client

    Bytes = NDArray[np.uint8]

log = logging.getLogger(__name__)


class PinnedPool:
    """Pins what a client maps, once per mapping: a node that was restarted, or another client, is
    another mapping. Refused, it says so once, and copies go through staging buffers.

    The memory stays mapped while it is pinned, also when the client is closed: `close` it.
    On device "cpu" there is nothing to pin.
    """

    def __init__(self, device: Any) -> None:
        self._device = str(device)
        self._on_gpu = getattr(device, "type", None) == "cuda"
        self._pinned: Pinned | None = None
        self._seen: tuple[int, int] | None = None  # also if it was refused

    def follow(self, client: Client) -> None:
        """Pin the memory that `client` has now, unless that was tried before. About 0.3 s per GiB,
        the first time (an estimate, see `tiffin.messenger.pinning`). Raises ClientClosed."""
        if not self._on_gpu:
            return
        memory = memory_of(client)
        seen = None if memory is None else (memory.ctypes.data, memory.nbytes)
        if seen == self._seen:
            return
        self.close()
        self._seen = seen
        if memory is None:
            return
        try:
            self._pinned = Pinned(memory, self._device)
        except (PinningError, DeviceUnavailable) as error:
            log.warning("the pool's memory is not pinned, so copies take a detour: %s", error)

    def close(self) -> None:
        """Make it ordinary memory again."""
        pinned, self._pinned, self._seen = self._pinned, None, None
        if pinned is None:
            return
        try:
            pinned.close()
        except PinningError as error:
            log.warning("%s", error)


def memory_of(client: Client) -> Bytes | None:
    """The node's memory as this process maps it; None for a client without a node on its host.

    Raises ClientClosed.
    """
    link = getattr(client, "_link", None) or getattr(client, "_home", None)
    return None if link is None else link.memory
