"""Copying dirty blocks down into the pool, so that losing them from HBM loses nothing.

A block is read from the device straight into a slot of the pool. What arrived there is hashed on
the host and compared with the checksums that the block has had since it was written: damage in HBM,
and in the copy, is found before the pool would give it a checksum that makes it look right. The
commit then hashes once more, in the pool's own algorithm.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from ..errors import DeadlineExceeded, NoRoom, StaleLease, TierUnavailable
from .below import POOL_ERRORS, spans_of
from .core import runs_of
from .memory import Never, Point, Unfinished, host_checksums

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from ..blocks import Slot
    from ..client import Client, Slots
    from ..keys import Prefix
    from ..node.records import Replica
    from .core import Entry
    from .endings import Endings
    from .memory import HbmMemory

    Sums = NDArray[np.uint64]

# One reservation in the pool has at most so many bytes: its slots are everybody's room, and so is
# the time for which the client is busy with its commit.
RUN_BYTES = 256 << 20

# How long to wait for room in the pool: a client's calls take turns, and a reader may be next.
ROOM_WAIT_S = 0.1


class CopyLate(DeadlineExceeded):
    """The copy did not end in time: no fault of the pool's."""


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
        not end in time, DeviceRefused when the device refuses. Then, too, each block was reported,
        or will be when its copy has ended.
        """
        by_key = {r.key: entry for r, entry in zip(replicas, entries, strict=True)}
        runs = list(_cut(runs_of(replicas, by_key.__getitem__)))
        while runs:
            part, members = runs.pop(0)
            run = _Run(members, [by_key[r.key].checksums for r in members], self._ended, total)
            try:
                self._carry_out(part, run, deadline)
            except BaseException:
                for _, rest in runs:
                    _Run(rest, [], self._ended, total).report(range(len(rest)), saved=False)
                raise

    def _carry_out(self, part: Prefix, run: _Run, deadline: float) -> None:
        """One reservation, from its room to its commit."""
        slots: Slots | None = None
        try:
            left_s = max(0.0, deadline - time.monotonic())
            slots = self._client.reserve(part, timeout_s=min(left_s, ROOM_WAIT_S))
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
            self._endings.add(error.passed or Point(None), partial(_give_up, slots, run))
            kind = CopyLate if error.late else DeviceRefused
            raise kind(f"a copy from HBM to the host did not end: {error}") from error
        except BaseException:
            self._endings.add(
                Never() if run.copying else Point(None), partial(_give_up, slots, run)
            )
            raise
        run.report_rest()

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


def _give_up(slots: Slots | None, run: _Run) -> None:
    """Give the slots back, unless a commit has, and the blocks. The pool may be gone."""
    if slots is not None:
        with contextlib.suppress(StaleLease, *POOL_ERRORS):
            slots.abort()
    run.report_rest()


def _cut(
    runs: Iterable[tuple[Prefix, list[Replica]]],
) -> Iterator[tuple[Prefix, list[Replica]]]:
    """Runs of at most RUN_BYTES each."""
    for part, members in runs:
        step = max(1, RUN_BYTES // part.schema.block_bytes)
        for first in range(0, len(members), step):
            yield part[first : first + step], members[first : first + step]
