"""Reading a peer's leases by NIXL, and by TCP where that fails (`node/onesided.py` is the other
end)."""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
from typing import TYPE_CHECKING

from tiffin.messenger.errors import FrameError, GrantError, PeerLost, TransferTimeout
from tiffin.messenger.messenger import Messenger
from tiffin.messenger.transport import Range

from ..errors import DeadlineExceeded, InvalidInput, TiffinError
from ..link import GRACE_S
from ..node import messages

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tiffin.messenger.nixl import NixlTransport
    from tiffin.messenger.nixl_agent import NixlAgent

    from .peer import Peer

log = logging.getLogger(__name__)

DESCRIBE_TIMEOUT_S = 5.0
# A node that was restarted is another agent: ask again what it offers after so long.
_ASK_AGAIN_S = 30.0


@functools.cache
def process_agent() -> NixlAgent:
    """This process's one agent, made when it is first needed. Raises InvalidInput without NIXL."""
    from tiffin.messenger.nixl import NixlUnavailable
    from tiffin.messenger.nixl_agent import NixlAgent

    try:
        return NixlAgent("tiffin-client")
    except NixlUnavailable as error:
        raise InvalidInput(f"nixl=true can't work here: {error}") from error


os.register_at_fork(after_in_child=process_agent.cache_clear)


class OneSided:
    """One peer's way for large reads: NIXL first, if the node offers it, and TCP behind it."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._lock = threading.Lock()
        self._leases: dict[int, Sequence[Range]] = {}
        self._nixl: NixlTransport | None = None
        self._messenger: Messenger | None = None
        self._asked_at = float("-inf")

    def messenger(self, deadline: float) -> Messenger | None:
        """What to read with; None if the node offers nothing that we can use, or has not said so
        by the deadline."""
        if not self._lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            return None  # another thread asks
        try:
            now = time.monotonic()
            if self._messenger is None and now - self._asked_at > _ASK_AGAIN_S:
                self._asked_at = now
                self._connect(max(0.0, min(DESCRIBE_TIMEOUT_S, deadline - now - GRACE_S)))
            return self._messenger
        finally:
            self._lock.release()

    def _connect(self, timeout_s: float) -> None:
        from tiffin.messenger.nixl import NixlTransport
        from tiffin.messenger.nixl_agent import Description

        try:
            found = self._peer.call(messages.Describe(0), timeout_s)
        except TiffinError as error:
            log.info("%s does not say whether it offers NIXL: %s", self._peer.label, error)
            return
        if not found.metadata:
            log.info("%s offers no NIXL; reading over TCP", self._peer.label)
            return
        described = Description(
            found.metadata, found.base_address, found.nbytes, found.memory, found.device
        )
        try:
            self._nixl = NixlTransport(process_agent(), described, self._resolve, self._confirm)
        except FrameError as error:
            log.warning("%s: %s; reading over TCP", self._peer.label, error)
            return
        # Whoever reads has room in flight already, whichever way it goes (`engine._turn`).
        self._messenger = Messenger([self._nixl, self._peer.transport], budget=None)

    def hold(self, reply: messages.Leased) -> None:
        """A lease to be read: where its extents lie in the node's region."""
        places = [Range(*place) for place in zip(reply.offsets, reply.lengths, strict=True)]
        with self._lock:
            self._leases[reply.lease] = places

    def let_go(self, lease: int) -> None:
        """The lease is over."""
        with self._lock:
            self._leases.pop(lease, None)

    def forget(self) -> None:
        """The way failed: the node may have been restarted. Ask it again, later."""
        with self._lock:
            nixl, self._nixl, self._messenger = self._nixl, None, None
        if nixl is not None:
            nixl.close()

    def _resolve(self, grant: int, *, writes: bool) -> Sequence[Range]:
        with self._lock:
            places = self._leases.get(grant)
        if places is None or writes:
            raise GrantError(f"lease {grant} is not one to read from")
        return places

    def _confirm(self, grant: int, *, deadline: float) -> bool:
        left_s = max(0.0, deadline - time.monotonic())
        try:
            return bool(self._peer.call(messages.Confirm(0, grant), left_s).count == 1)
        except DeadlineExceeded as error:
            raise TransferTimeout(str(error)) from error
        except TiffinError as error:
            raise PeerLost(str(error)) from error
