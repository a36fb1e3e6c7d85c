"""The errors of the conductor. A rejection for overload is not an error but a decision."""

from __future__ import annotations


class ConductorError(Exception):
    """Base of all errors of this package."""


class InvalidRequest(ConductorError):
    """A value is malformed or beyond a limit; the message tells what to send instead."""


class HostNotAllowed(InvalidRequest):
    """An instance is at a host that the conductor's settings do not allow; the message names the
    host to add."""


class UnknownModel(ConductorError):
    """No instance has registered this model."""


class UnknownInstance(ConductorError):
    """No such instance is registered: it was removed, or its registration expired."""


class UnknownNode(ConductorError):
    """No such node is in the pool, or the conductor does not follow it."""


class UnknownRequest(ConductorError):
    """No such request is in flight: it was never scheduled here, has ended, or expired."""


class Conflict(ConductorError):
    """The call conflicts with the current state, such as two prompts under one request id."""


class NotAuthorized(ConductorError):
    """The token is missing, wrong, or of a role that does not allow this."""


class ConductorUnavailable(ConductorError):
    """The conductor cannot be reached, or does not answer in time."""


class ConductorLate(ConductorUnavailable):
    """The conductor was reached and gave no answer in time, or says that it is busy. It need not be
    gone: it, or this process, may have too much to do."""
