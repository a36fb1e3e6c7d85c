"""Blocks that arrive from one peer in any order, and the reports of damaged ones."""

from __future__ import annotations

from unittest.mock import Mock

import numpy as np
import pytest
from kvsupport import SCHEMA, fresh_prefix

from tiffin.kvstore.client.blocks.block_views import select
from tiffin.kvstore.client.pool.remote import block_read
from tiffin.kvstore.client.pool.remote.block_read import ArrivedSegments, _report
from tiffin.kvstore.client.verbs.block_verbs import Access
from tiffin.kvstore.errors import CorruptBlock
from tiffin.kvstore.node.core import messages


def test_the_block_that_is_damaged_is_reported_and_not_one_that_is_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Several streams carry ranges in any order: the second block may be complete before the first
    one is."""
    monkeypatch.setattr(block_read, "_AT_END_BYTES_MAX", 0)  # as for large blocks
    prefix = fresh_prefix(2)
    targets = [np.zeros(SCHEMA.block_bytes, np.uint8) for _ in prefix.keys]
    arrivals = ArrivedSegments(prefix, select(SCHEMA), Access("always", None), targets)  # type: ignore[arg-type]
    arrivals.prepare()
    arrivals.reply = messages.Leased(1, 0, 7, [0, SCHEMA.extent_bytes], [11, 12])
    first, rest = divmod(len(arrivals.ranges), 2)
    assert not rest
    for index in range(first, 2 * first - 1):
        arrivals.arrived(index)
    with pytest.raises(CorruptBlock):
        arrivals.arrived(2 * first - 1)  # zeros are not the header of any block
    peer = Mock()
    _report(peer, prefix, arrivals)
    (report,) = (call.args[0] for call in peer.post.call_args_list)
    assert (report.key, report.generation) == (prefix.keys[1], 12)
