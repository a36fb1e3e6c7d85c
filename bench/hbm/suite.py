"""The HBM tier's measurements, in the order of the docs; imported when they run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..kernels.suite import device_suite

if TYPE_CHECKING:
    from ..suite import Suite
    from .setting import Setting

SUITE: Suite[Setting] = device_suite(
    "hbm",
    __package__,
    {
        "paged": ("transfers", "paged"),
        "pieces": ("transfers", "pieces"),
        "decode": ("decode", "decode"),
        "publish": ("verbs", "publish"),
        "lease": ("verbs", "lease"),
        "promote": ("verbs", "promote"),
        "demote": ("verbs", "demote"),
    },
)
