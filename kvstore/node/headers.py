"""The headers of a commit: whether they belong to what is committed, and uniting those of ranks."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from tiffin.messenger.ration import Ration

from ..block import read_header
from ..errors import CorruptBlock, InvalidInput, VersionMismatch
from .following import Sealed
from .shared import names

if TYPE_CHECKING:
    from collections.abc import Callable

    from tiffin.messenger.local import ByteArray

    from .records import Lease, Replica
    from .shared import SharedWrites

    View = Callable[[Replica], ByteArray]

log = logging.getLogger(__name__)
log.addFilter(Ration())


def intact(replica: Replica, view: View) -> bool:
    """Whether the writer left a header that belongs here. Its payload is the writer's word, backed
    by the checksums in this header, which every reader verifies."""
    try:
        header = read_header(view(replica), offset_expected=replica.offset)
    except (CorruptBlock, VersionMismatch) as error:
        log.warning("commit refused: %s", error)
        return False
    return names(header, replica)


def sealed(replica: Replica, view: View) -> Sealed:
    """The segments of a committed block. Raises CorruptBlock, VersionMismatch."""
    return Sealed(read_header(view(replica), offset_expected=replica.offset))


def united(
    lease: Lease, skip: set[int], headers: list[bytes], shared_writes: SharedWrites, view: View
) -> list[bool]:
    """Take the headers of one rank; write those of blocks whose last rank this is. Whether each is
    good. Raises InvalidInput."""
    rank = lease.rank
    assert rank is not None
    if len(headers) != len(lease.replicas):
        raise InvalidInput(
            f"a rank of several commits a header per slot: {len(lease.replicas)}, "
            f"not {len(headers)}"
        )
    good = []
    for position, (replica, raw) in enumerate(zip(lease.replicas, headers, strict=True)):
        shared = shared_writes.get(replica)  # None: another rank gave up
        keeps = shared is not None and position not in skip and shared.unite(rank, raw, replica)
        if keeps and shared is not None and shared.completes(rank):
            pages = shared.header_pages()
            keeps = pages is not None
            if pages is not None:
                view(replica)[: len(pages)] = pages
        good.append(keeps)
    return good
