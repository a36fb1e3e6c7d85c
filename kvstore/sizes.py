"""Parses and formats human-readable sizes: `8GiB`, `512MiB`, `64KB`, `1.5g`, or plain bytes."""

from __future__ import annotations

import re

from .errors import InvalidInput

# The largest file offset; a hundred thousand times the largest tier there is.
_BYTES_MAX = 1 << 62

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*", re.IGNORECASE)


def parse_bytes(size: int | str) -> int:
    """Bytes from a number or from text; `K` is 1000, `Ki` is 1024. Raises InvalidInput."""
    if isinstance(size, int) and not isinstance(size, bool):
        if size < 0:
            raise InvalidInput(f"a size can't be negative: {size}")
        return _possible(size)
    found = _SIZE.fullmatch(size) if isinstance(size, str) else None
    if found is None or (found[3] and not found[2]):
        raise InvalidInput(f"{size!r} is not a size; write bytes or, for example, 8GiB or 500MB")
    unit = found[2].lower()
    return _possible(float(found[1]) * (_BINARY[unit] if found[3] else _UNITS[unit]))


def _possible(nbytes: float) -> int:
    if nbytes > _BYTES_MAX:
        raise InvalidInput(f"a size of {nbytes:.3g} bytes; at most {format_bytes(_BYTES_MAX)}")
    return int(nbytes)


def format_bytes(nbytes: float) -> str:
    """`1536` -> `1.5 KiB`: three digits are enough to compare two sizes."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.4g} TiB"
