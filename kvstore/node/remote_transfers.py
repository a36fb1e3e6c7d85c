"""Transfers of a lease's bytes for a remote session; the extents are held during a transfer."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from tiffin.messenger.errors import GrantError

from ..errors import StaleLease

if TYPE_CHECKING:
    from collections.abc import Callable

    from tiffin.messenger.shm.host_copy import ByteArray

    from .core.node_core import NodeCore
    from .core.records import Replica, Session


class RemoteTransfers:
    """Begins and ends transfers in a node's core, under the node's lock."""

    def __init__(
        self,
        core: NodeCore,
        lock: AbstractContextManager[object],
        view: Callable[[Replica], ByteArray],
        after: Callable[[], None],
    ) -> None:
        """`view` returns a replica's bytes; `after` retries waiting requests after a transfer."""
        self._core = core
        self._lock = lock
        self._view = view
        self._after = after

    def begin(
        self, session: Session, lease_id: int, *, writes: bool
    ) -> tuple[list[Replica], list[ByteArray]]:
        """Hold a lease's replicas; returns them and their transferable bytes. Raises GrantError."""
        with self._lock:
            try:
                replicas = self._core.begin_transfer(session, lease_id, writes=writes)
            except StaleLease as error:
                raise GrantError(str(error)) from error
            followed = session.leases[lease_id].followed
            exposed = followed.exposed if followed is not None else None
        try:
            if exposed is None:
                return replicas, [self._view(replica) for replica in replicas]
            return replicas, [self._view(r)[at : at + length] for r, at, length in exposed]
        except BaseException:
            self.end(session, lease_id, replicas)
            raise

    def end(self, session: Session, lease_id: int, replicas: list[Replica]) -> None:
        """Unhold the replicas that `begin` held."""
        with self._lock:
            self._core.end_transfer(session, lease_id, replicas)
            self._after()


class RemoteTransfer(AbstractContextManager["list[ByteArray]"]):
    """The context manager of one transfer. A class, because a generator takes two microseconds
    longer."""

    __slots__ = ("_lease_id", "_replicas", "_session", "_transfers", "_writes")

    def __init__(
        self, transfers: RemoteTransfers, session: Session, lease_id: int, *, writes: bool
    ) -> None:
        self._transfers = transfers
        self._session = session
        self._lease_id = lease_id
        self._writes = writes

    def __enter__(self) -> list[ByteArray]:
        begun = self._transfers.begin(self._session, self._lease_id, writes=self._writes)
        self._replicas, arrays = begun
        return arrays

    def __exit__(self, *_: object) -> None:
        self._transfers.end(self._session, self._lease_id, self._replicas)
