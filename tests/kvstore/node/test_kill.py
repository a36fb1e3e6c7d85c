"""Real processes that are stopped and killed (SIGSTOP, SIGKILL) in the middle of their work.

The promise: a killed client's extents are freed as soon as the kernel reports its death, a stopped
client's are not given to another writer while it could still write, and a restarted daemon finds
what it had written to NVMe. And no get ever returns a byte that does not belong to its key, which
every test can check because contents are derived from keys (`kvsupport.payload_of`).
"""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import select
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

import kvworker
import numpy as np
import pytest
from kvsupport import (
    EXTENT,
    Daemon,
    Worker,
    assert_conserved,
    assert_right,
    fresh_prefix,
    is_quiet,
    payload_of,
    payloads_of,
    wait_until,
)
from kvworker import CAMPAIGN, COUNTERS

from tiffin.kvstore import Client
from tiffin.kvstore.errors import StaleLease, TiffinError
from tiffin.kvstore.node.core.records import IN_NVME

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tiffin.kvstore import Prefix

# A kill, with a restart of the daemon now and then, takes some 0.3 s.
KILL_S = 5.0


@pytest.fixture
def spawn(commands_folder: Path) -> Iterator[Callable[..., Worker]]:
    """A function that starts workers; those that a test leaves are killed."""
    with contextlib.ExitStack() as stack:

        def start(*arguments: object) -> Worker:
            return stack.enter_context(Worker("kvworker.py", commands_folder, *arguments))

        yield start


def dram(client: Client) -> dict[str, Any]:
    numbers = client.statistics()
    assert_conserved(numbers)
    found: dict[str, Any] = numbers["tiers"]["dram"]
    return found


def stored_in_time(client: Client, prefix: Prefix, timeout_s: float = 5.0) -> tuple[int, ...]:
    """The positions that a put stored; repeats it if its lease expired because a process was
    stopped."""
    while True:
        with contextlib.suppress(StaleLease):
            return client.put(prefix, payloads_of(prefix), timeout_s=timeout_s).stored


def test_a_writer_killed_between_reserve_and_commit_holds_nothing(
    own_daemon: Callable[..., Daemon], spawn: Callable[..., Worker]
) -> None:
    """Its write lease has a minute left; the kernel's report of its death ends it at once."""
    daemon = own_daemon(options=["--write-lease-s", "60"])
    with Client.open(daemon.url) as client:
        writer = spawn("write", daemon.socket, "killed", 4)
        assert writer.says() == "ready"
        assert dram(client)["reserved_bytes"] == 4 * EXTENT
        prefix = kvworker.prefix_of("killed", 4)
        assert client.put(prefix, payloads_of(prefix)).busy == (0, 1, 2, 3)
        writer.kill()
        wait_until(lambda: dram(client)["free_bytes"] == 16 * EXTENT, "its extents are free")
        assert client.put(prefix, payloads_of(prefix)).stored == (0, 1, 2, 3)
        with client.get(prefix) as blocks:
            assert blocks.complete
            assert_right(blocks, prefix)


@pytest.mark.slow
def test_a_reader_killed_with_leases_holds_nothing(
    own_daemon: Callable[..., Daemon], spawn: Callable[..., Worker]
) -> None:
    daemon = own_daemon()
    prefix = kvworker.prefix_of("read", 4)
    with Client.open(daemon.url) as client:
        client.put(prefix, payloads_of(prefix))
        reader = spawn("read", daemon.socket, "read", 4)
        assert reader.says() == "ready"
        client.remove(prefix)
        assert dram(client)["quarantined_bytes"] == 4 * EXTENT
        reader.kill()
        wait_until(lambda: dram(client)["free_bytes"] == 16 * EXTENT, "its extents are free")
        wait_until(lambda: len(client.statistics()["sessions"]) == 1, "its session is gone")


@pytest.mark.slow
def test_a_writer_that_slept_through_its_lease_harms_nobody(
    own_daemon: Callable[..., Daemon], spawn: Callable[..., Worker]
) -> None:
    daemon = own_daemon(options=["--write-lease-s", "0.3"])
    prefix = kvworker.prefix_of("asleep", 2)
    with Client.open(daemon.url) as client:
        sleeper = spawn("write", daemon.socket, "asleep", 2)
        assert sleeper.says() == "ready"
        sleeper.signal(signal.SIGSTOP)
        wait_until(lambda: dram(client)["quarantined_bytes"] == 2 * EXTENT, "its lease expires")
        assert stored_in_time(client, prefix) == (0, 1)
        filler = [fresh_prefix(1) for _ in range(16)]
        for one in filler:  # no writer gets the sleeper's extents, however full the pool is
            stored_in_time(client, one, timeout_s=0)
        assert dram(client)["quarantined_bytes"] == 2 * EXTENT
        stored_in_time(client, prefix)
        assert client.match(prefix).blocks == 2
        sleeper.signal(signal.SIGCONT)
        assert sleeper.ask("scribble") == "done"
        for one in [prefix, *filler]:
            with client.get(one) as blocks:
                assert blocks.reason != "corrupt"
                assert_right(blocks, one)
        assert sleeper.ask("commit") == "stale"
        wait_until(lambda: dram(client)["quarantined_bytes"] == 0, "it acknowledged")
        with client.get(prefix) as blocks:
            assert blocks.complete
            assert_right(blocks, prefix)


@pytest.mark.slow
def test_a_killed_sleeper_is_forgotten(
    own_daemon: Callable[..., Daemon], spawn: Callable[..., Worker]
) -> None:
    daemon = own_daemon(options=["--write-lease-s", "0.1"])
    with Client.open(daemon.url) as client:
        sleeper = spawn("write", daemon.socket, "gone", 3)
        assert sleeper.says() == "ready"
        wait_until(lambda: dram(client)["quarantined_bytes"] == 3 * EXTENT, "its lease expires")
        sleeper.kill()
        wait_until(lambda: dram(client)["free_bytes"] == 16 * EXTENT, "its extents are free")


class Load(threading.Thread):
    """Puts new prompts until its node is gone."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.prefixes = [fresh_prefix(4) for _ in range(200)]
        self._url = url

    def run(self) -> None:
        with contextlib.suppress(TiffinError), Client.open(self._url, name="load") as client:
            for prefix in self.prefixes:
                client.put(prefix, payloads_of(prefix), timeout_s=2)


def test_a_killed_daemon_finds_again_what_it_had_written_to_nvme(
    own_daemon: Callable[..., Daemon],
) -> None:
    daemon = own_daemon(nvme=1000 * EXTENT)
    load = Load(daemon.url)
    with Client.open(daemon.url) as client:
        load.start()
        wait_until(lambda: client.statistics()["counters"]["demotions"] > 100, "demotions go on")
        before = [
            prefix[i]
            for prefix in load.prefixes
            for i, where in enumerate(client.match(prefix).where)
            if where & IN_NVME
        ]
        daemon.kill()
    load.join(30)
    assert daemon.socket.exists()
    assert len(before) > 100
    daemon.start()
    with Client.open(daemon.url) as client:
        for one in before:
            with client.get(one) as blocks:
                assert blocks.complete, one
                assert_right(blocks, one)
        for prefix in load.prefixes:  # the rest may be there or not, but never wrong
            with client.get(prefix) as blocks:
                assert_right(blocks, prefix)
        numbers = wait_until(lambda: _quiet(client), "the node comes to rest")
        assert numbers["counters"]["corrupt"] == 0


def _quiet(client: Client) -> dict[str, Any] | None:
    numbers = client.statistics()
    assert_conserved(numbers)
    return numbers if is_quiet(numbers) else None


@pytest.mark.slow
def test_a_client_finds_the_restarted_daemon_and_its_old_leases_mean_nothing(
    own_daemon: Callable[..., Daemon],
) -> None:
    """Lease numbers restart with every node: an old number must not end another client's lease."""
    daemon = own_daemon()
    old, new = fresh_prefix(1), fresh_prefix(1)
    with Client.open(daemon.url) as client:
        client.put(old, payloads_of(old))
        blocks, slots = client.get(old), client.reserve(fresh_prefix(1))
        daemon.kill()
        daemon.start()
        with pytest.raises(TiffinError):
            client.match(old)
        assert client.match(old).blocks == 0
        client.put(new, payloads_of(new))
        held = [client.get(new) for _ in range(4)]
        writing = client.reserve(fresh_prefix(1))
        sessions = client.statistics()["sessions"]
        assert_right(blocks, old)
        blocks.release()
        slots[0].view[:] = 1
        with contextlib.suppress(TiffinError):
            slots.commit()
        assert client.statistics()["sessions"] == sessions, "an old lease ended a new one"
        writing[0].view[:] = 0
        writing.commit()
        assert writing.stored == (0,)
        for one in held:
            one.release()


# -- the campaign ----------------------------------------------------------------------------------


class Nursery:
    """Workers that are forked, which takes a millisecond, and killed."""

    def __init__(self, daemon: Daemon, folder: Path, seed: int, places: int) -> None:
        self.dice = random.Random(seed)
        self.kills = {"by itself": 0, "by us": 0, "the daemon": 0}
        self._counters = folder / "counters"
        self._counters.write_bytes(bytes(COUNTERS.size * places))
        self._process = Worker(
            "kvworker.py", folder, "nursery", daemon.socket, self._counters, seed
        )
        assert self._process.says() == "ready"
        self._pids: list[int] = []
        for place in range(places):
            self._pids.append(self._fork(place))

    def _fork(self, place: int) -> int:
        # Every second worker kills itself while it writes, at a piece chosen by the seed.
        while True:
            fate = self.dice.randrange(1, 40) if place % 2 else 0
            pid = int(self._process.ask(f"{place} {self.dice.randrange(1 << 30)} {fate}"))
            try:
                return os.pidfd_open(pid)
            except ProcessLookupError:
                assert fate, "a worker that should live has died; see its traceback"
                self.kills["by itself"] += 1  # it has killed itself already

    def kill_one(self) -> None:
        self.replace_dead()
        place = self.dice.randrange(len(self._pids))
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pids[place], signal.SIGKILL)
        self.kills["by us"] += 1
        self._again(place)

    def replace_dead(self) -> None:
        for place, pidfd in enumerate(self._pids):
            if _ended(pidfd):
                assert place % 2, "a worker that should live has died; see its traceback"
                self.kills["by itself"] += 1
                self._again(place)

    def _again(self, place: int) -> None:
        wait_until(lambda: _ended(self._pids[place]), "the worker dies")
        os.close(self._pids[place])
        self._pids[place] = self._fork(place)

    def end(self) -> tuple[int, int, int]:
        """Kill all; returns gets, blocks checked and blocks that were wrong."""
        for pidfd in self._pids:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            wait_until(lambda pidfd=pidfd: _ended(pidfd), "the worker dies")
            os.close(pidfd)
        self._process.kill()
        return self.counted()

    def counted(self) -> tuple[int, int, int]:
        """Gets, blocks checked and blocks that were wrong until now."""
        with open(self._counters, "rb") as file:
            counters = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
            rows = list(COUNTERS.iter_unpack(counters[:]))
            counters.close()
        gets, checked, wrong = map(sum, zip(*rows, strict=True))
        return gets, checked, wrong


def _ended(pidfd: int) -> bool:
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(0))


def _campaign(daemon: Daemon, folder: Path, seed: int, kills: int) -> None:
    nursery = Nursery(daemon, folder, seed, places=4)
    began = time.monotonic()

    def enough() -> bool:
        """Whether each kind of kill has happened, and workers have read; its time varies."""
        happened = nursery.kills.values()
        return sum(happened) >= kills and min(happened) > 0 and nursery.counted()[1] > 10 * kills

    while not enough():
        assert time.monotonic() < began + kills * KILL_S, (nursery.kills, nursery.counted())
        time.sleep(nursery.dice.uniform(0.0, 0.08))
        if nursery.dice.random() < 0.25:
            time.sleep(0.2)  # let promotions and demotions queue up
            daemon.kill()
            nursery.kills["the daemon"] += 1
            daemon.start()
        else:
            nursery.kill_one()
    gets, checked, wrong = nursery.end()
    with Client.open(daemon.url) as client:
        numbers = wait_until(lambda: _quiet(client), "nothing is held by the dead")
        found = _read_everything(client)
        wait_until(lambda: _quiet(client), "the node comes to rest")
        print(f"counters of the last daemon: {numbers['counters']}")
    print(
        f"seed {seed}: {nursery.kills} kills in {time.monotonic() - began:.0f} s, {gets} gets of "
        f"{checked} blocks checked, {wrong} wrong, {found} blocks found and right at the end"
    )
    assert wrong == 0


def _read_everything(client: Client) -> int:
    found = 0
    for prefix in kvworker.prompts():
        for one in prefix:
            with client.get(one) as blocks:
                for block in blocks:
                    right = payload_of(block.key, CAMPAIGN)
                    assert np.array_equal(block.bytes, right), "a wrong byte"
                    found += 1
    return found


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_kill_campaign(own_daemon: Callable[..., Daemon], tmp_path: Path) -> None:
    """Writers, readers and the daemon are killed 100 times; no byte is ever wrong."""
    daemon = own_daemon(dram=40 * CAMPAIGN.extent_bytes, nvme=100 * CAMPAIGN.extent_bytes)
    _campaign(daemon, tmp_path, seed=1, kills=100)
