"""The width of a word, which a thread loads or stores at once: the widest that all addresses and
sizes allow."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_WORD_BYTES: Final = 16  # the widest load and store of a GPU's thread


def alignment(*numbers: int | NDArray[np.int64]) -> int:
    """The largest power of two, at most 16, that divides all of these numbers."""
    bits = MAX_WORD_BYTES
    for some in numbers:
        bits |= some if isinstance(some, int) else int(np.bitwise_or.reduce(some, axis=None))
    return bits & -bits


def word_type(nbytes: int) -> Any:
    """Triton's integer of 1, 2, 4 or 8 bytes."""
    import triton.language as tl

    return getattr(tl, f"int{8 * nbytes}")
