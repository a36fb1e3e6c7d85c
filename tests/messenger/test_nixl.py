"""NIXL between two processes: the contract, and what happens when the other one misbehaves."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

import pytest
from nixlsupport import Neighbour, ends, require_nixl

from tiffin.messenger.nixl import NixlTransport
from tiffin.messenger.nixl_agent import NixlAgent
from tiffin.messenger.testing import Peer, TransportContract

if TYPE_CHECKING:
    from collections.abc import Iterator

require_nixl()

Ends = tuple[NixlAgent, Neighbour]


@pytest.fixture(scope="module")
def over_tcp() -> Iterator[Ends]:
    with ends("tcp") as both:
        yield both


@pytest.fixture(scope="module")
def over_memory() -> Iterator[Ends]:
    with ends("") as both:
        yield both


def peer_of(both: Ends, **options: object) -> Iterator[Peer]:
    agent, other = both
    other.fresh()
    transport = NixlTransport(agent, other.description, other.resolve, other.confirm, **options)
    with closing(transport):
        yield Peer(transport, other.book, other.allocate)


class TestOverTcp(TransportContract):
    @pytest.fixture
    def peer(self, over_tcp: Ends) -> Iterator[Peer]:
        yield from peer_of(over_tcp)


class TestOverMemory(TransportContract):
    @pytest.fixture
    def peer(self, over_memory: Ends) -> Iterator[Peer]:
        yield from peer_of(over_memory)
