"""The HBM tier's measurements, in the order of the docs; imported when they run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..environment import LIBRARIES
from ..kernels.device import Missing, in_words
from ..kernels.suite import later
from ..suite import Suite

if TYPE_CHECKING:
    from .setting import Setting

_WHERE = {
    "paged": ("transfers", "paged"),
    "pieces": ("transfers", "pieces"),
    "decode": ("decode", "decode"),
    "publish": ("verbs", "publish"),
    "lease": ("verbs", "lease"),
    "promote": ("verbs", "promote"),
    "demote": ("verbs", "demote"),
}

SUITE: Suite[Setting] = Suite(
    "hbm",
    {name: later(__package__, *where) for name, where in _WHERE.items()},
    lack=Missing,
    libraries=(*LIBRARIES, "torch", "triton"),
    surroundings=lambda setting: setting.surroundings(),
    in_words=in_words,
)
