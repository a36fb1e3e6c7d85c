"""Blocks that one process leases and another reads in its own mapping of the same memory."""

from __future__ import annotations

import contextlib
import pickle
import subprocess
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest
from kvsupport import SCHEMA, assert_right, fresh_prefix, payloads_of

from tiffin.kvstore import Client
from tiffin.kvstore.client.blocks.block_places import BlockPlaces, MappedRegion, RegionId
from tiffin.kvstore.errors import ClientClosed, InvalidInput, StaleLease

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvsupport import Daemon

BLOCKS = 3
# What another process does: it reads places from stdin and writes the blocks' bytes to stdout.
READER = """
import pickle, sys
from tiffin.kvstore import Client
with Client.open(sys.argv[1]) as client:
    for view in client.region.views(pickle.load(sys.stdin.buffer)):
        assert not view.flags.writeable
        sys.stdout.buffer.write(view)
"""


@pytest.fixture
def daemon(own_daemon: Callable[..., Daemon]) -> Daemon:
    return own_daemon(options=["--no-prefault"])


@pytest.fixture
def two(daemon: Daemon) -> Iterator[tuple[Client, Client]]:
    """One that leases and one that reads."""
    with Client.open(daemon.url) as owner, Client.open(daemon.url) as reader:
        yield owner, reader


def region_of(client: Client) -> MappedRegion:
    region = client.region
    assert region is not None
    return region


@pytest.mark.slow
def test_another_process_reads_the_blocks_in_place(
    daemon: Daemon, two: tuple[Client, Client]
) -> None:
    owner, _ = two
    prefix = fresh_prefix(BLOCKS)
    payloads = payloads_of(prefix)
    owner.put(prefix, payloads)
    with owner.get(prefix) as leased:
        command = [sys.executable, "-c", READER, daemon.url]
        places = pickle.dumps(leased.places())
        done = subprocess.run(command, input=places, capture_output=True, check=True)
    assert done.stdout == b"".join(bytes(payload) for payload in payloads)


@pytest.mark.slow
def test_a_part_of_the_places_is_that_of_a_part_of_the_blocks(two: tuple[Client, Client]) -> None:
    owner, reader = two
    prefix = fresh_prefix(BLOCKS)
    payloads = payloads_of(prefix)
    owner.put(prefix, payloads)
    with owner.get(prefix) as leased:
        part = leased.places().part(1, 3)
        assert len(part) == 2
        assert [bytes(view) for view in region_of(reader).views(part)] == [
            bytes(payload) for payload in payloads[1:]
        ]


@pytest.mark.slow
def test_the_mapping_outlives_the_node_and_its_clients(daemon: Daemon) -> None:
    prefix = fresh_prefix(BLOCKS)
    payloads = payloads_of(prefix)
    with Client.open(daemon.url) as reader:
        region = region_of(reader)
    owner = Client.open(daemon.url)
    owner.put(prefix, payloads)
    places = owner.get(prefix).places()
    daemon.kill()
    owner.close()
    assert [bytes(view) for view in region.views(places)] == [bytes(one) for one in payloads]


@pytest.mark.slow
def test_a_restarted_node_has_another_region(daemon: Daemon, two: tuple[Client, Client]) -> None:
    owner, _ = two
    prefix = fresh_prefix(BLOCKS)
    owner.put(prefix, payloads_of(prefix))
    leased, before = owner.get(prefix), region_of(owner)
    places = leased.places()
    daemon.kill()
    daemon.start()
    with contextlib.suppress(ConnectionError):
        owner.match(prefix)  # notices
    owner.match(prefix)
    assert region_of(owner).identity != before.identity
    assert_right(leased, prefix)  # memory of the node that is gone
    with pytest.raises(StaleLease, match="restarted"):
        leased.places()
    with pytest.raises(InvalidInput, match="lie in"):
        region_of(owner).views(places)


@pytest.mark.slow
def test_blocks_under_a_lease_stay_although_they_are_removed(two: tuple[Client, Client]) -> None:
    owner, reader = two
    prefix = fresh_prefix(BLOCKS)
    payloads = payloads_of(prefix)
    owner.put(prefix, payloads)
    with owner.get(prefix) as leased:
        places = leased.places()
        reader.remove(prefix)
        reader.put(fresh_prefix(BLOCKS), payloads_of(fresh_prefix(BLOCKS)))
        views = region_of(reader).views(places)
        assert [bytes(view) for view in views] == [bytes(payload) for payload in payloads]


@pytest.mark.slow
def test_copies_have_no_places(two: tuple[Client, Client]) -> None:
    owner, _ = two
    prefix = fresh_prefix(BLOCKS)
    owner.put(prefix, payloads_of(prefix))
    into = np.empty((BLOCKS, SCHEMA.block_bytes), np.uint8)
    with owner.get(prefix, into=into) as copies, pytest.raises(InvalidInput, match="copies"):
        copies.places()


@pytest.mark.slow
def test_released_blocks_have_no_places(two: tuple[Client, Client]) -> None:
    owner, _ = two
    prefix = fresh_prefix(BLOCKS)
    owner.put(prefix, payloads_of(prefix))
    leased = owner.get(prefix)
    leased.release()
    with pytest.raises(ClientClosed, match="released"):
        leased.places()


@pytest.mark.slow
def test_no_blocks_have_no_places(two: tuple[Client, Client]) -> None:
    owner, reader = two
    with owner.get(fresh_prefix(BLOCKS)) as leased:
        assert region_of(reader).views(leased.places()) == []


def test_places_outside_the_region_are_refused() -> None:
    region = MappedRegion(RegionId(0, 1), np.zeros(100, np.uint8))
    assert len(region.views(BlockPlaces(RegionId(0, 1), (0, 36), 64))) == 2
    for offset in (-1, 37, 100, 1 << 60):
        with pytest.raises(InvalidInput, match="outside"):
            region.views(BlockPlaces(RegionId(0, 1), (0, offset), 64))


@pytest.mark.slow
def test_a_closed_client_has_no_region(daemon: Daemon) -> None:
    client = Client.open(daemon.url)
    client.close()
    with pytest.raises(ClientClosed):
        _ = client.region
