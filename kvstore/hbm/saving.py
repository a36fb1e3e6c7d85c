"""Copying dirty blocks down into the pool, so that losing them from HBM loses nothing.

A block is read from the device straight into a slot of the pool. What arrived there is hashed on
the host and compared with the checksums that the block has had since it was written: damage in HBM,
and in the copy, is found before the pool would give it a checksum that makes it look right. The
commit then hashes once more, in the pool's own algorithm.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from ..errors import DeadlineExceeded, NoRoom, StaleLease, TierUnavailable
from ..verbs import BLOCKS_MAX
from .below import POOL_ERRORS, kept_open, room_wait_s, spans_of
from .core import runs_of
from .memory import Never, Point, Unfinished, host_checksums, left_s

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from ..blocks import Slot
    from ..client import Client, Slots
    from ..keys import Prefix
    from ..node.records import Replica
    from .core import Entry
    from .endings import Endings
    from .memory import HbmMemory, Passed

    Sums = NDArray[np.uint64]

# One reservation in the pool has at most so many bytes: its slots are everybody's room, and so is
# the time for which the client is busy with its commit.
RUN_BYTES = 256 << 20


class CopyLate(DeadlineExceeded):
    """The copy did not end in time: no fault of the pool's."""


class OutOfTime(DeadlineExceeded):
    """There was no time left for the rest: no fault of the pool's."""


class DeviceRefused(TierUnavailable):
    """The device would not copy: no fault of the pool's."""


@dataclass(slots=True)
class Saved:
    """What became of blocks that were to be copied down. `refused`: still dirty, as there was no
    room, another writer, or no pool. `present`: the pool had them."""

    saved: int = 0
    present: int = 0
    damaged: int = 0
    refused: int = 0
    nbytes: int = 0


class Saver:
    """Copies held blocks into the pool.

    `ended(replica, saved)` is called exactly once for each, when nothing reads its extent any more;
    `damaged(replica)` before that. Both may be called in any thread.
    """

    def __init__(
        self,
        client: Client,
        memory: HbmMemory,
        endings: Endings,
        ended: Callable[[Replica, bool], None],
        damaged: Callable[[Replica], None],
    ) -> None:
        self._client = client
        self._memory = memory
        self._endings = endings
        self._ended = ended
        self._damaged = damaged

    def save(
        self, replicas: Sequence[Replica], entries: Sequence[Entry], deadline: float, total: Saved
    ) -> None:
        """Copy each down, and count in `total`.

        Raises one of POOL_ERRORS when the pool does not answer in time, CopyLate when the copy did
        not end in time, OutOfTime when there was none left, DeviceRefused when the device refuses.
        Then, too, each block was reported, or will be when its copy has ended.
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
        """One reservation, from its room to its commit."""
        slots: Slots | None = None
        inside = contextlib.ExitStack()
        try:
            inside.enter_context(kept_open(self._client))
            wait_s = room_wait_s(self._client, left_s(deadline))
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
            pass  # there is another time; what is not reported is refused below
        except Unfinished as error:
            # The copy, if it began, still writes into the slots and reads the extents.
            self._give_up(error.passed or Point(None), slots, run, inside)
            if error.interrupt is not None:
                raise error.interrupt from None
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
        """Let go of all when the copy has ended; the client's `close` waits for that. Of what
        failed nobody knows, and nobody waits for it."""
        self._endings.add(passed, partial(_give_up, slots, run, inside), inside.close)

    def _fill(self, slots: Slots, run: _Run, deadline: float) -> None:
        """Copy into the slots, and skip those in which something else arrived than was written."""
        nbytes = slots.prefix.schema.block_bytes
        pairs = [
            (slot.view, self._memory.view(run.replicas[slot.index].offset, nbytes))
            for slot in slots
        ]
        run.copying = True
        self._memory.copy(pairs, deadline)
        run.copying = False
        self._verify(slots, run)

    def _verify(self, slots: Sequence[Slot], run: _Run) -> None:
        for slot in slots:
            found = host_checksums(slot.view, spans_of(slot.selection.schema))
            if not np.array_equal(found, run.sums[slot.index]):
                slot.skip()
                run.total.damaged += 1
                self._damaged(run.replicas[slot.index])


class _Run:
    """The blocks of one reservation, each reported once."""

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
    """Give the slots back, unless a commit has, and the blocks. The pool may be gone."""
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
    """Runs of at most RUN_BYTES each, and of as many blocks as one call takes."""
    for part, members in runs:
        step = min(BLOCKS_MAX, max(1, RUN_BYTES // part.schema.block_bytes))
        for first in range(0, len(members), step):
            yield part[first : first + step], members[first : first + step]
