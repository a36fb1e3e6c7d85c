"""What the hand-over of a prompt's KV costs, as it is predicted when a request is placed. Pure.

The KV of the whole prompt, less the leading blocks that the instance that decodes has already, goes
from the node that prefills to the one that decodes. It leaves when the prefill is done, behind all
that both cards will have to do then; overlapped, layer by layer, it leaves while it is computed,
and only what is left of it at the end is waited for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..cost.transfer_model import TIERS
from ..prefill.disaggregation import overlapped

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..cost.transfer_model import TransferModel
    from ..prefill.policy_registry import Choice, PolicyQuestion
    from .decision_view import View
    from .settings import Settings

    Rows = NDArray[np.int64]
    Floats = NDArray[np.float64]

_HBM = TIERS.index("hbm")


@dataclass(frozen=True, slots=True)
class HandOver:
    """To each of some instances that could decode: the bytes to move, and the seconds from the end
    of the prefill until all of them are there. Arrays [rows]."""

    nbytes: Floats
    seconds: Floats


def predict(
    view: View,
    transfers: TransferModel,
    settings: Settings,
    question: PolicyQuestion,
    choice: Choice,
    decode: Rows,
) -> HandOver:
    """The hand-over from the chosen prefill instance to each of the rows `decode`."""
    cluster, request = question.cluster, question.request
    row = int(question.rows[choice.at])
    if len(decode) == 1 and decode[0] == row:
        return HandOver(np.zeros(1), np.zeros(1))
    had = view.device_blocks(question.match, request, decode) * question.block_tokens
    token_bytes = int(cluster.block_bytes[row]) / question.block_tokens
    nbytes = np.maximum(request.prompt_tokens - had, 0) * token_bytes
    nbytes[decode == row] = 0.0
    own_s = 0.0
    if overlapped(settings.disaggregation, request.prompt_tokens):
        own_s = max(float(choice.ttft_s[choice.at] - question.queue_s[choice.at]), 0.0)
    now = question.now
    begins_at = now + float(choice.ttft_s[choice.at]) - own_s
    source, targets = int(cluster.node[row]), cluster.node.take(decode)
    seconds = transfers.later_seconds_from(source, _HBM, targets, nbytes, begins_at, now)
    return HandOver(nbytes, np.maximum(seconds - own_s, 0.0))
