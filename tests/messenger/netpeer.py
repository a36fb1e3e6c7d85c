"""A peer in a process of its own, to be killed and stopped: prints its port, serves grant 1."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from netsupport import Server

NBYTES = 64 << 20


def main() -> None:
    server = Server(trusting=False)
    content = np.arange(NBYTES // 4, dtype=np.uint32).view(np.uint8)
    server.book.add([content], writes=True)
    print(server.address[1], flush=True)
    time.sleep(600)


if __name__ == "__main__":
    main()
