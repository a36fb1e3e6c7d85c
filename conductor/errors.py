"""What the conductor refuses, and why. A rejection for load is not an error but a decision."""

from __future__ import annotations


class ConductorError(Exception):
    """Base of all errors of this package."""


class InvalidRequest(ConductorError):
    """What was sent makes no sense, or is beyond a limit; says what to send instead."""


class UnknownModel(ConductorError):
    """No instance has registered this model."""


class UnknownInstance(ConductorError):
    """No such instance is registered: it was removed, or its registration expired."""


class UnknownNode(ConductorError):
    """No such node is in the pool, or the conductor does not follow it."""


class UnknownRequest(ConductorError):
    """No such request is in flight: it was never scheduled here, has ended, or expired."""


class Conflict(ConductorError):
    """The request contradicts what is known, such as two prompts under one request id."""


class NotAuthorized(ConductorError):
    """No token, a wrong one, or one whose role does not allow this."""


class ConductorUnavailable(ConductorError):
    """The conductor cannot be reached, or does not answer in time."""
