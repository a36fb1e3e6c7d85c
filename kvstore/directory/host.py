"""Which host this is: the same id only where a unix socket's path means the same socket."""

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
    """32 hex digits: this boot of this machine, as seen by this mount namespace.

    Containers of one machine have the same boot id and different files, so the mount namespace is
    part of it; clones of one virtual machine's memory have both in common, so the host name is too.
    Two processes that could share a socket may still differ here (a container with the folder
    mounted): they talk over TCP then. The opposite is not excluded, so whoever connects also looks
    whether the right node answers.
    """
    seen = [socket.gethostname(), _read(_BOOT_ID), _namespace()]
    return hashlib.sha256("\0".join(seen).encode()).hexdigest()[:32]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:  # no /proc: the host name and, better than nothing, the machine's own id
        return str(os.stat("/").st_dev)


def _namespace() -> str:
    try:
        return os.readlink(_MOUNTS)
    except OSError:
        return ""
