"""The home of readers and writers is stopped during reads, and another node has the same blocks."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
from faults.faultpool import FaultPool, Tally, read_for, read_once
from kvsupport import fresh_prefix, is_quiet, payloads_of, wait_until

from tiffin.kvstore import Client

if TYPE_CHECKING:
    from kvsupport import Daemon

    from tiffin.kvstore import Prefix

# How much longer a get may wait once home is known to hang, and how long the get that notices it
# may wait: half of `hedge_s`, and the grace that every node has. On a machine whose cores are busy,
# the processes that do answer are late themselves: hence the slack, which is much less than the 5 s
# of a get that waits for home until its deadline.
EXTRA_S = 0.25
FIRST_S = 0.3
SLACK_S = 1.0

pytestmark = pytest.mark.slow


def open_at(pool: FaultPool, home: Daemon) -> Any:
    """A client whose home is this node."""
    return Client.open(f"{pool.directory}&home=unix:{home.socket}", name="at home")


def write_until(stop: threading.Event, client: Any, written: list[Prefix]) -> list[str]:
    """Put fresh prompts until `stop`; returns the failures."""
    failed: list[str] = []
    while not stop.is_set():
        prefix = fresh_prefix(2)
        result = client.put(prefix, payloads_of(prefix), timeout_s=5.0)
        if result.complete:
            written.append(prefix)
        else:
            failed.append(str(result))
        stop.wait(0.01)
    return failed


@pytest.mark.parametrize("shared", [True, False], ids=["one client", "a client each"])
def test_no_get_fails_when_home_stops_answering(pool: FaultPool, shared: bool) -> None:
    home, other = pool.nodes
    stop = threading.Event()
    written: list[Prefix] = []
    failed: list[str] = []
    with pool.open() as filler, open_at(pool, home) as reader, open_at(pool, home) as own:
        writer = reader if shared else own
        prefixes = pool.fill(filler, 12)
        before = read_for(reader, prefixes, 0.5)
        writing = threading.Thread(
            target=lambda: failed.extend(write_until(stop, writer, written)), name="writer"
        )
        writing.start()
        try:
            read_for(reader, prefixes, 0.5, before)
            with home.stopped():
                first, after = Tally(), Tally()
                read_once(reader, prefixes[0], first)
                put_before = len(written)
                read_for(reader, prefixes, 4.0, after)
                wait_until(lambda: len(written) > put_before, "puts go on")
                on_other = written[-1]
                with Client.open(other.url) as direct:
                    assert direct.match(on_other).blocks == 2, "what was put went elsewhere"
            wait_until(lambda: not reader.near_link.away, "home has answered", 20.0)
            wait_until(lambda: not writer.near_link.away, "home has answered", 20.0)
            read_for(reader, prefixes, 0.5, after)
        finally:
            stop.set()
            writing.join()
        for tally in (before, first, after):
            assert (tally.wrong, tally.failed, tally.short) == (0, [], [])
        assert failed == []
        usual_s = before.longest_s(pool.watch)
        assert first.longest_s(pool.watch) < usual_s + FIRST_S + SLACK_S
        assert after.longest_s(pool.watch) < usual_s + EXTRA_S + SLACK_S
        assert after.gets > 20

        again = fresh_prefix(2)
        assert writer.put(again, payloads_of(again)).complete
        with Client.open(home.url) as direct:
            assert direct.match(again).blocks == 2, "home is home again"
            wait_until(lambda: is_quiet(direct.statistics()), "what it granted late is given back")
