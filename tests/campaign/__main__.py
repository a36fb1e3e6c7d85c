"""`python -m tests.campaign all`, or a part of it: `faults --gets 500000 --seed 1`.

`soak --minutes 30` is of the gateway, and no part of `all`.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

# Helpers of the store's and the conductor's tests: see tests/conftest.py.
sys.path.insert(0, str(Path(__file__).parents[1] / "kvstore"))
sys.path.insert(0, str(Path(__file__).parents[1] / "conductor"))

from . import everything, faults, interrupts, processes, relay
from .soak import campaign as soak

PARTS = {
    "all": everything.main,
    "faults": faults.main,
    "interrupts": interrupts.main,
    "relay": relay.main,
    "soak": soak.main,
    "visit": processes.main,
}


def main() -> int:
    """Run one part; its report goes to stdout as a line of JSON. Returns 1 if it has findings."""
    if len(sys.argv) < 2 or sys.argv[1] not in PARTS:
        print(f"usage: python -m tests.campaign {{{','.join(PARTS)}}} [OPTIONS]", file=sys.stderr)
        return 2
    logging.getLogger("tiffin").setLevel(logging.ERROR)  # its warnings are of the injected faults
    return PARTS[sys.argv[1]](sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
