"""How answers look: JSON of ours, errors in OpenAI's shape, and which error has which status."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.responses import Response

from .codes import REJECTED, code_of
from .models import ErrorDetail, ErrorReply, RejectionDetail

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..errors import ConductorError
    from ..records import Rejection

JSON = "application/json"
REASON_HEADER = "x-tiffin-reject-reason"

# Nobody plans further ahead; and a prediction may be infinite.
RETRY_AFTER_MAX_S = 3600

_encoder = msgspec.json.Encoder()
_PARAM = re.compile(r" - at `\$\.?(.*)`$")


class Refusal(Exception):
    """A request that is refused because of how it was sent, before anybody looked at what it asks.

    `status` and `code` as in the answer; `close`: the connection is of no use any more.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
        close: bool = False,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param
        self.retry_after_s, self.close = retry_after_s, close


def answer(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """`value` as JSON; infinities and NaN become null."""
    return Response(_encoder.encode(value), status, headers, JSON)


def error(
    status: int,
    code: str,
    message: str,
    *,
    param: str | None = None,
    tiffin: RejectionDetail | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """An answer that is no success."""
    detail = ErrorDetail(message=message, type=_type(status), code=code, param=param, tiffin=tiffin)
    return answer(ErrorReply(error=detail), status, headers)


def refused(refusal: Refusal) -> Response:
    """What a refusal is answered with."""
    headers = {"connection": "close"} if refusal.close else {}
    if refusal.retry_after_s is not None:
        headers["retry-after"] = str(retry_after(refusal.retry_after_s))
    return error(refusal.status, refusal.code, str(refusal), param=refusal.param, headers=headers)


def failed(failure: ConductorError) -> Response:
    """What an error of the conductor is answered with."""
    status, code = code_of(failure)
    headers = {"www-authenticate": 'Bearer realm="tiffin"'} if status == 401 else None
    return error(status, code, str(failure), headers=headers)


def rejected(rejection: Rejection) -> Response:
    """429 for load, 503 when nothing could serve it; both say when to come back."""
    tiffin = RejectionDetail(
        request_id=rejection.request_id,
        reason=rejection.reason,
        predicted_ttft_s=rejection.predicted_ttft_s,
        predicted_tbt_s=rejection.predicted_tbt_s,
        retry_after_s=rejection.retry_after_s,
        terms=dict(rejection.terms),
    )
    seconds = rejection.retry_after_s
    headers = {
        "retry-after": str(retry_after(1.0 if seconds is None else seconds)),
        REASON_HEADER: rejection.reason,
    }
    status = 429 if rejection.overloaded else 503
    code = f"{REJECTED}{rejection.reason}"
    return error(status, code, rejection.message, tiffin=tiffin, headers=headers)


def retry_after(seconds: float) -> int:
    """The header's value: whole seconds, at least one."""
    if math.isnan(seconds):
        return 1
    return math.ceil(min(max(seconds, 1.0), RETRY_AFTER_MAX_S))


def invalid_json(failure: msgspec.DecodeError | RecursionError) -> Refusal:
    """What was wrong with a body. msgspec's messages name types and limits, never values."""
    if isinstance(failure, RecursionError):
        return Refusal(400, "invalid_json", "the body is nested too deeply")
    if not isinstance(failure, msgspec.ValidationError):
        return Refusal(400, "invalid_json", f"the body is not JSON: {failure}")
    text = str(failure)
    found = _PARAM.search(text)
    param = found.group(1) if found else None
    return Refusal(422, "invalid_body", text, param=param or None)


def _type(status: int) -> str:
    if status in (401, 403):
        return "authentication_error" if status == 401 else "permission_error"
    if status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if status < 500 else "server_error"
