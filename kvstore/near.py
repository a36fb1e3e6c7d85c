"""The node on a client's own host, whose memory this process has mapped."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .pool.client import PoolClient

if TYPE_CHECKING:
    from .client import Client
    from .link import Link


def near_link(client: Client) -> Link | None:
    """The link to that node; None for a client that reaches nodes over the network only."""
    if isinstance(client, PoolClient):
        return client._home
    return client._link
