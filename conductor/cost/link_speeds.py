"""How fast links are, learnt from transfers that had them to themselves. Pure.

The time of a transfer, as its request's events tell it, holds more than the network's: the engine
that has to begin, the report that has to come. These do not grow with its size. So the seconds per
byte are the *slope* over transfers of different sizes: the median of the slopes of all pairs, which
up to 29% of wild values do not move (Theil and Sen). A constant delay changes nothing, and of
transfers of one size nothing is learnt.
"""

from __future__ import annotations

from collections import OrderedDict, deque

import numpy as np

# Transfers of a link that the median is taken of, the latest ones.
SAMPLES = 16
# Slopes from which on there is a median: five transfers of different sizes have ten.
SLOPES_MIN = 10
# Sizes that differ by less, as a share of the larger one, tell noise and not a slope.
APART_SHARE = 0.2
# Links whose transfers are kept, those that were used last: 16 of them take some 2 KB.
LINKS_MAX = 4096

Samples = deque[tuple[float, float]]


class LinkSpeeds:
    """The seconds per byte of each link, and of links in general."""

    def __init__(self) -> None:
        self._links: OrderedDict[tuple[int, int], Samples] = OrderedDict()
        self._all: Samples = deque(maxlen=SAMPLES)

    def observe(
        self, source: int, target: int, nbytes: int, seconds: float
    ) -> tuple[float | None, float | None]:
        """Take a transfer that nothing else slowed down. Returns the seconds per byte of its link
        and of links in general; None: not known yet."""
        samples = self._links.setdefault((source, target), deque(maxlen=SAMPLES))
        self._links.move_to_end((source, target))
        while len(self._links) > LINKS_MAX:
            self._links.popitem(last=False)
        found = []
        for some in (samples, self._all):
            some.append((float(nbytes), seconds))
            found.append(_slope(some))
        return found[0], found[1]

    def forget(self, numbers: set[int]) -> None:
        """Forget the links of these nodes: their numbers are reused."""
        for link in [link for link in self._links if not numbers.isdisjoint(link)]:
            del self._links[link]


def _slope(samples: Samples) -> float | None:
    """The median seconds per byte over pairs of samples; None if there are too few."""
    if len(samples) < 2:
        return None
    sizes, seconds = np.array(samples).T
    one, other = np.triu_indices(len(sizes), 1)
    apart = sizes[one] - sizes[other]
    far = np.abs(apart) >= APART_SHARE * np.maximum(sizes[one], sizes[other])
    if int(far.sum()) < SLOPES_MIN:
        return None
    slope = float(np.median((seconds[one] - seconds[other])[far] / apart[far]))
    return slope if slope > 0 else None
