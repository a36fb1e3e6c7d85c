"""Whatever an authenticated client sends, the node answers with typed refusals and stays whole; and
whatever a node sends, its client raises a typed error."""

from __future__ import annotations

import contextlib
import random
import time
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kvsupport import SCHEMA, fresh_prefix, is_quiet, payloads_of, wait_until

from tiffin.kvstore import Client, errors
from tiffin.kvstore.client.pool.remote.peer import Peer
from tiffin.kvstore.client.pool.remote.reply_checks import check_reply
from tiffin.kvstore.credentials import Credentials
from tiffin.kvstore.errors import NodeUnavailable, TiffinError
from tiffin.kvstore.node.core import messages
from tiffin.messenger.errors import GrantError, MessengerError
from tiffin.messenger.tcp.tcp_client import Answer, Listener
from tiffin.messenger.transport import Range

if TYPE_CHECKING:
    from collections.abc import Iterator

    from poolsupport import Cluster

# An evacuation has its own tests, and takes long.
KINDS = [kind for kind in messages.AnyRequest.__args__ if kind is not messages.Evacuate]
PREFIX = fresh_prefix(4)
KEYS = [PREFIX.key_bytes, PREFIX.keys[0], PREFIX.keys[2] * 3, bytes(16), bytes(32), b"odd", b""]
WILD: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1,
    2,
    3,
    255,
    SCHEMA.extent_bytes,
    1 << 31,
    (1 << 63) - 1,
    1 << 63,
    (1 << 64) - 1,
    -(1 << 63),
    0.0,
    -0.5,
    0.001,
    1e300,
    float("nan"),
    float("inf"),
    b"",
    b"x" * 16,
    bytes(range(16)),
    b"y" * 40,
    "",
    "text",
    "\0\x1b[31m",
    "n" * 300,
    [],
    [0, 1, 2],
    [1 << 62] * 50,
    [b"header"] * 3,
    [[[[]]]],
    {},
    {"a": 1},
    *KEYS,
)


def wild_message(dice: random.Random) -> bytes:
    """A message of a known tag with random fields, some of which are valid."""
    kind = dice.choice(KINDS)
    fields: list[Any] = []
    for field in msgspec.structs.fields(kind)[1:]:
        proper = {
            "keys": dice.choice(KEYS),
            "key": PREFIX.keys[0],
            "parent": bytes(16),
            "timeout_s": dice.choice([0.0, 0.001, 0.05]),
            "extent_bytes": SCHEMA.extent_bytes,
            "lease": dice.choice([0, 1, 1 << 40]),
            "level": dice.randrange(3),
            "follow": dice.choice([False, True]),
            "slots": dice.choice([[0], [0, 1], [7]]),
            "segments": dice.choice([[], [0], [0, 1]]),
            "spans": dice.choice([[], [4096, 8], [4096, 8, 4104, 8]]),
            "checksums": bytes(8 * dice.randrange(5)),
            "ttl_s": 0.01,
            "wait": dice.random() < 0.5,
        }
        usual = dice.random() < 0.7
        fields.append(proper.get(field.name, 1) if usual else dice.choice(WILD))
    fields = fields[: dice.randint(0, len(fields))] if dice.random() < 0.1 else fields
    if dice.random() < 0.05:
        fields += [dice.choice(WILD)] * dice.randint(1, 3)
    number = 7 if dice.random() < 0.8 else dice.choice(WILD)
    tag = kind.__struct_config__.tag if dice.random() < 0.97 else dice.choice(WILD)
    return msgspec.msgpack.encode([tag, number, *fields])


def too_patient(body: bytes) -> bool:
    """Whether it would wait for long, which is right and tested elsewhere."""
    with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return float(getattr(messages.request_decoder.decode(body), "timeout_s", 0.0)) > 0.1
    return False


@pytest.mark.parametrize("seed", range(6))
def test_wild_messages_get_typed_refusals(
    cluster: Cluster, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    dice = random.Random(seed)
    member = cluster.start("one", 8, schema=SCHEMA)
    peer = Peer(("127.0.0.1", int(member.address.rpartition(":")[2])), Credentials(), "fuzzer")
    refused, done = 0, 0
    with contextlib.closing(peer):
        for _ in range(400):
            body = wild_message(dice)
            if too_patient(body):
                continue
            with contextlib.suppress(MessengerError), peer.stream(time.monotonic() + 20) as stream:
                stream.message(body)
                if dice.random() < 0.2:
                    stream.ask_read(
                        dice.choice([0, 1, 99]), [Range(dice.choice([0, 8, 1 << 63]), 8)]
                    )
                # The request behind it is answered, so it was answered, or needs no answer.
                behind = messages.Match(0, b"")
                peer.queue(stream, behind)
                stream.flush(time.monotonic() + 20)
                refusals, answers = answers_before(peer, stream, behind)
                refused += refusals
                done += answers
        assert refused > 50
        assert done > 50
    # An unexpected error would have ended a connection, and left a traceback.
    assert not [record for record in caplog.records if record.exc_info]
    wait_until(lambda: is_quiet(member.node.statistics()), "nothing is left of it")
    member.node.check()
    member.node.draining = False
    prefix = fresh_prefix(2)
    with Client.attach(member.node) as client:
        assert client.put(prefix, payloads_of(prefix)).complete
        client.remove(prefix)


def answers_before(peer: Peer, stream: Any, behind: messages.Request) -> tuple[int, int]:
    """How many refusals and other answers come before that of `behind`; each must be of the
    protocol, and each refusal must name one of Tiffin's errors."""
    refusals = answers = 0
    deadline = time.monotonic() + 20
    while True:
        if stream._reads_due:
            kind, _ = peek(stream, deadline)
            if kind == "DATA":
                with contextlib.suppress(GrantError):
                    stream.receive_data([Range(0, 8)], [np.zeros(8, np.uint8)], deadline)
                continue
        reply = messages.reply_decoder.decode(stream.receive_message(deadline))
        if reply.id == behind.id and isinstance(reply, messages.Flags):
            return refusals, answers
        if isinstance(reply, messages.Refused):
            refusals += 1
            kind_ = getattr(errors, reply.error)
            assert issubclass(kind_, TiffinError), reply
            assert reply.message
        else:
            answers += 1


def peek(stream: Any, deadline: float) -> tuple[str, None]:
    """The kind of the next frame."""
    from tiffin.messenger.wire import frames

    while stream.ahead_bytes < frames.HEADER.size:
        stream._receive_ahead(deadline, None, frames.HEADER.size)
    header = frames.parse_header(stream._buffer[stream._start : stream._end], 1 << 24)
    return header.kind.name, None


# -- a client of a fuzzed node ---------------------------------------------------------------------


class Liar:
    """A node that answers each request with bytes of the test."""

    trusted = False

    def __init__(self, replies: list[messages.AnyReply]) -> None:
        self._replies = replies
        self.grants: Any = self

    def greet(self) -> bytes:
        return messages.encoder.encode(messages.Challenge(0, b"n" * 16, messages.PROTOCOL_VERSION))

    def message(self, body: bytes | memoryview) -> Answer:
        request = messages.request_decoder.decode(body)
        if isinstance(request, messages.Hello):
            self.trusted = True
            welcome = messages.Welcome(request.id, messages.PROTOCOL_VERSION, "liar", 1 << 20)
            return Answer(messages.encoder.encode(welcome))
        if request.id == messages.UNAWAITED:
            return Answer(None)
        reply = self._replies[0]
        reply.id = request.id
        return Answer(messages.encoder.encode(reply))

    def open(self, grant: int, *, writes: bool) -> Any:
        raise GrantError("there is none")

    def closed(self) -> None:
        pass


@pytest.fixture(scope="module")
def liar() -> Iterator[tuple[Peer, list[messages.AnyReply]]]:
    replies: list[messages.AnyReply] = []
    listener = Listener(("127.0.0.1", 0), lambda _: Liar(replies))
    peer = Peer(listener.address, Credentials(), "honest")
    yield peer, replies
    peer.close()
    listener.close()


NUMBER = st.sampled_from([-1, 0, 1, 7, 1 << 40, (1 << 63) - 1])
NUMBERS = st.lists(NUMBER, max_size=5)
REPLIES = st.one_of(
    st.builds(messages.Flags, st.just(0), st.binary(max_size=6)),
    st.builds(
        messages.Reserved, st.just(0), st.lists(st.integers(0, 5), max_size=6).map(bytes),
        NUMBER, NUMBER, NUMBERS, NUMBERS,
    ),
    st.builds(messages.Leased, st.just(0), NUMBER, NUMBER, NUMBERS, NUMBERS, NUMBERS),
    st.builds(messages.Done, st.just(0), NUMBER),
    st.builds(messages.Numbers, st.just(0), st.just({"x": [1, None]})),
    st.builds(messages.KeyPage, st.just(0), NUMBER, st.binary(max_size=40), st.booleans()),
    st.builds(messages.Refused, st.just(0), st.sampled_from(["NoRoom", "x", "os"]), st.text()),
)  # fmt: skip
REQUESTS = st.sampled_from(
    [
        messages.Match(0, PREFIX.key_bytes),
        messages.Exists(0, PREFIX.key_bytes),
        messages.Lease(0, PREFIX.key_bytes, 0.1),
        messages.Reserve(0, PREFIX.key_bytes, bytes(16), 0, SCHEMA.extent_bytes, 0.1),
        messages.Commit(0, 1),
        messages.Statistics(0),
        messages.Remove(0, PREFIX.key_bytes),
    ]
)


@settings(
    max_examples=300,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(request=REQUESTS, reply=REPLIES)
def test_a_client_takes_no_answer_that_cannot_be(
    liar: tuple[Peer, list[messages.AnyReply]], request: Any, reply: Any
) -> None:
    peer, replies = liar
    replies[:] = [reply]
    try:
        answer = peer.call(request, 5.0)
    except TiffinError:
        return
    assert check_reply(request, answer)
    count = len(PREFIX)
    if isinstance(answer, messages.Leased):
        assert len(answer.offsets) == len(answer.generations) == len(answer.lengths) <= count
        assert all(value >= 0 for value in [*answer.offsets, *answer.generations])
        assert all(length > 0 for length in answer.lengths)
    if isinstance(answer, messages.Reserved):
        assert answer.statuses.count(1) == len(answer.offsets) == len(answer.generations)
        assert len(answer.statuses) <= count
    if isinstance(request, messages.Exists):
        assert len(answer.flags) == count
    if isinstance(request, messages.Match):
        assert len(answer.flags) <= count


def test_a_pool_with_a_liar_in_it_is_a_pool_with_a_node_less(cluster: Cluster) -> None:
    from msgspec.structs import replace

    one = cluster.start("one", schema=SCHEMA)
    prefix = one.put(fresh_prefix(3))
    cluster.settle()
    replies: list[messages.AnyReply] = [messages.Leased(0, 0, 5, [-8], [1], [1])]
    listener = Listener(("127.0.0.1", 0), lambda _: Liar(replies))
    record = cluster.directory.nodes()[one.number]
    number = cluster.directory.register(
        replace(record, address=f"127.0.0.1:{listener.address[1]}", name="liar")
    )
    cluster.forge(number, prefix)
    client = cluster.open()
    client._nodes.driver.links.moved(one.number, 1, 1.0)
    began = time.monotonic()
    with client.get(prefix) as blocks:
        assert blocks.complete
    assert client._nodes.driver.links.down(began) == {number}
    replies[:] = [messages.Reserved(0, b"\1", 0, 5, [1 << 62], [3])]
    for _ in range(3):
        more = fresh_prefix(1)
        assert client.put(more, payloads_of(more)).complete
        assert one.has(more) == [True]
    replies[:] = [messages.Flags(0, b"")]
    assert client.match(prefix).blocks == 3
    with pytest.raises((NodeUnavailable, TiffinError)):
        client.remove(prefix)
    client.close()
    listener.close()
    cluster.directory.withdraw(number)
