"""The scheduler of the conductor: takes events and returns decisions. Pure."""

from __future__ import annotations

from .conductor import Conductor

__all__ = ["Conductor"]
