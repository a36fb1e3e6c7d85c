"""Reports of damage: checked while other clients are served, and not believed without a check."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
from kvsupport import Background, assert_right, fresh_prefix, payloads_of, wait_until
from poolsupport import LARGE

from tiffin.kvstore import Client
from tiffin.kvstore.errors import CorruptBlock, InvalidInput, NodeUnavailable
from tiffin.kvstore.node import inspector
from tiffin.kvstore.node.core import messages
from tiffin.kvstore.node.core.node_core import ReserveStatus
from tiffin.kvstore.node.node import Node, NodeOptions

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tiffin.kvstore import Prefix

BLOCKS = 8


@pytest.fixture
def node() -> Iterator[Node]:
    node = Node(NodeOptions(BLOCKS * LARGE.extent_bytes, prefault=False))
    yield node
    node.check()
    node.close()


class Slow:
    """Replaces `verify_block`: waits for `go`, and reports damage if the test says so."""

    def __init__(self) -> None:
        self.reached, self.go = threading.Event(), threading.Event()
        self.looks = 0
        self.damage: type[Exception] | None = None

    def __call__(self, view: Any, replica: Any) -> None:
        self.looks += 1
        self.reached.set()
        assert self.go.wait(20)
        if self.damage is not None:
            raise self.damage("seen by the test")


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Slow]:
    slow = Slow()
    monkeypatch.setattr(inspector, "verify_block", slow)
    yield slow
    slow.go.set()


def put(client: Client, prefix: Prefix) -> Prefix:
    assert client.put(prefix, payloads_of(prefix)).complete
    return prefix


def generation_of(node: Node, prefix: Prefix) -> int:
    replica = node.core.index[prefix.keys[0]].dram
    assert replica is not None
    return replica.generation


class Reporter:
    """A client that reports blocks and keeps the replies."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self.session = node.connect("reporter", 1)
        self.replies: list[Any] = []

    def report(self, prefix: Prefix, generation: int | None = None) -> None:
        if generation is None:
            generation = generation_of(self._node, prefix)
        self.ask(messages.Report(0, prefix.keys[0], generation))

    def ask(self, request: messages.Request) -> None:
        self._node.submit(self.session, request, self.replies.append)

    def answers(self, count: int) -> list[Any]:
        wait_until(lambda: len(self.replies) == count, "the reports are answered")
        return self.replies

    def verdict(self, prefix: Prefix, generation: int | None = None) -> int:
        before = len(self.replies)
        self.report(prefix, generation)
        verdict: int = self.answers(before + 1)[-1].count
        return verdict


def flip(node: Node, prefix: Prefix) -> None:
    replica = node.core.index[prefix.keys[0]].dram
    assert replica is not None
    node.dram.region.array[replica.offset + replica.length - 1] ^= 1


def test_damage_is_dropped_and_an_error_of_the_reader_is_not(node: Node, client: Client) -> None:
    reporter = Reporter(node)
    good, bad = put(client, fresh_prefix(1, LARGE)), put(client, fresh_prefix(1, LARGE))
    flip(node, bad)
    assert reporter.verdict(good) == 0
    assert reporter.verdict(bad, generation_of(node, bad) - 1) == 0, "an older one, gone by now"
    assert reporter.verdict(bad) == 1
    assert (client.exists(good), client.exists(bad)) == ([True], [False])
    assert reporter.verdict(bad, 7) == 0, "it is not here"
    assert node.statistics()["counters"]["corrupt"] == 1
    space = node.core.residency.dram.statistics()
    assert space.committed_bytes + space.free_bytes == space.capacity_bytes, "nothing is held"


def test_others_are_served_while_a_block_is_looked_at(
    node: Node, client: Client, slow: Slow
) -> None:
    prefix = put(client, fresh_prefix(1, LARGE))
    reporter = Reporter(node)
    reporter.report(prefix)
    assert slow.reached.wait(20)

    def work() -> None:
        other = put(client, fresh_prefix(2, LARGE))
        for one in (prefix, other):
            with client.get(one) as blocks:
                assert_right(blocks, one)
                assert blocks.complete
        assert client.match(prefix).blocks == 1
        assert node.statistics()["blocks"] == 3
        node.check()

    Background(work).result(20)
    assert not reporter.replies
    slow.go.set()
    assert reporter.answers(1)[0].count == 0


def test_what_is_looked_at_is_not_evicted(node: Node, client: Client, slow: Slow) -> None:
    prefix = put(client, fresh_prefix(1, LARGE))
    reporter = Reporter(node)
    reporter.report(prefix)
    assert slow.reached.wait(20)
    for _ in range(2 * BLOCKS):
        put(client, fresh_prefix(1, LARGE))
    assert client.exists(prefix) == [True]
    slow.go.set()
    reporter.answers(1)
    for _ in range(2 * BLOCKS):
        put(client, fresh_prefix(1, LARGE))
    assert client.exists(prefix) == [False]


def test_a_block_that_was_replaced_meanwhile_stays(node: Node, client: Client, slow: Slow) -> None:
    prefix = put(client, fresh_prefix(1, LARGE))
    slow.damage = CorruptBlock
    reporter = Reporter(node)
    first = generation_of(node, prefix)
    reporter.report(prefix)
    assert slow.reached.wait(20)
    client.remove(prefix)
    put(client, prefix)
    assert generation_of(node, prefix) > first
    slow.go.set()
    reporter.answers(1)
    with client.get(prefix) as blocks:
        assert blocks.complete
        assert_right(blocks, prefix)
    assert node.statistics()["counters"]["corrupt"] == 0
    wait_until(
        lambda: node.core.residency.dram.statistics().quarantined_bytes == 0,
        "the extent of the old one is free",
    )


def test_many_reports_of_one_block_cost_one_look(node: Node, client: Client, slow: Slow) -> None:
    prefix = put(client, fresh_prefix(1, LARGE))
    slow.damage = CorruptBlock
    reporter = Reporter(node)
    generation = generation_of(node, prefix)
    for _ in range(50):
        reporter.report(prefix, generation)
    slow.go.set()
    assert [answer.count for answer in reporter.answers(50)] == [1] + [0] * 49
    assert slow.looks == 1


def test_what_a_client_asks_next_waits_for_its_report(
    node: Node, client: Client, slow: Slow
) -> None:
    """The client computes the block again, and its put must not find the damaged one."""
    prefix = put(client, fresh_prefix(1, LARGE))
    slow.damage = CorruptBlock
    reporter = Reporter(node)
    reporter.report(prefix)
    reporter.ask(messages.Match(0, prefix.key_bytes))
    length = LARGE.extent_bytes
    reporter.ask(messages.Reserve(0, prefix.key_bytes, bytes(16), 0, length, 0.0))
    assert slow.reached.wait(20)
    assert client.match(prefix).blocks == 1, "others don't wait, and are not told yet"
    assert not reporter.replies
    slow.go.set()
    report, match, reserved = reporter.answers(3)
    assert (report.count, match.flags) == (1, b"")
    assert reserved.statuses == bytes([ReserveStatus.GRANTED])
    reporter.ask(messages.Abort(0, reserved.lease))
    reporter.answers(4)


def test_who_leaves_asks_for_nothing_more(node: Node, client: Client, slow: Slow) -> None:
    prefix = put(client, fresh_prefix(1, LARGE))
    reporter = Reporter(node)
    reporter.report(prefix)
    reporter.ask(messages.Lease(0, prefix.key_bytes, 5.0))
    assert slow.reached.wait(20)
    node.disconnect(reporter.session, fenced=True)
    slow.go.set()
    assert reporter.answers(1)[0].count == 0
    node.check()
    assert len(node.statistics()["sessions"]) == 1, "the other client's"


def test_clients_take_turns(node: Node, client: Client, slow: Slow) -> None:
    """A client with many reports delays the others by one check only."""
    prefix = put(client, fresh_prefix(1, LARGE))
    many, few = Reporter(node), Reporter(node)
    decided: list[str] = []
    many.replies, few.replies = Noted(decided, "many"), Noted(decided, "few")
    for _ in range(20):
        many.report(prefix)
    assert slow.reached.wait(20)
    for _ in range(2):
        few.report(prefix)
    slow.go.set()
    many.answers(20)
    few.answers(2)
    assert decided[:5] == ["many", "many", "few", "many", "few"]
    assert slow.looks == 22


class Noted(list[Any]):
    """Replies of one client; also records the order of all clients' replies."""

    def __init__(self, order: list[str], name: str) -> None:
        super().__init__()
        self._order, self._name = order, name

    def append(self, reply: Any) -> None:
        super().append(reply)
        self._order.append(self._name)


@pytest.mark.parametrize("limit", ["WAITING_MAX", "CLIENT_REPORTS_MAX"])
def test_reports_that_wait_are_bounded(
    node: Node, client: Client, slow: Slow, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    monkeypatch.setattr(inspector, limit, 3)
    prefix = put(client, fresh_prefix(1, LARGE))
    reporter = Reporter(node)
    reporter.report(prefix)
    assert slow.reached.wait(20)
    for _ in range(4):
        reporter.report(prefix)
    refused = [r for r in reporter.replies if r.error == NodeUnavailable.__name__]
    assert 1 <= len(refused) == len(reporter.replies) <= 2
    slow.go.set()
    reporter.answers(5)


def test_requests_behind_reports_are_bounded(
    node: Node, client: Client, slow: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspector, "BEHIND_MAX", 3)
    prefix = put(client, fresh_prefix(1, LARGE))
    reporter = Reporter(node)
    reporter.report(prefix)
    for _ in range(4):
        reporter.ask(messages.Match(0, prefix.key_bytes))
    assert [reply.error for reply in reporter.replies] == [InvalidInput.__name__]
    slow.go.set()
    assert [reply.flags for reply in reporter.answers(5)[2:]] == [b"\x01"] * 3


def test_what_gives_back_does_not_wait_behind_reports(
    node: Node, client: Client, slow: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Releases get no answer, so a refused one would never be sent again."""
    monkeypatch.setattr(inspector, "BEHIND_MAX", 1)
    prefix, other = put(client, fresh_prefix(1, LARGE)), fresh_prefix(2, LARGE)
    reporter = Reporter(node)
    length = LARGE.extent_bytes
    for key in other.keys:
        reporter.ask(messages.Reserve(0, key, bytes(16), 0, length, 0.0))
    for _ in range(3):
        reporter.ask(messages.Lease(0, prefix.key_bytes, 5.0))
    leases = [reply.lease for reply in reporter.answers(5)]
    assert len(reporter.session.leases) == 5
    reporter.replies.clear()
    reporter.report(prefix)
    assert slow.reached.wait(20)
    reporter.ask(messages.Match(0, prefix.key_bytes))
    reporter.ask(messages.Abort(0, leases[0]))
    reporter.ask(messages.Commit(0, leases[1], [0]))
    for lease in leases[2:]:
        reporter.ask(messages.Release(0, lease))
    assert not [reply for reply in reporter.replies if isinstance(reply, messages.Refused)]
    assert len(reporter.answers(5)) == 5, "at once"
    assert not reporter.session.leases
    slow.go.set()
    assert reporter.answers(7)[-1].flags == b"\x01"


@pytest.mark.parametrize("failing", ["condemn", "unhold", "reply"])
def test_what_waits_goes_on_when_deciding_a_report_fails(
    node: Node, client: Client, slow: Slow, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("by the test")

    prefix = put(client, fresh_prefix(1, LARGE))
    slow.damage = CorruptBlock
    reporter = Reporter(node)
    report = messages.Report(0, prefix.keys[0], generation_of(node, prefix))
    node.submit(reporter.session, report, fail if failing == "reply" else reporter.replies.append)
    assert slow.reached.wait(20)
    reporter.ask(messages.Match(0, prefix.key_bytes))
    unhold = node.core.residency.unhold
    with monkeypatch.context() as patch:
        if failing == "condemn":
            patch.setattr(node.core, "condemn", fail)
        elif failing == "unhold":

            def unhold_and_fail(replica: Any) -> None:
                unhold(replica)
                fail()

            patch.setattr(node.core.residency, "unhold", unhold_and_fail)
        slow.go.set()
        replies = reporter.answers(1 if failing == "reply" else 2)
    assert replies[-1].flags == (b"\x01" if failing == "condemn" else b"")
    if failing == "condemn":
        assert replies[0].error == NodeUnavailable.__name__, "not said to be dropped"
    client.remove(prefix)
    space = node.core.residency.dram.statistics()
    assert space.free_bytes == space.capacity_bytes, "nothing is held"


def test_one_failure_behind_a_report_does_not_take_the_rest_along(
    node: Node, client: Client, slow: Slow
) -> None:
    def fail(reply: Any) -> None:
        raise ZeroDivisionError("by the test")

    prefix = put(client, fresh_prefix(1, LARGE))
    reporter = Reporter(node)
    reporter.report(prefix)
    node.submit(reporter.session, messages.Match(0, prefix.key_bytes), fail)
    reporter.ask(messages.Match(0, prefix.key_bytes))
    slow.go.set()
    assert reporter.answers(2)[-1].flags == b"\x01"


def test_a_look_that_fails_unexpectedly_does_not_end_them(
    node: Node, client: Client, slow: Slow
) -> None:
    slow.damage = ZeroDivisionError
    slow.go.set()
    reporter = Reporter(node)
    one, two = put(client, fresh_prefix(1, LARGE)), put(client, fresh_prefix(1, LARGE))
    assert reporter.verdict(one) == 1, "what can't be looked at is not served"
    slow.damage = None
    assert reporter.verdict(two) == 0


def test_a_node_can_be_closed_with_reports_waiting(slow: Slow) -> None:
    node = Node(NodeOptions(BLOCKS * LARGE.extent_bytes, prefault=False))
    reporter = Reporter(node)
    with Client.attach(node) as client:
        prefix = put(client, fresh_prefix(1, LARGE))
        reporter.report(prefix)
        reporter.report(prefix)
        assert slow.reached.wait(20)
    closing = Background(node.close)
    slow.go.set()
    closing.result(20)
    assert slow.looks <= 2
