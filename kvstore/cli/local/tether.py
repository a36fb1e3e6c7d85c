"""Runs a command that ends when the process that started it does, even by kill -9.

    python -IS tether.py SIGNAL PARENT_PID COMMAND [ARGUMENT ...]

The kernel sends SIGNAL when the parent (to be exact, the thread of it that started this) is gone,
and keeps to it over the exec below: the command needs to know nothing about it, so this works for
a redis-server too. A file of its own that imports nothing of ours: it is there for 15 ms.
"""

import ctypes
import os
import sys

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def main(signal: str, parent: str, *command: str) -> None:
    """Arrange it, then become the command."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(signal), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != int(parent):
        sys.exit("the parent has ended before it could be watched")
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(*sys.argv[1:])
