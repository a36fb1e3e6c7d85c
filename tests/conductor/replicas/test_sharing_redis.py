"""Conductors over a real Redis, which may be away, empty, or somebody else's as well; and two
processes, one of which is killed."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from directory.redisserver import RedisCluster, RedisServer, wait_until
from sharingsupport import conductor, own_is_zero, request, spec

from tiffin.conductor.client import ConductorClient
from tiffin.conductor.records import Decision, Rejection, RequestEvent
from tiffin.conductor.replicas import redis_stream
from tiffin.conductor.replicas.bulletins import BULLETIN_BYTES_MAX
from tiffin.conductor.replicas.redis_stream import RedisLink, exchange_once, share, unique_name
from tiffin.conductor.replicas.replica import SharedConductor
from tiffin.kvstore.errors import ClientClosed, DirectoryUnavailable, InvalidInput

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tiffin.conductor.replicas.learnt_instances import News
    from tiffin.conductor.wire.models import PlansReply

clock = time.monotonic


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as running:
        yield running


@pytest.fixture
def pool() -> str:
    return f"test-{uuid.uuid4().hex[:12]}"


@pytest.fixture
def link(pool: str) -> Iterator[Callable[[str], RedisLink]]:
    """Opens links of one pool. They are patient, for a Redis that is slow is not away, unless their
    URL says how long they wait."""
    with contextlib.ExitStack() as stack:

        def open_link(url: str) -> RedisLink:
            made = RedisLink(url if "timeout=" in url else patient(url), pool=pool)
            stack.callback(made.close)
            return made

        yield open_link


def patient(url: str) -> str:
    return f"{url}?timeout=20"


def stream_of(pool: str) -> str:
    return f"tiffin:{{{pool}:c}}:conductors"


# -- the stream ------------------------------------------------------------------------------------


def test_everybody_reads_what_anybody_says_in_order(
    server: RedisServer, link: Callable[[str], RedisLink]
) -> None:
    a, b = link(server.url), link(server.url)
    assert a.exchange([b"before b has come"]) == [b"before b has come"]
    assert b.exchange([]) == []
    assert a.exchange([b"one", b"two"]) == [b"one", b"two"]
    assert b.exchange([b"three"]) == [b"one", b"two", b"three"]
    many = [str(number).encode() for number in range(1000)]
    assert b.exchange(many) == many
    assert a.exchange([]) == [b"three", *many]
    assert a.statistics()["read"] == 1004


def test_pools_do_not_hear_each_other(server: RedisServer) -> None:
    opened, url = contextlib.closing, patient(server.url)
    with opened(RedisLink(url, pool="one")) as one, opened(RedisLink(url, pool="two")) as two:
        two.exchange([])
        one.exchange([b"hello"])
        assert two.exchange([]) == []


def test_the_stream_is_bounded_and_ends_by_itself(
    server: RedisServer,
    link: Callable[[str], RedisLink],
    pool: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(redis_stream, "STREAM_ENTRIES_MAX", 200)
    link(server.url).exchange([b"x" * 100] * 2000)
    client = server.client()
    assert 200 <= client.xlen(stream_of(pool)) <= 400
    assert 0 < client.pttl(stream_of(pool)) <= 60_000


def test_what_somebody_else_put_there_is_passed_over(
    server: RedisServer, link: Callable[[str], RedisLink], pool: str
) -> None:
    client = server.client()
    client.set(stream_of(pool), "a string")
    mine = link(server.url)
    assert mine.exchange([b"one"]) == [b"one"]
    client.xadd(stream_of(pool), {"other": "field"})
    client.xadd(stream_of(pool), {"e": b"x" * (BULLETIN_BYTES_MAX + 1)})
    client.xadd(stream_of(pool), {"e": b"noise"})
    client.xadd(stream_of(pool), {"e": b"x" * 40})
    assert mine.exchange([b"two"]) == [b"two"]
    assert mine.statistics()["forged"] == 3


def test_only_who_knows_the_pools_token_is_heard(server: RedisServer, pool: str) -> None:
    """Else who can write there registers an engine of his, and is sent prompts."""
    url, opened, ours = patient(server.url), contextlib.closing, b"our token of thirty-two bytes..."
    with opened(RedisLink(url, pool=pool, token=ours)) as mine:
        mine.exchange([])
        with opened(RedisLink(url, pool=pool, token=b"another")) as another:
            another.exchange([b"a forged one"])
        with opened(RedisLink(url, pool=pool)) as stranger:
            stranger.exchange([b"another"])
            assert stranger.statistics()["forged"] == 0
        assert mine.exchange([b"genuine"]) == [b"genuine"]
        assert mine.statistics()["forged"] == 2
        copied = server.client().xrevrange(stream_of(pool), count=1)[0][1]
    with opened(RedisLink(url, pool=f"{pool}-2", token=ours)) as elsewhere:
        elsewhere.exchange([])
        server.client().xadd(stream_of(f"{pool}-2"), copied)
        assert elsewhere.exchange([]) == []


def test_a_redis_that_is_away_is_said_to_be_and_found_again(
    tmp_path: Path, link: Callable[[str], RedisLink]
) -> None:
    with RedisServer(tmp_path) as own:
        mine = link(f"redis://{own.address}/0?timeout=0.2")

        def said(word: bytes) -> bool:
            with contextlib.suppress(DirectoryUnavailable):
                return mine.exchange([word])[-1:] == [word]
            return False

        wait_until(lambda: said(b"one"), "it is there")
        own.pause()
        with pytest.raises(DirectoryUnavailable, match="the other conductors"):
            mine.exchange([b"lost"])
        assert mine.statistics()["error"]
        own.resume()
        own.restart()
        wait_until(lambda: said(b"two"), "it is found again")
        assert mine.statistics()["error"] == ""
    mine.close()
    with pytest.raises(ClientClosed):
        mine.exchange([])


def test_a_url_that_can_not_work_is_refused() -> None:
    for url, pool in (("embedded:", "p"), ("http://x", "p"), ("redis://localhost", "a b")):
        with pytest.raises(InvalidInput):
            RedisLink(url, pool=pool)


@pytest.mark.slow
def test_in_a_cluster(tmp_path: Path, link: Callable[[str], RedisLink]) -> None:
    with RedisCluster(tmp_path) as cluster:
        a, b = link(cluster.url), link(cluster.url)
        b.exchange([])
        a.exchange([b"one"])
        assert b.exchange([]) == [b"one"]


# -- the lease -------------------------------------------------------------------------------------


def test_one_has_the_lease_until_it_ends_or_is_given_back(
    server: RedisServer, link: Callable[[str], RedisLink], pool: str
) -> None:
    a, b = link(server.url), link(server.url)
    assert (a.lead("a", 60.0), b.lead("b", 60.0)) == ("a", "a")
    b.resign("b")  # which has none
    assert (a.lead("a", 60.0), b.lead("b", 60.0)) == ("a", "a")
    a.resign("a")
    assert b.lead("b", 0.05) == "b"
    wait_until(lambda: a.lead("a", 60.0) == "a", "the lease of b has ended")
    client = server.client()
    assert 50_000 < client.pttl(f"tiffin:{{{pool}:c}}:leader") <= 60_000
    a.close()
    for call in (lambda: a.lead("a", 1.0), lambda: a.resign("a")):
        with pytest.raises(ClientClosed):
            call()


def test_what_somebody_else_put_there_is_no_lease(
    server: RedisServer, link: Callable[[str], RedisLink], pool: str
) -> None:
    server.client().rpush(f"tiffin:{{{pool}:c}}:leader", "a list")
    mine = link(server.url)
    mine.resign("a")
    assert mine.lead("a", 60.0) == "a"


def test_a_conductor_that_ends_gives_its_lease_back(server: RedisServer, pool: str) -> None:
    async def run() -> None:
        core, line = conductor(unique_name()), RedisLink(patient(server.url), pool=pool)
        task = asyncio.create_task(share(core, line, clock))
        give_up = clock() + 20.0
        while not core.steering.leads(clock()):
            assert clock() < give_up
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert not core.steering.leads(clock())
        line.close()

    asyncio.run(run())
    with contextlib.closing(RedisLink(patient(server.url), pool=pool)) as other:
        assert other.lead("other", 1.0) == "other"


def test_who_gets_no_answer_says_so_once_and_leads_until_its_time_is_over(
    server: RedisServer, link: Callable[[str], RedisLink], caplog: pytest.LogCaptureFixture
) -> None:
    core, line, now = conductor(unique_name()), link(server.url), 100.0

    def exchange() -> None:
        exchange_once(core, line, lambda: now)

    exchange()
    assert core.steering.leads(now)

    def refuses(name: str, lead_s: float) -> str:
        raise DirectoryUnavailable("NOPERM")

    line.lead = refuses  # type: ignore[method-assign]
    for _ in range(4):
        assert core.steering.leads(now)
        now += 0.75
        exchange()
    assert not core.steering.leads(now)
    assert caplog.text.count("who leads is not known: NOPERM") == 1
    assert core.lease.error == "NOPERM"


# -- conductors ------------------------------------------------------------------------------------


def test_two_conductors_over_redis(server: RedisServer, link: Callable[[str], RedisLink]) -> None:
    cores = [conductor(unique_name()) for _ in range(2)]
    links = [link(server.url) for _ in cores]
    a, b = cores
    # By a clock of their own: who is not heard of for two seconds is dead.
    milliseconds = itertools.count(100_000)

    def clock() -> float:
        return next(milliseconds) / 1e3

    def meet() -> None:
        for core, line in zip(cores * 2, links * 2, strict=True):
            exchange_once(core, line, clock)

    meet()
    a.register(spec("m0"), clock())
    meet()
    first = a.schedule(request("r"), clock())
    meet()
    again = b.schedule(request("r"), clock())
    assert isinstance(first, Decision)
    assert isinstance(again, Decision)
    assert (first.prefill, first.decode) == (again.prefill, again.decode)
    b.observe(RequestEvent("r", "finished"), clock())
    meet()
    assert not len(a.ledger)
    assert own_is_zero(cores)


@pytest.mark.slow
def test_in_a_loop_without_redis_and_with_it_again(tmp_path: Path, pool: str) -> None:
    """Decisions are made all the time; what was learnt comes out."""
    found: list[News] = []

    async def until(holds: Callable[[], bool]) -> None:
        give_up = clock() + 20.0
        while not holds():
            assert clock() < give_up
            await asyncio.sleep(0.01)

    async def run(own: RedisServer) -> None:
        cores = [conductor(unique_name()) for _ in range(2)]
        a, b = cores
        links = [RedisLink(f"redis://{own.address}/0?timeout=0.1", pool=pool) for _ in cores]
        tasks = [
            asyncio.create_task(share(core, line, clock, found.append))
            for core, line in zip(cores, links, strict=True)
        ]
        try:
            a.register(spec("m0"), clock())
            await until(lambda: "m0" in b.cluster)
            own.pause()
            await until(lambda: all(line.last_error for line in links))
            decisions = [core.schedule(request(core.name), clock()) for core in cores]
            assert all(isinstance(one, Decision) for one in decisions)
            await until(lambda: not a.peers and not b.peers)
            own.restart()
            await until(lambda: a.cluster.queued[0] == b.cluster.queued[0] == 2)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for line in links:
                line.close()

    with RedisServer(tmp_path) as own:
        asyncio.run(run(own))
    assert "m0" in [one.id for news in found for one in news.joined]


# -- processes -------------------------------------------------------------------------------------

WORKER = Path(__file__).with_name("sharingworker.py")


@contextlib.contextmanager
def process(url: str, pool: str) -> Iterator[tuple[subprocess.Popen[str], ConductorClient]]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, str(WORKER), url, pool]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as running:
        try:
            assert running.stdout is not None
            port = running.stdout.readline().strip()
            assert port, "the worker did not start"
            with ConductorClient(f"http://127.0.0.1:{port}") as client:
                yield running, client
        finally:
            running.kill()


def queued(client: ConductorClient) -> float:
    (one,) = client.instances()
    return one.load["queued"] or 0.0


@pytest.mark.slow
def test_a_process_that_is_killed_leaves_its_requests_to_the_other(
    server: RedisServer, pool: str
) -> None:
    with process(server.url, pool) as (victim, a), process(server.url, pool) as (_, b):
        a.register(spec("m0"))
        wait_until(lambda: len(b.instances()) == 1, "b has heard of the instance")
        first = [a.schedule(request(f"r{number}")) for number in range(3)]
        assert not any(isinstance(one, Rejection) for one in first)
        wait_until(lambda: queued(b) == 3, "b has heard of the requests")
        b.observe(RequestEvent("r0", "finished"))
        wait_until(lambda: queued(a) == 2, "a has heard of the event")

        victim.kill()
        wait_until(lambda: queued(b) == 0, "b has noticed that a is dead")
        again = b.schedule(request("r1"))
        assert not isinstance(again, Rejection)
        assert again.prefill == "m0"
        b.observe(RequestEvent("r2", "prefill_done"))
        assert queued(b) == 1
        (one,) = b.instances()
        assert one.load["batch"] == 1
        assert one.load["kv_used_tokens"] == 2 * 4100
        for name in ("r1", "r2"):
            b.observe(RequestEvent(name, "finished"))
        (one,) = b.instances()
        assert not any(one.load.values())


def test_one_process_leads_and_when_it_is_killed_the_other(server: RedisServer, pool: str) -> None:
    with process(server.url, pool) as first, process(server.url, pool) as second:
        said: list[PlansReply] = []

        def one_leads_and_both_know() -> bool:
            said[:] = [client.plans() for _, client in (first, second)]
            one, other = said
            return one.leads != other.leads and one.leader == other.leader != ""

        wait_until(one_leads_and_both_know, "one leads, and both know who")
        (victim, _), (_, heir) = (first, second) if said[0].leads else (second, first)
        before = said[0].leader
        victim.kill()

        def another_leads() -> bool:
            told = heir.plans()
            return told.leads and told.leader not in ("", before)

        wait_until(another_leads, "the other leads")


def test_names_are_of_nobody_before() -> None:
    names = {unique_name() for _ in range(100)}
    assert len(names) == 100
    assert SharedConductor(max(names, key=len)).name in names
