"""Write-back: copies dirty blocks from HBM into the pool, so that their eviction loses nothing.

A block is copied from the device straight into a slot of the pool. The host hashes the copied bytes
and compares them with the checksums that the block has had since it was written: this finds damage
in HBM, and in the copy, before the pool gives the damaged bytes a valid checksum. The commit then
hashes once more, in the pool's own algorithm.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from ..client.verbs.arguments import BLOCKS_MAX
from ..deadlines import until_s
from ..errors import DeadlineExceeded, NoRoom, StaleLease, TierUnavailable
from .core.hbm_core import runs_of
from .device.device_memory import Never, Point, Unfinished, host_checksums
from .pool_access import POOL_ERRORS, kept_open, room_wait_s, spans_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from ..client.blocks.block_views import Slot
    from ..client.client import Client
    from ..client.verbs.slots import Slots
    from ..format.keys import Prefix
    from ..node.core.records import Replica
    from .core.hbm_core import HbmEntry
    from .device.deferred_release import DeferredReleases
    from .device.device_memory import HbmMemory, Passed

    Sums = NDArray[np.uint64]

# The most bytes of one reservation in the pool: its slots take room from other writers, and its
# commit keeps the client busy, whose other calls wait.
RUN_BYTES = 256 << 20


class CopyLate(DeadlineExceeded):
    """The copy timed out: no fault of the pool's."""


class OutOfTime(DeadlineExceeded):
    """The deadline passed before all blocks were copied: no fault of the pool's."""


class DeviceRefused(TierUnavailable):
    """The device refused the copy: no fault of the pool's."""


@dataclass(slots=True)
class Saved:
    """The outcome of a write-back, in blocks and `nbytes`. `refused`: still dirty, as there was no
    room, another writer, or no pool. `present`: in the pool already."""

    saved: int = 0
    present: int = 0
    damaged: int = 0
    refused: int = 0
    nbytes: int = 0


class Saver:
    """Writes held blocks back to the pool.

    Calls `ended(replica, saved)` once for each, after the last read of its extent that matters: a
    failed copy whose end is unknown may still read it, into a slot that is never committed. Calls
    `damaged(replica)` before that for a corrupt one. Calls both in any thread.

    `device_failed`: the end of the last copy is unknown, and its slots stay in the pool until the
    client closes or the pool gives them up. So may those of the next copy.
    """

    def __init__(
        self,
        client: Client,
        memory: HbmMemory,
        releases: DeferredReleases,
        ended: Callable[[Replica, bool], None],
        damaged: Callable[[Replica], None],
    ) -> None:
        self._client = client
        self._memory = memory
        self._releases = releases
        self._ended = ended
        self._damaged = damaged
        self.device_failed = False

    def save(
        self,
        replicas: Sequence[Replica],
        entries: Sequence[HbmEntry],
        deadline: float,
        total: Saved,
    ) -> None:
        """Write each block back, and count the outcomes in `total`.

        Raises one of POOL_ERRORS when the pool does not answer in time, CopyLate when a copy timed
        out, OutOfTime when the deadline passed before the last copy began, DeviceRefused when the
        device refuses. Also then `ended` has been called for each block, or will be when its copy
        has ended.
        """
        by_key = {r.key: entry for r, entry in zip(replicas, entries, strict=True)}
        runs = deque(_cut(runs_of(replicas, by_key.__getitem__)))
        try:
            while runs:
                if time.monotonic() >= deadline:
                    raise OutOfTime("no time was left to copy all blocks down to the pool")
                part, members = runs.popleft()
                sums = [by_key[replica.key].checksums for replica in members]
                self._carry_out(part, _Run(members, sums, self._ended, total), deadline)
        except BaseException:
            for _, rest in runs:
                _Run(rest, [], self._ended, total).report_rest()
            raise

    def _carry_out(self, part: Prefix, run: _Run, deadline: float) -> None:
        """Write one run back: reserve, copy, verify, commit."""
        slots: Slots | None = None
        inside = contextlib.ExitStack()
        try:
            inside.enter_context(kept_open(self._client))
            wait_s = room_wait_s(self._client, until_s(deadline))
            slots = self._client.reserve(part, timeout_s=wait_s)
            run.total.present += len(slots.resident)
            run.report(slots.resident, saved=True)
            granted = {slot.index for slot in slots}
            run.report([i for i in range(len(part)) if i not in granted], saved=False)
            if granted:
                self._fill(slots, run, deadline)
                slots.commit()
                run.total.saved += len(slots.stored)
                run.total.nbytes += len(slots.stored) * part.schema.block_bytes
                run.report(slots.stored, saved=True)
        except (NoRoom, StaleLease):
            pass  # a later save retries; `report_rest` below counts the blocks as refused
        except Unfinished as error:
            # A copy that began still writes into the slots and reads the extents.
            self._give_up(error.passed or Point(None), slots, run, inside)
            kind = CopyLate if error.late else DeviceRefused
            raise kind(f"a copy from HBM to the host did not end: {error}") from error
        except BaseException:
            self._give_up(Never() if run.copying else Point(None), slots, run, inside)
            raise
        run.report_rest()
        inside.close()

    def _give_up(
        self, passed: Passed, slots: Slots | None, run: _Run, inside: contextlib.ExitStack
    ) -> None:
        """Release slots and extents once the copy has ended; the client's `close` waits for that.
        If the copy failed, its end is unknown: then the slots, to which it may still write, are not
        released."""

        def failed() -> None:
            self.device_failed = True
            _give_up(None, run, inside)

        self._releases.add(passed, partial(_give_up, slots, run, inside), failed)

    def _fill(self, slots: Slots, run: _Run, deadline: float) -> None:
        """Copy into the slots, and skip those whose bytes fail the checksums."""
        nbytes = slots.prefix.schema.block_bytes
        pairs = [
            (slot.view, self._memory.view(run.replicas[slot.index].offset, nbytes))
            for slot in slots
        ]
        run.copying = True
        self._memory.copy(pairs, deadline)
        run.copying = self.device_failed = False
        self._verify(slots, run)

    def _verify(self, slots: Sequence[Slot], run: _Run) -> None:
        for slot in slots:
            found = host_checksums(slot.view, spans_of(slot.selection.schema))
            if not np.array_equal(found, run.sums[slot.index]):
                slot.skip()
                run.total.damaged += 1
                self._damaged(run.replicas[slot.index])


class _Run:
    """The blocks of one reservation, for each of which `ended` is called once."""

    def __init__(
        self,
        replicas: Sequence[Replica],
        sums: Sequence[Sums],
        ended: Callable[[Replica, bool], None],
        total: Saved,
    ) -> None:
        self.replicas = replicas
        self.sums = sums
        self.total = total
        self.copying = False
        self._ended = ended
        self._open = dict.fromkeys(range(len(replicas)))

    def report(self, indices: Iterable[int], *, saved: bool) -> None:
        for index in indices:
            if index in self._open:
                del self._open[index]
                self.total.refused += not saved
                self._ended(self.replicas[index], saved)

    def report_rest(self) -> None:
        self.report(list(self._open), saved=False)


def _give_up(slots: Slots | None, run: _Run, inside: contextlib.ExitStack) -> None:
    """Abort the reservation unless it was committed, ignoring POOL_ERRORS; release the blocks."""
    try:
        if slots is not None:
            with contextlib.suppress(StaleLease, *POOL_ERRORS):
                slots.abort()
    finally:
        run.report_rest()
        inside.close()


def _cut(
    runs: Iterable[tuple[Prefix, list[Replica]]],
) -> Iterator[tuple[Prefix, list[Replica]]]:
    """Split runs into parts of at most RUN_BYTES, and at most as many blocks as one call takes."""
    for part, members in runs:
        step = min(BLOCKS_MAX, max(1, RUN_BYTES // part.schema.block_bytes))
        for first in range(0, len(members), step):
            yield part[first : first + step], members[first : first + step]
