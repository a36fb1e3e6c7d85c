"""The conductor's measurements, in the order of the docs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..environment import LIBRARIES
from ..suite import Suite, later

if TYPE_CHECKING:
    from .setting import Setting

SUITE: Suite[Setting] = Suite(
    "conductor",
    later(
        __package__,
        {
            "decision": ("decision", "decisions"),
            "policies": ("decision", "policies"),
            **{name: ("index", name) for name in ("walk", "events", "memory", "resync", "folding")},
            "service": ("service", "service"),
            "whole-requests": ("whole_requests", "whole_requests"),
            "busy": ("busy", "busy"),
            "stalls": ("stalls", "stalls"),
            "floods": ("stalls", "floods"),
            "dynamo": ("dynamo", "dynamo"),
        },
    ),
    libraries=(*LIBRARIES, "fastapi", "uvicorn"),
)
