"""The `tiffin` program, and the commands that belong to the store."""

from __future__ import annotations

from .app import commands, main

__all__ = ["commands", "main"]
