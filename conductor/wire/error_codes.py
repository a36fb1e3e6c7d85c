"""The mapping of errors to HTTP statuses and codes; the client maps codes back to errors."""

from __future__ import annotations

from ..errors import (
    ConductorError,
    ConductorLate,
    ConductorUnavailable,
    Conflict,
    HostNotAllowed,
    InvalidRequest,
    NotAuthorized,
    UnknownInstance,
    UnknownModel,
    UnknownNode,
    UnknownRequest,
)
from ..web.auth import MissingRight

# Prefix of a rejection's code; the reason follows.
REJECTED = "rejected_"

# The first class that matches an error counts; the last one matches all.
_CODES: tuple[tuple[type[ConductorError], int, str], ...] = (
    (HostNotAllowed, 400, "host_not_allowed"),
    (InvalidRequest, 400, "invalid_request"),
    (MissingRight, 403, "missing_right"),
    (NotAuthorized, 401, "not_authorized"),
    (UnknownModel, 404, "unknown_model"),
    (UnknownInstance, 404, "unknown_instance"),
    (UnknownNode, 404, "unknown_node"),
    (UnknownRequest, 404, "unknown_request"),
    (Conflict, 409, "conflict"),
    (ConductorUnavailable, 503, "unavailable"),
    (ConductorError, 400, "refused"),
)
# "busy": an answer, of a conductor that has reached one of its limits.
_BY_CODE: dict[str, type[ConductorError]] = {
    **{code: kind for kind, _, code in _CODES},
    "busy": ConductorLate,
}


def code_of(failure: ConductorError) -> tuple[int, str]:
    """The HTTP status and the code of an error."""
    return next((status, code) for kind, status, code in _CODES if isinstance(failure, kind))


def error_of(status: int, code: str, message: str) -> ConductorError:
    """The error for an answer's status and code."""
    kind = _BY_CODE.get(code)
    if kind is None:
        kind = ConductorUnavailable if status >= 500 else InvalidRequest
    return kind(message)
