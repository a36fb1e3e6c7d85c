"""The memory of the processes of a soak: from when to when it is watched, and how far it may grow.

Of a run of 30 minutes: from minute 10 to the end; of a shorter one the same part.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

GROWN_MIB = 2.0
WATCHED_FROM = 1 / 3
# At each end the median of this part of the time, as open requests need some memory.
_MEDIAN_OF = 0.1
# In a run whose memory is watched from an earlier second on it is told, and no finding: until then
# processes fill what they keep, such as connections, the last known state, the log of decisions.
WARM_S = 300.0
LIVE_ON = ("gateway", "worker", "conductor")


@dataclass(frozen=True, slots=True)
class Memory:
    """Of one process, in MiB. `own_mib` is what it has for itself (RssAnon): a leak is in there.
    `resident_mib` (VmRSS) is that and the pages of files, of which the kernel keeps what it likes.
    """

    own_mib: float
    resident_mib: float


Sample: TypeAlias = "tuple[float, Mapping[str, Memory]]"


@dataclass(frozen=True, slots=True)
class Growth:
    """What a process needed when it began to be watched, at `from_min`, and at the end."""

    from_min: float
    then: Memory
    end: Memory

    @property
    def grown_mib(self) -> float:
        """By how much its own memory has grown."""
        return self.end.own_mib - self.then.own_mib

    def told(self) -> dict[str, float]:
        """For the report."""
        return {
            "own_grown": round(self.grown_mib, 2),
            f"own_at_minute_{self.from_min:g}": self.then.own_mib,
            "own_at_the_end": self.end.own_mib,
            f"rss_at_minute_{self.from_min:g}": self.then.resident_mib,
            "rss_at_the_end": self.end.resident_mib,
        }


def memory_of(samples: Sequence[Sample], seconds: float) -> dict[str, Growth]:
    """The growth of each process that lived from when it was watched to the end."""
    from_s = seconds * WATCHED_FROM
    then = [one for at_s, one in samples if from_s <= at_s < from_s + seconds * _MEDIAN_OF]
    last = [one for at_s, one in samples if at_s >= seconds * (1 - _MEDIAN_OF)]
    if not then or not last:
        return {}
    return {
        name: Growth(round(from_s / 60, 1), _median(name, then), _median(name, last))
        for name in then[0]
        if all(name in sample for sample in (*then, *last))
    }


def _median(name: str, samples: Sequence[Mapping[str, Memory]]) -> Memory:
    def of(part: Callable[[Memory], float]) -> float:
        return round(statistics.median(part(sample[name]) for sample in samples), 2)

    return Memory(of(lambda one: one.own_mib), of(lambda one: one.resident_mib))


def grown(memory: Mapping[str, Growth], seconds: float) -> list[str]:
    """Processes that did not live, or, in a run that is long enough, need more memory."""
    names = {name.split()[0] for name in memory}
    return [
        *(f"the {name} did not live to the end" for name in LIVE_ON if name not in names),
        *(
            f"{name} grew by {one.grown_mib:.1f} MiB from minute {one.from_min:g} to the end"
            for name, one in memory.items()
            if one.grown_mib > GROWN_MIB and seconds * WATCHED_FROM >= WARM_S
        ),
    ]
