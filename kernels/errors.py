"""Errors that the kernels raise on purpose, before anything is launched. The kernels do not know
the blocks of a pool, and neither do these errors."""

from __future__ import annotations


class KernelError(Exception):
    """Root of everything the kernels raise on purpose."""


class LayoutError(KernelError, ValueError):
    """Tensors whose shape, strides or dtype do not fit: each other, or the blocks."""


class PageError(KernelError, ValueError):
    """A page id that is negative, beyond the cache or named twice, or too few pages."""


class DeviceError(KernelError, ValueError):
    """Tensors on different devices, or on one that has no such kernel."""


class RoomError(KernelError, ValueError):
    """A target that is smaller than what has to be written to it."""
