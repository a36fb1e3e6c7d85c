"""Failures of Redis only: it dies, hangs, comes back empty, and holds entries of other writers."""

from __future__ import annotations

import random
import struct
import threading
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import redis
from certsupport import make_authority
from directory.ports import free_port
from directory.redisserver import RedisServer, speaks_tls, wait_until
from tcpsupport import Relay

from tiffin.kvstore.directory import open_directory
from tiffin.kvstore.directory import redis_connection as connection
from tiffin.kvstore.directory.redis_layout import HOLDERS_MAX, encode_number
from tiffin.kvstore.directory.testing import BAD_RECORDS, eventually, keys_of, record
from tiffin.kvstore.errors import ClientClosed, DirectoryUnavailable

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable
    from pathlib import Path

    from tiffin.kvstore.directory.redis import RedisDirectory

    OpenRedis = Callable[..., RedisDirectory]

KEYS = keys_of("redis", 40)


def answers(directory: RedisDirectory) -> bool:
    try:
        directory.locate(KEYS[:1])
    except DirectoryUnavailable:
        return False
    return True


def located(directory: RedisDirectory, number: int) -> bool:
    return directory.locate(KEYS) == [(number,)] * len(KEYS)


def name_of(pool: str, key: bytes) -> bytes:
    return f"tiffin:{{{pool}:0}}:b:".encode() + key


# -- Redis is far away -----------------------------------------------------------------------------


class FarRelay(Relay):
    """A relay that delays each piece of what it forwards by 100 ms each way."""

    def _pump(self, source: socket.socket, sink: socket.socket, counted: bool) -> None:
        late: Any = _Late(source)
        super()._pump(late, sink, counted)


class _Late:
    def __init__(self, source: socket.socket) -> None:
        self._source = source

    def recv(self, nbytes: int) -> bytes:
        received = self._source.recv(nbytes)
        time.sleep(0.1)
        return received

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)


@pytest.mark.slow
def test_a_redis_whose_set_up_takes_longer_than_a_call_serves_the_next_calls(
    own_redis: RedisServer, open_redis: OpenRedis
) -> None:
    relay = FarRelay(("127.0.0.1", own_redis.port))
    try:
        directory = open_redis(f"redis://127.0.0.1:{relay.address[1]}/1?timeout=0.5")
        for turn in range(5):
            eventually(lambda: answers(directory), f"answer {turn}")
        directory.close()
    finally:
        relay.close()


@pytest.mark.slow
def test_sentinels_that_are_far_away_lead_to_the_master(
    tmp_path: Path, open_redis: OpenRedis
) -> None:
    with ExitStack() as stack:
        master = stack.enter_context(RedisServer(tmp_path))
        sentinel = stack.enter_context(RedisServer(tmp_path, sentinel_of=master))
        relays = [FarRelay(("127.0.0.1", sentinel.port)) for _ in range(3)]
        for relay in relays:
            stack.callback(relay.close)
        hosts = ",".join(f"127.0.0.1:{relay.address[1]}" for relay in relays)
        directory = open_redis(f"redis+sentinel://{hosts}/tiffin?timeout=0.5")
        eventually(lambda: answers(directory), "an answer")
        directory.close()


class FakeConnection:
    closed = False

    def can_read(self, timeout: float = 0) -> bool:
        return False

    def disconnect(self) -> None:
        self.closed = True


def test_a_connection_that_opens_too_late_is_the_next_call_s() -> None:
    may_open, dials = threading.Event(), []

    def dial() -> Any:
        dials.append(FakeConnection())
        assert may_open.wait(30.0)
        return dials[-1]

    server = connection.RedisServer("far", dial)
    for _ in range(3):  # none begins another one
        with pytest.raises(redis.TimeoutError, match="still being opened"):
            server.take(time.monotonic())
    may_open.set()
    assert server.take(time.monotonic() + 30.0) is dials[0]
    assert len(dials) == 1
    server.close()


def test_a_connection_that_opens_after_the_close_is_closed() -> None:
    may_open, fake = threading.Event(), FakeConnection()

    def dial() -> Any:
        assert may_open.wait(30.0)
        return fake

    server = connection.RedisServer("far", dial)
    with pytest.raises(redis.TimeoutError):
        server.take(time.monotonic())
    server.close()
    may_open.set()
    wait_until(lambda: fake.closed, "the late connection is closed")


# -- Redis goes away -------------------------------------------------------------------------------


def test_a_redis_that_was_never_there(open_redis: OpenRedis) -> None:
    directory = open_redis(f"redis://127.0.0.1:{free_port()}")
    calls: list[Callable[[], object]] = [
        lambda: directory.locate(KEYS),
        lambda: directory.register(record()),
        lambda: directory.heartbeat(record(number=1)),
        lambda: directory.publish(1, KEYS, [], 1),
        lambda: directory.events("0"),
        lambda: directory.withdraw(1),
        directory.nodes,
    ]
    for call in calls:
        with pytest.raises(DirectoryUnavailable, match=r"127\.0\.0\.1"):
            call()
    assert not directory.statistics()["healthy"]
    assert "refused" in directory.statistics()["down"][0]


def test_kill_9_and_an_empty_restart(own_redis: RedisServer, open_redis: OpenRedis) -> None:
    directory, reader = open_redis(own_redis.url), open_redis(own_redis.url)
    number = directory.register(record())
    directory.publish(number, KEYS, [], 1)
    assert located(reader, number)
    own_redis.kill()
    for handle in (directory, reader):
        with pytest.raises(DirectoryUnavailable):
            handle.locate(KEYS)
    own_redis.start()
    eventually(lambda: answers(directory), "the publisher's connection is back")
    eventually(lambda: answers(reader), "the reader's connection is back")
    eventually(lambda: reader.locate(KEYS) == [()] * len(KEYS), "the locations are gone")
    assert not directory.heartbeat(record(number=number))
    again = directory.register(record())
    assert again != number, "the number of before names nobody else now"
    directory.publish(again, KEYS, [], 1)
    eventually(lambda: located(reader, again), "all is published again")


def test_flushall(own_redis: RedisServer, open_redis: OpenRedis) -> None:
    directory, reader = open_redis(own_redis.url), open_redis(own_redis.url)
    number = directory.register(record())
    directory.publish(number, KEYS, [], 1)
    own_redis.client().flushall()
    assert reader.locate(KEYS) == [()] * len(KEYS)
    assert not directory.heartbeat(record(number=number))
    # A late publish of an old registration is about a number that no node has.
    directory.publish(number, KEYS, [], 41)
    again = directory.register(record())
    assert again != number
    assert directory.locate(KEYS) == [()] * len(KEYS)


def test_a_stopped_redis_costs_one_timeout(own_redis: RedisServer, open_redis: OpenRedis) -> None:
    writer, directory = open_redis(own_redis.url), open_redis(own_redis.url + "?timeout=0.1")
    number = writer.register(record())
    writer.publish(number, KEYS, [], 1)
    eventually(lambda: answers(directory), "it is connected")
    own_redis.pause()
    try:
        with pytest.raises(DirectoryUnavailable):  # after one timeout
            directory.locate(KEYS)
        # The next calls do not wait: the server is not asked for a moment.
        server = directory._fleet.server(0)
        assert not server.answers
        assert not server.admits() or not server.admits()
        with pytest.raises(DirectoryUnavailable):
            directory.publish(number, KEYS, [], 41)
    finally:
        own_redis.resume()
    eventually(lambda: answers(directory) and located(writer, number), "it answers again")


def test_scripts_that_the_server_forgot(own_redis: RedisServer, open_redis: OpenRedis) -> None:
    directory = open_redis(own_redis.url)
    client = own_redis.client()
    number = directory.register(record())
    for i in range(3):
        client.script_flush()
        directory.publish(number, KEYS, [], 1 + i * len(KEYS))
        client.script_flush()
        assert directory.heartbeat(record(number=number))
    assert located(directory, number)
    assert len(directory.events("0")[1]) == 3


def test_connections_that_were_cut_are_replaced(
    own_redis: RedisServer, open_redis: OpenRedis
) -> None:
    directory = open_redis(own_redis.url)
    number = directory.register(record())
    for _ in range(3):
        own_redis.client().client_kill_filter(_type="normal", skipme=True)
        assert directory.heartbeat(record(number=number)), "nobody noticed"


def test_a_full_redis_refuses_to_publish_and_is_still_read(
    own_redis: RedisServer, open_redis: OpenRedis
) -> None:
    directory = open_redis(own_redis.url)
    number = directory.register(record())
    directory.publish(number, KEYS, [], 1)
    client = own_redis.client()
    client.config_set("maxmemory", "1")
    with pytest.raises(DirectoryUnavailable, match="memory"):
        directory.publish(number, KEYS, [], 41)
    assert located(directory, number)
    client.config_set("maxmemory", "0")
    directory.publish(number, KEYS, [], 41)


@pytest.mark.slow
def test_a_replica_is_read_and_not_written(
    own_redis: RedisServer, open_redis: OpenRedis, tmp_path: Path
) -> None:
    writer = open_redis(own_redis.url)
    number = writer.register(record())
    writer.publish(number, KEYS, [], 1)
    with RedisServer(tmp_path, "--replicaof", f"127.0.0.1 {own_redis.port}") as replica:
        reader = open_redis(replica.url)
        eventually(lambda: answers(reader) and located(reader, number), "the replica is in step")
        with pytest.raises(DirectoryUnavailable):
            reader.publish(number, KEYS, [], 41)
        with pytest.raises(DirectoryUnavailable):
            reader.register(record())
        assert located(reader, number)


# -- time ------------------------------------------------------------------------------------------


def test_locations_that_nobody_repeats_leave(
    shared_redis: RedisServer, open_redis: OpenRedis
) -> None:
    directory = open_redis(shared_redis.url, location_ttl_s=0.3)
    number = directory.register(record())
    directory.publish(number, KEYS, [], 1)
    eventually(lambda: directory.locate(KEYS) == [()] * len(KEYS), "the locations have left")
    directory.publish(number, KEYS, [], 41)
    assert directory.locate(KEYS[:1]) in ([(number,)], [()])  # expired, if this took too long


def test_publishing_again_keeps_locations(
    shared_redis: RedisServer, open_redis: OpenRedis, pool: str
) -> None:
    brief = open_redis(shared_redis.url, location_ttl_s=60.0)
    number = brief.register(record())
    brief.publish(number, KEYS, [], 1)
    open_redis(shared_redis.url, location_ttl_s=3600.0).publish(number, KEYS[:1], [], 41)
    client = shared_redis.client()
    assert client.pttl(name_of(pool, KEYS[0])) > 3_000_000
    assert 0 < client.pttl(name_of(pool, KEYS[1])) <= 60_000


def test_dead_registrations_are_swept_out(
    shared_redis: RedisServer, open_redis: OpenRedis, pool: str
) -> None:
    directory = open_redis(shared_redis.url, registration_ttl_s=0.1)
    client = shared_redis.client()
    for _ in range(5):
        directory.register(record())
    eventually(lambda: not directory.nodes(), "all have expired")
    directory.register(record())
    assert client.hlen(f"tiffin:{{{pool}:m}}:nodes") == 1


# -- entries of other writers ----------------------------------------------------------------------


def test_the_number_of_holders_is_bounded(
    shared_redis: RedisServer, open_redis: OpenRedis, pool: str
) -> None:
    directory = open_redis(shared_redis.url)
    (key,) = KEYS[:1]
    name, client = name_of(pool, key), shared_redis.client()
    stale = list(range(1, HOLDERS_MAX + 1))
    client.set(name, b"".join(map(encode_number, stale)))
    number = directory.register(record())
    directory.publish(number, [key], [], 1)
    assert directory.locate([key]) == [(number,)], "who publishes is named"
    value = client.get(name)
    assert isinstance(value, bytes)
    assert list(struct.unpack(f"<{HOLDERS_MAX}I", value)) == [*stale[1:], number]
    directory.publish(number, [], [key], 2)
    value = client.get(name)
    assert value == b"".join(map(encode_number, stale[1:]))


GARBAGE: list[object] = [
    b"",
    b"x",
    b"abc",
    b"\0" * 4,
    b"\xff" * 4,
    b"\xff" * 256,
    b"\xff" * 260,
    random.Random(4096).randbytes(4096),
    "a list",
    "a hash",
    "a set",
    "a stream",
]


def forge(client: redis.Redis, name: bytes | str, value: object) -> None:
    """Replace the value under `name`."""
    client.delete(name)
    match value:
        case "a list":
            client.rpush(name, b"x")
        case "a hash":
            client.hset(name, b"x", b"y")
        case "a set":
            client.sadd(name, b"x")
        case "a stream":
            client.xadd(name, {b"e": b"x"})
        case _:
            client.set(name, value)


@pytest.mark.parametrize("value", GARBAGE, ids=lambda v: v if isinstance(v, str) else f"{len(v)}B")
def test_a_broken_location_costs_a_miss_and_is_mended(
    shared_redis: RedisServer, open_redis: OpenRedis, pool: str, value: object
) -> None:
    directory = open_redis(shared_redis.url)
    number = directory.register(record())
    bad, good = KEYS[:2]
    directory.publish(number, [bad, good], [], 1)
    forge(shared_redis.client(), name_of(pool, bad), value)
    assert directory.locate([bad, good]) == [(), (number,)]
    directory.publish(number, [bad], [], 3)
    assert directory.locate([bad, good]) == [(number,), (number,)]
    forge(shared_redis.client(), name_of(pool, bad), value)
    directory.publish(number, [], [bad], 4)
    assert directory.locate([bad, good]) == [(), (number,)]


def test_forged_records_are_ignored_and_said_once(
    shared_redis: RedisServer, open_redis: OpenRedis, pool: str, caplog: pytest.LogCaptureFixture
) -> None:
    directory = open_redis(shared_redis.url, membership_age_s=0.0)
    number = directory.register(record())
    never = struct.pack(">Q", (1 << 63) - 1)
    for field, fields in enumerate(BAD_RECORDS, start=number + 1):
        forged = never + bytes(16) + msgspec.msgpack.encode(record(**fields))
        shared_redis.client().hset(f"tiffin:{{{pool}:m}}:nodes", str(field).encode(), forged)
    with caplog.at_level("WARNING"):
        for _ in range(5):
            assert list(directory.nodes()) == [number]
    assert directory.statistics()["unauthenticated_records"] == len(BAD_RECORDS)
    said = [line.getMessage() for line in caplog.records]
    assert len(said) == 1
    assert f"{len(BAD_RECORDS)} entries" in said[0]
    assert said[0].isprintable()


@pytest.mark.parametrize("value", GARBAGE, ids=lambda v: v if isinstance(v, str) else f"{len(v)}B")
@pytest.mark.parametrize("place", ["nodes", "number", "events"])
def test_a_broken_membership_is_an_empty_one_until_it_is_mended(
    shared_redis: RedisServer, open_redis: OpenRedis, pool: str, place: str, value: object
) -> None:
    directory = open_redis(shared_redis.url)
    number = directory.register(record())
    directory.publish(number, KEYS, [], 1)
    forge(shared_redis.client(), f"tiffin:{{{pool}:m}}:{place}", value)
    reader = open_redis(shared_redis.url)
    expected = {} if place == "nodes" else {number: record(number=number)}
    assert reader.nodes() == expected
    assert reader.locate(KEYS[:1]) == ([()] if place == "nodes" else [(number,)])
    position, _ = reader.events("0")
    assert directory.heartbeat(record(number=number)) == (place != "nodes")
    after = directory.register(record())
    assert after not in (0, number)
    directory.publish(after, KEYS[:3], [], 1)
    assert after in directory.locate(KEYS[:1])[0]
    (event,) = [e for e in reader.events(position)[1] if e.number == after]
    assert event.added == KEYS[:3]


def edit(client: redis.Redis, pool: str, rng: random.Random) -> None:
    """One random change of one random thing."""
    members = f"tiffin:{{{pool}:m}}:"
    nodes, place = members + "nodes", members + rng.choice(["nodes", "number", "events"])
    location = name_of(pool, rng.choice(KEYS))
    match rng.randrange(6):
        case 0:
            forge(client, location, rng.choice(GARBAGE))
        case 1:
            forge(client, place, rng.choice(GARBAGE))
        case 2 if client.type(location) == b"string":
            client.set(location, flipped(client.get(location), rng))
        case 3 if client.type(nodes) == b"hash":
            field = rng.choice(client.hkeys(nodes))
            client.hset(nodes, field, flipped(client.hget(nodes, field), rng))
        case 4 if client.type(nodes) == b"hash":
            name = rng.choice(["-1", "x", "0", "4294967296", str(rng.randrange(1 << 32))])
            client.hset(nodes, name, rng.randbytes(rng.randrange(200)))
        case 5:
            client.delete(place)


def flipped(value: bytes, rng: random.Random) -> bytes:
    """One bit of it is another."""
    changed = bytearray(value or b"\0")
    changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def survive_edits(
    server: RedisServer, open_redis: OpenRedis, pool: str, seed: int, edits: int
) -> None:
    rng, client = random.Random(seed), server.client()
    directory = open_redis(server.url)
    number, position = directory.register(record()), "0"
    for turn in range(edits):
        edit(client, pool, rng)
        if not directory.heartbeat(record(number=number)):
            number = directory.register(record())
        directory.publish(number, KEYS[: rng.randrange(40)], KEYS[-1:], 1 + turn)
        for numbers in directory.locate(KEYS):
            assert all(0 < n < 1 << 32 for n in numbers)
        nodes = directory.nodes()
        assert all(node.number == n for n, node in nodes.items())
        position, events = directory.events(position)
        assert all(len(key) == 16 for event in events for key in event.added)
    if not directory.heartbeat(record(number=number)):
        number = directory.register(record())
    directory.publish(number, KEYS, [], 1)
    assert all(number in numbers for numbers in directory.locate(KEYS)), f"seed {seed}"


def test_random_edits_of_everything(
    shared_redis: RedisServer, open_redis: OpenRedis, pool: str
) -> None:
    survive_edits(shared_redis, open_redis, pool, seed=1, edits=300)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 6))
def test_thousands_of_random_edits(
    shared_redis: RedisServer, open_redis: OpenRedis, pool: str, seed: int
) -> None:
    survive_edits(shared_redis, open_redis, pool, seed=seed, edits=1000)


# -- authentication --------------------------------------------------------------------------------


def test_passwords(tmp_path: Path, pool: str, monkeypatch: pytest.MonkeyPatch) -> None:
    secret, wrong = "correct horse/battery@staple", "wr0ng-secret"
    with RedisServer(tmp_path, password=secret) as server:
        file = tmp_path / "password"
        file.write_text(secret + "\n")
        file.chmod(0o600)
        quoted = secret.replace("/", "%2F").replace("@", "%40").replace(" ", "%20")
        good = [
            f"redis://:{quoted}@{server.address}/0",
            f"redis://default:{quoted}@{server.address}/0",
            f"redis://{server.address}/0?password_file={file}",
        ]
        monkeypatch.setenv("TIFFIN_REDIS_PASSWORD", secret)
        for url in [*good, server.url]:
            directory = open_directory(url, pool=pool)
            assert directory.locate(KEYS[:1]) == [()]
            assert secret not in repr(directory)
            directory.close()
        monkeypatch.delenv("TIFFIN_REDIS_PASSWORD")
        for url in (server.url, f"redis://:{wrong}@{server.address}/0"):
            directory = open_directory(url, pool=pool)
            with pytest.raises(DirectoryUnavailable) as raised:
                directory.locate(KEYS[:1])
            assert wrong not in str(raised.value)
            directory.close()


def test_the_least_that_a_user_may_do(own_redis: RedisServer, open_redis: OpenRedis) -> None:
    """The two users of docs/directory.md."""
    client = own_redis.client()
    pattern = "~tiffin:{test-*"
    common = f"on >secret resetkeys {pattern} -@all +mget +hgetall +time +xread"
    client.execute_command("ACL", "SETUSER", "reader", *common.split())
    client.execute_command(
        "ACL",
        "SETUSER",
        "node",
        *f"{common} +eval +evalsha +get +set +del +hget +hset +hdel +xadd".split(),
    )
    node = open_redis(f"redis://node:secret@{own_redis.address}/0")
    number = node.register(record())
    assert node.heartbeat(record(number=number))
    node.publish(number, KEYS, [], 1)
    reader = open_redis(f"redis://reader:secret@{own_redis.address}/0")
    assert located(reader, number)
    assert reader.nodes().keys() == {number}
    assert len(reader.events("0")[1]) == 1
    with pytest.raises(DirectoryUnavailable, match="permission"):
        reader.publish(number, KEYS, [], 41)
    node.withdraw(number)


def test_tls(tmp_path: Path, pool: str) -> None:
    if not speaks_tls():
        pytest.skip("this server was built without TLS")
    authority = make_authority(tmp_path)
    certificate, key = authority.certificate("server")
    tls_port = free_port()
    server = RedisServer(
        tmp_path,
        *("--tls-port", str(tls_port), "--tls-ca-cert-file", str(authority.ca)),
        *("--tls-cert-file", str(certificate), "--tls-key-file", str(key)),
    )
    pair = f"&cert={certificate}&key={key}"
    with server:
        url = f"rediss://127.0.0.1:{tls_port}/0?ca={authority.ca}"
        directory = open_directory(url + pair, pool=pool)
        number = directory.register(record())
        directory.publish(number, KEYS, [], 1)
        assert directory.locate(KEYS[:1]) == [(number,)]
        directory.close()
        without_certificate = open_directory(url, pool=pool)
        with pytest.raises(DirectoryUnavailable):
            without_certificate.locate(KEYS[:1])
        without_certificate.close()
        unknown = open_directory(f"rediss://127.0.0.1:{tls_port}/0", pool=pool)
        with pytest.raises(DirectoryUnavailable, match=r"(?i)certificate"):
            unknown.locate(KEYS[:1])
        unknown.close()


# -- closing ---------------------------------------------------------------------------------------


def test_closing_gives_back_every_connection(own_redis: RedisServer, open_redis: OpenRedis) -> None:
    client = own_redis.client()
    eventually(lambda: len(client.client_list()) == 1, "whoever looked whether it is up has left")
    directory = open_redis(own_redis.url)
    directory.register(record())
    assert len(client.client_list()) == 2
    directory.close()
    eventually(lambda: len(client.client_list()) == 1, "the connection is closed")
    with pytest.raises(ClientClosed):
        directory.nodes()


def test_pools_know_nothing_of_each_other(shared_redis: RedisServer, pool: str) -> None:
    one = open_directory(shared_redis.url, pool=pool + ".one")
    other = open_directory(shared_redis.url, pool=pool + ".other")
    number = one.register(record())
    one.publish(number, KEYS, [], 1)
    assert other.nodes() == {}
    assert other.locate(KEYS) == [()] * len(KEYS)
    assert other.events("0") == ("0", [])
    one.close()
    other.close()
