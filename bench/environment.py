"""The environment of a measurement, without which a number means nothing.

Everything here is read from Linux's own files and the interpreter; a value that cannot be read is
"unknown" and never an error, because a benchmark must not fail over its own label.
"""

from __future__ import annotations

import datetime
import os
import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

LIBRARIES = ("tiffin", "numpy", "msgspec", "xxhash", "uvloop", "ml-dtypes")
UNKNOWN = "unknown"


def environment(libraries: Iterable[str] = LIBRARIES) -> dict[str, Any]:
    """CPU, memory, kernel, versions, load and date, as plain values for JSON.

    `load_1m` is the load average at the time of the call: above the number of cores, other
    processes were running too, and ratios to a limit of the same run are worth more than absolute
    numbers.
    """
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": _field("/proc/cpuinfo", "model name"),
        "cores": len(os.sched_getaffinity(0)),
        "l2_cache": _cache("2"),
        "l3_cache": _cache("3"),
        "virtual_machine": "hypervisor" in _field("/proc/cpuinfo", "flags").split(),
        "memory_bytes": _memory_bytes(),
        "transparent_hugepages": _chosen("/sys/kernel/mm/transparent_hugepage/enabled"),
        "kernel": f"{platform.system()} {platform.release()}",
        "load_1m": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "libraries": {name: library_version(name) for name in libraries},
        "fio": fio_version() or "no fio",
    }


def environment_lines(found: dict[str, Any]) -> list[str]:
    """An environment as text: three lines to print above a table, and one for a device."""
    memory_gib = found["memory_bytes"] / (1 << 30)
    libraries = ", ".join(f"{name} {number}" for name, number in found["libraries"].items())
    machine = "virtual machine" if found["virtual_machine"] else "no hypervisor"
    device = [found["device"]["text"]] if "device" in found else []
    return [
        f"{found['cpu']}, {found['cores']} cores, L2 {found['l2_cache']}, L3 {found['l3_cache']}, "
        f"{memory_gib:.0f} GiB memory, {machine}",
        f"{found['kernel']}, Python {found['python']}, {libraries}, {found['fio']}",
        *device,
        f"{found['date']}, load average {found['load_1m']}",
    ]


def fio_version() -> str | None:
    """The output of `fio --version`, or None if fio is not installed."""
    program = shutil.which("fio")
    if program is None:
        return None
    asked = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    return asked.stdout.strip() or None


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _field(path: str, name: str) -> str:
    for line in _read(path).splitlines():
        key, colon, value = line.partition(":")
        if colon and key.strip() == name:
            return value.strip()
    return UNKNOWN


def _memory_bytes() -> int:
    number = _field("/proc/meminfo", "MemTotal").split()[0]
    return int(number) * 1024 if number.isdigit() else 0


def _cache(level: str) -> str:
    for index in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"):
        if _read(str(index / "level")).strip() == level:
            return _read(str(index / "size")).strip() or UNKNOWN
    return UNKNOWN


def _chosen(path: str) -> str:
    """`always [madvise] never` -> `madvise`."""
    text = _read(path)
    return text[text.find("[") + 1 : text.find("]")] if "[" in text else UNKNOWN


def library_version(library: str) -> str:
    """The library's version, or "from source" if it is not installed as a package."""
    try:
        return version(library)
    except PackageNotFoundError:
        return "from source"
