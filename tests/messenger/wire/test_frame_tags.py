"""Tags of frames: their bytes, and that each is valid in one place only."""

from __future__ import annotations

import hashlib
import struct

import pytest

from tiffin.messenger.errors import SealError
from tiffin.messenger.wire.frame_tags import TAG_BYTES, BytesTag, Seal, can_tag_bytes

KEY = bytes(range(32))
needs_cryptography = pytest.mark.skipif(not can_tag_bytes(), reason="needs cryptography")
HEAD, BODY = b"\x06\x00\x00\x00\x01", b"lease"


def test_the_tag_of_a_frame() -> None:
    """The tag by docs/wire.md, without Tiffin's code."""
    seal = Seal(KEY)
    for number in range(3):
        text = struct.pack("<Q", number) + HEAD + BODY
        expected = hashlib.blake2b(text, key=KEY, digest_size=16).digest()
        assert seal.tag(HEAD, BODY) == expected


@needs_cryptography
@pytest.mark.parametrize("cut", [0, 3, 300_000, 600_000])
def test_the_tag_of_raw_bytes(cut: int) -> None:
    """It is the same however the bytes are split: each end has different arrays."""
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    raw = memoryview(bytes(range(256)) * 4096)[: 2 * cut + 6]
    seal = Seal(KEY)
    seal.tag(HEAD)
    shown = seal.of_bytes()
    shown.update([raw[:cut], raw[cut : 2 * cut]])
    shown.update([raw[2 * cut :]])
    key = hashlib.blake2b(b"bytes", key=KEY, digest_size=32).digest()
    assert shown.tag() == AESGCM(key).encrypt((1).to_bytes(12, "little"), b"", bytes(raw))
    assert seal.tag(HEAD) == Seal.tag(_at(2), HEAD)


@needs_cryptography
def test_a_tag_of_raw_bytes_is_good_in_its_place() -> None:
    def shown(number: int, raw: bytes) -> BytesTag:
        tag = _at(number).of_bytes()
        tag.update([memoryview(raw)])
        return tag

    right = shown(1, b"bytes").tag()
    shown(1, b"bytes").check(right)
    for other in (shown(2, b"bytes"), shown(1, b"bytez"), shown(1, b"")):
        with pytest.raises(SealError):
            other.check(right)


def _at(number: int) -> Seal:
    seal = Seal(KEY)
    for _ in range(number):
        seal.tag(b"")
    return seal


def test_a_vector() -> None:
    assert Seal(KEY).tag(HEAD, BODY).hex() == "7d97ca6b615ebef0ed182034318a69d5"


def test_a_tag_is_good_once_and_in_its_place() -> None:
    sender, receiver = Seal(KEY), Seal(KEY)
    first, second = sender.tag(HEAD, BODY), sender.tag(HEAD, BODY)
    assert first != second
    receiver.check(first, HEAD, BODY)
    for wrong in (first, bytes(TAG_BYTES), b"", Seal(bytes(32)).tag(HEAD, BODY)):
        with pytest.raises(SealError, match="TLS"):
            _at(1).check(wrong, HEAD, BODY)
    receiver.check(second, HEAD, BODY)
    with pytest.raises(SealError):
        _at(1).check(second, HEAD, BODY + b"x")
