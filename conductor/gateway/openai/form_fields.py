"""What the gateway needs of a form (multipart/form-data), as requests with a file have it. Pure."""

from __future__ import annotations

from email.parser import BytesHeaderParser
from email.policy import HTTP
from typing import NamedTuple

from ...wire.answers import Refusal
from ...wire.models import NAME_MAX

_HEADERS = BytesHeaderParser(policy=HTTP)
_YES = frozenset(("true", "1", "yes", "on", "y", "t"))  # as pydantic has it, by which vLLM reads


class Form(NamedTuple):
    """The model that it names, whether it asks for a stream, and how long its file is."""

    model: str
    stream: bool
    file_bytes: int


def read_fields(raw: bytes, content_type: str) -> Form:
    """These fields of a form. The file in it is not copied. Raises Refusal."""
    kind = _HEADERS.parsebytes(b"content-type: " + content_type.encode("latin-1") + b"\r\n\r\n")
    boundary = kind.get_param("boundary")
    if kind.get_content_type() != "multipart/form-data" or not isinstance(boundary, str):
        raise Refusal(415, "unsupported_media_type", "send multipart/form-data with a boundary")
    found, file_bytes = dict[str, str](), 0
    mark, at = b"--" + boundary.encode("latin-1"), 0
    while (begin := raw.find(mark, at)) >= 0:
        head = begin + len(mark) + 2
        body = raw.find(b"\r\n\r\n", head) + 4
        end = raw.find(b"\r\n" + mark, max(head, body - 2))
        if body < 4 or end < 0:
            break
        name = _HEADERS.parsebytes(raw[head:body]).get_param("name", header="content-disposition")
        if name == "file":
            file_bytes = end - body
        elif name in ("model", "stream") and 0 < end - body <= NAME_MAX:
            found.setdefault(name, raw[body:end].decode("utf-8", "replace"))
        at = end + 2
    if "model" not in found:
        raise Refusal(400, "invalid_body", "a form with the field `model` is needed", param="model")
    return Form(found["model"], found.get("stream", "").lower() in _YES, file_bytes)
