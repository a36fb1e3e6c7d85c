"""Builds HTTP answers: the service's own JSON, errors in OpenAI's format with their statuses, and
rejections."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.responses import Response

from ..records import Rejection
from ..state.request_ids import parted
from .error_codes import REJECTED, code_of
from .models import ErrorDetail, ErrorReply, HealthReply, RejectionDetail

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ..errors import ConductorError

JSON = "application/json"
REASON_HEADER = "x-tiffin-reject-reason"

# OpenAI's clients try again after every 5xx that does not say this.
NOT_AGAIN = {"x-should-retry": "false"}

# A longer wait is of no use to a client; and a prediction may be infinite.
RETRY_AFTER_MAX_S = 3600

_encoder = msgspec.json.Encoder()
_PARAM = re.compile(r" - at `\$\.?(.*)`$")


class Refusal(Exception):
    """A request that the service refuses because of its form or of a limit, before it reaches the
    core.

    `status` and `code` as in the answer; `close`: the server closes the connection after it;
    `final`: to try again is of no use, and the client is told so.
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
        final: bool = False,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param
        self.retry_after_s, self.close, self.final = retry_after_s, close, final


def answer(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """`value` as JSON; infinities and NaN become null."""
    return Response(_encoder.encode(value), status, headers, JSON)


def answer_all(field: str, texts: Sequence[bytes]) -> Response:
    """An object with one field: a list of `texts`, which are encoded JSON already."""
    return Response(b'{"%b":[%b]}' % (field.encode(), b",".join(texts)), media_type=JSON)


def ready(missing: list[str], notes: list[str] | None = None, *, details: bool) -> Response:
    """The answer of a readiness check: 200, or 503, with the reasons if `details`; and notes."""
    if not missing:
        return answer(HealthReply(status="ok", notes=notes or []))
    reasons = missing if details else ["who sends a token is told"]
    return answer(HealthReply(status="not ready", reasons=reasons, notes=notes or []), 503)


def error(
    status: int,
    code: str,
    message: str,
    *,
    param: str | None = None,
    tiffin: RejectionDetail | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """An error answer."""
    detail = _detail(status, code, message, param=param, tiffin=tiffin)
    return answer(ErrorReply(error=detail), status, headers)


def told(what: ConductorError | Refusal | Rejection) -> tuple[int, ErrorDetail]:
    """Status and error of what would be an answer of its own, within the answer to a batch."""
    if isinstance(what, Refusal):
        return what.status, _detail(what.status, what.code, str(what), param=what.param)
    if isinstance(what, Rejection):
        status, code = _rejection_code(what)
        return status, _detail(status, code, what.message, tiffin=_rejection_detail(what))
    status, code = code_of(what)
    return status, _detail(status, code, str(what))


def _detail(
    status: int,
    code: str,
    message: str,
    *,
    param: str | None = None,
    tiffin: RejectionDetail | None = None,
) -> ErrorDetail:
    return ErrorDetail(message=message, type=_type(status), code=code, param=param, tiffin=tiffin)


def refused(refusal: Refusal) -> Response:
    """The answer to a refused request."""
    headers = {"connection": "close"} if refusal.close else {}
    if refusal.final:
        headers |= NOT_AGAIN
    if refusal.retry_after_s is not None:
        headers["retry-after"] = str(retry_after(refusal.retry_after_s))
    return error(refusal.status, refusal.code, str(refusal), param=refusal.param, headers=headers)


def failed(failure: ConductorError) -> Response:
    """The answer for an error of the conductor."""
    status, code = code_of(failure)
    headers = {"www-authenticate": 'Bearer realm="tiffin"'} if status == 401 else None
    return error(status, code, str(failure), headers=headers)


def rejected(rejection: Rejection) -> Response:
    """The answer for a rejection: 429 for load, 503 if no instance could serve the request; both
    with Retry-After."""
    seconds = rejection.retry_after_s
    headers = {
        "retry-after": str(retry_after(1.0 if seconds is None else seconds)),
        REASON_HEADER: rejection.reason,
    }
    status, code = _rejection_code(rejection)
    tiffin = _rejection_detail(rejection)
    return error(status, code, rejection.message, tiffin=tiffin, headers=headers)


def _rejection_code(rejection: Rejection) -> tuple[int, str]:
    return 429 if rejection.overloaded else 503, f"{REJECTED}{rejection.reason}"


def _rejection_detail(rejection: Rejection) -> RejectionDetail:
    return RejectionDetail(
        request_id=parted(rejection.request_id)[1],
        reason=rejection.reason,
        predicted_ttft_s=rejection.predicted_ttft_s,
        predicted_tbt_s=rejection.predicted_tbt_s,
        retry_after_s=rejection.retry_after_s,
        terms=dict(rejection.terms),
    )


def retry_after(seconds: float) -> int:
    """The value of the header Retry-After: whole seconds, at least one."""
    if math.isnan(seconds):
        return 1
    return math.ceil(min(max(seconds, 1.0), RETRY_AFTER_MAX_S))


def invalid_json(failure: msgspec.DecodeError | RecursionError, field: str = "") -> Refusal:
    """The refusal of a body that could not be decoded, or of its field `field`. msgspec's messages
    name types and limits, never values."""
    if isinstance(failure, RecursionError):
        return Refusal(400, "invalid_json", "the body is nested too deeply")
    if not isinstance(failure, msgspec.ValidationError):
        text = f"the body is not JSON: {failure}"
        if "escape" in text or "surrogate" in text:
            text += ": half a character, as of text that was cut within an emoji"
        return Refusal(400, "invalid_json", text)
    text = str(failure)
    if field:
        text = f"{text.partition(' - at `')[0]} - at `$.{field}`"
    found = _PARAM.search(text)
    param = found.group(1) if found else None
    return Refusal(422, "invalid_body", text, param=param or None)


def _type(status: int) -> str:
    if status in (401, 403):
        return "authentication_error" if status == 401 else "permission_error"
    if status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if status < 500 else "server_error"
