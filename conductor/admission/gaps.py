"""A request's time between tokens, from what is told of it while it decodes. Pure.

Whether a TBT objective is met is judged by the mean of the longest tenth of the gaps between tokens
(Mooncake, FAST '25, section 5): a mean over all of them would hide a batch that was too full for a
part of the answer. Events tell of some tokens at a time; gaps within one event count as equal, but
for the first one: who joins a batch waits for the step that is under way, half a step in the mean.
"""

from __future__ import annotations

from dataclasses import dataclass, field

LONGEST_SHARE = 0.1
# A request comes at any time of a step, all equally likely.
JOINING_STEPS = 0.5


@dataclass(slots=True)
class Gaps:
    """Seconds and gaps of each event, in order."""

    parts: list[tuple[float, int]] = field(default_factory=list)

    def add(self, seconds: float, count: int) -> None:
        """`count` tokens came in `seconds`."""
        if count > 0 and not self.parts:
            first_s = (1.0 + JOINING_STEPS) * seconds / (count + JOINING_STEPS)
            self.parts.append((first_s, 1))
            seconds, count = seconds - first_s, count - 1
        if count > 0:
            self.parts.append((seconds, count))

    @property
    def count(self) -> int:
        """How many gaps there were."""
        return sum(count for _, count in self.parts)

    def tbt_s(self) -> float | None:
        """The mean of the longest tenth of all gaps, one at least; None without any."""
        if not self.parts:
            return None
        gaps = sorted(((seconds / count, count) for seconds, count in self.parts), reverse=True)
        wanted = left = max(1, round(LONGEST_SHARE * sum(count for _, count in gaps)))
        total_s = 0.0
        for gap_s, count in gaps:
            taken = min(count, left)
            total_s += taken * gap_s
            left -= taken
            if not left:
                break
        return total_s / wanted
