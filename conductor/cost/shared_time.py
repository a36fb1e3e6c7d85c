"""Two factors of one instance, from intervals in which it did two kinds of work. Pure.

An instance that prefills and decodes does both at a time, and an interval of it is

    seconds = a · prefill seconds + b · decode seconds          both by the profile

As shares of the interval, 1 = a x + b z. One interval does not tell a from b; several with other
mixtures do. So a and b are the least squares over the last intervals, older ones with less weight.
Where all have one mixture, infinitely many pairs are equally good: of these, the one that is
nearest to what is believed already is taken. That pulls a and b towards their present values, not
towards 1: in the long run they are where the squares are least.
"""

from __future__ import annotations

# The weight of an interval when the next one comes: some twenty count.
_FORGETTING = 0.95
# The weight of what is believed already, in intervals.
_BELIEVED = 0.1


class SharedTime:
    """The last intervals of an instance, as sums."""

    __slots__ = ("_x", "_xx", "_xz", "_z", "_zz")

    def __init__(self) -> None:
        self._x = self._z = self._xx = self._xz = self._zz = 0.0

    def observe(self, x: float, z: float, believed: tuple[float, float]) -> tuple[float, float]:
        """Take an interval of which `x` and `z` (shares of its seconds) are prefill and decode by
        the profile. Returns both factors, `believed` being those so far."""
        keep = _FORGETTING
        self._x, self._z = keep * self._x + x, keep * self._z + z
        self._xx, self._zz = keep * self._xx + x * x, keep * self._zz + z * z
        self._xz = keep * self._xz + x * z
        # (S + w I) (a, b) = s + w (a, b) so far, solved by Cramer's rule; w > 0 makes it regular.
        xx, xz, zz = self._xx + _BELIEVED, self._xz, self._zz + _BELIEVED
        right_x, right_z = self._x + _BELIEVED * believed[0], self._z + _BELIEVED * believed[1]
        whole = xx * zz - xz * xz
        return (right_x * zz - right_z * xz) / whole, (right_z * xx - right_x * xz) / whole
