"""Ids of responses (`/v1/responses`) that tell which instance has them. Pure.

    resp_ TAG RANDOM      TAG: 10 hex digits of BLAKE2b of the instance's id; RANDOM: 24 more

Engines keep responses in their own memory, so whatever continues one has to go to the same
instance. vLLM takes the id of a response from the request, so any gateway finds the instance by the
id alone, without a table that it would have to share with others.
"""

from __future__ import annotations

import hashlib
import secrets
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

PREFIX = "resp_"
_TAG = 10


def new_id(instance: str) -> str:
    """An id for a response of this instance."""
    return PREFIX + _tag(instance) + secrets.token_hex(12)


def holder(response_id: str, instances: Iterable[str]) -> str | None:
    """Which of these instances made the response; None if none did."""
    tag = response_id.removeprefix(PREFIX)[:_TAG]
    return next((name for name in instances if _tag(name) == tag), None)


def _tag(instance: str) -> str:
    return hashlib.blake2b(instance.encode(), digest_size=_TAG // 2).hexdigest()
