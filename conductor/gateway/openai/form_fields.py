"""The field `model` of a form (multipart/form-data), as requests with a file have it. Pure."""

from __future__ import annotations

from email.parser import BytesHeaderParser
from email.policy import HTTP

from ...wire.answers import Refusal
from ...wire.models import NAME_MAX

_HEADERS = BytesHeaderParser(policy=HTTP)


def model_of_form(raw: bytes, content_type: str) -> str:
    """The model that a form names. The file in it is not copied. Raises Refusal."""
    kind = _HEADERS.parsebytes(b"content-type: " + content_type.encode("latin-1") + b"\r\n\r\n")
    boundary = kind.get_param("boundary")
    if kind.get_content_type() != "multipart/form-data" or not isinstance(boundary, str):
        raise Refusal(415, "unsupported_media_type", "send multipart/form-data with a boundary")
    mark, at = b"--" + boundary.encode("latin-1"), 0
    while (begin := raw.find(mark, at)) >= 0:
        head = begin + len(mark) + 2
        body = raw.find(b"\r\n\r\n", head) + 4
        end = raw.find(b"\r\n" + mark, max(head, body - 2))
        if body < 4 or end < 0:
            break
        part = _HEADERS.parsebytes(raw[head:body])
        if part.get_param("name", header="content-disposition") == "model":
            name = raw[body:end].decode("utf-8", "replace")
            if 0 < len(name) <= NAME_MAX:
                return name
            break
        at = end + 2
    raise Refusal(400, "invalid_body", "a form with the field `model` is needed", param="model")
