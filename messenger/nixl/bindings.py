"""Loads NIXL's Python bindings, which are a separate wheel."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
from functools import cache
from pathlib import Path
from typing import Any

from ..errors import MessengerError

# One per CUDA release; neither needs a GPU.
_WHEELS = ("nixl_cu12", "nixl_cu13")


class NixlUnavailable(MessengerError):
    """NIXL is not installed, or cannot move bytes on this machine."""


@cache
def load() -> Any:
    """The bindings. Raises NixlUnavailable.

    Sets environment variables, unless the operator has: no InfiniBand module where there is no
    InfiniBand device, because that module ends the process with SIGSEGV at exit there; and quiet
    logs, because UCX writes its log to stdout, and its errors are raised here as exceptions.
    """
    if not any(Path("/sys/class/infiniband").glob("*")):
        os.environ.setdefault("UCX_MODULES", "^ib")
    os.environ.setdefault("UCX_LOG_LEVEL", "fatal")
    os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")
    # Importing the package changes this process-wide setting.
    raise_exceptions = logging.raiseExceptions
    try:
        for wheel in _WHEELS:
            with contextlib.suppress(ModuleNotFoundError):
                return importlib.import_module(f"{wheel}._bindings")
    except ImportError as error:
        raise NixlUnavailable(f"NIXL is installed but does not load: {error}") from error
    finally:
        logging.raiseExceptions = raise_exceptions
    raise NixlUnavailable("NIXL is not installed: pip install --no-deps nixl-cu12")


@cache
def errors() -> tuple[type[Exception], ...]:
    """All exception classes of the bindings; they have no common base class."""
    names = vars(load()).items()
    return tuple(kind for name, kind in names if name.startswith("nixl") and name.endswith("Error"))
