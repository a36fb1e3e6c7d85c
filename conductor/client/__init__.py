"""Clients of the conductor's REST service, blocking and asyncio; they raise the errors of
`errors.py`."""

from __future__ import annotations

from .client import AsyncConductorClient, ConductorClient

__all__ = ["AsyncConductorClient", "ConductorClient"]
