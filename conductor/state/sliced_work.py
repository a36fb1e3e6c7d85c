"""Long work in slices: a generator that yields where other tasks may run, and returns the result.
The code that drives it decides how many slices run at a time (`time_slices.py`). Pure."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeAlias, TypeVar

T = TypeVar("T")

Work: TypeAlias = Generator[None, None, T]


def finished(work: Work[T]) -> T:
    """Run all slices at once, and return the result."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            found: T = end.value
            return found
