"""Reads of a peer's leased blocks by NIXL, and by TCP where that fails (`node/nixl_grants.py` is
the other end)."""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
from typing import TYPE_CHECKING, Any

from tiffin.messenger.errors import FrameError, GrantError, PeerLost, TransferTimeout
from tiffin.messenger.messenger import Messenger
from tiffin.messenger.transport import Range

from ....deadlines import GRACE_S, until_s
from ....errors import DeadlineExceeded, InvalidInput, TiffinError
from ....node.core import messages

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tiffin.messenger.nixl.agent import NixlAgent
    from tiffin.messenger.nixl.nixl_transport import NixlTransport
    from tiffin.messenger.transport import Transport

log = logging.getLogger(__name__)

DESCRIBE_TIMEOUT_S = 5.0
# A restarted node is another NIXL agent: the client asks again after this long what a node offers.
_ASK_AGAIN_S = 30.0


@functools.cache
def process_agent() -> NixlAgent:
    """This process's one NIXL agent, made at the first call. Raises InvalidInput without NIXL."""
    from tiffin.messenger.nixl.agent import NixlAgent
    from tiffin.messenger.nixl.bindings import NixlUnavailable

    try:
        return NixlAgent("tiffin-client")
    except NixlUnavailable as error:
        raise InvalidInput(f"nixl=true can't work here: {error}") from error


os.register_at_fork(after_in_child=process_agent.cache_clear)


class OneSided:
    """The transport of large reads from one peer: NIXL, if the node offers it, with TCP as the
    fallback."""

    def __init__(
        self,
        label: str,
        call: Callable[[messages.Request, float], Any],
        tcp: Transport,
    ) -> None:
        """`call` sends a request to the peer, `tcp` reads its blocks without NIXL."""
        self._label = label
        self._call = call
        self._tcp = tcp
        self._lock = threading.Lock()
        self._leases: dict[int, Sequence[Range]] = {}
        self._nixl: NixlTransport | None = None
        self._messenger: Messenger | None = None
        self._asked_at = float("-inf")

    def messenger(self, deadline: float) -> Messenger | None:
        """The messenger to read with; None if the node offers no NIXL that this process can use, or
        has not answered by the deadline."""
        if not self._lock.acquire(timeout=until_s(deadline)):
            return None  # another thread is asking the node
        try:
            now = time.monotonic()
            if self._messenger is None and now - self._asked_at > _ASK_AGAIN_S:
                self._asked_at = now
                self._connect(max(0.0, min(DESCRIBE_TIMEOUT_S, deadline - now - GRACE_S)))
            return self._messenger
        finally:
            self._lock.release()

    def _connect(self, timeout_s: float) -> None:
        from tiffin.messenger.nixl.agent import Description
        from tiffin.messenger.nixl.nixl_transport import NixlTransport

        try:
            found = self._call(messages.Describe(0), timeout_s)
        except TiffinError as error:
            log.info("%s does not say whether it offers NIXL: %s", self._label, error)
            return
        if not found.metadata:
            log.info("%s offers no NIXL; reading over TCP", self._label)
            return
        described = Description(found.metadata, found.base_address, found.nbytes)
        try:
            self._nixl = NixlTransport(process_agent(), described, self._resolve, self._confirm)
        except FrameError as error:
            log.warning("%s: %s; reading over TCP", self._label, error)
            return
        self._messenger = Messenger([self._nixl, self._tcp])

    def hold(self, reply: messages.Leased) -> None:
        """Register a lease for reads: where its extents lie in the node's region."""
        places = [Range(*place) for place in zip(reply.offsets, reply.lengths, strict=True)]
        with self._lock:
            self._leases[reply.lease] = places

    def let_go(self, lease: int) -> None:
        """Remove a lease: its reads are over."""
        with self._lock:
            self._leases.pop(lease, None)

    def forget(self) -> None:
        """Drop the NIXL transport after a failure: the node may have been restarted. A later call
        of `messenger` asks it again."""
        with self._lock:
            nixl, self._nixl, self._messenger = self._nixl, None, None
        if nixl is not None:
            nixl.close()

    def _resolve(self, grant: int) -> Sequence[Range]:
        with self._lock:
            places = self._leases.get(grant)
        if places is None:
            raise GrantError(f"lease {grant} is not one to read from")
        return places

    def _confirm(self, grant: int, *, deadline: float) -> bool:
        left_s = until_s(deadline)
        try:
            return bool(self._call(messages.Confirm(0, grant), left_s).count == 1)
        except DeadlineExceeded as error:
            raise TransferTimeout(str(error)) from error
        except TiffinError as error:
            raise PeerLost(str(error)) from error
