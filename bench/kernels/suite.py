"""The kernels' measurements, in the order of the docs, and `device_suite`, a suite on a device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from ..environment import LIBRARIES
from ..suite import Suite, later
from .device import in_words, surroundings

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..store.rows import Row
    from ..suite import Measurement
    from .setting import DeviceSetting, Setting

S = TypeVar("S", bound="DeviceSetting[Any]")


def device_suite(name: str, package: str, where: Mapping[str, tuple[str, str]]) -> Suite[S]:
    """Measurements on a device: `where` maps each name to a module of `package` and a function."""
    measurements: dict[str, Measurement[S]] = later(package, where)
    return Suite(
        name,
        {row: _on_device(measure) for row, measure in measurements.items()},
        libraries=(*LIBRARIES, "torch", "triton"),
        surroundings=lambda setting: surroundings(setting.machine),
        in_words=in_words,
    )


def _on_device(measure: Measurement[S]) -> Measurement[S]:
    """An error of the kernels or of the device ends this measurement, but not those after it."""

    def measured(setting: S) -> list[Row]:
        from tiffin.kernels.errors import KernelError

        try:
            return measure(setting)
        except (KernelError, RuntimeError) as error:
            raise ValueError(f"the device refused: {type(error).__name__}: {error}") from error

    return measured


SUITE: Suite[Setting] = device_suite(
    "kernels",
    __package__,
    {
        "gather": ("paged", "gathers"),
        "scatter": ("paged", "scatters"),
        "parts": ("paged", "parts"),
        "lmcache": ("lmcache", "lmcache"),
        "quantise": ("quantised", "quantise"),
        "reshard": ("resharded", "reshard"),
        "checksum": ("checksums", "checksum"),
        "launches": ("calls", "launches"),
        "host": ("calls", "host"),
    },
)
