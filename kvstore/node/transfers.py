"""Moving a lease's bytes for a remote session: the extents stay what they are meanwhile."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from tiffin.messenger.errors import GrantError

from ..errors import StaleLease

if TYPE_CHECKING:
    from collections.abc import Callable

    from tiffin.messenger.local import ByteArray

    from .core import NodeCore
    from .records import Replica, Session


class Transfers:
    """Begins and ends transfers in a node's core, under its lock."""

    def __init__(
        self,
        core: NodeCore,
        lock: AbstractContextManager[object],
        view: Callable[[Replica], ByteArray],
        after: Callable[[], None],
    ) -> None:
        """`view` is where a replica's bytes lie; `after` lets others go on when one has ended."""
        self._core = core
        self._lock = lock
        self._view = view
        self._after = after

    def begin(
        self, session: Session, lease_id: int, *, writes: bool
    ) -> tuple[list[Replica], list[ByteArray]]:
        """Hold a lease's replicas; also the bytes that may be moved. Raises GrantError."""
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
        """Let go of what `begin` held."""
        with self._lock:
            self._core.end_transfer(session, lease_id, replicas)
            self._after()


class Transfer(AbstractContextManager["list[ByteArray]"]):
    """One transfer, from `with` to the end of the block. A class: a generator takes two
    microseconds longer."""

    __slots__ = ("_lease_id", "_replicas", "_session", "_transfers", "_writes")

    def __init__(
        self, transfers: Transfers, session: Session, lease_id: int, *, writes: bool
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
