"""Conductors that share over a real Redis: its keys, the lease of the leader, and outages."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
import uuid
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from directory.ports import free_port
from directory.redisserver import RedisCluster, RedisServer, wait_until
from sharingsupport import conductor, request, spec

from tiffin.conductor.records import Decision
from tiffin.conductor.replicas.redis_link import Met, RedisLink, _meet, share, unique_name
from tiffin.conductor.replicas.replica import SharedConductor
from tiffin.conductor.replicas.shared_records import Change
from tiffin.conductor.replicas.states import LoadRow, State
from tiffin.kvstore.errors import ClientClosed, DirectoryUnavailable, InvalidInput

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tiffin.conductor.replicas.replica import News

clock = time.monotonic


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as running:
        yield running


@pytest.fixture
def pool() -> str:
    return f"test-{uuid.uuid4().hex[:12]}"


@pytest.fixture
def link(pool: str) -> Iterator[Callable[..., RedisLink]]:
    """Opens links of one pool. Their timeouts are long, as a slow Redis is not down, unless their
    URL sets another."""
    with contextlib.ExitStack() as stack:

        def open_link(url: str, **named: Any) -> RedisLink:
            made = RedisLink(patient(url), **{"pool": pool, **named})
            stack.callback(made.close)
            return made

        yield open_link


def patient(url: str) -> str:
    return url if "timeout=" in url else f"{url}?timeout=20"


def meet(link: RedisLink, name: str, *changes: Change, number: int = 1, **times: float) -> Met:
    state = State(name, number, loads=[LoadRow("i0", number)])
    return link.exchange(state, changes, **{"dead_s": 60.0, "lead_s": 60.0, **times})


# -- states and records ----------------------------------------------------------------------------


def test_everybody_reads_what_the_others_said_last(
    server: RedisServer, link: Callable[..., RedisLink]
) -> None:
    a, b = link(server.url), link(server.url)
    meet(a, "a")
    meet(a, "a", number=2)
    states = meet(b, "b").states
    assert {name: state.loads for name, state in states.items()} == {
        "a": [LoadRow("i0", 2)],
        "b": [LoadRow("i0", 1)],
    }
    a.leave("a")
    assert list(meet(b, "b").states) == ["b"]
    with contextlib.closing(RedisLink(patient(server.url), pool="another")) as other:
        assert list(meet(other, "c").states) == ["c"]


def test_one_that_is_silent_is_gone_and_all_ends_by_itself(
    server: RedisServer, link: Callable[..., RedisLink], pool: str
) -> None:
    a, b = link(server.url), link(server.url)
    meet(a, "a", Change("i0", b"", b"one"), dead_s=0.05)
    wait_until(lambda: list(meet(b, "b").states) == ["b"], "the state of a has expired")
    client = server.client()
    assert client.smembers(a._names) == {b"b"}
    for key in client.keys(f"tiffin:{{{pool}:c}}:*"):
        assert 0 < client.pttl(key) <= 60_000


def test_a_record_is_changed_by_one_that_has_read_it(
    server: RedisServer, link: Callable[..., RedisLink]
) -> None:
    a, b = link(server.url), link(server.url)
    many = [Change(f"i{n}", b"", str(n).encode()) for n in range(1000)]
    assert meet(a, "a", *many).records == {one.instance: one.new for one in many}
    assert meet(a, "a").records is None, "nothing has changed"
    changes = (
        Change("i0", b"other", b"lost"),
        Change("i1", b"1", b"changed"),
        Change("i2", b"2", b""),
    )
    records = meet(b, "b", *changes).records
    assert records is not None
    assert (records["i0"], records["i1"], len(records)) == (b"0", b"changed", 999)
    assert meet(a, "a").records == records
    meet(a, "a", Change("i1", b"1", b"late"))
    assert meet(b, "b").records is None


def test_what_somebody_else_put_there_is_replaced(
    server: RedisServer, link: Callable[..., RedisLink]
) -> None:
    client, mine = server.client(), link(server.url)
    for key in (mine._names, mine._instances):
        client.set(key, "a string")
    client.rpush(mine._leader, "a list")
    with pytest.raises(DirectoryUnavailable, match="WRONGTYPE"):
        meet(mine, "a")
    client.sadd(mine._names, "noise", "list", "missing")
    client.set(mine._states + "noise", b"x" * 40)
    client.rpush(mine._states + "list", "x")
    client.hset(mine._instances, "i0", b"x" * 40)
    met = meet(mine, "a")
    assert (list(met.states), met.leader, met.records) == (["a"], "a", None)
    met = meet(mine, "a", Change("i1", b"", b"one"))
    assert met.records == {"i1": b"one"}
    assert meet(mine, "a", Change("i0", b"", b"mine")).records == {"i0": b"mine", "i1": b"one"}


def test_only_what_has_the_stamp_of_the_pools_token_is_heard(
    server: RedisServer, link: Callable[..., RedisLink], pool: str
) -> None:
    """Otherwise a client that can write to Redis could register an engine, and would get
    prompts."""
    token = b"our token of thirty-two bytes..."
    mine = link(server.url, token=token)
    meet(mine, "mine", Change("i1", b"", b"genuine"))
    meet(link(server.url, token=b"the next one"), "next", Change("i2", b"", b"elsewhere"))
    assert (list(meet(mine, "mine").states), mine.statistics()["forged"]) == (["mine"], 0)
    for another in (b"another", b""):
        forger, before = link(server.url, token=another), mine.statistics()["forged"]
        forger._names, forger._states, forger._instances = copied(mine)
        meet(forger, "forger", Change(f"i-{len(another)}", b"", b"forged"))
        met = meet(mine, "mine")
        assert list(met.states) == ["mine"]
        assert met.records == {"i1": b"genuine"}
        assert mine.statistics()["forged"] > before
    # A genuine value is not valid under another name, or in another pool.
    client = server.client()
    value = client.get(mine._states + "mine")
    elsewhere = link(server.url, token=token, pool=f"{pool}-2")
    for reader, name in ((mine, "copy"), (elsewhere, "mine")):
        client.sadd(reader._names, name)
        client.set(reader._states + name, value)
        assert name not in meet(reader, "reader").states


def copied(link: RedisLink) -> tuple[str, str, str]:
    """The names of its keys, which any client that can read Redis knows."""
    return link._names, link._states, link._instances


def test_a_redis_that_is_away_is_said_to_be_and_found_again(
    tmp_path: Path, link: Callable[..., RedisLink]
) -> None:
    with RedisServer(tmp_path) as own:
        mine = link(f"redis://{own.address}/0?timeout=0.2")

        def met(name: str) -> bool:
            with contextlib.suppress(DirectoryUnavailable):
                return meet(mine, name, Change(name, b"", b"one")).records == {name: b"one"}
            return False

        wait_until(lambda: met("one"), "it is there")
        own.pause()
        with pytest.raises(DirectoryUnavailable, match="the other conductors"):
            meet(mine, "one")
        assert mine.statistics()["error"]
        own.resume()
        own.restart()
        wait_until(lambda: met("two"), "it is found again, and empty")
        assert mine.statistics()["error"] == ""
    mine.close()
    for call in (lambda: meet(mine, "a"), lambda: mine.leave("a")):
        with pytest.raises(ClientClosed):
            call()


def test_a_url_that_can_not_work_is_refused() -> None:
    for url, pool in (("embedded:", "p"), ("http://x", "p"), ("redis://localhost", "a b")):
        with pytest.raises(InvalidInput):
            RedisLink(url, pool=pool)


@pytest.mark.slow
def test_in_a_cluster(tmp_path: Path, link: Callable[..., RedisLink]) -> None:
    with RedisCluster(tmp_path) as cluster:
        a, b = link(cluster.url), link(cluster.url)
        meet(a, "a", Change("i0", b"", b"one"))
        met = meet(b, "b")
        assert (sorted(met.states), met.leader, met.records) == (["a", "b"], "a", {"i0": b"one"})


# -- the lease -------------------------------------------------------------------------------------


def test_one_has_the_lease_until_it_ends_or_is_given_back(
    server: RedisServer, link: Callable[..., RedisLink], pool: str
) -> None:
    a, b = link(server.url), link(server.url)
    assert (meet(a, "a").leader, meet(b, "b").leader) == ("a", "a")
    b.leave("b")  # b does not have the lease
    assert meet(b, "b").leader == "a"
    a.leave("a")
    assert meet(b, "b", lead_s=0.05).leader == "b"
    wait_until(lambda: meet(a, "a").leader == "a", "the lease of b has ended")
    assert 50_000 < server.client().pttl(f"tiffin:{{{pool}:c}}:leader") <= 60_000


# -- conductors ------------------------------------------------------------------------------------


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.mark.slow
def test_in_a_loop_without_redis_and_with_it_again(
    tmp_path: Path, pool: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Decisions never stop; the feed's findings reach REST; one leads, and gives up its lease."""
    found: list[News] = []

    async def run(own: RedisServer) -> None:
        a, b = cores = [conductor(unique_name()) for _ in range(2)]
        links = [RedisLink(f"redis://{own.address}/0?timeout=0.1", pool=pool) for _ in cores]
        tasks = [
            asyncio.create_task(share(core, line, clock, found.append))
            for core, line in zip(cores, links, strict=True)
        ]
        try:
            a.register(spec("m0"), clock())
            await until(lambda: "m0" in b.cluster)
            assert sum(core.steering.leads(clock()) for core in cores) == 1
            own.pause()
            await until(lambda: all(line.last_error for line in links))
            decisions = [core.schedule(request(core.name), clock()) for core in cores]
            assert all(isinstance(one, Decision) for one in decisions)
            await until(lambda: not a.peers and not b.peers)
            await until(lambda: not any(core.steering.leads(clock()) for core in cores))
            own.restart()
            await until(lambda: a.cluster.queued[0] == b.cluster.queued[0] == 2)
            await until(lambda: a.steering.leads(clock()) != b.steering.leads(clock()))
            leads = 0 if a.steering.leads(clock()) else 1
            tasks[leads].cancel()
            await asyncio.gather(tasks[leads], return_exceptions=True)
            assert not cores[leads].steering.leads(clock())
            await until(lambda: cores[1 - leads].steering.leads(clock()))
            assert not cores[1 - leads].peers
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for line in links:
                line.close()

    with RedisServer(tmp_path) as own:
        asyncio.run(run(own))
    assert "m0" in [one.id for news in found for one in news.joined]
    assert 2 <= caplog.text.count("deciding alone") <= 4, "once for each time that it is away"


@pytest.mark.slow
@pytest.mark.parametrize("paused", [True, False])
def test_an_outage_leaves_no_garbage_to_the_collector(
    server: RedisServer, pool: str, *, paused: bool
) -> None:
    """The conductor's looks at all objects every ten minutes, and its Redis may be away for as
    long: ten exchanges a second."""
    core = conductor(unique_name())
    address = server.address if paused else f"127.0.0.1:{free_port()}"

    async def scenario() -> None:
        with contextlib.closing(RedisLink(f"redis://{address}/0?timeout=0.05", pool=pool)) as link:
            for _ in range(3):
                assert await _meet(core, link, clock)

    gc.collect()
    gc.disable()
    if paused:
        server.pause()
    try:
        asyncio.run(scenario())
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        kinds = Counter(type(one).__name__ for one in gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
        if paused:
            server.resume()
    assert not {"DirectoryUnavailable", "RedisCall", "State", "traceback"} & set(kinds), kinds


def test_names_are_of_nobody_before() -> None:
    names = {unique_name() for _ in range(100)}
    assert len(names) == 100
    assert SharedConductor(max(names, key=len)).name in names
