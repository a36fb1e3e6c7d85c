"""Names of models that stand for others, by shares: canaries, and moves from model to model. Pure.

Which one it is depends on the conversation: its client and how it begins. So all turns of a
conversation, and all that share a system prompt and a first question, meet the same cache.
"""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .openai_request import ClientRequest

# Of a prompt: a conversation's first messages, while later turns only add to them.
_BEGINNING_BYTES = 1024


def conversation(client: str, ask: ClientRequest) -> bytes:
    """What is the same for all turns of one conversation."""
    begins = next(
        (bytes(ask.fields[name]) for name in ("messages", "prompt", "input") if name in ask.fields),
        ask.raw,
    )
    return client.encode("utf-8", "surrogatepass") + b"\0" + begins[:_BEGINNING_BYTES]


def chosen(shares: Mapping[str, float], name: bytes) -> str:
    """The model for a conversation: each gets its share of all. If a share changes, no more
    conversations move than have to (rendezvous hashing with weights)."""

    def score(model: str) -> float:
        digest = hashlib.blake2b(name, key=model.encode()[:64], digest_size=8).digest()
        uniform = (int.from_bytes(digest, "big") + 1) / (2**64 + 1)
        return -shares[model] / math.log(uniform)

    return max(sorted(shares), key=score)
