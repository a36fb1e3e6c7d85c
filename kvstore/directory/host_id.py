"""An id of this host, to find nodes on the same host, which clients reach by unix socket."""

from __future__ import annotations

import hashlib
import os
import socket
from functools import lru_cache
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_MOUNTS = Path("/proc/self/ns/mnt")


@lru_cache(maxsize=1)
def host_id() -> str:
    """32 hex digits that identify this boot of this machine, in this mount namespace.

    Containers of one machine have the same boot id and different files, so the mount namespace is
    part of the id; clones of one virtual machine's memory have both in common, so the host name is
    part of it too. Two processes that could share a socket may still have different ids (a
    container with the folder mounted): they use TCP then. Processes that cannot share one may have
    the same id, so a client that connects also checks that the expected node answers.
    """
    seen = [socket.gethostname(), _read(_BOOT_ID), _namespace()]
    return hashlib.sha256("\0".join(seen).encode()).hexdigest()[:32]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:  # no /proc: as a fallback, the device number of the root file system
        return str(os.stat("/").st_dev)


def _namespace() -> str:
    try:
        return os.readlink(_MOUNTS)
    except OSError:
        return ""
