"""Whether a request is itself the reason why instances fail on it. Pure.

A request that ends an engine (a defect that its length or its parameters trigger) would end one
instance after the other if it were tried again wherever there is one left. So it is tried again
after one failure, which may have had any reason, and not after two that look like its own:

    two instances that it was computed on have died      it is given up
    two instances answer 500 with the same words         the second answer is the client's
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec
from msgspec import Raw

from ..engines.engine_client import EngineDied, EngineFailed, EngineGone, Whole

if TYPE_CHECKING:
    from collections.abc import Sequence

# How many instances may die of a request.
_DEATHS_MAX = 2
# What differs between two answers with the same words: ids, addresses, counts, times.
_NUMBERS = re.compile(rb"[0-9a-fA-F-]{8,}|\d+")


class _Error(msgspec.Struct):
    message: str = ""


class _Body(msgspec.Struct):
    """An error in OpenAI's form, or in that of older engines."""

    error: Raw = Raw(b"null")
    message: str = ""


_body = msgspec.json.Decoder(_Body)
_error = msgspec.json.Decoder(_Error)


class Poisonous(Exception):
    """The request is given up: instances have died of it."""


def own_answer(failures: Sequence[EngineGone]) -> Whole | None:
    """The answer to pass on instead of another try, after these failures of a request; None: try
    again. Raises Poisonous."""
    latest = failures[-1]
    if isinstance(latest, EngineFailed):
        words = _words(latest.answer.body)
        others = (one for one in failures[:-1] if isinstance(one, EngineFailed))
        if any(_words(one.answer.body) == words for one in others):
            return latest.answer
    dead = {one.target.name for one in failures if isinstance(one, EngineDied)}
    if len(dead) >= _DEATHS_MAX:
        raise Poisonous(f"{' and '.join(sorted(dead))} ended while they computed this request")
    return None


def _words(body: bytes) -> bytes:
    """The message of an error, without what is never the same."""
    try:
        told = _body.decode(body)
        message = told.message
        if bytes(told.error) != b"null":
            message = _error.decode(told.error).message
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        message = ""
    return _NUMBERS.sub(b"#", message.encode("utf-8", "replace") if message else body)
