"""Finds a client's link to the node on its own host, whose memory this process has mapped."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..pool.client import PoolClient

if TYPE_CHECKING:
    from ..connection.node_link import NodeLink
    from .client import Client


def near_link(client: Client) -> NodeLink | None:
    """The link to the node on this host; None for a client that has only remote nodes."""
    if isinstance(client, PoolClient):
        return client._home
    return client._link
