"""The measurements with a real vLLM, in the order of the docs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..network.setting import Missing
from ..suite import Suite
from .first_token import home, offloading, remote

if TYPE_CHECKING:
    from .setting import Setting

SUITE: Suite[Setting] = Suite(
    "vllm", {"home": home, "remote": remote, "offloading": offloading}, lack=Missing
)
