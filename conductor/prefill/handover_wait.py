"""How long the KV of this prompt would wait for the network card of each candidate. Pure.

A prompt's KV leaves the instance that prefills it, behind the hand-overs and the fetches that its
node's card has promised by then. A node that many prompts are sent to because it has their prefix
can be free to compute and yet have a card that is behind by seconds: first tokens come at once from
there, and second ones late, and what others fetch from it, too. So of candidates whose TTFT is the
same, as far as can be told, the one is taken from which the request can *go on* soonest.

It is not added to the TTFT: each request would gain its second token and send bytes, or compute
them again, to get it, at the cost of those behind it. Simulated conversations on cards of 24 Gb/s
had 60% more TTFT with the sum, and second tokens that came later, too.

Sending takes as long from everywhere, and is not counted; nor is where the receiver's card is
behind, which is for the choice of the instance that decodes. Overlapped, layer by layer, sending
begins with the prefill: what is longer than that is waited for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from .policy_registry import Floats, PolicyQuestion


def handover_waits_s(question: PolicyQuestion, ttft_s: Floats, work_s: Floats) -> Floats:
    """[candidates] The seconds by which a busy card delays the second token, for first tokens after
    `ttft_s`, of which `work_s` are not spent in the queue. 0 for instances that also decode."""
    cluster, rows, transfers = question.cluster, question.rows, question.transfers
    if transfers.idle:
        return np.zeros(len(rows))
    nodes = cluster.node.take(rows)
    if not question.overlapped:
        waits_s = transfers.sender_waits_s(nodes, question.now + ttft_s)
    else:
        begins_at = question.now + ttft_s - work_s
        waits_s = transfers.sender_waits_s(nodes, begins_at)
        if waits_s.any():
            tokens = question.request.prompt_tokens / question.block_tokens
            nbytes = cluster.block_bytes.take(rows).astype(np.float64) * tokens
            sending_s = transfers.sending_s(nodes, nbytes)
            spare_s = work_s - sending_s
            waits_s = np.maximum(waits_s - np.maximum(spare_s, 0.0), 0.0)
    return np.where(cluster.decodes.take(rows), 0.0, waits_s)
