"""Entries written to Redis without the token are rejected: they cost time, not bytes or puts."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest
from attacks.forger import Trap
from kvsupport import assert_right, fresh_prefix, wait_until

from tiffin.conductor.events.node_feed import NodesFeed
from tiffin.conductor.pool.orders import Copy
from tiffin.conductor.service.order_sender import OrderCarrier
from tiffin.kvstore.directory import open_directory

if TYPE_CHECKING:
    from attacks.forger import Forger
    from attacks.tokenpool import TokenPool

FORGED = 200


def tiffin(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command as a user starts it."""
    command = [sys.executable, "-m", "tiffin.kvstore", *arguments]
    environment = {**os.environ, "COLUMNS": "200"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)


def test_forged_nodes_with_much_room_take_no_puts(pool: TokenPool, forger: Forger) -> None:
    with Trap() as trap, contextlib.closing(pool.open()) as client:
        forger.flood(FORGED, trap.address)
        for _ in range(5):
            prefix = fresh_prefix(3)
            assert pool.put(client, prefix).complete
            with client.get(prefix) as blocks:
                assert len(blocks) == 3
                assert_right(blocks, prefix)
        assert {record.name for record in client.nodes().values()} == {"a", "b"}
    assert trap.caught == 0


@pytest.mark.slow
def test_nobody_connects_to_a_forged_address(pool: TokenPool, forger: Forger) -> None:
    """Neither clients, nor nodes (which copy from each other), nor commands, nor a conductor."""
    with Trap() as trap, contextlib.closing(pool.open()) as client:
        forger.claim(1, trap.address)
        forger.claim_stamped(2, trap.address)
        prefix = fresh_prefix(2)
        pool.put(client, prefix)
        forger.locate(list(prefix.keys), [1, 2])  # replaces the true locations

        shown = tiffin("status", pool.url, "--json")
        assert shown.returncode == 0, shown.stderr
        found = json.loads(shown.stdout)
        assert {node["name"] for node in found["nodes"]} == {"a", "b"}
        assert found["directory"]["unauthenticated_records"] == 2
        assert "2 entries" in tiffin("status", pool.url).stdout
        refused = tiffin("drain", pool.url, "forged-1")
        assert refused.returncode != 0
        assert "no node is called forged-1" in refused.stderr

        members = open_directory(pool.directory, pool=pool.name, token=pool.credentials.token)
        updates: list[object] = []
        feed = NodesFeed(members, pool.credentials, updates.append)
        with contextlib.closing(members), feed:
            wait_until(lambda: set(feed.statistics()["nodes"]) == {"a", "b"}, "both are followed")
        members = open_directory(pool.directory, pool=pool.name, token=pool.credentials.token)
        carrier = OrderCarrier(members, pool.credentials)
        with contextlib.closing(carrier):
            carrier.submit([Copy(1, tuple(prefix.keys), bytes(16), 0, "forged-1", "a", 1, "")])
            (ended,) = wait_until(carrier.finished, "the order ends")
            assert ended.error
    assert trap.caught == 0


def test_strangers_are_named_in_the_log_but_not_for_ever(
    pool: TokenPool, forger: Forger, caplog: pytest.LogCaptureFixture
) -> None:
    forger.claim(1, "10.6.6.6:1")
    with caplog.at_level(logging.WARNING, logger="tiffin.kvstore.directory.redis"):
        began = time.monotonic()
        for turn in range(100):
            directory = open_directory(pool.directory, pool=pool.name, token=pool.credentials.token)
            with contextlib.closing(directory):
                assert 1 not in directory.nodes(), turn
    said = [line.getMessage() for line in caplog.records if "forged" in line.getMessage()]
    assert "forged-1 at 10.6.6.6:1" in said[0]
    assert len(said) <= min(99, 5 * (time.monotonic() - began + 2))


def test_a_genuine_entry_is_good_in_one_place_only(pool: TokenPool, forger: Forger) -> None:
    """It is not valid under another number, nor in another pool with the same token."""
    (number, entry), *_ = forger.entries().items()
    forger.place(int(number) + 1, entry)
    forger.client.hset(f"tiffin:{{{pool.name}-2:m}}:nodes", number, entry)
    token = pool.credentials.token
    here = open_directory(pool.directory, pool=pool.name, token=token)
    there = open_directory(pool.directory, pool=f"{pool.name}-2", token=token)
    with contextlib.closing(here), contextlib.closing(there):
        assert {node.name for node in here.nodes().values()} == {"a", "b"}
        assert int(number) + 1 not in here.nodes()
        assert there.nodes() == {}


def test_without_the_token_there_is_no_node(pool: TokenPool) -> None:
    """Without the token the membership can be read but not verified; the error says so."""
    for token in (b"", b"another-token-of-32-bytes-at-least"):
        directory = open_directory(pool.directory, pool=pool.name, token=token)
        with contextlib.closing(directory):
            assert directory.nodes() == {}
            assert directory.statistics()["unauthenticated_records"] == 2


def test_forged_locations_cost_time_and_nothing_else(pool: TokenPool, forger: Forger) -> None:
    """With 39 unknown nodes and all real ones as locations of each block, puts and gets work."""
    numbers = sorted(int(number) for number in forger.entries())
    with contextlib.closing(pool.open()) as client:
        for _ in range(3):
            prefix = fresh_prefix(4)
            forger.locate(list(prefix.keys), [*range(1, 40), *numbers])
            with client.get(prefix) as blocks:
                assert not len(blocks)
            assert pool.put(client, prefix).complete
            forger.locate(list(prefix.keys), [*range(1, 40), *numbers])
            with client.get(prefix) as blocks:
                assert len(blocks) == 4
                assert_right(blocks, prefix)
            assert client.remove(prefix) == 4
        assert pool.blocks() == 0
