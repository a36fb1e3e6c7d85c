"""What a reservation returns: slots that the caller writes in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Self, overload

from ...after_fork import OfOneProcess
from ...errors import InvalidInput, StaleLease
from ...node.core import messages
from ...node.core.records import Kept
from ..blocks.block_views import Slot
from . import block_verbs
from .arguments import verb
from .block_verbs import DEFAULT_TIMEOUT_S, ReservedSlots
from .publish import publish, published_segments

if TYPE_CHECKING:
    from types import TracebackType

    from ...format.keys import Prefix
    from ..connection.node_link import NodeLink


class Slots(OfOneProcess, Sequence[Slot]):
    """A reservation: slots to write in place. As a context manager it commits them at the end, and
    aborts them all after an exception.

    There is a slot only for each block that was not resident. `slots[i].index` is a position in the
    prefix, and so are the entries of `resident` (in the pool already), `busy` (another writer has
    reserved the block) and, after the commit, `stored` and `pending` (this rank's slice is written,
    other ranks' slices are not yet). `reason` is "no_room" if blocks at the end of the prefix got
    no slots.
    """

    def __init__(self, prefix: Prefix, reserved: ReservedSlots, link: NodeLink) -> None:
        self.prefix = prefix
        self.resident = reserved.resident
        self.busy = reserved.busy
        self.reason = reserved.reason
        self.stored: tuple[int, ...] = ()
        self.pending: tuple[int, ...] = ()
        # In a pool: the number of the node with the reservation; remote readers stream from it.
        self.node: int | None = None
        self._slots = reserved.slots
        self._lease = reserved.lease
        self._link = link
        self._ended = False
        self._unpublished: set[int] = set()  # layers that the commit requires to be published

    @overload
    def __getitem__(self, index: int) -> Slot: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Slot]: ...
    def __getitem__(self, index: int | slice) -> Slot | Sequence[Slot]:
        self._check_process()
        return self._slots[index]

    def __len__(self) -> int:
        return len(self._slots)

    def _end(self) -> None:
        self._check_open()
        self._ended = True

    def _check_open(self) -> None:
        self._check_process()
        if self._ended:
            raise StaleLease("this reservation was committed or aborted before")

    def require_layers(self) -> Self:
        """Refuse the commit until every layer that this writer has was published."""
        if self._slots:
            selection = self._slots[0].selection
            layers = range(len(selection.schema.layers))
            self._unpublished = {n for n in layers if published_segments(selection, n)}
        return self

    def _check_published(self) -> None:
        if self._unpublished and not all(slot.skipped for slot in self._slots):
            raise InvalidInput(
                f"layers {sorted(self._unpublished)} were not published: publish them first, or "
                "abort; slots reserved by_layer are never stored half written"
            )

    def _begin_commit(self) -> None:
        self._check_published()
        self._end()
        # Raises ClientClosed after `close`: the node may have given the extents to another writer.
        _ = self._link.mapping

    def _settle(self, kept: bytes) -> None:
        settled = list(zip([slot.index for slot in self._slots], kept, strict=True))
        self.stored = tuple(index for index, flag in settled if flag == Kept.STORED)
        self.pending = tuple(index for index, flag in settled if flag == Kept.PENDING)
        for slot in self._slots:
            slot.let_go()

    @verb
    def publish(self, layer: int, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Publish `layer` of all slots except skipped ones: `stream` may read it before the commit,
        so the writer must not change it any more. Raises StaleLease, SchemaError and, for a layer
        that was published before, InvalidInput."""
        publish(self._link, self._slots, self._lease, layer, timeout_s)
        self._unpublished.discard(layer)

    def commit(self) -> None:
        """Checksum the written blocks and make them visible to readers. Raises StaleLease if the
        reservation expired; InvalidInput, and ends nothing, if it was made `by_layer` and a layer
        was not published."""
        self._begin_commit()
        try:
            self._settle(block_verbs.commit(self._link, self.prefix, self._slots, self._lease))
        finally:
            for slot in self._slots:
                slot.let_go()

    def abort(self) -> None:
        """End the reservation without storing its blocks; a no-op in a forked child."""
        if self._inherited:
            return
        self._end()
        for slot in self._slots:
            slot.let_go()
        if self._slots:
            self._link.post(messages.Abort(0, self._lease))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._ended:
            return
        try:
            if kind is None:
                self.commit()
        finally:
            if not self._ended:
                self.abort()

    def __repr__(self) -> str:
        return (
            f"<Slots {len(self)} of {len(self.prefix)} blocks{self.reason and ', '}{self.reason}>"
        )
