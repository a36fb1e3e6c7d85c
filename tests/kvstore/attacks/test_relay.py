"""A relay without the token between a client and a node: neither accepts it as the other one.

It is at an address of its own, or in the path to the node's address; there it may also take over
the connection after both sides have proved that they know the token.
"""

from __future__ import annotations

import contextlib
import random
import threading
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
from attacks.attacked import Attacked
from attacks.relay import (
    DATA,
    MESSAGE,
    READ,
    TAG_BYTES,
    TO_CLIENT,
    TO_NODE,
    WRITE,
    WRITTEN,
    Frame,
    Meddler,
    Mix,
    Swap,
    flipped,
    message,
    pass_on,
)
from kvsupport import assert_right, fresh_prefix, payload_of, payloads_of, wait_until

from tiffin.kvstore import Client
from tiffin.kvstore.errors import (
    DeadlineExceeded,
    NodeUnavailable,
    NoRoom,
    NotAuthenticated,
    ProtocolError,
    TiffinError,
)
from tiffin.messenger.tcp.tls_context import client_tls, server_tls
from tiffin.messenger.wire.frame_tags import can_tag_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from attacks.relay import Change
    from certsupport import Authority

    from tiffin.kvstore import Prefix


@pytest.fixture
def attacked(tmp_path: Path) -> Iterator[Callable[..., Attacked]]:
    with contextlib.ExitStack() as stack:

        def make(change: Change = pass_on, **options: Any) -> Attacked:
            made = Attacked(tmp_path, change, **options)
            stack.callback(made.close)
            return made

        yield make


needs_cryptography = pytest.mark.skipif(not can_tag_bytes(), reason="needs cryptography")


# -- at another address ----------------------------------------------------------------------------


def test_a_relay_at_another_address_gets_nothing(attacked: Callable[..., Attacked]) -> None:
    """Neither can it answer the client as the node, nor act at the node as the client."""
    here = attacked(known=False)
    prefix = fresh_prefix(4)
    here.put_inside(prefix)
    with pytest.raises(NotAuthenticated, match=r"--advertise 127\.0\.0\.1:"):
        here.open()
    assert here.has(prefix) == 4
    assert not here.node.statistics()["sessions"]
    with here.direct().get(prefix) as blocks:
        assert_right(blocks, prefix)
        assert len(blocks) == 4


def test_a_relay_that_changes_what_is_said_of_addresses_is_no_better(
    attacked: Callable[..., Attacked],
) -> None:
    def lie(frame: Frame) -> Sequence[bytes]:
        if not frame.greets or frame.direction is not TO_NODE:
            return [frame.whole]
        ours = b"127.0.0.1:%d" % here.middle.address[1]
        theirs = b"127.0.0.1:%d" % here.service.address[1]
        return [_same_length(frame.whole, ours, theirs)]

    here = attacked(lie, known=False)
    with pytest.raises(NotAuthenticated, match="know its token"):
        here.open()
    assert here.middle.changed


def _same_length(data: bytes, old: bytes, new: bytes) -> bytes:
    """Replace `old` in msgpack by `new` of the same length, so that length fields stay valid."""
    before, after = bytes([0xA0 + len(old)]) + old, bytes([0xA0 + len(new)]) + new
    body = data[4:].replace(before, after)
    return len(body).to_bytes(4, "little") + body


def test_a_forwarded_port_of_ours_is_said_to_be_ours(attacked: Callable[..., Attacked]) -> None:
    here = attacked()
    prefix = fresh_prefix(4)
    client = here.open()
    assert client.put(prefix, payloads_of(prefix)).complete
    with client.get(prefix) as blocks:
        assert_right(blocks, prefix)
    assert here.middle.connections


# -- on the way ------------------------------------------------------------------------------------


def to(direction: str, *kinds: int) -> Callable[[Frame], bool]:
    return lambda frame: frame.direction == direction and frame.kind in kinds


def flip(at: int) -> Callable[[Frame], Sequence[bytes]]:
    return lambda frame: [flipped(frame.head, at) + frame.tag + frame.raw]


def again(frame: Frame) -> Sequence[bytes]:
    return [frame.whole, frame.whole]


def nothing(frame: Frame) -> Sequence[bytes]:
    return []


ANY = (MESSAGE, READ, DATA, WRITE, WRITTEN)
MEDDLING: dict[str, Callable[[], Any]] = {
    "a request is changed": lambda: Meddler(to(TO_NODE, MESSAGE), flip(-1)),
    "a request is repeated": lambda: Meddler(to(TO_NODE, MESSAGE), again, 1),
    "a request is left out": lambda: Meddler(to(TO_NODE, MESSAGE), nothing, 2),
    "a read asks for other bytes": lambda: Meddler(to(TO_NODE, READ), flip(-10)),
    "a read is of another lease": lambda: Meddler(to(TO_NODE, READ), flip(16)),
    "a read is repeated": lambda: Meddler(to(TO_NODE, READ), again),
    "a write goes to other bytes": lambda: Meddler(to(TO_NODE, WRITE), flip(32)),
    "a reply is changed": lambda: Meddler(to(TO_CLIENT, MESSAGE), flip(-1)),
    "a reply is repeated": lambda: Meddler(to(TO_CLIENT, MESSAGE), again),
    "a reply is left out": lambda: Meddler(to(TO_CLIENT, MESSAGE), nothing, 1),
    "data is said to be less": lambda: Meddler(to(TO_CLIENT, DATA), flip(8)),
    "data is repeated": lambda: Meddler(to(TO_CLIENT, DATA), again),
    "a write is said to be short": lambda: Meddler(to(TO_CLIENT, WRITTEN), flip(8)),
    "a tag is changed": lambda: Meddler(
        to(TO_CLIENT, *ANY), lambda f: [f.head + flipped(f.tag or b"-", 0) + f.raw]
    ),
    "requests change places": lambda: Swap(TO_NODE),
    "requests of two connections change places": lambda: Mix(TO_NODE),
    "replies of two connections change places": lambda: Mix(TO_CLIENT),
}


def use(client: Any, here: Attacked) -> None:
    """Call verbs of every kind; their results must be right."""
    prefix = fresh_prefix(3)
    with contextlib.suppress(NodeUnavailable, DeadlineExceeded, ProtocolError, NoRoom):
        client.put(prefix, payloads_of(prefix), timeout_s=2.0)
    truth = here.has(prefix)
    with contextlib.suppress(NodeUnavailable, DeadlineExceeded, ProtocolError):
        assert sum(client.exists(prefix, timeout_s=2.0)) == truth
    with client.get(prefix, timeout_s=2.0) as blocks:
        assert_right(blocks, prefix)
        assert len(blocks) <= here.has(prefix)


def comes_back(client: Any, prefix: Prefix) -> None:
    """Wait until the client asks the failed node again; then all blocks are there, and right."""

    def all_there() -> bool:
        with client.get(prefix) as blocks:
            assert_right(blocks, prefix)
            return len(blocks) == len(prefix)

    wait_until(all_there, "the node is asked again", 30.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", MEDDLING)
def test_who_meddles_is_noticed(attacked: Callable[..., Attacked], name: str) -> None:
    """A client gets right results or typed errors, and abandons the changed connection."""
    meddler = MEDDLING[name]()
    here = attacked()
    kept = fresh_prefix(5)
    here.put_inside(kept)
    client, other = here.open(), here.open()
    here.middle.change = meddler
    for _ in range(3):
        for one in (client, other):
            use(one, here)
        if meddler.done:
            break
    assert meddler.done
    used = here.middle.connections
    for one in (client, other):
        comes_back(one, kept)
        use(one, here)
    assert here.middle.connections > used or used > 2
    assert here.has(kept) == 5
    here.node.check()


def test_what_is_injected_is_not_carried_out(attacked: Callable[..., Attacked]) -> None:
    here = attacked()
    prefix = fresh_prefix(6)
    here.put_inside(prefix)
    client = here.open()
    with client.get(prefix) as blocks:
        assert len(blocks) == 6
    remove = message(msgspec.msgpack.encode(["remove", 0, prefix.key_bytes]))
    drain = message(msgspec.msgpack.encode(["drain", 0, True]))
    for forged in (remove, drain):
        for connection in range(here.middle.connections):
            with contextlib.suppress(OSError):
                here.middle.inject(connection, TO_NODE, forged + bytes(TAG_BYTES))
    wait_until(lambda: not here.node.statistics()["sessions"], "the node hangs up")
    assert here.has(prefix) == 6
    assert not here.node.draining
    comes_back(
        client, prefix
    )  # the relay may hang up on the client after the node did on the relay
    assert sum(client.exists(prefix)) == 6


@pytest.mark.parametrize("direction", [TO_NODE, TO_CLIENT])
def test_a_frame_is_not_taken_back_by_its_maker(
    attacked: Callable[..., Attacked], direction: str
) -> None:
    """Reflected messages are refused: their tags differ by direction."""
    back = TO_CLIENT if direction is TO_NODE else TO_NODE

    def reflect(frame: Frame) -> Sequence[bytes]:
        here.middle.inject(frame.connection, back, frame.whole)
        return []

    meddler = Meddler(to(direction, MESSAGE), reflect)
    here = attacked()
    client = here.open()
    here.middle.change = meddler
    prefix = fresh_prefix(2)
    here.put_inside(prefix)
    with contextlib.suppress(TiffinError):
        client.exists(prefix, timeout_s=2.0)
    assert meddler.done
    comes_back(client, prefix)
    assert sum(client.exists(prefix)) == 2


# -- the bytes of blocks ---------------------------------------------------------------------------


def change_bytes(frame: Frame) -> Sequence[bytes]:
    """Flip a bit in the payload of the last block."""
    return [frame.head + frame.tag + flipped(frame.raw, -1 - 2 * TAG_BYTES)]


@needs_cryptography
def test_bytes_that_are_changed_on_the_way_are_noticed_where_that_was_asked_for(
    attacked: Callable[..., Attacked],
) -> None:
    """With `verify="off"`, because an attacker that changes bytes can change checksums too."""
    for parameters, wrong in ({}, True), ({"authenticate": "bytes"}, False):
        meddler = Meddler(to(TO_CLIENT, DATA), change_bytes)
        here = attacked(meddler, byte_tags=bool(parameters))
        prefix = fresh_prefix(2)
        here.put_inside(prefix)
        client = here.open("off", **parameters)
        with client.get(prefix) as blocks:
            right = [
                np.array_equal(block.bytes, payload_of(key))
                for block, key in zip(blocks, prefix.keys, strict=False)
            ]
        assert meddler.done
        assert all(right) is not wrong
        assert len(right) == (2 if wrong else 0)


@needs_cryptography
def test_bytes_that_are_changed_on_their_way_to_a_node_are_not_stored(
    attacked: Callable[..., Attacked],
) -> None:
    meddler = Meddler(to(TO_NODE, WRITE), change_bytes)
    here = attacked(meddler, byte_tags=True, credentials={"of_bytes": True})
    client = here.open()  # the node demands tags of bytes
    prefix = fresh_prefix(2)
    with contextlib.suppress(TiffinError):
        client.put(prefix, payloads_of(prefix), timeout_s=2.0)
    assert meddler.done
    with client.get(prefix) as blocks:
        assert_right(blocks, prefix)
        assert len(blocks) == here.has(prefix)
    here.put_inside(prefix)
    comes_back(client, prefix)
    fresh = fresh_prefix(2)
    assert client.put(fresh, payloads_of(fresh)).complete
    comes_back(client, fresh)


@needs_cryptography
def test_bytes_with_tags_go_both_ways(attacked: Callable[..., Attacked]) -> None:
    here = attacked(byte_tags=True)
    client = here.open(authenticate="bytes")
    for blocks in (1, 7):
        prefix: Prefix = fresh_prefix(blocks)
        assert client.put(prefix, payloads_of(prefix)).complete
        with client.get(prefix) as found:
            assert len(found) == blocks
            assert_right(found, prefix)
    assert {frame.kind for frame in here.middle.frames} == {MESSAGE, READ, DATA, WRITE, WRITTEN}


class Noise:
    """Changes one bit of one frame in so many, wherever it is: head, body, tag, or bytes."""

    def __init__(self, seed: int, one_in: int) -> None:
        self._dice = random.Random(seed)
        self._one_in = one_in
        self._lock = threading.Lock()
        self.count = 0

    def __call__(self, frame: Frame) -> Sequence[bytes]:
        with self._lock:
            # Not in lengths: each wait for bytes that never come would take a whole deadline.
            if self._dice.randrange(self._one_in):
                return [frame.whole]
            self.count += 1
            return [flipped(frame.whole, self._dice.randrange(4, len(frame.whole)))]


@pytest.mark.slow
@needs_cryptography
def test_whatever_byte_is_changed_none_is_served_that_was_not_put(
    attacked: Callable[..., Attacked],
) -> None:
    """With tags of bytes and no checksum verified; changes in the greeting included."""
    here, noise = attacked(byte_tags=True), Noise(4, 12)
    kept = fresh_prefix(4)
    here.put_inside(kept)
    here.middle.change = noise
    served = 0
    for _ in range(100):
        mine = fresh_prefix(1)
        with (
            contextlib.suppress(TiffinError),
            contextlib.closing(here.open("off", authenticate="bytes")) as client,
        ):
            for _ in range(2):
                with client.get(kept, timeout_s=2.0) as blocks:
                    assert_right(blocks, kept)
                    served += len(blocks)
            client.put(mine, payloads_of(mine), timeout_s=1.0)
        with Client.attach(here.node) as inside, inside.get(mine, verify="off") as blocks:
            assert_right(blocks, mine)
    assert noise.count > 20
    assert served
    assert here.has(kept) == 4
    here.node.check()


# -- TLS -------------------------------------------------------------------------------------------


def with_certificate(ours: Authority) -> dict[str, Any]:
    crt, key = ours.certificate("node")
    return {"tls_cert": crt, "tls_key": key}


def test_a_relay_that_passes_tls_on_gains_nothing(
    attacked: Callable[..., Attacked], ours: Authority
) -> None:
    here = attacked(known=False, opaque=True, credentials=with_certificate(ours))
    with pytest.raises(NotAuthenticated, match="--advertise"):
        here.open(tls_ca=ours.ca)


def test_a_relay_that_ends_tls_is_refused_by_its_certificate(
    attacked: Callable[..., Attacked], ours: Authority, theirs: Authority
) -> None:
    """A certificate of another CA is refused at once. One of the same CA (stolen from another
    service) is refused because the node's proof covers the node's own certificate."""
    for authority, said in (theirs, "certificates"), (ours, "another end of TLS"):
        crt, key = authority.certificate("relay")
        front, back = server_tls(crt, key), client_tls(ours.ca)
        here = attacked(front=front, back=back, credentials=with_certificate(ours))
        with pytest.raises(NotAuthenticated, match=said):
            here.open(tls_ca=ours.ca)


@needs_cryptography
def test_tls_and_a_token_go_together(attacked: Callable[..., Attacked], ours: Authority) -> None:
    here = attacked(opaque=True, credentials=with_certificate(ours))
    client = here.open(tls_ca=ours.ca, authenticate="bytes")
    prefix = fresh_prefix(3)
    assert client.put(prefix, payloads_of(prefix)).complete
    with client.get(prefix) as blocks:
        assert len(blocks) == 3
        assert_right(blocks, prefix)
