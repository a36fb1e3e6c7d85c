"""Which error travels as which status and code; the client turns codes into errors again."""

from __future__ import annotations

from ..auth import MissingRight
from ..errors import (
    ConductorError,
    ConductorUnavailable,
    Conflict,
    InvalidRequest,
    NotAuthorized,
    UnknownInstance,
    UnknownModel,
    UnknownNode,
    UnknownRequest,
)

# Before a rejection's reason, in its code.
REJECTED = "rejected_"

# The first that fits; the last one fits all.
_CODES: tuple[tuple[type[ConductorError], int, str], ...] = (
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
_BY_CODE = {code: kind for kind, _, code in _CODES}


def code_of(failure: ConductorError) -> tuple[int, str]:
    """The status and the code of an error."""
    return next((status, code) for kind, status, code in _CODES if isinstance(failure, kind))


def error_of(status: int, code: str, message: str) -> ConductorError:
    """The error that an answer stands for."""
    kind = _BY_CODE.get(code)
    if kind is None:
        kind = ConductorUnavailable if status >= 500 else InvalidRequest
    return kind(message)
