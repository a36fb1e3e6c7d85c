"""The headers of a commit: checks that they match their blocks, and uniting the ranks' headers."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from tiffin.messenger.log_rate_limit import Ration

from ...errors import CorruptBlock, InvalidInput, VersionMismatch
from ...format.header import is_header_of, read_header
from .sealed import Sealed

if TYPE_CHECKING:
    from collections.abc import Callable

    from tiffin.messenger.shm.host_copy import ByteArray

    from .records import LeaseRecord, Replica
    from .sharded_writes import SharedWrites

    View = Callable[[Replica], ByteArray]

log = logging.getLogger(__name__)
log.addFilter(Ration())


def intact(replica: Replica, view: View) -> bool:
    """Whether the writer left a valid header of this block in its extent. The node does not check
    the payload: every reader verifies it with the checksums in this header."""
    try:
        place = replica.key, replica.generation, replica.offset, replica.length
        return is_header_of(view(replica), *place)
    except (CorruptBlock, VersionMismatch) as error:
        log.warning("commit refused: %s", error)
        return False


def sealed(replica: Replica, view: View) -> Sealed:
    """The segments of a committed block. Raises CorruptBlock, VersionMismatch."""
    return Sealed(read_header(view(replica), offset_expected=replica.offset))


def united(
    lease: LeaseRecord,
    skip: set[int],
    headers: list[bytes],
    shared_writes: SharedWrites,
    view: View,
) -> list[bool]:
    """Merge the headers of one rank's commit, and write the united header of each block whose last
    rank this is. Returns per replica whether its header is good. Raises InvalidInput."""
    rank = lease.rank
    assert rank is not None
    if len(headers) != len(lease.replicas):
        raise InvalidInput(
            f"a rank of several commits a header per slot: {len(lease.replicas)}, "
            f"not {len(headers)}"
        )
    good = []
    for position, (replica, raw) in enumerate(zip(lease.replicas, headers, strict=True)):
        shared = shared_writes.get(replica)  # None: another rank cancelled the block
        keeps = shared is not None and position not in skip and shared.unite(rank, raw, replica)
        if keeps and shared is not None and shared.completes(rank):
            pages = shared.header_pages()
            keeps = pages is not None
            if pages is not None:
                view(replica)[: len(pages)] = pages
        good.append(keeps)
    return good
