"""No call ends later than half a second after its deadline, whatever hangs: every verb of every
kind of client, with a node that stops at every message of the verb. The cluster simulation checks
this in virtual time; here the sockets are real."""

from __future__ import annotations

import contextlib
import threading
import time
import tracemalloc
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from kvsupport import (
    SCHEMA,
    PoolOptions,
    assert_right,
    fresh_prefix,
    is_quiet,
    payloads_of,
    wait_until,
)
from poolsupport import Cluster
from stillsupport import StandingStill, Watch
from waysupport import NetworkNode

from tiffin.kvstore import AsyncClient, Client, KVSchema
from tiffin.kvstore.directory import EmbeddedDirectory
from tiffin.kvstore.errors import DeadlineExceeded, NodeUnavailable, TiffinError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kvsupport import LoopThread

    from tiffin.kvstore import Prefix

TIMEOUT_S = 0.05
OVERRUN_S = 0.5
# For threads that wake up late on a busy machine, each by less than the watch notices.
SLACK_S = 0.15


class Beside:
    """A client of a node that can be stopped, and another that reaches the node directly."""

    def __init__(
        self, still: StandingStill, direct: Client, loop: LoopThread | None, watch: Watch
    ) -> None:
        self.still = still
        self.direct = direct
        self.watch = watch
        self.loop = loop
        opened = AsyncClient.open(still.url) if loop else Client.open(still.url)
        self.raw: Any = self._done(opened)

    def _done(self, found: Any) -> Any:
        return self.loop.run(found) if self.loop is not None else found

    def call(self, verb: str, *arguments: Any, **options: Any) -> Any:
        """Call a verb, and await it if the client is an asyncio one."""
        return self._done(getattr(self.raw, verb)(*arguments, **options))

    def stream(self, prefix: Prefix) -> list[int]:
        """The indices of a stream's layers."""

        async def every() -> list[int]:
            async with self.raw.stream(prefix, timeout_s=TIMEOUT_S) as layers:
                return [layer.index async for layer in layers]

        if self.loop is not None:
            return self.loop.run(every())
        with self.raw.stream(prefix, timeout_s=TIMEOUT_S) as layers:
            return [layer.index for layer in layers]

    def in_time(self, what: str, action: Callable[[], Any], times: int = 1) -> Any:
        """The action's result or error, which must come in time. `times`: waits with a deadline."""
        with self.watch.within(times * (TIMEOUT_S + OVERRUN_S) + SLACK_S, what):
            try:
                return action()
            except TiffinError as error:
                return error

    def close(self) -> None:
        self._done(self.raw.close())


@pytest.fixture(params=["unix", "tcp"])
def target(
    request: pytest.FixtureRequest, shared_daemon: Any, tmp_path: Path
) -> Iterator[tuple[Any, str]]:
    """A node's address for the relay, and a URL that reaches the node directly."""
    if request.param == "unix":
        daemon = shared_daemon(PoolOptions())
        yield str(daemon.socket), daemon.url
        return
    with contextlib.closing(NetworkNode(PoolOptions().start_node(tmp_path))) as node:
        host, _, port = node.url.removeprefix("tiffin://").rpartition(":")
        yield (host, int(port)), node.url


@pytest.fixture(params=["sync", "asyncio"])
def beside(
    request: pytest.FixtureRequest, target: tuple[Any, str], loop_thread: LoopThread
) -> Iterator[Beside]:
    where, url = target
    loop = loop_thread if request.param == "asyncio" else None
    with contextlib.ExitStack() as stack:
        watch = stack.enter_context(contextlib.closing(Watch()))
        still = stack.enter_context(contextlib.closing(StandingStill(where)))
        direct = stack.enter_context(Client.open(url, name="direct"))
        client = Beside(still, direct, loop, watch)
        stack.callback(client.close)
        yield client
        still.go_on()
        wait_until(lambda: is_quiet(numbers_of(direct)), "nothing is held by anybody")
        prefix = fresh_prefix(1)
        wait_until(lambda: works(client, prefix), "the same client works again")
        direct.remove(prefix)


def numbers_of(client: Client) -> dict[str, Any]:
    numbers = client.statistics()
    return next(iter(numbers["nodes"].values())) if "nodes" in numbers else numbers


def works(client: Beside, prefix: Prefix) -> bool:
    try:
        return bool(client.call("put", prefix, payloads_of(prefix), timeout_s=5.0).complete)
    except (DeadlineExceeded, NodeUnavailable):
        return False


CALLS: dict[str, tuple[bytes, Callable[[Beside, Prefix, Prefix], Any]]] = {
    "match": (b"match", lambda c, there, _: c.call("match", there, timeout_s=TIMEOUT_S)),
    "exists": (b"exists", lambda c, there, _: c.call("exists", there, timeout_s=TIMEOUT_S)),
    "get": (b"lease", lambda c, there, _: c.call("get", there, timeout_s=TIMEOUT_S).release()),
    "get into": (
        b"lease",
        lambda c, there, _: c.call(
            "get", there, into=np.empty(2 * SCHEMA.block_bytes, np.uint8), timeout_s=TIMEOUT_S
        ),
    ),
    "put at its reservation": (
        b"reserve",
        lambda c, _, new: c.call("put", new, payloads_of(new), timeout_s=TIMEOUT_S),
    ),
    "put at its commit": (
        b"commit",
        lambda c, _, new: c.call("put", new, payloads_of(new), timeout_s=TIMEOUT_S),
    ),
    "pin": (b"pin", lambda c, there, _: c.call("pin", there, ttl_s=1, timeout_s=TIMEOUT_S)),
    "unpin": (b"pin", lambda c, there, _: c.call("unpin", there, timeout_s=TIMEOUT_S)),
    "remove": (b"remove", lambda c, _, new: c.call("remove", new, timeout_s=TIMEOUT_S)),
    "statistics": (b"statistics", lambda c, *_: c.call("statistics", timeout_s=TIMEOUT_S)),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_call_ends_in_time(beside: Beside, call: str) -> None:
    word, action = CALLS[call]
    there, new = fresh_prefix(2), fresh_prefix(2)
    assert beside.direct.put(there, payloads_of(there)).complete
    beside.still.at(word)
    beside.in_time(call, lambda: action(beside, there, new))
    assert beside.still.stands
    if call in ("get", "put at its commit"):
        beside.in_time(f"a second {call}", lambda: action(beside, there, new))
    beside.still.go_on()
    wait_until(lambda: works(beside, there), "the node answers")
    beside.direct.remove(there)
    beside.direct.remove(new)


@pytest.mark.parametrize("word", [b"lease", b"await"])
def test_a_step_of_a_stream_ends_in_time(beside: Beside, word: bytes) -> None:
    there = fresh_prefix(2)
    assert beside.direct.put(there, payloads_of(there)).complete
    beside.still.at(word)
    found = beside.in_time("a stream", lambda: beside.stream(there), times=1 + (word == b"await"))
    assert isinstance(found, TiffinError)
    beside.still.go_on()
    wait_until(lambda: works(beside, there), "the node answers")
    assert beside.stream(there) == [0, 1]
    beside.direct.remove(there)


def test_a_greeting_that_is_never_answered(beside: Beside) -> None:
    """Each step of the greeting has what is left of the whole call's time."""
    beside.still.at(b"hello")
    for end in beside.still._ends:
        with contextlib.suppress(OSError):
            end.shutdown(2)  # the existing connection is lost
    for _ in range(2):
        beside.in_time("match", lambda: beside.call("match", fresh_prefix(1), timeout_s=TIMEOUT_S))


@pytest.mark.parametrize("target", ["unix"], indirect=True)
def test_a_commit_that_is_given_up_is_not_counted(beside: Beside) -> None:
    """The node may still carry it out; nothing of the reservation stays either way."""
    prefix = fresh_prefix(2)
    beside.still.at(b"commit")
    result = beside.in_time(
        "put", lambda: beside.call("put", prefix, payloads_of(prefix), timeout_s=TIMEOUT_S)
    )
    assert (result.stored, result.resident, result.busy, result.refused) == ((), (), (), ())
    assert (result.reason, result.complete) == ("deadline", False)
    beside.still.go_on()
    wait_until(lambda: is_quiet(numbers_of(beside.direct)), "the reservation has ended")
    with beside.direct.get(prefix) as blocks:
        assert_right(blocks, prefix)
    again = beside.call("put", prefix, payloads_of(prefix))
    assert again.complete
    assert sorted(again.stored + again.resident) == [0, 1]
    beside.direct.remove(prefix)


def test_what_comes_next_does_not_wait_for_a_node_that_stands_still(beside: Beside) -> None:
    """Leases are released at once: a release has no deadline."""
    there = fresh_prefix(2)
    assert beside.direct.put(there, payloads_of(there)).complete
    held = beside.call("get", there)
    beside.still.now()
    began = time.monotonic()
    held.release() if beside.loop is None else beside.loop.call(held.release)
    assert beside.watch.took_s(began, time.monotonic()) < OVERRUN_S + SLACK_S
    beside.still.go_on()
    wait_until(lambda: is_quiet(numbers_of(beside.direct)), "it is released")
    beside.direct.remove(there)


# -- a node that stopped reading -------------------------------------------------------------------

TINY = KVSchema.gqa(model="tiny", layers=1, kv_heads=1, head_dim=1, dtype="int8", block_tokens=1)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["unix"], indirect=True)
def test_requests_that_a_node_does_not_take_are_not_kept(beside: Beside) -> None:
    """Each request is a MiB of keys, and is given up after a moment."""
    prefix = TINY.prefix(np.arange(65_536))
    assert len(prefix.key_bytes) == 1 << 20
    beside.still.now()
    tracemalloc.start()
    try:
        for _ in range(12):
            with pytest.raises((DeadlineExceeded, NodeUnavailable)):
                beside.call("match", prefix, timeout_s=0)
        kept_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept_bytes < 6 << 20


@pytest.mark.slow
@pytest.mark.parametrize("target", ["unix"], indirect=True)
def test_leases_that_end_while_a_node_stands_still_are_released(beside: Beside) -> None:
    there = fresh_prefix(1)
    assert beside.direct.put(there, payloads_of(there)).complete
    held = [beside.call("get", there) for _ in range(500)]  # a socket has room for 278 frames
    beside.still.now()
    for blocks in held:
        blocks.release() if beside.loop is None else beside.loop.call(blocks.release)
    beside.still.go_on()
    wait_until(lambda: is_quiet(numbers_of(beside.direct)), "all are released")
    beside.direct.remove(there)


# -- a directory that hangs ------------------------------------------------------------------------


class Standing(EmbeddedDirectory):
    """A handle of a directory that answers only when `go_on` is set."""

    patience_s = 60.0
    go_on: threading.Event

    def _locked(self) -> Any:
        self.go_on.wait(30)
        return super()._locked()


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["match", "exists", "get", "put", "pin", "remove", "reserve"])
def test_a_directory_that_stands_still_costs_a_call_what_it_has(verb: str) -> None:
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(contextlib.closing(Cluster()))
        watch = stack.enter_context(contextlib.closing(Watch()))
        there = cluster.start("one", schema=SCHEMA).put(fresh_prefix(1))
        cluster.settle()
        directory = Standing.__new__(Standing)
        directory.go_on = threading.Event()
        directory._open(cluster.directory._state)
        client = cluster.open(members=directory)
        stack.callback(directory.go_on.set)
        arguments = [payloads_of(there)] if verb == "put" else []
        with watch.within(TIMEOUT_S + OVERRUN_S + SLACK_S, verb), contextlib.suppress(TiffinError):
            getattr(client, verb)(there, *arguments, timeout_s=TIMEOUT_S)
        directory.go_on.set()
        with client.get(there) as blocks:
            assert_right(blocks, there)
            assert blocks.complete
