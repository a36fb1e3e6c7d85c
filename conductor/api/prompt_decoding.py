"""Decodes a prompt's token ids in slices: a list of a hundred thousand numbers takes 10 ms, and
decoding it at once would block the event loop, and all decisions, for as long."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from ..errors import InvalidRequest
from ..records import TOKENS_MAX
from ..web.time_slices import TimeSlices
from ..wire.answers import invalid_json
from ..wire.models import MatchBody, ScheduleBody, TokenIds

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Bytes of JSON text per slice; decoding one takes a tenth of a millisecond.
_SLICE_BYTES = 16 << 10
_NONE = msgspec.Raw(b"null")

_ids = msgspec.json.Decoder(TokenIds)


class ScheduleText(ScheduleBody, frozen=True, kw_only=True):
    """A body whose token ids are still JSON text, for `read_token_ids`."""

    token_ids: msgspec.Raw = _NONE  # type: ignore[assignment]


class MatchText(MatchBody, frozen=True, kw_only=True):
    """As `ScheduleText`."""

    token_ids: msgspec.Raw = _NONE  # type: ignore[assignment]


async def read_token_ids(body: ScheduleText | MatchText) -> NDArray[np.uint32] | None:
    """The token ids of a body. Yields to the event loop between slices. Raises
    Refusal for invalid token ids, InvalidRequest for too many."""
    text = bytes(body.token_ids).strip()
    if text == b"null":
        return None
    parts: list[NDArray[np.uint32]] = []
    begin, turns = 0, TimeSlices()
    while begin < len(text):
        end = text.find(b",", begin + _SLICE_BYTES)
        end = len(text) if end < 0 else end
        piece = text[begin:end]
        opened = b"" if begin == 0 else b"["
        closed = b"" if end == len(text) else b"]"
        try:
            parts.append(np.array(_ids.decode(opened + piece + closed), np.uint32))
        except msgspec.DecodeError as error:
            raise invalid_json(error, "token_ids") from error
        begin = end + 1
        await turns.give()
    found = parts[0] if len(parts) == 1 else np.concatenate(parts)
    if len(found) > TOKENS_MAX:
        raise InvalidRequest(f"token_ids has {len(found)} ids; it takes {TOKENS_MAX}")
    return found
