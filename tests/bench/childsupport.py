"""The processes that a command has started: found by the folder for temporary files that it was
given."""

from __future__ import annotations

import os
from pathlib import Path


def environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "TMPDIR": str(folder)}


def descendants(folder: Path) -> list[int]:
    """Processes that were started with this TMPDIR, or have it as working directory: Redis
    overwrites its environment when it sets its title."""
    mark, found = f"TMPDIR={folder}".encode(), []
    for process in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{process}/environ", "rb") as variables:
                marked = mark in variables.read().split(b"\0")
            if marked or Path(os.readlink(f"/proc/{process}/cwd")).is_relative_to(folder):
                found.append(int(process))
        except OSError:
            continue
    return found
