"""A cluster and sentinels that lose a server: what is found meanwhile, and that all is restored."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest
from directory.redisserver import RedisCluster, RedisSentinels, wait_until

from tiffin.kvstore.directory.redis_layout import CLUSTER_BUCKETS
from tiffin.kvstore.directory.testing import eventually, keys_of, record
from tiffin.kvstore.errors import DirectoryUnavailable
from tiffin.kvstore.node.core.event_log import EventLog
from tiffin.kvstore.node.publisher import Publisher, PublisherOptions

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tiffin.kvstore.directory.redis import RedisDirectory
    from tiffin.kvstore.node.core.event_log import NodeEvents

    OpenRedis = Callable[..., RedisDirectory]

KEYS = keys_of("failover", 500)


class Node:
    """A feed that always has `KEYS`, and further keys that come and go."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.log = EventLog()
        self.others: set[bytes] = set()

    def churn(self) -> None:
        """One more key in any shard, or one less."""
        key = keys_of("churn", 60)[self.log.seq % 60]
        with self.lock:
            if key in self.others:
                self.others.remove(key)
                self.log.removed(key)
            else:
                self.others.add(key)
                self.log.added(key)

    def events_since(self, seq: int, limit: int) -> NodeEvents | None:
        with self.lock:
            return self.log.since(seq, limit)

    def inventory(self) -> tuple[int, bytes]:
        with self.lock:
            return self.log.seq, b"".join([*KEYS, *self.others])

    def exists(self, keys: bytes) -> bytes:
        with self.lock:
            here = {*KEYS, *self.others}
        return bytes(keys[i : i + 16] in here for i in range(0, len(keys), 16))


def found(directory: RedisDirectory) -> int:
    """How many of the keys are located; -1 if the directory does not answer."""
    try:
        return sum(bool(numbers) for numbers in directory.locate(KEYS))
    except DirectoryUnavailable:
        return -1


def nodes_of(directory: RedisDirectory) -> set[int]:
    """The nodes' numbers; none if the directory does not answer."""
    try:
        return set(directory.nodes())
    except DirectoryUnavailable:
        return set()


def test_keys_are_spread_over_the_shards(
    shared_cluster: RedisCluster, open_redis: OpenRedis
) -> None:
    directory = open_redis(shared_cluster.url)
    number = directory.register(record())
    directory.publish(number, KEYS, [], 1)
    assert found(directory) == len(KEYS)
    servers = {directory._fleet.server(bucket) for bucket in range(CLUSTER_BUCKETS)}
    assert len(servers) == 3
    for server in shared_cluster.servers:
        names = list(server.client().scan_iter("tiffin:*:b:*", count=1000))
        assert len(names) > 50


def test_one_seed_is_enough(shared_cluster: RedisCluster, open_redis: OpenRedis) -> None:
    directory = open_redis(f"redis+cluster://{shared_cluster.servers[2].address}")
    number = directory.register(record())
    directory.publish(number, KEYS, [], 1)
    assert found(directory) == len(KEYS)


def test_a_server_that_is_no_cluster(own_redis, open_redis: OpenRedis) -> None:  # type: ignore[no-untyped-def]
    directory = open_redis(f"redis+cluster://{own_redis.address}")
    with pytest.raises(DirectoryUnavailable, match="cluster support disabled"):
        directory.locate(KEYS)


@pytest.mark.slow
def test_a_lost_shard_costs_its_own_keys(tmp_path: Path, open_redis: OpenRedis) -> None:
    with RedisCluster(tmp_path) as cluster:
        directory, hasty = open_redis(cluster.url), open_redis(cluster.url + "?timeout=0.2")
        number = directory.register(record())
        directory.publish(number, KEYS, [], 1)
        eventually(lambda: found(hasty) == len(KEYS), "all is found")
        members = directory._fleet.server(-1).address
        lost = next(server for server in cluster.servers if server.address != members)
        lost.kill()
        part = found(directory)
        assert 0 < part < len(KEYS), "what the others have is found"
        with pytest.raises(DirectoryUnavailable):
            directory.publish(number, KEYS, [], 501)
        assert not directory.statistics()["healthy"]
        # All shards stopped at once cost one timeout together, and are an error.
        for server in cluster.servers:
            if server is not lost:
                server.pause()
        eventually(lambda: found(hasty) == -1, "nobody answers")


@pytest.mark.slow
def test_a_bucket_that_has_moved(tmp_path: Path, open_redis: OpenRedis) -> None:
    """A replica takes over while its master lives: the old master redirects to the new one."""
    with RedisCluster(tmp_path, masters=1, replicas=True) as cluster:
        directory = open_redis(cluster.url)
        number = directory.register(record())
        directory.publish(number, KEYS, [], 1)
        master, replica = cluster.servers
        client = replica.client()
        eventually(lambda: client.dbsize() > len(KEYS), "the replica is in step")
        client.execute_command("CLUSTER FAILOVER")
        wait_until(lambda: client.info("replication")["role"] == "master", "it takes over")
        eventually(lambda: directory.heartbeat(record(number=number)), "the way is found")
        assert found(directory) == len(KEYS)
        assert directory._fleet.server(0).address == replica.address
        directory.publish(number, KEYS[:1], [], 501)
        assert master.client().info("replication")["role"] == "slave"


OPTIONS = PublisherOptions(heartbeat_s=0.3, poll_s=0.02, retry_max_s=0.2)


def survive(
    publisher_side: RedisDirectory, reader_side: RedisDirectory, kill: Callable[[], None]
) -> None:
    """With a publisher on one side and a reader on the other, all is found again after `kill`."""
    node = Node()
    publisher = Publisher(node, publisher_side, record, OPTIONS)
    publisher.start()
    wrong: list[object] = []
    stop = threading.Event()

    def read() -> None:
        while not stop.wait(0.005):
            node.churn()
            try:
                reader_side.locate(KEYS)
            except DirectoryUnavailable:
                pass
            except BaseException as error:
                wrong.append(error)
                raise

    reading = threading.Thread(target=read)
    reading.start()
    try:
        eventually(lambda: found(reader_side) == len(KEYS), "all is found")
        kill()
        eventually(lambda: not publisher.healthy, "the publisher notices")
        eventually(lambda: publisher.healthy, "the publisher goes on")
        eventually(lambda: found(reader_side) == len(KEYS), "all is found again")
        eventually(lambda: nodes_of(reader_side) == {publisher.number}, "at the only node")
    finally:
        stop.set()
        reading.join()
        publisher.close()
    assert not wrong


@pytest.mark.slow
@pytest.mark.parametrize("what", ["members", "locations"])
@pytest.mark.parametrize("how", ["kill", "pause"])
def test_a_cluster_fails_over(tmp_path: Path, open_redis: OpenRedis, what: str, how: str) -> None:
    with RedisCluster(tmp_path, replicas=True) as cluster:
        url = cluster.url + "?timeout=0.2"
        publisher_side, reader_side = open_redis(url), open_redis(url)
        members = publisher_side._fleet.server(-1).address
        masters = cluster.servers[: cluster.masters]
        victim = next(s for s in masters if (s.address == members) == (what == "members"))
        survive(publisher_side, reader_side, victim.kill if how == "kill" else victim.pause)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["kill", "pause"])
def test_sentinels_lead_to_the_new_master(tmp_path: Path, open_redis: OpenRedis, how: str) -> None:
    with RedisSentinels(tmp_path) as group:
        url = group.url + "?timeout=0.6"
        master = group.master
        survive(open_redis(url), open_redis(url), master.kill if how == "kill" else master.pause)
        # The old master comes back as a replica, and is not used as the master.
        if how == "kill":
            master.start()
        else:
            master.resume()
        client = master.client()
        eventually(lambda: client.info("replication")["role"] == "slave", "it is a replica now")
        directory = open_redis(url)
        number = directory.register(record())
        assert directory.heartbeat(record(number=number))


def test_sentinels_that_know_no_such_master(tmp_path: Path, open_redis: OpenRedis) -> None:
    from directory.redisserver import RedisServer

    with (
        RedisServer(tmp_path) as master,
        RedisServer(tmp_path, sentinel_of=master) as sentinel,
    ):
        good = open_redis(f"redis+sentinel://{sentinel.address}/tiffin")
        number = good.register(record())
        assert good.nodes().keys() == {number}
        bad = open_redis(f"redis+sentinel://{sentinel.address}/other")
        with pytest.raises(DirectoryUnavailable, match="no sentinel leads to other"):
            bad.locate(KEYS)
