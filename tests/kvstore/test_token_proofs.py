"""The proofs of the token, byte for byte, by docs/security.md, without Tiffin's code."""

from __future__ import annotations

import hashlib
import hmac

import pytest

from tiffin.kvstore.credentials import Credentials, format_address, format_socket
from tiffin.kvstore.errors import InvalidInput
from tiffin.kvstore.token_proofs import Greeting, is_stamped, joined, stamp

TOKEN = b"0123456789abcdef0123456789abcdef"
BINDING = bytes(range(32))
CHALLENGE, HELLO, WELCOME = b"challenge", b"hello", b"welcome"


def by_hand(key: bytes, *parts: bytes) -> bytes:
    text = b"".join(len(part).to_bytes(4, "little") + part for part in parts)
    return hmac.new(key, text, hashlib.sha256).digest()


def test_a_greeting_by_hand() -> None:
    greeting = Greeting(TOKEN, BINDING, CHALLENGE, HELLO)
    root = by_hand(TOKEN, b"tiffin 2", b"greeting", BINDING, CHALLENGE, HELLO)
    assert greeting.client_proof() == by_hand(root, b"client")
    assert greeting.node_proof(WELCOME) == by_hand(root, b"node", WELCOME)
    assert greeting.keys(WELCOME) == (
        by_hand(root, b"to the node", WELCOME),
        by_hand(root, b"to the client", WELCOME),
    )


def test_vectors() -> None:
    greeting = Greeting(TOKEN, b"", CHALLENGE, HELLO)
    found = [greeting.client_proof(), greeting.node_proof(WELCOME), *greeting.keys(WELCOME)]
    assert [value.hex() for value in found] == [
        "fa506cec2dd5d6c33cf1cfa6e4a7c821f3ff776575c562d9284a51ed181233d3",
        "2cd29f73bdbf4b3f2f92a1775ef84d600906a2b6f6a8109d367481704d13a876",
        "eaeb257c5f3cd5c0e1b6278ab052fff3810b24ba2588f86496c332298f3f11ad",
        "0a1633b0a94deb914e14fcceac2da4d94eec66b4af376a7dd8de6a5cf4b00d7d",
    ]
    assert (
        stamp(TOKEN, "node record", "acme", b"body").hex()
        == "2dca4d2947ff4b411625d7a82b81839fb412a3d7fc6af50f3d2288db4dc0f922"
    )


def test_every_part_counts() -> None:
    parts = [TOKEN, BINDING, CHALLENGE, HELLO]
    proofs = {Greeting(*parts).client_proof()}
    for place in range(4):
        changed = [part + b"x" * (index == place) for index, part in enumerate(parts)]
        proofs.add(Greeting(*changed).client_proof())
    moved = Greeting(TOKEN, BINDING, CHALLENGE + HELLO[:1], HELLO[1:])
    assert len({*proofs, moved.client_proof()}) == 6
    greeting = Greeting(*parts)
    values = {greeting.client_proof(), greeting.node_proof(b""), *greeting.keys(b"")}
    assert len(values | {greeting.node_proof(b"x"), *greeting.keys(b"x")}) == 7


def test_parts_are_joined_as_no_others_are() -> None:
    assert joined(b"ab", b"c") != joined(b"a", b"bc")
    assert joined(b"", b"a") != joined(b"a", b"")
    assert joined() == b""


def test_a_stamp_is_for_one_thing_in_one_pool() -> None:
    made = stamp(TOKEN, "node record", "acme", b"body")
    assert is_stamped(TOKEN, "node record", "acme", b"body", made)
    for other in (
        (TOKEN + b"x", "node record", "acme", b"body"),
        (TOKEN, "conductor state", "acme", b"body"),
        (TOKEN, "node record", "acme2", b"body"),
        (TOKEN, "node record", "acme", b"body2"),
    ):
        assert not is_stamped(*other, made)
    assert not is_stamped(TOKEN, "node record", "acme", b"body", b"")


@pytest.mark.parametrize(
    ("address", "written"),
    [
        (("10.0.0.5", 7700), "10.0.0.5:7700"),
        (("::ffff:10.0.0.5", 7700), "10.0.0.5:7700"),
        (("fe80::1%eth0", 1), "[fe80::1]:1"),
        (("0:0:0:0:0:0:0:1", 2), "[::1]:2"),
    ],
)
def test_one_address_is_written_in_one_way(address: tuple[str, int], written: str) -> None:
    assert format_socket(address) == written
    assert format_address(("::1", 7)) == "[::1]:7"
    assert format_address(("node", 7)) == "node:7"


def test_tags_of_bytes_take_a_token() -> None:
    with pytest.raises(InvalidInput, match="token_file"):
        Credentials(of_bytes=True)
