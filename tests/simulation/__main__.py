"""`python -m tests.simulation SEED [LAST]`: one seed, or all from SEED to LAST."""

from __future__ import annotations

import sys
import time

from .cluster import simulate


def main() -> None:
    """Print a report per seed; a violation ends the program with its last events."""
    first = int(sys.argv[1]) if len(sys.argv) > 1 else 0
    last = int(sys.argv[2]) if len(sys.argv) > 2 else first
    began = time.monotonic()
    for seed in range(first, last + 1):
        report = simulate(seed)
        if last == first or seed % 50 == 0:
            print(report, flush=True)
    if last > first:
        print(f"{(last - first + 1) / (time.monotonic() - began):.1f} seeds/s")


if __name__ == "__main__":
    main()
