"""Read-through copies: which blocks that a client reads from other nodes it copies to the home
node, and how."""

from __future__ import annotations

import logging
import random
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

from ....deadlines import until_s
from ....errors import ClientClosed, InvalidInput, TiffinError
from ....node.core import messages
from ....url import ADMISSIONS
from ...blocks.block_views import select
from ...verbs import block_verbs as local_verbs
from ...verbs.block_verbs import Access
from ..read_results import Reader

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ....format.keys import Prefix
    from ...blocks.block_views import Slot
    from ...connection.node_link import NodeLink
    from ..read_results import ReadFrom

# The most keys whose first read is remembered: 2 MiB or so, blocks of 33 million tokens.
_SEEN_MAX = 65_536
# How long to wait for room at home. The reader waits meanwhile, and does not need the copy.
ROOM_WAIT_S = 0.05

log = logging.getLogger(__name__)


class HomeCopies:
    """The admission policy: "always", "second" (from the second read on) or "never".

    "second" is the default because a copy of a block that is read only once would evict, at home, a
    block that may be read again. Thread-safe.
    """

    def __init__(self, admission: str) -> None:
        if admission not in ADMISSIONS:
            raise InvalidInput(f"admission={admission!r}; choose one of {', '.join(ADMISSIONS)}")
        self._admission = admission
        self._seen: OrderedDict[bytes, None] = OrderedDict()
        self._lock = threading.Lock()
        self._dice = random.Random()

    def wants(self, prefix: Prefix, start: int) -> bool:
        """Whether to copy the blocks from `start` on to the home node, if other nodes have them."""
        if self._admission == "second":
            return start < len(prefix) and prefix.keys[start] in self._seen
        return self._admission == "always"

    def saw(self, prefix: Prefix, start: int, stop: int) -> None:
        """Note that blocks [start, stop) were read from other nodes."""
        with self._lock:
            for key in prefix.keys[start:stop]:
                self._seen[key] = None
                self._seen.move_to_end(key)
            while len(self._seen) > _SEEN_MAX:
                self._seen.popitem(last=False)

    def bring(
        self,
        part: Prefix,
        located: Sequence[tuple[int, ...]],
        home: NodeLink,
        read: ReadFrom,
        deadline: float,
    ) -> int:
        """Read the blocks of `part` from their holders into slots at home; how many leading blocks
        are there then.

        Each block is verified whole as it arrives, whatever the client's policy is, because other
        clients will read it. The slots of blocks that can't be read are given back. Raises
        nothing for a failure of the home node or the pool: that costs the copy, not the read.
        """
        left_s = until_s(deadline)
        try:
            # Before the blocks are leased: a removal ends the reservation (`messages.Reserve`).
            reserved = local_verbs.reserve(home, part, min(left_s, ROOM_WAIT_S), copy=True)
        except TiffinError as error:
            log.debug("nothing is copied home: %s", error)
            return 0
        slots = {slot.index: slot for slot in reserved.slots}
        good, missing = 0, False
        try:
            for first, stop in _runs(sorted(slots)):
                if missing:  # blocks after one that could not be read are of no use
                    _skip(slots, first, stop)
                    continue
                reader = Reader(
                    part[first:stop],
                    Access("always", self._dice),
                    select(part.schema),
                    lambda index, first=first: slots[first + index].view,  # type: ignore[misc]
                )
                outcome = read(reader, deadline, located[first:stop])
                _skip(slots, first + outcome.blocks, stop)
                missing = first + outcome.blocks < stop
            left_s = until_s(deadline)
            flags = local_verbs.commit(home, part, reserved.slots, reserved.lease, left_s)
        except BaseException as error:
            if reserved.lease:
                home.post(messages.Abort(0, reserved.lease))
            if isinstance(error, ClientClosed) or not isinstance(error, TiffinError):
                raise
            log.warning("nothing was copied home: %s", error)
            return 0
        finally:
            for slot in reserved.slots:
                slot.let_go()
        stored = {s.index for s, flag in zip(reserved.slots, flags, strict=True) if flag}
        here = stored | set(reserved.resident)
        while good in here:
            good += 1
        return good


def _skip(slots: dict[int, Slot], start: int, stop: int) -> None:
    for index in range(start, stop):
        slots[index].skip()


def _runs(indices: list[int]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for index in indices:
        if runs and runs[-1][1] == index:
            runs[-1] = runs[-1][0], index + 1
        else:
            runs.append((index, index + 1))
    return runs
