"""Choice of the backend: a Triton kernel, or the reference in torch.

Triton is imported at first use only: on a CPU the references run without it.
"""

from __future__ import annotations

import functools
import subprocess
from typing import Any, Literal

from .errors import DeviceError

Backend = Literal["triton", "reference"]


def uses_triton(device: Any, backend: Backend | None) -> bool:
    """Whether a kernel runs on this torch device, rather than the reference.

    None is the device's default: a kernel on a GPU, else the reference. Raises DeviceError for an
    unknown backend, and for a kernel that can't run there.
    """
    if backend not in (None, "triton", "reference"):
        raise DeviceError(f"unknown backend {backend!r}: triton or reference")
    on_gpu = bool(device.type == "cuda")
    if backend == "triton" and not on_gpu and not interpreted():
        raise DeviceError(f"Triton has no kernels for {device}, but for its interpreter")
    return on_gpu if backend is None else backend == "triton"


def interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels (TRITON_INTERPRET=1 before its import)."""
    from triton.runtime import JITFunction

    from .ranges.kernel import copy_rows

    return not isinstance(copy_rows, JITFunction)


@functools.cache
def can_launch() -> bool:
    """Whether Triton has a driver that it can launch with. Triton builds it once, at first use."""
    import triton

    try:
        triton.runtime.driver.active.get_current_target()
    except (RuntimeError, OSError, ImportError, subprocess.CalledProcessError):
        return False
    return True
